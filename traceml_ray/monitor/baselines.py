"""The baseline of each run of a session, kept in its file so that a restarted aggregator goes on with it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from traceml_ray.analysis.baseline import Baseline
from traceml_ray.errors import Errors
from traceml_ray.reports.baseline import given
from traceml_ray.settings import SettingError, Settings
from traceml_ray.store.runs import MAX_RUNS
from traceml_ray.store.writer import SessionWriter


@dataclass(eq=False)
class Baselines:
    """What runs are judged by; a given baseline that cannot be read is counted in `errors`."""

    writer: SessionWriter
    settings: Settings
    errors: Errors

    def __post_init__(self) -> None:
        self._given: Baseline | None = None
        self._read = False

    def of(self, run: str) -> Baseline | None:
        """Return the one kept for `run`, else the one given. Reads a file the first time."""
        with self.writer.lock:
            kept = self.writer.meta.get("baselines", {}).get(run)
        if kept is not None:
            return msgspec.convert(kept, Baseline)
        if not self._read:
            self._read = True
            try:
                self._given = given(self.settings)
            except SettingError as error:
                self.errors.note("baseline", error)
        return self._given

    def keep(self, run: str, baseline: Baseline | None) -> None:
        """Keep what `run` is judged by now, where that has changed."""
        kept_as = None if baseline is None else msgspec.to_builtins(baseline)
        with self.writer.lock:
            kept = dict(self.writer.meta.get("baselines", {}))
            if kept.get(run) == kept_as:
                return
            kept[run] = kept_as
            while len(kept) > MAX_RUNS:
                del kept[next(iter(kept))]
            self.writer.set_meta(baselines=kept)
