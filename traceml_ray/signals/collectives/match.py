"""
Finds the first collective that not all ranks of its group call, or that they call differently.

Pure functions over the calls of all ranks (`calls`). Four kinds of mismatch are proven by the calls alone,
whenever they are looked at: ranks that call a different operation, size or type under the same number, and
ranks that wait for each other because they called collectives in a different order. That a rank is missing is
only a mismatch in a job that hangs: elsewhere it may be busy and come later (`late`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from traceml_ray import text
from traceml_ray.signals.collectives.calls import CallsInGroup, CallTable, RankCollectives, table_of
from traceml_ray.signals.collectives.differences import (
    CallShift,
    CallSide,
    DifferingCall,
    first_difference,
    shift,
    sides,
)
from traceml_ray.signals.collectives.waiting import (
    PeerWait,
    RootedWait,
    Wait,
    deadlocked,
    last_joined,
    peer_circle,
    peer_waits,
    roots_of_a_call,
    shortest_circle,
    waited_s,
    waits,
)

Kind = Literal[
    "operation",
    "size",
    "dtype",
    "root",
    "order",
    "circle",
    "missing",
    "behind",
    "late",
    "no_answer",
    "all_wait",
]
PROVEN: frozenset[Kind] = frozenset({"operation", "size", "dtype", "root", "order", "circle"})
"""Kinds that the calls alone prove, also before the first step. A rank that has ended proves `missing`."""
ABSENT: frozenset[Kind] = frozenset({"missing", "behind"})
"""Kinds of a rank that did not join in a job that hangs."""
STATED: frozenset[Kind] = frozenset({"late", "all_wait"})
"""Kinds that are no mismatch: nothing is wrong with what the ranks call, as far as it is known."""


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """The first collective that does not match. None means "not known"."""

    kind: Kind
    """
    What does not match. `operation`, `size`, `dtype`: ranks call something else under the same number.
    `root`: they name different roots. `order`: ranks call the collectives of two groups in a different order.
    `circle`: ranks wait for each other over several groups. `missing`: ranks did not join. `behind`: they
    skipped a call, or made one more. `late`: they have not joined yet. `no_answer`: nothing is known of them.
    `all_wait`: all have joined, and it does not complete.
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
    """How sure it is that these ranks and this collective are the cause."""
    why: str = ""
    """Explanation in sentences for a person."""
    next: str = ""
    """What to do."""


def match(
    ranks: Iterable[RankCollectives], *, hang: bool | None = False, world: int | None = None
) -> Mismatch | None:
    """
    Return the first mismatch among the calls of `ranks`. None: there is none.

    Args:
        ranks: what each rank has called; only one element is held at a time.
        hang: whether the job makes no progress: else a rank that has not joined is `late`. None: it makes
            none if a rank has waited for as long as its group's time-out.
        world: number of ranks of the job, if some may have reported nothing.
    """
    return match_table(table_of(ranks), hang=hang, world=world)


def match_table(table: CallTable, *, hang: bool | None = False, world: int | None = None) -> Mismatch | None:
    """Return the first mismatch among calls that are in a table already, as `match` does."""
    difference = first_difference(table)
    if difference is not None:
        return _as_difference(table, difference)
    all_waits = waits(table)
    inside = deadlocked(table, all_waits)
    if inside:
        return _as_circle(table, inside)
    hang = timed_out(table, all_waits) if hang is None else hang
    roots = roots_of_a_call(table, all_waits) if hang else None
    if roots is not None:
        return _as_roots(table, roots)
    waiting = peer_waits(table) if hang else {}
    circle = peer_circle(waiting)
    if circle:
        return _as_peers(table, circle)
    absent = _absent(table, all_waits, hang, world)
    ends = [one for one in waiting.values() if one.peer in table.ranks and one.peer not in waiting]
    return _as_peers(table, ends[:1]) if absent is None and ends else absent


GIVEN_UP_S = 600.0
"""Time-out of a group whose own is not known: torch's default for NCCL (s)."""


