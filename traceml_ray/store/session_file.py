"""
Reads the session file, one SQLite database that holds everything of a session.

Live and stored sessions are read in the same way. Rows are stored as they arrived over the wire (one chunk
per batch), so reading them is one `np.frombuffer` per chunk. Every growing list is read with a cursor, the
highest row id seen so far, so unchanged data costs one index look-up.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from traceml_ray.analysis.baseline import Baseline
from traceml_ray.analysis.row_table import from_wire
from traceml_ray.analysis.window import Int64, RankRows
from traceml_ray.signals.kind import Kind, R
from traceml_ray.signals.throughput.records import MAX_SIZES, StepSizes
from traceml_ray.stages import N_STAGES, SEGMENT_BITS
from traceml_ray.store.rank_processes import (
    Node,
    RankProcess,
    current_ranks,
    from_row,
    ledger,
    list_runs,
    newest_of,
    of_run,
    process_labels,
)
from traceml_ray.store.reader import Reader
from traceml_ray.store.results import EventRow, WholeLedger
from traceml_ray.store.samples import SampleReader
from traceml_ray.store.schema import SessionFileError, added, legible
from traceml_ray.wire.codec import ready


class RecordReader(Reader):
    """Reads the records of a signal that the rank processes or nodes of a session have sent."""

    def records(
        self, kind: Kind[R], since: int = 0, processes: Collection[int] | None = None
    ) -> Iterator[tuple[int, int, R]]:
        """
        Yield (cursor, process, record) of each record after cursor `since`, in order of arrival. For a kind
        that keeps only some records, yield the currently kept ones in the order of their slots. `processes`
        are the ids of the rank processes to read; None: all. Raises `SessionFileError`.
        """
        there = {row[1] for row in self._all(f"PRAGMA table_info({kind.table})")}
        fields = [name if name in there else f"NULL AS {name}" for name in kind.fields]
        query = f"SELECT id, {kind.owner}, {', '.join(fields)} FROM {kind.table} WHERE id > ?"
        if processes is not None:
            query += f" AND {kind.owner} IN ({', '.join(str(int(process)) for process in processes)})"
        kept: list[tuple[int, int, R]] = []
        with legible(self.path):
            for cursor, owner, *values in self._iterate(
                f"{query} ORDER BY id", since if kind.keep == "all" else -1
            ):
                if kind.keep == "all":
                    yield cursor, owner, kind.of_row(values)
                else:
                    kept.append((cursor, owner, kind.of_row(values)))
        yield from sorted(kept, key=lambda row: kind.slot(row[2]))

    def records_of(self, kind: Kind[R], processes: Collection[int] | None = None) -> dict[int, list[R]]:
        """
        Return the records of `processes` (ids; None: all): process id → records. Raises
        `SessionFileError`.
        """
        records_of_process: dict[int, list[R]] = {}
        for _, process, record in self.records(kind, processes=processes):
            records_of_process.setdefault(process, []).append(record)
        return records_of_process


_PROBED = 64
_WIDER, _TIMES = 4, 4
"""Factor and number of times by which the search is widened for ranks whose batches came early or late."""
_LONGEST = 4096
"""Largest number of steps that one sum of a span covers. A batch holds the steps of about a second."""
Chunk = tuple[bytes, ...]


class StepReader(Reader):
    """
    Finds the chunks of a step without reading the others. Chunks are stored in order of arrival, which is
    nearly the order of steps, so a binary search finds them. Raises `SessionFileError`.
    """

    def step_chunks(self, processes: Collection[int], step: int) -> dict[int, list[Chunk]]:
        """
        Return the chunks with rows of `step`: process id → chunks. Processes without such chunks are left
        out.
        """
        chunks_of_process: dict[int, list[Chunk]] = {}
        if not processes:
            return chunks_of_process
        middle, reach = self._place(processes, step), _WIDER * len(processes) + _PROBED
        query = (
            "SELECT process, keys, flags, rows, host_rows, leads FROM chunk "
            "WHERE id BETWEEN ? AND ? AND process BETWEEN ? AND ? ORDER BY id"
        )
        for _ in range(_TIMES):
            chunks_of_process = {}
            around = middle - reach, middle + reach, min(processes), max(processes)
            for process, *chunk in self._iterate(query, *around):
                first, last = _ends(chunk[0])
                if process in processes and first <= step <= last:
                    chunks_of_process.setdefault(process, []).append(tuple(chunk))
            if len(chunks_of_process) == len(processes):
                break
            reach *= _WIDER
        return chunks_of_process

    def first_step(self, processes: Collection[int]) -> int | None:
        """Return the first step whose rows are stored one by one; None if there is no row."""
        if not processes:
            return None
        rows = self._probed(self._place(processes, -1))
        return next((_ends(keys)[0] for _, process, keys in rows if process in processes), None)

    def step_spans(self, processes: Collection[int], step: int) -> list[dict[str, Any]]:
        """Return the sums of spans of `processes` that include `step`, the longest first."""
        spans = self._dicts(
            "SELECT process, name, stage, count, total_ns, first_step, last_step FROM span "
            "WHERE last_step >= ?1 AND last_step < ?1 + ?2 AND first_step <= ?1 ORDER BY total_ns DESC",
            *(step, _LONGEST),
        )
        return [span for span in spans if span["process"] in processes]

    def _place(self, processes: Collection[int], step: int) -> int:
        """Return the approximate id of the first chunk that has `step` or a later one."""
        low, high = 0, self._top("chunk")
        while low < high:
            middle = (low + high) // 2
            if self._is_before(middle, processes, step):
                low = middle + 1
            else:
                high = middle
        return low

    def _is_before(self, chunk_id: int, processes: Collection[int], step: int) -> bool:
        """
        Return whether the chunk at `chunk_id` precedes `step`. Processes of earlier runs
        have lower ids.
        """
        rows = self._probed(chunk_id)
        own_keys = next((keys for _, process, keys in rows if process in processes), None)
        if own_keys is not None:
            return _ends(own_keys)[1] < step
        return bool(rows) and rows[0][1] < min(processes)

    def _probed(self, chunk_id: int) -> list[tuple[Any, ...]]:
        return self._all(
            "SELECT id, process, keys FROM chunk WHERE id >= ? ORDER BY id LIMIT ?", chunk_id, _PROBED
        )


def _ends(keys: bytes) -> tuple[int, int]:
    """Return the first and the last step of a chunk, from its keys."""
    both = np.frombuffer(keys, "<i8")[[0, -1]] >> SEGMENT_BITS
    return int(both[0]), int(both[1])


_SIZES = ", ".join(StepSizes.__struct_fields__)


class WorkReader(Reader):
    """Reads the batch sizes of steps. Raises `SessionFileError`."""

    def step_sizes(self, processes: Collection[int], steps: Int64) -> dict[int, list[StepSizes]]:
        """
        Return the stored batch sizes of `processes` (ids) in `steps` ((S,) int64, ascending): process id →
        sizes.
        """
        query = (
            f"SELECT process, {_SIZES} FROM step_sizes "
            "WHERE last_step >= ?1 AND last_step < ?2 AND first_step <= ?3 ORDER BY id"
        )
        pieces: dict[int, list[StepSizes]] = {}
        with legible(self.path):
            for part in np.split(steps, np.flatnonzero(np.diff(steps) > MAX_SIZES) + 1):
                first, last = (int(part[0]), int(part[-1])) if len(part) else (0, -1)
                for process, *values in self._iterate(query, first, last + MAX_SIZES, last):
                    if process in processes:
                        piece = msgspec.convert(values, ready(StepSizes))
                        pieces.setdefault(int(process), []).append(piece)
        return pieces


class SessionFile(SampleReader, StepReader, RecordReader, WorkReader):
    """
    Reads the file of one session, live or stored. Pages and commands do not use it directly: they ask
    `store.query`.

    Methods with `since` return the entries after that cursor, and the new cursor; 0 is the start. Methods
    about ranks cover one run: `run`, or if that is None the newest run that has rows (`run_id`). Each method
    raises `SessionFileError` if the file cannot be read.
    """

    def meta(self) -> dict[str, Any]:
        """
        Return the facts of the session as a whole: name → value, such as `started_at`,
        `status`, `launcher`.
        """
        return {key: json.loads(value) for key, value in self._all("SELECT key, value FROM meta")}

    def cluster(self) -> list[Node]:
        """Return all nodes that the session has seen, in the order of their ids."""
        return [Node.from_row(row) for row in self._all("SELECT * FROM node ORDER BY node_id")]

    def processes(self) -> list[RankProcess]:
        """Return every rank process of every run, in order of first appearance."""
        return [from_row(row) for row in self._dicts("SELECT * FROM rank_process ORDER BY id")]

    def run_id(self) -> str | None:
        """Return the id of the run that `ranks`, `rows` and so on cover; None while no rank has reported."""
        if self.run is not None:
            return self.run
        runs = self._all(
            "SELECT job_id, max(stored > 0) FROM rank_process WHERE job_id NOT NULL "
            "GROUP BY job_id ORDER BY min(id)"
        )
        return newest_of({run: bool(rows) for run, rows in runs}, self.meta())

    def runs(self) -> list[dict[str, Any]]:
        """Return all runs of the session, the oldest first, see `rank_processes.list_runs`."""
        last = self._all(
            "SELECT v.run, v.body FROM verdict v JOIN (SELECT max(id) AS id FROM verdict GROUP BY run) m "
            "ON v.id = m.id"
        )
        labels = {run: json.loads(body)["label"] for run, body in last}
        return list_runs(self.processes(), self.meta(), labels)

    def for_run(self, run: str | None) -> SessionFile:
        """Return a reader of another run over the same connection. It needs no `close`."""
        return SessionFile(self.path, self._connection, run=run)

    def ranks(self) -> dict[int, RankProcess]:
        """Return one process per global rank, all of the same generation (`rank_processes.current_ranks`)."""
        processes = self.processes()
        return current_ranks(of_run(processes, self.run_id()))

    def rows(
        self, since: int = 0, last: int | None = None, most: int | None = None
    ) -> tuple[list[RankRows], int]:
        """
        Return the rows after cursor `since`, as one `RankRows` for each rank that has any, and the new
        cursor.

        Args:
            since: cursor of an earlier call; if negative, number of batches before the end.
            last: largest number of rows of each rank, the newest ones; None: all.
            most: largest number of batches to read. Call again until the cursor stays the same. None: all.
        """
        top = self._top("chunk")
        since = max(0, top + since) if since < 0 else since
        top = top if most is None else min(top, since + most)
        if top <= since:
            return [], since
        processes = self.processes()
        labels = process_labels(self.cluster(), processes)
        ranks = current_ranks(of_run(processes, self.run_id()))
        columns = self._columns([*ranks.values()], since, top, last)
        rank_rows = [
            RankRows(rank, labels[s.id], *columns[s.id], s.group, s.strategy, s.id, s.role)
            for rank, s in ranks.items()
            if s.id in columns
        ]
        return rank_rows, top

    def chunks(self) -> Iterator[tuple[Any, ...]]:
        """
        Yield (process, first row, keys, flags, rows, host rows, leads) of each batch, in
        order of arrival.
        """
        yield from self._iterate(
            "SELECT process, first_row, keys, flags, rows, host_rows, leads FROM chunk ORDER BY id"
        )

    def chunks_after(self, since: int, until: int) -> Iterator[tuple[Any, ...]]:
        """Yield (id, process, keys, flags, rows, host rows) of the batches after id `since` up to `until`."""
        yield from self._iterate(
            "SELECT id, process, keys, flags, rows, host_rows FROM chunk "
            "WHERE id > ? AND id <= ? ORDER BY id",
            *(since, until),
        )

    def folded_counts(self) -> dict[int, int]:
        """
        Return the number of rows that are kept as sums only: process id → count. Processes without such rows
        are left out.
        """
        return dict(self._all("SELECT process, sum(n) FROM rollup GROUP BY process"))

    def table(self, name: str, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """
        Yield `columns` of each row of a table of `schema`, in order of arrival. A column that an older
        version of this package did not write is None; a table that it did not write has no row.
        """
        there = {row[1] for row in self._all(f"PRAGMA table_info({name})")}
        asked = ", ".join(column if column in there else f"NULL AS {column}" for column in columns)
        if there:
            yield from self._iterate(f"SELECT {asked} FROM {name} ORDER BY rowid")

    def last_chunk(self) -> int:
        """Return the id of the newest batch, which is the cursor of `rows` at its end; 0 if there is none."""
        return self._top("chunk")

    def newest_chunks(self, rows: int) -> int:
        """Return how many of the newest batches of the session hold about `rows` rows: at least one."""
        ((mean,),) = self._all("SELECT avg(n) FROM (SELECT n FROM chunk ORDER BY id DESC LIMIT 1000)")
        return max(1, int(rows / max(1.0, mean or 1.0)))

    def spans(self, first: int = 0, last: int = 1 << 62, process: int | None = None) -> list[dict[str, Any]]:
        """
        Return the spans over the steps `first` to `last`, summed for each process, name and stage, the
        longest first. `process` is the id of the only process to read; None: all of the run. A stored sum
        that extends beyond these steps counts by the share of its steps that lies inside.
        """
        inside = "max(0, min(d.last_step, ?2) - max(d.first_step, ?1) + 1.0)"
        share = f"{inside} / (d.last_step - d.first_step + 1)"
        sums = [f"CAST(round(sum(d.{name} * {share})) AS INT) AS {name}" for name in ("count", "total_ns")]
        sums.append(f"CAST(sum(d.bytes * {share}) AS INT) AS bytes")
        return self._dicts(
            f"SELECT s.global_rank AS rank, d.process AS process, d.name, d.stage, {', '.join(sums)}, "
            "max(d.max_ns) AS max_ns, min(d.first_step) AS first_step, max(d.last_step) AS last_step "
            "FROM span d CROSS JOIN rank_process s ON d.process = s.id "  # in this order, by the index
            "WHERE (s.job_id IS NULL OR s.job_id = ?3) AND s.id = coalesce(?4, s.id) AND d.last_step >= ?1 "
            "GROUP BY 1, 2, 3, 4 ORDER BY total_ns DESC",
            *(first, last, self.run_id(), process),
        )

    def groups(self) -> list[dict[str, Any]]:
        """Return count and bytes of the spans of the run, summed for each process, name and process group."""
        return self._dicts(
            f"SELECT d.process AS process, d.name, d.process_group, {added('d.count')} AS count, "
            f"{added('d.bytes')} AS bytes, min(d.first_step) AS first_step, "
            "max(d.last_step) AS last_step FROM span d CROSS JOIN rank_process s ON d.process = s.id "
            "WHERE s.job_id IS NULL OR s.job_id = ?1 GROUP BY 1, 2, 3",
            self.run_id(),
        )

    def events(
        self, since: int = 0, *, brief: bool = False, most: int | None = None
    ) -> tuple[list[EventRow], int]:
        """
        Return the newest `most` events (None: all) of the run and of nodes, the oldest first, and the new
        cursor. `brief` leaves out events whose message is a file (stacks).
        """
        top = self._top("event")
        if top <= since:
            return [], since
        which = "AND t.kind != 'stacks'" if brief else ""
        query = (
            f"SELECT {_EVENT} FROM event t LEFT JOIN rank_process s ON s.id = t.process "
            f"WHERE t.id > ?1 AND t.id <= ?2 AND coalesce(t.run, s.job_id, ?3) IS ?3 {which} "
            "ORDER BY t.id DESC LIMIT ?4"
        )
        rows = self._dicts(query, since, top, self.run_id(), -1 if most is None else most)[::-1]
        return [EventRow(**{**row, "data": json.loads(row["data"])}) for row in rows], top

    def run_events(self) -> list[tuple[Any, ...]]:
        """Return (run, kind, t_ns, message) of all events that belong to a run, not to a rank or a node."""
        return self._all("SELECT run, kind, t_ns, message FROM event WHERE run IS NOT NULL")

    def verdicts(self, since: int = 0) -> tuple[list[dict[str, Any]], int]:
        """
        Return each change of the run's live verdict after cursor `since`, with `t_ns`,
        and the new cursor.
        """
        top = self._top("verdict")
        if top <= since:
            return [], since
        query = "SELECT t_ns, body FROM verdict WHERE id > ? AND id <= ? AND run = ? ORDER BY id"
        rows = self._all(query, since, top, self.run_id())
        return [{"t_ns": t, **json.loads(body)} for t, body in rows], top

    def ledger(self) -> WholeLedger:
        """Return where each produced row of the session is, see `rank_processes.ledger`."""
        folded = self.meta().get("folded", {}).get("rows", 0)
        return ledger(self.processes(), self.run_id(), folded)

    def baseline(self) -> Baseline | None:
        """Return the baseline that the running run was judged by; None if it had none."""
        kept = self.meta().get("baselines", {}).get(self.run_id())
        return None if kept is None else msgspec.convert(kept, ready(Baseline))

    def kept(self) -> bytes | None:
        """
        Return the stored reduction of the run's compacted rows (`history_reader.pack`); None if there is
        none.
        """
        bodies = self._all("SELECT body FROM kept WHERE run = ?", self.run_id())
        return bytes(bodies[0][0]) if bodies else None

    def folded(self) -> dict[int, Folded]:
        """Return the rows that are kept as sums only (`retention`): process id → sums."""
        sums = self._iterate("SELECT process, n, first_key, last_key, sums FROM rollup ORDER BY process, id")
        return {process: _folded(of_process) for process, of_process in groupby(sums, key=itemgetter(0))}

    def copy_to(self, path: Path) -> None:
        """Copy the file in its current state into the empty file `path`."""
        try:
            with contextlib.closing(sqlite3.connect(path)) as target:
                self._connection.backup(target)
                target.execute("PRAGMA journal_mode=DELETE")  # one file, with no `-wal` beside it
        except sqlite3.Error as error:
            raise SessionFileError(f"{self.path}: cannot copy the session file: {error}") from error

    def _columns(
        self, processes: list[RankProcess], since: int, top: int, last: int | None
    ) -> dict[int, Columns]:
        """Return the rows of some processes in the chunks after `since` up to `top`: process id → columns."""
        # One pass over all ranks: an index by process would cost more with every row that is written.
        query = (
            "SELECT process, keys, flags, rows, host_rows, leads FROM chunk "
            "WHERE id > ? AND id <= ? AND process BETWEEN ? AND ? ORDER BY id DESC"
        )
        due = {s.id: _ALL if last is None else min(last, s.stored) for s in processes if s.stored}
        chunks: dict[int, list[tuple[bytes, ...]]] = {process: [] for process in due}
        for process, *chunk in self._iterate(query, since, top, min(due, default=0), max(due, default=-1)):
            if process not in due:
                continue
            chunks[process].append(tuple(chunk))
            due[process] -= len(chunk[1])
            if due[process] <= 0:
                del due[process]
                if not due:
                    break
        newest = slice(None if last is None else -last, None)
        return {
            process: (keys[newest], flags[newest], rows[newest])
            for process, of_process in chunks.items()
            if of_process
            for keys, flags, rows in [columns_of(of_process[::-1])]
        }


class Folded(NamedTuple):
    """Compacted rows of a rank process: m sums of consecutive rows, the oldest first."""

    counts: np.ndarray[Any, Any]
    """Number of rows in each sum: (m,) int64."""
    first_keys: np.ndarray[Any, Any]
    """Key of the first row of each sum: (m,) int64."""
    last_keys: np.ndarray[Any, Any]
    """Key of the last row of each sum: (m,) int64."""
    sums: np.ndarray[Any, Any]
    """Time in each stage, over the rows of each sum: (m, 6) int64 ns."""


def _folded(rows: Iterable[tuple[Any, ...]]) -> Folded:
    _, counts, first_keys, last_keys, sums = zip(*rows, strict=True)
    all_sums = np.frombuffer(b"".join(sums), "<i8").reshape(-1, N_STAGES)
    return Folded(np.array(counts), np.array(first_keys), np.array(last_keys), all_sums)


_ALL = 1 << 62
_EVENT = ", ".join(
    "s.global_rank AS rank" if name == "rank" else f"t.{name}" for name in EventRow.__struct_fields__
)
Columns = tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]


def columns_of(chunks: Iterable[Sequence[bytes | None]]) -> Columns:
    """
    Return the rows of chunks, concatenated: keys (n,) int64, flags (n,) uint8 and times in ns, (n, 6) int64.
    If a chunk has columns of the host, the times include these (`analysis.row_table`).
    """
    keys, flags, *rest = zip(*((column or b"" for column in chunk) for chunk in chunks), strict=True)
    rows = from_wire([*zip(*rest, strict=True)])
    return np.frombuffer(b"".join(keys), "<i8"), np.frombuffer(b"".join(flags), np.uint8), rows
