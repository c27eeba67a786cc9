"""
Reads memory recordings of Stormlog as `Recording`s.

Supported are its events (schema 2 to 4, and events without a version) as JSON, JSONL and CSV, and
`telemetry_timeline.json` with the files that `stormlog diagnose` writes with it.

Two values are not used as written. On CUDA, ROCm and MPS `device_used_bytes` is the larger of the allocator's
own two numbers, not the driver's. If it never differs from them it is omitted, because memory outside the
allocator is then not known. On a CPU, allocated, reserved and used are all the process's resident memory.

Marks of collectives are events, or phases, whose type, context or metadata names a collective. They have no
values of their own: the values of a sample that they repeat are not another sample. A timeline only has times
and bytes. `manifest.json` names its process, and `environment.json` says whether the bytes are of a device.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import numpy as np

from traceml_ray.files import read_file
from traceml_ray.identity import MAX_RANKS
from traceml_ray.signals.memory.recordings import (
    MAX_FILE_BYTES,
    FileContents,
    Floats,
    NoSamplesError,
    Recording,
    RefusedFileError,
    column,
)
from traceml_ray.signals.memory.shapes import Collective
from traceml_ray.wire.codec import Count, ready

_OPERATION = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|barrier")
_ANY = re.compile(r"[nr]ccl|collective|communication")
UNNAMED = "collective"
"""Operation of a mark that only says that it was a collective."""
_NAMES = {
    name.replace("_", ""): name
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")
}
_ENTER, _EXIT = "phase_enter", "phase_exit"
_UNKNOWN_RANK = 0
"""Placeholder until ranks are known, see `merge`."""


class MarkedEvent(Protocol):
    """The parts of an event that show whether it marks a collective."""

    timestamp_ns: int
    event_type: str
    context: str | None
    metadata: Any


def operation(event: MarkedEvent) -> str | None:
    """Return the collective that an event marks. None: it marks none. In a sample only the context counts."""
    texts = [event.context or ""]
    if event.event_type != "sample":
        texts += [event.event_type, bytes(event.metadata).decode(errors="replace")]
    words = " ".join(texts).lower().replace("-", "_")
    named = _OPERATION.search(words)
    if named is not None:
        return _NAMES[named[0].replace("_", "")]
    return UNNAMED if _ANY.search(words) else None


def collectives(marks: Iterable[tuple[MarkedEvent, str]]) -> list[Collective]:
    """
    Return marks (event, operation), given in order of time, as collectives. A phase is one collective from
    begin to end.
    """
    times: list[tuple[str, int, int]] = []
    entered: dict[str, int] = {}
    for event, name in marks:
        if event.event_type == _ENTER:
            entered[name] = event.timestamp_ns
        elif event.event_type == _EXIT and name in entered:
            times.append((name, entered.pop(name), event.timestamp_ns))
        else:
            times.append((name, event.timestamp_ns, event.timestamp_ns))
    times += [(name, begin_ns, begin_ns) for name, begin_ns in entered.items()]
    return [Collective(_UNKNOWN_RANK, name, None, first, last) for name, first, last in times]


VERSIONS = (2, 3, 4)
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
_Device = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
_REPEAT = {"start", "stop", "phase_enter", "phase_exit", "collector_degraded", "collector_recovered", "error"}
"""Kinds of events that repeat the values of an earlier sample, or have no values."""
_NO_METADATA = msgspec.Raw()
EARLIEST_WALL_NS = 10**17
"""A time in 1973. Smaller times are not of the wall clock."""
_NO_JOB = {"", "none"}
"""Job ids without meaning: torchrun's id without a rendezvous id is "none"."""


class StormlogEvent(msgspec.Struct, gc=False):
    """The fields that are read of an event of schema 2, 3 or 4."""

    timestamp_ns: Count
    event_type: str
    collector: str
    pid: int
    host: str
    device_id: _Device
    allocator_allocated_bytes: Count | None
    allocator_reserved_bytes: Count | None
    device_used_bytes: Count | None
    sampling_interval_ms: Count = 0
    allocator_active_bytes: Count | None = None
    allocator_inactive_bytes: Count | None = None
    device_total_bytes: Count | None = None
    session_id: str | None = None
    job_id: str | None = None
    rank: Rank = 0
    world_size: Size = 1
    context: str | None = None
    metadata: msgspec.Raw = _NO_METADATA
    """Raw value in the file. Not read from a CSV."""


