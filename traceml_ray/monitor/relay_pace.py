"""How often relays send, and, where they are many, when ranks of every node have reported: time to judge."""

from __future__ import annotations

from collections.abc import Callable

from traceml_ray.monitor.finish import QUIET_S
from traceml_ray.wire import messages as wire

MANY_NODES, MANY_NODES_TICK_S = 64, 1.0
"""Relays of more nodes send less often: each call costs the aggregator some 0.3 ms of CPU time."""


class RelayPace:
    """
    One per session.

    Args:
        ticks: monotonic ns.
    """

    def __init__(self, ticks: Callable[[], int]) -> None:
        self._ticks = ticks
        self.tick_s = wire.TICK_S
        """Interval at which a relay is to send, in s."""
        self._rows_at: dict[str, int] = {}
        """When ranks of each node last reported; only of nodes that still report."""
        self._reported: set[str] = set()
        """Nodes whose ranks have reported since the last judgement."""

    def reported(self, node_id: str) -> None:
        """Note that ranks of a node have reported."""
        self._rows_at[node_id] = self._ticks()
        self._reported.add(node_id)

    def adapt(self, nodes: int) -> None:
        """Choose how often relays of so many nodes send; forget nodes whose ranks have fallen silent."""
        self.tick_s = wire.TICK_S if nodes <= MANY_NODES else MANY_NODES_TICK_S
        since = self._ticks() - int(QUIET_S * 1e9)
        self._rows_at = {node: rows_ns for node, rows_ns in self._rows_at.items() if rows_ns > since}

    def begin_round(self) -> None:
        """All is judged that has been reported."""
        self._reported.clear()

    @property
    def many_nodes(self) -> bool:
        """Whether relays send less often, all at the same times."""
        return self.tick_s > wire.TICK_S

    @property
    def round_is_complete(self) -> bool:
        """Whether ranks of each of many nodes have reported since the last judgement: the next may come."""
        return self.many_nodes and 0 < len(self._rows_at) <= len(self._reported)
