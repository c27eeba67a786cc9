"""Past sessions, and two of them side by side; which two is in the URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dash import dcc, html

from traceml_ray import text

from ..place import Place
from . import bits


def layout(_: Mapping[str, Any]) -> Any:
    """Return the elements of the page."""
    return html.Div(
        [
            html.H1("Sessions"),
            html.P("A name opens the session; A and B put two of them side by side.", className="hint"),
            html.Div(id="session-compare"),
            html.Div(id="session-list", className="panel"),
        ]
    )


def parts(view: Mapping[str, Any], place: Place) -> dict[str, dict[str, Any]]:
    """Return the content of the elements, by id."""
    columns: bits.Columns = {
        "compare": lambda s: html.Span(
            [_choose("a", s["name"], place), _choose("b", s["name"], place)], className="choose"
        ),
        "session": lambda s: dcc.Link(
            s["name"], href=place.to("overview", session=s["name"], run=None), title=str(s["path"])
        ),
        "began, UTC": lambda s: text.date(s["started_at"]),
        "status": lambda s: text.plain(s["status"]),
        "launcher": lambda s: text.plain(s["launcher"]),
        ">ranks": lambda s: text.plain(s["world_size"]),
        ">steps": lambda s: text.plain(s["steps"]),
        ">median step": lambda s: text.ms(s["median_ms"]),
        "verdict": _verdict,
        ">costs": lambda s: text.percent(s["cost_pct"]),
    }
    empty = "No stored session here yet."
    table = bits.table(columns, view["sessions"], empty=empty, label="Stored sessions")
    return {
        "session-list": {"children": table},
        "session-compare": {"children": _compared(view.get("compare"), place)},
    }


def _choose(side: str, name: str, place: Place) -> dcc.Link:
    on = place.get(side) == name
    label = f"{'Chosen' if on else 'Choose'} {name} as {side.upper()}"
    return dcc.Link(
        side.upper(),
        href=place.here(**{side: None if on else name}),
        className="chip on" if on else "chip",
        title=label,
    )


def _verdict(session: Mapping[str, Any]) -> str:
    where = [] if session["rank"] is None else [f"rank {session['rank']}"]
    where += [f"in {text.words(session['stage'])}"] if session["stage"] else []
    return text.words(session["label"] or text.NA) + (": " if where else "") + " ".join(where)


def _compared(rows: Any, place: Place) -> Any:
    a, b = place.get("a"), place.get("b")
    if not (a and b):
        return None
    columns: bits.Columns = {
        "": lambda row: text.words(row["what"]),
        f">{a}": lambda row: _value(row["a"]),
        f">{b} ": lambda row: _value(row["b"]),  # the two may have the same name
        ">change": lambda row: _change(row["change_pct"]),
    }
    empty = "These two cannot be compared: one of them has no summary."
    table = bits.table(columns, rows or (), empty=empty)
    return bits.panel(f"{a} and {b}", table, note="times in ms")


def _change(pct: float | None) -> str:
    return "" if pct is None else text.percent(pct, sign=True)


def _value(value: Any) -> str:
    return text.number(value) if isinstance(value, float) else text.plain(value)
