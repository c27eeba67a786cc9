"""
Which optimizer steps are one iteration of the training loop, and so one step of a row's key.

Where a script takes batches from a loader, an iteration begins with a batch. An optimizer that steps without
a new one, and has not stepped since the iteration began, goes on with it: the generator after the
discriminator, the actor after the critic. One that steps again without a new batch begins another iteration,
unless that is how the loop began: several steps on each batch. Without a loader each optimizer step is one.

All of this follows from the order of calls, which is the same on all ranks, and never from time. It is
settled in the first iterations, so that what one rank does alone later (an evaluation) changes nothing.
"""

from __future__ import annotations

MOST_STEPS = 8
"""Optimizer steps of one iteration at most."""
_FED_WITHIN = 8
"""Optimizer steps within which a script has taken a batch from a loader, if it takes any."""
_LEARNED_FROM, _TWICE = 16, 2
"""Batches from which it is learned how often optimizers step on one, and how many of them must show it."""


class Iterations:
    """Of one process, under the lock of the log. Optimizers are told apart by a number."""

    __slots__ = (
        *("_batches", "_fed", "_learned", "_on_batch", "_repeated", "_since_start", "_stepped"),
        *("_steps", "_usual", "has_batch"),
    )

    def __init__(self) -> None:
        self._since_start = 0
        """Optimizer steps so far, counted up to `_FED_WITHIN`."""
        self._fed = False
        """The script takes batches from a loader."""
        self._batches = self._repeated = self._learned = 0
        """Batches that are over; those with several optimizer steps; the most of these."""
        self._usual = 1
        """Optimizer steps of the iteration before."""
        self.forget()

    def forget(self) -> None:
        """Forget the open iteration; the next row begins one."""
        self.has_batch = False
        """A batch was taken for the open row."""
        self._on_batch = self._steps = 0
        """Optimizer steps since the newest batch, and of this iteration."""
        self._stepped: set[int] = set()
        """The optimizers of this iteration."""

    def goes_on(self, optimizer: int) -> bool:
        """Return whether the row that a step of `optimizer` closes belongs to the iteration before it."""
        if self.has_batch or not self._fed or not 0 < self._steps < MOST_STEPS:
            return False
        return optimizer not in self._stepped or (self._repeated >= _TWICE and self._on_batch < self._learned)

    def may_go_on(self) -> bool:
        """Return whether the open row may, where its optimizer has yet to step: of the first batch."""
        return self._fed and not self.has_batch and not self._batches and 0 < self._steps < MOST_STEPS

    def closed(self, optimizer: int, goes_on: bool) -> bool:
        """Note that a row is closed; return whether another one of this iteration is expected."""
        if self._since_start < _FED_WITHIN:
            self._since_start += 1
            self._fed = self._fed or self.has_batch
        if self.has_batch:
            self._learn()
            self._on_batch = 0
        if not goes_on:
            self._usual = max(1, self._steps)
            self._steps = 0
            self._stepped.clear()
        self._on_batch += 1
        self._steps += 1
        self._stepped.add(optimizer)
        self.has_batch = False
        return self._fed and self._steps < self._usual

    def _learn(self) -> None:
        """Note how many optimizer steps the batch that is over had."""
        if self._on_batch and self._batches < _LEARNED_FROM:
            self._batches += 1
            if 1 < self._on_batch <= MOST_STEPS:
                self._repeated += 1
                self._learned = max(self._learned, self._on_batch)
