"""The kinds of sinks, and which of them the settings of a session ask for. One more sink is one more line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    variables: Callable[[Settings], Sequence[str]] = lambda _: ()
    """Environment variables that it reads. A name that ends in `_` stands for all that begin so."""


def _variables_of_alerts(settings: Settings) -> Sequence[str]:
    from .alerts.config import variables_of  # 5 ms that only a session with alerts takes

    return variables_of(settings)


KINDS = (
    SinkKind(
        "prometheus",
        lambda settings: settings.metrics_port is not None,
        "scraped",
        "metrics",
        lambda _: ("TRACEML_METRICS_TOKEN",),
    ),
    SinkKind(
        "alerts", lambda settings: settings.alerts is not None, "alerts.alerting", "", _variables_of_alerts
    ),
    SinkKind("ray", lambda settings: settings.ray_metrics, "ray_metrics", ""),
    SinkKind(
        "kubeflow",
        lambda settings: settings.kubeflow,
        "kubeflow",
        "",
        lambda _: ("KUBEFLOW_TRAINER_SERVER_",),
    ),
    SinkKind("opentelemetry", lambda settings: settings.otel, "otel", "otel", lambda _: ("OTEL_",)),
    SinkKind(
        "trackers",
        lambda settings: settings.log_to is not None,
        "trackers",
        "",
        lambda _: ("WANDB_", "MLFLOW_", "COMET_"),
    ),
)


def wanted(settings: Settings) -> list[SinkKind]:
    """Return the kinds of sinks that the settings ask for."""
    return [kind for kind in KINDS if kind.wanted(settings)]


def environment_of(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """
    Return the variables of `environ` that the wanted sinks read. Their process may run where the user's
    environment is not known. They may be secrets: no file and no answer may contain them.
    """
    names = [name for kind in wanted(settings) for name in kind.variables(settings)]
    exact, beginnings = frozenset(names), tuple(name for name in names if name.endswith("_"))
    return {name: value for name, value in environ.items() if name in exact or name.startswith(beginnings)}
