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


class StepSums:
    """Sums over steps: `busy` (R, n), `d` (R, n, 6) ms, `count` (R, n); of the steps `exposed` (n, 6), …"""

    def __init__(self, ranks: int, size: int, many: bool = False) -> None:
        self.busy, self.d = np.zeros((ranks, size), np.float32), np.zeros((ranks, size, N_STAGES), np.float32)
        self.count = np.zeros((ranks, size), np.uint32 if many else np.uint8)
        self.exposed, self.chained = np.zeros((size, N_STAGES)), np.zeros(size, np.int64)
        self.first, self.last = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.steps = np.zeros(size, np.int64)
        self.end = 0

    def by_rank(self) -> tuple[Array, ...]:
        return self.busy, self.d, self.count

    def by_step(self) -> tuple[Array, ...]:
        return self.exposed, self.chained, self.first, self.last, self.steps

    def wider(self, places: Array, ranks: int) -> None:
        """Make room for more ranks; those that are there move to `places`."""
        for name in ("busy", "d", "count"):
            before = getattr(self, name)
            after = np.zeros((ranks, *before.shape[1:]), before.dtype)
            after[places] = before
            setattr(self, name, after)

    def add(self, at: int, of: StepSums, part: slice) -> None:
        """Add some columns of another one, summed, to column `at`."""
        for mine, other in zip(self.by_rank(), of.by_rank(), strict=True):
            mine[:, at] += other[:, part].sum(axis=1, dtype=mine.dtype)
        self.first[at] = of.first[part][0] if not self.steps[at] else self.first[at]
        self.last[at] = of.last[part][-1]
        for mine, other in zip(self.by_step(), of.by_step(), strict=True):
            if mine is not self.first and mine is not self.last:
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
        made.count[:] = np.maximum.reduceat(self.count[:, : self.end], starts, axis=1)
        made.exposed[:] = np.add.reduceat(self.exposed[: self.end], starts, axis=0)
        made.chained[:] = np.minimum.reduceat(self.chained[: self.end], starts)
        made.first[:], made.last[:], made.steps[:] = self.first[starts], self.last[starts], 1
        return made

    def go_on(self, of: StepSums) -> None:
        """Add the first column of another one to the last, which is the beginning of the same step."""
        at = self.end - 1
        self.busy[:, at] += of.busy[:, 0]
        self.d[:, at] += of.d[:, 0]
        self.count[:, at] |= of.count[:, 0]
        self.exposed[at] += of.exposed[0]
        self.chained[at] &= of.chained[0]

    def extend(self, of: StepSums, part: slice) -> None:
        """Add some columns of another one at the end."""
        new = slice(self.end, self.end + part.stop - part.start)
        for mine, other in zip(self.by_rank(), of.by_rank(), strict=True):
            mine[:, new] = other[:, part]
        for mine, other in zip(self.by_step(), of.by_step(), strict=True):
            mine[new] = other[part]
        self.end = new.stop

    def cut(self, end: int) -> None:
        """Forget the columns from `end` on."""
        for column in self.by_rank():
            column[:, end : self.end] = 0
        for column in self.by_step():
            column[end : self.end] = 0
        self.end = end

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in (*self.by_rank(), *self.by_step()))


class Block(StepSums):
    """A column for each of `keys`: what is being reduced."""

    def __init__(self, keys: Int64, ranks: int) -> None:
        super().__init__(ranks, len(keys))
        self.keys, self.end = keys, len(keys)
        self.first[:] = self.last[:] = keys >> SEGMENT_BITS
        self.steps[:] = 1


class Bins(StepSums):
    """At most MAX_BINS columns of `width` steps each, the last of which may not be full."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks, MAX_BINS, many=True)
        self.width = 1

    def fold(self, of: StepSums, n: int) -> None:
        """Add the first `n` columns of `of`, of one step each."""
        done = 0
        while done < n:
            if not self.end or self.steps[self.end - 1] >= self.width:
                if self.end == MAX_BINS:
                    self._halve()
                self.end += 1
            take = min(n - done, self.width - int(self.steps[self.end - 1]))
            self.add(self.end - 1, of, slice(done, done + take))
            done += take

    def _halve(self) -> None:
        self.width *= 2
        half = self.end // 2
        for column in self.by_rank():
            column[:, :half] = column[:, ::2] + column[:, 1::2]
            column[:, half:] = 0
        self.first[:half], self.last[:half] = self.first[::2].copy(), self.last[1::2].copy()
        for column in (self.exposed, self.chained, self.steps):
            column[:half] = column[::2] + column[1::2]
        for column in self.by_step():
            column[half:] = 0
        self.end = half


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
