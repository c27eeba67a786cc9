"""What a step history answers, live and stored: one function for each question about steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from traceml_ray.analysis import step_numbers
from traceml_ray.analysis.comparison import sampled
from traceml_ray.analysis.step_store import ALL, Between
from traceml_ray.store import query
from traceml_ray.store.history_reader import RunSteps
from traceml_ray.store.query import Request


def _times(run_steps: RunSteps, asked: query.GetTimes, whole: bool) -> dict[str, Any]:
    began = min((process.first_seen_ns for process in run_steps.ranks.values()), default=0)
    ended = max((process.last_rows_ns or 0 for process in run_steps.ranks.values()), default=0)
    stored = sum(process.stored for process in run_steps.ranks.values())
    wall_ms = (ended - began) / 1e6 if ended > began else None
    numbers = step_numbers.times(run_steps.history, whole, run_steps.world, wall_ms, stored, _part(asked))
    return {**numbers, "whole": run_steps.whole}


def _spine(run_steps: RunSteps, asked: query.GetTimeline, _: bool) -> dict[str, Any]:
    ended = (
        (rank, run_steps.ranks[rank].last_rows_ns)
        for rank in run_steps.history.ranks
        if rank in run_steps.ranks
    )
    rank, end_ns = next((rank_end for rank_end in ended if rank_end[1] is not None), (None, None))
    return step_numbers.spine(run_steps.history, rank, end_ns, asked.most)


def _part(asked: query.GetTimes | query.GetRankTimes) -> Between | None:
    return None if asked.last is None else Between(asked.first, asked.last)


def _between(asked: Any, newest: bool) -> Between | None:
    """Return the part of the run that is asked for; None: its newest steps."""
    if newest:
        return None
    return Between(asked.first or 0, ALL.last if asked.last is None else asked.last)


OF_STEPS: dict[type[Request[Any]], Callable[[RunSteps, Any, bool], dict[str, Any]]] = {
    query.GetTimes: _times,
    query.GetColumns: lambda run_steps, asked, whole: step_numbers.columns(
        run_steps.history,
        asked.stage,
        _between(asked, not whole and not asked.first and asked.last is None),
        run_steps.world,
        asked.since,
    ),
    query.GetTimeline: _spine,
    query.GetChange: lambda run_steps, asked, _: step_numbers.change(
        run_steps.history, Between(asked.begin, asked.first - 1), _between(asked, False) or ALL
    ),
    query.GetBusy: lambda run_steps, asked, *_: step_numbers.busy(run_steps.history, asked.ranks, asked.most),
    query.GetRankSteps: lambda run_steps, asked, *_: step_numbers.of_rank(
        run_steps.history, asked.rank, asked.most, _between(asked, asked.first is asked.last is None)
    ),
    query.GetStepSample: lambda run_steps, *_: sampled(run_steps.history, run_steps.world),
    query.GetRankTimes: lambda run_steps, asked, whole: step_numbers.rank_times(
        run_steps.history, whole, _part(asked)
    ),
    query.GetCell: lambda run_steps, asked, *_: step_numbers.cell(
        run_steps.history, asked.rank, asked.first, asked.last, run_steps.world
    ),
}
"""By kind: takes the history, the question, and whether it is of the whole run."""