WATCHDOG_S = 120.0
"""Time after the time-out of a collective up to which torch has left its files (s). Later ones are copies."""


def timed_out(table: CallTable, all_waits: Sequence[Wait]) -> bool:
    """
    Return whether a rank has waited for as long as torch lets it: the job hangs.

    Where only the date of a file is known it must be the one at which torch's watchdog writes: a copy of a
    file of a healthy job is newer by any time.
    """
    for wait in all_waits:
        limit_s = table.known[wait.group].timeout_s or GIVEN_UP_S
        waited = waited_s(table, wait.group, wait.seq, [wait.rank])
        if waited is not None and waited >= limit_s:
            return True
        created_ns = table.groups[wait.group][wait.rank].created_ns[wait.position]
        written_ns = table.ranks[wait.rank].written_ns
        if waited is None and created_ns and written_ns is not None:
            waited = (written_ns - created_ns) / 1e9
            if limit_s <= waited <= limit_s + WATCHDOG_S:
                return True
    return False


# Different calls under the same number

_MOST_SIDES = 4
"""Largest number of different calls that a sentence lists."""


def _what(table: CallTable, side: CallSide, kind: Kind) -> str:
    """Return what ranks call; with shapes and types if that is what differs."""
    signature = table.signature(side.calls, side.position)
    return signature.op if kind == "operation" else signature.text()


def _as_difference(table: CallTable, difference: DifferingCall) -> Mismatch:
    group, seq, _ = difference
    *few, most = sides(table, group, seq)
    tie = len(few) == 1 and len(few[0].ranks) == len(most.ranks)
    if tie and most.is_new and not few[0].is_new:
        few, most = [most], few[0]
    sure = not tie or few[0].is_new != most.is_new
    first = few[-1]
    signature, usual = (
        table.signature(first.calls, first.position),
        table.signature(most.calls, most.position),
    )
    kind = signature.differs(usual)
    deviating = tuple(sorted(rank for side in few for rank in side.ranks))
    named = deviating if sure else tuple(sorted((*deviating, *most.ranks)))
    what, others_where = _what(table, first, kind), table.place(most.calls, most.position)
    places = {table.place(first.calls, first.position), others_where}
    parts = [
        f"{text.ranks(side.ranks)} {_verb(side.ranks, 'call')} "
        f"{_in(_what(table, side, kind), table.place(side.calls, side.position))}"
        for side in few[:_MOST_SIDES]
    ]
    usually = _in(_what(table, most, kind), others_where)
    why = (
        f"Call {seq:,} of {table.text_of(group)} differs: {', '.join(parts)}; {_others(most.ranks)} "
        f"{_verb(most.ranks, 'call')} {usually}."
    )
    if not sure:
        why += " Which of the two is wrong is not known."
    shifted = shift(first.calls, most.calls)
    if shifted is not None and shifted.seq < seq:
        why += f" {_shifted(table, first.ranks, first.calls, most.calls, shifted)}"
    return Mismatch(
        kind=kind, group=table.known[group].name, desc=table.text_of(group), seq=seq, op=usual.op,
        ranks=named, instead=what, where=table.place(first.calls, first.position),
        others=most.ranks if sure else (),
        others_where=others_where, waited_s=waited_s(table, group, seq, most.ranks), proven=True,
        confidence="high" if sure else "medium", why=why,
        next=_NEXT["operation" if None not in places and len(places) > 1 else kind],
    )  # fmt: skip


_SAME = "All ranks of a group have to call the same collectives in the same order"
_NEXT = {
    "operation": f"{_SAME}: look for a condition on the rank or its data, before the two places.",
    "size": f"{_SAME}, with the same number of elements: look at what the size of the tensor depends on.",
    "dtype": f"{_SAME}, with the same type: look for a cast or autocast that only some ranks do.",
}


