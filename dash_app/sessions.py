"""The sessions stored under a folder, and two of them side by side, from the summary each one left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from traceml_ray.session import DATABASE, read_json

_MOST = 500
_COMPARED = {
    "median step": ("steps", "median_ms"),
    "p95 step": ("steps", "p95_ms"),
    "median busy time": ("steps", "busy_median_ms"),
    "skew between ranks, %": ("steps", "global_skew_pct"),
    "skew between nodes, %": ("steps", "node_skew_pct"),
    "cost of the verdict, %": ("verdict", "cost_pct"),
}
_known: dict[Path, tuple[int, dict[str, Any]]] = {}


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
    """What is shown here of a summary, which somebody else may have written."""

    session: _Session = msgspec.field(default_factory=_Session)
    steps: _Steps = msgspec.field(default_factory=_Steps)
    verdict: _Verdict = msgspec.field(default_factory=_Verdict)
    stages: list[_Stage] = []


def names(out: str) -> set[str]:
    """Return the names of the sessions under `out`."""
    return {path.parent.name for path in Path(out).glob(f"*/{DATABASE}")}


def listed(out: str) -> list[dict[str, Any]]:
    """Return the sessions under `out`, newest first."""
    files = sorted(Path(out).glob(f"*/{DATABASE}"), key=_changed, reverse=True)
    return [_entry(path.parent) for path in files[:_MOST]]


def _changed(path: Path) -> int:
    """Return when a file was changed, in ns; 0 for one that has just been moved away."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _entry(folder: Path) -> dict[str, Any]:
    summary = _summary(folder)
    session, verdict = summary.get("session", {}), summary.get("verdict", {})
    return {
        "name": folder.name,
        "path": str(folder),
        "started_at": session.get("started_at"),
        "status": session.get("status"),
        "launcher": session.get("launcher"),
        "world_size": session.get("world_size"),
        "steps": summary.get("steps", {}).get("count"),
        "median_ms": summary.get("steps", {}).get("median_ms"),
        "label": verdict.get("label"),
        "rank": verdict.get("rank"),
        "stage": verdict.get("stage"),
        "cost_pct": verdict.get("cost_pct"),
    }


def compared(out: str, a: str, b: str) -> list[dict[str, Any]]:
    """Return what two sessions (by name) have in common, side by side; empty when one has no summary."""
    known = names(out)
    one, other = (_summary(Path(out) / name) if name in known else {} for name in (a, b))
    if not one or not other:
        return []
    rows = [(what, one[block][name], other[block][name]) for what, (block, name) in _COMPARED.items()]
    for mine, theirs in zip(one["stages"], other["stages"], strict=False):
        rows.append((f"exposed {mine['name']}", mine["exposed_ms"], theirs["exposed_ms"]))
    told = [{"what": what, "a": x, "b": y, "change_pct": _change(x, y)} for what, x, y in rows]
    words = [("verdict", "label"), ("rank", "rank"), ("stage", "stage")]
    told += [
        {"what": what, "a": one["verdict"][name], "b": other["verdict"][name], "change_pct": None}
        for what, name in words
    ]
    return told


def _change(before: float | None, after: float | None) -> float | None:
    return 100 * (after - before) / before if before and after is not None else None


def _summary(folder: Path) -> dict[str, Any]:
    """Return the summary that lies in a session folder, empty while there is none."""
    path = folder / "summary.json"
    try:
        changed = path.stat().st_mtime_ns
        known = _known.get(path)
        if known is None or known[0] != changed:
            known = _known[path] = changed, msgspec.to_builtins(read_json(path, _Summary))
    except (OSError, ValueError):
        return {}
    return known[1]
