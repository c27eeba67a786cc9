"""What has been found in each live run, kept in the session's file for an aggregator that is restarted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from traceml_ray.analysis.history import RunJudge
from traceml_ray.errors import Errors
from traceml_ray.store.writer import SessionWriter

KEY = "judging"
"""Where it is among what is stored of the session."""
EVERY_NS = 10_000_000_000
"""How often what goes on is kept; what begins or ends is at once."""
MAX_RUNS = 16


class Histories:
    """Episodes so far, what they cost, and how long each run has been judged; of the newest runs."""

    def __init__(self, writer: SessionWriter, clock: Callable[[], int], errors: Errors) -> None:
        self._writer = writer
        self._clock = clock
        self._errors = errors
        self._kept: dict[str, tuple[object, int]] = {}

    def resume(self, run: str, which: tuple[int, int], judge: RunJudge) -> RunJudge | None:
        """
        Return `judge` gone on from what was kept of that generation (see `streams.trained`), None where
        nothing can be used.
        """
        with self._writer.lock:
            kept: dict[str, Any] = self._writer.meta.get(KEY, {}).get(run, {})
        if kept.get("which") != [*which]:
            return None
        try:
            judge.resume(kept["state"])
        except Exception as error:
            self._errors.note("history", error)
            return None
        return judge

    def keep(self, run: str, which: tuple[int, int], judge: RunJudge) -> None:
        """Keep what was found in `run`, when it is time or something else is found."""
        found, now = judge.episodes.named, self._clock()
        before, at_ns = self._kept.get(run, (None, 0))
        if found == before and now - at_ns < EVERY_NS:
            return
        self._kept[run] = found, now
        with self._writer.lock:
            kept = dict(self._writer.meta.get(KEY, {}))
            kept.pop(run, None)
            kept[run] = {"which": [*which], "state": judge.state()}
            while len(kept) > MAX_RUNS:
                del kept[next(iter(kept))]
            self._writer.set_meta(**{KEY: kept})