def _shifted(
    table: CallTable, ranks: Sequence[int], calls: CallsInGroup, usual: CallsInGroup, shifted: CallShift
) -> str:
    """Return the sentence on calls that a rank skipped, or made more."""
    source = usual if shifted.skipped > 0 else calls
    position = source.index(shifted.seq) or 0
    call = _in(table.signature(source, position).op, table.place(source, position))
    number = abs(shifted.skipped)
    more = " more than the others" if shifted.skipped < 0 else ""
    what = (
        f"call {shifted.seq:,}{more}"
        if number == 1
        else f"{number} calls{more}, from number {shifted.seq:,} on"
    )
    who = text.ranks(ranks)
    who = who[0].upper() + who[1:]
    if shifted.skipped > 0:
        return f"{who} skipped {what}: {call}."
    return f"{who} made {what}: {call}."


# Different roots of the same call


def _as_roots(table: CallTable, waiting: Sequence[RootedWait]) -> Mismatch:
    roots = {one.wait.rank: one.root for one in waiting}
    agreed = {root for root in roots.values() if roots.get(root) == root}
    wrong = [one for one in waiting if one.root not in agreed] if len(agreed) == 1 else []
    named = tuple(one.wait.rank for one in wrong or waiting)
    rest = tuple(rank for rank in roots if rank not in named)
    first = (wrong or waiting)[0]
    group, seq = first.wait.group, first.wait.seq
    op, place = _op_and_place(table, first.wait)
    other = next((one for one in waiting if one.root != first.root), first)
    parts = [
        f"rank {one.wait.rank} calls {_in(f'{op} with root {one.root}', _op_and_place(table, one.wait)[1])}"
        for one in [*wrong, *(one for one in waiting if one not in wrong)][:8]
    ]
    return Mismatch(
        kind="root", group=table.known[group].name, desc=table.text_of(group), seq=seq, op=op, ranks=named,
        instead=f"{op} with root {first.root}", where=place, others=rest,
        others_where=_op_and_place(table, other.wait)[1],
        waited_s=waited_s(table, group, seq, [*roots]), proven=True, confidence="high" if wrong else "medium",
        why=f"Call {seq:,} of {table.text_of(group)} has different roots: {'; '.join(parts)}.",
        next="All ranks have to name the same root: look at what `src` or `dst` depends on.",
    )  # fmt: skip


# Sends and receives that have no other side


def _as_peers(table: CallTable, waiting: Sequence[PeerWait]) -> Mismatch:
    """Return a circle of ranks that wait for each other, or the rank that another one waits for."""
    first, circle = waiting[0], len(waiting) > 1
    parts = [f"rank {one.rank} waits in {_in(one.call.op, one.call.where)}" for one in waiting[:8]]
    why = f"Ranks wait for each other: {'; '.join(parts)}."
    if not circle:
        why = f"{parts[0].capitalize()}; rank {first.peer} is in no call that belongs to it."
    return Mismatch(
        kind="circle" if circle else "missing", group=first.call.group,
        desc=table.text_of(first.call.group) if first.call.group in table.known else first.call.group,
        seq=first.call.seq, op=first.call.op,
        ranks=tuple(sorted(one.rank for one in waiting)) if circle else (first.peer,), instead="",
        where=first.call.where if circle else None, others=() if circle else (first.rank,),
        others_where=first.call.where, confidence="medium" if circle else "low", why=why,
        next="Give each receive a send in the same order: let some ranks send before they receive."
        if circle
        else f"Look at what rank {first.peer} does instead.",
    )  # fmt: skip


# Ranks that wait for each other


