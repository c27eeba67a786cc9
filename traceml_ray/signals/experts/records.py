"""What a rank reports about the routers that it watches."""

from __future__ import annotations

from typing import Annotated

import msgspec

from traceml_ray.signals.kind import Kind
from traceml_ray.wire.codec import Count, Part

MAX_ROUTERS, MAX_EXPERTS = 64, 512
"""Largest number of routers per rank process whose tokens are counted, and of experts per router."""


class RouterTokens(Part, frozen=True):
    """Number of tokens that a router of a rank has given to each expert so far."""

    number: Annotated[int, msgspec.Meta(ge=0, lt=MAX_ROUTERS)]
    """Number of the router, in the order in which the rank began to watch its routers."""
    name: Annotated[str, msgspec.Meta(max_length=1024)]
    tokens: Annotated[list[Count], msgspec.Meta(max_length=MAX_EXPERTS)]


EXPERTS = Kind(
    "experts",
    RouterTokens,
    "counts of experts",
    table="router",
    exported="experts",
    keep=MAX_ROUTERS,
    slot=lambda record: record.number,
    bundle="all",
)
