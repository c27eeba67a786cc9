"""Which rank waits in which call, for whom, and which ranks wait for each other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from traceml_ray.signals.collectives.calls import CallTable
from traceml_ray.signals.collectives.differences import judged_ranks

_STARTS = 64
"""Number of ranks from which a shortest circle is searched."""
LEAST_S = 1.0
"""Time that a rank must have waited in a group of unknown ranks to prove that another is missing (s)."""


class Wait(NamedTuple):
    """A call that a rank waits in."""

    rank: int
    group: str
    seq: int
    position: int
    """Of the call among those of the rank in the group."""
    absent: tuple[int, ...]
    """Members of the group that have not made the call."""
    perhaps: tuple[int, ...]
    """If the members are not known, and only this rank made the call: one of these has not made it."""


def waits(table: CallTable) -> list[Wait]:
    """Return the calls that ranks wait in."""
    result = list[Wait]()
    for group in table.groups:
        judged = judged_ranks(table, group)
        members = table.members(group) if judged else ()
        absent: dict[int, tuple[int, ...]] = {}
        for rank in judged:
            calls = table.groups[group][rank]
            position = calls.pending()
            if position is None:
                continue
            seq = calls.seqs[position]
            if seq not in absent:
                absent[seq] = tuple(one for one in members if lacks(table, group, one, seq))
            result.append(Wait(rank, group, seq, position, absent[seq], ()))
    return [one._replace(perhaps=_perhaps(table, one)) for one in result]


def lacks(table: CallTable, group: str, rank: int, seq: int) -> bool:
    """Return whether a rank is known not to have made a call, or nothing is known of it."""
    report, calls = table.ranks.get(rank), table.groups[group].get(rank)
    if report is None:
        return True
    if calls is None or not calls.seqs:
        return report.whole or report.ended
    return calls.newest < seq


def _perhaps(table: CallTable, wait: Wait) -> tuple[int, ...]:
    """
    Return the ranks of which one must be missing: in a group whose members are not known, a rank alone in its
    call waits for at least one other.
    """
    waited = waited_s(table, wait.group, wait.seq, [wait.rank])
    if wait.absent or table.known[wait.group].ranks or waited is None or waited < LEAST_S:
        return ()
    callers = [rank for rank, calls in table.groups[wait.group].items() if calls.index(wait.seq) is not None]
    if callers != [wait.rank]:
        return ()
    return tuple(rank for rank in sorted(table.ranks) if rank != wait.rank)


def waited_s(table: CallTable, group: str, seq: int, ranks: Iterable[int]) -> float | None:
    """Return the longest time that a rank had waited in a call when it was recorded (s). None: not known."""
    waited = list[float]()
    for rank in ranks:
        calls = table.groups[group][rank]
        position, taken = calls.index(seq), table.ranks[rank].taken_ns
        if position is not None and taken and calls.created_ns[position] and not calls.done[position]:
            waited.append((taken - calls.created_ns[position]) / 1e9)
    return max(0.0, *waited) if waited else None


def deadlocked(all_waits: list[Wait]) -> dict[int, list[Wait]]:
    """
    Return the ranks that can only go on if another one of them does, with the calls that they wait in.

    Each of them made its own call before the one that another waits in. So the orders of their calls
    contradict each other, also if the ranks were looked at one after the other.
    """
    inside: dict[int, list[Wait]] = {}
    for wait in all_waits:
        if wait.absent or wait.perhaps:
            inside.setdefault(wait.rank, []).append(wait)
    while True:
        rest = {
            rank: held
            for rank, own_waits in inside.items()
            if (held := [wait for wait in own_waits if _is_held(wait, inside)])
        }
        if len(rest) == len(inside):
            return rest
        inside = rest


def _is_held(wait: Wait, inside: dict[int, list[Wait]]) -> bool:
    if wait.perhaps:
        return all(rank in inside for rank in wait.perhaps)
    return any(rank in inside for rank in wait.absent)


def shortest_circle(inside: dict[int, list[Wait]]) -> list[Wait]:
    """Return the waits of a shortest circle among deadlocked ranks: the next one has not made the call."""
    best = list[Wait]()
    for start in sorted(inside)[:_STARTS]:
        path = _circle_from(start, inside)
        if path and (not best or len(path) < len(best)):
            best = path
    return best


def _circle_from(start: int, inside: dict[int, list[Wait]]) -> list[Wait]:
    came: dict[int, tuple[int, Wait]] = {}
    layer = [start]
    while layer and start not in came:
        following = list[int]()
        for rank in layer:
            for wait in inside[rank]:
                for target in wait.absent or wait.perhaps:
                    if target in inside and target not in came:
                        came[target] = rank, wait
                        following.append(target)
        layer = following
    if start not in came:
        return []
    path, rank = list[Wait](), start
    while not path or rank != start:
        rank, wait = came[rank]
        path.append(wait)
    return path[::-1]
