"""
The runs of a session: several `fit()` of a driver, groups of plain actors, or one torchrun job; and whether
steps of them can still be measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

from traceml_ray import text
from traceml_ray.store.rank_processes import (
    RankProcess,
    attempt_of,
    current_ranks,
    earlier_starts,
    generations,
    world_size,
)
from traceml_ray.store.results import Dropped, Ledger, RankLedger, RunInfo, WholeLedger

MAX_RUNS = 256
"""Runs whose facts are kept."""
_MAX_TEXT = 500
_MAX_FACTS = 32
_OURS = frozenset({"id", "started_at", "ended_at", "status"})


def by_run(processes: Iterable[RankProcess]) -> dict[str, list[RankProcess]]:
    """Return the rank processes of each run by its id, oldest first; those of unknown rank are left out."""
    by_job: dict[str, list[RankProcess]] = {}
    for process in processes:
        if process.identity is not None:
            by_job.setdefault(process.identity.job_id, []).append(process)
    return by_job


def of_run(processes: Iterable[RankProcess], run: str | None) -> list[RankProcess]:
    """Return the rank processes of `run`, and those of which the run is not known."""
    return [process for process in processes if process.identity is None or process.identity.job_id == run]


def newest(processes: Iterable[RankProcess], meta: Mapping[str, Any]) -> str | None:
    """Return the newest run of a session that has rows, else the newest at all; None before any."""
    runs = by_run(processes)
    return newest_of(
        {run: any(s.stored for s in processes_of_run) for run, processes_of_run in runs.items()}, meta
    )


def newest_of(has_rows: Mapping[str, bool], meta: Mapping[str, Any]) -> str | None:
    """Return the same of the runs that have reported, oldest first, and whether they have rows."""
    stored = [run for run, rows in has_rows.items() if rows]
    known = [*has_rows, *(run for run in meta.get("runs", {}) if run not in has_rows)]
    return stored[-1] if stored else known[-1] if known else None


def run_names(processes: Iterable[RankProcess], meta: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of each run of a session by its id, the oldest run first."""
    reported = meta.get("runs", {})
    return {run: reported.get(run, {}).get("name") or run for run in [*by_run(processes), *reported]}


def note(
    reported: Mapping[str, Any], job_id: str, now: int, info: Mapping[str, Any], status: str | None = None
) -> dict[str, Any]:
    """Return `reported`, the facts by run, with those of one run added; bounded."""
    facts: dict[str, Any] = {**reported.get(job_id, {"id": job_id, "started_at": now})}
    for name, value in info.items():
        if name not in _OURS and (name in facts or len(facts) < _MAX_FACTS):
            facts[name[:_MAX_TEXT]] = value[:_MAX_TEXT] if isinstance(value, str) else value
    if status is not None:
        facts["status"] = status[:_MAX_TEXT]
        facts.setdefault("ended_at", now)
    runs = {**reported, job_id: facts}
    while len(runs) > MAX_RUNS:
        del runs[next((run for run in runs if "ended_at" in runs[run]), next(iter(runs)))]
    return runs


def is_over(meta: Mapping[str, Any], run: str | None = None) -> bool:
    """Return whether the session has ended or, while it goes on, that run of it."""
    return meta.get("status", "running") != "running" or has_ended(meta, run)


def has_ended(meta: Mapping[str, Any], run: str | None) -> bool:
    """Return whether a run was reported to be over: its session may go on."""
    return "ended_at" in meta.get("runs", {}).get(run, {})