class Legacy(msgspec.Struct, gc=False):
    """An event without a version, as in older exports and dumps after an OOM."""

    memory_allocated: Count | None
    timestamp: Annotated[float, msgspec.Meta(ge=0, lt=9e9)]
    """Seconds since the epoch."""
    event_type: str = "sample"
    memory_reserved: Count | None = None
    active_memory: Count | None = None
    inactive_memory: Count | None = None
    device_used: Count | None = None
    device_total: Count | None = None
    total_memory: Count | None = None
    device_id: _Device | None = None
    backend: str | None = None
    host: str | None = None
    pid: int | None = None
    session_id: str | None = None
    job_id: str | None = None
    rank: Rank = 0
    world_size: Size = 1
    context: str | None = None
    metadata: msgspec.Raw = _NO_METADATA

    def event(self) -> StormlogEvent:
        """Return the event converted to the newest schema."""
        total = self.total_memory if self.device_total is None else self.device_total
        on_cpu = self.backend == "cpu"
        return StormlogEvent(
            timestamp_ns=round(self.timestamp * 1e9),
            event_type=self.event_type,
            collector=f"legacy.{self.backend or 'unknown'}",
            pid=-1 if self.pid is None else self.pid,
            host=self.host or "unknown",
            device_id=-1 if on_cpu else self.device_id or 0,
            allocator_allocated_bytes=self.memory_allocated,
            allocator_reserved_bytes=self.memory_reserved,
            device_used_bytes=self.device_used,
            allocator_active_bytes=self.active_memory,
            allocator_inactive_bytes=self.inactive_memory,
            device_total_bytes=total,
            session_id=self.session_id,
            job_id=self.job_id,
            rank=self.rank,
            world_size=self.world_size,
            context=self.context,
            metadata=self.metadata,
        )


def recordings(events: Iterable[StormlogEvent]) -> list[Recording]:
    """
    Return the events of one file, grouped by process, rank and device. Raises `RefusedFileError` if a rank
    exceeds the world size.
    """
    events_of_key: dict[tuple[object, ...], list[StormlogEvent]] = {}
    for event in events:
        key = (event.session_id, event.host, event.pid, event.rank, max(event.device_id, -1))
        events_of_key.setdefault(key, []).append(event)
    return [_recording(of_key) for of_key in events_of_key.values()]


def node(host: str | None) -> str:
    """Return the node's name. "" if it is not known."""
    return "" if host in (None, "unknown") else str(host)


def job(given: str | None) -> str | None:
    """Return the job's id. None if it has no meaning."""
    return None if given is None or given.lower() in _NO_JOB else given


def measured(columns: dict[str, Floats]) -> dict[str, Floats]:
    """
    Return the columns of a device with known values. A `device_used_bytes` that only repeats the allocator's
    numbers is omitted.
    """
    used = columns.get("device_used_bytes")
    if used is not None:
        largest = np.fmax(columns["allocated_bytes"], columns.get("reserved_bytes", np.nan))
        if (used == largest)[np.isfinite(used)].all():
            columns = {name: values for name, values in columns.items() if name != "device_used_bytes"}
    return {name: values for name, values in columns.items() if np.isfinite(values).any()}


def _recording(of_process: list[StormlogEvent]) -> Recording:
    """Return the events of one process and device as a recording."""
    first = of_process[0]
    if first.rank >= first.world_size:
        raise RefusedFileError(f"rank {first.rank} of a world of {first.world_size}")
    marks, of_process = _marks(of_process), _samples(of_process)
    on_cpu = first.device_id < 0 or "cpu" in first.collector.lower()
    named = first.world_size > 1
    return Recording(
        process=f"{first.session_id or ''}/{first.host}/{first.pid}",
        node=node(first.host),
        device=None if on_cpu else first.device_id,
        t_ns=np.array([event.timestamp_ns for event in of_process], np.int64),
        columns=_host(of_process) if on_cpu else _device(of_process),
        # Stormlog also writes one process in a world of one if it does not know the ranks.
        rank=first.rank if named else None,
        world_size=first.world_size if named else None,
        run=job(first.job_id),
        wall=first.timestamp_ns >= EARLIEST_WALL_NS,
        collectives=collectives(marks),
    )


