"""How much a run gets through, from the session file and the history of its steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from threading import Lock
from typing import Any

from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.reports.run_facts import RunFacts
from traceml_ray.signals.throughput.history import WorkHistory
from traceml_ray.signals.throughput.judge import throughput
from traceml_ray.signals.throughput.records import WORK
from traceml_ray.store.history_reader import RunSteps
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.records import RecordReader
from traceml_ray.store.step_shapes import ThroughputNumbers

_PER_RANK = "rank_samples_per_s", "rank_tokens_per_s"


class StoredWork:
    """What has been read of a session file that grows. May be used by several threads."""

    def __init__(self) -> None:
        self._work, self._cursor = WorkHistory(), 0
        self._reading, self._lock = Lock(), Lock()
        """Held while the file is read; while `_work` is used, which takes no disk."""

    def read(self, file: RecordReader) -> None:
        """Read on in the file. Raises `SessionFileError`."""
        with self._reading:
            records = [*file.records(WORK, self._cursor)]
            with self._lock:
                for self._cursor, process, work in records:
                    self._work.add(process, work)

    def numbers(self, run_steps: RunSteps, *, whole: bool, over: bool) -> dict[str, Any]:
        """Return how much the run gets through, by what has been read."""
        with self._lock:
            processes = {rank: process.id for rank, process in run_steps.ranks.items()}
            missing = reasons(run_steps.ranks.values())
            return throughput(
                run_steps.history,
                self._work,
                processes,
                run_steps.world,
                whole=whole,
                over=over,
                missing=missing,
            )


def of_run(facts: RunFacts, history: StepHistory | None) -> dict[str, Any] | None:
    """Return how much the run of a report gets through; None without any step. Raises `SessionFileError`."""
    if history is None or not history.ranks:
        return None
    work = WorkHistory()
    for _, process, record in facts.session.records(WORK):
        work.add(process, record)
    over = facts.fact("status") not in ("running", None)
    ranks, processes = facts.ranks, {rank: process.id for rank, process in facts.ranks.items()}
    missing = reasons(ranks.values())
    return throughput(history, work, processes, facts.world_size, whole=True, over=over, missing=missing)


def block(numbers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what the summary says of it."""
    names = ThroughputNumbers.__annotations__
    if numbers is None:
        why = {"steps": "no rank has reported a step"}
        return {**dict.fromkeys(names), "steps": 0, "why": why, **{f"per_{name}": {} for name in _PER_RANK}}
    per_rank = {
        f"per_{name}": dict(zip(map(str, numbers["ranks"]), numbers[name].tolist(), strict=True))
        for name in _PER_RANK
    }
    return {**{name: numbers[name] for name in names}, **per_rank}


def reasons(processes: Iterable[RankProcess]) -> dict[str, str]:
    """Return why processes know less of their work, the first of each."""
    reasons_of: dict[str, str] = {}
    for process in processes:
        reasons_of = {
            name: why for name, why in process.missing.items() if name in ("samples", "flops")
        } | reasons_of
    return reasons_of
