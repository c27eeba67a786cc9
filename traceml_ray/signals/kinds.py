"""All kinds of records, by name. Agent, relay, aggregator, session file and exports use this list."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from traceml_ray.signals.check.records import CHECKS
from traceml_ray.signals.collectives.records import CALLS, LAST_CALLS
from traceml_ray.signals.experts.records import EXPERTS
from traceml_ray.signals.goodput.records import LIFE, LIFECYCLE
from traceml_ray.signals.goodput.totals import TOTALS
from traceml_ray.signals.kind import Kind
from traceml_ray.signals.layers.records import LAYERS
from traceml_ray.signals.logged.records import LOGGED
from traceml_ray.signals.memory.records import MEMORY
from traceml_ray.signals.nodes.records import NODE
from traceml_ray.signals.output.records import OUTPUT
from traceml_ray.signals.sharding.records import SHARDING
from traceml_ray.signals.throughput.records import SIZES, WORK
from traceml_ray.wire.codec import Part, encode_part

KINDS: dict[str, Kind[Any]] = {
    kind.name: kind
    for kind in (
        *(LAST_CALLS, MEMORY, WORK, SIZES, OUTPUT, LAYERS, EXPERTS, SHARDING, LOGGED),
        *(CALLS, LIFECYCLE, LIFE, TOTALS, CHECKS, NODE),
    )
}
"""Kinds of records by name, in the order in which they get space in a batch."""
OF_RECORD: dict[type[Part], Kind[Any]] = {kind.record: kind for kind in KINDS.values()}
"""Kind of each record struct."""


def encoded(records: Iterable[Part]) -> dict[str, list[msgspec.Raw]]:
    """Return records of any kinds, encoded as the field of a message."""
    by_kind: dict[str, list[msgspec.Raw]] = {}
    for record in records:
        by_kind.setdefault(OF_RECORD[type(record)].name, []).append(encode_part(record))
    return by_kind
