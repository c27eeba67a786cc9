"""Which ranks a person asks for: `all`, `0,2`, `0,4-7`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from traceml_ray.identity import MAX_RANKS

_RANGE = re.compile(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?", re.ASCII)


class RankFilterError(ValueError):
    """A rank filter that cannot be read; the message says which part, and what one looks like."""


@dataclass(frozen=True)
class RankFilter:
    """Some ranks: `rank in filter`."""

    ranges: tuple[range, ...] | None = None
    """None: all of them."""

    def __contains__(self, rank: int) -> bool:
        """Return whether that rank is asked for."""
        return self.ranges is None or any(rank in each for each in self.ranges)


def rank_filter(text: str) -> RankFilter:
    """
    Return the filter that `text` asks for: `all`, or ranks and ranges of ranks with commas between, both ends
    included.

    Raises:
        RankFilterError: it is neither.
    """
    if text.strip().lower() == "all":
        return RankFilter()
    return RankFilter(tuple(_range(part.strip(), text) for part in text.split(",")))


def _range(part: str, text: str) -> range:
    found = _RANGE.fullmatch(part)
    if found is None:
        what = f"{part[:40]!r} is not a rank" if part else "a rank is missing"
        raise RankFilterError(f"ranks {text[:80]!r}: {what}; write all, or 0,2, or 0,4-7")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise RankFilterError(f"ranks {text[:80]!r}: {part} ends before it begins; write {last}-{first}")
    if last >= MAX_RANKS:
        raise RankFilterError(f"ranks {text[:80]!r}: {last} is too large, ranks are below {MAX_RANKS}")
    return range(first, last + 1)