def status_of(processes: list[RankProcess], reported: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
    """
    Return the status of a run: the one reported, else that of the session.

    While the session runs, a run without a reported status has `ended` when all its ranks have.
    """
    session: str = reported.get("status") or meta.get("status", "running")
    last = generations(processes)[-1:]
    return "ended" if session == "running" and last and all(s.ended for s in last[0]) else session


def list_runs(
    processes: Iterable[RankProcess], meta: Mapping[str, Any], labels: Mapping[str, str]
) -> list[dict[str, Any]]:
    """
    Return every run of a session, oldest first: `id`, `name`, `launcher`, `status`, `started_at` and
    `ended_at` (ns), `world_size`, `nnodes`, `attempts`, `earlier` (see `earlier_starts`), `label` of its
    verdict (`labels`: the last live ones), `ledger` in rows.
    """
    runs, every = by_run(processes), meta.get("runs", {})
    entries = []
    for run in (ids := {**runs, **every}):
        processes_of_run, reported = runs.get(run, []), every.get(run, {})
        facts = {**meta, **reported} if is_own(run, ids, meta) else reported
        status = status_of(processes_of_run, reported, meta)
        ended = reported.get("ended_at") or meta.get("ended_at")
        if not ended and status == "ended":
            ended = max(process.last_seen_ns for process in processes_of_run)
        first = min((process.first_seen_ns for process in processes_of_run), default=None)
        entry = {
            "id": run,
            "name": reported.get("name") or run,
            "launcher": reported.get("launcher") or meta.get("launcher"),
            "status": status,
            "started_at": facts.get("started_at") or first,
            "ended_at": ended,
            "world_size": world_size(current_ranks(processes_of_run), facts.get("world_size")) or None,
            "nnodes": facts.get("nnodes"),
            "attempts": len({attempt_of(process) for process in processes_of_run}),
            "earlier": earlier_starts(processes_of_run),
            "label": reported.get("label") or labels.get(run),
            "ledger": count(processes_of_run),
        }
        entries.append(entry)
    return entries


def is_own(run: str | None, runs: Sized, meta: Mapping[str, Any]) -> bool:
    """Whether the facts of the session are those of `run`, one of `runs`: a launcher makes it for one."""
    return len(runs) <= 1 or run == meta.get("session")


def count(processes: Iterable[RankProcess]) -> Ledger:
    """Return where every produced row is: `produced = stored + dropped + in_flight`, in rows."""
    return Ledger(**_counts(processes))


def _counts(processes: Iterable[RankProcess]) -> dict[str, Any]:
    """Return the fields of a `Ledger`."""
    processes = list(processes)

    def total(name: str) -> int:
        return sum(getattr(process, name) for process in processes)

    dropped = Dropped(*(total(f"dropped_{where}") for where in ("agent", "relay", "aggregator")))
    return {**{name: total(name) for name in ("produced", "stored", "in_flight")}, "dropped": dropped}


def ledger(processes: Iterable[RankProcess], run: str | None, folded: int) -> WholeLedger:
    """
    Return `count` of all rank processes, and in `per_rank` that of each rank of `run`: attempts and processes
    of one rank are added up, those of other runs are not. `folded` rows are stored as statistics only.

    `unreported` is what was produced after a rank's last report: 0 after a last batch, None (not
    known) for a process that was killed.
    """
    processes = list(processes)
    ranks: dict[int | None, list[RankProcess]] = {}
    for process in of_run(processes, run):
        ranks.setdefault(process.rank, []).append(process)
    per_rank = {
        "unknown" if rank is None else str(rank): RankLedger(
            **_counts(ranks[rank]),
            unreported=0 if all(process.final for process in ranks[rank]) else None,
        )
        for rank in sorted(ranks, key=lambda rank: (rank is None, rank))
    }
    return WholeLedger(**_counts(processes), per_rank=per_rank, folded=folded)


_GOES_ON = "running"


def why_over(runs: Sequence[RunInfo], run: str | None) -> str:
    """
    Return why no step of a run is left to measure; "" where it goes on, or may be yet to begin.

    Args:
        runs: those of the session.
        run: id or name; None: any that goes on.
    """
    asked = [info for info in runs if run in (None, info.id, info.name)]
    if not asked or any(info.status == _GOES_ON for info in asked):
        return ""
    last = asked[-1]
    state = f"{last.status} at {last.ended_at}" if last.ended_at else last.status
    going = [info.name for info in runs if info.status == _GOES_ON]
    others = f"; {text.listed(going)} goes on" if going else ""
    return f"run {last.name!r} has no step left to record: {state}{others}"
