"""The figures of a session for Prometheus, and `/health`, in the formats that a scrape asks for."""

from __future__ import annotations

from typing import Any

from prometheus_client.core import CollectorRegistry, CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from traceml_ray.views.session_poll import SessionPoll
from traceml_ray.views.state import state_of

from .figures import MOST, Family, families_of


def health(session: SessionPoll) -> dict[str, Any]:
    """
    Return whether the session answers, and its state. It contains nothing private, because it requires no
    token.
    """
    return {
        "status": "ok" if session.stale_since_ns is None else "stale",
        "state": state_of(session, session.newest),
    }


class Metrics:
    """
    The metrics of one session, as a registry of the library has them: made anew for each scrape.

    Args:
        session: what is known of it.
        most: largest number of ranks, or devices, with a series each; of more, only nodes and the worst rank
            have one.
    """

    def __init__(self, session: SessionPoll, most: int = MOST) -> None:
        self._session, self._most = session, most
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def collect(self) -> list[Metric]:
        """Return the families that have samples. What one of them asks of the session is asked at once."""
        made = self._session.make(lambda: list(families_of(self._session, self._most)))[1]
        return [_metric(family) for family in made if family.series]

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics in the format that an `Accept` header asks for, and its content type."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # the library expects every version to be a number
            encode, content_type = choose_encoder("")
        return encode(self.registry), content_type


def _metric(family: Family) -> Metric:
    kind = CounterMetricFamily if family.counter else GaugeMetricFamily
    metric = kind(f"traceml_{family.name}", family.about, labels=family.labels, unit=family.unit)
    for labels, value in family.series:
        metric.add_metric(labels, value)
    return metric
