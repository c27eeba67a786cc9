"""
Finds the first collective that not all ranks of its group call, or that they call differently.

Pure functions over the calls of all ranks (`calls`). Four kinds of mismatch are proven by the calls alone,
whenever they are looked at: ranks that call a different operation, size or type under the same number, and
ranks that wait for each other because they called collectives in a different order. That a rank is missing is
only a mismatch in a job that hangs: elsewhere it may be busy and come later (`late`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from traceml_ray import text
from traceml_ray.signals.collectives.calls import CallsInGroup, CallTable, RankCollectives, table_of

Kind = Literal["operation", "size", "dtype", "order", "circle", "missing", "late", "no_answer", "all_wait"]
PROVEN: frozenset[Kind] = frozenset({"operation", "size", "dtype", "order", "circle"})
"""Kinds that the calls alone prove, also before the first step. A rank that has ended proves `missing`."""
STATED: frozenset[Kind] = frozenset({"late", "all_wait"})
"""Kinds that are no mismatch: nothing is wrong with what the ranks call, as far as it is known."""


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """The first collective that does not match. None means "not known"."""

    kind: Kind
    """
    What does not match. `operation`, `size`, `dtype`: ranks call something else under the same number.
    `order`: ranks call the collectives of two groups in a different order. `circle`: ranks wait for each
    other over several groups. `missing`: ranks did not join and will not. `late`: they have not joined yet.
    `no_answer`: nothing is known of them. `all_wait`: all have joined, and it does not complete.
    """
    group: str
    """Name of the process group in torch."""
    desc: str
    """The group for a person: `group mesh_tp`."""
    seq: int
    """Number of the collective in its group."""
    op: str
    """Operation that most ranks call: `all_reduce`."""
    ranks: tuple[int, ...]
    """Global ranks that are named; empty: none."""
    instead: str
    """What the named ranks do instead, for a person. Empty: not known."""
    where: str | None
    """Place in the user's code of the first of them: `train (train.py:60)`."""
    others: tuple[int, ...]
    """Ranks that called the collective as most do, and wait in it."""
    others_where: str | None
    """Place in the user's code at which most of them called it."""
    waited_s: float | None = None
    """Time that the longest waiting of `others` has waited (s)."""
    proven: bool = False
    """Whether it cannot be healthy, however long one waits."""
    confidence: Literal["low", "medium", "high"] = "high"
    why: str = ""
    """Explanation in sentences for a person."""
    next: str = ""
    """What to do."""


def match(
    ranks: Iterable[RankCollectives], *, hang: bool = False, world: int | None = None
) -> Mismatch | None:
    """
    Return the first mismatch among the calls of `ranks`. None: there is none.

    Args:
        ranks: what each rank has called; only one element is held at a time.
        hang: whether the job is known to make no progress. Else a rank that has not joined is `late`.
        world: number of ranks of the job, if some may have reported nothing.
    """
    return match_table(table_of(ranks), hang=hang, world=world)


def match_table(table: CallTable, *, hang: bool = False, world: int | None = None) -> Mismatch | None:
    """As `match`, for calls that are in a table already."""
    return _first_difference(table) or _circle(table) or _absent(table, hang, world)


# Different calls under the same number


class _Side(NamedTuple):
    """Ranks that call the same under one number."""

    ranks: tuple[int, ...]
    calls: CallsInGroup
    """Those of the first rank."""
    position: int
    """Of the call among `calls`."""


def _first_difference(table: CallTable) -> Mismatch | None:
    """Return the earliest call that differs between the ranks of its group."""
    differences = [one for group in table.groups if (one := _difference_in(table, group)) is not None]
    return _as_difference(table, *min(differences, key=lambda one: one[2])) if differences else None