def _marks(events: list[StormlogEvent]) -> list[tuple[StormlogEvent, str]]:
    """Return the events that mark a collective with the collective's name, in order of time."""
    marked = [(event, name) for event in events if (name := operation(event)) is not None]
    return sorted(marked, key=lambda mark: mark[0].timestamp_ns)


def _samples(of_process: list[StormlogEvent]) -> list[StormlogEvent]:
    """
    Return the measured samples in order of time. Repeated values and marks of collectives are left out. Of
    several events about one sample (its peak, its change) the last one is used.
    """
    kept = [
        event for event in of_process if event.event_type not in _REPEAT and not _only_marks(event)
    ] or of_process
    kept.sort(key=lambda event: event.timestamp_ns)
    apart = kept[0].sampling_interval_ms * 1_000_000 // 4
    after = [*kept[1:], None]
    return [
        event
        for event, later in zip(kept, after, strict=True)
        if later is None or later.timestamp_ns - event.timestamp_ns > apart
    ]


def _only_marks(event: StormlogEvent) -> bool:
    return event.event_type != "sample" and operation(event) is not None


def _host(of_process: Sequence[StormlogEvent]) -> dict[str, Floats]:
    return measured({"rss_bytes": column(event.allocator_allocated_bytes for event in of_process)})


def _device(of_process: Sequence[StormlogEvent]) -> dict[str, Floats]:
    values = {
        "allocated_bytes": (event.allocator_allocated_bytes for event in of_process),
        "reserved_bytes": (event.allocator_reserved_bytes for event in of_process),
        "active_bytes": (event.allocator_active_bytes for event in of_process),
        "inactive_split_bytes": (event.allocator_inactive_bytes for event in of_process),
        "device_used_bytes": (event.device_used_bytes for event in of_process),
        "device_total_bytes": (event.device_total_bytes for event in of_process),
    }
    return measured({name: column(of_events) for name, of_events in values.items()})


_MOST_BESIDE = 1 << 20
_T = TypeVar("_T", bound=msgspec.Struct)
_Bytes = Annotated[float, msgspec.Meta(ge=0, lt=1e18)] | None
_Seconds = Annotated[float, msgspec.Meta(ge=0, lt=9e9)]


class _Identity(msgspec.Struct, frozen=True):
    """Identity of the sampled process. A world of one is also written if no ranks are known."""

    session_id: str | None = None
    host: str | None = None
    pid: int | None = None
    job_id: str | None = None
    rank: Rank | None = None
    world_size: Size | None = None


_NOBODY = _Identity()


class _Timeline(msgspec.Struct):
    """A timeline: seconds and bytes, value by value."""

    timestamps: list[_Seconds]
    allocated: list[_Bytes]
    reserved: list[_Bytes] | None = None
    device_used: list[_Bytes] | None = None
    device_total: list[_Bytes] | None = None
    rank: Rank | None = None
    world_size: Size | None = None
    metadata: _Identity = _NOBODY
    distributed_identity: _Identity = _NOBODY

    def identity(self) -> tuple[int | None, int | None]:
        """Return rank and world size as in the file."""
        sources_of_identity = self, self.metadata, self.distributed_identity
        rank = next((source.rank for source in sources_of_identity if source.rank is not None), None)
        return rank, next(
            (source.world_size for source in sources_of_identity if source.world_size is not None), None
        )


class _Manifest(msgspec.Struct):
    session: _Identity = msgspec.field(default_factory=_Identity)


class _System(msgspec.Struct):
    detected_backend: str | None = None


class _Environment(msgspec.Struct):
    system: _System = msgspec.field(default_factory=_System)


def read_timeline(data: bytes, path: Path) -> FileContents:
    """
    Return the timeline `data` of the file at `path` as a recording.

    Raises:
        NoSamplesError: it is empty.
        RefusedFileError: its lists do not fit together.
        msgspec.MsgspecError: it is not a timeline.
    """
    timeline = msgspec.json.decode(data, type=ready(_Timeline))
    lists = {name: values for name, values in msgspec.structs.asdict(timeline).items() if _is_list(values)}
    lengths = {name: len(values) for name, values in lists.items()}
    if not timeline.timestamps:
        raise NoSamplesError("the timeline is empty")
    if len({*lengths.values()}) > 1:
        lengths_text = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise RefusedFileError(f"its lists differ in length: {lengths_text}")
    seconds = np.array(lists.pop("timestamps"), np.float64)
    order = np.argsort(seconds, kind="stable")
    columns = {name: column(values)[order] for name, values in lists.items()}
    t_ns = np.round(seconds[order] * 1e9).astype(np.int64)
    return FileContents("Stormlog timeline", [_timeline_recording(t_ns, columns, timeline, path)])


