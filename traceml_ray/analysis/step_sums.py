"""Sums over steps, in arrays: of single steps, or of some steps in a row each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from traceml_ray.analysis.window import Int64
from traceml_ray.stages import N_STAGES, SEGMENT_BITS

MAX_BINS = 300
Array = np.ndarray[Any, Any]
IDLE, UNREAD = slice(0, 2), slice(2, 4)
"""Columns of `StepSums.device`."""


class Columns(NamedTuple):
    """
    C columns, each of one step or of some steps in a row: their numbers `first` and `last`, `busy` (R, C)
    and `values` (R, C, the same or of one stage): mean ms of a rank, `exposed` (C, 6): mean ms of a step,
    `waiting` (C,): the share of all ranks' time in which they waited.
    """

    first: Int64
    last: Int64
    busy: Array
    values: Array
    exposed: Array
    waiting: Array


_BY_RANK = "busy", "d", "count"
_BY_STEP = "first", "last", "exposed", "chained", "steps", "warm", "rows"
# How columns are put together; what is not here is added up.
_OF_STEPS: dict[str, np.ufunc] = {"first": np.minimum, "last": np.maximum}
_OF_A_STEP = _OF_STEPS | dict.fromkeys(("steps", "chained", "warm"), np.minimum) | {"count": np.maximum}


class StepSums:
    """
    Sums over steps, `end` columns: `busy` (R, n), `d` (R, n, 6) ms, `count` (R, n) steps of each rank; of the
    steps `first` and `last` (n,), `exposed` (n, 6) ms, how many they are (`steps`), have exposed time
    (`chained`) and are beyond the warm-up (`warm`), and `rows` that each rank has of them. It may grow to
    `most` columns. `device` (R, n, 4): how long the rank's device waited for its host, and of how much of its
    time that is known, ms; how many steps before this column the device's clock was not read in, and how long
    these took on the host, ms (see `UNREAD`). None where no rank has a device clock.
    """

    def __init__(self, ranks: int, size: int = 0, *, most: int = 0, many: bool = False) -> None:
        self.most = max(size, most)
        self.busy, self.d = np.zeros((ranks, size), np.float32), np.zeros((ranks, size, N_STAGES), np.float32)
        self.count = np.zeros((ranks, size), np.uint32 if many else np.uint8)
        self.exposed, self.chained = np.zeros((size, N_STAGES)), np.zeros(size, np.int64)
        self.first, self.last = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.steps, self.warm = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.rows = np.zeros(size, np.int64)
        self.device: Array | None = None
        self.end = 0

    @property
    def _by_rank(self) -> tuple[str, ...]:
        return _BY_RANK if self.device is None else (*_BY_RANK, "device")

    def have_device(self) -> Array:
        """Return `device`; allocate it if there is none."""
        if self.device is None:
            self.device = np.zeros((*self.busy.shape, 4), np.float32)
        return self.device

    def unread(self) -> Array:
        """
        Return the number of steps in which the device clock was not read, and how long they took on the host
        (R, end, 2), in ms.
        """
        if self.device is None:
            return np.zeros((len(self.busy), self.end, 2), np.float32)
        return self.device[:, : self.end, UNREAD]

    def like(self, other: StepSums) -> None:
        """Allocate `device` in both stores if either has it."""
        if self.device is not None or other.device is not None:
            self.have_device()
            other.have_device()

    def columns(self) -> dict[str, Array]:
        """Return every array with its columns first; views."""
        by_rank = {name: getattr(self, name).swapaxes(0, 1) for name in self._by_rank}
        return by_rank | {name: getattr(self, name) for name in _BY_STEP}

    def drop(self, n: int) -> None:
        """Forget the first `n` columns."""
        keep = self.end - n
        for column in self.columns().values():
            column[:keep] = column[n : self.end].copy()
            column[keep:] = 0
        self.end = keep

    def cut(self, end: int) -> None:
        """Forget the columns from `end` on."""
        for column in self.columns().values():
            column[end : self.end] = 0
        self.end = end

    def merged(self) -> StepSums:
        """Return these sums with one column per step. A step has one row for each of its exchanges."""
        starts = np.flatnonzero(np.diff(self.first[: self.end], prepend=-1))
        if len(starts) == self.end:
            return self
        made = StepSums(len(self.busy))
        made.like(self)
        made.put(0, {name: column[: self.end] for name, column in self.columns().items()}, starts, _OF_A_STEP)
        return made

    def go_on(self, other: StepSums) -> None:
        """Add the first column of `other` to the last column: it is the beginning of the same step."""
        self.like(other)
        last_column, others = self.end - 1, other.columns()
        for name, mine in self.columns().items():
            mine[last_column] = _OF_A_STEP.get(name, np.add)(mine[last_column], others[name][0])

    def extend(self, other: StepSums, part: slice) -> None:
        """Append the columns `part` of `other`."""
        self.like(other)
        begin, others = self.end, other.columns()
        self.grow(begin + part.stop - part.start)
        for name, mine in self.columns().items():
            mine[begin : self.end] = others[name][part]

    def put(
        self, begin: int, columns: Mapping[str, Array], starts: Int64, how: Mapping[str, np.ufunc]
    ) -> None:
        """Replace the columns from `begin` on by sums over `columns`, split at `starts`."""
        self.cut(begin)
        self.grow(begin + len(starts))
        for name, mine in self.columns().items():
            ufunc, new = how.get(name, np.add), mine[begin : self.end]
            ufunc.reduceat(columns[name], starts, axis=0, dtype=mine.dtype, out=new)

    def grow(self, end: int) -> None:
        """Extend the store to `end` columns."""
        if end > len(self.steps):
            self.resize(len(self.busy), max(end, min(self.most, 2 * end)))
        self.end = end

    def resize(self, ranks: int, size: int, places: Any = slice(None)) -> None:
        """Make room for `ranks` ranks and `size` columns. The existing ranks move to `places`."""
        end = min(self.end, size)
        for name in _BY_STEP:
            before = getattr(self, name)
            setattr(self, name, np.zeros((size, *before.shape[1:]), before.dtype))
            getattr(self, name)[:end] = before[:end]
        for name in self._by_rank:
            before = getattr(self, name)
            setattr(self, name, np.zeros((ranks, size, *before.shape[2:]), before.dtype))
            getattr(self, name)[places, :end] = before[:, :end]


class Block(StepSums):
    """Sums that are being computed, one column for each of `keys`."""

    def __init__(self, keys: Int64, ranks: int) -> None:
        super().__init__(ranks, len(keys))
        self.keys, self.end = keys, len(keys)
        self.first[:] = self.last[:] = keys >> SEGMENT_BITS
        self.steps[:] = self.rows[:] = 1


class Bins(StepSums):
    """At most `most` columns, each the sum of `width` steps. The last one may have fewer."""

    def __init__(self, ranks: int, most: int = MAX_BINS) -> None:
        super().__init__(ranks, most=most, many=True)
        self.width = 1

    def downsample(self, other: StepSums, n: int) -> None:
        """Add the first `n` columns of `other`, one step each; if there is no room, bins become wider."""
        self.like(other)
        steps, begin, others = int(self.steps[: self.end].sum()) + n, max(0, self.end - 1), other.columns()
        while steps > self.width * self.most:
            self.width, begin = 2 * self.width, 0
        both = {
            name: np.concatenate([mine[begin : self.end], others[name][:n]])
            for name, mine in self.columns().items()
        }
        before = np.cumsum(both["steps"]) - both["steps"]
        starts = np.flatnonzero(np.diff(before // self.width, prepend=-1))
        self.put(begin, both, starts, _OF_STEPS)

    def narrower(self, size: int) -> None:
        """Limit the store to `size` columns."""
        self.most = size
        self.downsample(self, 0)
        self.resize(len(self.busy), self.end)


def grouped(store: StepSums, part: slice, per: int, stage: int | None) -> tuple[Array, ...]:
    """Return the `Columns` of a part of `store`, with `per` of its columns in each."""
    count, chained = store.count[:, part], store.chained[part]
    busy, exposed = store.busy[:, part], store.exposed[part]
    values = busy if stage is None else store.d[:, part, stage]
    took = np.einsum("rcs->c", store.d[:, part], dtype=float)
    worked = busy.sum(axis=0, dtype=float)
    first, last = store.first[part], store.last[part]
    if per > 1:
        starts = np.arange(0, part.stop - part.start, per)
        count = np.add.reduceat(count, starts, axis=1, dtype=np.uint32)
        busy, values = (np.add.reduceat(sums, starts, axis=1) for sums in (busy, values))
        chained, exposed = np.add.reduceat(chained, starts), np.add.reduceat(exposed, starts, axis=0)
        took, worked = np.add.reduceat(took, starts), np.add.reduceat(worked, starts)
        first, last = first[starts], last[np.minimum(starts + per, len(last)) - 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = [np.where(count > 0, sums / count, np.nan) for sums in (busy, values)]
        step = np.where(chained[:, None] > 0, exposed / chained[:, None], np.nan)
        waiting = np.where(took > 0, 1 - worked / took, np.nan)
    return first.copy(), last.copy(), *mean, step, waiting


def stages_in(store: StepSums, part: slice, per: int) -> tuple[Int64, Int64, Array]:
    """
    Return first and last step (C,) and mean stages (R, C, 6), in ms, of a part of `store`, with `per` columns
    in each.
    """
    starts = np.arange(0, part.stop - part.start, per)
    count = np.add.reduceat(store.count[:, part], starts, axis=1, dtype=np.uint32)[..., None]
    d = np.add.reduceat(store.d[:, part], starts, axis=1)
    first, last = store.first[part], store.last[part]
    mean = np.where(count > 0, d / np.maximum(count, 1), np.nan)
    return first[starts], last[np.minimum(starts + per, len(last)) - 1], mean
