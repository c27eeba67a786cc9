"""Measures the clocks of nodes from the messages of relays, and stores the measurements."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import msgspec

from traceml_ray.analysis.node_clock import DRIFT, ClockEstimate
from traceml_ray.signals.kind import Kind
from traceml_ray.store.writer import SessionWriter
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import Part

STORE_S = 60.0
"""Time between two stored measurements of a node if nothing has changed, in s."""
_FINE_NS = 1_000_000
"""A bound that is smaller need not be improved in the file before that."""
_ON_ITS_OWN_CLOCK = "xid"
"""Events that are compared with samples of their node by their time."""
_R = TypeVar("_R", bound=Part)


class _Stored(NamedTuple):
    at_ns: int
    offset_ns: int
    bound_ns: int


class NodeClocks:
    """
    The offset of each node's clock to the aggregator's, measured over messages that are sent anyway.

    Used with the writer's lock held.
    """

    def __init__(self, writer: SessionWriter) -> None:
        self._writer = writer
        self._estimates: dict[str, ClockEstimate] = {}
        self._stored: dict[str, _Stored] = {}

    def measure(self, batch: wire.RelayBatch, now_ns: int) -> None:
        """
        Measure a node's clock by a message that arrived at `now_ns`, and record the result for
        the node.
        """
        node_id = batch.node.node_id
        estimate = self._estimates.setdefault(node_id, ClockEstimate())
        estimate.add(now_ns, batch.sent_ns, batch.answer)
        node, offset, bound = self._writer.nodes[node_id], estimate.offset_ns, estimate.bound_ns
        node.clock_offset_ns, node.clock_bound_ns = offset, bound
        if offset is not None and bound is not None and self._is_due(node_id, now_ns, offset, bound):
            self._stored[node_id] = _Stored(now_ns, offset, bound)
            self._writer.add_clock(node_id, now_ns - offset, offset, bound)

    def on_ours(self, event: wire.Event, node_id: str | None) -> wire.Event:
        """Return an event of a node with its time on the aggregator's clock, if that is known to differ."""
        return event if event.kind == _ON_ITS_OWN_CLOCK else self._moved(event, "t_ns", node_id)

    def record_on_ours(self, kind: Kind[_R], record: _R, node_id: str | None) -> _R:
        """Return a record with its `node_time` on the aggregator's clock, likewise."""
        return record if kind.node_time is None else self._moved(record, kind.node_time, node_id)

    def _moved(self, sent: _R, name: str, node_id: str | None) -> _R:
        node = self._writer.nodes.get(node_id or "")
        if node is None or not node.correction_ns:
            return sent
        t_ns = getattr(sent, name) + node.correction_ns
        return msgspec.structs.replace(sent, **{name: min(max(t_ns, -(1 << 63)), (1 << 63) - 1)})

    def _is_due(self, node_id: str, now_ns: int, offset_ns: int, bound_ns: int) -> bool:
        """
        Whether the present measurement must be stored: it is better, it has changed, or some
        time has passed.
        """
        known = self._stored.get(node_id)
        if known is None or abs(now_ns - known.at_ns) >= STORE_S * 1e9:
            return True
        moved = abs(offset_ns - known.offset_ns) - DRIFT * abs(now_ns - known.at_ns)
        better = known.bound_ns > _FINE_NS and bound_ns <= known.bound_ns // 2
        return better or moved > known.bound_ns + bound_ns
