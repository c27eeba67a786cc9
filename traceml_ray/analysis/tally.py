"""Step times of a run of any length, added up piece by piece in memory that does not grow with it."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from traceml_ray.analysis.busy import StepSummary, StepTimes, busy_ns, frontiers, step_summary
from traceml_ray.analysis.evidence import absurd, comparable
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import Float, Int64, Window
from traceml_ray.stages import N_STAGES

_LEAST_NS = 1000
_FINE_RANKS = 4096
"""Up to so many ranks a quantile is within 1 %; twice as many, 2 %, so that memory stays bounded."""
_COLUMNS = 256
"""Histograms that are filled at a time,"""
_VALUES = 1 << 18
"""and by so many values: more do not fit into a core's cache."""
UInt32 = npt.NDArray[np.uint32]


class Histograms:
    """
    `count` histograms of durations (ns). Bins grow by the share `error`: a quantile is off by that at most.

    What is shorter than 1 µs counts as 0. Adding in any order and in any pieces gives the same.
    """

    def __init__(self, count: int, error: float, longest_ns: int) -> None:
        self._step = math.log1p(error)
        self._bins = 2 + math.ceil(math.log(longest_ns / _LEAST_NS) / self._step)
        self.counts = np.zeros((count, self._bins), dtype=np.uint32)

    def add(self, values: Int64) -> None:
        """Add `values` (n, count)."""
        for first in range(0, values.shape[1], _COLUMNS):
            part = values[:, first : first + _COLUMNS]
            size = max(1, _VALUES // part.shape[1])
            counts = sum(self._counts(part[at : at + size]) for at in range(0, len(part), size))
            self.counts[first : first + _COLUMNS] += counts

    def _counts(self, values: Int64) -> UInt32:
        logs = np.maximum(values, _LEAST_NS) / _LEAST_NS
        np.log(logs, out=logs)
        logs /= self._step
        logs += values >= _LEAST_NS
        bins = logs.astype(np.int64)
        np.minimum(bins, self._bins - 1, out=bins)
        bins += np.arange(values.shape[1]) * self._bins
        counts = np.bincount(bins.ravel(), minlength=values.shape[1] * self._bins)
        return counts.reshape(-1, self._bins).astype(np.uint32)

    def quantile(self, share: float) -> Float:
        """Return the quantile (0..1) of each histogram, ns (count,). None is empty."""
        return np.array([self._quantile(each.astype(np.int64), share) for each in self.counts])

    def quantile_of_all(self, share: float) -> float:
        """Return the quantile of the values of all histograms together, ns."""
        return self._quantile(self.counts.sum(axis=0, dtype=np.int64), share)

    def _quantile(self, counts: Int64, share: float) -> float:
        below = np.cumsum(counts, dtype=np.int64)
        place = share * (int(below[-1]) - 1)
        at = int(np.searchsorted(below, place, "right"))
        if at == 0:
            return 0.0
        inside = (place - int(below[at - 1]) + 0.5) / int(counts[at])
        return float(_LEAST_NS * math.exp((at - 1 + min(1.0, inside)) * self._step))


class Tally:
    """
    `busy.summarise` of a window that comes in pieces, in order, all of the same ranks and of whole steps.

    Counts and exposed times are exact, medians and percentiles within `error_pct`.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        self._limits = thresholds
        self._window: Window | None = None
        self._absurd = False
        self._error = 0.0
        self._count = self._rows = 0
        self._behind: list[Int64] = []
        self._exposed: Int64 = np.empty((0, N_STAGES), dtype=np.int64)
        self._sums: Int64 = self._exposed

    @property
    def error_pct(self) -> float:
        """By how much a median may be off."""
        return 100 * self._error

    def stage_ns(self) -> Float | None:
        """Return the mean of each rank's stages (R, 6); None before any step."""
        return self._sums / self._count if self._count else None

    def add(self, window: Window) -> None:
        """Add the next piece."""
        self._absurd = self._absurd or absurd(window, self._limits) is not None
        if not window.d.size or self._absurd:
            return
        rows = comparable(window)
        if self._window is None:
            self._begin(window)
        found = frontiers(window, rows, self._behind)
        self._behind = [frontier.slack[-1, :, -1].copy() for frontier in found]
        exposed = [window.by_step(frontier.exposed) for frontier in found]
        self._exposed = self._exposed + np.array([each.sum(axis=0) for each in exposed])
        self._step.add(np.stack([each.sum(axis=1) for each in exposed], axis=1))
        self._busy.add(window.by_step(busy_ns(rows)))
        self._stages.add(window.by_step(rows.d).reshape(len(window.starts), -1))
        self._sums += window.d.sum(axis=0)
        self._count += len(window.starts)
        self._rows += len(window.keys)
        self._window = window.take(slice(0, 0))

    def _begin(self, window: Window) -> None:
        ranks = len(window.ranks)
        groups = sum(len(group.ranks) > 0 for group in window.by_group())
        self._error = 0.01 * max(1, math.ceil(ranks / _FINE_RANKS))
        sizes = self._error, self._limits.max_step_ns
        self._step, self._busy = Histograms(groups, *sizes), Histograms(ranks, *sizes)
        self._stages = Histograms(ranks * N_STAGES, *sizes)
        self._exposed = np.zeros((groups, N_STAGES), dtype=np.int64)
        self._sums = np.zeros((ranks, N_STAGES), dtype=np.int64)

    def summary(self) -> StepSummary | None:
        """Return the step times so far, or None when there are no rows or absurd ones."""
        if self._window is None or self._absurd:
            return None
        slowest = int(self._exposed.sum(axis=1).argmax())
        times = StepTimes(
            count=self._count,
            rows=self._rows,
            quantiles=tuple(float(self._step.quantile(share)[slowest]) for share in (0.5, 0.95)),
            busy_p95=self._busy.quantile_of_all(0.95),
            busy=self._busy.quantile(0.5),
            stages=self._stages.quantile(0.5).reshape(-1, N_STAGES),
            exposed=self._exposed[slowest],
        )
        return step_summary(self._window, times)
