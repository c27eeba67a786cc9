"""Which verdicts have a run profiled without being asked: those that last, a few times, with long pauses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from traceml_ray import text, wire
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.monitor.captures import Wanted
from traceml_ray.settings import Settings

STEPS = 3
"""Of each such profile,"""
MOST_S = 10.0
"""fewer where they take longer than that: what is recorded takes memory. None of steps that are longer."""

Peer = Callable[[Verdict], int | None]
"""Returns the rank that those of a verdict are compared with."""


class AutoProfile:
    """
    One per session.

    Args:
        settings: of the session.
        ticks: monotonic seconds.
    """

    def __init__(self, settings: Settings, ticks: Callable[[], float]) -> None:
        self._most, self._pause_s = settings.auto_profile, 60 * settings.auto_profile_minutes
        self._ticks = ticks
        self._times: Counter[str] = Counter()
        self._last: dict[str, float] = {}
        self._done: set[tuple[object, ...]] = set()

    @property
    def is_on(self) -> bool:
        """Whether anything may be profiled without being asked."""
        return self._most > 0

    def check(self, run: str, verdict: Verdict | None, peer: Peer) -> Wanted | None:
        """Return what is to be profiled because of the present verdict on `run`; None: nothing."""
        if verdict is None or not _lasts(verdict) or self._times[run] >= self._most:
            return None
        now, what = self._ticks(), (run, verdict.label, verdict.stage, verdict.ranks, verdict.from_step)
        if what in self._done or now - self._last.get(run, -self._pause_s) < self._pause_s:
            return None
        median = peer(verdict)
        ranks = sorted({rank for rank in (verdict.rank, median) if rank is not None})
        steps = min(STEPS, int(1e3 * MOST_S / verdict.mean_step_ms)) if verdict.mean_step_ms else 0
        if not ranks or not steps:
            return None
        self._times[run] += 1
        self._last[run] = now
        self._done.add(what)
        request = wire.ProfileRequest(",".join(map(str, ranks)), steps, run=run)
        return Wanted(
            request,
            _why(verdict, median),
            by_itself=True,
            suspect=verdict.rank,
            stage=verdict.stage,
            median=median,
        )


def _lasts(verdict: Verdict) -> bool:
    """Whether its cause is something that ranks do in most of their steps."""
    named = verdict.rank is not None or verdict.label == "group_wide"
    return named and verdict.meaning.kind == "finding" and bool(verdict.chronic)


def _why(verdict: Verdict, median: int | None) -> str:
    stage = f" in {verdict.stage}" if verdict.stage else ""
    if verdict.rank is None:
        return f"all ranks have become slower{stage}."
    beside = "" if median is None else f"; {text.ranks([median])} is the median of the others"
    return f"{text.ranks([verdict.rank])} is late{stage} in most steps{beside}."
