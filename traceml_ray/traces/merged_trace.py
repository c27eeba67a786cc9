"""
Merges the traces of many ranks into one, on one clock: Chrome's Trace Event Format, gzip, for Perfetto.

Each trace is read twice, event by event. The first reading finds its threads and the communication between
ranks; the second copies the events. In the merged trace a rank has one process for its threads, one for each
device and one for its steps.

Calls over torch.distributed.rpc are matched with the range of another worker that serves the call. A call is
a range with the name of torch's own RPC profiling, `rpc_async#run_stage(worker1 -> worker2)`. The function
that it runs is a range `run_stage` on the other worker.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np

from traceml_ray import __version__, text
from traceml_ray.files import appearing
from traceml_ray.store.profiles import Profile
from traceml_ray.traces.chrome import ChromeTrace, TraceError
from traceml_ray.traces.sources import CollectivePart, Parts, Source, TracedCollective, apart, intervals
from traceml_ray.traces.trace import Trace, as_text, read_trace, write_events

_CALL = re.compile(
    r"rpc_(?:sync|async|async_jit|remote)#(?P<name>[^()]+)\((?P<caller>[^()]+) -> (?P<callee>[^()]+)\)"
)
_NUMBER = re.compile(r"(\d{1,6})$")
_RANGES = frozenset({"user_annotation"})
_MOST_RANGES = 500_000


class Call(NamedTuple):
    """A call over torch.distributed.rpc, and the range that served it."""

    name: str
    asked: CollectivePart
    done: CollectivePart


class Calls:
    """Collects the calls of some workers. The k-th call of a function matches the k-th range that runs it."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, str], list[CollectivePart]] = defaultdict(list)
        """Calls, by (called worker, function)."""
        self._done: dict[tuple[int, str], list[CollectivePart]] = defaultdict(list)
        """Ranges that serve calls, by (index of their trace, name)."""
        self._workers: dict[str, int] = {}
        self._ranks: dict[int, int] = {}
        self._bounds_ns: dict[int, int] = {}
        self._left = _MOST_RANGES

    def add(self, source_index: int, source: Source, trace: Trace, shift_ns: int) -> None:
        """Add the ranges of one trace. Its times plus `shift_ns` are on the clock of all traces."""
        self._bounds_ns[source_index] = source.clock_bound_ns or 0
        if source.rank is not None:
            self._ranks[source.rank] = source_index
        ranges = np.flatnonzero(trace.has_category(_RANGES) & ~trace.on_device)
        ends_ns: dict[tuple[int, int], int] = {}
        for event in ranges[np.argsort(trace.begin_ns[ranges], kind="stable")][: self._left].tolist():
            self._left -= 1
            key, end_ns = (int(trace.name[event]), int(trace.lane[event])), int(trace.end_ns[event])
            if end_ns <= ends_ns.get(key, -1):
                continue  # the same range, named a second time, possibly by the script
            ends_ns[key] = end_ns
            name, lane = trace.names[key[0]], trace.lanes[key[1]]
            part = CollectivePart(
                source_index, lane, int(trace.begin_ns[event]) + shift_ns, end_ns + shift_ns
            )
            if call := _CALL.fullmatch(name):
                self._workers[call["caller"]] = source_index
                self._asked[call["callee"], call["name"]].append(part)
            else:
                self._done[source_index, name].append(part)

    def matched(self) -> list[Call]:
        """Return the calls whose serving range was recorded."""
        calls = []
        for (callee, name), asked in self._asked.items():
            callee_index = self._source_index(callee)
            waiting = iter(sorted(asked, key=lambda part: part.begin_ns))
            call = next(waiting, None)
            for done in self._done.get((callee_index, name), ()) if callee_index is not None else ():
                if call is None:
                    break
                slack_ns = self._bounds_ns[call.place] + self._bounds_ns[done.place]
                if call.begin_ns <= done.begin_ns + slack_ns:
                    calls.append(Call(name, call, done))
                    call = next(waiting, None)
        return calls

    def _source_index(self, worker: str) -> int | None:
        """
        Return the index of a worker's trace. A worker that calls nobody is identified by the rank at the end
        of its name.
        """
        number = _NUMBER.search(worker)
        return self._workers.get(worker, self._ranks.get(int(number[1])) if number else None)


