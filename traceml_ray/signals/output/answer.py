"""What is asked about last lines. The shape of the answer is in `signals.output.lines`."""

from __future__ import annotations

from traceml_ray.signals.output.lines import LastOutput
from traceml_ray.store.query import OfRun
from traceml_ray.wire.codec import Count, Int64

REPORTED_LINES = 12
"""Lines of each stream that stand beside a failure."""
MOST_LINES = 40
"""Lines of each stream that a page asks for."""


class GetOutput(OfRun[list[LastOutput]], frozen=True):
    """
    What a rank printed last, `most` lines of stdout and as many of stderr; without a `rank`, of those that a
    failure names, which a report alone knows.
    """

    rank: Int64 | None = None
    most: Count = REPORTED_LINES
