"""
Computes the rows of steps from a trace alone. This measures independently what the monitor measures.

The begin of a stage is read from names that torch gives: DataLoader's ranges, the forward of DDP or FSDP, the
events of the autograd engine, the optimizer's step. A wait for other ranks ends when their last collective
ends. This applies to rows of the CPU's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from traceml_ray.stages import BACKWARD, DATA, FORWARD, N_STAGES, POST_SYNC, PREPARE, SYNC_WAIT
from traceml_ray.store.profiles import ProfileStep
from traceml_ray.traces.sources import exchanges
from traceml_ray.traces.trace import Ints, Mask, Trace

_DATA = "enumerate(DataLoader)#"
_FORWARD = ("DistributedDataParallel.forward", "FullyShardedDataParallel.forward")
_BACKWARD = "autograd::engine::evaluate_function"
_OPTIMIZER = "Optimizer.step#"
_LATE_NS = 1_000_000
"""
Tolerance for the times of a collective. Its separate thread may begin it later than requested, and may record
its end when the training thread has already continued.
"""


class TracedRow(NamedTuple):
    """A row, on the clock of its node."""

    step: int
    begin_ns: int
    """End of the row before it, in ns."""
    stages_ns: tuple[int, ...]
    """Time in ns of each of `stages.STAGES`."""


def traced_rows(trace: Trace, steps: Sequence[ProfileStep]) -> list[TracedRow]:
    """
    Return the rows that are complete in a trace: all but that of the first step, which began before the
    trace.
    """
    rows, exit_ns = [], None
    for step in sorted(steps, key=lambda row: row.begin_ns):
        marks, ends_ns = _marks(trace, step)
        if exit_ns is not None and ends_ns is not None:
            edges = [
                (exit_ns, POST_SYNC),
                *(mark for mark in marks if mark[0] > exit_ns),
                (ends_ns, SYNC_WAIT),
            ]
            stages = [0] * N_STAGES
            for (begin_ns, stage), (end_ns, _) in pairwise(edges):
                stages[stage] += end_ns - begin_ns
            rows.append(TracedRow(step.step, exit_ns, tuple(stages)))
        exit_ns = ends_ns
    return rows


def _marks(trace: Trace, step: ProfileStep) -> tuple[list[tuple[int, int]], int | None]:
    """
    Return (begin and stage in order of time, end of the row) of a step. The end is None if the step has no
    backward.
    """
    until = trace.begin_ns[_named(trace, _OPTIMIZER) & _within(trace, step.begin_ns, step.end_ns)]
    until_ns = int(until.max()) if len(until) else step.end_ns
    within = _within(trace, step.begin_ns, until_ns)
    backward = within & _named(trace, _BACKWARD)
    if not backward.any():
        return [], None
    data, forward = within & _named(trace, _DATA), within & _named(trace, *_FORWARD)
    marks = [(t_ns, DATA) for t_ns in trace.begin_ns[data].tolist()]
    after = PREPARE if forward.any() else FORWARD
    marks += [(t_ns, after) for t_ns in trace.end_ns[data].tolist()]
    marks += [(t_ns, FORWARD) for t_ns in _first_of_each(trace.begin_ns[forward], marks)]
    for first_ns, last_ns in _runs(trace.begin_ns[backward], trace.end_ns[backward], marks):
        marks += [(first_ns, BACKWARD), (last_ns, SYNC_WAIT)]
    last_ns = max(marks)[0]
    exchange = within & np.array([exchanges(name) for name in trace.names], bool)[trace.name]
    of_backward = trace.begin_ns < last_ns + _LATE_NS
    waited = exchange & (of_backward | (trace.end_ns <= until_ns + _LATE_NS))
    ends = np.minimum(trace.end_ns[waited], until_ns)
    return sorted(marks), max(last_ns, int(ends.max())) if len(ends) else last_ns


def _runs(begins: Ints, ends: Ints, marks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """
    Return each backward, from the first event of the engine to the last. A mark in between begins another
    backward.
    """
    edges = np.array(sorted(t_ns for t_ns, _ in marks), np.int64)
    run_numbers = np.searchsorted(edges, begins)
    return [
        (int(begins[run_numbers == run].min()), int(ends[run_numbers == run].max()))
        for run in np.unique(run_numbers)
    ]


def _first_of_each(begins: Ints, marks: Sequence[tuple[int, int]]) -> list[int]:
    """
    Return the first forward after each batch. Other forwards are of models inside it, or of
    further models.
    """
    edges = np.array(sorted(t_ns for t_ns, _ in marks), np.int64)
    run_numbers = np.searchsorted(edges, begins)
    return [int(begins[run_numbers == run].min()) for run in np.unique(run_numbers)]


def _named(trace: Trace, *prefixes: str) -> Mask:
    return np.array([name.startswith(prefixes) for name in trace.names], bool)[trace.name] & ~trace.on_device


def _within(trace: Trace, begin_ns: int, end_ns: int) -> Mask:
    return (trace.begin_ns >= begin_ns) & (trace.begin_ns < end_ns)
