"""Every signal without a page of its own: its findings, facts about the run, and facts about each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dash import html

from traceml_ray import text
from traceml_ray.document.model import Column, Section, Table, per_rank_columns
from traceml_ray.reports.contents import FINDINGS, findings_table
from traceml_ray.signals.finding import Finding
from traceml_ray.signals.views import VIEWS
from traceml_ray.views.run_state import RunState

from .. import listing
from ..elements import blocks, keys_of, panel, part, table
from ..route import Route
from ..session_cache import SessionCache

_RANK = Column("rank", lambda rank: rank, "figures", link=lambda rank: ("rank", rank))


def sections_on(page: str, cache: SessionCache, run: RunState) -> dict[str, list[Section]]:
    """Return, by signal, the sections that it has on a page, as far as answers have arrived."""
    answers: dict[str, Any] = {}
    for name, view in VIEWS.items():
        if view.page != page:
            continue
        if view.polled:
            answers[name] = run.signals.get(name)
        elif view.finds is not None:
            asked = view.question(run.id, **view.finds)
            answers[name] = cache.ask(asked, every_s=view.every_s(run.ranks, run.world) or 0.0)
    return {name: [*VIEWS[name].sections(answer)] for name, answer in answers.items() if answer is not None}


def panels_of(
    sections: Mapping[str, list[Section]], route: Route, findings: Sequence[Finding] = ()
) -> list[Any]:
    """Return a panel for each signal: its findings among `findings`, then facts, lines and tables."""
    panels = []
    for name, of_signal in sections.items():
        mine = [one for one in findings if one.signal == name]
        block = table(Table("Findings", FINDINGS, mine), route)
        body = [html.Div(block, className="events")] if mine else []
        body += [element for section in of_signal for element in blocks(section, route)]
        if body:
            inside = part(html.Div(body, id=f"signal-{name}"))
            panels.append(panel(text.words(name).capitalize(), inside))
    return panels


def data(cache: SessionCache, run: RunState, route: Route) -> dict[str, Any]:
    """
    Return the sections of signals without a page of their own, and what they know of the ranks asked
    for.
    """
    shown = sections_on("signals", cache, run)
    columns = per_rank_columns((one for several in shown.values() for one in several), int)
    chosen = listing.choose(sorted(run.ranks), route, lambda rank: f"rank {rank}", keys_of([_RANK, *columns]))
    return {"sections": shown, "columns": columns, "chosen": chosen}


def layout(view: Mapping[str, Any], route: Route) -> Any:
    """Return the elements of the page."""
    findings = html.Div(table(findings_table(view["findings"]), route), className="events")
    body = [
        html.Div([html.H1("Signals"), listing.field("ranks")], className="title-row"),
        panel("Findings besides the verdict", part(html.Div(findings, id="signal-findings"))),
        *panels_of(view["sections"], route),
    ]
    if view["columns"]:
        columns, chosen = [_RANK, *view["columns"]], view["chosen"]
        heads = listing.heads(columns, keys_of(columns), route)
        block = Table("Signals by rank", columns, chosen.items, empty="No rank matches.")
        rows = [table(block, route, heads=heads), listing.pages(chosen, route, "rank")]
        body.append(panel("By rank", part(html.Div(rows, id="signal-ranks"))))
    return html.Div(body)
