"""What steps are trained on: samples and tokens of their batches, summed up until they are sent."""

from __future__ import annotations

from typing import NamedTuple

from traceml_ray.agent.batch_size import understood
from traceml_ray.agent.partition import DataWaits
from traceml_ray.agent.size_log import SizeLog


class Counted(NamedTuple):
    """Of `steps` steps from `first` to `last`; None is not known."""

    first: int
    last: int
    steps: int
    batches: int
    samples: int | None
    tokens: int | None


Sizes = tuple[int, int | None, int | None]
"""Batches, their samples, and their tokens."""
_NONE: Sizes = 0, 0, 0


class WorkSums:
    """Of one process, under the lock of the log. A batch counts for the backward that it comes before."""

    __slots__ = ("_data", "_declared", "_now", "_step", "_sum", "_waiting", "sizes")

    def __init__(self, data: DataWaits) -> None:
        self._data = data
        self.sizes = SizeLog()
        self._step = 0
        self._now = _NONE
        self._declared: tuple[int | None, int | None] = None, None
        """What the script has said of the open step: samples and tokens."""
        self._sum: Counted | None = None
        self._waiting: dict[int, Sizes] = {}
        """Batches of each loader that no backward has followed yet."""

    def batch(self, size: int) -> None:
        """Note the size of the batch that was waited for last, see `marks.BATCHES`."""
        if not self._data.depth:  # else of a loader inside a loader
            loader = self._data.loader
            self._waiting[loader] = _added(self._waiting.get(loader, _NONE), (1, *understood(size)))

    def commit(self, step: int) -> None:
        """
        Take it that the loaders waited for on the way to this backward feed training, see `DataWaits`: their
        batches are of `step`, and those of others of no training.
        """
        self._data.commit()
        self._go_to(step)
        for loader in self._data.training:
            if (sizes := self._waiting.pop(loader, None)) is not None:
                self._now = _added(self._now, sizes)
        self._waiting.clear()

    def declare(self, step: int, samples: int | None, tokens: int | None) -> None:
        """Add to what `step` is trained on, as the script says."""
        self._go_to(step)
        before = self._declared
        self._declared = _sum_declared(before[0], samples), _sum_declared(before[1], tokens)

    def drain(self, step: int) -> Counted | None:
        """Return the sums of the steps before `step`; None without any."""
        if step > self._step:
            self._go_to(step)
        counted, self._sum = self._sum, None
        return counted

    def _go_to(self, step: int) -> None:
        """Sum up the open step, if another one follows."""
        if step == self._step:
            return
        (batches, samples, tokens), declared, last = self._now, self._declared, self._step
        self._now, self._declared, self._step = _NONE, (None, None), step
        if not batches and declared == (None, None):
            return
        counted = Counted(
            last,
            last,
            1,
            batches,
            declared[0] if declared[0] is not None else samples if batches else None,
            declared[1] if declared[1] is not None else tokens if batches else None,
        )
        self.sizes.add(last, counted.samples, counted.tokens)
        before = self._sum
        self._sum = counted if before is None else _joined(before, counted)


def _sum_declared(before: int | None, more: int | None) -> int | None:
    return before if more is None else (before or 0) + more


def _plus(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def _added(one: Sizes, other: Sizes) -> Sizes:
    return one[0] + other[0], _plus(one[1], other[1]), _plus(one[2], other[2])


def _joined(one: Counted, other: Counted) -> Counted:
    return Counted(
        one.first,
        other.last,
        one.steps + other.steps,
        one.batches + other.batches,
        _plus(one.samples, other.samples),
        _plus(one.tokens, other.tokens),
    )
