"""
The relay of one node, without Ray. It accepts the rank batches of its node (`rank_intake`) and forwards them
to the aggregator (`outbox`) until they are known to be stored.

One thread calls `poll` repeatedly; nothing in that loop blocks. At the end of a run the launcher sends
`Finish` over the socket that the ranks also use. In a job of several nodes, each launcher does so. The relay
then has its data stored by the aggregator, or leaves it in a file. It passes on the replies of the
aggregator, which owns the end. The relay also reads what agents have left in files.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from traceml_ray.errors import Errors
from traceml_ray.files import remove
from traceml_ray.importers import v1
from traceml_ray.monitor import private_folders
from traceml_ray.monitor.bulk import TraceSender
from traceml_ray.monitor.finish import ASK_S, DRAIN_S, SIGN_S, WORD_S, failed
from traceml_ray.monitor.node_check import NodeCheck
from traceml_ray.monitor.outbox import WAITING, AggregatorLink, Outbox, Transport
from traceml_ray.monitor.output_files import OutputFiles
from traceml_ray.monitor.private_folders import spooled
from traceml_ray.monitor.rank_connections import RankConnection, RankConnections
from traceml_ray.monitor.rank_files import RankFiles
from traceml_ray.monitor.rank_intake import RankIntake
from traceml_ray.settings import Settings
from traceml_ray.signals.collectives.inspector import InspectorFiles
from traceml_ray.signals.kinds import encoded
from traceml_ray.signals.nodes.records import NODE, NodeSample
from traceml_ray.signals.nodes.sampler import SamplerThread, xid_events
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.spool import SUFFIX, write_spool


@dataclass(eq=False)
class RelaySpool:
    """
    Reads and writes the spool files of a relay. Used with the relay's lock held, except `salvage`.

    Args:
        folder: folder of the files. None: there are no files.
        outbox: holds what is not known to be stored.
        intake: receives the batches.
        errors: counts what cannot be read.
        lock: the relay's.
    """

    folder: Path | None
    outbox: Outbox
    intake: RankIntake
    errors: Errors
    lock: threading.RLock
    _taken: list[Path] = field(default_factory=list)
    """Files that can be removed once their contents are stored."""
    _seen: set[Path] = field(default_factory=set)

    def collect(self, all_stored: Callable[[], bool]) -> None:
        """
        Read the files that agents have left since the last call. Remove earlier files once everything is
        stored.
        """
        if self._taken and all_stored():
            remove(self._taken)
            self._seen.difference_update(self._taken)
            self._taken = []
        self._taken += self._read(self._seen)

    def read(self) -> list[Path]:
        """Read what agents left. Return the files that can be removed once their contents are stored."""
        return self._read(set())

    def _read(self, seen: set[Path]) -> list[Path]:
        """Read the files that are not in `seen`. Return these files."""
        read = []
        for path, batches in spooled(self.folder, self.errors, seen) if self.folder else ():
            for batch, frame in batches:
                try:
                    self.intake.accept(batch, frame)
                except codec.WireError as error:
                    self.errors.note("spool", error)
            read.append(path)
        return read

    def salvage(self) -> list[Path]:
        """
        Write what is not known to be stored into files; return them. Any thread may call this. Raises
        OSError.
        """
        if self.folder is None:
            return []
        with self.lock:
            packets, waiting = self.outbox.salvage()
        packed = [frame for packet in packets for frame in codec.decode(packet, wire.RelayBatch).batches]
        frames: dict[str, list[bytes]] = {}
        for frame in [*packed, *waiting]:
            frames.setdefault(codec.decode(frame, wire.RankBatch).process_id, []).append(frame)
        # An agent's own file, which begins later or goes further, sorts after this one.
        files = {self.folder / f"{process}.0{SUFFIX}": held for process, held in frames.items()}
        for path, held in files.items():
            write_spool(path, held)
        return [*files]


BUSY_S = 0.01
"""Interval of the loop while there is a backlog or an end is being processed, in s."""
LAST_LOOK_S = 0.2
"""Time for which the end waits for the last read of the files into which ranks print, in s."""
SPOOL_S = 1.0
"""Interval at which a relay without a launcher looks for spool files, in s."""
_MOST = codec.MAX_ITEMS // 2
"""Largest number of events, lost rank processes or counts of dropped rows in one packet."""
_EVENT_BYTES = 256 * 1024
"""Largest size of the events in one packet, in bytes: stacks of many processes may exceed a packet."""


class RelayCore:
    """
    The relay of one node.

    Args:
        path: path of the socket to listen on (see `RankConnections`).
        node: this machine.
        spool: folder where agents leave what they could not deliver.
        on_stop: called from the relay's thread when the relay has ended itself.
        clock: monotonic seconds.
        wall: the node's clock, ns since the epoch.

    Raises OSError when it cannot listen.
    """

    def __init__(
        self,
        path: Path,
        node: wire.NodeIdentity,
        transport: Transport,
        sampler: SamplerThread,
        settings: Settings,
        *,
        spool: Path | None = None,
        on_stop: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        self.incarnation = secrets.token_hex(8)
        self.stopped = False
        self._node, self._sampler = node, sampler
        self._idle_ttl = settings.idle_ttl
        self._has_own_folder = spool == path.parent
        """
        Whether the spool is in the relay's own folder. Then no launcher ends the run: Ray processes come and
        go.
        """
        self._on_stop = on_stop
        self._clock, self._wall = clock, wall
        self._lock = threading.RLock()
        self._errors = Errors(debug=settings.debug)
        self._path = path
        self._outbox = Outbox(settings.relay_buffer_bytes)
        self._files = RankFiles([OutputFiles(settings.output_lines, wall), InspectorFiles(clock)])
        self._traces = TraceSender(transport, spool, clock)
        self._intake = RankIntake(
            node,
            self._outbox,
            self._files,
            self._traces,
            self._errors,
            lambda pid: self._connections.caller(pid),
            spool,
            max(settings.thresholds.report_timeout_s, 2 * settings.interval),
            self._lock,
            clock,
        )
        self._check = NodeCheck(self._intake.pid_of, self._lock, wall)
        self._connections = RankConnections(path, wire.MAX_BATCH_BYTES, self._packet, self._intake.gone)
        self._spool = RelaySpool(spool, self._outbox, self._intake, self._errors, self._lock)
        self._link = AggregatorLink(transport, self._outbox, self._errors, self._replied, clock(), wall)
        about: dict[str, codec.Value] = {"pid": os.getpid(), "incarnation": self.incarnation}
        self._intake.events.append(wire.Event("relay_start", time.time_ns(), data=about))
        self._reported = 0
        """Number of errors that the newest packet reports."""
        self._closed = False
        self._ending: Generator[None, None, wire.Finished] | None = None
        self._ender: RankConnection | None = None
        """The launcher that waits for the end of the run."""
        self._next_sign = 0.0
        self._next_tick = self._next_spool = clock()

    def start(self) -> None:
        """Run in a new thread until the relay ends itself or is closed."""
        threading.Thread(target=self._run, name="traceml-relay", daemon=True).start()
        self._files.start()

    def _run(self) -> None:
        while not self.stopped:
            try:
                now = self._clock()
                self.poll(BUSY_S if self._ending else min(self._link.patience(now), self._next_tick - now))
            except Exception as error:
                self._errors.note("turn", error)
                time.sleep(BUSY_S)
        self.close()
        self._on_stop()

    def poll(self, timeout: float = 0.0) -> None:
        """Read what has arrived, waiting at most `timeout` seconds for it, and do what is due."""
        ready = self._connections.select(max(0.0, timeout))
        with self._lock:
            for act in ready:
                act()
            now = self._clock()
            self._link.poll(now)
            if self._ending is not None:
                self._end()
            elif not self._link.hurry and self._is_idle(now):
                self.stopped = True
            if now >= self._next_tick or self._link.hurry or self._ending or self._is_complete():
                self._next_tick = now + (BUSY_S if self._tick(now) else self._link.tick_s)
            if now >= self._next_spool:
                self._next_spool = now + SPOOL_S
                if self._has_own_folder:
                    self._spool.collect(self._all_stored)

    def _is_idle(self, now: float) -> bool:
        """Whether nothing has arrived for long and no watched process that reported is still alive."""
        quiet_s = now - max(self._intake.heard, self._link.heard)
        return quiet_s > self._idle_ttl and not self._connections.in_use

    def _is_complete(self) -> bool:
        """Whether a packet need not wait any longer, if packets wait for all ranks."""
        return self._link.tick_s > wire.TICK_S and self._intake.round_is_complete()

    def accept(self, data: bytes, fresh: bool = True) -> bytes:
        """
        Accept one RankBatch, or a message of version 1, from a process of this node that calls this method
        instead of connecting.

        Returns RankReply bytes. Raises `codec.WireError` for a message that is not accepted. Raises
        LookupError for a message of a rank process that is not known here and does not begin `fresh`: Ray has
        restarted this relay without the caller's noticing, and the caller must resend what may be lost.
        """
        with self._lock:
            return self._intake.receive(data, "batch of a caller", fresh=fresh)

    def flush(self, timeout_s: float) -> bool:
        """
        Have everything that the relay and the spool hold stored now. Called from another thread.

        Returns whether the aggregator has confirmed all of it within `timeout_s`.
        """
        return self._flush(timeout_s, leaving=False)

    def _flush(self, timeout_s: float, leaving: bool) -> bool:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            copies = self._hand_over(leaving)
        stored = False
        while not (stored or self.stopped) and time.monotonic() < deadline:
            with self._lock:
                stored = self._all_stored()
            time.sleep(0 if stored else BUSY_S)
        with self._lock:
            self._link.hurry = self._ending is not None
        if stored:
            remove(copies)
        return stored

    def end(self, timeout_s: float) -> None:
        """
        Hand over all held data. If the aggregator does not accept it, leave it in the folder. Then close,
        unless a launcher waits for the end. Called from another thread.
        """
        if not self._flush(timeout_s, leaving=True):
            self._spool.salvage()
        if self._ending is None:
            self.close()

    def close(self) -> None:
        """Stop listening, close every connection, and remove the socket. Safe to call twice."""
        with self._lock:
            self.stopped = True
            if self._closed:
                return
            self._closed = True
            remove([self._path])
            self._connections.close()
            self._files.close()
            self._check.close()
            self._traces.close()
            if self._has_own_folder:
                private_folders.remove_if_empty(self._path.parent)  # unless the folder holds rows

    def _packet(self, peer: RankConnection, data: bytes, cut: bool) -> None:
        try:
            if cut:
                raise codec.WireError("too_large")
            if codec.tag_of(data) == "finish":
                self._begin_end(peer, codec.decode(data, wire.Finish))
                return
            if codec.tag_of(data) == "request":
                self._hand_on(codec.decode(data, wire.ControlRequest))
                peer.send(codec.encode(wire.Finished(codec.VERSION, "noted")))
                return
        except codec.WireError as error:
            self._errors.note("packet", error, f"pid {peer.pid}")
            return
        try:
            reply = self._intake.receive(data, "packet", peer)
        except codec.WireError:
            return  # counted
        if not (v1.is_v1(data) or peer.send(reply)):  # a later reply acknowledges this one too
            self._errors.count("reply not sent")

    def _hand_on(self, asked: wire.ControlRequest) -> None:
        """Pass a person's request on to the aggregator."""
        if asked.measure is None:
            self._add_events([wire.Event("bundle_request", time.time_ns(), data={"request": asked.request})])
        elif len(self._intake.requests) < _MOST:
            self._intake.requests.append(asked.measure)
        else:
            self._errors.count("request: no room")

    def _replied(self, reply: wire.RelayReply) -> None:
        self._intake.handle_commands(self._check.handle(reply.commands))
        self._intake.verdicts, self._intake.figures = reply.verdicts, reply.figures

    def _tick(self, now: float) -> bool:
        """Send what is pending. Return whether more is waiting that can be sent soon."""
        self._link.resend(now)
        moved = self._link.send(now)
        sample = self._sampler.latest()
        if sample is not None:
            self._add_events(xid_events(sample))
        while self._outbox.may_pack and (sample or self._has_content()):
            self._pack(sample)
            sample = None
            moved = self._link.send(now) or moved
        if sample is not None:
            self._errors.count(f"{NODE.lost}: no room")
        return moved and (self._outbox.waiting or not self._outbox.may_pack)

    def _add_events(self, events: list[wire.Event]) -> None:
        """Queue events of the node for sending. If there are too many, the last ones are only counted."""
        room = max(0, _MOST - len(self._intake.events))
        self._intake.events += events[:room]
        self._errors.count("event: no room", len(events[room:]))

    def _has_content(self) -> bool:
        """Whether there is anything to pack except a sample."""
        outbox, intake = self._outbox, self._intake
        content = outbox.waiting or outbox.drops_to_report or intake.lost or intake.events or intake.requests
        counted = sum(errors.total() for errors in self._counted())
        read = self._files.waiting or self._check.waiting
        return bool(content or read or counted != self._reported)

    def _counted(self) -> list[Counter[str]]:
        return [
            self._errors,
            self._sampler.errors,
            self._connections.errors,
            self._outbox.lost,
            *self._files.errors,
            self._check.errors,
            self._traces.errors,
        ]

    def _noting(self) -> list[Errors]:
        return [self._errors, self._connections.errors, self._traces.errors]

    def _pack(self, sample: NodeSample | None) -> None:
        intake, counted = self._intake, self._counted()
        read = self._files.drain()
        for name, records in self._check.drain().items():
            read.setdefault(name, []).extend(records)
        intake.begin_round()
        self._reported = sum(errors.total() for errors in counted)
        lost, intake.lost = intake.lost[:_MOST], intake.lost[_MOST:]
        most = _count_within(intake.events[:_MOST], _EVENT_BYTES)
        events, intake.events = intake.events[:most], intake.events[most:]
        requests, intake.requests = intake.requests, []
        message = wire.RelayBatch(
            v=codec.VERSION,
            node=self._node,
            incarnation=self.incarnation,
            seq=self._outbox.next_seq,
            sent_ns=self._wall(),
            answer=self._link.pop_answer(),
            batches=self._outbox.select(),
            dropped=self._outbox.pop_dropped(_MOST),
            records={} if sample is None else encoded([sample]),
            lost=lost,
            events=events + [cause for errors in self._noting() for cause in errors.causes()],
            errors={name: n for errors in counted for name, n in errors.items()},
            of_ranks={name: encoded(records) for name, records in read.items()},
            requests=requests,
        )
        self._outbox.pack(codec.encode(message))

    # -- the end ---------------------------------------------------------------------------------

    def _hand_over(self, leaving: bool) -> list[Path]:
        """
        Read the spool, and send unconfirmed packets again so that the last one asks for a commit. Return the
        files that can be removed once everything is stored. A relay that is `leaving` may be ended before
        that, or its data may arrive too late, so it first writes what it holds into files.
        """
        files = self._spool.read()
        if leaving:
            self._files.read_once_more(LAST_LOOK_S)
            try:
                files += self._spool.salvage()
            except OSError as error:  # no room: it may still be stored by the aggregator
                self._errors.note("spool", error)
        self._link.hurry = True
        self._outbox.rewind()
        return files

    def _all_stored(self) -> bool:
        return not self._has_content() and not self._outbox.unconfirmed

    def _begin_end(self, peer: RankConnection, message: wire.Finish) -> None:
        self._ender, self._link.end_state = peer, WAITING
        self._ending = self._steps(msgspec.structs.replace(message, node_id=self._node.node_id))

    def _end(self) -> None:
        """Continue the end of the run. The launcher gets signs of life, and finally the reply."""
        assert self._ending is not None
        assert self._ender is not None
        try:
            next(self._ending)
            if self._clock() >= self._next_sign:
                self._next_sign = self._clock() + SIGN_S
                self._ender.send(codec.encode(self._link.end_state))
            return
        except StopIteration as done:
            finished: wire.Finished = done.value
        except Exception as error:
            self._errors.note("end", error)
            finished = failed(error)
        self._ending = None
        self._link.hurry = False
        self._ender.send(codec.encode(finished))
        self.stopped = True

    def _steps(self, message: wire.Finish) -> Generator[None, None, wire.Finished]:
        """
        The steps of an end: let ranks end, read their spool files, have all stored, ask until the session has
        ended.
        """
        link, started = self._link, self._clock()
        while self._connections.ranks_connected and self._clock() < started + DRAIN_S:
            yield
        copies = self._hand_over(leaving=True)
        since = asks = started
        asked_at: int | None = None
        state = link.end_state
        while self._clock() < WORD_S + min(since, max(link.alive_at or started, started - WORD_S / 2)):
            if link.end_state is not state:
                asked_at, asks, state = None, self._clock() + ASK_S, link.end_state
                if not state.pending:
                    remove(copies if state.ok else ())
                    return state
                self._next_sign = self._clock()
                since = self._clock() if state.waiting or state.state == "writing" else since
            if asked_at != link.failures and self._clock() >= asks and self._all_stored():
                message = msgspec.structs.replace(message, waited_s=self._clock() - started)
                asked_at = link.failures if link.finish(message) else None
            yield
        self._spool.salvage()
        return wire.Finished(codec.VERSION, "failed", "the aggregator did not answer in time")


def _count_within(events: list[wire.Event], most_bytes: int) -> int:
    """Return how many of the first `events` fit into `most_bytes` bytes; at least one."""
    sizes = itertools.accumulate(map(codec.size_of, events))
    return max(1, sum(size <= most_bytes for size in sizes))
