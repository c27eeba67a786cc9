"""
torch's table of operations, `key_averages()`, over the traces of many ranks. Also writes it as JSON, CSV or
parquet.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any, Literal

import msgspec
import numpy as np

from traceml_ray.identity import RankFilter
from traceml_ray.traces.sources import Source
from traceml_ray.traces.trace import DEVICE, MEMORY, Ints, Nesting, Trace, nest, read_trace

Kind = Literal["operation", "range", "runtime", "python", "device", "memory"]
"""
`operation`: an operation of torch. `range`: a range with a given name (`record_function`, a collective of
gloo). `runtime`: a call of CUDA's runtime. `python`: a Python function, if stacks are recorded. `device`:
work of a device. `memory`: memory allocated or freed outside of all these.
"""
_KINDS: dict[str, Kind] = {
    "user_annotation": "range",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
    "python_function": "python",
    **dict.fromkeys(DEVICE, "device"),
}
_STEP, _STEPS = "ProfilerStep", "ProfilerStep#"
"""Each name is of one step. The table sums them in one row."""


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of one operation on one rank, over all its calls. None: not known, or not recorded."""

    node_id: str | None
    """Ray's id of the node."""
    node: str | None
    """Label of the node, or name of the host."""
    rank: int | None
    name: str
    kind: Kind
    input_shapes: str | None
    """Input shapes as JSON. Only in a table by shapes."""
    calls: int
    self_cpu_ms: float
    """Time of threads in ms, without the operations inside."""
    cpu_ms: float
    """Time of threads in ms, with the operations inside."""
    self_device_ms: float | None = None
    """Time of the device in ms, without the operations inside."""
    device_ms: float | None = None
    """Time of the device in ms, with the operations inside."""
    self_cpu_bytes: int | None = None
    """Host memory allocated and not freed, in bytes, without the operations inside."""
    cpu_bytes: int | None = None
    """Host memory allocated and not freed, in bytes, with the operations inside."""
    self_device_bytes: int | None = None
    """Device memory allocated and not freed, in bytes, without the operations inside."""
    device_bytes: int | None = None


NUMBERS = tuple(
    name for name in Operation.__struct_fields__ if name == "calls" or name.endswith(("_ms", "_bytes"))
)
"""Columns by which the table can be sorted."""


class ColumnError(ValueError):
    """The table cannot be sorted by that column."""


def kind_of(category: str) -> Kind:
    """Return the kind of operation for a category of the trace."""
    return _KINDS.get(category, "operation")


def key_averages(sources: Iterable[Source], by_shape: bool = False) -> list[Operation]:
    """Return the totals of each operation on each rank, the longest first. Raises TraceError."""
    operations = []
    for source in sources:
        trace = read_trace(source.path, source.window)
        operations += operations_of_trace(source, trace, nest(trace), by_shape)
    return sort(operations, "self_cpu_ms")


def operations_of_trace(
    source: Source, trace: Trace, nesting: Nesting, by_shape: bool = False
) -> list[Operation]:
    """Return the totals of each operation of one trace."""
    counted = np.flatnonzero(nesting.counted)
    keys: dict[tuple[str, Kind, str | None], int] = {}
    names = [f"{_STEP}*" if name.startswith(_STEPS) else name for name in trace.names]
    kinds = [kind_of(category) for category in trace.categories]
    shapes = [*trace.shapes, None]  # the last element, at index -1, is for operations without shapes
    columns = trace.name[counted], trace.category[counted], trace.shape[counted]
    groups = [
        keys.setdefault((names[name], kinds[category], shapes[shape] if by_shape else None), len(keys))
        for name, category, shape in zip(*(column.tolist() for column in columns), strict=True)
    ]

    def summed(values: Ints) -> list[int]:
        sums = np.zeros(len(keys), np.int64)
        np.add.at(sums, groups, values[counted])
        totals: list[int] = sums.tolist()
        return totals

    sums = {column: summed(values) for column, values in _columns(trace, nesting).items()}
    operations = [
        _operation(source, name, kind, input_shapes, {column: sums[column][index] for column in sums})
        for (name, kind, input_shapes), index in keys.items()
    ]
    return operations + _outside(source, trace, nesting)


