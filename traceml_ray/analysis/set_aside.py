"""Rows of a rank that are in no statistic: of how many steps, and how long they took, in bounded memory."""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter
from typing import NamedTuple

MOST = 64
"""Entries of a rank; of more steps some share one."""
_FIRST = attrgetter("first")


class Aside(NamedTuple):
    """Steps that follow one another."""

    first: int
    last: int
    steps: int
    """How many of them are set aside: all, but where a rank has very many."""
    ns: int
    """How long they took together."""


class SetAside:
    """The steps of one rank that are set aside, ascending."""

    def __init__(self) -> None:
        self.entries: list[Aside] = []

    def add(self, step: int, ns: int) -> None:
        """Add a row of a step that took `ns`; the rows of one step are one."""
        at = bisect_right(self.entries, step, key=_FIRST)
        before = self.entries[at - 1] if at else None
        if before is not None and step <= before.last:
            self.entries[at - 1] = before._replace(ns=before.ns + ns)
            return
        self.entries.insert(at, Aside(step, step, 1, ns))
        if len(self.entries) > MOST:
            self._join_nearest()

    def count(self, other: set[int]) -> int:
        """Return how many steps these are, without those that are `other` ones as well."""
        both = sum(any(entry.first <= step <= entry.last for entry in self.entries) for step in other)
        return sum(entry.steps for entry in self.entries) - both

    def _join_nearest(self) -> None:
        """Make one of the two entries with the fewest steps between them, the oldest of these."""
        entries = self.entries
        at = min(range(len(entries) - 1), key=lambda i: entries[i + 1].first - entries[i].last)
        one, two = entries[at], entries[at + 1]
        entries[at : at + 2] = [Aside(one.first, two.last, one.steps + two.steps, one.ns + two.ns)]
