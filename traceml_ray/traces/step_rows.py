"""The rows of the steps that were recorded, as intervals on the clock of their node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from traceml_ray.analysis.row_table import begins
from traceml_ray.stages import STAGES
from traceml_ray.store.profiles import ProfileStep


class Interval(NamedTuple):
    """A stage of a step, or the whole row; ns since the epoch."""

    step: int
    stage: str
    """Name of the stage; "" for the whole row."""
    begin_ns: int
    end_ns: int


def intervals(steps: Iterable[ProfileStep]) -> list[Interval]:
    """
    Return the rows that are known, each followed by its stages, in order of time. A row ends with the step's
    last backward, so the first begins before what was recorded.
    """
    result: list[Interval] = []
    before_ns = -(1 << 62)
    for step in sorted(steps, key=lambda row: row.begin_ns):
        if step.sync_exit_ns is None or step.stages_ns is None:
            continue
        lengths = np.array([step.stages_ns], np.int64)
        begin_ns = step.sync_exit_ns - int(lengths.sum())
        edges = [begin_ns + int(begin) for begin in begins(lengths)[0]] + [step.sync_exit_ns]
        edges = [max(edge, before_ns) for edge in edges]  # rows are rounded, and do not overlap
        result.append(Interval(step.step, "", edges[0], edges[-1]))
        result += [
            Interval(step.step, stage, edges[index], edges[index + 1])
            for index, stage in enumerate(STAGES)
            if edges[index + 1] > edges[index]
        ]
        before_ns = max(before_ns, step.sync_exit_ns)
    return result


def step_at(steps: Iterable[ProfileStep], t_ns: int) -> int | None:
    """Return the number of the step at a time; None outside of all recorded steps."""
    return next((step.step for step in steps if step.begin_ns <= t_ns < step.end_ns), None)
