"""
Statistics of steps for report, web app and metrics. They are exact for the steps that are kept one by one.

Older steps are kept as sums, and as histograms of their times. The first steps of a run (compilation,
warm-up, the start of loaders) are in no statistic; their cost is given separately.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from traceml_ray import text
from traceml_ray.analysis.spread import Values, quantiles
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import Bool, Float, Int64
from traceml_ray.stages import BACKWARD, DATA, N_STAGES, POST_SYNC, SEGMENT_BITS, STAGES, SYNC_WAIT

MAX_BINS = 300
Array = np.ndarray[Any, Any]
IDLE, UNREAD = slice(0, 2), slice(2, 4)
"""Columns of `StepSums.device`."""


class Columns(NamedTuple):
    """
    C columns, each of one step or of consecutive steps. `first` and `last` are step numbers. `busy` (R, C)
    and `values` (R, C; busy time or the time of one stage) are means per rank in ms. `exposed` (C, 6) is the
    mean of a step in ms. `waiting` (C,) is the share of all ranks' time in which they waited.
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
    Sums over steps, in `end` columns. `busy` (R, n), `d` (R, n, 6) in ms; `count` (R, n): number of steps of
    each rank. For the steps `first` to `last` (n,): `exposed` (n, 6) in ms, the number of steps (`steps`), of
    steps with exposed time (`chained`) and beyond the warm-up (`warm`), and of `rows` per rank. It may grow
    to `most` columns. `device` (R, n, 4): time in ms that the rank's device waited for its host, and time in
    ms for which this is known; number of steps before this column in which the device's clock was not read,
    and their time on the host in ms (see `UNREAD`). None if no rank has a device clock.
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
        """Add the first column of `other` to the last column, because it is a part of the same step."""
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


class Timeline(NamedTuple):
    """
    Time of a rank for the steps `first` to `last` (n,) of each entry: `took` (n,) ns. There are no gaps
    between entries.
    """

    first: Int64
    last: Int64
    took: Int64


def of_rows(keys: Int64, rows: Int64) -> Timeline:
    """Return the timeline of rows: `keys` (n,) and `rows` ns (n, 6), in order."""
    steps = keys >> SEGMENT_BITS
    return Timeline(steps, steps, rows.sum(axis=1))


def span(line: Timeline, end_ns: int, from_step: int | None, to_step: int | None) -> tuple[int, int] | None:
    """
    Return when a rank went through the steps `from_step` to `to_step` (ns since the epoch); None if it has
    none of these steps. The newest row had arrived by `end_ns`.

    Steps follow one another without a gap, so the time of each is known from the later ones. Dropped rows,
    and the delivery of the last rows, shift it by their duration. The steps of a sum count as equally long.
    """
    begins, ends = from_step or 0, to_step if to_step is not None else 1 << 62
    inside = np.flatnonzero((line.last >= begins) & (line.first <= ends))
    if not len(inside):
        return None
    until = end_ns - (line.took.sum() - np.cumsum(line.took))
    a, b = (int(place) for place in (inside[0], inside[-1]))
    return (
        int(until[a]) - _share(line, a, int(line.last[a]) + 1 - max(begins, int(line.first[a]))),
        int(until[b]) - _share(line, b, int(line.last[b]) - min(ends, int(line.last[b]))),
    )


def ended(line: Timeline, end_ns: int) -> tuple[Int64, Int64]:
    """
    Return step numbers (n,), and when a rank finished each step, in ns since the epoch
    (n,); see `span`.
    """
    return line.last, end_ns - (line.took.sum() - np.cumsum(line.took))


def _share(line: Timeline, index: int, steps: int) -> int:
    """Return the time of `steps` of the steps that were added up at `index`, in ns."""
    return int(line.took[index]) * steps // (int(line.last[index]) - int(line.first[index]) + 1)


def trained_since(line: Timeline, end_ns: int, warmup: int) -> int:
    """
    Return when a rank had finished its first `warmup` steps (ns since the epoch); `end_ns` if it has not.
    `line` and `end_ns` are as for `span`.
    """
    warm = span(line, end_ns, int(line.first[0]) + warmup, None) if len(line.first) else None
    return end_ns if warm is None else warm[0]


_LEAST_MS = 1e-3
_FINEST = math.log1p(0.01) / 8
"""
Width of the bins for up to `_FINE_RANKS` ranks: a quantile is within 0.125 %; for twice as many ranks within
0.25 %, …
"""
_FINE_RANKS = 64
_WITHIN_1 = 512, 4096
"""Numbers of ranks between which a quantile is within 1 %. Beyond the second one memory matters more."""
_AT_ONCE = 256
"""Number of histograms that are processed at a time."""
UInt32 = npt.NDArray[np.uint32]


