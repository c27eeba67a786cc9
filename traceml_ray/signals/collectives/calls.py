"""
The collectives that each rank has called, and what of a call has to be the same on all ranks.

Pure: no torch, no numpy, no I/O. A rank's calls come from torch's flight recorder, or from the monitor's
record of calls.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from math import prod
from typing import Literal, NamedTuple

import msgspec

Sizes = tuple[tuple[int, ...], ...]
"""Shape of each tensor of a call."""


class ProcessGroup(msgspec.Struct, frozen=True):
    """A process group, as one of its ranks knows it."""

    name: str
    """Name in torch; the same on all ranks of the group."""
    desc: str = ""
    """Description by which people know it, such as `default_pg` or `mesh_tp`; empty: none."""
    ranks: tuple[int, ...] | None = None
    """Global ranks of the members. None: not known (torch does not record them for gloo)."""
    timeout_s: float | None = None
    """Time after which torch gives a collective up (s). None: not known."""


class CollectiveCall(msgspec.Struct, frozen=True):
    """One call of a collective, or of a send or receive, by one rank."""

    group: str
    """Name of the process group."""
    seq: int
    """Number of the call in its group: the first collective that the group runs has number 1."""
    op: str
    """Operation, without its backend: `all_reduce`, `send 0->1`."""
    in_sizes: Sizes = ()
    """Shapes of the input tensors."""
    in_dtypes: tuple[str, ...] = ()
    """Types of the input tensors, as torch names them: `Float`."""
    out_sizes: Sizes = ()
    """Shapes of the output tensors."""
    out_dtypes: tuple[str, ...] = ()
    """Types of the output tensors."""
    p2p: bool = False
    """Whether it is a send or receive, which only two ranks take part in."""
    done: bool = False
    """Whether it is over on this rank."""
    created_ns: int | None = None
    """When the rank made the call (ns since the epoch, clock of its node). None: not known."""
    where: str | None = None
    """Place in the user's code: `train (train.py:60)`. None: not known."""


class RankCollectives(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has called, and what it does now."""

    rank: int
    calls: Sequence[CollectiveCall] = ()
    """Its newest calls, in the order in which it made them."""
    groups: Sequence[ProcessGroup] = ()
    """The groups that it is a member of; those without a description or ranks may be missing."""
    whole: bool = False
    """Whether it has made no call in a group of which there is none in `calls`. False: that is not known."""
    where: str | None = None
    """Where in the user's code the rank is now: `evaluate (train.py:88)`. None: not known."""
    call: str | None = None
    """Function of torch.distributed that the rank waits in now. None: in none, or not known."""
    peer: int | None = None
    """Rank that this function names: the root, or the other side of a send or receive. None: not known."""
    ended: bool = False
    """Whether the process has ended."""
    ending: str = ""
    """How it ended, for a person: `exit code 1`. Empty: not known. Set without `ended`: by an exception."""
    taken_ns: int | None = None
    """When this was recorded (ns since the epoch, clock of the node). None: not known."""
    written_ns: int | None = None
    """
    When the file of it was changed last (ns since the epoch): it was recorded then or earlier, because a copy
    may have a newer date. None: it is from no file.
    """


Differs = Literal["operation", "size", "dtype"]
_ALIKE = {
    "_all_gather_base": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
}
"""Names of the same operation: ranks may call it through different functions."""
_REDUCING = {"all_reduce", "allreduce_coalesced", "all_reduce_coalesced", "reduce", "reduce_scatter"}
"""Operations that compute with the elements: their number and type have to be the same on all ranks."""
_MOVING = {"broadcast": 1, "all_gather": 0, "gather": 0, "scatter": 1}
"""
Operations that only move bytes → which tensors have the same size on all ranks: 0, the input; 1, the output.
"""
_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool", "UInt8", "Int8"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Float", "Int", "ComplexHalf"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}


