"""
The operations of one process as arrays, read from a trace, with the own time and memory of each: without the
operations inside it, and with the device work that it launched.

`write_events` writes a file of Chrome's Trace Event Format, gzip, event by event, which Perfetto opens.
"""

from __future__ import annotations

import gzip
import json
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from traceml_ray.identity import MAX_RANKS
from traceml_ray.traces.chrome import ChromeTrace, TraceError

Ints = npt.NDArray[np.int64]

DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation"})
"""Categories of device work. Everything else belongs to a thread."""
ANNOTATIONS = frozenset({"user_annotation", "gpu_user_annotation"})
"""Categories of ranges with a given name."""
_LEFT_OUT = frozenset({"Trace", "overhead"})
"""Categories of the profiler's own events."""
MEMORY = "[memory]"
"""Name of events that allocate or free memory."""
_COLLECTIVE = "Collective name"
_LATEST_NS = 1 << 61
_EARLIEST_WALL_NS = 10**17
"""Smallest timestamp that is treated as wall-clock time, in ns (in 1973)."""
_MAX_TEXT = 512
_MAX_TEXTS = 200_000
"""Largest number of different names or shapes. Further ones become `OTHERS`."""
OTHERS = "(others)"


@dataclass
class Trace:
    """
    The [n] operations of one process, by thread and time, an outer one before those inside it. Times are ns
    on the clock of its node. -1 means none.
    """

    path: Path
    header: Header
    lanes: list[tuple[str, str]]
    """Process and thread ids of threads and streams, as in the trace."""
    names: list[str]
    categories: list[str]
    shapes: list[str]
    lane: Ints
    name: Ints
    category: Ints
    shape: Ints
    """Index of the operation's input shapes in `shapes`. -1 if they were not recorded."""
    external: Ints
    """Id by which device work refers to the operation that launched it."""
    begin_ns: Ints
    end_ns: Ints
    memory: TraceMemory
    communications: Mapping[int, Communication]
    """Details of communication between ranks, by index of the operation. Only where the trace has them."""

    @property
    def wall_clock(self) -> bool:
        """Whether its times are wall-clock times, which can be compared with those of other traces."""
        return len(self) > 0 and int(self.begin_ns.min()) > _EARLIEST_WALL_NS

    def __len__(self) -> int:
        """Return the number of operations."""
        return len(self.name)

    @property
    def on_device(self) -> npt.NDArray[np.bool_]:
        """Whether each event is work of a device, shape [n]."""
        return self.has_category(DEVICE)

    def has_category(self, wanted: frozenset[str]) -> npt.NDArray[np.bool_]:
        """Return whether each operation is of one of these categories, [n]."""
        return np.array([name in wanted for name in self.categories], bool)[self.category]


@dataclass(frozen=True)
class Header:
    """Header of a trace. None: not known."""

    base_ns: int
    """Origin of the trace's timestamps, in ns."""
    rank: int | None
    world_size: int | None
    hostname: str | None
    groups: Mapping[str, tuple[int, ...]]
    """Ranks of each process group, by its name."""


@dataclass(frozen=True)
class Communication:
    """torch's details of a collective. "" and -1: not known."""

    name: str
    """Name of the collective, such as `allreduce`."""
    group: str
    seq: int
    """Sequence number of the collective in its group."""
    source: int
    destination: int


@dataclass(frozen=True)
class TraceMemory:
    """Allocations and frees, if they were recorded: [m] events, sorted by thread and time."""

    lane: Ints
    t_ns: Ints
    nbytes: Ints
    """Bytes allocated. Negative: bytes freed."""
    on_device: npt.NDArray[np.bool_]


def read_trace(path: Path, window: tuple[int, int] | None = None) -> Trace:
    """Return the operations in a trace, plain or gzip, see `ChromeTrace`. Raises TraceError."""
    stream, reader = ChromeTrace(path, window), _Reader()
    try:
        for event in stream:
            reader.add(event)
        return reader.trace(path, read_header(stream.header))
    except _UnusableError as error:
        raise TraceError(f"{path}: {error}") from None


