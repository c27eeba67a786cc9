"""
Keeps a session file within a size limit: the oldest rows are compacted.

Compacted rows still count as stored. For each process, sums of about ten seconds are kept, so the number of
steps, their mean and the time line still cover these rows. For each run, the reduction that reports make of
rows is kept (`history_reader.pack`): its statistics, verdict and episodes continue from it.

Named spans are added up. Of old samples, one in ten is kept, and for each process the sample with the most
memory. Of old memory samples, the first of each ten seconds is kept too, and those with values that are
measured only now and then. Of clock measurements, one in ten minutes is kept.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from traceml_ray.analysis.step_history import Reduction, begun
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import RankRows
from traceml_ray.signals.kinds import KINDS
from traceml_ray.stages import N_STAGES
from traceml_ray.store.history_reader import MAX_RANKS, pack, unpack
from traceml_ray.store.rank_processes import by_run, current_ranks, process_labels, training, world_size
from traceml_ray.store.schema import LISTS, NONSENSE, added, insert, write
from traceml_ray.store.session_file import Columns, SessionFile, columns_of

CHUNKS = 10
"""
Number of chunks of a rank process that are added up in one sum. An agent sends about one
chunk a second.
"""
SUMS = 1 << 17
"""
Largest number of sums in a file, shared equally by its rank processes. Beyond it, neighbouring sums are added
up.
"""
EVENTS = 100_000
"""Number of newest events that stay when the file is beyond its limit. Only a run in trouble has more."""
MAX_RUNS = 16
"""Largest number of runs whose reduction is kept; the newest ones."""
MAX_SLICE = 1 << 16
"""Largest number of chunks read at a time."""
SLICE_BYTES = 1 << 26
"""Largest size of the rows read at a time, in bytes. The database is locked during the read."""
_OF_MEMORY = "FROM memory_sample WHERE id > ?1 AND id <= ?2 GROUP BY process, device"
_MOST_MEMORY = (
    f"SELECT id FROM (SELECT id, max(coalesce(peak_bytes, allocated_bytes, rss_bytes)) {_OF_MEMORY})"
)
_TEN_SECONDS = f"SELECT min(id) {_OF_MEMORY}, t_ns / 10000000000"
_TEN_MINUTES = "SELECT min(id) FROM clock WHERE id > ?1 AND id <= ?2 GROUP BY node_id, t_ns / 600000000000"
_THIN_MEMORY = f"uss_bytes IS NULL AND id NOT IN ({_MOST_MEMORY}) AND id NOT IN ({_TEN_SECONDS})"


class Retention:
    """
    Compacts the oldest data of the session file at `path` once the file exceeds `limit` bytes.

    `absorb` reads rows, one slice at a time, and keeps their reduction in memory. `fold` writes the reduction
    and deletes the rows in one transaction. After a crash before that, the rows are still in the file and are
    read again. `cursors` says how far the samples of each table are thinned, and how many `rows` were
    compacted. `failed` is an error in keeping or reading a run's statistics; these statistics are then kept
    aside.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        limit: int,
        cursors: dict[str, int],
        thresholds: Thresholds,
    ) -> None:
        self.cursors = cursors
        self.failed: Exception | None = None
        self._connection = connection
        self._session = SessionFile(path, connection)
        self._limit = limit
        self._thresholds = thresholds
        self._runs: dict[str, _Run] = {}
        self._to = 0
        """Id of the last chunk that was absorbed."""
        self._left: dict[int, int] = {}
        """Newest chunk read of each rank process. It is absorbed only once a newer one has been read."""
        self._newest: dict[int, int] = {}
        """Newest chunk of each rank process in the file."""
        self._ids: list[tuple[int]] = []
        self._sums: list[tuple[Any, ...]] = []
        self._rows = self._bytes = 0
        """Number and size (bytes) of the rows absorbed since the last `fold`."""
        self._body_bytes = 0

    def due(self) -> bool:
        """Whether the file is beyond its limit. Free pages inside the file count as room."""
        pages = self._one("PRAGMA page_count") - self._one("PRAGMA freelist_count")
        return bool(pages * self._one("PRAGMA page_size") > self._limit)

    def absorb(self, processes: int) -> bool:
        """
        Read the next slice of rows, while `processes` rank processes report. Return whether it is time to
        call `fold`.

        The last chunk of each rank process stays in the file, so that a reader of the rows sees every rank.
        """
        slice_ = min(CHUNKS * max(1, processes), MAX_SLICE)
        newest = self._one("SELECT max(id) FROM chunk") or 0  # what is being looked at stays
        chunks_read, size = [], 0
        for chunk in self._chunks("id > ? AND id < ? ORDER BY id LIMIT ?", self._to, newest - slice_, slice_):
            chunks_read.append(chunk)
            size += chunk.size
            if size >= SLICE_BYTES:
                break
        if not chunks_read:
            return True
        newest_of = self._newest_chunks()
        last = {chunk.process: newest_of[chunk.process] for chunk in chunks_read}
        before = [self._left[process] for process in last if process in self._left]
        chunks = [chunk for chunk_id in sorted(before) for chunk in self._chunks("id = ?", chunk_id)]
        chunks += [chunk for chunk in chunks_read if chunk.id != last[chunk.process]]
        by_process: dict[int, list[_Chunk]] = {}
        for chunk in chunks:
            by_process.setdefault(chunk.process, []).append(chunk)
        self._keep(by_process)
        for process in last:
            self._left.pop(process, None)
        self._left.update(
            (chunk.process, chunk.id) for chunk in chunks_read if chunk.id == last[chunk.process]
        )
        self._sums += _sums(by_process)
        self._ids += [(chunk.id,) for chunk in chunks]
        self._rows += sum(chunk.n for chunk in chunks)
        self._bytes += sum(chunk.size for chunk in chunks)
        self._to = chunks_read[-1].id
        # What is written should be small beside what is deleted.
        return self._bytes >= max(self._limit // 64, min(4 * self._body_bytes, self._limit // 4))

    def _newest_chunks(self) -> dict[int, int]:
        """Return the last chunk of each rank process. Reads only the chunks added since the previous call."""
        query = "SELECT process, max(id) FROM chunk WHERE id > ? GROUP BY process"
        self._newest.update(self._connection.execute(query, (max(self._newest.values(), default=0),)))
        return self._newest

    def _chunks(self, where: str, *values: int) -> Iterator[_Chunk]:
        query = f"SELECT {', '.join(_Chunk._fields)} FROM chunk WHERE {where}"
        return (_Chunk(*row) for row in self._connection.execute(query, values))

    def fold(self) -> dict[str, int]:
        """
        Write the reduction of the absorbed rows and delete these rows, inside the caller's transaction.
        Return the new cursors.
        """
        self._connection.execute("DELETE FROM event WHERE id <= (SELECT max(id) FROM event) - ?", (EVENTS,))
        if not self._bytes:
            return self.cursors
        newest = self._one("SELECT max(id) FROM chunk")
        write(self._connection, insert("rollup"), self._sums)
        self._merge_sums()
        self._connection.executemany("DELETE FROM chunk WHERE id = ?", self._ids)
        self._write_kept()
        return {"rows": self.cursors.get("rows", 0) + self._rows, **self._thin(self._to / newest)}

    def folded(self, cursors: dict[str, int]) -> None:
        """Note that the result of `fold`, with its `cursors`, is on disk."""
        self.cursors, self._sums, self._ids = cursors, [], []
        self._rows = self._bytes = 0
        for state in self._runs.values():
            state.changed = state.refused = False

    def _keep(self, by_process: dict[int, list[_Chunk]]) -> None:
        """Reduce the rows of chunks. Of a run whose reduction fails, only the sums are kept."""
        processes = self._session.processes()
        labels = process_labels(self._session.cluster(), processes)
        for run, known in by_run(processes).items():
            ranks = {rank: process for rank, process in current_ranks(known).items() if process.stored}
            ranks_rows = [
                RankRows(rank, labels[s.id], *_columns(by_process[s.id]), s.group, s.strategy, s.id, s.role)
                for rank, s in ranks.items()
                if s.id in by_process
            ]
            if not ranks_rows or len(ranks) > MAX_RANKS:
                continue
            state = self._state(run, {rank: process.id for rank, process in ranks.items()})
            state.changed = True
            try:
                if state.kept is not None:
                    lack = (
                        ranks.keys()
                        - state.kept.history.reported()
                        - {rank_rows.rank for rank_rows in ranks_rows}
                    )
                    state.kept.add(
                        ranks_rows, state.processes, len(lack), training(ranks, world_size(ranks, None))
                    )
            except NONSENSE as error:
                state.kept, self.failed = None, error

    def _state(self, run: str, processes: dict[int, int]) -> _Run:
        """
        Return the kept state of `run`. It starts empty if the run's processes have changed, or the stored
        state cannot be read.
        """
        state = self._runs.get(run)
        if state is None or state.processes != processes:
            session = self._session.for_run(run)
            newest, _ = session.rows(last=1)
            kept, refused = None, False
            try:
                kept = unpack(session.kept(), newest)
            except ValueError as error:
                self.failed, refused = error, True
            kept = kept or begun(newest, self._thresholds, session.baseline())
            state = self._runs[run] = _Run(processes, kept if kept.processes == processes else None, refused)
            while len(self._runs) > MAX_RUNS:
                del self._runs[next(iter(self._runs))]
        return state

    def _write_kept(self) -> None:
        self._body_bytes = 0
        aside = "UPDATE kept SET run = run || ' unreadable ' || id WHERE run = ?"
        for run, state in self._runs.items():
            if not state.changed or state.kept is None:  # what was kept before it failed stays
                continue
            try:
                body = pack(state.kept)
            except NONSENSE as error:
                state.kept, self.failed = None, error
                continue
            self._body_bytes += len(body)
            if state.refused:
                self._connection.execute(aside, (run,))
            self._connection.execute("REPLACE INTO kept VALUES(NULL, ?, ?)", (run, body))
        newest = "SELECT id FROM kept ORDER BY id DESC LIMIT ?"
        self._connection.execute(f"DELETE FROM kept WHERE id NOT IN ({newest})", (MAX_RUNS,))

    def _merge_sums(self) -> None:
        """Add up neighbouring sums of each rank process if there are more than `SUMS` in all."""
        most = min(SUMS, self._limit // 2048)
        if self._one("SELECT count(*) FROM rollup") <= most:
            return
        total = dict(self._connection.execute("SELECT process, sum(n) FROM rollup GROUP BY 1").fetchall())
        share = max(1, most // 4 // len(total))
        query = f"SELECT {', '.join(LISTS['rollup'])} FROM rollup ORDER BY process, id"
        merged = []
        for process, sums in groupby(self._connection.execute(query), key=lambda row: row[0]):
            merged += _merged(sums, total[process] // share)
        self._connection.execute("DELETE FROM rollup")
        write(self._connection, insert("rollup"), merged)

    def _thin(self, share: float) -> dict[str, int]:
        """
        Thin out the samples among the oldest `share` of each kind. Return the cursors of the last thinned
        samples.
        """
        largest = "SELECT id FROM (SELECT id, max(rss_bytes) FROM process_sample WHERE id > ?1 AND id <= ?2"
        kept = {
            "process_sample": f"id NOT IN ({largest} GROUP BY process))",
            "memory_sample": _THIN_MEMORY,
            "node_sample": "t_ns / 1000000000 % 10 != 0",
            "clock": f"id NOT IN ({_TEN_MINUTES})",
            "span": "id NOT IN (SELECT max(id) FROM span WHERE id > ?1 AND id <= ?2 GROUP BY "
            "process, name, stage, process_group)",
            **{kind.table: "true" for kind in KINDS.values() if kind.of_rows},
        }
        ends = {}
        for table, rest in kept.items():
            newest = self._one(f"SELECT max(id) FROM {table}") or 0
            since, last = self.cursors.get(table, 0), int(share * newest)
            if table == "span":
                self._add_up_parts(since, last)
            self._connection.execute(
                f"DELETE FROM {table} WHERE id > ?1 AND id <= ?2 AND {rest}", (since, last)
            )
            ends[table] = max(since, last)
        return ends

    def _add_up_parts(self, since: int, last: int) -> None:
        """Replace the rows of each span of a process with their sum, in the newest row."""
        count, total_ns, size = map(added, ("count", "total_ns", "bytes"))
        sums = f"{count}, {total_ns}, max(max_ns), min(first_step), max(last_step), {size}, max(id)"
        which = "WHERE id > ? AND id <= ? GROUP BY process, name, stage, process_group"
        sums_of_spans = self._connection.execute(f"SELECT {sums} FROM span {which}", (since, last)).fetchall()
        names = "count = ?, total_ns = ?, max_ns = ?, first_step = ?, last_step = ?, bytes = ?"
        self._connection.executemany(f"UPDATE span SET {names} WHERE id = ?", sums_of_spans)

    def _one(self, query: str, *values: int) -> Any:
        return self._connection.execute(query, values).fetchone()[0]


@dataclass
class _Run:
    """
    The kept reduction of one run; None if it failed. `processes` is the process of each rank. `refused`: the
    reduction stored in the file could not be read.
    """

    processes: dict[int, int]
    kept: Reduction | None
    refused: bool = False
    changed: bool = False


class _Chunk(NamedTuple):
    """Rows of one rank process as they were received."""

    id: int
    process: int
    first_row: int
    n: int
    keys: bytes
    flags: bytes
    rows: bytes
    host_rows: bytes | None
    leads: bytes | None

    @property
    def size(self) -> int:
        return sum(len(column) for column in self[4:] if column)


def _columns(chunks: Iterable[_Chunk]) -> Columns:
    return columns_of(chunk[4:] for chunk in chunks)


def _sums(by_process: dict[int, list[_Chunk]]) -> list[tuple[Any, ...]]:
    """Return rows for the table of sums, each of up to ten chunks of one rank process."""
    all_sums = []
    for process, keys_of_process in by_process.items():
        for begin in range(0, len(keys_of_process), CHUNKS):
            part = keys_of_process[begin : begin + CHUNKS]
            keys, _, rows = _columns(part)
            rows = rows[:, :N_STAGES]
            sums = rows.sum(axis=0).astype("<i8").tobytes()
            all_sums.append((process, part[0].first_row, len(keys), int(keys[0]), int(keys[-1]), sums))
    return all_sums


def _merged(sums: Iterable[tuple[Any, ...]], most: int) -> list[tuple[Any, ...]]:
    """Return the sums of one rank process, with neighbours added up until at most `most` are left."""
    merged: list[tuple[Any, ...]] = []
    for one in sums:
        if merged and merged[-1][2] + one[2] <= most:
            whole = merged[-1]
            stages = np.frombuffer(whole[5], "<i8") + np.frombuffer(one[5], "<i8")
            merged[-1] = (*whole[:2], whole[2] + one[2], whole[3], one[4], stages.tobytes())
        else:
            merged.append(one)
    return merged


_OLD = """
DELETE FROM output WHERE id IN (SELECT id FROM (SELECT id, lines, unfinished,
  count(lines) OVER newer AS above, max(id) OVER whole AS newest FROM output
  WINDOW whole AS (PARTITION BY process, stream, by_relay),
  newer AS (PARTITION BY process, stream, by_relay ORDER BY id DESC ROWS UNBOUNDED PRECEDING))
WHERE id < newest AND (lines IS NULL OR above > ?))
"""
"""Entries without a line (`lines` is null: a progress bar) but the newest, and all before the last lines."""


class OutputRetention:
    """
    Keeps the table of printed lines small: after many entries, all but the last lines of each stream are
    deleted.

    Args:
        most: number of lines of a stream that are kept.
    """

    def __init__(self, connection: sqlite3.Connection, most: int) -> None:
        self._connection, self._most = connection, most
        self.entries = self._count()
        """Number of entries in the file. The writer adds the entries that it writes."""
        self._limit = _FEW

    def due(self) -> bool:
        """Return whether there are too many entries."""
        return self.entries > self._limit

    def prune(self) -> None:
        """Delete the old entries inside the caller's transaction."""
        self._connection.execute(_OLD, (self._most,))
        self.entries = self._count()
        self._limit = max(_FEW, 2 * self.entries)

    def _count(self) -> int:
        return int(self._connection.execute("SELECT count(*) FROM output").fetchone()[0])


_FEW = 4096
"""Number of entries of all streams together up to which nothing is deleted."""
