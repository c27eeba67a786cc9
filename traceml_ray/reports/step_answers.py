"""What a step history answers, live and stored: one function for each question about steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from traceml_ray.analysis import step_numbers
from traceml_ray.analysis.kept_steps import ALL, Between
from traceml_ray.analysis.step_sample import sampled
from traceml_ray.store import query
from traceml_ray.store.history_reader import RunSteps
from traceml_ray.store.query import Request


def _times(of: RunSteps, asked: query.Times, whole: bool) -> dict[str, Any]:
    began = min((process.first_seen_ns for process in of.ranks.values()), default=0)
    ended = max((process.last_rows_ns or 0 for process in of.ranks.values()), default=0)
    stored = sum(process.stored for process in of.ranks.values())
    wall_ms = (ended - began) / 1e6 if ended > began else None
    found = step_numbers.times(of.history, whole, of.world, wall_ms, stored, _part(asked))
    return {**found, "whole": of.whole}


def _spine(of: RunSteps, asked: query.Spine, _: bool) -> dict[str, Any]:
    ended = ((rank, of.ranks[rank].last_rows_ns) for rank in of.history.ranks if rank in of.ranks)
    rank, end_ns = next((each for each in ended if each[1] is not None), (None, None))
    return step_numbers.spine(of.history, rank, end_ns, asked.most)


def _part(asked: query.Times | query.RankTimes) -> Between | None:
    return None if asked.last is None else Between(asked.first, asked.last)


def _between(asked: Any, newest: bool) -> Between | None:
    """Return the part of the run that is asked for; None: its newest steps."""
    if newest:
        return None
    return Between(asked.first or 0, ALL.last if asked.last is None else asked.last)


OF_STEPS: dict[type[Request[Any]], Callable[[RunSteps, Any, bool], dict[str, Any]]] = {
    query.Times: _times,
    query.Columns: lambda of, asked, whole: step_numbers.columns(
        of.history,
        asked.stage,
        _between(asked, not whole and not asked.first and asked.last is None),
        of.world,
        asked.since,
    ),
    query.Spine: _spine,
    query.Change: lambda of, asked, _: step_numbers.change(
        of.history, Between(asked.begin, asked.first - 1), _between(asked, False) or ALL
    ),
    query.Busy: lambda of, asked, *_: step_numbers.busy(of.history, asked.ranks, asked.most),
    query.RankSteps: lambda of, asked, *_: step_numbers.of_rank(
        of.history, asked.rank, asked.most, _between(asked, asked.first is asked.last is None)
    ),
    query.StepSample: lambda of, *_: sampled(of.history, of.world),
    query.RankTimes: lambda of, asked, whole: step_numbers.rank_times(of.history, whole, _part(asked)),
    query.Cell: lambda of, asked, *_: step_numbers.cell(
        of.history, asked.rank, asked.first, asked.last, of.world
    ),
}
"""By kind: takes the history, the question, and whether it is of the whole run."""
