"""
Progress of the run for Kubeflow Trainer: `status.trainerStatus` of the TrainJob in whose pods it trains.

With its feature gate `TrainJobStatus`, Kubeflow Trainer (2.2 and newer) gives each trainer pod the three
variables below. A post replaces the whole status, so only one process of a job may post: here the one of the
sinks, which is where the aggregator is.
"""

from __future__ import annotations

import json
import math
import os
import ssl
import urllib.request
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

from traceml_ray.settings import Settings
from traceml_ray.store.results import SinkState
from traceml_ray.text import HIDDEN, without_login
from traceml_ray.views.session_poll import SessionPoll

from .no_redirect import NoRedirect
from .report import Report
from .sink import Sender

URL = "KUBEFLOW_TRAINER_SERVER_URL"
"""Variable with the URL that is posted to."""
CA = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
"""Variable with the path of the certificate of the server's authority."""
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
"""Variable with the path of the file that contains the token. Kubernetes replaces its contents hourly."""
EVERY_S = 5.0
"""Least number of seconds between two posts, as Kubeflow Trainer asks for."""
TIMEOUT_S = 5.0
"""How long the server may be silent, in s."""
_MOST_LOGGED = 32
"""Largest number of values of the script that are posted. The server takes 256 metrics."""
_LONGEST = 64
"""Largest number of characters of a name or value that the server takes."""
_MOST_SECONDS = (1 << 31) - 1
_MOST_BYTES = 4096
"""Largest number of bytes read of an answer that refuses."""


def status_of(report: Report) -> dict[str, Any] | None:
    """Return the `trainerStatus` of a report. None: no step is known yet."""
    if report.step is None:
        return None
    status: dict[str, Any] = {
        "metrics": [
            {"name": name, "value": value}
            for name, value in _metrics(report)
            if 0 < len(name) <= _LONGEST and 0 < len(value) <= _LONGEST
        ],
        "lastUpdatedTime": datetime.fromtimestamp(report.made_ns // 10**9, timezone.utc).strftime(
            "%Y-%m-%dT%H:%M:%SZ"
        ),
    }
    if report.total_steps:
        done = min(report.total_steps, report.step + 1)
        status["progressPercentage"] = 100 * done // report.total_steps
        if report.eta_s is not None and math.isfinite(report.eta_s):
            status["estimatedRemainingSeconds"] = min(_MOST_SECONDS, math.ceil(report.eta_s))
        elif done == report.total_steps:
            status["estimatedRemainingSeconds"] = 0
    return status


def _metrics(report: Report) -> Iterator[tuple[str, str]]:
    """Yield name and value of each metric: of the run, and the newest values that the script has logged."""
    series = {family.name: family.series for family in report.figures}
    yield "step", str(report.step)
    if report.total_steps:
        yield "total_steps", str(report.total_steps)
    for (_, quantile), seconds in series.get("step", ()):
        yield f"step_time_{'median' if quantile == '0.5' else 'p95'}_s", _written(seconds)
    for (_, what), rate in series.get("throughput", ()):
        yield f"{what}_per_s", _written(rate)
    for (_, which), count in series.get("ranks", ()):
        yield f"ranks_{which}", _written(count)
    if report.verdict is not None:
        yield "verdict", report.verdict.label
    for _, ratio in series.get("verdict_cost", ()):
        yield "verdict_cost_percent", _written(100 * ratio, 3)
    for (_, name), value in series.get("logged", ())[:_MOST_LOGGED]:
        yield name, _written(value)


def _written(value: float, digits: int = 6) -> str:
    """Return a figure as the server takes it."""
    return format(value, f".{digits}g")


def post(status: Mapping[str, Any], url: str, ca: Path, token: Path) -> None:
    """
    Post a `trainerStatus`. The files are read each time, because both are replaced while a job runs.

    Raises OSError, also if the server refuses.
    """
    secret = token.read_text().strip()
    if not secret.isascii() or not secret.isprintable() or not secret or " " in secret:
        raise OSError(f"{token} has no token")
    request = urllib.request.Request(
        url,
        json.dumps({"trainerStatus": status}).encode(),
        {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"},
    )
    trusted = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=str(ca)))
    direct = urllib.request.ProxyHandler({})  # the server is a service of the cluster
    try:
        with urllib.request.build_opener(trusted, direct, NoRedirect).open(request, timeout=TIMEOUT_S):
            pass
    except HTTPError as error:
        with error:
            raise OSError(f"{error.code}: {_why(error)}".replace(secret, HIDDEN)) from None


def _why(error: HTTPError) -> str:
    """Return why the server refuses: the message of its `Status`, if there is one."""
    try:
        status = json.loads(error.read(_MOST_BYTES))
        return " ".join(str(status["message"]).split())
    except (OSError, ValueError, KeyError, TypeError):
        return error.reason


class Kubeflow:
    """
    Posts the progress of the run.

    Args:
        url: of the server; https.
        ca: path of the certificate of its authority.
        token: path of the file with the token.
        every_s: least number of seconds between two posts.
    """

    takes_reports = True

    def __init__(self, url: str, ca: Path, token: Path, every_s: float = EVERY_S) -> None:
        self._sender = Sender(
            "kubeflow", without_login(url), partial(post, url=url, ca=ca, token=token), every_s=every_s
        )

    def offer(self, report: Report) -> None:
        """Have the progress posted, once there is a step."""
        status = status_of(report)
        if status is not None:
            self._sender.offer(status)

    def state(self) -> SinkState:
        """Return how many posts were accepted, and how many failed."""
        return self._sender.state()

    def close(self, deadline_s: float) -> None:
        """Post the last progress."""
        self._sender.close(deadline_s)


def opened(_session: SessionPoll, _settings: Settings, environ: Mapping[str, str] = os.environ) -> Kubeflow:
    """
    Return what posts to the server that the environment names.

    Raises ValueError if the environment names none.
    """
    missing = [name for name in (URL, CA, TOKEN) if not environ.get(name)]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} not set where the session is started: Kubeflow Trainer sets it in the "
            "pods of a TrainJob if its feature gate TrainJobStatus is on"
        )
    parts = urlsplit(environ[URL])
    if parts.scheme != "https" or not parts.hostname:
        raise ValueError(f"{URL} must be an https URL, because a token is sent to it")
    return Kubeflow(environ[URL], Path(environ[CA]), Path(environ[TOKEN]))
