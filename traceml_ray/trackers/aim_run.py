"""Aim: an `aim.Run` that the script has open."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.text import without_login
from traceml_ray.wire.messages import Figures

from .tracker import VERDICT, ImportPatch, TrackerPlace, values_of

_MODULE = "aim.sdk.run"
_CONTEXT = {"traceml": True}
_PARAMETERS = "traceml"


class AimRun:
    """
    Figures are series with a context of their own, and with the step of each. The verdict is a parameter of
    the run, and a series of texts.
    """

    name = "aim"

    def __init__(self) -> None:
        self._made: list[weakref.ref[Any]] = []
        """The script's runs in the order in which they were made."""

    def patches(self) -> list[ImportPatch]:
        """Return what is patched to know the script's runs: nothing lists them."""
        return [(_MODULE, self.name, self._patch)]

    def _patch(self, patcher: Patcher) -> None:
        note = patcher.after("aim", lambda run, _: self._note(run))
        patcher.replace(sys.modules[_MODULE].Run, "__init__", note)

    def _note(self, run: Any) -> None:
        self._made = [made for made in self._made if made() is not None] + [weakref.ref(run)]

    def open_run(self) -> Any | None:
        """Return the first run that is open for writing, and not closed."""
        for made in self._made:
            run = made()
            if getattr(run, "_resources", None) is not None and not getattr(run, "read_only", True):
                return run
        return None

    def place(self, run: Any) -> TrackerPlace:
        """Return the id of the run and the place of its repository."""
        return TrackerPlace("", f"run {run.hash} at {without_login(str(run.repo.path))}", "")

    def write(self, run: Any, figures: Figures, changed: bool) -> None:
        """Write figures as series; a new verdict as a parameter and a text."""
        for name, value in values_of(figures).items():
            run.track(value, name=name, step=figures.step, context=_CONTEXT)
        if changed and figures.label:
            run[_PARAMETERS] = {"verdict": figures.label, "why": figures.why}
            text = sys.modules["aim"].Text(f"{figures.headline}: {figures.why}")
            run.track(text, name=VERDICT, step=figures.step, context=_CONTEXT)
