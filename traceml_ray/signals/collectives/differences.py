"""Where ranks of a group call something different under the same number, and where one skipped a call."""

from __future__ import annotations

from typing import NamedTuple

from traceml_ray.signals.collectives.calls import CallsInGroup, CallTable

MAX_SKIPPED = 16
"""Largest number of calls that a rank may have skipped, or made more, to be recognised."""


class DifferingCall(NamedTuple):
    """A call that differs between the ranks of its group."""

    group: str
    seq: int
    began_ns: int
    """When the first rank made it (ns since the epoch); 0: not known."""


class CallSide(NamedTuple):
    """Ranks that call the same under one number."""

    ranks: tuple[int, ...]
    calls: CallsInGroup
    """Those of the first rank."""
    position: int
    """Of the call among `calls`."""

    @property
    def is_new(self) -> bool:
        """Whether the first rank had never made this call after the call before it."""
        calls, last = self.calls, self.position
        if last == 0:
            return False
        pair = calls.places[last - 1], calls.places[last], calls.classes[last]
        earlier = zip(calls.places, calls.places[1:last], calls.classes[1:last], strict=False)
        return not any(known == pair for known in earlier)


def judged_ranks(table: CallTable, group: str) -> list[int]:
    """Return the ranks whose calls in a group can be compared."""
    by_rank, known = table.groups[group], table.known[group]
    # Without their ranks, groups that were split under one name cannot be told apart.
    if known.ranks is None and ":split:" in known.desc:
        return []
    members = by_rank.keys() if known.ranks is None else by_rank.keys() & set(known.ranks)
    return sorted(members)


def first_difference(table: CallTable) -> DifferingCall | None:
    """Return the earliest call that differs between the ranks of its group. None: there is none."""
    differences = [one for group in table.groups if (one := _difference_in(table, group)) is not None]
    return min(differences, key=lambda one: one.began_ns, default=None)


def _difference_in(table: CallTable, group: str) -> DifferingCall | None:
    by_rank = table.groups[group]
    classes: dict[int, int] = {}
    different: int | None = None
    for rank in judged_ranks(table, group):
        calls = by_rank[rank]
        for seq, kind in zip(calls.seqs, calls.classes, strict=True):
            if different is not None and seq >= different:
                break
            if classes.setdefault(seq, kind) != kind:
                different = seq
                break
    if different is None:
        return None
    times = [
        calls.created_ns[position]
        for calls in by_rank.values()
        if (position := calls.index(different)) is not None and calls.created_ns[position]
    ]
    return DifferingCall(group, different, min(times, default=0))


def sides(table: CallTable, group: str, seq: int) -> list[CallSide]:
    """Return the ranks that called `seq` by what they call, the fewest ranks first."""
    by_class: dict[int, list[int]] = {}
    by_rank = table.groups[group]
    for rank in judged_ranks(table, group):
        position = by_rank[rank].index(seq)
        if position is not None:
            by_class.setdefault(by_rank[rank].classes[position], []).append(rank)
    alike = []
    for ranks in by_class.values():
        calls = by_rank[ranks[0]]
        alike.append(CallSide(tuple(ranks), calls, calls.index(seq) or 0))
    return sorted(alike, key=lambda side: (len(side.ranks), -side.ranks[0]))


class CallShift(NamedTuple):
    """A rank whose calls have other numbers than those of another rank, from one call on."""

    seq: int
    """Number of the first call that one of the two did not make."""
    skipped: int
    """Number of calls that the rank did not make; below 0: that it made more than the other."""


def shift(calls: CallsInGroup, usual: CallsInGroup) -> CallShift | None:
    """
    Return where a rank skipped calls, or made more, compared with another rank. None: nowhere.

    The rank's calls after that place are those of the other rank, from the same lines, under other numbers. A
    line alone proves nothing: ranks may make the same collective from different lines. Nor do fewer equal
    calls than were skipped: a rank that skips the rest of a step repeats lines of its begin.
    """
    first = max(calls.seqs[0], usual.seqs[0]) if calls.seqs and usual.seqs else 0
    mine, theirs = _without_gaps(calls, first), _without_gaps(usual, first)
    if not mine or not theirs:
        return None
    begin = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
    if begin is None or begin == 0:
        return None
    for skipped in range(1, MAX_SKIPPED + 1):
        for longer, shorter, sign in ((theirs, mine, 1), (mine, theirs, -1)):
            rest = shorter[begin:]
            if rest and rest[: len(longer) - begin - skipped] == longer[begin + skipped :][: len(rest)]:
                compared = min(len(rest), len(longer) - begin - skipped)
                if compared >= skipped:
                    return CallShift(first + begin, sign * skipped)
    return None


def _without_gaps(calls: CallsInGroup, first: int) -> list[tuple[int, int]]:
    """Return line and class of each call from number `first` on. Empty: a call is not known."""
    begin = calls.index(first)
    if begin is None or calls.seqs[-1] - first != len(calls.seqs) - 1 - begin:
        return []
    return list(zip(calls.places[begin:], calls.classes[begin:], strict=True))
