"""Which rank waits in which call, for whom, and which ranks wait for each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from traceml_ray.signals.collectives.calls import CallsInGroup, CallTable, CollectiveCall
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
    alone: bool
    """Whether the members are not known, and only this rank made the call: at least one other has not."""


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
            result.append(Wait(rank, group, seq, position, absent[seq], alone=False))
    return [one._replace(alone=_is_alone(table, one)) for one in result]


def lacks(table: CallTable, group: str, rank: int, seq: int) -> bool:
    """Return whether a rank is known not to have made a call, or nothing is known of it."""
    report, calls = table.ranks.get(rank), table.groups[group].get(rank)
    if report is None:
        return True
    if calls is None or not calls.seqs:
        return report.whole or report.ended
    return calls.newest < seq


def _is_alone(table: CallTable, wait: Wait) -> bool:
    """
    Return whether a rank certainly waits for another one that is not known: it is alone in its call, in a
    group whose members are not known.
    """
    if wait.absent or table.known[wait.group].ranks is not None:
        return False
    report, calls = table.ranks[wait.rank], table.groups[wait.group][wait.rank]
    seen_ns, created_ns = report.taken_ns or report.written_ns, calls.created_ns[wait.position]
    if not seen_ns or not created_ns or (seen_ns - created_ns) / 1e9 < LEAST_S:
        return False
    others = (calls for rank, calls in table.groups[wait.group].items() if rank != wait.rank)
    return len(table.ranks) > 1 and all(calls.index(wait.seq) is None for calls in others)


_OF_ALL = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"}
"""Operations that no rank completes before all have joined."""


def last_joined(table: CallTable, group: str) -> int:
    """
    Return the number of the newest call of a group that all its ranks have certainly joined: one has
    completed it. 0: none is known. A rank that waits in an older call was recorded before it left it.
    """
    return max((_last_joined_by(table, calls) for calls in table.groups[group].values()), default=0)


def _last_joined_by(table: CallTable, calls: CallsInGroup) -> int:
    for position in range(len(calls.seqs) - 1, -1, -1):
        if calls.done[position] and table.signature(calls, position).operation in _OF_ALL:
            return calls.seqs[position]
    return 0


class RootedWait(NamedTuple):
    """A call with a root that a rank waits in."""

    wait: Wait
    root: int
    """Global rank that it names as the root."""


_ROOTED = ("broadcast", "scatter", "gather", "reduce")


def roots_of_a_call(table: CallTable, all_waits: Iterable[Wait]) -> list[RootedWait] | None:
    """Return ranks that wait in the same call, and name different roots. None: there are none."""
    alike: dict[_Call, list[RootedWait]] = {}
    for wait in all_waits:
        report, calls = table.ranks[wait.rank], table.groups[wait.group][wait.rank]
        op = table.signature(calls, wait.position).op
        if report.peer is not None and op in _ROOTED and report.call == op:
            alike.setdefault((wait.group, wait.seq), []).append(RootedWait(wait, report.peer))
    return next((same for same in alike.values() if len({one.root for one in same}) > 1), None)


class PeerWait(NamedTuple):
    """A send or receive that a rank waits in."""

    rank: int
    call: CollectiveCall
    peer: int
    """Global rank that it sends to, or receives from."""


_PEER = re.compile(r"(send|recv) (\d{1,9})(?:->|<-)(\d{1,9})", re.ASCII)


def peer_waits(table: CallTable) -> dict[int, PeerWait]:
    """Return the oldest send or receive of each rank whose other side does not wait in it."""
    pending: dict[int, list[tuple[str, int, CollectiveCall]]] = {}
    for rank, calls in table.pending_peers.items():
        for call in calls:
            parsed = _peer_of(table, call)
            if parsed is not None:
                pending.setdefault(rank, []).append((*parsed, call))
    waiting = dict[int, PeerWait]()
    for rank, sides in pending.items():
        for kind, peer, call in sides:
            if not any(other == rank and there != kind for there, other, _ in pending.get(peer, ())):
                waiting[rank] = PeerWait(rank, call, peer)
                break
    return waiting


def _peer_of(table: CallTable, call: CollectiveCall) -> tuple[str, int] | None:
    """Return (`send` or `recv`, global rank of the other side). None: it is in no record."""
    match = _PEER.fullmatch(call.op)
    if match is None:
        return None
    group = table.known.get(call.group)
    members, peer = group.ranks if group else None, int(match[3])
    if members is None:
        return match[1], peer
    return (match[1], members[peer]) if peer < len(members) else None


def peer_circle(waiting: Mapping[int, PeerWait]) -> list[PeerWait]:
    """Return ranks of which each waits for a send or receive of the next one; empty: there are none."""
    for start in sorted(waiting):
        path = [waiting[start]]
        while (following := waiting.get(path[-1].peer)) is not None and following not in path:
            path.append(following)
        if following is path[0] and len(path) > 1:
            return path
    return []


def waited_s(table: CallTable, group: str, seq: int, ranks: Iterable[int]) -> float | None:
    """Return the longest time that a rank had waited in a call when it was recorded (s). None: not known."""
    waited = list[float]()
    for rank in ranks:
        calls = table.groups[group][rank]
        position, taken = calls.index(seq), table.ranks[rank].taken_ns
        if position is not None and taken and calls.created_ns[position] and not calls.done[position]:
            waited.append((taken - calls.created_ns[position]) / 1e9)
    return max(0.0, *waited) if waited else None


def deadlocked(table: CallTable, all_waits: list[Wait]) -> dict[int, list[Wait]]:
    """
    Return the ranks that can only go on if another one of them does, with the calls that they wait in.

    Each of them made its own call before the one that another waits in. So the orders of their calls
    contradict each other, also if the ranks were looked at one after the other.
    """
    inside: dict[int, list[Wait]] = {}
    for wait in all_waits:
        if wait.absent or wait.alone:
            inside.setdefault(wait.rank, []).append(wait)
    if inside.keys() != table.ranks.keys():  # the rank that one waits for alone may be one that does not wait
        inside = {rank: known for rank, held in inside.items() if (known := [w for w in held if w.absent])}
    rest = _peeled(inside)
    if len(rest) < len(inside) and any(wait.alone for held in rest.values() for wait in held):
        rest = _peeled(
            {rank: known for rank, held in rest.items() if (known := [w for w in held if w.absent])}
        )
    return rest


def _peeled(inside: dict[int, list[Wait]]) -> dict[int, list[Wait]]:
    """Return `inside` without ranks that wait for nobody in it, until there are none of these."""
    waiters: dict[_Call, list[int]] = {}
    left: dict[_Call, int] = {}
    absent_in: dict[int, list[_Call]] = {}
    held = dict.fromkeys(inside, 0)
    for rank, own_waits in inside.items():
        for wait in own_waits:
            call = wait.group, wait.seq
            if call not in waiters:
                targets = [target for target in wait.absent if target in inside]
                left[call] = len(targets) + wait.alone
                for target in targets:
                    absent_in.setdefault(target, []).append(call)
            waiters.setdefault(call, []).append(rank)
            held[rank] += left[call] > 0
    free = [rank for rank, count in held.items() if count == 0]
    while free:
        rank = free.pop()
        del held[rank]
        for call in absent_in.get(rank, ()):
            left[call] -= 1
            for waiter in waiters[call] if left[call] == 0 else ():
                if waiter in held:
                    held[waiter] -= 1
                    if held[waiter] == 0:
                        free.append(waiter)
    return {rank: [wait for wait in inside[rank] if left[wait.group, wait.seq] > 0] for rank in held}


_Call = tuple[str, int]
"""Group and number of a call."""


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
    expanded = set[_Call]()
    swept = False
    layer = [start]
    while layer and start not in came:
        following = list[int]()
        for rank in layer:
            for wait in inside[rank]:
                call = wait.group, wait.seq
                if call in expanded:
                    continue
                expanded.add(call)
                targets: Iterable[int] = wait.absent
                if wait.alone:  # it may wait for any other rank
                    targets, swept = ([start] if swept else [*inside]), True
                for target in targets:
                    if target in inside and target != rank and target not in came:
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