def _as_circle(table: CallTable, inside: dict[int, list[Wait]]) -> Mismatch:
    path = shortest_circle(inside)
    waiting: dict[str, list[int]] = {}
    for rank, held in sorted(inside.items()):
        waiting.setdefault(held[0].group, []).append(rank)
    groups = list(dict.fromkeys(wait.group for wait in path))
    two = len(groups) == 2 and len(waiting) == 2
    few, most = sorted(waiting, key=lambda group: len(waiting[group]))[:: max(1, len(waiting) - 1)][:2]
    sure = two and len(waiting[few]) < len(waiting[most])
    named = tuple(sorted(waiting[few] if sure else {wait.rank for wait in path}))
    first = next(wait for wait in path if wait.rank in named)
    other = next((wait for wait in path if wait.group != first.group), path[-1])
    calls, other_calls = table.groups[first.group][first.rank], table.groups[other.group][other.rank]
    rest = tuple(
        rank for rank in sorted(inside) if rank not in named and rank in waiting.get(other.group, ())
    )
    order = "in a different order" if two else "in orders that contradict each other"
    parts = [
        f"rank {wait.rank} waits in {_call(table, wait)} of {table.text_of(wait.group)}" for wait in path
    ]
    return Mismatch(
        kind="order" if two else "circle", group=table.known[other.group].name,
        desc=table.text_of(other.group), seq=other.seq, op=table.signature(other_calls, other.position).op,
        ranks=named,
        instead=f"{table.signature(calls, first.position).op} of {table.text_of(first.group)}",
        where=table.place(calls, first.position), others=rest,
        others_where=table.place(other_calls, other.position),
        waited_s=waited_s(table, other.group, other.seq, [other.rank]), proven=True,
        confidence="high" if sure else "medium",
        why=f"Ranks call the collectives of {text.listed([table.text_of(one) for one in groups])} {order}, "
        f"and wait for each other: {'; '.join(parts[:8])}.",
        next=f"Call the collectives of {'both' if two else 'all'} groups in the same order on all ranks.",
    )  # fmt: skip


# Ranks that others wait for


class _Absent(NamedTuple):
    """A call that ranks wait in, and the ranks that they wait for."""

    wait: Wait
    ranks: tuple[int, ...]


def _absent(table: CallTable, all_waits: Sequence[Wait], hang: bool, world: int | None) -> Mismatch | None:
    """Return the ranks that the others wait for, and that wait for no other rank themselves."""
    missing = tuple(rank for rank in range(world or 0) if rank not in table.ranks)
    unknown = [wait for wait in all_waits if not wait.absent and not table.knows_members(wait.group)]
    held = {wait.rank for wait in all_waits if wait.absent} | {wait.rank for wait in unknown}
    candidates = list[_Absent]()
    for wait in all_waits:
        absent = {*wait.absent, *(missing if table.is_world(wait.group) else ())}
        if ranks := tuple(sorted(rank for rank in absent if rank not in held)):
            candidates.append(_Absent(wait, ranks))
    if candidates:
        return _as_absent(table, min(candidates, key=lambda one: _began(table, one.wait)), hang)
    joined = {group: last_joined(table, group) for group in {wait.group for wait in all_waits}}
    together = [
        wait
        for wait in all_waits
        if not wait.absent and wait not in unknown and wait.seq >= joined[wait.group]
    ]
    ended = [wait for wait in together if table.ranks[wait.rank].ended]
    if unknown and hang:
        return _as_unknown(table, min(unknown, key=lambda one: _began(table, one)))
    if together and (hang or (ended and len(ended) < len(together))):
        return _as_all_wait(table, together)
    return None


def _began(table: CallTable, wait: Wait) -> tuple[int, int]:
    return table.groups[wait.group][wait.rank].created_ns[wait.position], wait.rank


