"""What a rank says of the routers that are watched."""

from __future__ import annotations

from typing import Annotated

import msgspec

from traceml_ray.signals.kind import Kind
from traceml_ray.wire.codec import Count, Part

MAX_ROUTERS, MAX_EXPERTS = 64, 512
"""Routers of one rank process whose tokens are counted, and experts of one of them."""


class RouterTokens(Part, frozen=True):
    """How many tokens a router of a rank has given to each expert so far."""

    number: Annotated[int, msgspec.Meta(ge=0, lt=MAX_ROUTERS)]
    """Of the router, in the order in which the rank began to watch them."""
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
