"""What a restarted aggregator goes on judging with, kept in the session's file: baselines and episodes."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from traceml_ray.analysis.baseline import Baseline
from traceml_ray.analysis.episodes import AtEnd, Brief, Episodes
from traceml_ray.analysis.history import RunJudge
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.track import Clock, Episode, FindingTrack, Recurring
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.watching import Watch
from traceml_ray.errors import Errors
from traceml_ray.reports.baseline import given
from traceml_ray.settings import SettingError, Settings
from traceml_ray.store.packing import Packer
from traceml_ray.store.runs import MAX_RUNS
from traceml_ray.store.writer import SessionWriter
from traceml_ray.wire.codec import ready

KEY = "judging"
"""Key of the episodes in the session's `meta`."""
EVERY_NS = 10_000_000_000
"""How often open episodes are written; one that begins or ends is written at once."""
MAX_HISTORIES = 16
FORM = 5
"""Version of the packed form. It is raised when one of the classes below changes, as in `store/packing`."""
PACKER = Packer(
    FORM,
    16 << 20,
    Episodes,
    Brief,
    FindingTrack,
    Recurring,
    Clock,
    Episode,
    AtEnd,
    Watch,
    Verdict,
    Thresholds,
)


@dataclass(eq=False)
class SavedState:
    """
    Of the newest runs: the baseline, the episodes so far, their cost, and how long the run has been judged.

    What cannot be read is counted in `errors`: a baseline that the settings name, or kept episodes.
    """

    writer: SessionWriter
    settings: Settings
    clock: Callable[[], int]
    errors: Errors

    def __post_init__(self) -> None:
        self._kept: dict[str, tuple[object, int]] = {}
        """The episodes saved last, and the time, by run."""

    def baseline(self, run: str) -> Baseline | None:
        """Return the one kept for `run`, else the one given. Reads a file the first time."""
        kept = self._kept_of(run, "baselines")
        return self._given if kept is None else msgspec.convert(kept, ready(Baseline))

    def resume(self, run: str, which: tuple[int, int], judge: RunJudge) -> dict[int, int]:
        """
        Restore the stored episodes of the generation with that key into `judge`, if they can be used. Return
        when they began (ns since the epoch), by first step.
        """
        kept = self._kept_of(run, KEY)
        if kept is None or kept.get("which") != [*which]:
            return {}
        try:
            judge.resume(PACKER.unpack(base64.b64decode(kept["state"])))
            return dict(kept["began"])
        except Exception as error:
            self.errors.note("history", error)
            return {}

    def keep(self, run: str, which: tuple[int, int], judge: RunJudge, began: Mapping[int, int]) -> None:
        """
        Keep the baseline of `run`, and its episodes with when they `began` (as `resume` returns it) when that
        is due or something new is found.
        """
        baseline = None if judge.baseline is None else msgspec.to_builtins(judge.baseline)
        self._keep(run, "baselines", baseline, MAX_RUNS)
        named, now = judge.episodes.named, self.clock()
        before, at_ns = self._kept.get(run, (None, 0))
        if named != before or now - at_ns >= EVERY_NS:
            self._kept[run] = named, now
            state = base64.b64encode(PACKER.pack(judge.state())).decode()
            times = [[step, t_ns] for step, t_ns in began.items()]
            self._keep(run, KEY, {"which": [*which], "state": state, "began": times}, MAX_HISTORIES)

    @cached_property
    def _given(self) -> Baseline | None:
        try:
            return given(self.settings)
        except SettingError as error:
            self.errors.note("baseline", error)
            return None

    def _kept_of(self, run: str, key: str) -> Any:
        with self.writer.lock:
            return self.writer.meta.get(key, {}).get(run)

    def _keep(self, run: str, key: str, value: Any, most: int) -> None:
        with self.writer.lock:
            kept = dict(self.writer.meta.get(key, {}))
            if kept.pop(run, None) == value:
                return
            kept[run] = value
            while len(kept) > most:
                del kept[next(iter(kept))]
            self.writer.set_meta(**{key: kept})
