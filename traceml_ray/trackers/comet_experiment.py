"""Comet: the experiment of the script that is running, online or offline."""

from __future__ import annotations

import sys
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from traceml_ray.text import without_login
from traceml_ray.wire.messages import Figures

from .tracker import STEP, VERDICT, WHY, TrackerPlace, values_of

_CONFIG = "comet_ml.config"


class CometExperiment:
    """
    Figures are metrics without a step of ours: `log_metric(step=…)` would move the step of the experiment,
    which the script's own metrics get. So each has the step that the script has set last, and our step is a
    metric of its own. The verdict is a pair under "Other".
    """

    name = "comet"

    def open_run(self) -> Any | None:
        """Return the running experiment. None also for a disabled one, and for one of a parent process."""
        running = getattr(sys.modules.get(_CONFIG), "get_global_experiment", None)
        experiment = running() if running else None
        if experiment is None or not experiment.alive:
            return None
        # The streamer is a thread, which a forked child does not have.
        return experiment if experiment.streamer.is_alive() else None

    def place(self, run: Any) -> TrackerPlace:
        """Return the page of the experiment and its server; if it is offline, the folder of its archive."""
        if (folder := getattr(run, "offline_directory", None)) is not None and not run.url:
            return TrackerPlace("", f"{folder} (offline)", "")
        page = without_login(run.url or "")
        parts = urlsplit(page)
        return TrackerPlace(run.get_key(), page, urlunsplit((parts.scheme, parts.netloc, "", "", "")))

    def write(self, run: Any, figures: Figures, changed: bool) -> None:
        """Write figures as metrics; a new verdict as pairs. A context of the script gives them no prefix."""
        for name, value in {STEP: figures.step, **values_of(figures)}.items():
            run.log_metric(name, value, include_context=False)
        if changed and figures.label:
            for name, text in {VERDICT: figures.label, WHY: figures.why}.items():
                run._log_other(name, text, include_context=False)
