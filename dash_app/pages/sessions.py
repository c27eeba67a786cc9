"""The sessions of a folder, running ones first, and a comparison of up to eight sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import zip_longest
from typing import Any

import msgspec
from dash import dcc, html

from traceml_ray import text
from traceml_ray.analysis.comparison import NumberChange
from traceml_ray.analysis.shapes import StepSample
from traceml_ray.document.model import Column, Overlay, Table
from traceml_ray.document.step_clock import StepClock
from traceml_ray.reports import comparison, overlay
from traceml_ray.reports.headlines import named
from traceml_ray.reports.listing import SESSIONS, Entry, Listed, entries, found_in
from traceml_ray.reports.overlay import NAMES, OverlaidRun
from traceml_ray.signals.logged.view import GetLogged
from traceml_ray.store import query
from traceml_ray.views import figures
from traceml_ray.views.run_state import RunState
from traceml_ray.views.values import age_s

from .. import listing
from ..charts import Chart, chart
from ..elements import aria, keys_of, link, marked, panel, part, table
from ..route import Route
from ..session_cache import SessionCache

LETTERS = NAMES.lower()
"""Letters that name the compared sessions in the URL."""
_ANEW = 1.1
"""A running session is compared again after it has grown by this share."""
_CURVES = (
    ("Worst ÷ median rank", "×", "worst_over"),
    ("Busy time of the median rank", "ms", "median_ms"),
)
_TABLE_ROWS = 100
_COMPARE = Column("compare", lambda _: "")
_COLUMNS = [column for column in SESSIONS if column.name != "size"]
_SETTING = "setting "
_FACT_NAMES = {"nnodes": "nodes"}
_FACTS = ("command", "launcher", "strategy", "world_size", "nnodes", "exit_code")


def data(cache: SessionCache, _run: RunState | None, route: Route) -> dict[str, Any]:
    """Return the sessions of the folder that the URL asks for, and the number of sessions in each state."""
    every = entries(cache.source.out)
    states = Counter(entry.status for entry in every)
    wanted, now_ns = route.get("state"), cache.clock()
    rows = [_listed(entry, now_ns) for entry in every if wanted in (None, entry.status)]
    chosen = listing.choose(rows, route, _words, keys_of(_COLUMNS))
    return {"chosen": chosen, "states": dict(states)}


def side(cache: SessionCache, run: RunState, _route: Route) -> dict[str, Any]:
    """Return the data of one of several compared sessions: its newest run, from its first step on."""
    status = cache.status
    facts = {name: getattr(status, name, None) for name in _FACTS} | {"ranks": run.world or None}
    settings = (status and status.settings) or {}

    def still_holds(sample: StepSample) -> bool:  # of a run that goes on it is drawn anew now and then only
        return (run.last_step or 0) <= _ANEW * (sample.last or 0)

    return {
        "columns": cache.ask(query.GetColumns(run.id, whole=True)),
        "timeline": cache.ask(query.GetTimeline(run.id)),
        "logged": cache.ask(GetLogged(run.id)),
        "times": cache.ask(query.GetTimes(run.id, True)),
        "run": run.id,
        "status": status,
        "processes": run.ranks,
        "sample": cache.ask(query.GetStepSample(run.id), still_holds),
        "samples": cache.ask(comparison.memory_question(run.ranks)),
        "facts": facts | {f"{_SETTING}{name}": value for name, value in settings.items()},
    }


def _words(entry: Entry) -> str:
    words = entry.name, entry.status, entry.launcher, found_in(entry)
    return " ".join(filter(None, words))


def layout(view: Mapping[str, Any], route: Route) -> Any:
    """Return the elements of the page."""
    chosen, states = view["chosen"], view["states"]
    cells = {
        "compare": lambda s: html.Span(_choose(s.name, route), className="choose"),
        "session": lambda s: dcc.Link(
            s.name, href=route.to("overview", session=s.name, run=None), title=s.path
        ),
    }
    heads = listing.heads(_COLUMNS, keys_of(_COLUMNS), route)
    block = Table("Sessions", [_COMPARE, *_COLUMNS], chosen.items, empty="No session matches.")
    rows = table(block, route, heads=heads, cells=cells)
    return html.Div(
        [
            html.Div([html.H1("Sessions"), listing.field("sessions")], className="title-row"),
            html.P("A name opens the session; + adds it to a comparison of up to eight.", className="hint"),
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
    """Return a session with its age. Its size is determined by examining each of its files."""
    began = None if entry.started_at is None else datetime.fromisoformat(entry.started_at).timestamp()
    age = None if began is None else age_s(now_ns, round(began * 1e9))
    return Listed(**msgspec.structs.asdict(entry), age_s=age, bytes=0)


def sides_of(route: Route) -> list[str]:
    """Return the names of the sessions that a URL compares, in order."""
    return [name for letter in LETTERS if (name := route.get(letter))]


def _choose(name: str, route: Route) -> Any:
    """Return the link that adds a session to the comparison, or removes it."""
    chosen = sides_of(route)
    if name in chosen:
        after, label, title = (
            [other for other in chosen if other != name],
            NAMES[chosen.index(name)],
            "Take out",
        )
    elif len(chosen) == len(NAMES):
        full = f"At most {len(NAMES)} sessions can be compared: take one out first"
        return html.Span("+", className="chip off", title=full)
    else:
        after, label, title = [*chosen, name], "+", "Compare"
    href = route.here(**dict(zip_longest(LETTERS, after)))
    return link(label, href, "chip", on=name in chosen, title=f"{title} {name}")


def _compared(sides: Sequence[Mapping[str, Any]] | None, route: Route) -> list[Any]:
    """Return the comparison of sessions: numbers, curves, and the settings they were started with."""
    if sides is None:
        return []
    empty = [one for one in sides if not (one.get("columns") and len(one["columns"].last))]
    if empty:
        missing = [
            one["state_text"] if one["state"] == "missing" else f"{one['session']['id']} has no step yet."
            for one in empty
        ]
        return [part(html.Div([html.P(why) for why in missing], id="session-compare", className="panel"))]
    titles = [f"{letter}: {name}" for letter, name in zip(NAMES, sides_of(route), strict=False)]
    settings = panel("Command, size and settings", _settings(sides, titles, route))
    runs = _overlaid(sides)
    if runs is None:
        numbers: Any = html.P("Reading the steps of all sessions …")
    elif len(runs) == 2:
        numbers = _numbers(runs, sides, titles, route)
    else:
        numbers = _runs(runs, route)
    shown = html.Div(
        [panel("Numbers of the whole run", numbers), settings],
        id="session-compare",
        className="grid two" if len(sides) == 2 else "grid one",
    )
    return [part(shown), *(_curves(runs, route) if runs else [])]


def _overlaid(sides: Sequence[Mapping[str, Any]]) -> list[OverlaidRun] | None:
    """Return the runs to compare. None: answers have not arrived yet."""
    answers = "times", "sample", "samples", "timeline", "logged"
    if any(one.get(name) is None for one in sides for name in answers):
        return None
    parts = "status", "run", "times", "verdict", "processes", "sample", "samples"
    return [
        OverlaidRun(
            comparison.known(*(one[name] for name in parts)),
            one["columns"],
            StepClock.of(one["timeline"]),
            one["logged"],
        )
        for one in sides
    ]


def _runs(runs: Sequence[OverlaidRun], route: Route) -> Any:
    """Return a table with a row for each run, and its difference to the first run."""
    numbers = overlay.table_of([run.known for run in runs])
    lines = [html.Li(marked(line)) for line in overlay.headlines(numbers)]
    return html.Div(
        [
            table(overlay.runs_table(numbers), route),
            html.H3("Against A"),
            html.Ul(lines),
            html.H3("Exposed time of a step"),
            table(overlay.stages_table(numbers), route),
        ]
    )


def _numbers(
    runs: Sequence[OverlaidRun], sides: Sequence[Mapping[str, Any]], titles: Sequence[str], route: Route
) -> Any:
    """Return the difference of the second of two runs to the first."""
    compared = comparison.compared(runs[0].known, runs[1].known)
    numbers = comparison.numbers_table(compared)
    columns = [
        replace(column, name=titles[NAMES.index(column.name)]) if column.name in ("A", "B") else column
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
    more = [html.Li(f"Not compared: {reason}.") for reason in compared.cannot] + [
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
    """Return whether a number became worse or better. Empty for other numbers."""
    return row.word if row.word in comparison.TONES else ""


def _settings(sides: Sequence[Mapping[str, Any]], titles: Sequence[str], route: Route) -> Any:
    facts = [one["facts"] for one in sides]
    names = [
        name
        for name in dict.fromkeys(name for values in facts for name in values)
        if any(values.get(name) is not None for values in facts)
    ]

    def side(title: str, values: Mapping[str, Any]) -> Column:
        def shown(name: str) -> Any:
            return "default" if values.get(name) is None and name.startswith(_SETTING) else values.get(name)

        def tone(name: str) -> str:
            both = values.get(name), facts[0].get(name)
            unknown = None in both and not name.startswith(_SETTING)  # such as how a running job will exit
            return "" if both[0] == both[1] or unknown else "warning"

        return Column(title, shown, "code", tone=tone)

    columns = [Column("", _fact_name), *map(side, titles, facts)]
    return table(Table("Command and settings of the sessions", columns, names), route)


def _fact_name(name: str) -> str:
    """Return the name of a fact. A setting is named as a person sets it."""
    return name if name.startswith(_SETTING) else _FACT_NAMES.get(name) or text.words(name)


def _curves(runs: Sequence[OverlaidRun], route: Route) -> list[Any]:
    """Return the charts of all runs, and the choice of what they are drawn over."""
    axis = "time" if route.get("x") == "time" else "step"
    more = [overlay.column_chart(runs, *curve) for curve in _CURVES]
    step_ms, *logged = overlay.charts(runs)
    links = [
        link(name, route.here(x=value), "segment", on=axis == (value or "step"))
        for name, value in (("by step", None), ("by time since the first step", "time"))
    ]
    choice = html.Nav(links, id="compare-x", className="segments", **aria(label="Axis of the charts"))
    known = [chart for chart in (step_ms, *more, *logged) if chart.lines[axis]]
    drawn = [_curve(index, chart, axis, route) for index, chart in enumerate(known)]
    return [part(choice), html.Div(drawn, className="grid two")]


def _curve(index: int, overlaid: Overlay, axis: str, route: Route) -> Chart:
    key = f"compare-{index}"
    figure = figures.overlaid(overlaid, axis, revision=f"{sides_of(route)} {axis}")
    series = {line.name: line.colour for line in overlaid.lines[axis]}
    rows = _curve_table(overlaid, axis, route) if route.get("table") == key else None
    label = f"{overlaid.label} of each session"
    return chart(key, overlaid.label, figure, label, route, series=series, rows=rows)


def _curve_table(overlaid: Overlay, axis: str, route: Route) -> Any:
    """Return the newest values of lines as a table. Each line has its own positions."""
    lines = overlaid.lines[axis]
    values = [dict(zip(line.x.tolist(), line.values.tolist(), strict=True)) for line in lines]
    places = sorted({place for known in values for place in known}, reverse=True)[:_TABLE_ROWS]

    def column(name: str, known: Mapping[float, float]) -> Column:
        return Column(name, known.get, "number" if overlaid.unit else "value")

    first = (
        Column("step", lambda step: step, "count") if axis == "step" else Column("time", float, "duration")
    )
    columns = [first, *(column(line.name, known) for line, known in zip(lines, values, strict=True))]
    return table(Table(overlaid.label, columns, places), route)
