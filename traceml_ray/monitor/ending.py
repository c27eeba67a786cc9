"""
Ends a session and its runs as `finish.End` decides: counts what is missing, closes accounts,
writes reports.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from traceml_ray.errors import Errors, error_text
from traceml_ray.monitor.bundling import Bundling
from traceml_ray.monitor.finish import QUIET_S, End
from traceml_ray.monitor.profiling import Profiling
from traceml_ray.reports.files import write_reports
from traceml_ray.reports.run_facts import RunFacts
from traceml_ray.reports.summary import summarize
from traceml_ray.settings import Settings
from traceml_ray.store.rank_processes import MAX_RUNS, RankProcess, by_run, last_attempt, newest, note
from traceml_ray.store.session import SessionFolder
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.summary_shape import Summary
from traceml_ray.store.writer import SessionWriter
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

_STOPPED = {
    code
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
    for code in (-number, 128 + number)
}
"""Exit codes of a job that was stopped by a signal: as a process has them, and as a shell has."""
_MAX_NAMES = 5


@dataclass(eq=False)
class Endings:
    """
    Ends one session and its runs. One thread calls `answer`, another one `write_due`.

    Args:
        folder: of the session.
        settings: of the session.
        writer: of the session file.
        errors: the aggregator's error counts, by place.
        bundling: receives how the session ended, and writes a bundle that is still due.
        profiling: ends the profile that is being made.
        clock: wall clock in ns.
        ticks: monotonic ns.
        prepare: called with the writer's lock before the rows of a run are accounted for.
        let_go: called when everything is written; closes our own readers of the session file.
    """

    folder: SessionFolder
    settings: Settings
    writer: SessionWriter
    errors: Errors
    bundling: Bundling
    profiling: Profiling
    clock: Callable[[], int]
    ticks: Callable[[], int]
    prepare: Callable[[], None]
    let_go: Callable[[], None]

    def __post_init__(self) -> None:
        self.events: set[tuple[str, str, int, str]] = set()
        """Stored events of runs: (run, kind, time, message)."""
        self._writing = threading.RLock()
        self._session = self._new_end()
        self._forced = False
        """Whether a person ended only the monitor, while training goes on."""
        self._runs: dict[str, tuple[End, str]] = {}
        """End and status of each run."""
        before = self.writer.meta.get("ending", {})  # of an aggregator that was restarted
        self._nodes: int = before.get("nodes", 1)
        if before:
            self._session.ask()
            self._session.written = before["missing"]
        self._came = self._rows()
        """Number of rows received when the files of the session were written."""

    def _new_end(self) -> End:
        return End(lambda: self.ticks() / 1e9)

    def over(self, quiet_s: float) -> bool:
        """Whether the session is over: its files are written, and no node is expected to report any more."""
        return self._session.over(quiet_s)

    @property
    def left_behind(self) -> bool:
        """
        Whether the files were written without some nodes, and will be written again when these
        have reported.
        """
        return bool(self._session.written)

    @property
    def complete(self) -> bool:
        """Whether the files contain everything that has arrived."""
        with self.writer.lock:
            whole = self._rows() == self._came and not self.writer.is_behind
            return self._session.written is not None and whole

    def answer(self, message: wire.Finish | wire.RunEnd) -> wire.Finished:
        """
        Record that a node has left, or that a run reports its end. Return the progress of the end. May be
        called repeatedly.
        """
        return self._run(message) if isinstance(message, wire.RunEnd) else self._leave(message)

    def _leave(self, message: wire.Finish) -> wire.Finished:
        with self.writer.lock:
            self._note(message)
            missing, names = self._missing_nodes()
            if message.stop or message.force:
                self._session.ask(message.force, message.waited_s)
                return self._session.answer(missing, names)
        self.writer.commit()
        return wire.Finished(codec.VERSION, "noted", waiting=missing)

    def _run(self, message: wire.RunEnd) -> wire.Finished:
        with self.writer.lock:
            job = message.job_id
            self._set_run(job, message.info)
            for event in message.events:
                key = job, event.kind, event.t_ns, event.message
                if key not in self.events:
                    self.events.add(key)
                    self.writer.add_event(event, run=job)
            if message.status is None:
                return wire.Finished(codec.VERSION, "noted")
            end, _ = self._runs.setdefault(job, (self._new_end(), message.status))
            end.ask()
            while len(self._runs) > MAX_RUNS:
                del self._runs[next(iter(self._runs))]
            return end.answer(self._missing_ranks(job))

    def write_due(self) -> None:
        """
        Write the files of each session or run that has ended and is not written yet. A failure is reported in
        the next answer.
        """
        with self.writer.lock:
            runs = [run for run, (end, _) in self._runs.items() if end.written is None and self._is_due(run)]
            due = self._session.open and self._session.due(self._missing_nodes()[0])
        for run in runs:
            self._try(self._runs[run][0], lambda: self._write_run(run))  # noqa: B023 - called at once
        if due:
            self._try(self._session, self._write_session)

    def finish(self, message: wire.Finish, how: str = "") -> None:
        """
        End the session now, even if rows are missing. `how`, if given, becomes an event. May be called
        repeatedly.

        Raises OSError, `sqlite3.Error` or `Fenced` when the files cannot be written.
        """
        with self.writer.lock:
            self._note(message)
            self._session.ask(ordered=True)
            if how:
                self.writer.add_event(wire.Event("note", self.clock(), message=how))
        with self._writing:
            self._write_session()

    def prepare_again(self) -> None:
        """If the files must be written again anyway, store what relays hand over now."""
        if not self.complete:
            self.writer.go_on()

    def is_silent(self, node_id: str) -> bool:
        """Return whether the relay of that node has not reported for long."""
        node = self.writer.nodes.get(node_id)
        return bool(node and node.last_seen_ns and self.clock() - node.last_seen_ns > QUIET_S * 1e9)

    def _is_due(self, run: str) -> bool:
        end = self._runs[run][0]
        return end.open and end.due(self._missing_ranks(run))

    def _try(self, end: End, write: Callable[[], None]) -> None:
        try:
            with self._writing:
                write()
        except Exception as error:
            self.errors.note("finish", error)
            end.failed = error_text(error)

    def _note(self, message: wire.Finish) -> None:
        for failure in message.failures:
            self._fail(failure)
        self._forced |= message.force
        meta = self.writer.meta
        self._nodes = max(self._nodes, message.nodes)
        self.writer.set_meta(left={**meta.get("left", {}), message.node_id: message.exit_code})

    def _write_session(self) -> None:
        self.writer.go_on()
        self.profiling.stop()
        with self.writer.lock:
            now, meta, end = self.clock(), self.writer.meta, self._session
            missing, names = self._missing_nodes()
            ended = now if meta.get("ending", {}).get("missing") else meta.get("ended_at", now)
            if missing and not end.written:
                text = f"the files were written without {names}, still running then"
                self.writer.add_event(wire.Event("note", now, message=text))
            self._close_account(list(self.writer.processes.values()))
            code = _exit_code(list(meta["left"].values()))
            status = "finished" if code == 0 else "stopped" if code in _STOPPED else "failed"
            self.writer.set_meta(status=status, exit_code=code, ended_at=ended, errors=dict(self.errors))
            came = self._rows()
        self.writer.commit()
        self._bundle(end, None, 0 if self._forced else code)
        self._report(end)
        with self.writer.lock:
            ending = {"nodes": self._nodes, "missing": missing}
            self.writer.set_meta(ending=ending, errors=dict(self.errors))
        self.writer.commit()
        if end.ordered or not missing:
            self.let_go()
            self.writer.checkpoint()
        with self.writer.lock:
            end.written, self._came = missing, came

    def _write_run(self, run: str) -> None:
        end, status = self._runs[run]
        with self.writer.lock:
            missing = self._missing_ranks(run)
            self._set_run(run, {}, status)
            runs = by_run(self.writer.processes.values())
            self._close_account(runs.get(run, []))
            latest = newest(self.writer.processes.values(), self.writer.meta)
        self.writer.commit()
        self._bundle(end, run)
        summary = self._report(end)
        if run != latest:
            with self.writer.reader() as reader:
                summary = summarize(reader, self.settings.thresholds, run)
        with self.writer.lock:
            self._set_run(run, {"label": summary.verdict.label})
        self.writer.commit()
        end.written = missing

    def _bundle(self, end: End, run: str | None, exit_code: int = 0) -> None:
        """Write the bundle for whatever ended the session, or `run`."""
        end.reporting = True
        try:
            with SessionFile(self.writer.path, run=run) as reader:
                facts = RunFacts(reader, self.settings.thresholds)
                all_deaths = facts.deaths if facts.fact("status") == "failed" else []
            with self.writer.lock:
                self.bundling.died(facts.run.get("id"), all_deaths)
                self.bundling.stopped(exit_code)
            self.bundling.write_due(at_end=True)
        except Exception as error:
            self.errors.note("bundle", error)
        finally:
            end.reporting = False

    def _report(self, end: End) -> Summary:
        """Write the reports; `reporting` while they are made, and not while the disk has to take them."""

        def put(files: Mapping[Path, bytes]) -> None:
            end.reporting = False
            self.writer.put(files)
            end.reporting = True

        end.reporting = True
        try:
            with self.writer.reader() as reader:
                limits = self.settings.thresholds
                return write_reports(self.folder, reader, limits, put=put, errors=self.errors)
        finally:
            end.reporting = False

    def _close_account(self, processes: list[RankProcess]) -> None:
        """Count rows in flight as dropped. Rows that still arrive are stored, and counted as stored."""
        self.prepare()
        for process in processes:
            if process.in_flight > 0:
                self.writer.process(process.process_id, 0).lost_rows += process.in_flight

    def _set_run(self, run: str, info: Mapping[str, Any], status: str | None = None) -> None:
        runs = self.writer.meta.get("runs", {})
        self.writer.set_meta(runs=note(runs, run, self.clock(), info, status))

    def _missing_ranks(self, run: str) -> int:
        """Return the number of ranks of a run whose rows may still arrive."""
        last = last_attempt(by_run(self.writer.processes.values()).get(run, []))
        return sum(self._may_deliver(process) for process in last)

    def _may_deliver(self, process: RankProcess) -> bool:
        """Whether rows of this rank process may still arrive. False if its node is gone or silent."""
        node_id = (process.identity.node_id if process.identity else None) or ""
        if self.is_silent(node_id):
            return False
        node = self.writer.nodes.get(node_id)
        return not process.ended or (process.in_flight > 0 and (node is None or node.lost_ns is None))

    def _missing_nodes(self) -> tuple[int, str]:
        """
        Return the number of nodes of the launched run that have neither left nor been lost, and
        their names.
        """
        left, nodes = set(self.writer.meta.get("left", {})), self.writer.nodes
        if "" in left:  # one for all nodes
            return 0, ""
        processes = self.writer.processes.values()
        runs = by_run(processes)
        own_run = self.writer.meta["session"]
        last = last_attempt(runs.get(own_run if own_run in runs else newest(processes, {}) or "", []))
        seen = {process.identity.node_id for process in last if process.identity and process.identity.node_id}
        lost = {node.node_id for node in nodes.values() if node.lost_ns is not None}
        missing = max(0, max(self._nodes, len(seen | left)) - len(left | (seen & lost)))
        names = sorted(nodes[node].hostname for node in seen - left - lost if node in nodes)[:missing]
        if unknown := missing - len(names):
            names = [*names[:_MAX_NAMES], f"{unknown} that never reported"]
        return missing, ", ".join(names[: _MAX_NAMES + 1])

    def _fail(self, failure: wire.RankFailure) -> None:
        """Record how the process of a rank ended, if the rank has reported."""
        known = self.writer.meta.get("failures", [])
        fields = msgspec.structs.asdict(failure)
        if fields in known:
            return
        self.writer.set_meta(failures=[*known, fields])
        for name, process in self.writer.processes.items():
            identity = process.identity
            if identity and (identity.global_rank, identity.pid) == (failure.rank, failure.pid):
                process = self.writer.process(name, failure.t_ns)
                process.exit_code = failure.exit_code

    def _rows(self) -> int:
        """Return a number that changes whenever a row or an end comes."""
        return sum(process.stored + process.ended for process in self.writer.processes.values())


def _exit_code(codes: list[int]) -> int:
    """Return the exit code of a job of several nodes: the first failure that is the node's own."""
    return next((code for code in codes if code and code not in _STOPPED), next(filter(None, codes), 0))
