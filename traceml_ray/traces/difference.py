"""
Compares ranks by operation: what one rank does more of than others, its time in a step, and how much of it is
waiting.

A rank waits for others inside collectives and in operations that synchronise with its device. That time is
the effect of a difference elsewhere, so it is kept separate. Sets of time are arrays [k, 2] of begin and end
in ns, sorted and disjoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from traceml_ray import text
from traceml_ray.analysis.thresholds import ProfileLimits
from traceml_ray.stages import STAGES
from traceml_ray.traces.key_averages import Kind, kind_of
from traceml_ray.traces.sources import Source, exchanges, intervals, is_collective
from traceml_ray.traces.trace import Ints, Mask, Nesting, Trace, innermost, nest, read_trace


def union(begins: Ints, ends: Ints) -> Ints:
    """Return the union of intervals, given as begins and ends of shape [n]; they may overlap."""
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], ends[order]
    latest = np.maximum.accumulate(ends)
    first = np.r_[True, begins[1:] > latest[:-1]] if len(begins) else np.empty(0, bool)
    last = np.r_[first[1:], True] if len(begins) else first
    intervals = np.stack([begins[first], latest[last]], axis=1)
    return intervals[intervals[:, 1] > intervals[:, 0]]


def both(one: Ints, other: Ints) -> Ints:
    """Return the intersection of two sets."""
    return _where(one, other, 2)


def without(one: Ints, other: Ints) -> Ints:
    """Return the part of the first set that is not in the second."""
    begin, end = (one[0, 0], one[-1, 1]) if len(one) else (0, 0)
    edges = np.r_[begin, np.clip(other, begin, end).reshape(-1), end]
    rest = edges.reshape(-1, 2)
    return both(one, rest[rest[:, 1] > rest[:, 0]])


def length(one: Ints) -> int:
    """Return the total length of a set, in ns."""
    return int((one[:, 1] - one[:, 0]).sum())


def before(times: Ints, one: Ints) -> Ints:
    """Return how much of the set is before each time, in ns, shape [n]."""
    if not len(one):
        return np.zeros(len(times), np.int64)
    begun = np.searchsorted(one[:, 0], times, side="right")
    lengths_before = np.r_[0, np.cumsum(one[:, 1] - one[:, 0])]
    last_end = np.r_[0, one[:, 1]][begun]
    return np.where(begun > 0, lengths_before[begun] - np.maximum(last_end - times, 0), 0)


def within(times: Ints, one: Ints) -> npt.NDArray[np.bool_]:
    """Return whether each time is in the set, shape [n]."""
    if not len(one):
        return np.zeros(len(times), bool)
    index = np.searchsorted(one[:, 0], times, side="right") - 1
    is_inside: npt.NDArray[np.bool_] = (index >= 0) & (times < one[np.maximum(index, 0), 1])
    return is_inside


def _where(one: Ints, other: Ints, depth: int) -> Ints:
    """Return the time that is covered by exactly `depth` of two sets."""
    edges = np.r_[one.reshape(-1), other.reshape(-1)]
    step = np.r_[np.tile([1, -1], len(one)), np.tile([1, -1], len(other))]
    order = np.lexsort((step, edges))  # at equal times, an end before a begin
    edges, depths = edges[order], np.cumsum(step[order])
    starts = np.flatnonzero(depths == depth)
    return np.stack([edges[starts], edges[starts + 1]], axis=1) if len(starts) else np.empty((0, 2), np.int64)


OUTSIDE = "(outside of operations)"
Key = tuple[str, Kind | Literal["outside"]]
_SYNCHRONISES = "Synchronize"
"""Part of the names of CUDA runtime calls in which a thread waits for its device."""
_STEP = "ProfilerStep#"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+(?=>)")
"""Address of an object in the name of a Python function. It differs between processes."""


class RecordingError(ValueError):
    """The requested step or stage was not recorded. The message says what was."""


@dataclass
class Spent:
    """Time that one rank spends in a step, or in one stage of it."""

    steps: int
    """
    Number of completely recorded steps. 0: the trace has no steps, and all numbers cover the
    whole trace.
    """
    step_ns: float
    """Mean length of a step, in ns."""
    waiting_ns: float = 0.0
    """Part of `step_ns` in which a thread waits for other ranks or for its device."""
    device: bool = False
    """Whether work of a device was recorded."""
    operations: dict[Key, tuple[float, float, float]] = field(default_factory=dict)
    """
    (calls, thread ns, device ns) of each operation in a step, without the operations inside it. For a
    collective in a thread of its own, only time in which the rank does nothing but wait for it.
    """
    waits: set[Key] = field(default_factory=set)
    """Operations in which the rank waits."""

    def of(self, key: Key) -> tuple[float, float, float]:
        """Return (calls, thread ns, device ns) of one operation in a step."""
        return self.operations.get(key, (0.0, 0.0, 0.0))


def spent(source: Source, stage: str | None = None) -> Spent:
    """
    Return the time of a rank in a step, or in `stage` of the step.

    Raises:
        RecordingError: no complete step, or stage, was recorded.
        TraceError: the trace cannot be read.
    """
    trace = read_trace(source.path, source.window)
    return spent_in(source, trace, nest(trace), stage)


def spent_in(source: Source, trace: Trace, nesting: Nesting, stage: str | None = None) -> Spent:
    """Return the same as `spent`, from a trace that is already read. Raises RecordingError."""
    windows, steps = _windows(source, trace, stage)
    spent = Spent(steps, length(windows) / max(steps, 1), device=bool(trace.on_device.any()))
    reading = _Reading(trace, nesting, windows)
    reading.fill(spent)
    return spent


def _windows(source: Source, trace: Trace, stage: str | None) -> tuple[Ints, int]:
    """Return the time to analyse, and the number of complete steps, or stages, in it."""
    if stage is not None:
        first_ns = min((step.begin_ns for step in source.steps), default=0)
        stage_intervals = [
            interval
            for interval in intervals(source.steps)
            if interval.stage == stage and interval.begin_ns >= first_ns
        ]
        if not stage_intervals:
            raise RecordingError(
                f"no complete `{stage}` of {source.label} was recorded: that needs the rows of these steps, "
                "and more than one step if the stage begins before the step"
            )
        bounds = [(interval.begin_ns, interval.end_ns) for interval in stage_intervals]
    elif source.steps:
        bounds = [(step.begin_ns, step.end_ns) for step in source.steps]
    else:
        number = {index for index, name in enumerate(trace.names) if name.startswith(_STEP)}
        places = np.flatnonzero(np.isin(trace.name, [*number]) & ~trace.on_device)
        bounds = np.stack([trace.begin_ns[places], trace.end_ns[places]], axis=1).tolist()
    if bounds:
        windows = np.array(bounds, np.int64)
        return union(windows[:, 0], windows[:, 1]), len(bounds)
    if not len(trace):
        raise RecordingError(f"nothing was recorded of {source.label}")
    return np.array([[trace.begin_ns.min(), trace.end_ns.max()]]), 0


class _Reading:
    """The part of a trace inside some windows of time."""

    def __init__(self, trace: Trace, nesting: Nesting, windows: Ints) -> None:
        self._trace, self._nesting, self._windows = trace, nesting, windows
        categories = len(trace.categories)
        self._pairs, self._pair = np.unique(trace.name * categories + trace.category, return_inverse=True)
        self._keys: list[Key] = []
        waits, work = [], []
        for name, category in zip(*(part.tolist() for part in divmod(self._pairs, categories)), strict=True):
            key = _ADDRESS.sub("", trace.names[name]), kind_of(trace.categories[category])
            self._keys.append(key)
            waits.append(_waits(key[0], trace.categories[category]))
            work.append(key[1] in ("operation", "runtime"))
        self._waits, self._work = np.array(waits, bool), np.array(work, bool)
        host = ~trace.on_device
        exchanging = np.array([bool(exchanges(name)) for name in trace.names], bool)[trace.name] & host
        aside = np.isin(trace.lane, trace.lane[exchanging])
        self._exchanging = exchanging
        """Whether an operation is a collective in a thread that does nothing else, shape [n]."""
        self._in_flight = union(trace.begin_ns[exchanging], trace.end_ns[exchanging])
        """Times at which any such collective is in progress."""
        self._host = host & ~aside
        """Whether an operation belongs to a thread that trains, shape [n]."""

    def fill(self, spent: Spent) -> None:
        """Add the time spent, by operation, to `spent`."""
        trace, nesting = self._trace, self._nesting
        steps = np.array([name.startswith(_STEP) for name in trace.names], bool)[trace.name]
        inside = nesting.counted & ~nesting.launched & ~steps & within(trace.begin_ns, self._windows)
        waited, moved = self._waited()
        self_ns = nesting.self_host_ns.copy()
        self_ns[self._exchanging] = self._waited_for(waited)
        inside |= self._exchanging & (self_ns > 0)
        np.subtract.at(self_ns, moved[moved >= 0], (waited[:, 1] - waited[:, 0])[moved >= 0])
        sums = np.zeros((len(self._keys), 3))
        columns = np.stack([np.ones(len(trace)), np.maximum(self_ns, 0), nesting.self_device_ns], axis=1)
        np.add.at(sums, self._pair[inside], columns[inside])
        waiting = self._waits[self._pair] & inside
        host_ns = length(waited) + int(self_ns[waiting & self._host].sum())
        device_ns = int(nesting.self_device_ns[waiting].sum())
        n_steps = max(spent.steps, 1)
        spent.waiting_ns = max(host_ns, device_ns) / n_steps
        for key, values, wait in zip(self._keys, sums.tolist(), self._waits.tolist(), strict=True):
            if values[0]:
                calls, host, device = (value / n_steps for value in values)
                before = spent.of(key)
                spent.operations[key] = before[0] + calls, before[1] + host, before[2] + device
                spent.waits |= {key} if wait else set()
        outside = self._outside(waited[moved < 0]) / n_steps
        spent.operations[OUTSIDE, "outside"] = (0.0, outside, 0.0)

    def _time_of(self, mask: Mask) -> Ints:
        return union(self._trace.begin_ns[mask], self._trace.end_ns[mask])

    def _waited(self) -> tuple[Ints, Ints]:
        """
        Return (times, operations). The times are those at which no operation runs while a collective is in
        progress: a thread waits for it. The operations [k] are the range or function that contains each time;
        -1: none.
        """
        trace = self._trace
        working = self._time_of(self._host & self._work[self._pair])
        waited = both(without(self._windows, working), self._in_flight)
        middle = waited.mean(axis=1).astype(np.int64) if len(waited) else np.empty(0, np.int64)
        among = self._host & self._nesting.counted
        lane = np.full(len(waited), self._training_lane())
        return waited, innermost(trace, self._nesting.parent, among, lane, middle)

    def _waited_for(self, waited: Ints) -> Ints:
        """
        Return how much of the `waited` time belongs to each collective in progress, [n].

        If several are in progress, the time belongs to the one that began first. So the sum over all is the
        waited time.
        """
        begin_ns = self._trace.begin_ns[self._exchanging]
        end_ns = self._trace.end_ns[self._exchanging]
        order = np.argsort(begin_ns, kind="stable")
        begin_ns, end_ns = begin_ns[order], end_ns[order]
        covered_ns = np.r_[0, np.maximum.accumulate(end_ns)[:-1]] if len(end_ns) else end_ns
        first_ns = np.clip(covered_ns, begin_ns, np.maximum(begin_ns, end_ns))
        waited_ns = np.empty(len(order), np.int64)
        waited_ns[order] = before(end_ns, waited) - before(first_ns, waited)
        return waited_ns

    def _training_lane(self) -> int:
        lanes = self._trace.lane[self._host]
        return int(np.bincount(lanes).argmax()) if len(lanes) else -1

    def _outside(self, waited: Ints) -> int:
        """Return the time in which no named operation runs and no rank is waited for."""
        named = np.array([not name.startswith(_STEP) for name in self._trace.names], bool)[self._trace.name]
        running = self._time_of(self._host & named)
        return length(without(without(self._windows, running), waited))


def _waits(name: str, category: str) -> bool:
    """Return whether the time of an operation may be a wait for other ranks, or for a device."""
    return is_collective(name, category) or (kind_of(category) == "runtime" and _SYNCHRONISES in name)


MEDIAN: Literal["median"] = "median"
_LIMITS = ProfileLimits()


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of a rank, compared with others. Own times per step, without the operations inside it."""

    name: str
    """Name of the operation. `OUTSIDE`: the time in which no operation runs."""
    kind: Kind | Literal["outside"]
    more_ms: float
    """Additional time of the rank in ms per step: of its threads or of the device, whichever is larger."""
    on_device: bool
    """Whether `more_ms` is time of the device."""
    calls: float
    other_calls: float
    self_cpu_ms: float
    other_self_cpu_ms: float
    self_device_ms: float | None
    """Device time of the rank in ms. None if no device was recorded."""
    other_self_device_ms: float | None


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A rank compared with another, or with the median of others. All numbers are per step."""

    rank: int
    others: list[int]
    """The rank compared with, or the ranks whose median is compared with."""
    stage: str | None
    """Stage to which the comparison is limited: only operations that begin in it count."""
    steps: int
    """
    Number of completely recorded steps of the rank. 0: the trace has no steps, and the numbers cover all of
    it.
    """
    step_ms: float
    waiting_ms: float
    """Waiting time of the rank in ms per step: in collectives and for its device."""
    other_waiting_ms: float
    operations: list[Compared]
    """Operations, the one that explains most first."""
    waits: list[Compared]
    """
    Operations in which `waiting_ms` was spent. For a collective in its own thread: the time that no work
    hides.
    """
    sentences: list[str]


def difference(
    sources: Sequence[Source], rank: int, beside: int | Literal["median"] = MEDIAN, stage: str | None = None
) -> Difference:
    """
    Return what `rank` does more of than another rank, or than the median of all others of `sources`.

    Raises:
        RecordingError: a rank, or the stage, was not recorded.
        TraceError: a trace cannot be read.
    """
    by_rank = {source.rank: source for source in sources if source.rank is not None}
    others = [other for other in by_rank if other != rank] if beside == MEDIAN else [beside]
    for wanted in (rank, *others):
        if wanted not in by_rank:
            raise RecordingError(_lacking(wanted, by_rank, [s.label for s in sources if s.rank is None]))
    if not others or others == [rank]:
        raise RecordingError(f"only rank {rank} was recorded: there is nothing to compare it with")
    if stage is not None and stage not in STAGES:
        raise RecordingError(f"{stage!r} is not a stage; choose one of {', '.join(STAGES)}")
    return compare(
        rank, spent(by_rank[rank], stage), {other: spent(by_rank[other], stage) for other in others}, stage
    )


def _lacking(wanted: int, available: Iterable[int], unknown: Sequence[str]) -> str:
    there = f": the profile has {text.ranks(available)}" if available else ""
    whose = (
        f"; whose {text.listed(unknown)} is, is not known: put the rank into its name, as rank0.json"
        if unknown
        else ""
    )
    return f"rank {wanted} was not recorded{there}{whose}"


def compare(rank: int, rank_spent: Spent, others: dict[int, Spent], stage: str | None) -> Difference:
    """Return the difference between the time of one rank and the median time of others."""
    names = dict.fromkeys(key for times in (rank_spent, *others.values()) for key in times.operations)
    rows = [_compared(key, rank_spent, list(others.values())) for key in names]
    rows.sort(key=lambda row: -row.more_ms)
    waits = [row for row in rows if _is_wait(row, rank_spent, others.values())]
    operations = [row for row in rows if not _is_wait(row, rank_spent, others.values())]
    result = Difference(
        rank=rank,
        others=sorted(others),
        stage=stage,
        steps=rank_spent.steps,
        step_ms=rank_spent.step_ns / 1e6,
        waiting_ms=rank_spent.waiting_ns / 1e6,
        other_waiting_ms=_median(times.waiting_ns for times in others.values()),
        operations=operations,
        waits=waits,
        sentences=[],
    )
    return msgspec.structs.replace(result, sentences=sentences(result))


def _is_wait(row: Compared, rank_spent: Spent, others: Iterable[Spent]) -> bool:
    return any((row.name, row.kind) in times.waits for times in (rank_spent, *others))


def _median(values_ns: Iterable[float]) -> float:
    return float(np.median([*values_ns])) / 1e6


def _compared(key: Key, rank_spent: Spent, others: Sequence[Spent]) -> Compared:
    """Return the comparison of one operation. A rank without the operation spends no time in it."""
    mine = rank_spent.of(key)
    theirs = np.median([other.of(key) for other in others], axis=0)
    device = rank_spent.device or any(other.device for other in others)
    cpu_ms, device_ms = (float(mine[column] - theirs[column]) / 1e6 for column in (1, 2))
    on_device = abs(device_ms) > abs(cpu_ms)
    return Compared(
        name=key[0],
        kind=key[1],
        more_ms=device_ms if on_device else cpu_ms,
        on_device=on_device,
        calls=mine[0],
        other_calls=float(theirs[0]),
        self_cpu_ms=mine[1] / 1e6,
        other_self_cpu_ms=float(theirs[1]) / 1e6,
        self_device_ms=mine[2] / 1e6 if device else None,
        other_self_device_ms=float(theirs[2]) / 1e6 if device else None,
    )


def sentences(difference: Difference) -> list[str]:
    """Return the difference in sentences: the operations that explain most of it, and which rank waits."""
    more = sum(row.more_ms for row in difference.operations if row.more_ms > 0)
    least = max(_LIMITS.named_share * more, _LIMITS.least_share * difference.step_ms)
    named = [row for row in difference.operations if row.more_ms >= least][: _LIMITS.most_named]
    than = text.ranks(difference.others)
    if len(difference.others) > 1:
        than = f"the median of {than}"
    per = "a step" if difference.steps else "in the trace"
    within = f" of `{difference.stage}`" if difference.stage else ""
    lines = [_sentence(difference.rank, row, per + within, than) for row in named]
    if not named:
        lines = [
            f"rank {difference.rank} spends clearly more time {per}{within} in no operation than {than}."
        ]
    waits_less = difference.other_waiting_ms - difference.waiting_ms
    if abs(waits_less) >= max(_LIMITS.least_share * difference.step_ms, 0.01):
        less, who = ("less", "the others wait for it") if waits_less > 0 else ("more", "it waits for others")
        lines.append(f"It waits {text.ms(abs(waits_less))} {per}{within} {less} than {than}: {who}.")
    return lines


def _sentence(rank: int, row: Compared, per: str, than: str) -> str:
    where = (
        "outside of operations, where no operation of torch runs"
        if row.name == OUTSIDE
        else f"in `{row.name}`"
    )
    where += " on the device" if row.on_device else ""
    return f"rank {rank} spends {text.ms(row.more_ms)} {per} more {where}{_calls(row)} than {than}."


def _calls(row: Compared) -> str:
    more = row.calls - row.other_calls
    if row.name == OUTSIDE:
        return ""
    if abs(more) < _LIMITS.same_calls:
        return " (same number of calls)"
    number = text.number(abs(more))
    return f" ({number} call{'' if number == '1' else 's'} {'more' if more > 0 else 'fewer'})"
