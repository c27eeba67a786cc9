"""The episodes of each live run, kept in the session's file for an aggregator that is restarted."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from traceml_ray.analysis.episodes import Brief, Episodes
from traceml_ray.analysis.history import RunJudge
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.track import Clock, Episode, Track
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.errors import Errors
from traceml_ray.store.packing import Packer
from traceml_ray.store.writer import SessionWriter

KEY = "judging"
"""Key in the session's `meta`."""
EVERY_NS = 10_000_000_000
"""How often open episodes are written; one that begins or ends is written at once."""
MAX_RUNS = 16
FORM = 2
"""To be raised when one of the classes below changes."""
PACKER = Packer(FORM, 16 << 20, Episodes, Brief, Track, Clock, Episode, Verdict, Thresholds)


@dataclass(eq=False)
class Histories:
    """Episodes so far, their cost, and how long each run has been judged; of the newest runs."""

    writer: SessionWriter
    clock: Callable[[], int]
    errors: Errors

    def __post_init__(self) -> None:
        self._kept: dict[str, tuple[object, int]] = {}

    def resume(self, run: str, which: tuple[int, int], judge: RunJudge) -> RunJudge | None:
        """
        Return `judge` with what was kept of that generation (see `rank_processes.trained`), None where
        nothing was that can be used.
        """
        with self.writer.lock:
            kept: dict[str, Any] = self.writer.meta.get(KEY, {}).get(run, {})
        if kept.get("which") != [*which]:
            return None
        try:
            judge.resume(PACKER.unpack(base64.b64decode(kept["state"])))
        except Exception as error:
            self.errors.note("history", error)
            return None
        return judge

    def keep(self, run: str, which: tuple[int, int], judge: RunJudge) -> None:
        """Keep what was found in `run`, when it is due or something new is found."""
        found, now = judge.episodes.named, self.clock()
        before, at_ns = self._kept.get(run, (None, 0))
        if found == before and now - at_ns < EVERY_NS:
            return
        self._kept[run] = found, now
        state = base64.b64encode(PACKER.pack(judge.state())).decode()
        with self.writer.lock:
            kept = dict(self.writer.meta.get(KEY, {}))
            kept.pop(run, None)
            kept[run] = {"which": [*which], "state": state}
            while len(kept) > MAX_RUNS:
                del kept[next(iter(kept))]
            self.writer.set_meta(**{KEY: kept})
