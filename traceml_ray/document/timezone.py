"""
The timezone in which moments are written. In the web app it is the timezone of the browser that sent the
request; elsewhere it is that of this process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo

from traceml_ray import text

_SECONDS_SHOWN = 2 * 3600
"""Times further apart than this number of seconds are written without seconds."""


@contextmanager
def timezone_of(name: str) -> Iterator[None]:
    """
    Show moments in a timezone: "Asia/Kolkata 330" is its IANA name, and its offset from UTC in minutes, for a
    machine that does not know the name. If neither can be used, the timezone is UTC.
    """
    before = text.TIMEZONE.set(_zone(name))
    try:
        yield
    finally:
        text.TIMEZONE.reset(before)


@lru_cache(64)
def _zone(given: str) -> tzinfo:
    name, _, minutes = given.partition(" ")
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):
        ahead = re.fullmatch(r"-?[0-9]{1,3}", minutes)
        return timezone(timedelta(minutes=int(minutes))) if ahead else timezone.utc


def _local_ns(t_ns: int) -> datetime:
    return datetime.fromtimestamp(t_ns / 1e9, timezone.utc).astimezone(text.TIMEZONE.get())


def name() -> str:
    """Return the name of the timezone: "Europe/Berlin", or its abbreviation if only that is known."""
    zone = text.TIMEZONE.get()
    return zone.key if isinstance(zone, ZoneInfo) else text.zone()


def on_the_wall(t_ns: int) -> str:
    """Format ns since the epoch as "2023-11-14 23:13:25.120", for an axis with clock times."""
    return f"{_local_ns(t_ns):%Y-%m-%d %H:%M:%S.%f}"[:-3]


def clocks(t_ns: Sequence[int | None], *, brief: bool = False) -> list[str]:
    """
    Format times (ns since the epoch) as "23:13:25". If they are not all on one day, the date is added: "14
    Nov 23:13:25". `brief`: without seconds if the times are hours apart. "" for an unknown time.
    """
    known = [_local_ns(t) for t in t_ns if t is not None]
    if not known:
        return ["" for _ in t_ns]
    first, last = min(known), max(known)
    seconds = not brief or (last - first).total_seconds() < _SECONDS_SHOWN
    form = "%H:%M:%S" if seconds else "%H:%M"
    if several_days(t_ns):
        form = f"%-d %b {form}"
    return ["" if t is None else _local_ns(t).strftime(form) for t in t_ns]


def several_days(t_ns: Sequence[int | None]) -> bool:
    """Return whether times (ns since the epoch) are on more than one day."""
    return len({_local_ns(t).date() for t in t_ns if t is not None}) > 1
