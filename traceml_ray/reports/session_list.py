"""The sessions of a folder as text and as data, and which of them may go: `traceml-ray sessions`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from traceml_ray import text
from traceml_ray.reports.layout import Columns, page, table
from traceml_ray.reports.listing import UNFINISHED, Entry, entries, found_in, size_of
from traceml_ray.store.session import starting_sessions

STARTING = "starting"
"""Status of a live session that has no file yet."""
_LIVE = "running", STARTING
_FRESH_S = 3600.0
"""A session that was never finished, and has had rows this recently, may go on where locks do not work."""


class Listed(Entry, frozen=True, kw_only=True):
    """A session, with what it takes; what is not known is None."""

    bytes: int
    age_s: float | None
    """Since something came last."""


def listed(out: str, now_ns: int) -> list[Listed]:
    """Return all sessions under `out`: those that run, then the newest first."""
    found = []
    for entry in entries(out, most=None):
        age = None if entry.last_at is None else max(0.0, now_ns / 1e9 - _seconds(entry.last_at))
        age = 0.0 if entry.status == "running" else age
        known = msgspec.structs.asdict(entry)
        found.append(Listed(**known, bytes=size_of(Path(entry.path)), age_s=age))
    for folder in starting_sessions(Path(out)):
        found.append(
            Listed(name=folder.name, path=str(folder), status=STARTING, bytes=size_of(folder), age_s=0.0)
        )
    return sorted(found, key=lambda each: (each.status not in _LIVE, each.age_s is None, each.age_s or 0.0))


def to_go(sessions: Sequence[Listed], older_s: float | None, keep: int | None) -> list[Listed]:
    """
    Return those that are older than `older_s` and not among the newest `keep`; None: whatever their age, or
    place. One that runs, may run, or is of an age that is not known stays.
    """
    over = [each for each in sessions if each.status not in _LIVE]
    beyond = over[max(0, (keep or 0) - (len(sessions) - len(over))) :]
    return [
        each
        for each in beyond
        if each.age_s is not None
        and each.age_s >= (older_s or 0.0)
        and not (each.status == UNFINISHED and each.age_s < _FRESH_S)
    ]


def render_sessions(sessions: Sequence[Listed], title: str) -> str:
    """Return sessions as text, each on one line, with its whole name: other programs read it, too."""
    return page([table(title, _COLUMNS, sessions, wrapped=False) or [title]])


def total(sessions: Sequence[Listed]) -> str:
    """Return "12 sessions, 3.4 GB"."""
    return f"{text.count(len(sessions), 'session')}, {text.size(sum(each.bytes for each in sessions))}"


def to_json(sessions: Sequence[Listed], chosen: Sequence[Listed] | None = None) -> str:
    """Return sessions as indented JSON; with `chosen`, whether each of them is to be removed."""
    found: list[dict[str, Any]] = msgspec.to_builtins(sessions)
    if chosen is not None:
        paths = {each.path for each in chosen}
        found = [{**each, "remove": each["path"] in paths} for each in found]
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


_COLUMNS: Columns = {
    "session": lambda of: of.name,
    "began (UTC)": lambda of: text.date(of.started_at),
    ">age": lambda of: text.age(of.age_s),
    "status": lambda of: of.status,
    ">ranks": lambda of: text.plain(of.world_size),
    ">steps": lambda of: text.plain(of.steps),
    ">size": lambda of: text.size(of.bytes),
    "verdict": found_in,
}
