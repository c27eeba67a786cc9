"""Which waits for data feed training: the loaders waited for on the way to a backward."""

from __future__ import annotations

from traceml_ray.stages import FORWARD, POST_SYNC, PREPARE


class DataWaits:
    """The wait for data that is open, and the loaders waited for since the last backward."""

    __slots__ = (
        *("before", "collated", "depth", "exhausted", "loader"),
        *("named", "resume", "training", "waited", "workers"),
    )

    def __init__(self) -> None:
        self.named = (0, 0)
        """(loader, its workers) of the next wait, where that is not the loader of the wait before."""
        self.training: set[int] = set()
        """The loaders (by id) that feed training."""
        self.waited: set[int] = set()
        """Those waited for since the last backward."""
        self.forget()

    def forget(self) -> None:
        """Forget the open row."""
        self.depth = 0
        """Loaders inside each other that are waited for."""
        self.loader = self.workers = 0
        """The loader waited for last."""
        self.collated = 0
        """When the samples of the batch were there, where that is known."""
        self.before = self.resume = POST_SYNC
        """The stage that the wait has interrupted, and the one that follows it."""
        self.waited.clear()
        self.exhausted = False
        """A loader that feeds training had no more, since the last backward."""

    def begin(self) -> bool:
        """Begin a wait; False for a loader inside a loader."""
        self.depth += 1
        if self.depth > 1:
            return False
        self.loader, self.workers = self.named
        self.collated = 0
        return True

    def interrupt(self, stage: int) -> None:
        """Note the stage in which the wait begins."""
        self.before = stage
        self.resume = FORWARD if stage == FORWARD else PREPARE

    def end(self) -> bool:
        """End a wait; False for a loader inside a loader."""
        outermost = self.depth == 1
        self.depth = max(0, self.depth - 1)
        return outermost

    def feeds_training(self) -> bool:
        """Return whether the loader waited for last is known to feed training."""
        return self.loader in self.training

    def learn(self) -> None:
        """Take it that the loaders waited for on the way to this backward are those that feed training."""
        if self.waited != self.training:
            self.training = set(self.waited)
        self.waited.clear()