class Histograms:
    """
    `count` histograms of durations (ms). The width of bins grows by the factor e^`width`, which is also the
    largest error of a quantile.

    Durations below 1 µs count as 0. The result does not depend on the order or the pieces in which values are
    added.
    """

    def __init__(self, count: int, width: float, longest_ms: float) -> None:
        self.width = width
        bins = 2 + math.ceil(math.log(longest_ms / _LEAST_MS) / width)
        self._counts: UInt32 = np.zeros((count, bins), dtype=np.uint32)

    def add(self, values: Values) -> None:
        """Add `values` (n, count). NaN is ignored."""
        self._add(self._counts, values)

    def quantile(self, share: float, more: Values) -> Float:
        """Return the quantile (0..1) of each histogram and of `more` values (n, count), ms (count,)."""
        quantiles_ms = np.empty(len(self._counts))
        for first in range(0, len(quantiles_ms), _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            counts = self._counts[part].astype(np.int64)
            self._add(counts, more[:, part])
            quantiles_ms[part] = self._place(counts, share)
        return quantiles_ms

    def quantile_of_all(self, share: float, more: Values) -> float:
        """Return the quantile of the values of all histograms together, and of `more` values, ms."""
        counts = self._counts.sum(axis=0, dtype=np.int64)[None]
        self._add(counts, more.reshape(-1, 1))
        return float(self._place(counts, share)[0])

    def wider(self, places: Array, count: int) -> None:
        """Make room for `count` histograms. The existing ones move to `places`."""
        before, self._counts = self._counts, np.zeros((count, self._counts.shape[1]), np.uint32)
        self._counts[places] = before

    def coarser(self) -> None:
        """Double the width of the bins."""
        inner = self._counts[:, 1:]
        inner = np.pad(inner, ((0, 0), (0, inner.shape[1] % 2)))
        pairs = inner.reshape(len(inner), -1, 2).sum(axis=2, dtype=np.uint32)
        self._counts = np.concatenate([self._counts[:, :1], pairs], axis=1)
        self.width *= 2

    def _add(self, counts: Array, values: Values) -> None:
        """Add values (n, m) to `counts` (m, bins)."""
        size, known = counts.shape[1], ~np.isnan(values)
        ms = np.fmax(values, _LEAST_MS, dtype=float)
        bins = (np.log(ms / _LEAST_MS) / self.width).astype(np.int64)
        bins += values >= _LEAST_MS
        np.minimum(bins, size - 1, out=bins)
        bins += np.arange(len(counts)) * size
        np.add.at(counts.reshape(-1), bins.ravel() if known.all() else bins[known], counts.dtype.type(1))

    def _place(self, counts: Int64, share: float) -> Float:
        """Return the quantile of each of some histograms (m, bins), NaN where one is empty."""
        below = np.cumsum(counts, axis=1)
        place = share * np.maximum(below[:, -1] - 1, 0)
        bins = (below > place[:, None]).argmax(axis=1)
        row = np.arange(len(bins))
        before = np.where(bins > 0, below[row, bins - 1], 0)
        inside = np.minimum(1, (place - before + 0.5) / np.maximum(counts[row, bins], 1))
        ms = np.where(bins > 0, _LEAST_MS * np.exp((bins - 1 + inside) * self.width), 0.0)
        return np.where(below[:, -1] > 0, ms, np.nan)


class SummedSteps:
    """
    Sums of steps beyond the warm-up: the number of steps (`steps`), from `first` to `last`, and of `rows` per
    rank. Sums in ms of `exposed` time (6,) and of each rank's stages `d` (R, 6), over `counts` (R,) steps,
    and of `idle` (R, 2), see `StepSums.device`. Histograms of the `step`, the `busy` time of each rank and,
    if requested, its `stages`.
    """

    def __init__(self, ranks: int, limits: Thresholds, *, stages: bool) -> None:
        self.steps = self.rows = self.first = self.last = 0
        self.exposed, self.d, self.counts = np.zeros(N_STAGES), np.zeros((ranks, N_STAGES)), np.zeros(ranks)
        self.idle = np.zeros((ranks, 2))
        sizes = _width(ranks), limits.max_step_ns / 1e6
        self.step, self.busy = Histograms(1, *sizes), Histograms(ranks, *sizes)
        self.stages = Histograms(ranks * N_STAGES, *sizes) if stages else None

    @property
    def error_pct(self) -> float:
        """Largest error of a median, in %."""
        return 100 * math.expm1(self.busy.width)

    def add(self, store: StepSums, part: slice) -> None:
        """Add some columns of `store`, of one step each."""
        columns = part.start + np.flatnonzero(store.warm[part])
        if not len(columns):
            return
        self.first, self.last = (
            self.first if self.steps else int(store.first[columns[0]]),
            int(store.last[columns[-1]]),
        )
        self.steps += len(columns)
        self.rows += int(store.rows[columns].sum())
        self.exposed += store.exposed[columns].sum(axis=0)
        self.d += store.d[:, columns].sum(axis=1, dtype=float)
        self.counts += (store.count[:, columns] > 0).sum(axis=1)
        if store.device is not None:
            self.idle += store.device[:, columns, IDLE].sum(axis=1, dtype=float)
        self.step.add(store.exposed[columns].sum(axis=1)[:, None])
        self.busy.add(busy_of(store, columns))
        if self.stages is not None:
            self.stages.add(stages_of(store, columns))

    def wider(self, places: Array, ranks: int) -> None:
        """Make room for `ranks` ranks. The existing ones move to `places`."""
        for name in ("d", "counts", "idle"):
            before = getattr(self, name)
            setattr(self, name, np.zeros((ranks, *before.shape[1:])))
            getattr(self, name)[places] = before
        self.busy.wider(places, ranks)
        if self.stages is not None:
            stages = places[:, None] * N_STAGES + np.arange(N_STAGES)
            self.stages.wider(stages.ravel(), ranks * N_STAGES)
        for _ in range(round(math.log2(_width(ranks) / self.busy.width))):
            for histograms in filter(None, (self.step, self.busy, self.stages)):
                histograms.coarser()


def busy_of(store: StepSums, columns: Int64) -> Array:
    """Return the busy time in some columns of one step each (n, R), in ms; NaN if a rank has no time."""
    return np.where(store.count[:, columns] > 0, store.busy[:, columns], np.nan).T


def stages_of(store: StepSums, columns: Int64) -> Array:
    """
    Return the stages of all ranks in some columns of one step each (n, R × 6), in ms; NaN if a rank has no
    time.
    """
    d = np.where((store.count[:, columns] > 0)[..., None], store.d[:, columns], np.nan)
    return d.transpose(1, 0, 2).reshape(len(columns), -1)


def _width(ranks: int) -> float:
    low, high = _WITHIN_1
    times = max(1, min(low, ranks) / _FINE_RANKS, low / _FINE_RANKS * ranks / high)
    return _FINEST * float(2 ** math.ceil(math.log2(times)))


class StepStats:
    """
    Statistics of the steps in `columns` (n,) of `store`, and of the steps in `older`. Times are in ms, for R
    ranks; NaN for a rank without any of these steps.
    """

    def __init__(self, store: StepSums, columns: Int64, older: SummedSteps | None) -> None:
        self._store, self._columns = store, columns
        self._older = older if older is not None and older.steps else None
        self.steps = len(columns) + (older.steps if older else 0)
        self.rows = int(store.rows[columns].sum()) + (older.rows if older else 0)
        """Rows per rank. A step has one row for each of its exchanges."""
        sums = store.exposed[columns].sum(axis=0) + (older.exposed if older else 0)
        self.exposed: Float = sums / max(1, self.steps)
        """Mean exposed time of each stage (6,), in ms."""
        ends = [(older.first, older.last)] if self._older and older else []
        ends += [(int(store.first[columns[0]]), int(store.last[columns[-1]]))] if len(columns) else []
        self.between = (ends[0][0], ends[-1][1]) if ends else (0, 0)
        """First and last of these steps."""

    @property
    def error_pct(self) -> float:
        """Largest error of the quantiles, in %."""
        return self._older.error_pct if self._older else 0.0

    def step(self, *shares: float) -> list[float]:
        """Return quantiles (0..1) of the whole step, in ms."""
        ms = self._store.exposed[self._columns].sum(axis=1)[:, None]
        if self._older is None:
            return [float(quantile_ms) for quantile_ms in quantiles(ms, shares)[:, 0]]
        return [float(self._older.step.quantile(share, ms)[0]) for share in shares]

    def busy(self) -> Float:
        """Return the median busy time of each rank (R,), in ms."""
        ms = busy_of(self._store, self._columns)
        return self._older.busy.quantile(0.5, ms) if self._older else quantiles(ms, (0.5,))[0]

    def busy_of_all(self, share: float) -> float:
        """Return a quantile of the busy time of all ranks together, in ms."""
        ms = busy_of(self._store, self._columns)
        if self._older is None:
            return float(quantiles(ms.reshape(-1, 1), (share,))[0, 0])
        return self._older.busy.quantile_of_all(share, ms)

    def stages(self) -> Float:
        """Return the median of each rank's stages (R, 6), in ms. Only the history of a report has it."""
        ms, older = stages_of(self._store, self._columns), self._older
        if older is None:
            return quantiles(ms, (0.5,)).reshape(-1, N_STAGES)
        assert older.stages is not None
        return older.stages.quantile(0.5, ms).reshape(-1, N_STAGES)

    def idle(self) -> Float:
        """Return the share of its time in which each rank's device waited for its host (R,); NaN: unknown."""
        sums: Float = np.zeros((len(self._store.busy), 2))
        if self._store.device is not None:
            sums += self._store.device[:, self._columns, IDLE].sum(axis=1, dtype=float)
        if self._older is not None:
            sums += self._older.idle
        return np.where(sums[:, 1] > 0, sums[:, 0] / np.maximum(sums[:, 1], 1e-9), np.nan)

    def mean_stages(self) -> Float:
        """Return the mean of each rank's stages (R, 6), in ms."""
        sums: Float = self._store.d[:, self._columns].sum(axis=1, dtype=float)
        counts = (self._store.count[:, self._columns] > 0).sum(axis=1).astype(float)
        if self._older is not None:
            sums, counts = sums + self._older.d, counts + self._older.counts
        return np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], np.nan)


