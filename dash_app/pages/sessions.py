"""The sessions of a folder, running ones first, and two of them side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import msgspec
from dash import dcc, html

from traceml_ray import text
from traceml_ray.analysis.comparison import NumberChange
from traceml_ray.analysis.shapes import StepSample
from traceml_ray.document import drawing
from traceml_ray.document.model import Column, Table
from traceml_ray.reports import comparison
from traceml_ray.reports.headlines import named
from traceml_ray.reports.listing import SESSIONS, Entry, Listed, entries, found_in
from traceml_ray.store import query
from traceml_ray.views import figures
from traceml_ray.views.run_state import RunState
from traceml_ray.views.values import age_s, rounded

from .. import listing
from ..charts import Chart, chart
from ..elements import keys_of, link, marked, panel, part, table
from ..route import Route
from ..session_cache import SessionCache

SIDES = "ab"
_ANEW = 1.1
"""A running session is compared again after it has grown by this share."""
_COLOURS = {"a": drawing.BLUE, "b": drawing.ORANGE}
_CURVES = {
    "step_ms": ("Step", "ms"),
    "worst_over": ("Worst ÷ median rank", "×"),
    "median_ms": ("Busy time of the median rank", "ms"),
}
_COMPARE = Column("compare", lambda _: "")
_COLUMNS = [column for column in SESSIONS if column.name != "size"]
_FACTS = ("command", "launcher", "strategy", "world_size", "nnodes", "exit_code")


def data(cache: SessionCache, _run: RunState | None, route: Route) -> dict[str, Any]:
    """Return the sessions of the folder that the URL asks for, and how many are in each state."""
    every = entries(cache.source.out)
    states = Counter(entry.status for entry in every)
    wanted, now_ns = route.get("state"), cache.clock()
    rows = [_listed(entry, now_ns) for entry in every if wanted in (None, entry.status)]
    chosen = listing.choose(rows, route, _words, keys_of(_COLUMNS))
    return {"chosen": chosen, "states": dict(states)}


def side(cache: SessionCache, run: RunState, _route: Route) -> dict[str, Any]:
    """Return what is compared of one of two sessions: its newest run from its first step on."""
    status = cache.status
    facts = {name: getattr(status, name, None) for name in _FACTS} | {"ranks": run.world or None}
    settings = (status and status.settings) or {}

    def still_holds(sample: StepSample) -> bool:  # of a run that goes on it is drawn anew now and then only
        return (run.last_step or 0) <= _ANEW * (sample.last or 0)

    return {
        "columns": cache.ask(query.GetColumns(run.id, whole=True)),
        "times": cache.ask(query.GetTimes(run.id, True)),
        "run": run.id,
        "status": status,
        "processes": run.ranks,
        "sample": cache.ask(query.GetStepSample(run.id), still_holds),
        "samples": cache.ask(comparison.memory_question(run.ranks)),
        "facts": facts | {f"setting {name}": value for name, value in settings.items()},
    }


def _words(entry: Entry) -> str:
    words = entry.name, entry.status, entry.launcher, found_in(entry)
    return " ".join(filter(None, words))


def layout(view: Mapping[str, Any], route: Route) -> Any:
    """Return the elements of the page."""
    chosen, states = view["chosen"], view["states"]
    cells = {
        "compare": lambda s: html.Span([_choose(side, s.name, route) for side in SIDES], className="choose"),
        "session": lambda s: dcc.Link(
            s.name, href=route.to("overview", session=s.name, run=None), title=s.path
        ),
    }
    heads = listing.heads(_COLUMNS, keys_of(_COLUMNS), route)
    block = Table("Sessions", [_COMPARE, *_COLUMNS], chosen.items, empty="No session is like that.")
    rows = table(block, route, heads=heads, cells=cells)
    return html.Div(
        [
            html.Div([html.H1("Sessions"), listing.field(route, "sessions")], className="title-row"),
            html.P("A name opens the session; A and B put two of them side by side.", className="hint"),
            part(html.Div(listing.states(route, states), id="session-filter")),
            *_compared(view.get("sides"), route),
            part(
                html.Div(
                    [rows, listing.pages(chosen, route, "session")], id="session-list", className="panel"
                )
            ),
        ]
    )


def _listed(entry: Entry, now_ns: int) -> Listed:
    """Return a session with its age; how large it is takes a look at each of its files."""
    began = None if entry.started_at is None else datetime.fromisoformat(entry.started_at).timestamp()
    age = None if began is None else age_s(now_ns, round(began * 1e9))
    return Listed(**msgspec.structs.asdict(entry), age_s=age, bytes=0)


def _choose(side: str, name: str, route: Route) -> Any:
    on = route.get(side) == name
    href = route.here(**{side: None if on else name})
    title = f"{'Chosen' if on else 'Choose'} {name} as {side.upper()}"
    return link(side.upper(), href, "chip", on=on, title=title)


def _compared(sides: Sequence[Mapping[str, Any]] | None, route: Route) -> list[Any]:
    """Return two sessions side by side: numbers, curves over each other, what they were started with."""
    if sides is None:
        return []
    titles = {side: f"{side.upper()}: {route.get(side)}" for side in SIDES}
    empty = [one for one in sides if not (one.get("columns") and len(one["columns"].last))]
    if empty:
        missing = [
            one["state_text"] if one["state"] == "missing" else f"{one['session']['id']} has no step yet."
            for one in empty
        ]
        return [part(html.Div([html.P(why) for why in missing], id="session-compare", className="panel"))]
    drawn = [_curve(name, sides, titles, route) for name in _CURVES]
    shown = html.Div(
        [
            panel("Numbers of the whole run", _numbers(sides, titles, route)),
            panel("What they were started with", _settings(sides, titles, route)),
        ],
        id="session-compare",
        className="grid two",
    )
    return [part(shown), html.Div(drawn, className="grid three")]


def _judged(sides: Sequence[Mapping[str, Any]]) -> comparison.Comparison | None:
    """Return how B differs from A; None while answers are under way."""
    names = "status", "run", "times", "verdict", "processes", "sample", "samples"
    if any(one.get(name) is None for one in sides for name in ("times", "sample", "samples")):
        return None
    a, b = (comparison.known(*(one[name] for name in names)) for one in sides)
    return comparison.compared(a, b)


def _numbers(sides: Sequence[Mapping[str, Any]], titles: Mapping[str, str], route: Route) -> Any:
    compared = _judged(sides)
    if compared is None:
        return html.P("The steps of both are read …")
    numbers = comparison.numbers_table(compared)
    columns = [
        replace(column, name=titles[column.name.lower()]) if column.name in ("A", "B") else column
        for column in numbers.columns
    ]
    tone = comparison.TONES.get(compared.word or "", "")
    verdicts = [named(one["verdict"]) if one["verdict"] else text.NA for one in sides]
    words = [
        html.P(
            [html.B("Compared "), *marked(f"{compared.headline}. {compared.where}")],
            className=f"sev {tone}",
        )
    ]
    words.append(html.P([html.B("Verdicts "), f"A: {verdicts[0]}. B: {verdicts[1]}."], className="hint"))
    more = [html.Li(f"Not compared, {reason}.") for reason in compared.cannot] + [
        html.Li(note) for note in compared.notes
    ]
    return html.Div(
        [
            *words,
            table(numbers._replace(columns=columns), route, cells={"judged": _judgement}),
            html.Ul(more, className="hint"),
        ]
    )


def _judgement(row: NumberChange) -> str:
    """Return whether a number is worse or better; nothing of all others."""
    return row.word if row.word in comparison.TONES else ""


def _settings(sides: Sequence[Mapping[str, Any]], titles: Mapping[str, str], route: Route) -> Any:
    a, b = (one["facts"] for one in sides)
    names = [name for name in dict.fromkeys([*a, *b]) if (a.get(name), b.get(name)) != (None, None)]

    def side(title: str, values: Mapping[str, Any]) -> Column:
        def shown(name: str) -> Any:
            return "default" if values.get(name) is None and name.startswith("setting") else values.get(name)

        def tone(name: str) -> str:
            return "" if a.get(name) == b.get(name) else "warning"

        return Column(title, shown, "code", tone=tone)

    columns = [Column("", text.words), side(titles["a"], a), side(titles["b"], b)]
    return table(Table("Command and settings of both sessions", columns, names), route)


def _curve(name: str, sides: Sequence[Mapping[str, Any]], titles: Mapping[str, str], route: Route) -> Chart:
    title, unit = _CURVES[name]
    lines = {
        titles[side]: (one["columns"].last.tolist(), rounded(getattr(one["columns"], name)), _COLOURS[side])
        for side, one in zip(SIDES, sides, strict=True)
    }
    figure = figures.overlaid(lines, unit, revision=f"{route.get('a')} {route.get('b')}")
    series = {shown: colour for shown, (_, _, colour) in lines.items()}
    return chart(f"compare-{name}", title, figure, f"{title} by step, of both sessions", route, series=series)
