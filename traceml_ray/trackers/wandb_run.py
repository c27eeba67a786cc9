"""Weights & Biases: the run that `wandb.init` has opened."""

from __future__ import annotations

import os
import sys
from typing import Any

from traceml_ray.text import without_login
from traceml_ray.wire.messages import Figures

from .tracker import PREFIX, STEP, VERDICT, WHY, TrackerPlace, values_of

_LEVELS = {"critical": "ERROR", "warning": "WARN"}
"""Level of the alert on a verdict, by its severity. Other verdicts make no alert."""


class WandbRun:
    """
    Figures go into the row that the script has not completed yet (`commit=False`), so its step counter does
    not move, and none of its values changes. They have an axis of their own.
    """

    name = "wandb"

    def __init__(self) -> None:
        self._defined: Any = None
        """The run whose axis is defined."""

    def open_run(self) -> Any | None:
        """Return `wandb.run`. None also for a run of a parent process, and for a disabled run."""
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is None or getattr(run, "_init_pid", None) not in (None, os.getpid()):
            return None
        return None if run.disabled else run

    def place(self, run: Any) -> TrackerPlace:
        """Return the page of the run, or its folder if it is offline."""
        if run.offline:
            return TrackerPlace("", f"{run.dir} (offline)", "")
        return TrackerPlace(run.path, without_login(run.url or run.dir), without_login(run.settings.base_url))

    def write(self, run: Any, figures: Figures, changed: bool) -> None:
        """Write figures; a verdict that names something makes an alert."""
        if run is not self._defined:
            run.define_metric(STEP, hidden=True)
            run.define_metric(f"{PREFIX}*", step_metric=STEP)
            self._defined = run
        words = {VERDICT: figures.label, WHY: figures.why} if figures.label else {}
        run.log({STEP: figures.step, **values_of(figures), **words}, commit=False)
        if changed and figures.severity in _LEVELS:
            run.alert(title=figures.headline, text=figures.why, level=_LEVELS[figures.severity])
