"""
Writes the session file. Incoming data is collected in memory and written in one transaction.

Rows are in the same transaction as the relay watermarks that confirm them. A process killed at any moment
leaves a file in which every confirmed message is complete, and no other message is present in part.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.verdict import DEFAULTS
from traceml_ray.files import write_files
from traceml_ray.settings import Settings
from traceml_ray.signals.kind import Kind, R
from traceml_ray.signals.kinds import KINDS
from traceml_ray.store.fence import Fence, identity
from traceml_ray.store.rank_processes import COLUMNS, PROGRESS, Node, RankProcess, to_progress, to_row
from traceml_ray.store.rank_processes import NODE_COLUMNS as NODE
from traceml_ray.store.retention import OutputRetention, Retention
from traceml_ray.store.schema import connect, insert, legible, transaction, update, write
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import messages as wire

_APPENDED = (
    *("process_sample", "clock", "span", "event", "verdict", "chunk"),
    *(kind.table for kind in KINDS.values() if kind.keep == "all"),
)
_REPLACED_LISTS = tuple(kind.table for kind in KINDS.values() if kind.keep != "all")
OF_NODES = {"clock", *(kind.table for kind in KINDS.values() if kind.scope == "node")}
"""Tables of nodes. Their entries that arrive after the end of the session are left out."""


@dataclass
class Pending:
    """The data of the next transaction."""

    inserts: dict[str, list[tuple[Any, ...]]] = field(default_factory=lambda: {t: [] for t in _APPENDED})
    processes: dict[int, RankProcess] = field(default_factory=dict)
    progressed: dict[int, RankProcess] = field(default_factory=dict)
    meta: set[str] = field(default_factory=set)
    nodes: dict[str, Node] = field(default_factory=dict)
    relays: dict[str, int] = field(default_factory=dict)
    replaced: dict[str, dict[int, tuple[Any, ...]]] = field(
        default_factory=lambda: {t: {} for t in _REPLACED_LISTS}
    )
    """Records of kinds that keep only some records: table → slot → row."""
    row_bytes: int = 0
    """Size of the rows in `inserts`, in bytes."""

    @property
    def is_of_ranks(self) -> bool:
        """Whether there is any data besides samples and addresses of nodes."""
        inserts = any(rows for table, rows in self.inserts.items() if table not in OF_NODES)
        return bool(inserts or self.processes or self.progressed or any(self.replaced.values()))

    def follow(self, later: Pending) -> None:
        """Append data that arrived while the disk refused this data."""
        for table, rows in self.inserts.items():
            rows.extend(later.inserts[table])
        self.processes |= later.processes
        self.progressed |= later.progressed
        self.meta |= later.meta
        self.nodes |= later.nodes
        self.relays |= later.relays
        for table, places in self.replaced.items():
            places |= later.replaced[table]
        self.row_bytes += later.row_bytes


def row_bytes(chunk: tuple[Any, ...]) -> int:
    """Return the size of the rows in an entry of table `chunk` (bytes)."""
    _, _, _, keys, flags, rows, host_rows, leads = chunk
    size = len(keys) + len(flags) + len(rows)
    return size + len(host_rows) + len(leads or b"") if host_rows else size


MAX_PENDING_BYTES = 256 << 20
"""
Largest size of rows kept in memory while the disk refuses them. Beyond it, the oldest rows are dropped and
counted.
"""
MAX_PENDING_ITEMS = 100_000
"""Largest number of samples, spans, events and verdicts kept in the same way, of each kind."""
_PROCESSES = f"REPLACE INTO rank_process({', '.join(COLUMNS)}) VALUES ?"
_PROGRESSED = update("rank_process", "id", PROGRESS)
_NODES, _RELAYS = update("node", "node_id", NODE[1:]), update("relay", "incarnation", ["last_seq"])
_REPLACED = {
    kind.table: update(kind.table, "id", (kind.owner, *kind.fields))
    for kind in KINDS.values()
    if kind.keep != "all"
}


class SessionWriter:
    """
    The only writer of a session file. An earlier writer cannot write any more once this one has claimed the
    file (see `fence`). `processes` and `taken` include data that is not committed yet; `committed` holds the
    relay watermarks that are on disk.

    A file at rest (`at_rest`) is one plain file that includes the end of its session. Nothing is written to
    it until `go_on`. Meanwhile samples of nodes are dropped and counted in `lost`; everything else stays
    pending.

    The caller holds `lock` while it uses anything but `commit` and `reader`.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = 1 << 62,
        thresholds: Thresholds = DEFAULTS,
        output_lines: int = Settings().output_lines,
    ) -> None:
        self.path = path
        self.lock = threading.Lock()
        self.max_pending_bytes = MAX_PENDING_BYTES
        self._database = threading.Lock()
        self.max_pending_items = MAX_PENDING_ITEMS
        opened = identity(path)
        self._connection = connect(path, create=True)
        with SessionFile(path, self._connection) as stored, legible(path):
            self.at_rest: bool = stored.meta().get("ending", {}).get("missing") == 0
            self._fence = Fence(self._connection, path, opened, now=not self.at_rest)
            self.processes: dict[str, RankProcess] = {
                process.process_id: process for process in stored.processes()
            }
            self.meta: dict[str, Any] = stored.meta()
            self.nodes: dict[str, Node] = {node.node_id: node for node in stored.cluster()}
        self.taken: dict[str, int] = dict(
            self._connection.execute("SELECT incarnation, last_seq FROM relay").fetchall()
        )
        self.committed = dict(self.taken)
        self.epoch = 0
        """
        Number that changes when a rank process changes in more than `PROGRESS`, or a node's name or the runs
        change.
        """
        self.lost: Counter[str] = Counter()
        """Number of dropped records except rows, by place. The aggregator counts and clears it."""
        self._by_id = {process.id: process for process in self.processes.values()}
        self._pending = Pending()
        folded = self.meta.get("folded", {})
        self._output = OutputRetention(self._connection, output_lines)
        self._retention = Retention(self._connection, path, max_bytes, folded, thresholds)

    def process(self, name: str, now: int) -> RankProcess:
        """Return the rank process `name`, created if it is new, and mark it as changed."""
        process = self.processes.get(name)
        if process is None:
            process = RankProcess(len(self.processes) + 1, name, first_seen_ns=now, last_seen_ns=now)
            self.processes[name] = self._by_id[process.id] = process
        self._pending.processes[process.id] = process
        self.epoch += 1
        return process

    def progressed(self, process: RankProcess) -> None:
        """Mark a rank process as changed in `PROGRESS` only."""
        self._pending.progressed[process.id] = process

    def node(self, node_id: str, hostname: str, address: str) -> Node:
        """Return the node `node_id`, created if it is new, and mark it as changed."""
        node = self.nodes.get(node_id)
        if node is None or (node.hostname, node.address) != (hostname, address):
            node = self.nodes.setdefault(node_id, Node(node_id, hostname, address))
            node.hostname, node.address = hostname, address
            self.epoch += 1
        self._pending.nodes[node_id] = node
        return node

    def set_meta(self, **values: Any) -> None:
        """Set facts of the session as a whole. A value is anything that JSON can hold."""
        for key, value in values.items():
            if key not in self.meta or self.meta[key] != value:
                self.meta[key] = value
                self._pending.meta.add(key)
                self.epoch += key == "runs"

    def acknowledge(self, batch: wire.RelayBatch, now: int) -> None:
        """Note that the message was received, and the state of its node."""
        node = batch.node
        self.taken[batch.incarnation] = batch.seq
        self._pending.relays[batch.incarnation] = batch.seq
        known = self.node(node.node_id, node.hostname, node.address)
        known.last_seen_ns, known.errors = now, batch.errors

    def add_rows(
        self,
        process: RankProcess,
        first_row: int,
        keys: bytes,
        flags: bytes,
        rows: bytes,
        host_rows: bytes = b"",
        leads: bytes = b"",
    ) -> None:
        """Add rows to `process`. The columns are as on the wire."""
        n = len(flags)
        chunk = process.id, first_row, n, keys, flags, rows, host_rows or None, leads or None
        self._pending.inserts["chunk"].append(chunk)
        self._pending.row_bytes += row_bytes(chunk)
        if n and not process.stored:
            self.process(process.process_id, 0)
        process.stored += n
        if self._pending.row_bytes > self.max_pending_bytes:
            self._drop_oldest()

    def add_process(self, process: RankProcess, sample: wire.ProcessSample) -> None:
        """Add a sample of a rank process."""
        self._add("process_sample", (process.id, *msgspec.structs.astuple(sample)))

    def add_clock(self, node_id: str, t_ns: int, offset_ns: int, bound_ns: int) -> None:
        """Add a measurement of a node's clock, see `analysis.node_clock`."""
        self._add("clock", (node_id, t_ns, offset_ns, bound_ns))

    def add_spans(self, process: RankProcess, spans: Iterable[wire.SpanSum]) -> None:
        """Add spans."""
        rows = self._pending.inserts["span"]
        rows.extend([(process.id, *msgspec.structs.astuple(span)) for span in spans])
        if len(rows) > self.max_pending_items:
            self._cut("span")

    def add_record(self, kind: Kind[R], owner: int | str, record: R) -> None:
        """
        Add a record of a rank process (by number) or a node (by id). A kind that keeps only some records
        replaces an older one.
        """
        row = kind.row(owner, record)
        if kind.keep == "all" or not isinstance(owner, int):
            self._add(kind.table, row)
        else:
            place = kind.place(owner, record)
            self._pending.replaced[kind.table][place] = (place, *row)

    def add_event(
        self,
        event: wire.Event,
        process: RankProcess | None = None,
        node_id: str | None = None,
        run: str | None = None,
    ) -> None:
        """Add an event of a rank's process, of a node, or of a run as a whole."""
        *values, data = msgspec.structs.astuple(event)
        self._add("event", (process.id if process else None, node_id, *values, json.dumps(data), run))

    def add_verdict(self, t_ns: int, body: bytes, run: str) -> None:
        """Add a verdict (JSON) on a run that differs from the previous one."""
        self._add("verdict", (t_ns, body.decode(), run))

    def _add(self, table: str, row: tuple[Any, ...]) -> None:
        if self.at_rest and table in OF_NODES:
            self.lost[f"{table.replace('_', ' ')}: not stored, the session is over"] += 1
            return
        rows = self._pending.inserts[table]
        rows.append(row)
        if len(rows) > self.max_pending_items:
            self._cut(table)

    def _cut(self, table: str) -> None:
        """
        Drop the oldest pending entries of `table` until nine tenths of the bound are
        left, and count them.
        """
        rows = self._pending.inserts[table]
        excess = len(rows) - self.max_pending_items * 9 // 10
        del rows[:excess]
        self.lost[f"{table.replace('_', ' ')}: not stored, no room"] += excess

    def commit(self) -> None:
        """
        Write all pending data in one transaction. Writes nothing to a file at rest. Call it without `lock`.

        Raises `sqlite3.Error` or OSError if the disk refuses, `Fenced` if another writer has the session. The
        pending data then stays pending.
        """
        with self._database:
            with self.lock:
                if self.at_rest:
                    if not self.is_behind:
                        self.committed.update(self._pending.relays)
                    return
                work, self._pending = self._pending, Pending()
                changes = self._changes(work)
            try:
                self._write(changes)
            except BaseException:
                with self.lock:
                    work.follow(self._pending)
                    self._pending = work
                    for table, rows in work.inserts.items():
                        if table != "chunk" and len(rows) > self.max_pending_items:
                            self._cut(table)
                raise
            self._output.entries += len(work.inserts["output"])
            with self.lock:
                self.committed.update(work.relays)

    def fold(self) -> None:
        """
        Compact old rows if the file has reached its size limit. Call it without `lock`.

        Raises `sqlite3.Error` if the disk refuses; nothing is lost then. If the statistics of a run cannot be
        kept, raises that error once; the rows are then compacted without the statistics.
        """
        with self._database:
            if self.at_rest:
                return
            if self._output.due():
                with self._transaction():
                    self._output.prune()
            retention = self._retention
            if not retention.due():
                return
            with self.lock:
                processes = list(self.processes.values())
            if not retention.absorb(sum(not process.ended for process in processes)):
                return
            with self._transaction():
                folded = retention.fold()
                self._connection.execute("REPLACE INTO meta VALUES('folded', ?)", (json.dumps(folded),))
            retention.folded(folded)
            with self.lock:
                self.meta["folded"] = folded
            failed, retention.failed = retention.failed, None
        if failed is not None:
            raise failed

    @property
    def fenced(self) -> bool:
        """Whether another writer has taken over the session, so that this one writes nothing any more."""
        return self._fence.broken

    def put(self, files: Mapping[Path, bytes]) -> None:
        """
        Write files into the session's folder, each completely or not at all. Raises OSError, `sqlite3.Error`,
        `Fenced`.
        """
        with self._database:
            write_files(files, self._transaction(changes=False))

    def reader(self) -> SessionFile:
        """Return a reader of the committed data, with its own connection."""
        return SessionFile(self.path)

    @property
    def is_behind(self) -> bool:
        """Whether the file is at rest, and pending data belongs into it."""
        return self.at_rest and self._pending.is_of_ranks

    def go_on(self) -> None:
        """Write to a file at rest again. The end of the session will be written again later."""
        with self.lock:
            self.at_rest = False

    def checkpoint(self) -> None:
        """
        Bring the file to rest: one plain file. An empty `-wal` stays beside it while a reader has the file
        open.
        """
        with self._database:
            with self.lock:
                self.at_rest = True
            self._connection.execute("PRAGMA busy_timeout = 100")
            for pragma in ("wal_checkpoint(TRUNCATE)", "journal_mode = DELETE"):
                try:
                    self._connection.execute(f"PRAGMA {pragma}")
                except sqlite3.Error:
                    break
            self._connection.execute("PRAGMA busy_timeout = 5000")

    def close(self) -> None:
        """Bring the file to rest and close it."""
        if not self.fenced:
            self.checkpoint()
        with self._database:
            self._connection.close()

    def _changes(self, work: Pending) -> list[tuple[str, list[Any]]]:
        """Return the statements that write `work`, each with its values."""
        progress = [process for id_, process in work.progressed.items() if id_ not in work.processes]
        return [
            *((insert(table), rows) for table, rows in work.inserts.items()),
            (_PROCESSES, [*map(to_row, work.processes.values())]),
            (_PROGRESSED, [*map(to_progress, progress)]),
            ("REPLACE INTO meta VALUES ?", [(key, json.dumps(self.meta[key])) for key in work.meta]),
            (_NODES, [node.to_row() for node in work.nodes.values()]),
            (_RELAYS, [*work.relays.items()]),
            *((_REPLACED[table], [*places.values()]) for table, places in work.replaced.items()),
        ]

    def _write(self, changes: list[tuple[str, list[Any]]]) -> None:
        with self._transaction():
            for statement, rows in changes:
                write(self._connection, statement, rows)

    @contextlib.contextmanager
    def _transaction(self, changes: bool = True) -> Iterator[None]:
        """
        Keep other writers out during the block. `changes`: the block writes to the session file; else only to
        files beside it.
        """
        with transaction(self._connection):
            if changes:
                self._fence.count()
            else:
                self._fence.check()
            yield
        self._fence.committed()

    def _drop_oldest(self) -> None:
        """
        Drop the oldest pending rows until nine tenths of the bound are left. They are counted for their rank
        process.
        """
        chunks = self._pending.inserts["chunk"]
        count = 0
        while count < len(chunks) and self._pending.row_bytes > 0.9 * self.max_pending_bytes:
            process, n = self._by_id[chunks[count][0]], chunks[count][2]
            process.stored -= n
            process.dropped_aggregator += n
            self._pending.processes[process.id] = process
            self._pending.row_bytes -= row_bytes(chunks[count])
            count += 1
        del chunks[:count]
