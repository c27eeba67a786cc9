"""What `report.html` is made of: a summary, and the answers that the web app's first page has of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.reports.drawing import ordered
from traceml_ray.reports.present import change
from traceml_ray.reports.run_facts import alike, deaths_of
from traceml_ray.reports.step_answers import OF_STEPS
from traceml_ray.reports.summary import Report
from traceml_ray.store import query
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.step_shapes import ChangedParts, DeathInfo, StepTimes


class Charted(NamedTuple):
    """All of a report; what is not known is None."""

    summary: dict[str, Any]
    times: StepTimes | None
    """Numbers of its steps, as of `query.GetTimes`;"""
    columns: dict[str, Any] | None
    """what is drawn step by step, as of `query.GetColumns`, with the lines of `z` in order of nodes;"""
    change: ChangedParts | None
    """what a step took before the onset of the verdict and since, as of `query.GetChange`."""
    signals: dict[str, Any]
    """The answers of signals, by name."""
    deaths: list[DeathInfo]
    environment: list[dict[str, Any]]
    """Versions and the allocator's configuration: `ranks` with the same, and `values` by name."""
    settings: dict[str, str]
    """Of the session, that are not as by default."""


@dataclass
class _Steps:
    """A step history that has been read to its end, as `store.histories.RunSteps`."""

    history: StepHistory
    ranks: dict[int, RankProcess]
    world: int
    whole: bool = True


def charted(report: Report) -> Charted:
    """Return all of a report. Raises `SessionFileError`."""
    summary, facts = report.summary, report.facts
    run = summary["run"]
    times: Any = None
    columns = changed = None
    if report.history is not None and report.history.ranks:
        steps = _Steps(report.history, facts.ranks, facts.world_size)
        times, columns = (
            OF_STEPS[type(q)](steps, q, True) for q in (query.GetTimes(run), query.GetColumns(run))
        )
        asked = change(run, {**summary["verdict"], "episodes": summary["episodes"]})
        changed = cast("ChangedParts", OF_STEPS[query.GetChange](steps, asked, True)) if asked else None
    silent = dict.fromkeys(summary["session"]["silent_ranks"], "no report")
    return Charted(
        summary,
        times,
        ordered(columns, silent) if columns and len(columns["first"]) else None,
        changed,
        report.signals,
        deaths_of(facts) if facts.fact("status") not in ("finished", "stopped") else [],
        alike(facts, lambda process: process.environment),
        dict(facts.meta.get("settings") or {}),
    )