def _difference_in(table: CallTable, group: str) -> tuple[str, int, int] | None:
    """Return (group, number, when it was called) of the first call that differs in a group."""
    by_rank = table.groups[group]
    classes: dict[int, int] = {}
    different: int | None = None
    for rank in _judged(table, group):
        calls = by_rank[rank]
        for index, seq in enumerate(calls.seqs):
            if different is not None and seq >= different:
                break
            if classes.setdefault(seq, calls.classes[index]) != calls.classes[index]:
                different = seq
                break
    if different is None:
        return None
    times = [
        calls.created_ns[position]
        for calls in by_rank.values()
        if (position := calls.index(different)) is not None and calls.created_ns[position]
    ]
    return group, different, min(times, default=0)


def _judged(table: CallTable, group: str) -> list[int]:
    """Return the ranks whose calls in a group can be compared."""
    by_rank, known = table.groups[group], table.known[group]
    # Without their ranks, groups that were split under one name cannot be told apart.
    if known.ranks is None and ":split:" in known.desc:
        return []
    return sorted(rank for rank in by_rank if known.ranks is None or rank in known.ranks)


def _sides(table: CallTable, group: str, seq: int) -> list[_Side]:
    """Return the ranks that called `seq` by what they call, the fewest ranks first."""
    by_class: dict[int, list[int]] = {}
    by_rank = table.groups[group]
    for rank in _judged(table, group):
        position = by_rank[rank].index(seq)
        if position is not None:
            by_class.setdefault(by_rank[rank].classes[position], []).append(rank)
    sides = []
    for ranks in by_class.values():
        calls = by_rank[ranks[0]]
        sides.append(_Side(tuple(ranks), calls, calls.index(seq) or 0))
    return sorted(sides, key=lambda side: (len(side.ranks), -side.ranks[0]))


def _as_difference(table: CallTable, group: str, seq: int, _: int) -> Mismatch:
    *few, most = _sides(table, group, seq)
    tie = len(few) == 1 and len(few[0].ranks) == len(most.ranks)
    if tie and _is_new(most) and not _is_new(few[0]):
        few, most = [most], few[0]
    sure = not tie or _is_new(few[0]) != _is_new(most)
    first = few[-1]
    signature, usual = (
        table.signature(first.calls, first.position),
        table.signature(most.calls, most.position),
    )
    kind = signature.differs(usual)
    named = tuple(sorted(rank for side in few for rank in side.ranks))
    full = kind != "operation"
    what, others = (one.text() if full else one.op for one in (signature, usual))
    where, others_where = table.place(first.calls, first.position), table.place(most.calls, most.position)
    who, plural = text.ranks(named), len(named) > 1
    rest = "the other one calls" if len(most.ranks) == 1 else f"{_others(most.ranks)} call"
    why = (
        f"Call {seq:,} of {table.text_of(group)} differs: {who} {'call' if plural else 'calls'} "
        f"{_in(what, where)}; {rest} {_in(others, others_where)}."
    )
    if not sure:
        why += " Which of the two is wrong is not known."
    return Mismatch(
        kind=kind, group=table.known[group].name, desc=table.text_of(group), seq=seq, op=usual.op,
        ranks=named, instead=what, where=where, others=most.ranks, others_where=others_where,
        waited_s=_waited_s(table, group, seq, most.ranks), proven=True,
        confidence="high" if sure else "medium", why=why, next=_NEXT[kind],
    )  # fmt: skip


_SAME = "All ranks of a group have to call the same collectives in the same order"
_NEXT = {
    "operation": f"{_SAME}: look for a condition on the rank or its data, before the two places.",
    "size": f"{_SAME}, with the same number of elements: look at what the size of the tensor depends on.",
    "dtype": f"{_SAME}, with the same type: look for a cast or autocast that only some ranks do.",
}


def _is_new(side: _Side) -> bool:
    """Whether the first rank of a side had never made this call after the call before it."""
    calls, index = side.calls, side.position
    if index == 0:
        return False
    pair = calls.places[index - 1], calls.places[index], calls.classes[index]
    return not any((calls.places[i - 1], calls.places[i], calls.classes[i]) == pair for i in range(1, index))