def _is_list(values: Any) -> bool:
    return isinstance(values, list)


def _timeline_recording(t_ns: Any, columns: dict[str, Floats], timeline: _Timeline, path: Path) -> Recording:
    who = _beside(path, "manifest.json", _Manifest).session
    on_cpu = _beside(path, "environment.json", _Environment).system.detected_backend == "cpu"
    named = {f"{name}_bytes": values for name, values in columns.items()}
    if on_cpu:
        named = {"rss_bytes": columns["allocated"]}
    elif {*columns} == {"allocated", "reserved"} and _same(columns["allocated"], columns["reserved"]):
        del named["reserved_bytes"]
    rank, world = timeline.identity()
    if rank is None and (who.world_size or 1) > 1:
        rank, world = who.rank, who.world_size
    return Recording(
        process=f"{who.session_id}/{who.host}/{who.pid}" if who.session_id else str(path),
        node=node(who.host),
        device=None if on_cpu else 0,
        t_ns=t_ns,
        columns=measured(named),
        rank=rank,
        world_size=None if rank is None or world is None or world <= rank else world,
        run=job(who.job_id),
        wall=bool(t_ns[0] >= EARLIEST_WALL_NS),
    )


def _same(one: Floats, other: Floats) -> bool:
    return np.array_equal(one, other, equal_nan=True)


def _beside(path: Path, name: str, kind: type[_T]) -> _T:
    """
    Return the contents of a file in the timeline's folder. Missing or invalid values are treated as not
    known.
    """
    try:
        return msgspec.json.decode(read_file(path.with_name(name), _MOST_BESIDE), type=ready(kind))
    except (OSError, msgspec.MsgspecError, RecursionError):
        return kind()


SUFFIXES = frozenset({".json", ".jsonl", ".csv"})
_NOTHING = "it has no memory samples"
_CUT = "its last line is incomplete and left out"
_TEXT = frozenset({"event_type", "collector", "host", "session_id", "job_id", "backend", "context"})
_COUNTERS = (
    "allocator_allocated_bytes",
    "allocator_reserved_bytes",
    "device_used_bytes",
    "memory_allocated",
)
"""Columns that a CSV must have, in one schema or the other. An empty cell means not known."""
_READ = {"schema_version", "timestamp", *StormlogEvent.__struct_fields__, *Legacy.__struct_fields__} - {
    "metadata"
}
_MAX_REASON = 200
_NOT_THERE = msgspec.Raw()


class _Kind(msgspec.Struct, gc=False):
    """The fields that show which schema a record has."""

    schema_version: Any = None
    timestamp: Any = None
    timestamp_ns: Any = None


class _Document(msgspec.Struct):
    """A JSON file that is an object. One of these fields holds the samples."""

    events: msgspec.Raw = _NOT_THERE
    telemetry_events: msgspec.Raw = _NOT_THERE
    timestamps: msgspec.Raw = _NOT_THERE
    allocated: msgspec.Raw = _NOT_THERE
    timestamp: msgspec.Raw = _NOT_THERE
    timestamp_ns: msgspec.Raw = _NOT_THERE


Decode = Callable[[type], list[Any]]
"""Returns the records of a file as structs of that type."""


