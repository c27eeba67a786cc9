"""Reads Stormlog's files: events as JSON, JSONL and CSV, and `telemetry_timeline.json`."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from traceml_ray.analysis.memory.recordings import (
    MAX_FILE_BYTES,
    FileContents,
    NoSamplesError,
    RefusedFileError,
)
from traceml_ray.files import read_file
from traceml_ray.importers import stormlog, stormlog_timeline
from traceml_ray.importers.stormlog import Legacy, StormlogEvent
from traceml_ray.wire.codec import ready

SUFFIXES = frozenset({".json", ".jsonl", ".csv"})
_NOTHING = "there are no samples of memory in it"
_CUT = "its last line is not whole and left out"
_TEXT = frozenset({"event_type", "collector", "host", "session_id", "job_id", "backend", "context"})
_COUNTERS = (
    "allocator_allocated_bytes",
    "allocator_reserved_bytes",
    "device_used_bytes",
    "memory_allocated",
)
"""Columns of a CSV that have to be there, of one schema or the other; an empty cell of them is not known."""
_READ = {"schema_version", "timestamp", *StormlogEvent.__struct_fields__, *Legacy.__struct_fields__} - {
    "metadata"
}
_MAX_REASON = 200
_NOT_THERE = msgspec.Raw()


class _Kind(msgspec.Struct, gc=False):
    """What tells which schema a record has."""

    schema_version: Any = None
    timestamp: Any = None
    timestamp_ns: Any = None


class _Document(msgspec.Struct):
    """A JSON file that is an object: one of these holds the samples."""

    events: msgspec.Raw = _NOT_THERE
    telemetry_events: msgspec.Raw = _NOT_THERE
    timestamps: msgspec.Raw = _NOT_THERE
    allocated: msgspec.Raw = _NOT_THERE
    timestamp: msgspec.Raw = _NOT_THERE
    timestamp_ns: msgspec.Raw = _NOT_THERE


Decode = Callable[[type], list[Any]]
"""Returns the records of a file as structs of that type."""


def read(path: Path) -> FileContents:
    """
    Return what a JSON, JSONL or CSV file holds.

    Raises:
        NoSamplesError: it is whole, but holds no samples of memory.
        RefusedFileError: anything else that is wrong with it.
        OSError: it cannot be read.
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
        raise RefusedFileError(f"it is no {kind[1:].upper()}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return str(error)[:_MAX_REASON]


def _contents(decode: Decode, notes: Sequence[str] = ()) -> FileContents:
    """Return the records that `decode` returns. Raises `RefusedFileError` for a schema that is not known."""
    records: list[_Kind] = decode(_Kind)
    if not any(record.timestamp_ns is not None or record.timestamp is not None for record in records):
        raise NoSamplesError(_NOTHING)
    lowest, highest = stormlog.VERSIONS[0], stormlog.VERSIONS[-1]
    for number, record in enumerate(records, 1):
        if record.schema_version not in (None, *stormlog.VERSIONS):
            version = str(record.schema_version)[:20]
            raise RefusedFileError(f"record {number} has schema {version}; {lowest} to {highest} are read")
    if records[0].schema_version is None and records[0].timestamp_ns is None:
        events = [old.event() for old in decode(Legacy)]
    else:
        events = decode(StormlogEvent)
    return FileContents("Stormlog events", stormlog.recordings(events), [*notes])


def _json(data: bytes, path: Path) -> FileContents:
    if data.lstrip()[:1] != b"{":
        return _list(data)
    document = msgspec.json.decode(data, type=ready(_Document))
    for held in (document.events, document.telemetry_events):
        if bytes(held)[:1] == b"[":
            return _list(bytes(held))
    if document.timestamps and document.allocated:
        return stormlog_timeline.read(data, path)
    if document.timestamp or document.timestamp_ns:
        return _list(b"[%b]" % data)
    raise NoSamplesError(_NOTHING)


def _list(data: bytes) -> FileContents:
    def decode(kind: type) -> list[Any]:
        records: list[Any] = msgspec.json.decode(data, type=ready(list[kind]))  # type: ignore[valid-type]
        return records

    try:
        decode(_Kind)
    except msgspec.ValidationError:  # no list of objects
        msgspec.json.decode(data, type=ready(msgspec.Raw))
        raise NoSamplesError(_NOTHING) from None
    return _contents(decode)


def _jsonl(data: bytes) -> FileContents:
    lines = [line for line in data.splitlines(keepends=True) if line.strip()]
    notes = []
    if lines and not lines[-1].endswith((b"\n", b"\r")):  # it was being written
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
    if rows and not text.endswith(("\n", "\r")) and len(rows[-1]) < len(header):  # it was being written
        rows.pop()
        notes.append(_CUT)
    unknown = {name: None for name in _COUNTERS if name in header}
    read = [(column_index, name, name in _TEXT) for column_index, name in enumerate(header) if name in _READ]
    records = [unknown | _cells(row, read) for row in rows]
    return _contents(lambda kind: _each(records, lambda record: msgspec.convert(record, ready(kind))), notes)


def _each(records: Sequence[Any], decode: Callable[[Any], Any]) -> list[Any]:
    """Return records decoded one by one. Raises `RefusedFileError`, which says which one cannot be."""
    decoded = []
    for number, record in enumerate(records, 1):
        try:
            decoded.append(decode(record))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise RefusedFileError(f"record {number}: {_reason(error)}") from None
    return decoded


def _cells(row: Sequence[str], columns: Iterable[tuple[int, str, bool]]) -> dict[str, object]:
    """Return the cells of a row that hold something; `columns` are (place, name, whether it is text)."""
    width = len(row)
    return {
        name: row[column_index] if is_text else _number(row[column_index])
        for column_index, name, is_text in columns
        if column_index < width and row[column_index] != ""
    }


def _number(text: str) -> object:
    """Return a number, also a whole one that a program wrote as "12.0"; other text as it is."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if value.is_integer() else value