# Ranks that wait


class _Wait(NamedTuple):
    """A call that a rank waits in, and the members of its group that have not made it."""

    rank: int
    group: str
    seq: int
    position: int
    """Of the call among those of the rank in the group."""
    absent: tuple[int, ...]


def _waits(table: CallTable) -> Iterator[_Wait]:
    for group in table.groups:
        judged = _judged(table, group)
        members = table.members(group) if judged else ()
        absent: dict[int, tuple[int, ...]] = {}
        for rank in judged:
            calls = table.groups[group][rank]
            index = calls.pending()
            if index is None:
                continue
            seq = calls.seqs[index]
            if seq not in absent:
                absent[seq] = tuple(one for one in members if _lacks(table, group, one, seq))
            yield _Wait(rank, group, seq, index, absent[seq])


def _lacks(table: CallTable, group: str, rank: int, seq: int) -> bool:
    """Whether a rank is known not to have called `seq`, or nothing is known of it."""
    report, calls = table.ranks.get(rank), table.groups[group].get(rank)
    if report is None:
        return True
    if calls is None or not calls.seqs:
        return report.whole or report.ended
    return calls.newest < seq


def _circle(table: CallTable) -> Mismatch | None:
    """
    Return ranks that wait for each other, each in a call that the next one has not made.

    Each of them made its own call before the one that the rank before it waits in. So the orders contradict
    each other, also if the ranks were looked at one after the other.
    """
    edges: dict[int, list[tuple[int, _Wait]]] = {}
    for wait in _waits(table):
        for absent in wait.absent:
            if absent in table.ranks:
                edges.setdefault(wait.rank, []).append((absent, wait))
    path = _cycle(edges)
    return _as_circle(table, path) if path else None


def _cycle(edges: dict[int, list[tuple[int, _Wait]]]) -> list[_Wait]:
    """Return the waits of a shortest circle. Empty: there is none."""
    inside = set(edges)
    while True:  # only ranks that wait for ranks that wait are in a circle
        rest = {rank for rank in inside if any(target in inside for target, _ in edges[rank])}
        if rest == inside:
            break
        inside = rest
    best: list[_Wait] = []
    for start in sorted(inside)[:64]:
        came: dict[int, tuple[int, _Wait]] = {}
        layer = [start]
        while layer and start not in came:
            following = []
            for rank in layer:
                for target, wait in edges[rank]:
                    if target in inside and target not in came:
                        came[target] = rank, wait
                        following.append(target)
            layer = following
        if start in came:
            path, rank = list[_Wait](), start
            while not path or rank != start:
                rank, wait = came[rank]
                path.append(wait)
            if not best or len(path) < len(best):
                best = path[::-1]
    return best


def _as_circle(table: CallTable, path: list[_Wait]) -> Mismatch:
    groups = list(dict.fromkeys(wait.group for wait in path))
    kind: Kind = "order" if len(groups) == 2 else "circle"
    parts = []
    for wait in path[:8]:
        calls = table.groups[wait.group][wait.rank]
        call = _in(table.signature(calls, wait.position).op, table.place(calls, wait.position))
        parts.append(f"rank {wait.rank} waits in {call} of {table.text_of(wait.group)}")
    ranks = tuple(sorted({wait.rank for wait in path}))
    # The minority among all ranks that wait in these calls is named.
    waiting: dict[str, list[int]] = {group: [] for group in groups}
    for wait in _waits(table):
        if wait.group in waiting and wait.absent:
            waiting[wait.group].append(wait.rank)
    by_size = sorted(groups, key=lambda group: len(waiting[group]))
    sure = len(groups) == 2 and len(waiting[by_size[0]]) < len(waiting[by_size[1]])
    named = tuple(sorted(set(waiting[by_size[0]]) - set(waiting[by_size[-1]]))) if sure else ranks
    first = next(wait for wait in path if wait.rank in named)
    other = next(wait for wait in path if wait.group != first.group)
    calls, other_calls = table.groups[first.group][first.rank], table.groups[other.group][other.rank]
    rest = tuple(sorted(set(waiting[other.group]) - set(named)))
    order = "in a different order" if kind == "order" else "in orders that contradict each other"
    return Mismatch(
        kind=kind, group=table.known[other.group].name, desc=table.text_of(other.group), seq=other.seq,
        op=table.signature(other_calls, other.position).op, ranks=named,
        instead=f"{table.signature(calls, first.position).op} of {table.text_of(first.group)}",
        where=table.place(calls, first.position), others=rest,
        others_where=table.place(other_calls, other.position),
        waited_s=_waited_s(table, other.group, other.seq, [other.rank]), proven=True,
        confidence="high" if sure else "medium",
        why=f"Ranks call the collectives of {text.listed([table.text_of(one) for one in groups])} {order}, "
        f"and wait for each other: {'; '.join(parts)}.",
        next="Call the collectives of both groups in the same order on all ranks.",
    )  # fmt: skip