def read_header(header: Mapping[str, Any]) -> Header:
    """Return the header from the fields of a trace other than its events."""
    base = header.get("baseTimeNanoseconds")
    base_ns = base if isinstance(base, int) and 0 <= base < _LATEST_NS else 0
    info = header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank, size = (_small(info.get(name)) for name in ("rank", "world_size"))
    host = header.get("host_name")
    return Header(
        base_ns=base_ns,
        rank=rank,
        world_size=size,
        hostname=host[:_MAX_TEXT] if isinstance(host, str) and host else None,
        groups=_groups(info.get("pg_config")),
    )


def _groups(listed: Any) -> dict[str, tuple[int, ...]]:
    """Return the process groups of a job that can be parsed."""
    ranks_by_group = {}
    for group in listed if isinstance(listed, list) else []:
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if isinstance(ranks, list) and all(_small(rank) is not None for rank in ranks):
            ranks_by_group[str(group.get("pg_name"))[:_MAX_TEXT]] = tuple(ranks)
    return ranks_by_group


def _small(value: Any) -> int | None:
    """Return a rank, or a number of ranks. None if the value is invalid."""
    return value if type(value) is int and 0 <= value <= MAX_RANKS else None


class _UnusableError(ValueError):
    """An event that cannot be parsed."""