class Signature(NamedTuple):
    """What a call does, without when and where."""

    op: str
    in_sizes: Sizes
    in_dtypes: tuple[str, ...]
    out_sizes: Sizes
    out_dtypes: tuple[str, ...]

    @property
    def operation(self) -> str:
        """The operation, by one name for all functions that run it."""
        return _ALIKE.get(self.op, self.op)

    def comparable(self) -> tuple[Hashable, ...]:
        """
        Return what has to be equal on all ranks.

        Shapes may differ while the number of elements is the same. Of operations that only move bytes, types
        may differ while the number of bytes is the same. Operations whose sizes may differ between ranks
        (all_to_all), and unknown ones, are compared by name.
        """
        operation = self.operation
        if operation in _REDUCING:
            types = tuple(sorted(set(self.in_dtypes)))
            scattered = _elements(self.out_sizes) if operation == "reduce_scatter" else None
            return operation, _elements(self.in_sizes), types, scattered
        if operation in _MOVING:
            sizes, types = self._moved()
            width = _BYTES.get(types[0]) if len(set(types)) == 1 else None
            elements = _elements(sizes)
            return (operation, elements * width) if width else (operation, elements, types)
        return (operation,)

    def _moved(self) -> tuple[Sizes, tuple[str, ...]]:
        both = (self.in_sizes, self.in_dtypes), (self.out_sizes, self.out_dtypes)
        first = _MOVING[self.operation]
        return both[first] if both[first][0] or self.operation != "broadcast" else both[1 - first]

    def differs(self, other: Signature) -> Differs:
        """Return in what two calls differ whose `comparable` is not equal."""
        if self.operation != other.operation:
            return "operation"
        mine, theirs = (one._moved() if one.operation in _MOVING else None for one in (self, other))
        elements = _elements(mine[0] if mine else self.in_sizes)
        same = elements == _elements(theirs[0] if theirs else other.in_sizes)
        if same and not mine:
            same = self.operation != "reduce_scatter" or _elements(self.out_sizes) == _elements(
                other.out_sizes
            )
        return "dtype" if same else "size"

    def text(self) -> str:
        """Return operation, shapes and types: `all_reduce [8, 4] Float`."""
        sizes, types = (self.in_sizes, self.in_dtypes) if self.in_sizes else (self.out_sizes, self.out_dtypes)
        shapes = ", ".join(f"[{', '.join(map(str, size))}]" for size in sizes[:4])
        more = f", … ({len(sizes)} tensors)" if len(sizes) > 4 else ""
        return " ".join(filter(None, (self.op, shapes + more, "/".join(dict.fromkeys(types)))))


def _elements(sizes: Sizes) -> int:
    return sum(prod(size) for size in sizes)