def _as_absent(table: CallTable, absent: _Absent, hang: bool) -> Mismatch:
    wait, ranks = absent
    absent_ranks = set(ranks)
    by_rank = table.groups[wait.group]
    others = tuple(
        rank
        for rank in sorted(by_rank)
        if rank not in absent_ranks and by_rank[rank].index(wait.seq) is not None
    )
    ended = tuple(rank for rank in ranks if rank in table.ranks and table.ranks[rank].ended)
    known = tuple(rank for rank in ranks if rank in table.ranks and not table.ranks[rank].ended)
    named = ended or known or ranks
    shifts = _shifts(table, wait.group, named, others) if hang or ended else None
    if shifts is not None and len(others) < len(ranks) and shifts[1].skipped > 0:
        named, others = others, named  # the ranks that wait made one call more than most
        shifts = _shifts(table, wait.group, named, others)
    if shifts is not None:
        kind: Kind = "behind"
    elif ended or (hang and known):
        kind = "missing"
    else:
        kind = "late" if known else "no_answer"
    # A rank that raised an exception will not come, but whether others had waited for it is not known.
    late = kind == "late" and not all(table.ranks[rank].ending for rank in named)
    op, place = _op_and_place(table, wait)
    instead, where = _instead(table, wait.group, named)
    sure = ended or (hang and kind != "no_answer" and len(named) < len(table.members(wait.group)) / 2)
    waiting = others if kind != "behind" or wait.rank in others else named
    if waiting == named:
        why = (
            f"{_capital(named)} {_verb(named, 'wait')} in {_in(op, place)} (call {wait.seq:,} of "
            f"{table.text_of(wait.group)}), which {_others(others)} did not make."
        )
        instead, where = op, place
    else:
        joined = _verb(named, "have") + f" not joined {op}" if late else f"did not join {op}"
        yet = " yet" if late else ""
        does = f": {instead}" if instead else ""
        why = (
            f"{_capital(named)} {joined} (call {wait.seq:,} of {table.text_of(wait.group)}){yet}{does}. "
            f"{_others(others).capitalize()} {_verb(others, 'wait')} in it{_at(place)}."
        )
    if shifts is not None:
        (shifted_calls, usual), shifted = shifts
        why += f" {_shifted(table, named, shifted_calls, usual, shifted)}"
        where = table.place(shifted_calls, shifted_calls.index(shifted.seq) or 0)
    return Mismatch(
        kind=kind, group=table.known[wait.group].name, desc=table.text_of(wait.group), seq=wait.seq, op=op,
        ranks=named, instead=instead, where=where, others=others, others_where=place,
        waited_s=waited_s(table, wait.group, wait.seq, [rank for rank in waiting if rank in by_rank]),
        proven=bool(ended), confidence="high" if sure else "medium" if known else "low",
        why=why, next=_next_absent(kind, named, bool(ended) or (kind == "late" and not late)),
    )  # fmt: skip


def _shifts(
    table: CallTable, group: str, ranks: Sequence[int], others: Sequence[int]
) -> tuple[tuple[CallsInGroup, CallsInGroup], CallShift] | None:
    """Return the calls of one of `ranks` and of one of `others`, and where the first skipped calls."""
    by_rank = table.groups[group]
    if not others or not ranks or ranks[0] not in by_rank or others[0] not in by_rank:
        return None
    pair = by_rank[ranks[0]], by_rank[others[0]]
    shifted = shift(*pair)
    return (pair, shifted) if shifted is not None else None


def _instead(table: CallTable, group: str, named: Sequence[int]) -> tuple[str, str | None]:
    """Return what the first of ranks does that did not join, for a person, and where."""
    rank = named[0]
    who, its = ("it", "its") if len(named) == 1 else (f"rank {rank}", f"rank {rank}'s")
    report = table.ranks.get(rank)
    if report is None:
        return f"nothing is known of {'it' if len(named) == 1 else 'them'}", None
    calls = table.groups[group].get(rank)
    last = table.place(calls, len(calls.seqs) - 1) if calls and calls.seqs else None
    number = f"{its} last call there is number {calls.newest:,}{_at(last)}" if calls and calls.seqs else ""
    if report.ended or report.ending:
        return ", ".join(filter(None, (f"{who} has ended", report.ending, number))), last
    if report.call and report.where:
        return f"{who} waits in {report.call}, {report.where}", report.where
    if report.where:
        return f"{who} is in {report.where}", report.where
    pending = table.pending_peers.get(rank)
    if pending:
        return f"{who} waits in {_in(pending[0].op, pending[0].where)}", pending[0].where
    return number, last


def _next_absent(kind: Kind, named: Sequence[int], ended: bool) -> str:
    who, does = text.ranks(named), "are doing" if len(named) > 1 else "is doing"
    if kind == "behind":
        return f"{_SAME}: look for a condition on the rank or its data, before that call."
    if ended:
        return f"Look at how {who} ended. If it was no error: give every rank the same number of steps."
    if kind == "no_answer":
        return f"Look at the process and the machine of {who}: there is no record of {_its(named)} calls."
    if kind == "late":
        return f"If it does not continue, look at what {who} {does}: the others wait for it."
    takes = "they take" if len(named) > 1 else "it takes"
    return f"Look at what {who} {does} instead, and why {takes} another way through the code."


