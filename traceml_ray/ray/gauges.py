"""Ray's own metrics of a session, recorded in the process of its aggregator."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import ray
from ray.util.metrics import Gauge

from traceml_ray.store.query import QueryError, RayGauge

_Labels = tuple[str, ...]


def check_served() -> None:
    """Raise QueryError if the Ray of this node serves no metrics."""
    here = ray.get_runtime_context().get_node_id()
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    (port,) = (node.get("MetricsExportPort", 0) for node in nodes if node["NodeID"] == here)
    if port <= 0:
        raise QueryError(
            "the Ray of this node serves no metrics: it needs `pip install 'ray[default]'`, and the private "
            "Ray of a launcher has none"
        )


class RayGauges:
    """
    Records gauges. Ray 2.60 drops a series that is not recorded again, after twice the interval at which
    processes pass their metrics on. An older Ray may keep it until the process ends: it has no call to
    remove a series. So a series that has ended gets the value `RayGauge.ended`, once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served = False
        """Whether this node is known to serve metrics."""
        self._gauges: dict[str, Gauge] = {}
        self._current: dict[str, tuple[RayGauge, set[_Labels]]] = {}
        """By name: the gauge, and the tags of its series that go on."""

    def set(self, gauges: Sequence[RayGauge]) -> None:
        """Record the series of `gauges`, and end all others. Raises QueryError if nobody would see them."""
        with self._lock:
            if gauges and not self._served:
                check_served()
                self._served = True
            before, self._current = self._current, {g.name: (g, {s[0] for s in g.series}) for g in gauges}
            for name, (gauge, series) in before.items():
                _, now = self._current.get(name, (gauge, set[_Labels]()))
                for labels in series - now:
                    self._record(gauge, labels, gauge.ended)
            for gauge in gauges:
                for labels, value in gauge.series:
                    self._record(gauge, labels, value)

    def _record(self, gauge: RayGauge, labels: _Labels, value: float) -> None:
        known = self._gauges.get(gauge.name)
        if known is None:
            known = self._gauges[gauge.name] = Gauge(gauge.name, gauge.about, gauge.tags)
        known.set(value, dict(zip(gauge.tags, labels, strict=True)))
