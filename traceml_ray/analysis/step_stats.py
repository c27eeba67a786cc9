"""
Statistics of steps, exact for the steps that are kept one by one: what report, web app and metrics show.

Of older steps there are sums, and histograms of how their times are distributed.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from traceml_ray.analysis.spread import Values, quantiles
from traceml_ray.analysis.step_sums import IDLE, Array, StepSums
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import Float, Int64
from traceml_ray.stages import N_STAGES

_LEAST_MS = 1e-3
_FINEST = math.log1p(0.01) / 8
"""Of up to `_FINE_RANKS` ranks a quantile is within 0.125 %, of twice as many within 0.25 %, …"""
_FINE_RANKS = 64
_WITHIN_1 = 512, 4096
"""Numbers of ranks between which a quantile is within 1 %. Beyond the second one memory matters more."""
_AT_ONCE = 256
"""Number of histograms that are processed at a time."""
UInt32 = npt.NDArray[np.uint32]


class Histograms:
    """
    `count` histograms of durations (ms). Bins grow by e^`width`: a quantile is off by that factor at most.

    What is shorter than 1 µs counts as 0. Adding in any order and in any pieces gives the same.
    """

    def __init__(self, count: int, width: float, longest_ms: float) -> None:
        self.width = width
        bins = 2 + math.ceil(math.log(longest_ms / _LEAST_MS) / width)
        self._counts: UInt32 = np.zeros((count, bins), dtype=np.uint32)

    def add(self, values: Values) -> None:
        """Add `values` (n, count); NaN is none."""
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
    Steps beyond the warm-up that were summed up: how many (`steps`), from `first` to `last`, with how many
    `rows` of each rank; sums (ms) of `exposed` time (6,) and of each rank's stages `d` (R, 6), of `counts`
    (R,) steps, and of `idle` (R, 2), see `StepSums.device`. In histograms: the `step`, the `busy` time of
    each rank and, where asked for, its `stages`.
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
    """Return the busy time in some columns, of one step each (n, R) ms; NaN where a rank has none."""
    return np.where(store.count[:, columns] > 0, store.busy[:, columns], np.nan).T


def stages_of(store: StepSums, columns: Int64) -> Array:
    """
    Return the stages of all ranks in some columns, of one step each (n, R × 6), in ms; NaN where a rank has
    none.
    """
    d = np.where((store.count[:, columns] > 0)[..., None], store.d[:, columns], np.nan)
    return d.transpose(1, 0, 2).reshape(len(columns), -1)


def _width(ranks: int) -> float:
    low, high = _WITHIN_1
    times = max(1, min(low, ranks) / _FINE_RANKS, low / _FINE_RANKS * ranks / high)
    return _FINEST * float(2 ** math.ceil(math.log2(times)))


class StepStats:
    """
    Statistics of the steps in `columns` (n,) of `store`, and of those in `older`; times in ms, of R ranks.
    A rank without any of these steps has NaN.
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
        """The first and the last of these steps."""

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
        """Return the median of each rank's stages (R, 6), in ms. Only the steps of a report have it."""
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
