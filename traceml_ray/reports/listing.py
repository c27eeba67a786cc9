"""
The sessions of a folder, each in one line, from its summary or, without one, from its file.

Renders them as text and as data, and selects the ones to remove: `traceml-ray sessions`.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from traceml_ray import text
from traceml_ray.document.json import indented
from traceml_ray.document.model import Column, Table, picked
from traceml_ray.document.text import page
from traceml_ray.reports.headlines import severity
from traceml_ray.reports.run_facts import moment
from traceml_ray.store.schema import SessionFileError, legible
from traceml_ray.store.session import DATABASE, holder, read_json, starting_sessions
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire.codec import ready

UNFINISHED = "never finished"
_MOST = 500
_OF_VERDICT = "label", "rank", "stage", "cost_pct", "lost_s"
_LATEST_S = 1 << 36
"""Latest moment that can be shown, in s since the epoch."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One session. Unknown values are None. `status` is the status in the summary, or UNFINISHED."""

    name: str = ""
    path: str = ""
    status: str = UNFINISHED
    started_at: str | None = None
    ended_at: str | None = None
    last_at: str | None = None
    """When the session ended. For a session that was never finished: when a rank last reported."""
    launcher: str | None = None
    world_size: int | None = None
    steps: int | None = None
    median_ms: float | None = None
    label: str | None = None
    rank: int | None = None
    stage: str | None = None
    cost_pct: float | None = None
    lost_s: float | None = None


class _Steps(msgspec.Struct):
    count: int | None = None
    median_ms: float | None = None


class _Summary(msgspec.Struct):
    """The shown fields of a summary. The file is checked, because any other program may have written it."""

    session: Entry = Entry()
    steps: _Steps = msgspec.field(default_factory=_Steps)
    verdict: Entry = Entry()


def entries(out: str, most: int | None = _MOST) -> list[Entry]:
    """Return the newest `most` sessions under `out`: running ones first, then the newest first."""
    files = sorted(Path(out).glob(f"*/{DATABASE}"), key=_changed_ns, reverse=True)
    folders = [*starting_sessions(Path(out)), *(path.parent for path in files)]
    listed = [_entry(folder) for folder in folders[:most]]
    return sorted(listed, key=lambda entry: entry.status != "running")


def found_in(entry: Entry) -> str:
    """Return the verdict of a session in a few words: "straggler: rank 5 in data"."""
    where = [] if entry.rank is None else [f"rank {entry.rank}"]
    where += [f"in {entry.stage}"] if entry.stage else []
    return text.words(entry.label or text.NA) + (": " if where else "") + " ".join(where)


def size_of(folder: Path) -> int:
    """Return the size of all readable files of a session (bytes)."""
    return sum(_size(path) for path in folder.rglob("*"))


def _size(path: Path) -> int:
    try:
        status = path.lstat()
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def names(out: str) -> set[str]:
    """Return the names of the sessions under `out`."""
    files = Path(out).glob(f"*/{DATABASE}")
    return {folder.name for folder in (*starting_sessions(Path(out)), *(path.parent for path in files))}


def _entry(folder: Path) -> Entry:
    summary = folder / "summary.json"
    running = holder(folder) is not None
    entry = None if running or not summary.is_file() else _summed_up(summary, _changed_ns(summary))
    if entry is None:
        changed = max(map(_changed_ns, (folder / DATABASE, folder / f"{DATABASE}-wal")))
        entry = _from_file(folder / DATABASE, changed)
    status = "running" if running else UNFINISHED if entry.status == "running" else entry.status
    return msgspec.structs.replace(entry, name=folder.name, path=str(folder), status=status)


@lru_cache(2 * _MOST)
def _summed_up(path: Path, _changed_ns: int) -> Entry | None:
    try:
        read = read_json(path, _Summary)
        for when in (read.session.started_at, read.session.ended_at):
            if when and not 0 < datetime.fromisoformat(when).timestamp() < _LATEST_S:
                return None
    except (OSError, ValueError, OverflowError):
        return None
    steps = {"steps": read.steps.count, "median_ms": read.steps.median_ms}
    verdict = {name: getattr(read.verdict, name) for name in _OF_VERDICT}
    return msgspec.structs.replace(read.session, last_at=read.session.ended_at, **steps, **verdict)


