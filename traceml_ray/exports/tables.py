"""
The tables of a session as columns of plain values, batch by batch, for parquet and CSV.

They are the tables of `store.schema`, with five differences: `steps` has the rows of all ranks one by one,
`layers` has each layer of each window, `batch_sizes` has each step, `ranks` is the table of rank processes,
and `findings` has the findings of the run. JSON text of the file stays JSON. Unknown values are None.
"""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.uneven_work import NAMES, unpacked
from traceml_ray.identity import RankFilter, RankIdentity
from traceml_ray.reports.answers import Answers
from traceml_ray.signals.finding import Finding
from traceml_ray.signals.kind import Kind
from traceml_ray.signals.kinds import KINDS
from traceml_ray.signals.layers.records import LAYERS, LayerSum, LayerWindow
from traceml_ray.signals.throughput.records import StepSizes
from traceml_ray.stages import LEAD_BYTES, SEGMENT_BITS, STAGES
from traceml_ray.store import query
from traceml_ray.store.rank_processes import COLUMNS as OF_RANKS
from traceml_ray.store.rank_processes import Node, RankProcess
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import messages as wire

AT_ONCE = 1 << 16
"""Approximate number of rows in a batch."""
_FETCHED = 10_000
ColumnKind = Literal["integer", "real", "text"]
Batch = dict[str, Any]
"""Columns of the same length, by name: lists or arrays."""


class Chosen(NamedTuple):
    """The rows of `steps` to export."""

    ranks: RankFilter = RankFilter()
    first: int = 0
    last: int = 1 << 62
    limits: Thresholds = Thresholds()
    """Thresholds for findings, if the session has no summary yet."""


class ExportedTable(NamedTuple):
    """A table: the kind of each column, and the function that reads it."""

    columns: Mapping[str, ColumnKind]
    batches: Callable[[SessionFile, Chosen], Iterator[Batch]]


_HOST = tuple(f"host_{stage}_ns" for stage in STAGES)
_LEADS = ("late", "full", "sure")
_STEPS: dict[str, ColumnKind] = {
    "run": "text",
    "rank": "integer",
    "process": "integer",
    "row": "integer",
    "step": "integer",
    "segment": "integer",
    "flags": "integer",
    **dict.fromkeys([f"{stage}_ns" for stage in STAGES], "integer"),
    **dict.fromkeys([*_HOST, *_LEADS], "integer"),
}


def _steps(session: SessionFile, chosen: Chosen) -> Iterator[Batch]:
    """Yield the rows of all processes of known rank, in order of arrival."""
    who = {process.id: process.identity for process in session.processes() if process.identity is not None}
    wanted = {process: identity for process, identity in who.items() if identity.global_rank in chosen.ranks}
    parts, rows = [], 0
    for process, first, *chunk in session.chunks():
        if process not in wanted:
            continue
        identity = wanted[process]
        columns = _chunk(chunk, chosen)
        n = len(columns["step"])
        columns["row"] = columns.pop("at") + first
        columns |= {"process": np.full(n, process), "rank": np.full(n, identity.global_rank)}
        parts.append((columns, [identity.job_id] * n))
        rows += n
        if rows >= AT_ONCE:
            yield _joined(parts)
            parts, rows = [], 0
    if rows:
        yield _joined(parts)


