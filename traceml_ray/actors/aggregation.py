"""
The aggregator without Ray: takes what relays send, stores it, judges it, answers questions.

`ingest`, `commit` and `judge`, and `query` are made to run in three different threads. Nothing here
raises into the caller's loop: what goes wrong is counted by place in `errors`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from traceml_ray import wire
from traceml_ray.analysis.history import RunJudge
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.window import RankRows, align
from traceml_ray.identity import RankIdentity
from traceml_ray.reports.deaths import FATAL, culprit, deaths, headline
from traceml_ray.reports.files import write_reports
from traceml_ray.session import SessionFolder
from traceml_ray.settings import Settings
from traceml_ray.spool import SUFFIX, read_spool
from traceml_ray.store.recent import Recent
from traceml_ray.store.session_file import ledger
from traceml_ray.store.streams import Stream, age, attempt_of, node_labels, shown, world_size
from traceml_ray.store.writer import SessionWriter

_MAX_NAME = 64
_INT64_MAX = (1 << 63) - 1
_STOPPED = {-2, -15, 130, 143}
"""Exit codes of a job that was stopped by SIGINT or SIGTERM."""


class Aggregation:
    """
    One session's state. Opened on an existing folder it goes on where the file ends.

    Args:
        folder: the session folder; must exist.
        settings: of the session.
        info: what the launcher knows (launcher, command, world_size, nnodes, strategy, …).
        clock: wall clock in ns.

    Raises `SessionFileError` when the session file cannot be made or used.

    """

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        info: dict[str, Any],
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.folder = SessionFolder(Path(folder))
        self.settings = settings
        self.verdict: Verdict | None = None
        self._clock = clock
        self._writer = SessionWriter(self.folder.sqlite)
        self._recent = Recent()
        self._run = RunJudge(settings.thresholds)
        self._attempt = 0
        self._tail = settings.thresholds.window_steps + settings.thresholds.stride_steps
        self._refused: dict[str, int] = {}
        self._fatal: list[dict[str, Any]] = []
        self._standing = shown(self._writer.streams.values())
        self._judged: list[Any] | None = None
        self._stored: tuple[Any, ...] | None = None
        self._readers = threading.local()
        self._last_message_ns = clock()
        self.errors: Counter[str] = Counter(self._writer.meta.get("errors", {}))
        start = {"session": self.folder.name, "started_at": clock(), "status": "running", **info}
        self._writer.set_meta(**{key: self._writer.meta.get(key, value) for key, value in start.items()})
        self._reload()

    def ingest(self, data: bytes) -> bytes:
        """
        Take an encoded `RelayBatch`; return an encoded `RelayReply` saying what is on disk.

        A message already taken is only answered. One that skips a number is not taken: an earlier
        one was lost on the way and comes again. A bad message is dropped and counted.
        """
        incarnation = ""
        try:
            batch = wire.decode(data, wire.RelayBatch)
            incarnation = batch.incarnation
            inner = [self._decode(part, batch.node) for part in batch.batches]
            with self._writer.lock:
                self._last_message_ns = self._clock()
                if self._is_next(incarnation, batch.seq):
                    self._take(batch, [part for part in inner if part is not None])
        except wire.WireError as error:
            self.errors[f"ingest: {error.reason}"] += 1
        except Exception as error:
            self.errors[f"ingest: {type(error).__name__}"] += 1
            if self.settings.debug:
                raise
        return wire.encode(wire.RelayReply(wire.VERSION, self._writer.committed.get(incarnation, 0)))

    def commit(self) -> bool:
        """Write what is pending; False (and counted) when the disk refuses, then it stays pending."""
        try:
            with self._writer.lock:
                self._writer.set_meta(errors=dict(self.errors))
            self._writer.commit()
        except Exception as error:
            self.errors[f"commit: {error}"] += 1
            return False
        return True

    def judge(self) -> None:
        """Judge the last steps that every live rank reported; store the verdict when it changed."""
        try:
            self._judge()
        except Exception as error:
            self.errors[f"judge: {type(error).__name__}"] += 1
            if self.settings.debug:
                raise

    def finish(self, finish: wire.Finish) -> None:
        """
        End the session: everything is committed, what is still in flight counts as dropped by the
        relay, and the reports are written. May be called again.

        Raises OSError or `sqlite3.Error` when the files cannot be written.
        """
        with self._writer.lock:
            for failure in finish.failures:
                self._fail(failure)
            for name, stream in self._writer.streams.items():
                if stream.in_flight > 0:
                    self._writer.stream(name, 0).lost_rows += stream.in_flight
            code = finish.exit_code
            status = "finished" if code == 0 else "stopped" if code in _STOPPED else "failed"
            ended = self._writer.meta.get("ended_at", self._clock())
            self._writer.set_meta(status=status, exit_code=code, ended_at=ended, errors=dict(self.errors))
        self._writer.commit()
        with self._writer.reader() as reader:
            write_reports(self.folder, reader, self.settings.thresholds)
        self._writer.settle()

    def take_spool(self, folder: Path) -> None:
        """Take what agents could not deliver from the `.spool` files of `folder`; a bad file is counted."""
        node = wire.NodeIdentity("", "spool", "")
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            try:
                frames = read_spool(path)
            except OSError as error:
                self.errors[f"spool: {error}"] += 1
                continue
            decoded = [self._decode(frame, node) for frame in frames]
            with self._writer.lock:
                for batch in decoded:
                    if batch is not None:
                        self._take_rank(batch, None)

    def query(self, request: bytes) -> bytes:
        """
        Answer msgpack `{"what": name, "since": cursor, …}` with `{"result": …, "cursor": …}`.

        `what` is a method of `SessionFile`, `status` or `verdict`; rows come as little-endian
        bytes. An error is an answer too: `{"error": text}`.
        """
        try:
            asked = msgspec.msgpack.decode(request, type=dict[str, Any])
            return msgspec.msgpack.encode(self._answer(asked))
        except Exception as error:
            return msgspec.msgpack.encode({"error": f"{type(error).__name__}: {error}"})

    def status(self) -> dict[str, Any]:
        """Return how the aggregator itself is doing: counts in rows, errors by place."""
        with self._writer.lock:
            streams = list(self._writer.streams.values())
            count = ledger(streams)
            meta = dict(self._writer.meta)
        del count["per_rank"]
        label = self.verdict.label if self.verdict else None
        return {
            **meta,
            "ranks": len(shown(streams)),
            "ledger": count,
            "errors": dict(self.errors),
            "verdict": label,
        }

    def idle_s(self) -> float:
        """Seconds since the last message."""
        return (self._clock() - self._last_message_ns) / 1e9

    def close(self) -> None:
        """Let go of the session file."""
        self._writer.close()

    def _decode(self, data: bytes, node: wire.NodeIdentity) -> wire.RankBatch | None:
        try:
            batch = wire.decode(data, wire.RankBatch)
            if not 0 < len(batch.stream) <= _MAX_NAME:
                raise wire.WireError("malformed", "name of the stream")
        except wire.WireError as error:
            self.errors[f"rank batch from {node.hostname}: {error.reason}"] += 1
            return None
        return batch

    def _is_next(self, incarnation: str, seq: int) -> bool:
        """Whether this message is the next of its relay; a gap is let pass when it comes a second time."""
        due = self._writer.taken.get(incarnation, 0) + 1
        if seq > due and self._refused.get(incarnation) != seq:
            self._refused.setdefault(incarnation, seq)
            return False
        if seq >= due:
            self._refused.pop(incarnation, None)
        return seq >= due

    def _take(self, batch: wire.RelayBatch, inner: list[wire.RankBatch]) -> None:
        now, writer, node_id = self._last_message_ns, self._writer, batch.node.node_id
        writer.take(batch, now)
        for part in inner:
            self._take_rank(part, node_id)
        for name, rows in batch.dropped.items():
            stream = writer.stream(name, now)
            before = stream.dropped_by_relay.get(batch.incarnation, 0)
            stream.dropped_by_relay[batch.incarnation] = max(rows, before)
            stream.produced = max(stream.produced, rows)
        for name in batch.lost:
            stream = writer.stream(name, now)
            stream.lost = not stream.final
        for event in batch.events:
            self._add_event(event, writer.streams.get(str(event.data.get("stream"))), node_id)

    def _take_rank(self, batch: wire.RankBatch, node_id: str | None) -> None:
        now, writer = self._last_message_ns, self._writer
        stream = writer.stream(batch.stream, now)
        if batch.seq <= stream.last_batch:
            return
        if batch.identity is not None:
            self._identify(stream, batch.identity, node_id)
        self._take_rows(stream, batch)
        stream.absorb(batch, now)
        if batch.process is not None:
            writer.add_process(stream, batch.process)
        for detail in batch.details:
            writer.add_detail(stream, detail)
        for event in batch.events:
            self._add_event(event, stream, node_id)

    def _add_event(self, event: wire.Event, stream: Stream | None, node_id: str | None) -> None:
        self._writer.add_event(event, stream, node_id)
        if stream is not None and event.kind in FATAL:
            told = {"stream_id": stream.id, "kind": event.kind, "t_ns": event.t_ns, "message": event.message}
            self._fatal.append(told)

    def _take_rows(self, stream: Stream, batch: wire.RankBatch) -> None:
        """Add the rows that are new: an agent sends what its relay may have lost a second time."""
        n = len(batch.flags)
        skip = max(0, stream.next_row - batch.first_row)
        if skip >= n:
            return
        keys, flags = batch.keys[8 * skip :], batch.flags[skip:]
        rows = batch.rows[wire.ROW_BYTES * skip :]
        self._writer.add_rows(stream, batch.first_row + skip, keys, flags, rows)
        self._recent.append(stream.id, keys, flags, rows)
        stream.next_row = min(batch.first_row + n, _INT64_MAX)
        stream.last_key = self._recent.last_key(stream.id)

    def _identify(self, stream: Stream, said: RankIdentity, node_id: str | None) -> None:
        """Note who a stream is; of an earlier process of the same rank, no rows are kept in memory."""
        before = stream.identity
        if said.node_id is None:
            known = node_id or (before.node_id if before else None)
            said = msgspec.structs.replace(said, node_id=known)
        if said == before:
            return
        stream.identity = said
        other = self._standing.get(said.global_rank)
        if other is not None and other is not stream and other.rank == said.global_rank:
            older, newer = sorted((other, stream), key=age)
            self._recent.forget(older.id)
            self._standing[said.global_rank] = newer
        else:
            self._standing[said.global_rank] = stream

    def _fail(self, failure: wire.RankFailure) -> None:
        """Note how a rank's process ended, on its stream where it ever reported."""
        known = self._writer.meta.get("failures", [])
        told = msgspec.structs.asdict(failure)
        if told in known:
            return
        self._writer.set_meta(failures=[*known, told])
        for name, stream in self._writer.streams.items():
            identity = stream.identity
            if identity and (identity.global_rank, identity.pid) == (failure.rank, failure.pid):
                stream = self._writer.stream(name, failure.t_ns)
                stream.exit_code = failure.exit_code

    def _reload(self) -> None:
        """After a restart: bring back the last rows, so that the verdict goes on at once."""
        with self._writer.reader() as reader:
            self._fatal = [event for event in reader.events()[0] if event["kind"] in FATAL]
            ranks = reader.ranks()
            for found in reader.rows(last=self._tail)[0]:
                columns = found.keys.tobytes(), found.flags.tobytes(), found.rows.tobytes()
                self._recent.append(ranks[found.rank].id, *columns)

    def _judge(self) -> None:
        limits = self.settings.thresholds
        with self._writer.lock:
            ranks = shown(self._writer.streams.values())
            deadline = self._clock() - int(limits.report_timeout_s * 1e9)
            live = [rank for rank, stream in ranks.items() if _reports(stream, deadline)]
            labels = node_labels(self._writer.streams.values(), self._writer.addresses)
            world = world_size(ranks, self._writer.meta.get("world_size"))
            missing = sorted(set(range(world)).difference(live))
            seen = [(rank, ranks[rank].id, ranks[rank].stored) for rank in live]
            first = culprit(deaths([], self._fatal, list(self._writer.streams.values())))
        if first is not None and not (first.consequence and first.t_ns > deadline):
            # The cause of a failed collective may only become known a moment later.
            self._keep(headline(first, labels.get(first.stream.id) if first.stream else None, 0))
            return
        if not live or seen == self._judged:
            return
        self._judged = seen
        attempt = attempt_of(ranks[live[0]])
        if attempt != self._attempt:
            self._attempt, self._run = attempt, RunJudge(limits)
        last = min((key for rank in live if (key := ranks[rank].last_key) is not None), default=0)
        rows = []
        for rank in live:
            stream = ranks[rank]
            with self._writer.lock:  # rank by rank: a message never waits until all of them are copied
                columns = self._recent.tail(stream.id, last, self._tail)
            rows.append(RankRows(rank, labels[stream.id], *columns))
        window = align(rows, len(live) + len(missing), missing, last=limits.window_steps)
        verdict = self._run.update(window)
        self._keep(verdict, store=verdict.window_steps >= limits.first_window_steps)

    def _keep(self, verdict: Verdict, store: bool = True) -> None:
        self.verdict = verdict
        named = verdict.label, verdict.stages, verdict.ranks
        if store and named != self._stored:
            self._stored = named
            with self._writer.lock:
                self._writer.add_verdict(self._clock(), msgspec.json.encode(verdict))

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        what, since = asked.get("what"), int(asked.get("since", 0))
        if what == "status":
            return {"result": self.status()}
        if what == "verdict":
            return {"result": msgspec.to_builtins(self.verdict)}
        reader = getattr(self._readers, "file", None)
        if reader is None:
            reader = self._readers.file = self._writer.reader()
        if what == "rows":
            found, cursor = reader.rows(asked.get("only"), since, asked.get("last"))
            return {"result": [_packed(rows) for rows in found], "cursor": cursor}
        if what in ("process", "node_samples", "events", "verdicts"):
            result, cursor = getattr(reader, what)(since)
            return {"result": result, "cursor": cursor}
        if what in ("meta", "nodes", "ranks", "streams", "details", "ledger"):
            return {"result": msgspec.to_builtins(getattr(reader, what)())}
        raise ValueError(f"there is nothing called {what!r} to ask for")


def finish_offline(
    folder: Path,
    settings: Settings,
    finish: wire.Finish,
    spool: Path | None = None,
    info: dict[str, Any] | None = None,
) -> None:
    """
    End a session whose aggregator does not answer, from its file and what agents left in `spool`.
    `info` as for `Aggregation`.

    Raises `SessionFileError`, OSError or `sqlite3.Error` when the files cannot be read or written.
    """
    aggregation = Aggregation(folder, settings, info or {})
    try:
        if spool is not None:
            aggregation.take_spool(spool)
        aggregation.finish(finish)
    finally:
        aggregation.close()


def _reports(stream: Stream, deadline: int) -> bool:
    """Whether the rank has been heard of since `deadline`, or has ended as it should."""
    return stream.final or (not stream.ended and stream.last_seen_ns >= deadline)


def _packed(found: RankRows) -> dict[str, Any]:
    columns = {"keys": found.keys.tobytes(), "flags": found.flags.tobytes(), "rows": found.rows.tobytes()}
    return {"rank": found.rank, "node": found.node, **columns}
