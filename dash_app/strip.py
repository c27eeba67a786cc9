"""The shell of every page: navigation, the verdict, how fresh and how complete the data is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dash import dcc, html

from traceml_ray import text

from .events import severity
from .pages.bits import SEVERITY, aria, marked
from .place import Place

_NAV = {"overview": "Overview", "events": "Events", "sessions": "Sessions", "health": "Health"}
_STATES = {
    "empty": "no session",
    "waiting": "waiting",
    "live": "live",
    "stale": "stale",
    "finished": "finished",
    "stored": "stored file",
}


def shell(poll_s: float) -> html.Div:
    """Return what surrounds every page; `strip` returns its content."""
    goto: dict[str, Any] = {"type": "text", "placeholder": "rank …", "inputMode": "numeric"}
    bar = [
        dcc.Link("traceml-ray", href="/", className="brand"),
        html.Nav(id="nav", **aria(label="Pages")),
        html.Div(id="session"),
        dcc.Input(id="goto", autoComplete="off", className="goto", **goto),
        html.Button("Pause", id="pause", type="button"),
        html.Button("Theme", id="theme", type="button"),
    ]
    return html.Div(
        [
            html.A("Skip to the page", href="#page", className="skip"),
            html.Header(bar, className="bar"),
            _verdict_strip(),
            html.Div(id="problem", className="problem", role="alert"),
            html.Div(id="lost", className="problem", role="alert"),
            html.Main(html.P("Loading …", className="empty"), id="page", tabIndex=-1),
            dcc.Location(id="url", refresh=False),
            dcc.Interval(id="tick", interval=max(250, round(1000 * poll_s))),
            *(dcc.Store(id=name) for name in ("answer", "seen", "asked", "cell")),
        ]
    )


def _verdict_strip() -> html.Section:
    headline = html.Div(html.Strong(id="verdict-headline"), **aria(live="polite", atomic="true"))
    badge = html.Div([html.Span(id="state-badge"), html.Span(id="paused")])
    parts = [
        html.Div(id="verdict-sign", className="sign", **aria(hidden="true")),
        html.Div([headline, html.P(id="verdict-why"), html.P(id="verdict-next")], className="sentences"),
        html.Div(id="verdict-cost", className="cost"),
        html.Div([badge, html.Div(id="coverage"), html.Div(id="state-text")], className="fresh"),
    ]
    return html.Section(parts, id="verdict-strip", **aria(label="Verdict"))


def strip(header: Mapping[str, Any], place: Place) -> dict[str, dict[str, Any]]:
    """Return the content of the shell, by id."""
    verdict, state = header["verdict"], header["state"]
    label = verdict["label"] if verdict else ""
    tone = "good" if label == "healthy" else severity(label).replace("info", "unsure")
    sign = {"good": "✓", "unsure": "○"}.get(tone) or SEVERITY[tone]
    compact = "" if place.page == "overview" else " compact"
    what, _, more = header["state_text"].partition(". ")
    headline = verdict["headline"] if verdict else what
    note = verdict.get("note") if verdict else ""
    why = verdict["why"] + f" ({note})" * bool(note) if verdict else more
    stale = state == "stale"
    step = "" if header["step"] is None else f"step {header['step']:,}"
    return {
        "nav": {"children": [_tab(page, label, place) for page, label in _NAV.items()]},
        "session": {"children": _session(header["session"] or {}, place)},
        "verdict-strip": {"className": f"verdict tone-{tone}{compact}{' stale' * stale}"},
        "verdict-sign": {"children": sign},
        "verdict-headline": {"children": headline[:1].upper() + headline[1:]},
        "verdict-why": {"children": marked(why)},
        "verdict-next": {
            "children": [html.B("Next "), *marked(verdict["next"])] if verdict and verdict["next"] else None
        },
        "verdict-cost": {
            "children": _cost(verdict, "GPU" if header["session"]["gpus"] else "rank") if verdict else None
        },
        "state-badge": {"children": _STATES[state], "className": f"badge {state}"},
        "coverage": {"children": " · ".join(part for part in (header["coverage_text"], step) if part)},
        "state-text": {"children": header["state_text"] if verdict and not stale else None},
        "problem": {"children": header["state_text"] if stale else None},
    }


def _tab(page: str, label: str, place: Place) -> dcc.Link:
    on = page == place.page or (page == "overview" and place.page in ("node", "rank"))
    return dcc.Link(label, href=place.to(page), className="tab on" if on else "tab")


def _session(session: Mapping[str, Any], place: Place) -> list[Any]:
    """Return the session's name and size, and a menu of its runs where there are several."""
    if not session.get("id"):
        return []
    ranks, nodes = session.get("world_size"), session.get("nnodes")
    size = f"{text.count(ranks, 'rank')} on {text.count(nodes, 'node')}" if ranks and nodes else None
    facts = " · ".join(fact for fact in (size, session.get("strategy"), session.get("launcher")) if fact)
    parts: list[Any] = [html.Strong(session["id"]), html.Span(facts)]
    if place.get("session"):
        parts.append(dcc.Link("back to this dashboard's own", href="/"))
    runs = session.get("runs") or []
    if len(runs) > 1:
        name = next((run["name"] for run in runs if run["id"] == session["run"]), text.NA)
        links = [
            dcc.Link(f"{run['name']} ({run['status']})", href=place.here(run=run["id"]))
            for run in reversed(runs)
        ]
        parts.append(html.Details([html.Summary(f"run {name}"), html.Div(links, className="menu")]))
    return parts


def _range(cost_pct: Sequence[float] | None) -> str:
    """Return between what the cost was in most windows, where that is more than a rounding."""
    if cost_pct is None or cost_pct[1] - cost_pct[0] < 1:
        return ""
    return f" ({text.number(cost_pct[0], 0)}–{text.number(cost_pct[1], 0)})"


def _cost(verdict: Mapping[str, Any], unit: str) -> list[Any]:
    """Return what it costs, and how sure that is."""
    lines: list[Any] = []
    if verdict["cost_pct"] and verdict["label"] != "healthy":
        lines += [
            html.Span(text.percent(verdict["cost_pct"]), className="value"),
            html.Span(f"of each step{_range(verdict.get('cost_range_pct'))}", className="unit"),
        ]
        if verdict["gpu_hours_per_hour"]:
            lines.append(
                html.Div(f"≈ {text.number(verdict['gpu_hours_per_hour'])} {unit}-hours wasted per hour")
            )
    if verdict["lost_text"]:
        lines.append(html.Div(verdict["lost_text"]))
    sure = [f"confidence {verdict['confidence']}"] if verdict["confidence"] else []
    sure += ["comes and goes"] if verdict["transient"] else ["chronic"] if verdict["chronic"] else []
    return [*lines, html.Div(", ".join(sure))] if lines or sure else []
