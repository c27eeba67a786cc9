"""Keeps the time of the steps of live runs: now and then, and when another attempt begins."""

from __future__ import annotations

from collections.abc import Mapping

from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.analysis.step_totals import StepTotals, step_totals
from traceml_ray.signals.goodput.totals import RankTotals

_EVERY_NS, _OF_A_RANK_NS = 20_000_000_000, 40_000_000
"""Shortest time between two records of a run: in all, and for each of its ranks (8,192 ranks: 5 minutes)."""


def records_of(totals: StepTotals, processes: Mapping[int, int]) -> list[tuple[int, RankTotals]]:
    """Return the totals of each rank with its process. `processes`: the process of each rank."""
    columns: list[tuple[int, int, int]] = [(first, last, ns) for first, last, ns in totals.columns.tolist()]
    arrays = (totals.ranks, totals.steps, totals.took_ns, totals.data_ns, totals.waited_ns)
    records: list[tuple[int, RankTotals]] = []
    for rank, steps, took, data, waited in zip(*(array.tolist() for array in arrays), strict=True):
        if rank in processes:
            record = RankTotals(steps, took, data, waited, [] if records else columns)
            records.append((processes[rank], record))
    return records


class TotalsKeeper:
    """Decides when the totals of one live run are kept."""

    def __init__(self) -> None:
        self._kept_ns: int | None = None

    def due(self, now_ns: int, ranks: int) -> bool:
        """Return whether to keep the totals now (ns, any clock that goes on), and count from now if so."""
        since = self._kept_ns
        if since is None:
            self._kept_ns = now_ns
            return False
        if now_ns - since < max(_EVERY_NS, ranks * _OF_A_RANK_NS):
            return False
        self._kept_ns = now_ns
        return True


def kept(history: StepHistory, processes: Mapping[int, int]) -> list[tuple[int, RankTotals]]:
    """Return the records of a history with reduced steps, each with its rank process."""
    return records_of(step_totals(history), processes) if history.ranks else []