_KINDS = frozenset("XBEiICbnestfNODv")
"""Phases (`ph`) of events that are copied. Names of processes and threads are replaced."""
_IDS = frozenset({"id", "bind_id"})
_PROFILER = frozenset({"Iteration Start: PyTorch Profiler", "Record Window End"})
_STEPS = "\0steps"
"""Key that is not the name of any process in a trace."""
_NAMED = 1 << 30
"""First number given to threads that have a name instead of a number."""
_OUR_IDS = 1 << 48
_MOST_THREADS = 100_000
_LATEST_US = 1 << 51
_BOUND: dict[str, dict[str, str]] = {"s": {}, "f": {"bp": "e"}}


class MergedRank(msgspec.Struct, frozen=True):
    """One rank of a merged trace."""

    label: str
    file: str
    rank: int | None
    node_id: str | None
    clock_offset_ns: int | None
    """Offset added to the times of the rank's trace, in ns."""
    clock_bound_ns: int | None
    """Largest error of that offset, in ns."""
    operations: int


class MergedSummary(msgspec.Struct, kw_only=True):
    """Summary of a merged trace. It is stored in the trace itself under `traceml_ray`."""

    version: str = __version__
    profile: str | None = None
    why: str | None = None
    ranks: list[MergedRank] = []
    collectives: int = 0
    """Number of collectives recorded on at least two ranks. Arrows go from the last rank to the others."""
    unmatched: int = 0
    """Number of parts of collectives that could not be matched with other ranks."""
    apart: int = 0
    """
    Number of collectives whose parts are further apart than the clocks' error allows. They
    have no arrows.
    """
    calls: int = 0
    """Number of calls over torch.distributed.rpc, each with an arrow to the range that served it."""
    notes: list[str] = []
    """Notes in sentences, mostly about clocks."""


@dataclass
class _Rank:
    """A trace, the result of its first reading, and its processes in the merged trace."""

    place: int
    source: Source
    base_ns: int = 0
    """Origin of the trace's timestamps on the clock of all traces, in ns."""
    begin_ns: int | None = None
    """Time of its first event in ns. None if the trace has no wall-clock times."""
    first_ns: int = 0
    """Time of its first event on the trace's own clock, in ns."""
    main: str = ""
    """Id of the training process in its trace."""
    devices: frozenset[str] = frozenset()
    """Process ids in the trace that represent devices."""
    pids: dict[str, int] = field(default_factory=dict)
    tids: dict[tuple[str, str], int] = field(default_factory=dict)
    names: dict[tuple[str, str], str] = field(default_factory=dict)
    """Names of threads."""


def merge(
    sources: Sequence[Source],
    out: Path,
    profile: Profile | None = None,
    progress: Callable[[float], object] = lambda _: None,
) -> MergedSummary:
    """
    Write one trace of all `sources`. `out` appears only when it is complete. Returns a summary of it.

    Args:
        sources: traces of one or more ranks.
        out: path of the gzip file, whatever its suffix.
        profile: the profile of these traces. It is noted in the merged trace.
        progress: called with the finished share, 0 to 1.

    Raises:
        TraceError: a trace cannot be read.
        OSError: the file cannot be written.
    """
    if not sources:
        raise TraceError("there is no trace to merge")
    merging = _Merge(sources, profile, progress)
    with appearing(out) as temporary, temporary.open("xb") as file:
        merging.write(file)
    return merging.merged


