"""Sends the tokens of the routers that are watched."""

from __future__ import annotations

from traceml_ray.signals.collector import Collector, Rank
from traceml_ray.signals.experts.records import RouterTokens


class RouterCollector(Collector):
    """Of one process; `Routers` counts."""

    def __init__(self, rank: Rank) -> None:
        self._routers = rank.instrumentation.routers

    def collect(self, final: bool) -> list[RouterTokens]:
        """Return the counts of the routers whose turn it is; at the end, of all."""
        return self._routers.due(final)