def _columns(trace: Trace, nesting: Nesting) -> dict[str, Ints]:
    """Return the values of each operation, by column of the table. Times are in ns."""
    device, memory = bool(trace.on_device.any()), len(trace.memory.t_ns) > 0
    columns = {
        "calls": np.ones(len(trace), np.int64),
        "self_cpu_ms": nesting.self_host_ns,
        "cpu_ms": nesting.host_ns,
    }
    if device:
        columns |= {"self_device_ms": nesting.self_device_ns, "device_ms": nesting.device_ns}
    if memory:
        columns |= {"self_cpu_bytes": nesting.self_memory[:, 0], "cpu_bytes": nesting.memory[:, 0]}
    if device and memory:
        columns |= {"self_device_bytes": nesting.self_memory[:, 1], "device_bytes": nesting.memory[:, 1]}
    return columns


def _outside(source: Source, trace: Trace, nesting: Nesting) -> list[Operation]:
    """Return memory that was allocated outside of all operations, as an operation."""
    host, device = nesting.outside.tolist()
    sums = {
        "calls": nesting.outside_calls,
        "self_cpu_ms": 0,
        "cpu_ms": 0,
        "self_cpu_bytes": host,
        "cpu_bytes": host,
    }
    if trace.on_device.any():
        sums |= {"self_device_ms": 0, "device_ms": 0, "self_device_bytes": device, "device_bytes": device}
    return [_operation(source, MEMORY, "memory", None, sums)] if nesting.outside_calls else []


def _operation(
    source: Source, name: str, kind: Kind, input_shapes: str | None, sums: Mapping[str, int]
) -> Operation:
    who = {"node_id": source.node_id, "node": source.node, "rank": source.rank}
    values = {column: value / 1e6 if column.endswith("_ms") else value for column, value in sums.items()}
    return Operation(name=name, kind=kind, input_shapes=input_shapes, **who, **values)  # type: ignore[arg-type]


def sort(operations: Iterable[Operation], column: str) -> list[Operation]:
    """Return operations sorted by a column, largest first and unknown last. Raises ColumnError."""
    if column not in NUMBERS:
        known = ", ".join(NUMBERS)
        raise ColumnError(f"there is no column {column[:40]!r} to sort by; choose one of {known}")
    values = attrgetter(column)
    return sorted(operations, key=lambda operation: (values(operation) is None, -(values(operation) or 0)))


def select(
    operations: Iterable[Operation],
    names: str | None = None,
    ranks: RankFilter | None = None,
    top: int | None = None,
) -> list[Operation]:
    """
    Return a selection of the operations, in the same order.

    Args:
        operations: of any ranks.
        names: part of the name, or a pattern with `*`, `?` and `[...]` for the whole name.
        ranks: only operations of these ranks.
        top: only the first operations, up to this number.
    """
    chosen = [
        operation
        for operation in operations
        if (names is None or names in operation.name or fnmatchcase(operation.name, names))
        and (ranks is None or (operation.rank is not None and operation.rank in ranks))
    ]
    return chosen if top is None else chosen[:top]


COLUMNS = Operation.__struct_fields__


class FormatError(RuntimeError):
    """A file of this kind cannot be written here. The message says what is missing."""


def to_json(value: object) -> bytes:
    """Return operations as a JSON list of objects, by the names of the columns. Unknown values are null."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def to_csv(operations: Sequence[Operation]) -> bytes:
    """Return a CSV table with a header. Cells of unknown values are empty."""
    file = io.StringIO(newline="")
    rows = csv.writer(file)
    rows.writerow(COLUMNS)
    rows.writerows(msgspec.structs.astuple(operation) for operation in operations)
    return file.getvalue().encode(errors="replace")


def to_parquet(operations: Sequence[Operation]) -> bytes:
    """Return the table as parquet. Raises FormatError if pyarrow is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise FormatError(f"parquet needs pyarrow (pip install pyarrow): {error}") from None
    file = pyarrow.BufferOutputStream()
    schema = pyarrow.schema([(name, _type(pyarrow, name)) for name in COLUMNS])
    columns = [[getattr(operation, name) for operation in operations] for name in COLUMNS]
    pyarrow.parquet.write_table(pyarrow.table(columns, schema=schema), file)
    data: bytes = file.getvalue().to_pybytes()
    return data


def _type(pyarrow: Any, name: str) -> Any:
    if name == "rank" or (name in NUMBERS and not name.endswith("_ms")):
        return pyarrow.int64()
    return pyarrow.float64() if name in NUMBERS else pyarrow.string()