class _Texts:
    """Texts by number. Beyond `_MAX_TEXTS` all further texts share one number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        if text not in self._numbers and len(self._numbers) >= _MAX_TEXTS:
            text = OTHERS
        return self._numbers.setdefault(text, len(self._numbers))

    def all(self) -> list[str]:
        return list(self._numbers)


class _Reader:
    """Adds events, one by one, to columns."""

    def __init__(self) -> None:
        self._names, self._categories, self._shapes = _Texts(), _Texts(), _Texts()
        self._lanes: dict[tuple[str, str], int] = {}
        self._columns = {name: array("q") for name in _COLUMNS}
        self._memory = {name: array("q") for name in ("lane", "t_ns", "nbytes", "on_device")}
        self._communications: dict[int, Communication] = {}
        self._open: dict[int, list[dict[str, Any]]] = {}
        """Operations begun by a `B` event and not yet ended, per thread."""

    def add(self, event: dict[str, Any]) -> None:
        """Add an event. Kinds that are not operations are ignored."""
        kind = event.get("ph")
        if kind == "X":
            if as_text(event.get("cat")) not in _LEFT_OUT:
                self._operation(event, _ns(event, "ts"), _ns(event, "dur"))
        elif kind == "i" and event.get("name") == MEMORY:
            self._allocation(event)
        elif kind == "B":
            self._open.setdefault(self._lane(event), []).append(event)
        elif kind == "E" and (begun := self._open.get(self._lane(event))):
            began = begun.pop()
            self._operation(began, _ns(began, "ts"), _ns(event, "ts") - _ns(began, "ts"))

    def _operation(self, event: dict[str, Any], begin_ns: int, duration_ns: int) -> None:
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        if (collective := args.get(_COLLECTIVE)) is not None:
            self._communications[len(self._columns["lane"])] = Communication(
                name=as_text(collective),
                group=as_text(args.get("Process Group Name")),
                seq=_id(args.get("Seq")),
                source=_id(args.get("Src Rank")),
                destination=_id(args.get("Dst Rank")),
            )
        row = (
            self._lane(event),
            self._names.number(as_text(event.get("name"))),
            self._categories.number(as_text(event.get("cat"))),
            -1 if (dims := args.get("Input Dims")) is None else self._shapes.number(_shape(dims)),
            _id(args.get("External id")),
            begin_ns,
            begin_ns + max(duration_ns, 0),
        )
        for column, value in zip(self._columns.values(), row, strict=True):
            column.append(value)

    def _allocation(self, event: dict[str, Any]) -> None:
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        nbytes = args.get("Bytes")
        if type(nbytes) is int and abs(nbytes) < _LATEST_NS:
            row = (self._lane(event), _ns(event, "ts"), nbytes, args.get("Device Type") != 0)
            for column, value in zip(self._memory.values(), row, strict=True):
                column.append(value)

    def _lane(self, event: dict[str, Any]) -> int:
        key = as_text(event.get("pid")), as_text(event.get("tid"))
        return self._lanes.setdefault(key, len(self._lanes))

    def trace(self, path: Path, header: Header) -> Trace:
        """Return the trace of the events added so far."""
        columns = {name: np.array(column, np.int64) for name, column in self._columns.items()}
        order = np.lexsort((-columns["end_ns"], columns["begin_ns"], columns["lane"]))
        columns = {name: column[order] for name, column in columns.items()}
        new_index = np.argsort(order)
        memory = {name: np.array(column, np.int64) for name, column in self._memory.items()}
        order = np.lexsort((memory["t_ns"], memory["lane"]))
        return Trace(
            path=path,
            header=header,
            lanes=list(self._lanes),
            names=self._names.all(),
            categories=self._categories.all(),
            shapes=self._shapes.all(),
            communications={
                int(new_index[event]): communication for event, communication in self._communications.items()
            },
            memory=TraceMemory(
                lane=memory["lane"][order],
                t_ns=memory["t_ns"][order] + header.base_ns,
                nbytes=memory["nbytes"][order],
                on_device=memory["on_device"][order] > 0,
            ),
            **{
                name: column + header.base_ns if name.endswith("_ns") else column
                for name, column in columns.items()
            },
        )


_COLUMNS = ("lane", "name", "category", "shape", "external", "begin_ns", "end_ns")


def _ns(event: dict[str, Any], key: str) -> int:
    """Return a time of an event in ns. The event has it in microseconds."""
    value = event.get(key, 0)
    if isinstance(value, int | float) and abs(value) < _LATEST_NS / 1000:  # false for NaN
        return round(value * 1000)
    raise _UnusableError(f"{key} of an event is not a time: {str(value)[:40]!r}")


def _shape(dims: Any) -> str:
    try:
        return json.dumps(dims, separators=(",", ":"))[:_MAX_TEXT]
    except (ValueError, RecursionError):
        return OTHERS


def as_text(value: object) -> str:
    """Return a name, or an id, as text that any file can hold. "" for other values."""
    if isinstance(value, int | float):
        value = repr(value)
    if not isinstance(value, str):
        return ""
    value = value[:_MAX_TEXT]
    return value if value.isascii() else value.encode(errors="replace").decode()


def _id(value: Any) -> int:
    return value if type(value) is int and 0 <= value < _LATEST_NS else -1


_LEVEL = 4
_AT_ONCE = 1000
Event = dict[str, Any]


def write_events(file: BinaryIO, header: Event, events: Iterable[Event]) -> None:
    """
    Write `events` after the fields of `header`. Raises OSError, and whatever the iteration over `events`
    raises.
    """
    with gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) as packed:
        packed.write(msgspec.json.encode(header)[:-1] + b',"traceEvents":[\n')
        pieces, before = list[bytes](), b""
        for event in events:
            pieces.append(_encoded(event))
            if len(pieces) == _AT_ONCE:
                packed.write(before + b",\n".join(pieces))
                pieces, before = [], b",\n"
        packed.write((before if pieces else b"") + b",\n".join(pieces) + b"\n]}\n")


def _encoded(event: Event) -> bytes:
    try:
        return msgspec.json.encode(event)
    except (ValueError, RecursionError):  # half of a surrogate pair, or nested deeper than any trace of torch
        named = {key: as_text(event.get(key)) for key in ("name", "cat")}
        return json.dumps({**event, **named, "args": {}}).encode()


UNCOUNTED = frozenset(
    {
        *("profiler::_record_function_enter", "profiler::_record_function_enter_new"),
        *("profiler::_record_function_exit", "aten::is_leaf", "aten::output_nr", "aten::_version"),
    }
)
"""Operations that torch's own table omits."""
_LAUNCHING = frozenset({"cpu_op", "user_annotation"})
"""Categories of operations that launch device work. Calls of the runtime have the same id."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Nesting:
    """Values of each operation of a trace, arrays of shape [n]. Times are in ns, memory in bytes."""

    counted: Mask
    """False for an operation that only repeats the one around it, or that torch's own table omits."""
    parent: Ints
    """Index of the nearest counted operation around it. -1: none."""
    launched: Mask
    """Whether device work was launched by an operation, and is counted as part of it."""
    host_ns: Ints
    """Time of the thread in the operation. 0 for device work."""
    self_host_ns: Ints
    """`host_ns` without the operations inside."""
    device_ns: Ints
    """Time of the device for the operation. For device work: its own length."""
    self_device_ns: Ints
    """`device_ns` without the operations inside."""
    memory: Ints
    """Bytes allocated and not freed in the operation, [n, 2]: host, device."""
    self_memory: Ints
    """`memory` without the operations inside."""
    outside: Ints
    """Bytes allocated outside of all operations, [2]: host, device."""
    outside_calls: int
    """Number of allocations outside of all operations."""


