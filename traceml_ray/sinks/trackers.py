"""
Experiment trackers: `--log-to`. The sink passes figures on to rank 0, which writes them into the runs that
the script has open there (`trackers.run_writer`). Once the session is over, it attaches the report to these
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from traceml_ray.analysis.labels import LABELS
from traceml_ray.errors import error_text
from traceml_ray.settings import Settings
from traceml_ray.signals.finding import headline
from traceml_ray.store import query
from traceml_ray.store.results import SinkState
from traceml_ray.store.session import PAGE
from traceml_ray.views.session_poll import SessionPoll
from traceml_ray.wire.messages import Figures, TrackerState

from .report import Report
from .report_in_tracker import attach
from .sink import Sender

EVERY_S = 10.0
"""Least time between two figures with the same verdict, in s. A new verdict goes with the next poll."""
_MOST_WHY_CHARS = 1000
_NAME = "trackers"


def figures_of(report: Report) -> Figures | None:
    """Return the figures of a report for trackers. None: there are no steps yet."""
    if report.run is None or report.step is None:
        return None
    verdict = report.verdict
    values: dict[str, float | None] = {}
    by_name = {family.name: family.series for family in report.figures}
    for (*_, quantile), seconds in by_name.get("step", ()):
        values[f"step_p{round(float(quantile) * 100)}_ms"] = seconds * 1e3
    for (*_, stage), seconds in by_name.get("exposed", ()):
        values[f"exposed_ms/{stage}"] = seconds * 1e3
    busy = {int(rank): seconds for (_, rank, _), seconds in by_name.get("rank_busy", ())}
    if report.world > 1 and busy:
        values["worst_rank"] = worst = max(busy, key=lambda rank: busy[rank])
        values["worst_busy_ms"] = busy[worst] * 1e3
    if verdict is None:
        return Figures(report.made_ns, report.step, _known(values))
    named = LABELS[verdict.label].kind != "watching"
    values["step_ms"] = verdict.mean_step_ms
    values["cost_pct"] = verdict.cost_pct if named else None
    values["late_rank"] = verdict.rank if named and verdict.rank is not None else -1
    inside = verdict.span if verdict.label == "stalled" else " and ".join(verdict.stages)
    return Figures(
        report.made_ns,
        report.step,
        _known(values),
        label=verdict.label,
        key=f"{verdict.label} {verdict.rank} {verdict.stage}" if named else verdict.label,
        severity=LABELS[verdict.label].severity,
        headline=headline(verdict.label, verdict.ranks, verdict.nodes, inside=inside or ""),
        why=verdict.why[:_MOST_WHY_CHARS],
    )


def _known(values: dict[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None}


class _Passer:
    """Passes figures on to the aggregator; attaches the report at the end. Used by the sender's thread."""

    def __init__(self, reply: Callable[[bytes], bytes], folder: Path) -> None:
        self._reply, self._folder = reply, folder
        self._run = ""
        self._figures: Figures | None = None
        self.states: Sequence[TrackerState] = ()
        """What rank 0 has said of its trackers."""

    def send(self, report: Report) -> None:
        """Pass the figures of a report on, or finish. Raises whatever the way, or a tracker, raises."""
        figures = figures_of(report)
        if figures is None:
            return
        if report.over:
            self._finish(figures)
            return
        if self._is_due(report.run or "", figures):
            self._run, self._figures = report.run or "", figures
        assert self._figures is not None
        asked = query.PassFigures(self._run, self._figures)
        (self.states,) = query.ask(self._reply, [asked], watching=True)

    def _is_due(self, run: str, figures: Figures) -> bool:
        last = self._figures
        if last is None or run != self._run or figures.key != last.key:
            return True
        return figures.made_ns - last.made_ns >= EVERY_S * 1e9

    def _finish(self, figures: Figures) -> None:
        failures = []
        for state in self.states:
            try:
                attach(state, self._folder / PAGE, figures)
            except Exception as error:
                failures.append(f"{state.name}: {error_text(error)}")
        if failures:
            raise RuntimeError("; ".join(failures))


class Trackers:
    """
    The sink.

    Args:
        session: whose figures these are.
        names: of the trackers, as in the settings.
    """

    takes_reports = True

    def __init__(self, session: SessionPoll, names: str) -> None:
        source: Any = session.source
        self._passer = _Passer(source.reply, Path(source.out) / source.target)
        self._sender = Sender[Report](_NAME, names, self._passer.send)
        self._names = names

    def offer(self, report: Report) -> None:
        """Have the figures of `report` written, if it is time for the next."""
        self._sender.offer(report)

    def state(self) -> SinkState:
        """Return how all trackers together are doing, as rank 0 has reported it."""
        way, states = self._sender.state(), self._passer.states
        places = [f"{state.name}: {state.where}" for state in states if state.where]
        return SinkState(
            name=_NAME,
            where=", ".join(places) or f"no run is open in rank 0 ({self._names})",
            sent=sum(state.sent for state in states),
            failed=way.failed + sum(state.failed for state in states),
            dropped=sum(state.dropped for state in states),
            error=next((f"{state.name}: {state.error}" for state in states if state.error), way.error),
        )

    def close(self, deadline_s: float) -> None:
        """Attach the report, until `deadline_s` (`time.monotonic`) at the latest."""
        self._sender.close(deadline_s)


def opened(session: SessionPoll, settings: Settings) -> Trackers:
    """Return the sink that the settings ask for."""
    return Trackers(session, settings.log_to or "")