def _chunk(chunk: Sequence[bytes], chosen: Chosen) -> dict[str, Any]:
    """Return the columns of one chunk. `host_…` and leads are None where the rank has no device clock."""
    keys, flags, rows, host, leads = chunk
    key = np.frombuffer(keys, "<i8")
    step = key >> SEGMENT_BITS
    selected = np.flatnonzero((step >= chosen.first) & (step <= chosen.last))
    stages = np.frombuffer(rows, "<i8").reshape(-1, len(STAGES))[selected]
    columns: dict[str, Any] = {
        "at": selected,
        "step": step[selected],
        "segment": (key & (1 << SEGMENT_BITS) - 1)[selected],
    }
    columns["flags"] = np.frombuffer(flags, np.uint8)[selected].astype(np.int64)
    columns |= {f"{stage}_ns": stages[:, number] for number, stage in enumerate(STAGES)}
    host_rows = np.frombuffer(host, "<i8").reshape(-1, len(STAGES))[selected] if host else None
    three = (
        np.frombuffer(leads, np.uint8).reshape(-1, LEAD_BYTES)[selected].astype(np.int64) if leads else None
    )
    columns |= {
        name: None if host_rows is None else host_rows[:, number] for number, name in enumerate(_HOST)
    }
    return columns | {name: None if three is None else three[:, number] for number, name in enumerate(_LEADS)}


def _joined(parts: Sequence[tuple[Mapping[str, Any], list[str]]]) -> Batch:
    joined: Batch = {"run": [run for _, runs in parts for run in runs]}
    for name in _STEPS:
        if name == "run":
            continue
        columns = [(columns[name], len(runs)) for columns, runs in parts]
        if any(column is None for column, _ in columns):
            joined[name] = [
                value
                for column, n in columns
                for value in ([None] * n if column is None else column.tolist())
            ]
        else:
            joined[name] = np.concatenate([column for column, _ in columns])
    return joined


def _stored(table: str, columns: Mapping[str, ColumnKind]) -> ExportedTable:
    """Return a table with the columns of the session file."""

    def batches(session: SessionFile, _: Chosen) -> Iterator[Batch]:
        rows = session.table(table, [*columns])
        while some := list(itertools.islice(rows, _FETCHED)):
            yield {
                name: [_plain(value) for value in column]
                for name, column in zip(columns, zip(*some, strict=True), strict=True)
            }

    return ExportedTable(columns, batches)


def _sizes(session: SessionFile, _: Chosen) -> Iterator[Batch]:
    """Yield the batch sizes of each step of each process."""
    rows = session.table("step_sizes", ["process", *StepSizes.__struct_fields__])
    while some := list(itertools.islice(rows, _FETCHED)):
        pieces = [(process, StepSizes(*values)) for process, *values in some]
        sizes = [unpacked(piece) for _, piece in pieces]
        both = np.concatenate(sizes).T
        yield {
            "process": np.repeat(
                [process for process, _ in pieces], [len(piece_sizes) for piece_sizes in sizes]
            ),
            "step": np.concatenate([np.arange(one.first_step, one.last_step + 1) for _, one in pieces]),
            **{
                name: [None if size < 0 else size for size in column.tolist()]
                for name, column in zip(NAMES, both, strict=True)
            },
        }


def _layers(session: SessionFile, _: Chosen) -> Iterator[Batch]:
    """Yield each layer of each window that is kept of a process. A window without layers gives one row."""
    rows: list[tuple[Any, ...]] = []
    windows = sorted(session.records_of(LAYERS).items())
    for process, window in ((process, window) for process, kept in windows for window in kept):
        values = msgspec.structs.asdict(window)
        about = [int(value) if isinstance(value := values[name], bool) else value for name in _OF_WINDOW]
        of_layers = [msgspec.structs.astuple(one) for one in window.layers] or [(None,) * len(_OF_LAYER)]
        rows += [(process, *about, *layer) for layer in of_layers]
        if len(rows) >= AT_ONCE:
            yield _by_column(rows)
            rows = []
    if rows:
        yield _by_column(rows)


def _findings(session: SessionFile, chosen: Chosen) -> Iterator[Batch]:
    """Yield the findings of the requested run, in order."""
    run = session.run_id()
    findings = Answers(session.path.parent, chosen.limits).answer(query.Findings(run)) if run else []
    rows = [msgspec.structs.asdict(one) for one in findings]
    if rows:
        columns: Batch = {
            name: [_as_text(row[name], kind) for row in rows] for name, kind in _kinds(Finding).items()
        }
        yield {"run": [run] * len(rows), **columns}