@lru_cache(2 * _MOST)
def _from_file(path: Path, _changed_ns: int) -> Entry:
    """
    Return the entry from the session file, with the current verdict. Fields are empty if the file cannot be
    read.
    """
    try:
        with SessionFile(path) as file, legible(path):
            meta, ranks = file.meta(), file.ranks()
            verdicts, _ = file.verdicts()
            steps = [rank.last_step + 1 for rank in ranks.values() if rank.last_step is not None]
            seen = max((rank.last_seen_ns for rank in ranks.values()), default=None)
            return msgspec.structs.replace(
                msgspec.convert(verdicts[-1], ready(Entry)) if verdicts else Entry(),
                last_at=moment(meta.get("ended_at") or seen or meta.get("started_at")),
                status=meta.get("status", "running"),
                launcher=meta.get("launcher"),
                world_size=meta.get("world_size") or len(ranks) or None,
                steps=max(steps, default=None),
                started_at=moment(meta.get("started_at")),
                ended_at=moment(meta.get("ended_at")),
            )
    except SessionFileError:
        return Entry()


def _changed_ns(path: Path) -> int:
    """Return when a file was changed (ns); 0 if it does not exist, or has just been moved away."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


STARTING = "starting"
"""Status of a live session that has no session file yet."""
_LIVE = "running", STARTING
_FRESH_S = 3600.0
"""
Age in s. A session that was never finished, and had rows more recently than this, may still run where locks
do not work.
"""


class Listed(Entry, frozen=True, kw_only=True):
    """A session with its size and age. Unknown values are None."""

    bytes: int
    age_s: float | None
    """Time since the last data arrived (s)."""


def listed(out: str, now_ns: int) -> list[Listed]:
    """Return all sessions under `out`: running ones first, then the newest first."""
    listed_sessions, starting = [], {str(folder) for folder in starting_sessions(Path(out))}
    for entry in entries(out, most=None):
        age = None if entry.last_at is None else max(0.0, now_ns / 1e9 - _seconds(entry.last_at))
        age = 0.0 if entry.status == "running" else age
        known = msgspec.structs.asdict(entry) | ({"status": STARTING} if entry.path in starting else {})
        listed_sessions.append(Listed(**known, bytes=size_of(Path(entry.path)), age_s=age))
    return sorted(
        listed_sessions,
        key=lambda session: (session.status not in _LIVE, session.age_s is None, session.age_s or 0.0),
    )


def to_go(sessions: Sequence[Listed], older_s: float | None, keep: int | None) -> list[Listed]:
    """
    Return the sessions that are older than `older_s` and not among the newest `keep`; None: no such
    condition. Sessions that run, may run, or have an unknown age stay.
    """
    over = [session for session in sessions if session.status not in _LIVE]
    beyond = over[max(0, (keep or 0) - (len(sessions) - len(over))) :]
    return [
        session
        for session in beyond
        if session.age_s is not None
        and session.age_s >= (older_s or 0.0)
        and not (session.status == UNFINISHED and session.age_s < _FRESH_S)
    ]


def render_sessions(sessions: Sequence[Listed], title: str) -> str:
    """Return sessions as text, each on one line with its whole name, because other programs read it too."""
    return page([Table(title, _LISTED, sessions) if sessions else [title]], wrapped=False)


def total(sessions: Sequence[Listed]) -> str:
    """Return "12 sessions, 3.4 GB"."""
    return f"{text.count(len(sessions), 'session')}, {text.size(sum(session.bytes for session in sessions))}"


def to_json(sessions: Sequence[Listed], chosen: Sequence[Listed] | None = None) -> str:
    """
    Return sessions as indented JSON. With `chosen`, each has a flag that says whether it
    will be removed.
    """
    listed_sessions: list[dict[str, Any]] = msgspec.to_builtins(sessions)
    if chosen is not None:
        paths = {session.path for session in chosen}
        listed_sessions = [{**entry, "remove": entry["path"] in paths} for entry in listed_sessions]
    return indented(listed_sessions)


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


def _status_tone(entry: Any) -> str:
    ended = entry.status in ("running", "finished", "stopped", "starting")
    return ("good" if entry.status == "running" else "") if ended else "critical"


def _verdict_tone(entry: Any) -> str:
    return severity(entry.label or "").replace("info", "")


SESSIONS = [
    Column("session", lambda session: session.name),
    Column("began", lambda session: session.started_at, "date"),
    Column("age", lambda session: session.age_s, "age"),
    Column("status", lambda session: session.status, tone=_status_tone),
    Column("launcher", lambda session: session.launcher),
    Column("ranks", lambda session: session.world_size, "plain"),
    Column("steps", lambda session: session.steps, "plain"),
    Column("size", lambda session: session.bytes, "size"),
    Column("median step", lambda session: session.median_ms, "ms"),
    Column("verdict", found_in, tone=_verdict_tone),
    Column("costs", lambda session: session.cost_pct, "percent"),
    Column("lost", lambda session: session.lost_s, "duration"),
]
_LISTED = picked(SESSIONS, "session", "began", "age", "status", "ranks", "steps", "size", "verdict")
