"""Statistics of steps, exact where they are kept one by one: what report, web app and metrics show."""

from __future__ import annotations

import numpy as np

from traceml_ray.analysis.spread import quantiles
from traceml_ray.analysis.step_sums import IDLE, StepSums
from traceml_ray.analysis.tally import Tally, busy_of, stages_of
from traceml_ray.analysis.window import Float, Int64
from traceml_ray.stages import N_STAGES


class StepStats:
    """
    Of the steps at the places `at` (n,) of `store`, and of those in `older`; times in ms, of R ranks. A rank
    without any has NaN.
    """

    def __init__(self, store: StepSums, at: Int64, older: Tally | None) -> None:
        self._store, self._at = store, at
        self._older = older if older is not None and older.steps else None
        self.steps = len(at) + (older.steps if older else 0)
        self.rows = int(store.rows[at].sum()) + (older.rows if older else 0)
        """Rows of each rank: a step has one for each of its exchanges."""
        sums = store.exposed[at].sum(axis=0) + (older.exposed if older else 0)
        self.exposed: Float = sums / max(1, self.steps)
        """Mean of each stage (6,)."""
        ends = [(older.first, older.last)] if self._older and older else []
        ends += [(int(store.first[at[0]]), int(store.last[at[-1]]))] if len(at) else []
        self.between = (ends[0][0], ends[-1][1]) if ends else (0, 0)
        """The first and the last of them."""

    @property
    def error_pct(self) -> float:
        """By how much quantiles may be off."""
        return self._older.error_pct if self._older else 0.0

    def step(self, *shares: float) -> list[float]:
        """Return quantiles (0..1) of the whole step."""
        ms = self._store.exposed[self._at].sum(axis=1)[:, None]
        if self._older is None:
            return [float(each) for each in quantiles(ms, shares)[:, 0]]
        return [float(self._older.step.quantile(share, ms)[0]) for share in shares]

    def busy(self) -> Float:
        """Return the median busy time of each rank (R,)."""
        ms = busy_of(self._store, self._at)
        return self._older.busy.quantile(0.5, ms) if self._older else quantiles(ms, (0.5,))[0]

    def busy_of_all(self, share: float) -> float:
        """Return a quantile of the busy time of all ranks together."""
        ms = busy_of(self._store, self._at)
        if self._older is None:
            return float(quantiles(ms.reshape(-1, 1), (share,))[0, 0])
        return self._older.busy.quantile_of_all(share, ms)

    def stages(self) -> Float:
        """Return the median of each rank's stages (R, 6), of steps of which a report is made."""
        ms, older = stages_of(self._store, self._at), self._older
        if older is None:
            return quantiles(ms, (0.5,)).reshape(-1, N_STAGES)
        assert older.stages is not None
        return older.stages.quantile(0.5, ms).reshape(-1, N_STAGES)

    def idle(self) -> Float:
        """Return the share of its time in which each rank's device waited for its host (R,); NaN: unknown."""
        sums: Float = np.zeros((len(self._store.busy), 2))
        if self._store.device is not None:
            sums += self._store.device[:, self._at, IDLE].sum(axis=1, dtype=float)
        if self._older is not None:
            sums += self._older.idle
        return np.where(sums[:, 1] > 0, sums[:, 0] / np.maximum(sums[:, 1], 1e-9), np.nan)

    def mean_stages(self) -> Float:
        """Return the mean of each rank's stages (R, 6)."""
        sums: Float = self._store.d[:, self._at].sum(axis=1, dtype=float)
        counts = (self._store.count[:, self._at] > 0).sum(axis=1).astype(float)
        if self._older is not None:
            sums, counts = sums + self._older.d, counts + self._older.counts
        return np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], np.nan)
