"""Writes a session as parquet, as CSV, or as one trace. A file appears only when it is complete."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from traceml_ray.exports.step_trace import write_step_trace
from traceml_ray.exports.tables import TABLES, Batch, Chosen, ExportedTable
from traceml_ray.files import appearing
from traceml_ray.store.query import QueryError
from traceml_ray.store.rank_processes import run_names
from traceml_ray.store.schema import legible
from traceml_ray.store.session import DATABASE
from traceml_ray.store.session_file import SessionFile
from traceml_ray.text import advance

TRACE_SUFFIX = ".perfetto.json.gz"


class ExportError(RuntimeError):
    """The session cannot be exported like this. The message says why and what to do."""


def export(
    folder: Path,
    kind: str,
    out: Path,
    chosen: Chosen,
    run: str | None = None,
) -> list[Path]:
    """
    Write the current state of the session in `folder`. Returns the files.

    Args:
        folder: folder of the session.
        kind: parquet, csv or perfetto.
        out: folder of the tables, made if it does not exist, or path of the trace. Existing files are
            replaced.
        chosen: ranks and steps of the table `steps`. Other tables are exported completely.
        run: id or name of the run of the trace. None: the newest.

    Raises:
        ExportError: a required package is not installed, there is no step, or `out` cannot be used.
        SessionFileError: the session file cannot be read.
        QueryError: there is no such run.
        OSError: the files cannot be written.
    """
    path = folder / DATABASE
    _check_target(out, kind, path)
    with SessionFile(path) as file, legible(path), file.at_one_moment():
        session = file.for_run(_run_id(file, run))
        if kind == "perfetto":
            with appearing(out) as temporary:
                if not write_step_trace(session, temporary, chosen):
                    raise ExportError(f"{path}: there is no step to draw")
            return [out]
        write = {"parquet": _parquet, "csv": _csv}[kind]()
        out.mkdir(parents=True, exist_ok=True)
        files = []
        for number, (name, table) in enumerate(TABLES.items()):
            advance(f"writing {name}.{kind}", number / len(TABLES))
            files.append(out / f"{name}.{kind}")
            with appearing(files[-1]) as temporary, _table_in_errors(name):
                write(temporary, table, table.batches(session, chosen))
        return files


def _check_target(out: Path, kind: str, session: Path) -> None:
    """Refuse a target that cannot be written, or must not be. Raises ExportError."""
    wrong = ""
    if out == Path("-"):
        wrong = "files are written, not stdout"
    elif kind == "perfetto" and out.is_dir():
        wrong = "it is a folder, and a trace is one file"
    elif kind == "perfetto" and out.exists() and out.samefile(session):
        wrong = "it is the session itself"
    elif kind != "perfetto" and out.exists() and not out.is_dir():
        wrong = "it is a file, and the tables need a folder"
    elif not out.parent.is_dir() and kind == "perfetto":
        wrong = f"there is no folder {out.parent}"
    if wrong:
        raise ExportError(f"cannot export to {out}: {wrong}; choose another --output")


def _run_id(session: SessionFile, name: str | None) -> str | None:
    names = run_names(session.processes(), session.meta())
    matching = [run for run, run_name in names.items() if name in (run, run_name)]
    if name is not None and not matching:
        raise QueryError(f"there is no run {name!r} in {session.path}")
    return matching[-1] if matching else None


def _csv() -> Callable[[Path, ExportedTable, Iterator[Batch]], None]:
    def write(path: Path, table: ExportedTable, batches: Iterator[Batch]) -> None:
        with path.open("w", newline="", encoding="utf-8", errors="replace") as file:
            rows = csv.writer(file)
            rows.writerow(table.columns)
            for batch in batches:
                rows.writerows(zip(*(batch[name] for name in table.columns), strict=True))

    return write


def _parquet() -> Callable[[Path, ExportedTable, Iterator[Batch]], None]:
    """Return the function that writes a table. Raises ExportError if pyarrow is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ExportError(f"parquet needs pyarrow (pip install pyarrow): {error}") from None
    kinds: dict[str, Any] = {
        "integer": pyarrow.int64(),
        "real": pyarrow.float64(),
        "text": pyarrow.string(),
    }

    def write(path: Path, table: ExportedTable, batches: Iterator[Batch]) -> None:
        schema = pyarrow.schema([(name, kinds[kind]) for name, kind in table.columns.items()])
        with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
            for batch in batches:
                columns = [_column(pyarrow, batch[field.name], field) for field in schema]
                writer.write_batch(pyarrow.record_batch(columns, schema=schema))

    return write


class _KindError(Exception):
    """A value does not have the type of its column."""


def _column(pyarrow: Any, values: Any, field: Any) -> Any:
    try:
        return pyarrow.array(values, field.type)
    except (TypeError, ValueError, OverflowError) as error:
        raise _KindError(f"{field.name!r} has a value that is not {field.type}: {error}") from error


@contextmanager
def _table_in_errors(name: str) -> Iterator[None]:
    """Add the table's name to errors about a value that does not fit its column."""
    try:
        yield
    except _KindError as error:
        text = f"table {name!r}: column {error}; `--format csv` takes any value"
        raise ExportError(text) from error
