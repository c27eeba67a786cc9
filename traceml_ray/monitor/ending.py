"""Ends a session and its runs, as `finish.End` decides: who is missing, the last accounts, the reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from traceml_ray import wire
from traceml_ray.errors import Errors
from traceml_ray.monitor.finish import QUIET_S, End
from traceml_ray.reports.files import write_reports
from traceml_ray.reports.summary import summarize
from traceml_ray.session import SessionFolder
from traceml_ray.settings import Settings
from traceml_ray.store.runs import MAX_RUNS, by_run, newest, note, with_rows
from traceml_ray.store.streams import Stream, last_attempt
from traceml_ray.store.writer import SessionWriter

_STOPPED = {-2, -15, 130, 143}
"""Exit codes of a job that was stopped by SIGINT or SIGTERM."""
_MAX_NAMES = 5


class Endings:
    """
    Of one session. `leave` and `run` are asked by one thread; another writes what is due.

    Args:
        folder: of the session.
        settings: of the session.
        writer: of the session file.
        errors: the aggregator's, by place.
        clock: wall clock in ns.
        ticks: monotonic ns.
        prepare: called with the writer's lock before an account is settled.
        let_go: called when all is written: nobody has the session file open after that.
    """

    def __init__(
        self,
        folder: SessionFolder,
        settings: Settings,
        writer: SessionWriter,
        errors: Errors,
        clock: Callable[[], int],
        ticks: Callable[[], int],
        prepare: Callable[[], None],
        let_go: Callable[[], None],
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._writer = writer
        self._errors = errors
        self._clock = clock
        self._seconds = lambda: ticks() / 1e9
        self._prepare = prepare
        self._let_go = let_go
        self._writing = threading.RLock()
        self._session = End(self._seconds)
        self._runs: dict[str, tuple[End, str]] = {}
        """By run: its end, and its status then."""
        self._told: set[tuple[str, str, int, str]] = set()
        before = writer.meta.get("ending", {})  # of an aggregator that was restarted
        self._nodes: int = before.get("nodes", 1)
        if before:
            self._session.ask()
            self._session.written = before["missing"]
        self._came = self._rows()
        """What had come when the session's files were written."""

    def recall(self, told: list[tuple[str, str, int, str]]) -> None:
        """Take what was told of runs before a restart."""
        self._told = set(told)

    def over(self, quiet_s: float) -> bool:
        """Whether the session is over: its files are written, and nobody is waited for."""
        return self._session.over(quiet_s)

    @property
    def left_behind(self) -> bool:
        """Whether the files are written, and will be again when the nodes have come that were missing."""
        return bool(self._session.written)

    @property
    def complete(self) -> bool:
        """Whether everything that came is in the files."""
        with self._writer.lock:
            return self._session.written is not None and self._rows() == self._came

    def leave(self, message: wire.Finish) -> wire.Finished:
        """Note that a node has left; return how far the end of the session is. May be said again."""
        with self._writer.lock:
            self._note(message)
            missing, names = self._missing_nodes()
            if message.stop or message.force:
                self._session.ask(message.force, message.waited_s)
                return self._session.answer(missing, names)
        self._writer.commit()
        return wire.Finished(wire.VERSION, "noted", waiting=missing)

    def run(self, message: wire.Run) -> wire.Finished:
        """Note what is told of a run; return how far its end is. May be said again."""
        with self._writer.lock:
            job = message.job_id
            self._set_run(job, message.info)
            for event in message.events:
                said = job, event.kind, event.t_ns, event.message
                if said not in self._told:
                    self._told.add(said)
                    self._writer.add_event(event, run=job)
            if message.status is None:
                return wire.Finished(wire.VERSION, "noted")
            end, _ = self._runs.setdefault(job, (End(self._seconds), message.status))
            end.ask()
            while len(self._runs) > MAX_RUNS:
                del self._runs[next(iter(self._runs))]
            return end.answer(self._missing_ranks(job))

    def write_due(self) -> None:
        """Write the files of what has ended and has not been written; a failure is for who asks next."""
        with self._writer.lock:
            runs = [run for run, (end, _) in self._runs.items() if end.written is None and self._is_due(run)]
            due = self._session.open and self._session.due(self._missing_nodes()[0])
        for run in runs:
            self._try(self._runs[run][0], lambda: self._write_run(run))  # noqa: B023 - called at once
        if due:
            self._try(self._session, self._write_session)

    def finish(self, message: wire.Finish) -> None:
        """
        End the session now, whoever is missing. May be called again.

        Raises OSError, `sqlite3.Error` or `Fenced` when the files cannot be written.
        """
        with self._writer.lock:
            self._note(message)
            self._session.ask(ordered=True)
        with self._writing:
            self._write_session()

    def is_silent(self, node_id: str) -> bool:
        """Return whether that node's relay has not been heard of for long."""
        node = self._writer.nodes.get(node_id)
        return bool(node and node.last_seen_ns and self._clock() - node.last_seen_ns > QUIET_S * 1e9)

    def _is_due(self, run: str) -> bool:
        end = self._runs[run][0]
        return end.open and end.due(self._missing_ranks(run))

    def _try(self, end: End, write: Callable[[], None]) -> None:
        try:
            with self._writing:
                write()
        except Exception as error:
            self._errors.note("finish", error)
            end.failed = f"{type(error).__name__}: {error}"

    def _note(self, message: wire.Finish) -> None:
        for failure in message.failures:
            self._fail(failure)
        meta = self._writer.meta
        self._nodes = max(self._nodes, message.nodes)
        self._writer.set_meta(left={**meta.get("left", {}), message.node_id: message.exit_code})

    def _write_session(self) -> None:
        with self._writer.lock:
            now, meta, end = self._clock(), self._writer.meta, self._session
            missing, names = self._missing_nodes()
            ended = now if meta.get("ending", {}).get("missing") else meta.get("ended_at", now)
            if missing and not end.written:
                text = f"the files were written without {names}, not yet at the end then"
                self._writer.add_event(wire.Event("note", now, message=text))
            self._settle_account(list(self._writer.streams.values()))
            code = _exit_code(list(meta["left"].values()))
            status = "finished" if code == 0 else "stopped" if code in _STOPPED else "failed"
            self._writer.set_meta(status=status, exit_code=code, ended_at=ended, errors=dict(self._errors))
            came = self._rows()
        self._writer.commit()
        self._report(end)
        with self._writer.lock:
            self._writer.set_meta(ending={"nodes": self._nodes, "missing": missing})
        self._writer.commit()
        if end.ordered or not missing:
            self._let_go()
            self._writer.settle()
        with self._writer.lock:
            end.written, self._came = missing, came

    def _write_run(self, run: str) -> None:
        end, status = self._runs[run]
        with self._writer.lock:
            missing = self._missing_ranks(run)
            self._set_run(run, {}, status)
            runs = by_run(self._writer.streams.values())
            self._settle_account(runs.get(run, []))
            latest = newest(with_rows(runs), self._writer.meta.get("runs", {}))
        self._writer.commit()
        summary = self._report(end)
        if run != latest:
            with self._writer.reader() as reader:
                summary = summarize(reader, self._settings.thresholds, run)
        with self._writer.lock:
            self._set_run(run, {"label": summary["verdict"]["label"]})
        self._writer.commit()
        end.written = missing

    def _report(self, end: End) -> dict[str, Any]:
        """Write the reports; `reporting` while they are made, and not while the disk has to take them."""

        def put(files: Mapping[Path, bytes]) -> None:
            end.reporting = False
            self._writer.put(files)
            end.reporting = True

        end.reporting = True
        try:
            with self._writer.reader() as reader:
                return write_reports(self._folder, reader, self._settings.thresholds, put=put)
        finally:
            end.reporting = False

    def _settle_account(self, streams: list[Stream]) -> None:
        """Count what is in flight as dropped: what comes nevertheless is stored, and counted so."""
        self._prepare()
        for stream in streams:
            if stream.in_flight > 0:
                self._writer.stream(stream.stream, 0).lost_rows += stream.in_flight

    def _set_run(self, run: str, info: Mapping[str, Any], status: str | None = None) -> None:
        runs = self._writer.meta.get("runs", {})
        self._writer.set_meta(runs=note(runs, run, self._clock(), info, status))

    def _missing_ranks(self, run: str) -> int:
        """Return of how many ranks of a run rows may still come."""
        last = last_attempt(by_run(self._writer.streams.values()).get(run, []))
        return sum(self._may_deliver(stream) for stream in last)

    def _may_deliver(self, stream: Stream) -> bool:
        """Whether rows of this stream may still come: not from a node that is gone, or says no word."""
        node_id = (stream.identity.node_id if stream.identity else None) or ""
        if self.is_silent(node_id):
            return False
        node = self._writer.nodes.get(node_id)
        return not stream.ended or (stream.in_flight > 0 and (node is None or node.lost_ns is None))

    def _missing_nodes(self) -> tuple[int, str]:
        """Return how many nodes of the launched run have neither left nor been lost, and their names."""
        left, nodes = set(self._writer.meta.get("left", {})), self._writer.nodes
        if "" in left:  # of somebody who speaks for all
            return 0, ""
        runs = by_run(self._writer.streams.values())
        own = self._writer.meta["session"]
        last = last_attempt(runs.get(own if own in runs else newest(with_rows(runs)) or "", []))
        seen = {stream.identity.node_id for stream in last if stream.identity and stream.identity.node_id}
        lost = {node.node_id for node in nodes.values() if node.lost_ns is not None}
        missing = max(0, max(self._nodes, len(seen | left)) - len(left | (seen & lost)))
        names = sorted(nodes[node].hostname for node in seen - left - lost if node in nodes)[:missing]
        if unknown := missing - len(names):
            names = [*names[:_MAX_NAMES], f"{unknown} that never reported"]
        return missing, ", ".join(names[: _MAX_NAMES + 1])

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

    def _rows(self) -> int:
        """Return a number that changes whenever something comes that the accounts tell of."""
        return sum(stream.stored + stream.ended for stream in self._writer.streams.values())


def _exit_code(codes: list[int]) -> int:
    """Return the exit code of a job of several nodes: the first that tells of a failure of its own."""
    return next((code for code in codes if code and code not in _STOPPED), next(filter(None, codes), 0))
