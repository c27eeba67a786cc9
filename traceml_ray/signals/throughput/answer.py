"""What is asked about how much a job gets through. The shape of the answer is in `store.step_shapes`."""

from __future__ import annotations

from traceml_ray.store.query import OfRun
from traceml_ray.store.step_shapes import Throughput


class GetThroughput(OfRun[Throughput], frozen=True):
    """Samples, tokens and FLOPs a second, and what is still to come; `whole` as of `query.Times`."""

    whole: bool | None = None
