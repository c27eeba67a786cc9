"""Time zone of the browser that is being answered; pages show times in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timedelta, timezone, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo

from traceml_ray import text

_ZONE: ContextVar[tzinfo] = ContextVar("timezone", default=timezone.utc)


@contextmanager
def timezone_of(name: str) -> Iterator[None]:
    """
    Show moments in a timezone: its name (IANA) and, for a machine that does not know it, by how many minutes
    it is ahead of UTC: "Asia/Kolkata 330". UTC where neither helps.
    """
    before = _ZONE.set(_zone(name))
    try:
        yield
    finally:
        _ZONE.reset(before)


@lru_cache(64)
def _zone(given: str) -> tzinfo:
    name, _, minutes = given.partition(" ")
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):
        ahead = re.fullmatch(r"-?[0-9]{1,3}", minutes)
        return timezone(timedelta(minutes=int(minutes))) if ahead else timezone.utc


def _local(moment: str) -> datetime:
    return datetime.fromisoformat(moment.replace("Z", "+00:00")).astimezone(_ZONE.get())


def abbreviation(moment: str | None = None) -> str:
    """Return the abbreviation of the zone at that time, by default now: "CET", "UTC+03"."""
    name = (_local(moment) if moment else datetime.now(_ZONE.get())).tzname() or ""
    return f"UTC{name}" if name[:1] in "+-" else name


def clock(moment: str) -> str:
    """Format a time (ISO 8601, UTC) as "23:13:25 CET"."""
    return f"{_local(moment):%H:%M:%S} {abbreviation(moment)}"


def with_clocks(sentence: str) -> str:
    """Return a sentence in which every time is written as "23:13:25 CET"."""
    return text.MOMENT.sub(lambda match: clock(match[0]), sentence)


def date(moment: str) -> str:
    """Format a time (ISO 8601, UTC) as "2023-11-14 23:13:25", without its zone: the header shows that."""
    return f"{_local(moment):%Y-%m-%d %H:%M:%S}"
