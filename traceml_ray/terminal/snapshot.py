"""Everything that the terminal shows of a session at one moment: plain values, as the queries return them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from traceml_ray import text
from traceml_ray.analysis.shapes import StepColumns, StepTimes
from traceml_ray.reports.headlines import cost, current_episode, lost, named, sign_of, tone_of, wasted
from traceml_ray.signals.finding import Finding
from traceml_ray.signals.output.last_lines import LastOutput
from traceml_ray.signals.output.view import MOST_LINES, GetOutput
from traceml_ray.signals.views import PAGES, VIEWS
from traceml_ray.store import query
from traceml_ray.store.results import LiveVerdict
from traceml_ray.store.summary_shape import Conclusion
from traceml_ray.views.events import events_of, incident
from traceml_ray.views.findings import first_of, found_in
from traceml_ray.views.health import health
from traceml_ray.views.ranks import nodes, rank_rows
from traceml_ray.views.run_state import NodeLoad, RunState
from traceml_ray.views.session_poll import SessionPoll
from traceml_ray.views.state import (
    BADGES,
    RUN_OVER,
    CurrentEpisode,
    began_text,
    coverage_text,
    session_facts,
    state_of,
    state_text,
    why_text,
)

PANES = ("overview", "nodes", "ranks", *PAGES, "events", "output", "health")
"""Panes in the order of their keys: 1, 2, …; the ones in the middle show signals."""
_EVENTS = 200
SORTS = ("rank", "time")
"""Sort orders of ranks: by number, or slowest first."""


@dataclass(frozen=True)
class Choice:
    """What the person has selected: pane, sorting, rank, scroll position."""

    pane: str = PANES[0]
    sort: str = SORTS[0]
    rank: int | None = None
    """Rank whose page is open."""
    scroll: int = 0
    """Number of lines by which the pane is scrolled."""


class ShownVerdict(NamedTuple):
    """The verdict on the steps, with the texts that people read."""

    judged: LiveVerdict
    headline: str
    """The verdict in one line, without its cost."""
    why: str
    """The reason for the verdict, without notes that are shown elsewhere."""
    began: str
    """Since when the verdict has held, and what else happened then."""
    cost: str
    """What the cause costs, and how certain that is. "": the verdict names nothing."""


@dataclass(frozen=True)
class PanelState:
    """
    Everything that the terminal shows of a session at one moment. Times are in ms, shares in %. None (NaN in
    arrays): unknown.
    """

    state: str
    """State of the session, see `views.state.state_of`."""
    badge: str
    state_text: str
    coverage: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    """See `views.state.session_facts`."""
    step: int | None = None
    tone: str = "unsure"
    sign: str = ""
    verdict: ShownVerdict | None = None
    """The verdict on the steps. None: there is no verdict yet."""
    first: Conclusion | None = None
    """The conclusion to show first: the verdict, or a more severe finding."""
    findings: Sequence[Finding] = ()
    """All findings of the run, in the order of every face."""
    times: StepTimes | None = None
    steps: tuple[int, int] | None = None
    """First and last step that `times`, `nodes` and `rows` cover. None: the newest steps, or all."""
    columns: StepColumns | None = None
    """
    Columns drawn of the newest steps, or of all steps of a run that is over. None: nothing is
    known yet.
    """
    signals: Mapping[str, Any] = field(default_factory=dict)
    """The answers of signals that are polled, by name."""
    nodes: Sequence[Mapping[str, Any]] = ()
    """See `views.ranks.nodes`."""
    loads: Mapping[str, Sequence[NodeLoad]] = field(default_factory=dict)
    """Newest loads of each node, by node id. The newest is last."""
    named: Sequence[int] = ()
    """Ranks that the verdict names."""
    dead: Sequence[int] = ()
    """Ranks that died."""
    rows: Sequence[Mapping[str, Any]] = ()
    """One row per rank, see `views.ranks`. Empty if the pane does not show ranks."""
    answers: Mapping[str, Any] = field(default_factory=dict)
    """Answers of the signals that the pane shows, by name. Answers that have not arrived are missing."""
    health: Mapping[str, Any] | None = None
    """Health of the monitor, see `views.health`; None if the pane does not show it."""
    events: Sequence[Mapping[str, Any]] = ()
    output: LastOutput | None = None
    """Last output of the selected rank, else of the named rank. None: the pane does not show it."""


def take_snapshot(poll: SessionPoll, run: RunState | None, choice: Choice) -> PanelState:
    """Return the newest answers about a run; request missing ones. Called with the lock of `poll` held."""
    state = state_of(poll, run)
    fields: dict[str, Any] = {
        "state": state,
        "badge": BADGES.get(state, state),
        "state_text": text.with_clocks(state_text(poll, run, state)),
        "coverage": coverage_text(poll, run, state),
        "facts": session_facts(poll, run),
    }
    if run is None:
        return PanelState(**fields)
    findings = found_in(poll, run, state)
    first = first_of(run, findings)
    tone, sign = (first.tone, sign_of(first.tone)) if first else tone_of(None)
    steps = _judged_steps(run, state)
    times = run.times if steps is None else poll.ask(query.GetTimes(run.id, True, *steps))
    if steps is not None and not (times and times.steps):  # not known one by one
        times, steps = run.times, None
    rows = rank_rows(poll, run, steps) if choice.pane == "ranks" or choice.rank is not None else ()
    wants_output = choice.pane == "output" or choice.rank is not None or tone == "critical"
    subject = _subject(run, choice)
    printed = poll.ask(GetOutput(run.id, subject, MOST_LINES)) if wants_output else None
    return PanelState(
        **fields,
        step=run.last_step,
        tone=tone,
        sign=sign,
        verdict=None if run.verdict is None else _verdict(poll, run, run.verdict, fields),
        first=first,
        findings=findings,
        times=times,
        steps=steps,
        columns=poll.ask(query.GetColumns(run.id)),
        signals=run.signals,
        nodes=nodes(run, times),
        loads={node: tuple(newest) for node, newest in run.loads.items()} if choice.pane == "nodes" else {},
        named=run.named["ranks"],
        dead=[death.rank for death in poll.deaths(run)],
        rows=rows,
        answers={} if choice.rank is not None else _answers(poll, run, choice.pane),
        health=health(poll, run, "top") if choice.pane == "health" and choice.rank is None else None,
        events=events_of(poll, run)[:_EVENTS],
        output=printed[0] if printed else None,
    )


def _answers(poll: SessionPoll, run: RunState, pane: str) -> dict[str, Any]:
    """
    Return the answers of the signals that a pane shows, by name, as far as they have arrived. A signal pane
    shows the signals of its page. The overview shows signals that are polled, or that declare that the
    overview asks for them.
    """
    answers = {}
    for name, view in VIEWS.items():
        first_page = pane == PANES[0] and view.overview and view.every_s(run.ranks, run.world) is not None
        if view.polled and pane in (PANES[0], view.page):
            answers[name] = run.signals.get(name)
        elif view.finds is not None and (first_page or pane == view.page):
            answers[name] = poll.ask(view.question(run.id, **view.finds))
    return {name: answer for name, answer in answers.items() if answer is not None}


def _judged_steps(run: RunState, state: str) -> tuple[int, int] | None:
    """
    Return the steps that the numbers cover. For a run that has ended, these are the steps of the named
    episode, because its effect would hardly be visible over all steps. None: all steps.
    """
    episode = current_episode(run.verdict, run.episodes) if state in RUN_OVER else None
    return None if episode is None else (episode.from_step, episode.to_step)


def _subject(run: RunState, choice: Choice) -> int:
    """Return the rank to show: the selected one, else the named one, else the slowest."""
    worst = run.times.worst_rank if run.times else None
    among = choice.rank, *run.named["ranks"][:1], worst, min(run.ranks, default=0)
    return next(int(rank) for rank in among if rank is not None)


def _verdict(
    poll: SessionPoll, run: RunState, verdict: LiveVerdict, fields: Mapping[str, Any]
) -> ShownVerdict:
    """Return the verdict with its texts for people. `fields`: `state` and `facts` of the session."""
    began = incident(poll, run)
    return ShownVerdict(
        verdict,
        headline=named(verdict),
        why=why_text(verdict, began),
        began=text.with_clocks(began_text(poll, run, verdict, began)),
        cost=_cost(verdict, began, fields["facts"]["gpus"], fields["state"] == "live"),
    )


def _cost(verdict: LiveVerdict, began: CurrentEpisode | None, gpus: bool, live: bool) -> str:
    """Return the cost of the named cause, how certain it is, and the total cost of all causes."""
    hours = verdict.rank_hours_per_hour
    shown = verdict.cost_pct and verdict.label != "healthy"
    every = verdict.lost_s and not (began and began.alone)
    parts = [
        cost(began.episode, gpus) if shown and began else "",
        f"≈ {wasted(hours, gpus)}" if shown and hours else "",
        f"all causes: {lost(verdict)}{' so far' * live}" if every else "",
        f"confidence {verdict.confidence}" if shown and verdict.confidence else "",
    ]
    return ", ".join(filter(None, parts))
