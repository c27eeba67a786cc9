"""The baseline of each run of a session, kept in its file so that a restarted aggregator goes on with it."""

from __future__ import annotations

import msgspec

from traceml_ray.analysis.baseline import Baseline
from traceml_ray.errors import Errors
from traceml_ray.reports.baseline import given
from traceml_ray.settings import SettingError, Settings
from traceml_ray.store.runs import MAX_RUNS
from traceml_ray.store.writer import SessionWriter


class Baselines:
    """What runs are judged by; of a baseline that is given and cannot be read, `errors` tells."""

    def __init__(self, writer: SessionWriter, settings: Settings, errors: Errors) -> None:
        self._writer = writer
        self._settings = settings
        self._errors = errors
        self._given: Baseline | None = None
        self._asked = False

    def of(self, run: str) -> Baseline | None:
        """Return the one kept for `run`, else the one given. Reads a file the first time."""
        with self._writer.lock:
            kept = self._writer.meta.get("baselines", {}).get(run)
        if kept is not None:
            return msgspec.convert(kept, Baseline)
        if not self._asked:
            self._asked = True
            try:
                self._given = given(self._settings)
            except SettingError as error:
                self._errors.note("baseline", error)
        return self._given

    def keep(self, run: str, baseline: Baseline | None) -> None:
        """Keep what `run` is judged by now; nothing to do when it is what is kept."""
        told = None if baseline is None else msgspec.to_builtins(baseline)
        with self._writer.lock:
            kept = dict(self._writer.meta.get("baselines", {}))
            if kept.get(run) == told:
                return
            kept[run] = told
            while len(kept) > MAX_RUNS:
                del kept[next(iter(kept))]
            self._writer.set_meta(baselines=kept)
