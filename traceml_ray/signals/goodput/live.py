"""Stores the time of the steps of live runs: now and then, and when another attempt begins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping

from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.analysis.step_totals import StepTotals, step_totals
from traceml_ray.signals.goodput.totals import TOTALS, RankTotals
from traceml_ray.signals.goodput.view import GetGoodput
from traceml_ray.signals.live import LiveSignal, Ranks, ToStore

_EVERY_NS, _OF_A_RANK_NS = 20_000_000_000, 40_000_000
"""Shortest time between two records of a run: in all, and for each of its ranks (8,192 ranks: 5 minutes)."""


class LiveGoodput(LiveSignal):
    """See `LiveSignal`. It judges nothing: the view needs the totals of steps whose rows are gone."""

    name = "goodput"
    question = GetGoodput

    def __init__(self, lock: threading.Lock, clock: Callable[[], float]) -> None:
        self._kept_ns: dict[str, int] = {}
        """When the totals of each run were kept last."""
        self._new: list[ToStore] = []

    def add_steps(
        self, run: str, history: StepHistory, processes: Mapping[int, int], now_ns: int, ends: bool
    ) -> None:
        """Keep the totals of the steps if it is time, or if the history ends."""
        since = self._kept_ns.setdefault(run, now_ns)
        if not ends and now_ns - since < max(_EVERY_NS, len(processes) * _OF_A_RANK_NS):
            return
        self._kept_ns[run] = now_ns
        if ends:
            del self._kept_ns[run]  # another attempt begins to count anew
        if history.ranks:
            totals = records_of(step_totals(history), processes)
            self._new += [(TOTALS, process, record) for process, record in totals]

    def judge(self, runs: Mapping[str, Ranks]) -> Collection[str]:
        """Forget other runs."""
        for run in self._kept_ns.keys() - runs.keys():
            del self._kept_ns[run]
        return ()

    def drain(self) -> list[ToStore]:
        """Return the new totals."""
        new, self._new = self._new, []
        return new


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