def nest(trace: Trace) -> Nesting:
    """Return the nesting of a trace's operations, and the own time and memory of each."""
    on_device = trace.on_device
    left_out = on_device | np.array([name in UNCOUNTED for name in trace.names], bool)[trace.name]
    parent, merged = _without_repeats(trace, _enclosing(trace, left_out))
    length = trace.end_ns - trace.begin_ns
    host = np.where(left_out | merged, 0, length)
    work, launched = _device_work(trace)
    work = np.where(on_device, length, _to_parent(work, parent, merged))
    allocated, outside, calls = _memory(trace, parent, left_out)
    allocated = _to_parent(allocated, parent, merged)
    return Nesting(
        counted=~(merged | (left_out & ~on_device)),
        parent=parent,
        launched=launched,
        host_ns=host,
        self_host_ns=host - _of_children(host, parent),
        device_ns=_with_inside(work, parent),
        self_device_ns=work,
        memory=_with_inside(allocated, parent),
        self_memory=allocated,
        outside=outside,
        outside_calls=calls,
    )


def _enclosing(trace: Trace, left_out: Mask) -> list[int]:
    """Return the index of the innermost operation around each operation, [n]. -1: none."""
    ends = trace.end_ns.tolist()
    parent, stack, lane = [-1] * len(trace), list[int](), -1
    columns = trace.lane.tolist(), trace.begin_ns.tolist(), ends, left_out.tolist()
    for event, (thread, begin, end, skip) in enumerate(zip(*columns, strict=True)):
        if skip:
            continue
        if thread != lane:
            lane, stack = thread, []
        while stack and (begin >= ends[stack[-1]] or end > ends[stack[-1]]):
            stack.pop()
        if stack:
            parent[event] = stack[-1]
        stack.append(event)
    return parent


def _without_repeats(trace: Trace, parent: list[int]) -> tuple[Ints, Mask]:
    """
    Return the parents, and which operations are only a step inside one of the same name.

    Such an operation is the only one inside the outer operation. Both count as one, as in torch's own table.
    """
    names, inside = trace.name.tolist(), [0] * len(parent)
    for outer in parent:
        if outer >= 0:
            inside[outer] += 1
    merged = [False] * len(parent)
    for event, outer in enumerate(parent):
        if outer < 0:
            continue
        if merged[outer]:
            outer = parent[event] = parent[outer]
        if names[outer] == names[event] and inside[outer] == 1:
            merged[event], inside[outer] = True, inside[event]
    return np.array(parent, np.int64), np.array(merged, bool)


