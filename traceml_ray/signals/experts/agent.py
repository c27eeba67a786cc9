"""Sends the token counts of watched routers."""

from __future__ import annotations

from traceml_ray.signals.collector import Collector, Rank
from traceml_ray.signals.experts.records import RouterTokens


class RouterCollector(Collector):
    """Collects the token counts of one process. `Routers` does the counting."""

    def __init__(self, rank: Rank) -> None:
        self._routers = rank.instrumentation.routers

    def collect(self, final: bool) -> list[RouterTokens]:
        """Return the counts of the routers that are due; at the end, of all routers."""
        return self._routers.due(final)