def read_stormlog(path: Path) -> FileContents:
    """
    Return the contents of a JSON, JSONL or CSV file.

    Raises:
        NoSamplesError: the file is complete, but has no memory samples.
        RefusedFileError: the file is invalid in any other way.
        OSError: the file cannot be read.
    """
    data = read_file(path, MAX_FILE_BYTES)
    kind = path.suffix.lower()
    try:
        if kind == ".csv":
            return _csv(data)
        return _jsonl(data) if kind == ".jsonl" else _json(data, path)
    except msgspec.ValidationError as error:
        raise RefusedFileError(_reason(error)) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, csv.Error, RecursionError) as error:
        raise RefusedFileError(f"it is not valid {kind[1:].upper()}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return str(error)[:_MAX_REASON]


def _contents(decode: Decode, notes: Sequence[str] = ()) -> FileContents:
    """
    Return the contents of the records that `decode` returns. Raises `RefusedFileError` for an
    unknown schema.
    """
    records: list[_Kind] = decode(_Kind)
    if not any(record.timestamp_ns is not None or record.timestamp is not None for record in records):
        raise NoSamplesError(_NOTHING)
    lowest, highest = VERSIONS[0], VERSIONS[-1]
    for number, record in enumerate(records, 1):
        if record.schema_version not in (None, *VERSIONS):
            version = str(record.schema_version)[:20]
            raise RefusedFileError(f"record {number} has schema {version}; {lowest} to {highest} are read")
    if records[0].schema_version is None and records[0].timestamp_ns is None:
        events = [old.event() for old in decode(Legacy)]
    else:
        events = decode(StormlogEvent)
    return FileContents("Stormlog events", recordings(events), [*notes])


def _json(data: bytes, path: Path) -> FileContents:
    if data.lstrip()[:1] != b"{":
        return _list(data)
    document = msgspec.json.decode(data, type=ready(_Document))
    for held in (document.events, document.telemetry_events):
        if bytes(held)[:1] == b"[":
            return _list(bytes(held))
    if document.timestamps and document.allocated:
        return read_timeline(data, path)
    if document.timestamp or document.timestamp_ns:
        return _list(b"[%b]" % data)
    raise NoSamplesError(_NOTHING)


def _list(data: bytes) -> FileContents:
    def decode(kind: type) -> list[Any]:
        records: list[Any] = msgspec.json.decode(data, type=ready(list[kind]))  # type: ignore[valid-type]
        return records

    try:
        decode(_Kind)
    except msgspec.ValidationError:  # not a list of objects
        msgspec.json.decode(data, type=ready(msgspec.Raw))
        raise NoSamplesError(_NOTHING) from None
    return _contents(decode)


def _jsonl(data: bytes) -> FileContents:
    lines = [line for line in data.splitlines(keepends=True) if line.strip()]
    notes = []
    if lines and not lines[-1].endswith((b"\n", b"\r")):  # the file was still being written
        try:
            msgspec.json.decode(lines[-1])
        except msgspec.DecodeError:
            lines.pop()
            notes.append(_CUT)
    return _contents(lambda kind: _each(lines, msgspec.json.Decoder(ready(kind)).decode), notes)


def _csv(data: bytes) -> FileContents:
    text = data.decode("utf-8-sig")
    rows = [row for row in csv.reader(text.splitlines(keepends=True)) if row]
    header = rows.pop(0) if rows else []
    if not ({"timestamp_ns", "timestamp"} & {*header} and {*_COUNTERS} & {*header}):
        raise NoSamplesError(_NOTHING)
    notes = []
    # the file was still being written
    if rows and not text.endswith(("\n", "\r")) and len(rows[-1]) < len(header):
        rows.pop()
        notes.append(_CUT)
    unknown = {name: None for name in _COUNTERS if name in header}
    read_stormlog = [
        (column_index, name, name in _TEXT) for column_index, name in enumerate(header) if name in _READ
    ]
    records = [unknown | _cells(row, read_stormlog) for row in rows]
    return _contents(lambda kind: _each(records, lambda record: msgspec.convert(record, ready(kind))), notes)


def _each(records: Sequence[Any], decode: Callable[[Any], Any]) -> list[Any]:
    """Return records decoded one by one. Raises `RefusedFileError` that says which record is invalid."""
    decoded = []
    for number, record in enumerate(records, 1):
        try:
            decoded.append(decode(record))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise RefusedFileError(f"record {number}: {_reason(error)}") from None
    return decoded


def _cells(row: Sequence[str], columns: Iterable[tuple[int, str, bool]]) -> dict[str, object]:
    """Return the non-empty cells of a row. `columns` are (index, name, whether it is text)."""
    width = len(row)
    return {
        name: row[column_index] if is_text else _number(row[column_index])
        for column_index, name, is_text in columns
        if column_index < width and row[column_index] != ""
    }


def _number(text: str) -> object:
    """
    Return text as a number, including an integer that a program wrote as "12.0". Other text is
    unchanged.
    """
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if value.is_integer() else value
