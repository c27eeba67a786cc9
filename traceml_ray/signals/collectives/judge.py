"""
Time and bandwidth of collectives, from what the ranks of a run know of their calls. Pure.

A rank's time in a call contains its wait for the last rank of the group. So the time of a call is that of
the rank with the shortest time: of the last one that joined. This holds if no rank can leave before it has
data of all others, and only where the same call is known of all ranks. Bandwidths are those of nccl-tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from traceml_ray.analysis.window import Float, Int64
from traceml_ray.signals.collectives.match import Mismatch
from traceml_ray.signals.collectives.records import CallTimes, Source

MAX_GROUPS = 8
"""Largest number of groups that are listed of a kind of collective: the slowest."""
_LEAST_CALLS, _LEAST_QUARTER = 5, 6
"""Smallest number of calls known of all ranks for a time, and in the quarters of a change."""
_PLACES = 1 << 8

_ALL_WAIT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "monitored_barrier")
"""Collectives that no rank leaves before all have joined."""
NOT_BETWEEN_ALL = "a rank may leave it before the others have joined"
ONLY_STARTED = "the calls only start it"
FEW_CALLS = "too few calls are known of all ranks"


class GroupTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one kind of collective in one process group."""

    group: str
    """Torch's name of the group, `world` for the group of all ranks; or the id of a communicator."""
    ranks: list[int]
    """Global ranks of the group that have reported, ascending; of more than 64 the first 64."""
    nodes: int | None
    """Number of nodes of these ranks; None: not known."""
    matched: int
    """Number of calls that are known of all ranks. The other fields describe these."""
    ms: float | None
    """Median time of a call from when its last rank joined, in ms; None: not known."""
    low_ms: float | None
    """Lower quartile of the time of a call, in ms."""
    high_ms: float | None
    """Upper quartile of the time of a call, in ms."""
    wait_ms: float | None
    """Mean time that a rank waited in a call for the last rank, in ms."""
    algorithm_gb_per_s: float | None
    """Median of the bytes of a call by its time, in 10⁹ bytes per second. None: not known, or no bytes."""
    bus_gb_per_s: float | None
    """Bandwidth of each rank's link that gives `algorithm_gb_per_s`, in 10⁹ bytes per second."""
    change_pct: float | None = None
    """
    By how much more time the newest quarter of the calls takes than the first quarter (medians, %). None: no
    change beyond chance (the middle halves of both overlap), or too few calls.
    """


class CollectiveKind(msgspec.Struct, frozen=True, kw_only=True):
    """One collective of about one size, in all process groups of one number of ranks and nodes."""

    op: str
    """Name of the collective: `all_reduce`, `all_gather_into_tensor`, …"""
    source: Source
    """`host`: marks around the calls. `inspector`: files of NCCL Inspector."""
    description: str
    """What the program calls the groups, if all have the same name; "": nothing."""
    group_size: int | None
    """Number of ranks of each group; None: not known."""
    nodes: int | None
    """Number of nodes of each group; None: not known."""
    groups: int
    """Number of process groups."""
    calls: int
    """Number of calls, of the rank with the most."""
    calls_per_step: float | None
    """Mean number of calls in a step, of that rank. None for NCCL Inspector, which knows no steps."""
    bytes_per_call: float | None
    """
    Mean size of the data of all ranks in bytes: what a rank holds before an all-reduce, after an all-gather,
    and before a reduce-scatter. None: no bytes, or not known.
    """
    host_ms: float | None
    """Mean time of a rank in a call, waits for other ranks included, in ms; None: calls only start it."""
    ms: float | None
    """Median over the groups of `GroupTimes.ms`, in ms."""
    wait_ms: float | None
    """Mean over the groups of `GroupTimes.wait_ms`, in ms."""
    algorithm_gb_per_s: float | None
    """Median over the groups of their `algorithm_gb_per_s`, in 10⁹ bytes per second."""
    bus_gb_per_s: float | None
    """Median over the groups of their `bus_gb_per_s`, in 10⁹ bytes per second."""
    why: str
    """Why the time is not known; "": it is known."""
    slow: list[str]
    """Groups that are slower than the others beyond chance, see `slow_groups`."""
    slowest: list[GroupTimes]
    """Groups, the slowest first; at most 8."""
    change_pct: float | None = None
    """Median over the groups of `GroupTimes.change_pct`, in %. None: most groups have not changed."""


class CollectiveTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes, times and bandwidth of the collectives of a run."""

    kinds: list[CollectiveKind] = []
    """Kinds of collectives, those that move the most bytes first."""
    mismatch: Mismatch | None = None
    """The newest collective that the ranks of a hang did not call alike. None: there is none."""


class OfRank(NamedTuple):
    """A record of a rank, and the node of the rank."""

    rank: int
    node: str | None
    record: CallTimes


def bus_factor(op: str, ranks: int) -> float | None:
    """Return bus bandwidth by algorithm bandwidth, as nccl-tests defines it. None: not defined for `op`."""
    if op.startswith("all_reduce"):
        return 2 * (ranks - 1) / ranks
    if op.startswith(("all_gather", "reduce_scatter", "all_to_all")):
        return (ranks - 1) / ranks
    return None


def collective_times(records: Iterable[OfRank]) -> CollectiveTimes:
    """Return the kinds of collectives of a run from the records of its ranks."""
    by_group: dict[tuple[Source, str, str, int, int | None, str], dict[int, OfRank]] = {}
    for one in records:
        calls = one.record
        common = calls.source, calls.op, calls.process_group, calls.size_bits
        members = by_group.setdefault((*common, calls.group_size, calls.description), {})
        before = members.get(one.rank)  # of a relay that was restarted
        if before is None or before.record.calls < calls.calls:
            members[one.rank] = one
    kinds: dict[tuple[Any, ...], list[_Group]] = {}
    for (source, op, name, bits, size, _), of_rank in by_group.items():
        group = _Group(op, name, size, [*of_rank.values()])
        kinds.setdefault((source, op, bits, size, group.nodes), []).append(group)
    known = [_kind(groups) for groups in kinds.values()]
    measured = {_same_calls(kind) for kind in known if kind.source == "inspector"}
    shown = [kind for kind in known if not (kind.why == ONLY_STARTED and _same_calls(kind) in measured)]
    return CollectiveTimes(kinds=sorted(shown, key=_by_bytes))


def _same_calls(kind: CollectiveKind) -> tuple[str, int | None]:
    """Return what a kind has in common with the same calls as another source knows them."""
    names = "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"
    return next((name for name in names if kind.op.startswith(name)), kind.op), kind.group_size


def _by_bytes(kind: CollectiveKind) -> tuple[float, float, str]:
    """Return a sort key: bytes that a rank moves, then its time."""
    moved = kind.calls * (kind.bytes_per_call or 0.0)
    return -moved, -kind.calls * (kind.host_ms or 0.0), kind.op


class _Group:
    """A collective in one group: the calls that are known of all its ranks."""

    def __init__(self, op: str, name: str, size: int | None, members: Sequence[OfRank]) -> None:
        self.op, self.name, self.size, self.members = op, name, size, members
        nodes = {one.node for one in members}
        complete = size is not None and len(members) == size
        self.nodes = len(nodes) if complete and None not in nodes else None
        self.only_started = not any(one.record.timed for one in members)
        self.steps, self.ns, self.wait_ns, self.bytes = _matched(members if complete else ())

    @property
    def why(self) -> str:
        """Why there is no time; "": there is one."""
        if not self.op.startswith(_ALL_WAIT):
            return NOT_BETWEEN_ALL
        if self.only_started:
            return ONLY_STARTED
        return FEW_CALLS if len(self.ns) < _LEAST_CALLS else ""

    def times(self) -> GroupTimes:
        known = not self.why
        low, middle, high = np.quantile(self.ns, (0.25, 0.5, 0.75)) / 1e6 if known else (None,) * 3
        rate = float(np.median(self.bytes / self.ns)) if known and self.bytes.all() else None
        factor = bus_factor(self.op, self.size) if self.size else None
        return GroupTimes(
            group=self.name,
            ranks=sorted(one.rank for one in self.members)[:64],
            nodes=self.nodes,
            matched=len(self.ns),
            ms=_float(middle),
            low_ms=_float(low),
            high_ms=_float(high),
            wait_ms=float(self.wait_ns.mean()) / 1e6 if known else None,
            algorithm_gb_per_s=rate,
            bus_gb_per_s=None if rate is None or factor is None else rate * factor,
            change_pct=_change_pct(self.ns) if known else None,
        )


def _change_pct(ns: Float) -> float | None:
    """Return by how much the newest quarter of the times, oldest first, is longer than the first, in %."""
    quarter = len(ns) // 4
    if quarter < _LEAST_QUARTER:
        return None
    early, newest = (np.quantile(part, (0.25, 0.5, 0.75)) for part in (ns[:quarter], ns[-quarter:]))
    if early[2] >= newest[0] and newest[2] >= early[0]:
        return None
    return float(100 * (newest[1] / early[1] - 1))


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def _matched(members: Sequence[OfRank]) -> tuple[Int64, Float, Float, Float]:
    """
    Return (N,) key, time of the last rank (ns), mean wait for it (ns), and bytes of each call that is known
    of all `members`.
    """
    samples = [sample for one in members for sample in one.record.samples]
    if not samples:
        return np.empty(0, np.int64), np.empty(0), np.empty(0), np.empty(0)
    table = np.array([(s.step * _PLACES + s.place, s.ns, s.size) for s in samples], dtype=np.int64)
    table[:, 1] = np.maximum(1, table[:, 1])
    table = table[np.argsort(table[:, 0], kind="stable")]
    keys, first, times = np.unique(table[:, 0], return_index=True, return_counts=True)
    shortest = np.minimum.reduceat(table[:, 1], first).astype(float)
    mean = np.add.reduceat(table[:, 1], first) / times
    largest = np.maximum.reduceat(table[:, 2], first).astype(float)
    whole = times == len(members)
    return keys[whole].astype(np.int64), shortest[whole], (mean - shortest)[whole], largest[whole]


def _kind(groups: Sequence[_Group]) -> CollectiveKind:
    record = groups[0].members[0].record
    most = max((one.record for group in groups for one in group.members), key=lambda one: one.calls)
    every = [one.record for group in groups for one in group.members]
    times = sorted((group.times() for group in groups), key=_slowest_first)
    descriptions = {one.description for one in every}
    calls, timed = sum(one.calls for one in every), sum(one.timed for one in every)
    moved = sum(one.bytes for one in every)
    steps = most.last_step - most.first_step + 1
    known = [group for group in times if group.ms is not None]
    return CollectiveKind(
        op=record.op,
        source=record.source,
        description=descriptions.pop() if len(descriptions) == 1 else "",
        group_size=record.group_size,
        nodes=groups[0].nodes,
        groups=len(groups),
        calls=most.calls,
        calls_per_step=most.calls / steps if record.source == "host" else None,
        bytes_per_call=moved / calls if moved else None,
        host_ms=sum(one.total_ns for one in every) / timed / 1e6 if timed else None,
        ms=_median(group.ms for group in known),
        wait_ms=float(np.mean([group.wait_ms for group in known])) if known else None,
        algorithm_gb_per_s=_median(group.algorithm_gb_per_s for group in known),
        bus_gb_per_s=_median(group.bus_gb_per_s for group in known),
        why="" if known else groups[0].why,
        slow=slow_groups({group.name: (group.steps, group.ns) for group in groups if not group.why}),
        slowest=times[:MAX_GROUPS],
        change_pct=_change_of([group.change_pct for group in known]),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _change_of(groups: Sequence[float | None]) -> float | None:
    known = [change for change in groups if change is not None]
    return _median(known) if 2 * len(known) > len(groups) else None


def _slowest_first(times: GroupTimes) -> tuple[float, str]:
    return -(times.ms if times.ms is not None else -1.0), times.group


_ALIKE, _CALLS, _SLOWER, _OFTEN = 4, 16, 1.3, 0.8
"""
Least number of groups that are alike, and of calls that all of them have at the same place of the run. A
group is slow if its median time is so many times that of the others, and it is the slowest in this share of
the calls, in both halves of the run.
"""


def slow_groups(times: Mapping[str, tuple[Int64, Float]]) -> list[str]:
    """
    Return the groups that are slower than the others, which call the same collective of about the same size
    with as many ranks on as many nodes. By chance, a group would be the slowest in one of N calls.

    Args:
        times: group → ((N,) step of each call, (N,) its time in ns).
    """
    if len(times) < _ALIKE:
        return []
    common = np.array(sorted(set.intersection(*({*steps.tolist()} for steps, _ in times.values()))), np.int64)
    if len(common) < _CALLS:
        return []
    table = np.stack([ns[np.searchsorted(steps, common)] for steps, ns in times.values()])
    slowest, half = table.argmax(axis=0), len(common) // 2
    names, slow = [*times], []
    for place in np.unique(slowest):  # no other group can be
        others = float(np.median(np.delete(table, place, axis=0)))
        often = min(np.mean(part == place) for part in (slowest[:half], slowest[half:]))
        if often >= _OFTEN and np.median(table[place]) >= _SLOWER * others:
            slow.append(names[place])
    return slow
