"""What ranks printed last, as a session answers it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from traceml_ray.analysis.labels import LABELS
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.reports.deaths import Death
from traceml_ray.reports.run_facts import RunFacts
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.results import LastOutput, OutputLine
from traceml_ray.store.session_file import SessionFile

_RANKS = 2
"""Ranks that a failure names first, whose last lines stand beside it,"""
_LINES = 12
"""so many of each stream."""


def output_of(session: SessionFile, rank: int, most: int) -> LastOutput:
    """Return what a rank of the run printed last, `most` lines of each stream. Raises `SessionFileError`."""
    process = session.ranks().get(rank)
    if process is None:
        return {"rank": rank, "lines": [], "missing": "the rank has not reported"}
    lines = lines_of(session, [process.id], most).get(process.id, [])
    return {"rank": rank, "lines": lines, "missing": _missing(session.meta(), process)}


def beside_failure(facts: RunFacts, verdict: Verdict, all_deaths: Sequence[Death]) -> list[LastOutput]:
    """
    Return what the ranks printed last that a verdict of a failure names: as `LastOutput`, without those of
    which there is nothing. `found`: the deaths of the run.
    """
    if LABELS[verdict.label].kind != "failure":
        return []
    named = [*dict.fromkeys([*([] if verdict.rank is None else [verdict.rank]), *verdict.ranks])]
    return output_of_ranks(facts, named[:_RANKS], all_deaths)


def output_of_ranks(facts: RunFacts, ranks: Sequence[int], all_deaths: Sequence[Death]) -> list[LastOutput]:
    """Return what `ranks` printed last, those that died with the process that did; see `beside_failure`."""
    died = {death.rank: death.process for death in all_deaths}
    processes = {rank: died.get(rank) or facts.ranks.get(rank) for rank in ranks}
    ids = {rank: process.id for rank, process in processes.items() if process is not None}
    lines = lines_of(facts.session, ids.values(), _LINES)
    return [{"rank": rank, "lines": lines[id_], "missing": None} for rank, id_ in ids.items() if id_ in lines]


def lines_of(session: SessionFile, processes: Iterable[int], most: int) -> dict[int, list[OutputLine]]:
    """Return the last lines of each of `processes` (ids). Raises `SessionFileError`."""
    lines_of_process = session.output(processes, most)
    return {
        process: [
            {
                "stream": line.stream,
                "t_ns": line.t_ns,
                "text": line.text,
                "unfinished": line.unfinished,
                "skipped": line.skipped,
            }
            for line in lines
        ]
        for process, lines in lines_of_process.items()
    }


def _missing(meta: dict[str, Any], process: RankProcess) -> str | None:
    """Return why there may be none."""
    if str((meta.get("settings") or {}).get("output_lines")) == "0":
        return "turned off: output_lines is 0"
    reasons = [f"{name}: {why}" for name, why in process.missing.items() if name.startswith("last lines")]
    return "; ".join(reasons) or None
