"""Sums over steps, in arrays: of single steps, or of some steps in a row each."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from traceml_ray.analysis.window import Int64
from traceml_ray.stages import N_STAGES, SEGMENT_BITS

MAX_BINS = 300
Array = np.ndarray[Any, Any]


class Columns(NamedTuple):
    """
    C columns, each of one step or of some steps in a row: their numbers `first` and `last`, `busy` (R, C)
    and `values` (R, C, the same or of one stage): mean ms of a rank, `exposed` (C, 6): mean ms of a step.
    """

    first: Int64
    last: Int64
    busy: Array
    values: Array
    exposed: Array


_BY_RANK = "busy", "d", "count"
_BY_STEP = "first", "last", "exposed", "chained", "steps", "warm", "rows"


class StepSums:
    """
    Sums over steps, `end` columns: `busy` (R, n), `d` (R, n, 6) ms, `count` (R, n) steps of each rank; of the
    steps `first` and `last` (n,), `exposed` (n, 6) ms, how many they are (`steps`), have exposed time
    (`chained`) and are beyond the warm-up (`warm`), and `rows` that each rank has of them. It may grow to
    `most` columns. `idle` (R, n, 2): how long the rank's device waited for its host, and of how much of its
    time that is known, ms; None where no rank has a device clock.
    """

    def __init__(self, ranks: int, size: int = 0, *, most: int = 0, many: bool = False) -> None:
        self.most = max(size, most)
        self.busy, self.d = np.zeros((ranks, size), np.float32), np.zeros((ranks, size, N_STAGES), np.float32)
        self.count = np.zeros((ranks, size), np.uint32 if many else np.uint8)
        self.exposed, self.chained = np.zeros((size, N_STAGES)), np.zeros(size, np.int64)
        self.first, self.last = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.steps, self.warm = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.rows = np.zeros(size, np.int64)
        self.idle: Array | None = None
        self.end = 0

    @property
    def _by_rank(self) -> tuple[str, ...]:
        return _BY_RANK if self.idle is None else (*_BY_RANK, "idle")

    def by_rank(self) -> list[Array]:
        return [getattr(self, name) for name in self._by_rank]

    def have_idle(self) -> Array:
        """Return `idle`, made where there is none."""
        if self.idle is None:
            self.idle = np.zeros((*self.busy.shape, 2), np.float32)
        return self.idle

    def like(self, other: StepSums) -> None:
        """Have `idle` both or none."""
        if self.idle is not None or other.idle is not None:
            self.have_idle()
            other.have_idle()

    def by_step(self) -> list[Array]:
        return [getattr(self, name) for name in _BY_STEP]

    def sums(self) -> list[Array]:
        return self.by_step()[2:]

    def wider(self, places: Array, ranks: int) -> None:
        """Make room for more ranks; those that are there move to `places`."""
        for name in self._by_rank:
            before = getattr(self, name)
            after = np.zeros((ranks, *before.shape[1:]), before.dtype)
            after[places] = before
            setattr(self, name, after)

    def add(self, at: int, of: StepSums, part: slice) -> None:
        """Add some columns of another one, summed, to column `at`."""
        self.like(of)
        for mine, other in zip(self.by_rank(), of.by_rank(), strict=True):
            mine[:, at] += other[:, part].sum(axis=1, dtype=mine.dtype)
        self.first[at] = of.first[part][0] if not self.steps[at] else self.first[at]
        self.last[at] = of.last[part][-1]
        for mine, other in zip(self.sums(), of.sums(), strict=True):
            mine[at] += other[part].sum(axis=0)

    def drop(self, n: int) -> None:
        """Forget the first `n` columns."""
        keep = self.end - n
        for column in self.by_rank():
            column[:, :keep] = column[:, n : self.end].copy()
            column[:, keep:] = 0
        for column in self.by_step():
            column[:keep] = column[n : self.end].copy()
            column[keep:] = 0
        self.end = keep

    def merged(self) -> StepSums:
        """Return it with one column for each step: a step has a row for each of its exchanges."""
        starts = np.flatnonzero(np.diff(self.first[: self.end], prepend=-1))
        if len(starts) == self.end:
            return self
        made = StepSums(len(self.busy), len(starts))
        made.end = len(starts)
        made.busy[:], made.d[:] = (
            np.add.reduceat(each[:, : self.end], starts, axis=1) for each in (self.busy, self.d)
        )
        if self.idle is not None:
            made.have_idle()[:] = np.add.reduceat(self.idle[:, : self.end], starts, axis=1)
        made.count[:] = np.maximum.reduceat(self.count[:, : self.end], starts, axis=1)
        made.exposed[:] = np.add.reduceat(self.exposed[: self.end], starts, axis=0)
        made.chained[:] = np.minimum.reduceat(self.chained[: self.end], starts)
        made.warm[:] = np.minimum.reduceat(self.warm[: self.end], starts)
        made.rows[:] = np.add.reduceat(self.rows[: self.end], starts)
        made.first[:], made.last[:], made.steps[:] = self.first[starts], self.last[starts], 1
        return made

    def go_on(self, of: StepSums) -> None:
        """Add the first column of another one to the last, which is the beginning of the same step."""
        at = self.end - 1
        self.like(of)
        if self.idle is not None and of.idle is not None:
            self.idle[:, at] += of.idle[:, 0]
        self.busy[:, at] += of.busy[:, 0]
        self.d[:, at] += of.d[:, 0]
        self.count[:, at] |= of.count[:, 0]
        self.exposed[at] += of.exposed[0]
        self.chained[at] &= of.chained[0]
        self.warm[at] &= of.warm[0]
        self.rows[at] += of.rows[0]

    def extend(self, of: StepSums, part: slice) -> None:
        """Add some columns of another one at the end."""
        new = slice(self.end, self.end + part.stop - part.start)
        self.grow(new.stop)
        self.like(of)
        for mine, other in zip(self.by_rank(), of.by_rank(), strict=True):
            mine[:, new] = other[:, part]
        for mine, other in zip(self.by_step(), of.by_step(), strict=True):
            mine[new] = other[part]
        self.end = new.stop

    def resize(self, size: int) -> None:
        """Have room for so many columns, the first."""
        for name in self._by_rank:
            before = getattr(self, name)
            setattr(self, name, np.zeros((len(before), size, *before.shape[2:]), before.dtype))
            getattr(self, name)[:, : self.end] = before[:, : self.end]
        for name in _BY_STEP:
            before = getattr(self, name)
            setattr(self, name, np.zeros((size, *before.shape[1:]), before.dtype))
            getattr(self, name)[: self.end] = before[: self.end]

    def grow(self, end: int) -> None:
        """Have room for so many columns, at least."""
        if end > len(self.steps):
            self.resize(max(end, min(self.most, 2 * end)))

    def cut(self, end: int) -> None:
        """Forget the columns from `end` on."""
        for column in self.by_rank():
            column[:, end : self.end] = 0
        for column in self.by_step():
            column[end : self.end] = 0
        self.end = end


class Block(StepSums):
    """A column for each of `keys`: what is being reduced."""

    def __init__(self, keys: Int64, ranks: int) -> None:
        super().__init__(ranks, len(keys))
        self.keys, self.end = keys, len(keys)
        self.first[:] = self.last[:] = keys >> SEGMENT_BITS
        self.steps[:] = self.rows[:] = 1


class Bins(StepSums):
    """At most `most` columns of `width` steps each, the last of which may not be full."""

    def __init__(self, ranks: int, most: int = MAX_BINS) -> None:
        super().__init__(ranks, most=most, many=True)
        self.width = 1

    def fold(self, of: StepSums, n: int) -> None:
        """Add the first `n` columns of `of`, of one step each."""
        done = 0
        while done < n:
            room = self.width - int(self.steps[self.end - 1]) if self.end else 0
            if room > 0:
                self.add(self.end - 1, of, slice(done, min(n, done + room)))
                done += room
            elif self.end >= self.most:
                self._halve()
            else:
                bins = min(-(-(n - done) // self.width), self.most - self.end)
                self._add_bins(of, np.arange(done, min(n, done + bins * self.width)))
                done += bins * self.width

    def _add_bins(self, of: StepSums, columns: Int64) -> None:
        """Add bins of some columns of `of` that follow one another."""
        at, end = columns[:: self.width], int(columns[-1]) + 1
        new = slice(self.end, self.end + len(at))
        self.grow(new.stop)
        self.like(of)
        self.first[new], self.last[new] = of.first[at], of.last[np.minimum(at + self.width, end) - 1]
        for mine, other in zip(self.by_rank(), of.by_rank(), strict=True):
            mine[:, new] = np.add.reduceat(other[:, :end], at, axis=1, dtype=mine.dtype)
        for mine, other in zip(self.sums(), of.sums(), strict=True):
            mine[new] = np.add.reduceat(other[:end], at, axis=0)
        self.end = new.stop

    def narrower(self, size: int) -> None:
        """Have no more than `size` columns."""
        while self.end > size:
            self._halve()
        self.most = size
        self.resize(self.end)

    def _halve(self) -> None:
        self.width *= 2
        at = np.arange(0, self.end, 2)
        half = len(at)
        self.first[:half], self.last[:half] = self.first[at], self.last[np.minimum(at + 1, self.end - 1)]
        for column in self.by_rank():
            column[:, :half] = np.add.reduceat(column[:, : self.end], at, axis=1)
        for column in self.sums():
            column[:half] = np.add.reduceat(column[: self.end], at, axis=0)
        self.cut(half)


def grouped(store: StepSums, part: slice, per: int, stage: int | None) -> tuple[Array, ...]:
    """Return the `Columns` of some columns of `store`, `per` of them in one."""
    count, chained = store.count[:, part], store.chained[part]
    busy, exposed = store.busy[:, part], store.exposed[part]
    values = busy if stage is None else store.d[:, part, stage]
    first, last = store.first[part], store.last[part]
    if per > 1:
        at = np.arange(0, part.stop - part.start, per)
        count = np.add.reduceat(count, at, axis=1, dtype=np.uint32)
        busy, values = (np.add.reduceat(each, at, axis=1) for each in (busy, values))
        chained, exposed = np.add.reduceat(chained, at), np.add.reduceat(exposed, at, axis=0)
        first, last = first[at], last[np.minimum(at + per, len(last)) - 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = [np.where(count > 0, each / count, np.nan) for each in (busy, values)]
        step = np.where(chained[:, None] > 0, exposed / chained[:, None], np.nan)
    return first.copy(), last.copy(), *mean, step