class _Merge:
    """Merges traces. The constructor does the first reading of each trace, `write` the second."""

    def __init__(
        self, sources: Sequence[Source], profile: Profile | None, progress: Callable[[float], object]
    ) -> None:
        self._ranks = [_Rank(index, source) for index, source in enumerate(sources)]
        self._progress = progress
        self._pids, self._ids, self._other_ids = count(1), count(_OUR_IDS), dict[tuple[int, str], int]()
        parts, calls = Parts(), Calls()
        self.merged = MergedSummary(
            profile=profile.id if profile else None, why=profile.why if profile else None
        )
        for rank in self._ranks:
            self._scan(rank, parts, calls)
            progress((rank.place + 1) / (2 * len(self._ranks)))
        self.merged.notes += _clock_notes(sources)
        self._base_ns = min((rank.begin_ns for rank in self._ranks if rank.begin_ns is not None), default=0)
        for rank in self._ranks:
            if rank.begin_ns is None:
                rank.base_ns = self._base_ns - rank.first_ns
        matched, self._calls = parts.matched(), calls.matched()
        self.merged.calls = len(self._calls)
        bounds = {rank.place: rank.source.clock_bound_ns for rank in self._ranks}
        self._collectives = [
            collective for collective in matched.collectives if not apart([collective], bounds)
        ]
        self.merged.unmatched = matched.unmatched
        self.merged.collectives = len(matched.collectives)
        self.merged.apart = len(matched.collectives) - len(self._collectives)

    def _scan(self, rank: _Rank, parts: Parts, calls: Calls) -> None:
        """Read a trace for the first time."""
        source = rank.source
        trace, shift_ns = read_trace(source.path, source.window), source.clock_offset_ns or 0
        rank.base_ns = trace.header.base_ns + shift_ns
        rank.main, rank.devices = _processes(trace)
        if trace.wall_clock or not len(trace):
            begun = [int(trace.begin_ns.min())] if len(trace) else []
            begun += [interval.begin_ns for interval in intervals(source.steps)[:1]]
            begun += [step.begin_ns for step in source.steps[:1]]
            rank.begin_ns = min(begun) + shift_ns if begun else None
            parts.add(rank.place, source, trace, shift_ns)
            calls.add(rank.place, source, trace, shift_ns)
        else:
            rank.first_ns = int(trace.begin_ns.min()) - trace.header.base_ns
            self.merged.notes.append(f"{source.label}: its times are not of the wall clock; it begins at 0.")
        self.merged.ranks.append(
            MergedRank(
                label=source.label,
                file=source.path.name,
                rank=source.rank,
                node_id=source.node_id,
                clock_offset_ns=source.clock_offset_ns,
                clock_bound_ns=source.clock_bound_ns,
                operations=len(trace),
            )
        )

    def write(self, file: BinaryIO) -> None:
        """Write the whole merged trace. Raises TraceError, OSError."""
        header = {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": self._base_ns,
            "traceml_ray": self.merged,
        }
        write_events(file, header, self._events())

    def _events(self) -> Iterator[dict[str, Any]]:
        for rank in self._ranks:
            yield from self._steps(rank)
            for event in ChromeTrace(rank.source.path, rank.source.window):
                if event.get("ph") == "M":
                    _note_name(rank, event)
                elif (moved := self._moved(rank, event)) is not None:
                    yield moved
            self._progress(0.5 + (rank.place + 1) / (2 * len(self._ranks)))
        for collective in self._collectives:
            yield from self._arrows(collective)
        for call in self._calls:
            if call.asked.begin_ns <= call.done.begin_ns:  # otherwise the clocks differ by at least this much
                begin, end = (call.asked, call.asked.begin_ns), (call.done, call.done.begin_ns)
                yield from self._arrow("rpc", call.name, begin, end)
        for rank in self._ranks:
            yield from _processes_named(rank)

    def _moved(self, rank: _Rank, event: dict[str, Any]) -> dict[str, Any] | None:
        """Return an event as written to the merged trace. None if it is left out."""
        kind, ts_us = event.get("ph"), event.get("ts")
        if not isinstance(kind, str) or kind not in _KINDS or not isinstance(ts_us, int | float):
            return None
        if (
            not abs(ts_us) < _LATEST_US
            or as_text(event.get("name")) in _PROFILER
            or event.get("cat") == "Trace"
        ):
            return None
        event["ts"] = self._us(rank.base_ns + round(ts_us * 1000))
        event["pid"], event["tid"] = self._lane(rank, as_text(event.get("pid")), as_text(event.get("tid")))
        for key in _IDS & event.keys():
            event[key] = self._id(rank, event[key])
        return event

    def _us(self, t_ns: int) -> float:
        """Return a time on the clock of all traces in µs of the merged trace."""
        return (t_ns - self._base_ns) / 1000

    def _lane(self, rank: _Rank, process: str, thread: str) -> tuple[int, int]:
        """Return the process and the thread in the merged trace. A thread keeps its number."""
        if process not in rank.pids:
            rank.pids[process] = next(self._pids)
        if (process, thread) not in rank.tids:
            number = int(thread) if thread.isdecimal() and len(thread) < 10 else _NAMED + len(rank.tids)
            rank.tids[process, thread] = number
        return rank.pids[process], rank.tids[process, thread]

    def _id(self, rank: _Rank, given: object) -> int:
        """Return an id that no other rank uses. The begin and the end of a flow get the same id."""
        if type(given) is int and 0 <= given < _OUR_IDS // len(self._ranks):
            return given * len(self._ranks) + rank.place
        key = rank.place, as_text(given)
        if key not in self._other_ids:
            self._other_ids[key] = next(self._ids)
        return self._other_ids[key]

    def _steps(self, rank: _Rank) -> Iterator[dict[str, Any]]:
        """Yield the recorded steps, and their rows with the stages of each."""
        steps, shift_ns = rank.source.steps, rank.source.clock_offset_ns or 0
        if not steps:
            return

        def slice_of(thread: str, name: str, begin_ns: int, end_ns: int, step: int) -> dict[str, Any]:
            pid, tid = self._lane(rank, _STEPS, thread)
            times = {"ts": self._us(begin_ns + shift_ns), "dur": max(end_ns - begin_ns, 0) / 1000}
            lane = {"pid": pid, "tid": tid}
            return {"ph": "X", "cat": "step", "name": name, **lane, **times, "args": {"step": step}}

        for step in steps:
            yield slice_of("steps", f"step {step.step:,}", step.begin_ns, step.end_ns, step.step)
        for interval in intervals(steps):
            name = interval.stage or f"row {interval.step:,}"
            yield slice_of("rows, by stage", name, interval.begin_ns, interval.end_ns, interval.step)

    def _arrows(self, collective: TracedCollective) -> Iterator[dict[str, Any]]:
        """Yield a flow from the part of the rank that came last to each of the others, which have waited."""
        last = collective.last
        for part in collective.parts:
            end_ns = max(part.begin_ns, part.end_ns - 1)  # inside the slice
            if part is last or end_ns < last.begin_ns:
                continue
            yield from self._arrow("collective", collective.name, (last, last.begin_ns), (part, end_ns))

    def _arrow(
        self, category: str, name: str, begin: tuple[CollectivePart, int], end: tuple[CollectivePart, int]
    ) -> Iterator[dict[str, Any]]:
        """Yield the two ends of a flow, each at a time inside a slice."""
        flow = {"cat": category, "name": name, "id": next(self._ids)}
        for kind, (part, at_ns) in (("s", begin), ("f", end)):
            pid, tid = self._lane(self._ranks[part.place], *part.lane)
            yield flow | {"ph": kind, "pid": pid, "tid": tid, "ts": self._us(at_ns)} | _BOUND[kind]


