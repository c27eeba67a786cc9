"""Numbers as people read them: with a unit, short, and "n/a" where nothing is known."""

from __future__ import annotations

import re
from typing import Any

from dash import html

NA = "n/a"


def number(value: float | None, digits: int | None = None) -> str:
    """Return `value` with about three figures ("1,204", "41.3", "0.25"), or with so many `digits`."""
    if value is None:
        return NA
    size = abs(value)
    if digits is None:
        digits = 0 if size >= 99.95 or value == int(value) else 1 if size >= 9.995 else 2
    return f"{value:,.{digits}f}"


def unit(value: float | None, name: str, digits: int | None = None) -> str:
    """Return "41.3 ms", or "n/a"."""
    return NA if value is None else f"{number(value, digits)} {name}"


def ms(value: float | None) -> str:
    """Return milliseconds as "41.3 ms"."""
    return unit(value, "ms")


def pct(value: float | None, sign: bool = False) -> str:
    """Return "12 %", with `sign` "+12 %"."""
    if value is None:
        return NA
    digits = 0 if abs(value) >= 9.95 else 1
    return f"{value:{'+' if sign else ''}.{digits}f} %".replace("-", "−")


def size(value: float | None, per: str = "") -> str:
    """Return bytes as "3.2 GB"; `per` is "/s" for a rate."""
    if value is None:
        return NA
    for name in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or name == "TB":
            break
        value /= 1000
    return f"{number(value, 0 if name == 'B' else None)} {name}{per}"


def age(seconds: float | None) -> str:
    """Return "2 s", "3 min", "2 h" or "4 d"."""
    if seconds is None:
        return NA
    for name, of in (("s", 60), ("min", 60), ("h", 48)):
        if seconds < of:
            return f"{seconds:.0f} {name}"
        seconds /= 60 if name != "h" else 24
    return f"{seconds:.0f} d"


def plain(value: Any) -> str:
    """Return a word or an integer as it is, `None` as "n/a"."""
    return NA if value is None or value == "" else f"{value:,}" if isinstance(value, int) else str(value)


def said(name: str) -> str:
    """Return an identifier as words: "co_critical" → "co critical"."""
    return name.replace("_", " ")


def marked(text: str) -> list[Any]:
    """Return a sentence with what stands in backticks as code, and numbers not parted from their units."""
    kept = re.sub(r"(?<=\d) (?=%|µs|ms|s\b|min\b|h\b|[kMGT]?B\b)", "\u00a0", text)
    return [html.Code(part) if i % 2 else part for i, part in enumerate(kept.split("`"))]
