"""The sessions of a folder, running ones first, and two of them side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from dash import dcc, html

from traceml_ray import text
from traceml_ray.document import drawing
from traceml_ray.reports import comparison
from traceml_ray.reports.comparison import change, label, range_of, render_value
from traceml_ray.reports.headlines import severity
from traceml_ray.reports.listing import Entry, entries, found_in, names
from traceml_ray.store import query
from traceml_ray.store.step_shapes import StepSample
from traceml_ray.views import figures, timezone
from traceml_ray.views.run_state import RunState
from traceml_ray.views.values import age_s, rounded

from .. import listing
from ..components import (
    Chart,
    Columns,
    chart,
    link,
    marked,
    panel,
    part,
    table,
    when,
)
from ..route import Route
from ..session_cache import SessionCache

__all__ = ["data", "layout", "names", "side"]
SIDES = "ab"
_ANEW = 1.1
"""A running session is compared again after it has grown by this share."""
_COLOURS = {"a": drawing.BLUE, "b": drawing.ORANGE}
_CURVES = {
    "step_ms": ("Step", "ms"),
    "worst_over": ("Worst ÷ median rank", "×"),
    "median_ms": ("Busy time of the median rank", "ms"),
}
_FACTS = ("command", "launcher", "strategy", "world_size", "nnodes", "exit_code")
_KEYS: listing.Keys = {
    "session": lambda s: s.name,
    "began": lambda s: s.started_at,
    "status": lambda s: s.status,
    "ranks": lambda s: s.world_size,
    "steps": lambda s: s.steps,
    "median step": lambda s: s.median_ms,
    "verdict": lambda s: s.label,
    "costs": lambda s: s.cost_pct,
    "lost": lambda s: s.lost_s,
}


def data(cache: SessionCache, _run: RunState | None, route: Route) -> dict[str, Any]:
    """Return the sessions of the source's folder that the URL asks for."""
    every = entries(cache.source.out)
    states = Counter(entry.status for entry in every)
    wanted = route.get("state")
    chosen = listing.choose([e for e in every if wanted in (None, e.status)], route, _words, _KEYS)
    return {"chosen": chosen, "states": dict(states), "now_ns": cache.clock()}


def side(cache: SessionCache, run: RunState, _route: Route) -> dict[str, Any]:
    """Return one of two sessions that are compared: its newest run from its first step on."""
    status = cache.status
    facts = {name: getattr(status, name, None) for name in _FACTS} | {"ranks": run.world or None}
    settings = (status and status.settings) or {}

    def still_holds(sample: StepSample) -> bool:  # of a run that goes on it is drawn anew now and then only
        return (run.last_step or 0) <= _ANEW * (sample["last"] or 0)

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
    columns: Columns = {
        "compare": lambda s: html.Span([_choose(side, s.name, route) for side in SIDES], className="choose"),
        "session": lambda s: dcc.Link(
            s.name, href=route.to("overview", session=s.name, run=None), title=s.path
        ),
        "began": lambda s: when(s.started_at),
        ">age": lambda s: _age(view["now_ns"], s.started_at),
        "status": _status,
        "launcher": lambda s: text.plain(s.launcher),
        ">ranks": lambda s: text.plain(s.world_size),
        ">steps": lambda s: text.plain(s.steps),
        ">median step": lambda s: text.ms(s.median_ms),
        "verdict": lambda s: html.Span(found_in(s), className=f"sev {severity(s.label or '')}"),
        ">costs": lambda s: text.percent(s.cost_pct),
        ">lost": lambda s: text.duration(s.lost_s),
    }
    heads = listing.heads(columns, _KEYS, route)
    if "began" in heads:
        heads["began"].children += f", {timezone.abbreviation()}"
    rows = table(columns, chosen.items, heads=heads, empty="No session is like that.", label="Sessions")
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


def _age(now_ns: int, moment: str | None) -> str:
    began = None if moment is None else round(datetime.fromisoformat(moment).timestamp() * 1e9)
    return text.age(age_s(now_ns, began))


def _status(entry: Entry) -> Any:
    if entry.status == "running":
        return html.Span("● running", className="running")
    bad = entry.status not in ("finished", "stopped")
    return html.Span(entry.status, className="sev critical" if bad else "")


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
    empty = [one for one in sides if not (one.get("columns") and len(one["columns"]["last"]))]
    if empty:
        missing = [
            one["state_text"] if one["state"] == "missing" else f"{one['session']['id']} has no step yet."
            for one in empty
        ]
        return [part(html.Div([html.P(why) for why in missing], id="session-compare", className="panel"))]
    drawn = [_curve(name, sides, titles, route) for name in _CURVES]
    shown = html.Div(
        [
            panel("Numbers of the whole run", _numbers(sides, titles)),
            panel("What they were started with", _settings(sides, titles)),
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


def _numbers(sides: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> Any:
    comparison = _judged(sides)
    if comparison is None:
        return html.P("The steps of both are read …")
    tones = {"worse": "sev critical", "better": "better"}
    columns: Columns = {
        "": label,
        f">{titles['a']}": lambda row: render_value(row.a, row.unit),
        f">{titles['b']}": lambda row: render_value(row.b, row.unit),
        ">change": lambda row: html.Span(
            f"{change(row)} {row.word if row.word in tones else ''}".strip(),
            className=tones.get(row.word, ""),
        ),
        "95 %": range_of,
    }
    verdicts = [one["verdict"]["headline"] if one["verdict"] else text.NA for one in sides]
    words = [
        html.P(
            [html.B("Compared "), *marked(f"{comparison.headline}. {comparison.where}")],
            className=tones.get(comparison.word or "", ""),
        )
    ]
    words.append(html.P([html.B("Verdicts "), f"A: {verdicts[0]}. B: {verdicts[1]}."], className="hint"))
    more = [html.Li(f"Not compared, {reason}.") for reason in comparison.cannot] + [
        html.Li(note) for note in comparison.notes
    ]
    rows = [row for row in comparison.changes if (row.a, row.b) != (None, None)]
    return html.Div(
        [*words, table(columns, rows, label="Numbers of both sessions"), html.Ul(more, className="hint")]
    )


def _settings(sides: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> Any:
    a, b = (one["facts"] for one in sides)
    names = [name for name in dict.fromkeys([*a, *b]) if (a.get(name), b.get(name)) != (None, None)]

    def cell(values: Mapping[str, Any], other: Mapping[str, Any], name: str) -> Any:
        shown = (
            html.Code(str(values[name]))
            if values.get(name) is not None
            else "default" * name.startswith("setting")
        )
        return html.Span(shown, className="" if values.get(name) == other.get(name) else "sev warning")

    columns: Columns = {
        "": lambda name: text.words(name),
        titles["a"]: lambda name: cell(a, b, name),
        titles["b"]: lambda name: cell(b, a, name),
    }
    return table(columns, names, label="Command and settings of both sessions")


def _curve(name: str, sides: Sequence[Mapping[str, Any]], titles: Mapping[str, str], route: Route) -> Chart:
    title, unit = _CURVES[name]
    lines = {
        titles[side]: (one["columns"]["last"].tolist(), rounded(one["columns"][name]), _COLOURS[side])
        for side, one in zip(SIDES, sides, strict=True)
    }
    figure = figures.overlaid(lines, unit, revision=f"{route.get('a')} {route.get('b')}")
    series = {shown: colour for shown, (_, _, colour) in lines.items()}
    return chart(f"compare-{name}", title, figure, f"{title} by step, of both sessions", route, series=series)