LEAST_SHARE, _LEAST_NS = 0.1, 2_000_000_000
"""First steps are mentioned from this share of the run, and from this time in ns, on."""
_LONG = 2.0
"""A first step counts while it takes at least this multiple of the other steps."""
_APART = 0.25
"""Ranks are told apart if the others took less than the longest by at least this share of it."""


class FirstSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The first steps of a run that took much longer than the others."""

    steps: int
    """Number of these steps."""
    ranks: tuple[int, ...]
    """Ranks that worked longest in these steps. Empty if all took about as long, or if that is not known."""
    stage: str
    """Stage that most of the time was spent in."""
    longest_s: float
    """Work of the longest rank in these steps, in s."""
    others_s: float | None
    """Median work of the ranks that are not named, in s. None if no rank is named."""
    cost_s: float
    """Additional time of these steps compared with as many usual steps, in s."""
    cost_pct: float
    """`cost_s` as a share of the run, in %."""
    why: str = ""
    """The facts as a sentence."""


def first_steps(d: Int64, split: Bool, ranks: Int64, usual_ns: float, run_ns: float) -> FirstSteps | None:
    """
    Return the cost of the first steps of a run; None if it is less than a tenth of the run, or than 2 s.

    The time before the first step begins (imports, building the model) is the `post_sync` of its row and does
    not count.

    Args:
        d: rows of the first steps of the run, one per step, ns (K, R, 6).
        split: whether a rank's waiting is separate from its backward in all of these rows (R,).
        ranks: numbers of the ranks (R,).
        usual_ns: time of a later step, ns.
        run_ns: time of the run, ns.
    """
    work = d[:, :, :SYNC_WAIT].copy()
    work[:1, :, POST_SYNC] = 0
    longest = work.sum(axis=2).max(axis=1, initial=0)
    usual = longest < _LONG * usual_ns
    count = int(np.argmax(usual)) if usual.any() else len(longest)
    cost_ns = float(longest[:count].sum()) - count * usual_ns
    if not count or run_ns <= 0 or cost_ns < max(_LEAST_NS, LEAST_SHARE * run_ns):
        return None
    by_rank = work[:count].sum(axis=(0, 2))
    stage = int(np.argmax(work[:count, int(np.argmax(by_rank))].sum(axis=0)))
    places = _longest(by_rank) if stage != BACKWARD or split.all() else np.empty(0, np.int64)
    others = np.delete(by_rank, places)
    named = tuple(ranks[places].tolist())
    first = FirstSteps(
        steps=count,
        ranks=named,
        stage=STAGES[stage],
        longest_s=float(by_rank.max()) / 1e9,
        others_s=float(np.median(others)) / 1e9 if named else None,
        cost_s=cost_ns / 1e9,
        cost_pct=min(100.0, 100 * cost_ns / run_ns),
    )
    return msgspec.structs.replace(first, why=_why(first))


def _longest(by_rank: Int64) -> Int64:
    """
    Return the indices of the ranks that took longer than all others; they are fewer than
    half of the ranks.
    """
    most, middle = int(by_rank.max()), int(np.sort(by_rank)[(len(by_rank) - 1) // 2])
    if most - middle < _APART * most:
        return np.empty(0, np.int64)
    return np.flatnonzero(by_rank > (most + middle) / 2)


def _why(first: FirstSteps) -> str:
    which = "the first step" if first.steps == 1 else f"the first {first.steps:,} steps"
    cause = "the start of its loader" if first.stage == STAGES[DATA] else "compilation or warm-up"
    on = ""
    if first.others_s is not None:
        on = f" on {text.ranks(first.ranks)}, {text.duration(first.others_s)} on the others"
    return (
        f"{which} took {text.duration(first.longest_s)}{on} ({cause}, in `{first.stage}`): "
        f"{text.duration(first.cost_s)} more than usual, {text.percent(first.cost_pct)} of the run"
    )
