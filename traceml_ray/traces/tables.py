"""A table of operations as a file: JSON, CSV, parquet."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import msgspec

from traceml_ray.traces.key_averages import NUMBERS, Operation

COLUMNS = Operation.__struct_fields__


class FormatError(RuntimeError):
    """A file of this kind cannot be written here; the message says what is missing."""


def to_json(value: object) -> bytes:
    """Return operations as a list of objects, by the names of the columns; what is not known is null."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def to_csv(operations: Sequence[Operation]) -> bytes:
    """Return a table with a header; a cell of what is not known is empty."""
    file = io.StringIO(newline="")
    rows = csv.writer(file)
    rows.writerow(COLUMNS)
    rows.writerows(msgspec.structs.astuple(operation) for operation in operations)
    return file.getvalue().encode(errors="replace")


def to_parquet(operations: Sequence[Operation]) -> bytes:
    """Return the same as parquet. Raises FormatError where pyarrow is not installed."""
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
