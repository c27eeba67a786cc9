"""What is asked about experts. The shape of the answer is in `analysis.uneven_work`."""

from __future__ import annotations

from traceml_ray.analysis.uneven_work import ExpertLoad
from traceml_ray.store.query import OfRun
from traceml_ray.wire.codec import Int64


class GetExperts(OfRun[list[ExpertLoad]], frozen=True):
    """How evenly routers use their experts, the least even first: of all ranks together, or of one."""

    rank: Int64 | None = None
