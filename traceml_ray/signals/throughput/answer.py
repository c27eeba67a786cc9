"""What is asked about how much a job gets through; `signals.throughput.judge` has the shape of the answer."""

from __future__ import annotations

from traceml_ray.signals.throughput.judge import Throughput
from traceml_ray.store.query import OfRun


class GetThroughput(OfRun[Throughput], frozen=True):
    """Samples, tokens and FLOPs a second, and what is still to come; `whole` as of `query.Times`."""

    whole: bool | None = None
