"""
The aggregator without Ray. It stores what relays send, judges it and answers questions. Answers use memory
for what the session file does not have.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.errors import Errors
from traceml_ray.files import read_part
from traceml_ray.monitor.bundling import Bundling
from traceml_ray.monitor.ending import Endings
from traceml_ray.monitor.finish import QUIET_S, failed
from traceml_ray.monitor.live_steps import LiveSteps, Recent
from traceml_ray.monitor.live_verdict import LiveJudge
from traceml_ray.monitor.private_folders import spooled
from traceml_ray.monitor.profiling import WAITING, LayerRequests, Profiling
from traceml_ray.monitor.relay_intake import RelayIntake
from traceml_ray.monitor.straggler_watch import StragglerWatch
from traceml_ray.monitor.tracker_exchange import TrackerExchange
from traceml_ray.reports.answers import Answers
from traceml_ray.reports.files import write_reports
from traceml_ray.settings import Settings
from traceml_ray.signals.lives import LIVE
from traceml_ray.store import query
from traceml_ray.store.history_reader import RunSteps
from traceml_ray.store.profiles import remove_profile
from traceml_ray.store.query import OfRun, QueryError, Request
from traceml_ray.store.rank_processes import RankProcess, current_ranks, has_ended, is_over, process_labels
from traceml_ray.store.results import LiveVerdict
from traceml_ray.store.session import REPORTS, SessionFolder
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.writer import SessionWriter
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.messages import TracePart, TraceReply

_PREFIX = "snapshot-"
_MOST = 3
"""Copies at the same time; another one replaces the oldest."""


class Snapshots:
    """Keeps copies in the session folder `folder`. Copies that an earlier aggregator left are removed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.remove()

    def make(self, session: SessionFile) -> str:
        """Copy the session file in its present state; return the name of the copy."""
        for old in sorted(self._copies(), key=lambda path: path.stat().st_mtime_ns)[: 1 - _MOST]:
            old.unlink(missing_ok=True)
        path = self._folder / f"{_PREFIX}{secrets.token_hex(4)}.sqlite"
        path.touch(mode=0o600)
        try:
            session.copy_to(path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path.name

    def read(self, name: str, offset: int, n: int) -> bytes:
        """
        Return at most `n` bytes of a copy or of a report, b"" beyond its end.

        Raises QueryError for any other name, and for a file that is not there (yet, or any more).
        """
        if name not in REPORTS and name not in {path.name for path in self._copies()}:
            raise QueryError(f"no file called {name!r} can be read")
        try:
            return read_part(self._folder / name, offset, n)
        except FileNotFoundError:
            raise QueryError(f"no {name} yet: reports are written at the end") from None

    def remove(self, name: str | None = None) -> None:
        """Remove the copy called `name`. None: remove all copies."""
        for path in self._copies():
            if name in (None, path.name):
                path.unlink(missing_ok=True)

    def _copies(self) -> list[Path]:
        return list(self._folder.glob(f"{_PREFIX}*.sqlite"))


_FRESH = (query.GetSummary, query.GetRuns, query.GetNodes, query.GetRanks, query.Snapshot)
"""Questions whose answers contain everything that has arrived."""


class LiveAnswers(Answers):
    """
    Args:
        limits: of the session.
        writer: of the session file.
        judge: has the current verdicts.
        steps: the histories of the live runs.
        errors: the aggregator's error counts, by place.
        flush: has the relays hand over what they hold, before a summary or a snapshot.
        commit: writes pending rows to the file.
        used: called for questions that do not come from an open page.
        request: requests a bundle by an id and returns why there will be none. Called with the writer's lock.
        profile: requests a profile in the same way.
        gauges: records Ray's own metrics; None: this is no process of Ray.
        layers: requests the time of layers in the same way.
        trackers: passes figures on to the ranks.
    """

    def __init__(
        self,
        limits: Thresholds,
        writer: SessionWriter,
        judge: LiveJudge,
        steps: LiveSteps,
        errors: Errors,
        *,
        flush: Callable[[], object],
        commit: Callable[[], bool],
        used: Callable[[], None],
        request: Callable[[str], str | None],
        profile: Callable[[wire.ProfileRequest, str], str | None],
        layers: Callable[[wire.LayersRequest, str], str | None],
        gauges: Callable[[list[query.RayGauge]], object] | None,
        trackers: TrackerExchange,
    ) -> None:
        super().__init__(writer.path.parent, limits, errors)
        self.snapshots = Snapshots(writer.path.parent)
        self._writer, self._judge, self._live = writer, judge, steps
        self._flush, self._commit, self._used = flush, commit, used
        self._request, self._profile, self._layers = request, profile, layers
        self._gauges = gauges
        self._by_kind[query.Dump] = self._dump
        self._by_kind[query.StartProfile] = self._start_profile
        self._by_kind[query.StartLayers] = self._start_layers
        self._by_kind[query.RemoveProfile] = lambda asked: remove_profile(self.folder, asked.id)
        self._by_kind[query.NoteSinks] = self._note_sinks
        self._by_kind[query.SetRayMetrics] = self._set_ray_metrics
        self._by_kind[query.PassFigures] = lambda asked: trackers.pass_on(asked.run, asked.figures)
        self._by_kind[query.Snapshot] = self._snapshot
        self._by_kind[query.ReadFile] = lambda asked: self.snapshots.read(asked.name, asked.offset, asked.n)
        self._by_kind[query.Discard] = lambda asked: self.snapshots.remove(asked.name)

    def _used_for(self, requests: list[Request[Any]]) -> None:
        self._used()
        if any(isinstance(request, (query.GetSummary, query.Snapshot)) for request in requests):
            self._flush()
        if any(isinstance(request, _FRESH) for request in requests):
            self._commit()

    def _known(self) -> tuple[list[RankProcess], Mapping[str, Any], Mapping[str, int]]:
        with self._writer.lock:
            return list(self._writer.processes.values()), dict(self._writer.meta), dict(self._errors)

    def _over(self, run: str | None = None) -> bool:
        return is_over(self._writer.meta, run)

    def _verdict_now(self, run: str | None) -> LiveVerdict | None:
        return self._judge.answer(run)

    def _judged_live(self, asked: OfRun[Any]) -> Any:
        return self._judge.judged_now(asked)

    @contextmanager
    def _history(self, run: str | None, read_on: bool) -> Iterator[RunSteps]:
        if read_on and self._over():  # nobody judges any more
            self._judge.feed()
        # Of a run that has ended, the last rows may not have been judged: the file has them all.
        live = None if run is None or has_ended(self._writer.meta, run) else self._live.get(run)
        if live is None:
            with super()._history(run, read_on) as stored:
                yield stored
        else:
            with self._live.lock.reading():
                yield live

    def _dump(self, asked: query.Dump) -> None:
        with self._writer.lock:
            why = self._request(asked.id)
        if why is not None:
            raise query.QueryError(f"no bundle: {why}")

    def _start_profile(self, asked: query.StartProfile) -> None:
        why = self._profile(asked.request, asked.id)
        if why is not None:
            raise query.QueryError(f"no profile: {why}")

    def _start_layers(self, asked: query.StartLayers) -> None:
        with self._writer.lock:
            why = self._layers(asked.request, asked.id)
        if why is not None:
            raise query.QueryError(f"no layers: {why}")

    def _note_sinks(self, asked: query.NoteSinks) -> None:
        with self._writer.lock:
            self._writer.set_meta(sinks=msgspec.to_builtins(asked.sinks))

    def _set_ray_metrics(self, asked: query.SetRayMetrics) -> None:
        if self._gauges is None:
            raise query.QueryError("no metrics: the aggregator is no process of Ray")
        self._gauges(asked.gauges)

    def _snapshot(self, _: query.Snapshot) -> str:
        """
        Copy the session file after storing everything that has arrived. The reports are made from the same
        state.
        """
        with self._file() as file:
            put, errors = self._writer.put, self._errors
            write_reports(self._files, file, self._limits, quick=True, put=put, errors=errors)
            return self.snapshots.make(file)


MANY_NODES, MANY_NODES_TICK_S = 64, 1.0
"""Relays of more nodes send less often: each call costs the aggregator some 0.3 ms of CPU time."""


class RelayPace:
    """
    Chooses how often relays send. One per session.

    Args:
        ticks: returns monotonic time in ns.
    """

    def __init__(self, ticks: Callable[[], int]) -> None:
        self._ticks = ticks
        self.tick_s = wire.TICK_S
        """Interval at which a relay must send, in s."""
        self._rows_at: dict[str, int] = {}
        """Time at which ranks of each node last reported. Only has nodes that still report."""
        self._reported: set[str] = set()
        """Nodes whose ranks have reported since the last judgement."""

    def reported(self, node_id: str) -> None:
        """Note that ranks of a node have reported."""
        self._rows_at[node_id] = self._ticks()
        self._reported.add(node_id)

    def adapt(self, nodes: int) -> None:
        """
        Choose how often relays send when there are `nodes` nodes. Forget nodes whose ranks have fallen
        silent.
        """
        self.tick_s = wire.TICK_S if nodes <= MANY_NODES else MANY_NODES_TICK_S
        since = self._ticks() - int(QUIET_S * 1e9)
        self._rows_at = {node: rows_ns for node, rows_ns in self._rows_at.items() if rows_ns > since}

    def begin_round(self) -> None:
        """Begin a new round: everything reported so far has been judged."""
        self._reported.clear()

    @property
    def many_nodes(self) -> bool:
        """Whether there are so many nodes that relays send less often, all at the same times."""
        return self.tick_s > wire.TICK_S

    @property
    def round_is_complete(self) -> bool:
        """
        With many nodes: whether ranks of each node have reported since the last judgement, so the next may
        begin.
        """
        return self.many_nodes and 0 < len(self._rows_at) <= len(self._reported)


class AggregatorCore:
    """
    State of one session. In a folder that already has a session file, it continues where the file ends.

    Args:
        folder: the session folder; must exist.
        settings: of the session.
        info: what the launcher knows (launcher, command, world_size, nnodes, strategy, …).
        clock: returns wall-clock time in ns.
        ticks: returns monotonic time in ns. Whether a session is idle must not depend on the wall clock.
        flush: makes the relays hand over what they hold, before a question that needs all data.
        gauges: records Ray's own metrics; None: this is no process of Ray.

    Raises `SessionFileError` when the session file cannot be made or used.
    """

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        info: dict[str, Any],
        clock: Callable[[], int] = time.time_ns,
        ticks: Callable[[], int] = time.monotonic_ns,
        flush: Callable[[], object] = lambda: None,
        gauges: Callable[[list[query.RayGauge]], object] | None = None,
    ) -> None:
        self.folder = SessionFolder(Path(folder))
        self.settings, self._clock, self._ticks = settings, clock, ticks
        self._writer = SessionWriter(
            self.folder.sqlite, max_bytes=settings.session_bytes, thresholds=settings.thresholds,
            output_lines=settings.output_lines,
        )  # fmt: skip
        self.errors = Errors(self._writer.meta.get("errors"), debug=settings.debug)
        recent, signals = Recent(), [make(self._writer.lock, lambda: ticks() / 1e9) for make in LIVE]
        self._steps = LiveSteps(
            settings.thresholds, lambda run: SessionFile(self._writer.path, run=run), self.errors, signals
        )
        self._bundling = Bundling(settings, self._writer, self.errors, clock, ticks, self.commit)
        self._judge = LiveJudge(
            self._writer, recent, self._steps, signals, settings, clock, self.errors,
            self._bundling,
        )  # fmt: skip
        self._profiling = Profiling(
            settings, self._writer, self.errors, clock, ticks, self._judge.running, self._judge.peer,
            self.commit,
        )  # fmt: skip
        self._layers = LayerRequests(self.errors, self._judge.running, lambda: ticks() / 1e9)
        self._stragglers = StragglerWatch(settings, self._judge.running, clock, self.errors)
        self._trackers = TrackerExchange()
        self._intake = RelayIntake(
            self._writer, recent, self._steps, signals, self._judge, self._bundling, self._profiling,
            self._layers, self._trackers, clock, self.errors,
        )  # fmt: skip
        self._answers = LiveAnswers(
            settings.thresholds, self._writer, self._judge, self._steps, self.errors,
            flush=flush, commit=self.commit, used=self._be_busy, request=self._bundling.requested,
            profile=self._profiling.ask, layers=self._layers.ask, gauges=gauges, trackers=self._trackers,
        )  # fmt: skip
        self.endings = Endings(
            self.folder, settings, self._writer, self.errors, self._bundling, self._profiling, clock, ticks,
            self._intake.resize_groups, self._let_go,
        )  # fmt: skip
        self.pace = RelayPace(ticks)
        self._busy_ns = ticks()
        self._note_start(info)
        self._reload()

    def _note_start(self, info: dict[str, Any]) -> None:
        """Store what is known at the start, except what an earlier process of this session has stored."""
        start = {"session": self.folder.name, "started_at": self._clock(), "status": "running", **info}
        start["settings"] = self.settings.changed()
        self._writer.set_meta(**{key: self._writer.meta.get(key, value) for key, value in start.items()})

    @property
    def verdict(self) -> Verdict | None:
        """The live verdict on the newest run."""
        return self._judge.verdict()

    @property
    def started_at(self) -> int:
        """Time at which the session began, in ns since the epoch."""
        began: int = self._writer.meta["started_at"]
        return began

    def ingest(self, data: bytes) -> bytes:
        """
        Accept an encoded `RelayBatch`. Return an encoded `RelayReply` that says what is on disk.

        A message that was accepted before is not stored again, only answered. A message that skips a number
        is not accepted: an earlier message was lost and will be sent again. A malformed message is dropped
        and counted.
        """
        incarnation, node_id, now = "", "", self._clock()
        try:
            batch = codec.decode(data, wire.RelayBatch)
            incarnation, node_id = batch.incarnation, batch.node.node_id
            received = self._intake.decode(batch)
            with self._writer.lock:
                if batch.batches:
                    self._be_busy()
                    self.pace.reported(batch.node.node_id)
                self._intake.accept(received, now)
                self._stragglers.answered(node_id, itertools.chain(*received.of_ranks.values()))
                self._count_lost()
        except codec.WireError as error:
            self.errors.note("ingest", error)
        except Exception as error:
            self.errors.swallow("ingest", error)
        stored = self._writer.committed.get(incarnation, 0)
        commands = [*self._judge.commands, *self._profiling.commands, *self._layers.commands]
        commands += self._stragglers.commands(node_id)
        return codec.encode(
            wire.RelayReply(
                codec.VERSION,
                stored,
                commands,
                self._judge.brief,
                self.pace.tick_s,
                self._clock(),
                self._trackers.figures,
            )
        )

    def bulk(self, data: bytes) -> bytes:
        """
        Accept an encoded `TracePart`. Return an encoded `TraceReply`.

        May run in its own thread. It does not take the lock that protects rows, and does not wait for the
        disk.
        """
        try:
            return codec.encode(self._profiling.accept_part(codec.decode(data, TracePart)))
        except codec.WireError as error:
            self.errors.note("bulk", error)
        except Exception as error:
            self.errors.swallow("bulk", error)
        return codec.encode(TraceReply(codec.VERSION))

    def commit(self) -> bool:
        """
        Write pending rows. If the disk refuses, count the error, return False and keep the rows pending.

        After the end of the session nothing is written, see `SessionWriter`.
        """
        try:
            with self._writer.lock:
                if not self._writer.at_rest:
                    self._intake.resize_groups()
                    self.pace.adapt(sum(node.lost_ns is None for node in self._writer.nodes.values()))
                    self._count_lost()
                    self._writer.set_meta(errors=dict(self.errors))
                    if (waiting := self._profiling.waiting()) or WAITING in self._writer.meta:
                        self._writer.set_meta(**{WAITING: waiting})  # with the packets that brought it
                    for cause in self.errors.causes():
                        self._writer.add_event(cause)
            self._writer.commit()
        except Exception as error:
            self.errors.note("commit", error)
            return False
        try:
            self._writer.fold()
        except Exception as error:  # the next commit tries again
            self.errors.note("fold", error)
        return True

    def judge(self) -> None:
        """Judge the last steps of every active run, write the bundle that is due and advance profiling."""
        self.pace.begin_round()
        try:
            self._judge.judge()
        except Exception as error:
            self.errors.swallow("judge", error)
        self._bundling.write_due()
        self._profiling.tick()
        self._layers.tick()
        self._stragglers.tick()

    def end(self, data: bytes) -> bytes:
        """
        Accept an encoded `Finish` of a node, or the end of a run. Return an encoded `Finished`. May be called
        repeatedly.
        """
        try:
            kind: type[wire.Finish | wire.RunEnd] = (
                wire.RunEnd if codec.tag_of(data) == "run" else wire.Finish
            )
            message = codec.decode(data, kind)
            self._be_busy()
            return codec.encode(self.endings.answer(message))
        except Exception as error:
            self.errors.note("end", error)
            return codec.encode(failed(error))

    def finish(self, finish: wire.Finish, how: str = "") -> None:
        """End the session now, see `Endings.finish`."""
        self._be_busy()
        self.endings.finish(finish, how)

    @property
    def over(self) -> bool:
        """Whether the session has ended and no node is expected to report any more."""
        return self.endings.over(self.idle_s())

    @property
    def fenced(self) -> bool:
        """Whether another process has taken the session over: nothing is stored here any more."""
        return self._writer.fenced

    def stored(self) -> SessionFile:
        """
        Return a reader of the session file, whichever process writes the file. Raises
        `SessionFileError`.
        """
        return self._writer.reader()

    def node_state(self, node_id: str, hostname: str, address: str, alive: bool) -> None:
        """
        Record that a node of the cluster is present, or is gone with its ranks. May be called repeatedly.

        A node that appears before any rank has reported was present from the start and makes no event. If a
        node is gone, all its relays are gone too (`ActorConfig.launch`).
        """
        with self._writer.lock:
            now, node = self._clock(), self._writer.nodes.get(node_id)
            if alive and (node is None or node.lost_ns is not None):
                self._writer.node(node_id, hostname, address).lost_ns = None
                if self._writer.processes:
                    joined = wire.Event("node_joined", now, message=f"{hostname} ({address}) joined")
                    self._writer.add_event(joined, node_id=node_id)
            elif not alive:
                gone = [name for name in self._writer.nodes if f"{name}.".startswith(f"{node_id}.")]
                for name in gone:
                    self._node_is_gone(name, now)

    def _node_is_gone(self, node_id: str, now: int) -> None:
        node = self._writer.nodes[node_id]
        if node.lost_ns is None:
            self._writer.node(node_id, node.hostname, node.address).lost_ns = now
            self._lose_node(node_id, f"{node.hostname} ({node.address}) is gone from the cluster", now)

    def ingest_spool(self, folder: Path) -> list[Path]:
        """
        Ingest the `.spool` files of `folder`, which hold what agents could not deliver. A malformed file is
        counted.

        Returns the files that can be removed once their contents are stored.
        """
        read = []
        for path, batches in spooled(folder, self.errors, set()):
            received = [self._intake.of_rank(batch) for batch, _ in batches]
            with self._writer.lock:
                for batch in received:
                    self._intake.accept_rank(batch, None)
            read.append(path)
        return read

    def query(self, request: bytes) -> bytes:
        """Answer a question, see `store.query`. Errors are also returned as answers."""
        return self._answers.reply(request)

    def idle_s(self) -> float:
        """Seconds since the last rank message, run message, or question from anything but an open page."""
        return (self._ticks() - self._busy_ns) / 1e9

    def _count_lost(self) -> None:
        for what, n in self._writer.lost.items():
            self.errors.count(what, n)
        self._writer.lost.clear()

    def _be_busy(self) -> None:
        self._busy_ns = self._ticks()

    def close(self) -> None:
        """Close the session file."""
        self._steps.close()
        self._answers.close()
        self._writer.close()

    def _let_go(self) -> None:
        self._steps.close()
        self._answers.close()
        self._answers.snapshots.remove()

    def _lose_node(self, node_id: str, message: str, now: int) -> None:
        self._writer.add_event(wire.Event("node_lost", now, message=message), node_id=node_id)
        for name, process in self._writer.processes.items():
            if process.identity and process.identity.node_id == node_id and not process.ended:
                self._writer.process(name, now).lost = True
                event = wire.Event("rank_lost", now, message="its node was lost", data={"process_id": name})
                self._intake.add_event(event, process, node_id)

    def _reload(self) -> None:
        """Restore the last rows after a restart, so that verdicts continue at once."""
        with self._writer.reader() as reader:
            self.endings.events.update(reader.run_events())
            for run, processes in self._judge.live_runs.processes().items():
                reader.run = run
                self._judge.resume(run, reader, {process.id for process in processes})
                labels = process_labels(self._writer.nodes.values(), self._writer.processes.values())
                self._steps.resume(
                    run, current_ranks(processes), labels, reader.rows(last=self._judge.tail)[0]
                )