def _absent(table: CallTable, hang: bool, world: int | None) -> Mismatch | None:
    """Return the ranks that the others wait for, and that wait for no other rank themselves."""
    waits = list(_waits(table))
    missing = _unknown_ranks(table, world)
    held = {wait.rank for wait in waits if wait.absent}
    candidates = list[tuple[tuple[int, int], _Wait, tuple[int, ...]]]()
    for wait in waits:
        ranks = tuple(
            rank for rank in {*wait.absent, *_unreported(table, wait.group, missing)} if rank not in held
        )
        if ranks:
            calls = table.groups[wait.group][wait.rank]
            candidates.append(((calls.created_ns[wait.position], wait.rank), wait, tuple(sorted(ranks))))
    if candidates:
        _, wait, ranks = min(candidates, key=lambda one: one[0])
        return _as_absent(table, wait, ranks, hang)
    together = [wait for wait in waits if not wait.absent]
    return _as_all_wait(table, together) if together and hang else None


def _unknown_ranks(table: CallTable, world: int | None) -> tuple[int, ...]:
    """Return the ranks of the job that reported nothing."""
    return tuple(rank for rank in range(world or 0) if rank not in table.ranks)


def _unreported(table: CallTable, group: str, missing: Sequence[int]) -> Sequence[int]:
    """Return the ranks without a report that may be members of a group."""
    known = table.known[group]
    return missing if known.ranks is None and known.desc in ("default_pg", "world") else ()


def _as_absent(table: CallTable, wait: _Wait, ranks: tuple[int, ...], hang: bool) -> Mismatch:
    ended = tuple(rank for rank in ranks if rank in table.ranks and table.ranks[rank].ended)
    silent = tuple(rank for rank in ranks if rank not in table.ranks)
    known = tuple(rank for rank in ranks if rank in table.ranks and rank not in ended)
    named = ended or known or silent
    kind: Kind = "missing" if ended else ("missing" if hang else "late") if known else "no_answer"
    sure = ended or (hang and len(named) < len(table.members(wait.group)) / 2)
    calls = table.groups[wait.group][wait.rank]
    op, others_where = table.signature(calls, wait.position).op, table.place(calls, wait.position)
    others = tuple(
        rank
        for rank, other in sorted(table.groups[wait.group].items())
        if rank not in ranks and other.index(wait.seq) is not None
    )
    instead, where = _instead(table, wait.group, named[0])
    verb = ("have" if len(named) > 1 else "has") + ("" if kind == "missing" else " not joined yet")
    joined = "did not join" if kind == "missing" else verb
    does = f": {instead}" if instead else ""
    rest = "the other one waits" if len(others) == 1 else f"{_others(others)} wait"
    why = (
        f"{text.ranks(named).capitalize()} {joined} {op} (call {wait.seq:,} of "
        f"{table.text_of(wait.group)}){does}. "
    )
    why += f"{rest[0].upper()}{rest[1:]} in it{_at(others_where)}."
    return Mismatch(
        kind=kind, group=table.known[wait.group].name, desc=table.text_of(wait.group), seq=wait.seq, op=op,
        ranks=named, instead=instead, where=where, others=others, others_where=others_where,
        waited_s=_waited_s(table, wait.group, wait.seq, others), proven=bool(ended),
        confidence="high" if sure else "low" if silent == named else "medium",
        why=why, next=_next_absent(kind, named, bool(ended)),
    )  # fmt: skip