def _as_unknown(table: CallTable, wait: Wait) -> Mismatch:
    """Return that ranks wait in a group whose other members are not known."""
    by_rank = table.groups[wait.group]
    op, where = _op_and_place(table, wait)
    desc = table.text_of(wait.group)
    others = tuple(rank for rank in sorted(by_rank) if by_rank[rank].index(wait.seq) is not None)
    return Mismatch(
        kind="no_answer", group=table.known[wait.group].name, desc=desc, seq=wait.seq, op=op,
        ranks=(), instead="", where=None, others=others, others_where=where,
        waited_s=waited_s(table, wait.group, wait.seq, others), confidence="low",
        why=f"{_capital(others)} {_verb(others, 'wait')} in {_in(op, where)} (call {wait.seq:,} of {desc}). "
        "No other rank has called it, and it is not known which ranks are in this group.",
        next=f"Look at which ranks {desc} has, and whether all of them reach that line.",
    )  # fmt: skip


def _as_all_wait(table: CallTable, together: Sequence[Wait]) -> Mismatch:
    wait = min(together, key=lambda one: _began(table, one))
    alike = [one for one in together if (one.group, one.seq) == (wait.group, wait.seq)]
    op, where = _op_and_place(table, wait)
    inside = tuple(sorted(one.rank for one in alike))
    ended = tuple(rank for rank in inside if table.ranks[rank].ended)
    others = tuple(rank for rank in inside if not table.ranks[rank].ended)
    desc = table.text_of(wait.group)
    joined = f"All ranks have joined {op} (call {wait.seq:,} of {desc}){_at(where)}"
    if ended:
        ending = table.ranks[ended[0]].ending
        how = f" ({ending})" if ending else ""
        why = (
            f"{joined}, and {text.ranks(ended)} ended in it{how}. {_others(others).capitalize()} still wait."
        )
    else:
        done = len(table.members(wait.group)) - len(others)
        rest = f"; on {text.count(done, 'other rank')} it has completed" if done > 0 else ""
        why = f"{joined}, and it does not complete: {text.ranks(others)} {_verb(others, 'wait')} in it{rest}."
    return Mismatch(
        kind="missing" if ended else "all_wait", group=table.known[wait.group].name, desc=desc, seq=wait.seq,
        op=op, ranks=ended, instead="it has ended in it" if ended else "", where=where if ended else None,
        others=others, others_where=where, waited_s=waited_s(table, wait.group, wait.seq, others),
        proven=bool(ended), confidence="high" if ended else "medium", why=why,
        next=f"Look at how {text.ranks(ended)} ended." if ended else "Look at the network between the nodes.",
    )  # fmt: skip


def _op_and_place(table: CallTable, wait: Wait) -> tuple[str, str | None]:
    calls = table.groups[wait.group][wait.rank]
    return table.signature(calls, wait.position).op, table.place(calls, wait.position)


def _call(table: CallTable, wait: Wait) -> str:
    return _in(*_op_and_place(table, wait))


def _in(what: str, where: str | None) -> str:
    return f"{what}{_at(where)}"


def _at(where: str | None) -> str:
    return f" at {where}" if where else ""


def _capital(ranks: Sequence[int]) -> str:
    return text.ranks(ranks).capitalize()


def _its(ranks: Sequence[int]) -> str:
    return "its" if len(ranks) == 1 else "their"


def _others(ranks: Sequence[int]) -> str:
    return f"the other {len(ranks):,}" if len(ranks) > 1 else text.ranks(ranks)


def _verb(ranks: Sequence[int], verb: str) -> str:
    if len(ranks) > 1:
        return verb
    return {"have": "has"}.get(verb, f"{verb}s")
