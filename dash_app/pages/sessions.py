"""Past sessions under a folder, and two of them side by side, from the summary that each one left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from dash import dcc, html

from traceml_ray import text
from traceml_ray.session import DATABASE, read_json

from ..components import Columns, link, panel, part, table
from ..route import Route
from ..run_state import RunState
from ..session_cache import SessionCache

_MOST = 500
_COMPARED = {
    "median step": ("steps", "median_ms"),
    "p95 step": ("steps", "p95_ms"),
    "median busy time": ("steps", "busy_median_ms"),
    "skew between ranks, %": ("steps", "global_skew_pct"),
    "skew between nodes, %": ("steps", "node_skew_pct"),
    "cost of the verdict, %": ("verdict", "cost_pct"),
    "verdict": ("verdict", "label"),
    "rank": ("verdict", "rank"),
    "stage": ("verdict", "stage"),
}
_known: dict[Path, tuple[int, _Summary]] = {}
"""Summaries that were read, and when each file was changed, ns."""


class _Session(msgspec.Struct):
    started_at: str | None = None
    status: str | None = None
    launcher: str | None = None
    world_size: int | None = None


class _Steps(msgspec.Struct):
    count: int | None = None
    median_ms: float | None = None
    p95_ms: float | None = None
    busy_median_ms: float | None = None
    global_skew_pct: float | None = None
    node_skew_pct: float | None = None


class _Verdict(msgspec.Struct):
    label: str | None = None
    rank: int | None = None
    stage: str | None = None
    cost_pct: float | None = None


class _Stage(msgspec.Struct):
    name: str
    exposed_ms: float | None = None


class _Summary(msgspec.Struct):
    """What is shown of a summary; the file is checked, as any other program may have written it."""

    session: _Session = msgspec.field(default_factory=_Session)
    steps: _Steps = msgspec.field(default_factory=_Steps)
    verdict: _Verdict = msgspec.field(default_factory=_Verdict)
    stages: list[_Stage] = []


def data(cache: SessionCache, _run: RunState | None, route: Route) -> dict[str, Any]:
    """Return the sessions of the source's folder, newest first, and two of them (by name) side by side."""
    out, a, b = cache.source.out, route.get("a"), route.get("b")
    return {"sessions": listed(out), "compare": compared(out, a, b) if a and b else None}


def listed(out: str) -> list[dict[str, Any]]:
    """Return the sessions under `out`, newest first."""
    files = sorted(Path(out).glob(f"*/{DATABASE}"), key=_changed_ns, reverse=True)
    return [_entry(path.parent) for path in files[:_MOST]]


def names(out: str) -> set[str]:
    """Return the names of the sessions under `out`."""
    return {path.parent.name for path in Path(out).glob(f"*/{DATABASE}")}


def _changed_ns(path: Path) -> int:
    """Return when a file was changed; 0 for one that has just been moved away."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _entry(folder: Path) -> dict[str, Any]:
    summary = _summary(folder) or _Summary()
    steps = {"steps": summary.steps.count, "median_ms": summary.steps.median_ms}
    described = msgspec.structs.asdict(summary.session) | msgspec.structs.asdict(summary.verdict)
    return {"name": folder.name, "path": str(folder), **described, **steps}


def compared(out: str, a: str, b: str) -> list[dict[str, Any]]:
    """Return what two sessions (by name) have in common, side by side; empty when one has no summary."""
    known = names(out)
    one, other = (_summary(Path(out) / name) if name in known else None for name in (a, b))
    if one is None or other is None:
        return []
    rows = [
        (what, *(getattr(getattr(each, block), name) for each in (one, other)))
        for what, (block, name) in _COMPARED.items()
    ]
    for mine, theirs in zip(one.stages, other.stages, strict=False):
        rows.append((f"exposed {mine.name}", mine.exposed_ms, theirs.exposed_ms))
    return [{"what": what, "a": x, "b": y, "change_pct": _change_pct(x, y)} for what, x, y in rows]


def _change_pct(before: Any, after: Any) -> float | None:
    numbers = isinstance(before, float) and isinstance(after, float)
    return 100 * (after - before) / before if numbers and before else None


def _summary(folder: Path) -> _Summary | None:
    """Return the summary that lies in a session folder, None while there is none that can be read."""
    path = folder / "summary.json"
    try:
        changed = path.stat().st_mtime_ns
        if path not in _known or _known[path][0] != changed:
            _known[path] = changed, read_json(path, _Summary)
    except (OSError, ValueError):
        return None
    return _known[path][1]


def layout(view: Mapping[str, Any], route: Route) -> Any:
    """Return the elements of the page."""
    columns: Columns = {
        "compare": lambda s: html.Span(
            [_choose(side, s["name"], route) for side in "ab"], className="choose"
        ),
        "session": lambda s: dcc.Link(
            s["name"], href=route.to("overview", session=s["name"], run=None), title=s["path"]
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
    rows = table(columns, view["sessions"], empty="No stored session here yet.", label="Stored sessions")
    return html.Div(
        [
            html.H1("Sessions"),
            html.P("A name opens the session; A and B put two of them side by side.", className="hint"),
            part(html.Div(_compared(view["compare"], route), id="session-compare")),
            part(html.Div(rows, id="session-list", className="panel")),
        ]
    )


def _choose(side: str, name: str, route: Route) -> dcc.Link:
    on = route.get(side) == name
    href = route.here(**{side: None if on else name})
    title = f"{'Chosen' if on else 'Choose'} {name} as {side.upper()}"
    return link(side.upper(), href, "chip", on=on, title=title)


def _verdict(session: Mapping[str, Any]) -> str:
    where = [] if session["rank"] is None else [f"rank {session['rank']}"]
    where += [f"in {text.words(session['stage'])}"] if session["stage"] else []
    return text.words(session["label"] or text.NA) + (": " if where else "") + " ".join(where)


def _compared(rows: Any, route: Route) -> Any:
    a, b = route.get("a"), route.get("b")
    if rows is None:
        return None
    columns: Columns = {
        "": lambda row: text.words(row["what"]),
        f">{a}": lambda row: _value(row["a"]),
        f">{b} ": lambda row: _value(row["b"]),  # the two may have the same name
        ">change": lambda row: (
            "" if row["change_pct"] is None else text.percent(row["change_pct"], sign=True)
        ),
    }
    empty = "These two cannot be compared: one of them has no summary."
    return panel(f"{a} and {b}", table(columns, rows, empty=empty), note="times in ms")


def _value(value: Any) -> str:
    return text.number(value) if isinstance(value, float) else text.plain(value)
