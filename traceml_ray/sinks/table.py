"""The kinds of sinks, and which of them the settings of a session ask for. One more sink is one more line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from traceml_ray.settings import Settings


@dataclass(frozen=True)
class SinkKind:
    """A kind of sink."""

    name: str
    wanted: Callable[[Settings], bool]
    """Whether the settings ask for it."""
    module: str
    """Module of this package whose `opened(session, settings)` returns the sink. It is imported on use."""
    extra: str
    """Extra of traceml-ray with the packages that it needs; "": none."""


KINDS = (
    SinkKind("prometheus", lambda settings: settings.metrics_port is not None, "scraped", "metrics"),
    SinkKind("alerts", lambda settings: settings.alerts is not None, "alerts.alerting", ""),
    SinkKind("ray", lambda settings: settings.ray_metrics, "ray_metrics", ""),
    SinkKind("kubeflow", lambda settings: settings.kubeflow, "kubeflow", ""),
)


def wanted(settings: Settings) -> list[SinkKind]:
    """Return the kinds of sinks that the settings ask for."""
    return [kind for kind in KINDS if kind.wanted(settings)]