def _clock_notes(sources: Sequence[Source]) -> Iterator[str]:
    """Yield what a reader must know about clocks if there are several traces."""
    unknown = [source.label for source in sources if source.clock_offset_ns is None]
    if len(sources) > 1 and len(unknown) == len(sources):
        yield "Times are by the clock of each node. How far the clocks differ was not measured."
    elif len(sources) > 1 and unknown:
        yield f"How far the clock of {text.listed(unknown)} is off was not measured."


def _processes(trace: Trace) -> tuple[str, frozenset[str]]:
    """Return (the process with most operations of threads, the processes that represent devices)."""
    on_device = trace.on_device
    host = np.bincount(trace.lane[~on_device], minlength=len(trace.lanes))
    device = np.bincount(trace.lane[on_device], minlength=len(trace.lanes))
    by_process: dict[str, int] = {}
    for (process, _), number in zip(trace.lanes, host.tolist(), strict=True):
        by_process[process] = by_process.get(process, 0) + number
    devices = {process for (process, _), number in zip(trace.lanes, device.tolist(), strict=True) if number}
    return max(by_process, key=lambda process: by_process[process], default=""), frozenset(devices)


def _note_name(rank: _Rank, event: dict[str, Any]) -> None:
    """Store the name of a thread until it is known whether the thread has events."""
    args = event.get("args")
    if event.get("name") == "thread_name" and isinstance(args, dict) and len(rank.names) < _MOST_THREADS:
        rank.names[as_text(event.get("pid")), as_text(event.get("tid"))] = as_text(args.get("name"))


def _processes_named(rank: _Rank) -> Iterator[dict[str, Any]]:
    """Yield the metadata events that name a rank's processes and threads, and set their order."""
    source = rank.source
    bound = source.clock_bound_ns
    for number, (process, pid) in enumerate(rank.pids.items()):
        first = {_STEPS: 0, rank.main: 1}.get(process, 2 if process in rank.devices else 3)
        name = source.label + (
            {0: " / steps", 1: "", 2: f" / GPU {process}"}.get(first, f" / {process or 'others'}")
        )
        named: dict[str, dict[str, Any]] = {"process_name": {"name": name}}
        named["process_sort_index"] = {"sort_index": rank.place * 1000 + first * 100 + min(number, 99)}
        if bound is not None:
            named["process_labels"] = {"labels": f"clock ± {text.ns(bound)}"}
        for key, args in named.items():
            yield {"ph": "M", "name": key, "pid": pid, "tid": 0, "ts": 0, "args": args}
    for (process, thread), tid in rank.tids.items():
        args = {"name": rank.names.get((process, thread)) or thread or "others"}
        yield {"ph": "M", "name": "thread_name", "pid": rank.pids[process], "tid": tid, "ts": 0, "args": args}
