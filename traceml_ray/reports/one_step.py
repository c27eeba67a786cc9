"""One step of all ranks, stage by stage, from the session file."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from traceml_ray.analysis.reasons import MAX_PEERS
from traceml_ray.analysis.window import Float, UInt8
from traceml_ray.stages import FLAG_DEVICE_CLOCK, FLAG_NO_SPLIT, N_STAGES, SEGMENT_BITS, STAGES, SYNC_WAIT
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.session_file import SessionFile, columns_of
from traceml_ray.store.step_shapes import OneStep, StepSpan


def step_of(session: SessionFile, step: int) -> OneStep:
    """Return a step, stage by stage. Raises `SessionFileError`."""
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
        of=[rank for rank, _ in lines],
        stages=np.array([row for _, row in lines], float).reshape(-1, N_STAGES),
        took_ms=max((float(rows_of_rank[rank].sum()) for rank in order), default=None),
        arrived=arrived,
        late=arrived - np.nanmedian(arrived) if np.isfinite(arrived).any() else arrived,
        device=[rank for rank in order if flagged[rank] & FLAG_DEVICE_CLOCK],
        spans=_spans(session, ranks, _latest(order, arrived), step),
    )


def _arrival(rows: Float, flags: UInt8) -> float:
    """Return when a rank was done with all but its last exchange, ms; NaN where that cannot be told."""
    return np.nan if flags & FLAG_NO_SPLIT else float(rows.sum() - rows[-1, SYNC_WAIT])


def _latest(ranks: list[int], arrived: Float) -> list[int]:
    """Return the ranks whose spans are wanted: in a large job those that came last."""
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