class Interned:
    """Gives each distinct value a number, so that a million calls of a few kinds take little memory."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.values: list[Hashable] = []

    def number(self, value: Hashable) -> int:
        """Return the number of `value`."""
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self.values)
            self.values.append(value)
        return number


class CallsInGroup:
    """The calls of one rank in one group, by their position 0, 1, …: the oldest known one first."""

    def __init__(self) -> None:
        self.seqs = array("q")
        """Number of each call in its group, increasing."""
        self.signatures = array("i")
        """What each call does: its number in `CallTable.signatures`."""
        self.classes = array("i")
        """What has to be the same on all ranks: its number in `CallTable.classes`."""
        self.places = array("i")
        """Where each call was made: its number in `CallTable.places`."""
        self.created_ns = array("q")
        """When each call was made (ns since the epoch, node's clock); 0: not known."""
        self.order = array("q")
        """Position of each call among all calls of the rank."""
        self.done = bytearray()
        """1 where the call is over."""

    @property
    def newest(self) -> int:
        """Number of the newest call; 0: there is none."""
        return self.seqs[-1] if self.seqs else 0

    def index(self, seq: int) -> int | None:
        """Return the position of call `seq`. None: it is not known."""
        low, high = 0, len(self.seqs)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.seqs[middle] < seq else (low, middle)
        return low if low < len(self.seqs) and self.seqs[low] == seq else None

    def pending(self) -> int | None:
        """Return the position of the oldest call that is not over, after the newest that is. None: none."""
        first = self.done.rfind(1) + 1
        return first if first < len(self.done) else None


_TOGETHER = {"coalesced", "ALLGATHER_coalesced", "REDUCE_SCATTER_coalesced"}
"""Entries that stand for the several calls before them: they say whether these are over."""
_WORLD = {"default_pg", "world"}
"""Descriptions of the group of all ranks."""


class CallTable:
    """
    The calls of all ranks, packed: 40 bytes for each.

    Groups have their name as key; groups of one name with different ranks (`split_group`) also their ranks.
    """

    def __init__(self) -> None:
        self.ranks: dict[int, RankCollectives] = {}
        """What each rank reported, without its calls."""
        self.groups: dict[str, dict[int, CallsInGroup]] = {}
        """Group → rank → its calls. A member of the group without a known call has none."""
        self.known: dict[str, ProcessGroup] = {}
        """Group → what is known of it; `ranks` are None if no rank reported them."""
        self.pending_peers: dict[int, list[CollectiveCall]] = {}
        """Rank → its sends and receives that are not over, the oldest first."""
        self.signatures, self.classes, self.places = Interned(), Interned(), Interned()
        self._classes: dict[int, int] = {}

    def add(self, rank: RankCollectives) -> None:
        """Add the calls of a rank. A second report of the same rank replaces the first."""
        for calls_by_rank in self.groups.values():
            calls_by_rank.pop(rank.rank, None)
        self.pending_peers.pop(rank.rank, None)
        self.ranks[rank.rank] = msgspec.structs.replace(rank, calls=())
        keys = {group.name: self._key(group) for group in rank.groups}
        for group in rank.groups:
            self.groups.setdefault(keys[group.name], {}).setdefault(rank.rank, CallsInGroup())
        peers = list[CollectiveCall]()
        after_peer = False
        for order, call in enumerate(rank.calls):
            if call.p2p or (call.op in _TOGETHER and after_peer):
                after_peer = True
                if not call.done and call.op not in _TOGETHER:
                    peers.append(call)
                continue
            after_peer = False
            key = keys.get(call.group)
            if key is None:
                key = keys[call.group] = self._key(ProcessGroup(call.group))
            self._append(self.groups.setdefault(key, {}), rank.rank, order, call)
        if peers:
            self.pending_peers[rank.rank] = peers[:64]

    def _key(self, group: ProcessGroup) -> str:
        """Return the key of a group, and keep what is known of it."""
        key = group.name
        known = self.known.get(key)
        if known is not None and known.ranks and group.ranks and known.ranks != group.ranks:
            key = f"{group.name} {','.join(map(str, group.ranks))}"
            known = self.known.get(key)
        if known is None:
            self.known[key] = group
        elif known != group:
            self.known[key] = ProcessGroup(
                group.name,
                known.desc or group.desc,
                known.ranks or group.ranks,
                known.timeout_s or group.timeout_s,
            )
        return key

    def _append(self, by_rank: dict[int, CallsInGroup], rank: int, order: int, call: CollectiveCall) -> None:
        calls = by_rank.get(rank)
        if calls is None:
            calls = by_rank[rank] = CallsInGroup()
        if call.op in _TOGETHER:
            if calls.seqs and calls.seqs[-1] == call.seq:
                calls.done[-1] = call.done
            return
        signature = Signature(call.op, call.in_sizes, call.in_dtypes, call.out_sizes, call.out_dtypes)
        number = self.signatures.number(signature)
        if (class_number := self._classes.get(number)) is None:
            class_number = self._classes[number] = self.classes.number(signature.comparable())
        if calls.seqs and call.seq == calls.seqs[-1]:  # one of several that run together
            calls.classes[-1] = self.classes.number((calls.classes[-1], class_number))
            calls.done[-1] = call.done
            return
        if calls.seqs and call.seq < calls.seqs[-1]:  # the group was destroyed; a new one has its name
            calls = by_rank[rank] = CallsInGroup()
        calls.seqs.append(call.seq)
        calls.signatures.append(number)
        calls.classes.append(class_number)
        calls.places.append(self.places.number(call.where))
        calls.created_ns.append(call.created_ns or 0)
        calls.order.append(order)
        calls.done.append(call.done)

    def members(self, group: str) -> Sequence[int]:
        """Return the ranks of a group. Of unknown ones: all for the default group, else its callers."""
        ranks, callers = self.known[group].ranks, self.groups[group]
        return ranks or sorted({*callers, *self.ranks} if self.is_world(group) else callers)

    def is_world(self, group: str) -> bool:
        """Return whether a group has all ranks of the job, although no rank reported which."""
        return self.known[group].ranks is None and self.known[group].desc in _WORLD

    def knows_members(self, group: str) -> bool:
        """Return whether all members of a group are known."""
        return self.known[group].ranks is not None or self.is_world(group)

    def text_of(self, group: str) -> str:
        """Return the name of a group for a person: `group mesh_tp`."""
        known = self.known[group]
        named = known.desc not in ("", "undefined")
        same = named and sum(other.desc == known.desc for other in self.known.values()) > 1
        if not named:
            return f"group {known.name}"
        return f"group {known.desc}" + (f" ({known.name})" if same else "")

    def signature(self, calls: CallsInGroup, index: int) -> Signature:
        """Return what a call does."""
        value = self.signatures.values[calls.signatures[index]]
        assert isinstance(value, Signature)
        return value

    def place(self, calls: CallsInGroup, index: int) -> str | None:
        """Return where a call was made. None: not known."""
        value = self.places.values[calls.places[index]]
        assert value is None or isinstance(value, str)
        return value


def table_of(ranks: Iterable[RankCollectives]) -> CallTable:
    """Return the calls of all ranks. Only one element of `ranks` is held at a time."""
    table = CallTable()
    for rank in ranks:
        table.add(rank)
    return table
