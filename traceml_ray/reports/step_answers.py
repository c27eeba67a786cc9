"""
Answers about steps, live and stored, with one function for each question. They come from a step history; the
answer about one step of all ranks comes from the session file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from msgspec.structs import replace

from traceml_ray.analysis import step_numbers
from traceml_ray.analysis.comparison import sampled
from traceml_ray.analysis.reasons import MAX_PEERS
from traceml_ray.analysis.shapes import RunTimeline, StepTimes
from traceml_ray.analysis.step_store import ALL, Between
from traceml_ray.analysis.window import Float, UInt8
from traceml_ray.stages import FLAG_DEVICE_CLOCK, FLAG_NO_SPLIT, N_STAGES, SEGMENT_BITS, STAGES, SYNC_WAIT
from traceml_ray.store import query
from traceml_ray.store.history_reader import RunSteps
from traceml_ray.store.query import Request
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.session_file import SessionFile, columns_of
from traceml_ray.store.step_shapes import OneStep, StepSpan


def _times(run_steps: RunSteps, asked: query.GetTimes, whole: bool) -> StepTimes:
    began = min((process.first_seen_ns for process in run_steps.ranks.values()), default=0)
    ended = max((process.last_rows_ns or 0 for process in run_steps.ranks.values()), default=0)
    stored = sum(process.stored for process in run_steps.ranks.values())
    wall_ms = (ended - began) / 1e6 if ended > began else None
    numbers = step_numbers.times(run_steps.history, whole, run_steps.world, wall_ms, stored, _part(asked))
    return replace(numbers, whole=run_steps.whole)


def _spine(run_steps: RunSteps, asked: query.GetTimeline, _: bool) -> RunTimeline:
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
    """Return the requested part of the run; None: its newest steps."""
    if newest:
        return None
    return Between(asked.first or 0, ALL.last if asked.last is None else asked.last)


OF_STEPS: dict[type[Request[Any]], Callable[[RunSteps, Any, bool], Any]] = {
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


def step_of(session: SessionFile, step: int) -> OneStep:
    """Return one step of all ranks, stage by stage. Raises `SessionFileError`."""
    ranks = session.ranks()
    numbers = {process.id: rank for rank, process in ranks.items() if process.stored}
    rows_of_rank, flagged = {}, {}
    for process, chunks in session.step_chunks(numbers.keys(), step).items():
        keys, flags, rows = columns_of(chunks)
        of_step = keys >> SEGMENT_BITS == step
        if of_step.any():
            rows_of_rank[numbers[process]] = rows[of_step, :N_STAGES] / 1e6
            flagged[numbers[process]] = np.bitwise_or.reduce(flags[of_step])
    order = sorted(rows_of_rank)
    lines: list[tuple[int, Float]] = [(rank, row) for rank in order for row in rows_of_rank[rank]]
    arrived = np.array([_arrival(rows_of_rank[rank], flagged[rank]) for rank in order], float)
    return OneStep(
        step=step,
        first=session.first_step(numbers.keys()),
        last=max((process.last_step or 0 for process in ranks.values() if process.stored), default=None),
        ranks=order,
        row_ranks=[rank for rank, _ in lines],
        stages=np.array([row for _, row in lines], float).reshape(-1, N_STAGES),
        took_ms=max((float(rows_of_rank[rank].sum()) for rank in order), default=None),
        arrived=arrived,
        late=arrived - np.nanmedian(arrived) if np.isfinite(arrived).any() else arrived,
        device=[rank for rank in order if flagged[rank] & FLAG_DEVICE_CLOCK],
        spans=_spans(session, ranks, _latest(order, arrived), step),
    )


def _arrival(rows: Float, flags: UInt8) -> float:
    """Return when a rank reached its last exchange, ms; NaN if that cannot be determined."""
    return np.nan if flags & FLAG_NO_SPLIT else float(rows.sum() - rows[-1, SYNC_WAIT])


def _latest(ranks: list[int], arrived: Float) -> list[int]:
    """Return the ranks whose spans are returned. In a large job these are the ranks that came last."""
    return [ranks[index] for index in np.argsort(-np.nan_to_num(arrived), kind="stable")[:MAX_PEERS]]


def _spans(
    session: SessionFile, processes: Mapping[int, RankProcess], ranks: list[int], step: int
) -> list[StepSpan]:
    numbers = {processes[rank].id: rank for rank in ranks}
    return [
        StepSpan(
            rank=numbers[span["process"]],
            stage=STAGES[span["stage"]],
            name=span["name"],
            ms=span["total_ns"] / 1e6 / (span["last_step"] - span["first_step"] + 1),
            from_step=span["first_step"],
            to_step=span["last_step"],
        )
        for span in session.step_spans(numbers.keys(), step)
    ]
