"""A report: the state of a session at one moment, which the sinks that send take from."""

from __future__ import annotations

import msgspec

from traceml_ray.analysis.verdict_shapes import TimedEpisode, VerdictInfo
from traceml_ray.signals.finding import Finding
from traceml_ray.signals.throughput.view import ThroughputView
from traceml_ray.store.results import RunInfo
from traceml_ray.views.findings import found_in
from traceml_ray.views.session_poll import SessionPoll
from traceml_ray.views.state import OVER, RUN_OVER, entry_of, state_of

from .figures import MOST, Family, families_of


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a session at one moment."""

    made_ns: int
    """When it was made (ns since the epoch)."""
    session: str
    """Name of the session."""
    state: str
    """State of the session in one word, see `views.state.state_of`."""
    over: bool
    """Whether the session has ended: this is the last report."""
    run_over: bool
    """Whether the run has ended."""
    run: str | None
    """Id of the newest run. None: there is no run yet."""
    run_name: str | None
    world: int
    """Number of ranks of the run."""
    step: int | None
    """The newest step that all ranks reported."""
    total_steps: int | None
    """Number of steps of the whole run, where the script or a setting says it."""
    eta_s: float | None
    """Seconds that the remaining steps will take; None: not known, or the run has ended."""
    verdict: VerdictInfo | None
    findings: tuple[Finding, ...]
    """The list of findings, in its order; () if there is no verdict yet."""
    episodes: tuple[TimedEpisode, ...]
    """Episodes of the run, the costliest first; () if they are not known."""
    figures: tuple[Family, ...]
    outcome: str = "running"
    """How the run, or its session, ended: finished, failed, stopped or ended; "running": it has not ended."""
    exit_code: int | None = None
    """Exit code of the session. None: it has not ended, or it is not known."""


def report_of(session: SessionPoll, most: int = MOST) -> Report:
    """Return a report of what is known of `session`, with series for at most `most` ranks."""
    return session.make(lambda: _made(session, most))[1]


def _made(session: SessionPoll, most: int) -> Report:
    run, state = session.newest, state_of(session, session.newest)
    entry = entry_of(session, run)
    progress = None if run is None else run.signals.get(ThroughputView.name)
    return Report(
        made_ns=session.clock(),
        session=session.source.target,
        state=state,
        over=state in OVER,
        run_over=state in RUN_OVER,
        run=None if run is None else run.id,
        run_name=None if entry is None else entry.name,
        world=0 if run is None else run.world,
        step=None if run is None else run.last_step,
        total_steps=progress and progress.total_steps,
        eta_s=progress and progress.eta_s,
        verdict=None if run is None else run.verdict,
        findings=() if run is None else tuple(found_in(session, run, state)),
        episodes=() if run is None else tuple(run.episodes),
        figures=tuple(family for family in families_of(session, most) if family.series),
        outcome=_outcome(session, entry, state),
        exit_code=None if session.status is None else session.status.exit_code,
    )


def _outcome(session: SessionPoll, entry: RunInfo | None, state: str) -> str:
    """Return how the newest run ended; if only its session says that, how the session did."""
    if state not in RUN_OVER:
        return "running"
    of_run = entry.status if entry else "ended"
    of_session = session.status.status if session.status else "ended"
    return of_session if of_run in ("running", "ended") and of_session != "running" else of_run
