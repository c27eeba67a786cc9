"""The memory analysis over all ranks of a run."""

from __future__ import annotations

from collections.abc import Sequence

from traceml_ray.analysis.memory.limits import MEMORY, MemoryLimits
from traceml_ray.analysis.memory.shapes import Collective, Memory, Sensitivity, Series


def judge(
    series: Sequence[Series],
    collectives: Sequence[Collective] = (),  # noqa: ARG001
    expected: int | None = None,
    sensitivity: Sensitivity = "medium",  # noqa: ARG001
    limits: MemoryLimits = MEMORY,  # noqa: ARG001
) -> Memory:
    """
    Return what can be said about the memory of a run. Never raises on any values in the arrays.

    Args:
        series: one per rank process and device, in any order.
        collectives: when ranks were in which collectives.
        expected: how many ranks the run has; None: not known, then none is missing.
        sensitivity: how weak the evidence may be by which hidden memory is put down to collectives.
        limits: the thresholds.
    """
    present = {each.rank for each in series}
    missing = [rank for rank in range(expected or 0) if rank not in present]
    return Memory(missing_ranks=missing)
