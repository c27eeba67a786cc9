"""
What the aggregator keeps of the steps of each rank process: their time by kind. It is still known when the
rows are compacted, or when another attempt has begun.
"""

from __future__ import annotations

from typing import Annotated

from traceml_ray.signals.kind import Kind
from traceml_ray.wire.codec import FEW, Count, Part


class RankTotals(Part, frozen=True):
    """The steps of a rank process so far, see `analysis.step_totals`."""

    steps: Count
    """Number of steps in `took_ns`."""
    took_ns: Count
    """Time of all rows after the first one."""
    data_ns: Count
    """Part of it in which the rank waited for data."""
    waited_ns: Count
    """Part of it in which the rank waited for other ranks, without the exchange itself."""
    columns: Annotated[list[tuple[Count, Count, Count]], FEW] = []
    """
    Steps of all ranks of the attempt, in columns: first step, last step, and time on all ranks together in
    ns. Only with the lowest rank.
    """


TOTALS = Kind("totals", RankTotals, "sums of steps", table="step_totals", exported="step_totals", keep=1)