def _device_work(trace: Trace) -> tuple[Ints, Mask]:
    """
    Return the device time in ns that each operation launched itself, and which device work that was, [n]
    each.
    """
    device_ns, launched = np.zeros(len(trace), np.int64), np.zeros(len(trace), bool)
    named = trace.external >= 0
    work = np.flatnonzero(named & trace.on_device & ~trace.has_category(ANNOTATIONS))
    ours = np.flatnonzero(named & trace.has_category(_LAUNCHING) & ~trace.on_device)
    if len(work) and len(ours):
        ours = ours[np.argsort(trace.external[ours], kind="stable")]
        positions = np.searchsorted(trace.external[ours], trace.external[work])
        by = ours[np.minimum(positions, len(ours) - 1)]
        matched = trace.external[by] == trace.external[work]
        np.add.at(device_ns, by[matched], (trace.end_ns - trace.begin_ns)[work[matched]])
        launched[work[matched]] = True
    return device_ns, launched


def innermost(trace: Trace, parent: Ints, among: Mask, lane: Ints, t_ns: Ints) -> Ints:
    """
    Return the innermost operation of a thread that contains each time, [m]. -1: none.

    Args:
        trace: n operations.
        parent: index of the operation around each, [n].
        among: whether each operation has been nested, [n].
        lane: threads, [m].
        t_ns: times, [m].
    """
    begun = _begun_last(trace, np.flatnonzero(among), lane, t_ns).tolist()
    lanes, ends, outer = trace.lane.tolist(), trace.end_ns.tolist(), parent.tolist()
    innermost_events = []
    for event, thread, at_ns in zip(begun, lane.tolist(), t_ns.tolist(), strict=True):
        while event >= 0 and lanes[event] == thread and ends[event] < at_ns:
            event = outer[event]
        innermost_events.append(event if event >= 0 and lanes[event] == thread else -1)
    return np.array(innermost_events, np.int64)


def _begun_last(trace: Trace, among: Ints, lane: Ints, t_ns: Ints) -> Ints:
    """Return the operation that began last before each time, on a thread or one before it, [m]. -1: none."""
    events = np.full(len(t_ns), -1)
    if len(among) and len(t_ns):
        asking = np.r_[np.zeros(len(among), np.int64), np.ones(len(t_ns), np.int64)]
        times, lanes = np.r_[trace.begin_ns[among], t_ns], np.r_[trace.lane[among], lane]
        order = np.lexsort((asking, times, lanes))
        seen = np.maximum.accumulate(np.where(order < len(among), order, -1))
        asked = order >= len(among)
        last = seen[asked]
        events[order[asked] - len(among)] = np.where(last >= 0, among[np.maximum(last, 0)], -1)
    return events


def _memory(trace: Trace, parent: Ints, left_out: Mask) -> tuple[Ints, Ints, int]:
    """
    Return (bytes that each operation allocated itself [n, 2], bytes allocated outside of operations [2],
    number of such events).
    """
    memory, bytes_by_event, outside = trace.memory, np.zeros((len(trace), 2), np.int64), np.zeros(2, np.int64)
    events = innermost(trace, parent, ~left_out, memory.lane, memory.t_ns)
    device, inside = memory.on_device.astype(np.int64), events >= 0
    np.add.at(bytes_by_event, (events[inside], device[inside]), memory.nbytes[inside])
    np.add.at(outside, device[~inside], memory.nbytes[~inside])
    return bytes_by_event, outside, int((~inside).sum())


def _to_parent(values: Ints, parent: Ints, moved: Mask) -> Ints:
    """Return values, with those of `moved` operations added to their parents, [n, ...]."""
    kept = values.copy()
    kept[moved] = 0
    np.add.at(kept, parent[moved], values[moved])
    return kept


def _of_children(values: Ints, parent: Ints) -> Ints:
    """Return for each operation the sum over the operations directly inside it, [n]."""
    sums = np.zeros_like(values)
    np.add.at(sums, parent[parent >= 0], values[parent >= 0])
    return sums


def _with_inside(values: Ints, parent: Ints) -> Ints:
    """Return for each operation the value including all operations inside it, [n, ...]."""
    sums = values.copy()
    for event in np.flatnonzero(parent >= 0)[::-1].tolist():  # operations inside another come after it
        sums[parent[event]] += sums[event]
    return sums
