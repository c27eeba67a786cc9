"""
Attaches the report of a session that is over to a run of a tracker. The run has ended with its script, so the
tracker's API is used, in the process of the sinks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from traceml_ray.text import without_login
from traceml_ray.trackers.tracker import STEP, VERDICT, WHY, values_of
from traceml_ray.wire.messages import Figures, TrackerState

_FOLDER = "traceml"
"""Folder of the run's artifacts."""
_TIMEOUT_S = 10


def attach(state: TrackerState, report: Path, figures: Figures) -> None:
    """
    Attach the file `report`, and the last figures, to the run of a tracker. Does nothing for a tracker
    without an API for ended runs, and for a run that its API cannot find (offline).

    Raises whatever the tracker raises.
    """
    if state.run and state.uri and state.name in _ATTACH:
        _ATTACH[state.name](state, report, figures)


def _to_mlflow(state: TrackerState, report: Path, figures: Figures) -> None:
    uri = _with_password(state.uri, "MLFLOW_TRACKING_URI")
    if (folder := _local(uri)) is not None and not folder.exists():
        raise FileNotFoundError(f"{folder} is not on this machine")  # MLflow would make another store there
    from mlflow import MlflowClient
    from mlflow.entities import Metric, RunTag

    client, now = MlflowClient(uri), time.time_ns() // 1_000_000
    metrics = [Metric(name, value, now, figures.step) for name, value in values_of(figures).items()]
    tags = [RunTag(VERDICT, figures.label), RunTag(WHY, figures.why)]
    client.log_batch(state.run, metrics, tags=tags)
    client.log_artifact(state.run, str(report), _FOLDER)


def _to_wandb(state: TrackerState, report: Path, figures: Figures) -> None:
    import wandb

    run: Any = wandb.Api({"base_url": state.uri}, timeout=_TIMEOUT_S).run(state.run)
    run.summary.update({STEP: figures.step, **values_of(figures), VERDICT: figures.label, WHY: figures.why})
    run.upload_file(str(report), root=str(report.parent.parent))


def _to_comet(state: TrackerState, report: Path, figures: Figures) -> None:
    import comet_ml.api

    api: Any = comet_ml.api
    experiment = api.APIExperiment(previous_experiment=state.run)
    experiment.log_asset(str(report), name=f"{_FOLDER}/{report.name}")
    for name, text in {VERDICT: figures.label, WHY: figures.why}.items():
        experiment.log_other(name, text)
    experiment.log_metrics({STEP: figures.step, **values_of(figures)})


_ATTACH: dict[str, Callable[[TrackerState, Path, Figures], None]] = {
    "mlflow": _to_mlflow,
    "wandb": _to_wandb,
    "comet": _to_comet,
}


def _with_password(uri: str, variable: str) -> str:
    """Return the URI in the environment variable if it is this one, but with a password."""
    given = os.environ.get(variable, "")
    return given if given and without_login(given) == uri else uri


def _local(uri: str) -> Path | None:
    """Return the file or folder of a local URI; None for a server."""
    parts = urlsplit(uri)
    if parts.scheme == "sqlite":
        return Path(unquote(parts.path).removeprefix("/"))
    return Path(unquote(parts.path)) if parts.scheme in ("", "file") else None