def _instead(table: CallTable, group: str, rank: int) -> tuple[str, str | None]:
    """Return what a rank does that did not join, for a person, and where."""
    report = table.ranks.get(rank)
    if report is None:
        return "nothing is known of it", None
    calls = table.groups[group].get(rank)
    last = table.place(calls, len(calls.seqs) - 1) if calls and calls.seqs else None
    number = f"its last call in this group is {calls.newest:,}" if calls and calls.seqs else ""
    if report.ended:
        return ", ".join(
            filter(None, ("it has ended", report.ending, number + (_at(last) if number else "")))
        ), last
    if report.call and report.where:
        return f"it waits in {report.call}, {report.where}", report.where
    if report.where:
        return f"it is in {report.where}", report.where
    return (number + _at(last) if number else ""), last


def _next_absent(kind: Kind, named: Sequence[int], ended: bool) -> str:
    who = text.ranks(named)
    if ended:
        return f"Look at how {who} ended. If it was no error: give every rank the same number of steps."
    if kind == "no_answer":
        return f"Look at the process and the machine of {who}: it wrote no record of its calls."
    if kind == "late":
        return f"If it does not continue, look at what {who} is doing: the others wait for it."
    return f"Look at what {who} is doing instead, and why it takes another way through the code."


def _as_all_wait(table: CallTable, waits: Sequence[_Wait]) -> Mismatch:
    wait = min(waits, key=lambda one: table.groups[one.group][one.rank].created_ns[one.position])
    calls = table.groups[wait.group][wait.rank]
    op, where = table.signature(calls, wait.position).op, table.place(calls, wait.position)
    others = tuple(sorted(one.rank for one in waits if (one.group, one.seq) == (wait.group, wait.seq)))
    behind = len(others) < len(table.members(wait.group))
    named = others if behind and len(others) * 2 < len(table.members(wait.group)) else ()
    who = text.ranks(others) if behind else "All ranks"
    return Mismatch(
        kind="all_wait", group=table.known[wait.group].name, desc=table.text_of(wait.group), seq=wait.seq,
        op=op, ranks=named, instead="", where=where if named else None, others=others, others_where=where,
        waited_s=_waited_s(table, wait.group, wait.seq, others), confidence="medium",
        why=f"All ranks have joined {op} (call {wait.seq:,} of {table.text_of(wait.group)}){_at(where)}, "
        f"and it does not complete: {who[0].lower()}{who[1:]} wait{'s' if len(others) == 1 else ''} in it.",
        next="Look at the network between the nodes.",
    )  # fmt: skip


def _waited_s(table: CallTable, group: str, seq: int, ranks: Sequence[int]) -> float | None:
    """Return the longest time that a rank has waited in a call when it was recorded (s). None: not known."""
    waited = list[float]()
    for rank in ranks:
        calls = table.groups[group][rank]
        index, taken = calls.index(seq), table.ranks[rank].taken_ns
        if index is not None and taken and calls.created_ns[index] and not calls.done[index]:
            waited.append((taken - calls.created_ns[index]) / 1e9)
    return max(0.0, max(waited)) if waited else None


def _in(what: str, where: str | None) -> str:
    return f"{what}{_at(where)}"


def _at(where: str | None) -> str:
    return f" at {where}" if where else ""


def _others(ranks: Sequence[int]) -> str:
    return f"the other {len(ranks):,}" if len(ranks) > 1 else text.ranks(ranks)