def _as_text(value: Any, kind: ColumnKind) -> Any:
    """Return a value that is not plain as JSON text."""
    return (
        msgspec.json.encode(value).decode()
        if kind == "text" and not isinstance(value, (str, NoneType))
        else value
    )


def _by_column(rows: Sequence[Sequence[Any]]) -> Batch:
    return dict(zip(_LAYERS, map(list, zip(*rows, strict=True)), strict=True))


def _plain(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _kinds(struct: type[msgspec.Struct]) -> dict[str, ColumnKind]:
    """Return the kinds of the columns in which a message is stored."""
    return {field.name: _kind(field.type) for field in msgspec.structs.fields(struct)}


def _kind(annotation: Any) -> ColumnKind:
    """Return how a value of a type is stored in the file. Values with parts are JSON."""
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) is Literal:
        return _kind(type(typing.get_args(annotation)[0]))
    parts = [part for part in typing.get_args(annotation) if part is not type(None)] or [annotation]
    if typing.get_origin(annotation) in (list, dict, tuple) or len(parts) > 1:
        return "text"
    while typing.get_origin(parts[0]) is typing.Annotated:
        parts = [typing.get_args(parts[0])[0]]
    return "real" if parts[0] is float else "integer" if parts[0] in (int, bool) else "text"


def _rank_columns() -> dict[str, ColumnKind]:
    hints = typing.get_type_hints(RankProcess)
    identity = _kinds(RankIdentity)
    return {name: identity[name] if name in identity else _kind(hints[name]) for name in OF_RANKS}


def _node_columns() -> dict[str, ColumnKind]:
    hints = typing.get_type_hints(Node)
    return {field.name: _kind(hints[field.name]) for field in dataclasses.fields(Node)}


_PROCESS: dict[str, ColumnKind] = {"process": "integer"}
_SIZES: dict[str, ColumnKind] = _PROCESS | dict.fromkeys(("step", *NAMES), "integer")
_OF_WINDOW = {name: kind for name, kind in _kinds(LayerWindow).items() if name != "layers"}
_OF_LAYER = _kinds(LayerSum)
_LAYERS = _PROCESS | _OF_WINDOW | _OF_LAYER
_NODE: dict[str, ColumnKind] = {"node_id": "text"}
_CLOCK: dict[str, ColumnKind] = {"t_ns": "integer", "offset_ns": "integer", "bound_ns": "integer"}
_UNFOLDED: dict[str, ExportedTable] = {
    "layers": ExportedTable(_LAYERS, _layers),
    "batch_sizes": ExportedTable(_SIZES, _sizes),
}
"""Kinds whose records become several rows each."""


def _of_kind(kind: Kind[Any]) -> ExportedTable:
    """Return the table of a kind of records, with a column for each field."""
    owner = _PROCESS if kind.scope == "process" else _NODE
    return _UNFOLDED.get(kind.exported) or _stored(kind.table, owner | _kinds(kind.record))


TABLES: dict[str, ExportedTable] = {
    "steps": ExportedTable(_STEPS, _steps),
    "ranks": _stored("rank_process", _rank_columns()),
    "nodes": _stored("node", _node_columns()),
    "process_samples": _stored("process_sample", _PROCESS | _kinds(wire.ProcessSample)),
    "clocks": _stored("clock", _NODE | _CLOCK),
    "spans": _stored("span", _PROCESS | _kinds(wire.SpanSum)),
    **{kind.exported: _of_kind(kind) for kind in KINDS.values()},
    "events": _stored("event", _PROCESS | _NODE | _kinds(wire.Event) | {"run": "text"}),
    "findings": ExportedTable({"run": "text", **_kinds(Finding)}, _findings),
    "verdicts": _stored("verdict", {"t_ns": "integer", "body": "text", "run": "text"}),
    "meta": _stored("meta", {"key": "text", "value": "text"}),
}
"""Tables by name. Each becomes a file."""
