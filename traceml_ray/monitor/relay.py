"""
The relay of one node, free of Ray: takes the rank batches of its node and forwards them to the
aggregator until it says that they are on disk.

One thread runs `turn` again and again; nothing in it blocks. At the end of a run the launcher sends `Finish`
over the same socket that the ranks use; of a job of several nodes, each launcher does. The relay has stored
what it holds, or leaves it in a file, and passes on what the aggregator, which owns the end, says of it.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from traceml_ray import v1, wire
from traceml_ray.errors import Errors
from traceml_ray.files import remove
from traceml_ray.monitor import private_folders as folders
from traceml_ray.monitor import proc_inspect as processes
from traceml_ray.monitor.finish import ASK_S, DRAIN_S, SIGN_S, WORD_S
from traceml_ray.monitor.node_sampler import SamplerThread, xid_events
from traceml_ray.monitor.outbox import Outbox
from traceml_ray.monitor.rank_connections import RankConnection, RankConnections
from traceml_ray.settings import Settings
from traceml_ray.spool import SUFFIX, read_spool, write_spool

TICK_S = 0.25
BUSY_S = 0.01
"""How often the loop comes round while there is a backlog, or an end to bring about."""
RESEND_S = 3.0
"""Without a confirmation for so long (commits are 1 s apart), what is unconfirmed is sent again."""
SPOOL_S = 1.0
"""How often a relay without a launcher looks for what agents left."""
MAX_STREAMS = 4096
"""Processes of this node that report at the same time; what one more sends is refused."""
_WAITING = wire.Finished(wire.VERSION, "waiting")
_MOST = wire.MAX_ITEMS // 2
"""Of what happened, told in one packet."""


class Transport(Protocol):
    """The way to the aggregator. No call blocks or raises; replies come later, in order."""

    def ingest(self, data: bytes, commit: bool) -> bool:
        """Hand over a RelayBatch (`commit`: store it at once); reply: RelayReply. False: not now."""

    def finish(self, data: bytes) -> bool:
        """Hand over Finish; reply: Finished. False: not now."""

    def poll(self) -> list[bytes | Exception]:
        """Return what came back. After an exception, nothing sent before it will be replied to."""


@dataclass(slots=True)
class _Stream:
    """What is remembered of one rank's process."""

    seq: int = -1
    final: bool = False
    pid: int | None = None
    heard: float = 0.0
    memory_events: Path | None = None
    oom_kills: int | None = None
    """In the process's cgroup, when it was first heard of."""


class RelayCore:
    """
    Args:
        path: of the socket to listen on (see `peers.RankConnections`).
        node: this machine.
        spool: folder where agents leave what they could not deliver.
        on_stop: called from the relay's thread when it has ended itself.
        clock: monotonic seconds.

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
    ) -> None:
        self.incarnation = secrets.token_hex(8)
        self.stopped = False
        self._node = node
        self._transport = transport
        self._sampler = sampler
        self._idle_ttl = settings.idle_ttl
        self._silent_s = max(settings.thresholds.report_timeout_s, 2 * settings.interval)
        self._commands: list[wire.Command] = []
        """What the aggregator asks of the ranks, said with every reply until it asks no more."""
        self._verdicts: dict[str, dict[str, wire.Value]] = {}
        """Of each run, for the log of its rank 0."""
        self._obeyed: set[wire.Value] = set()
        self._spool = spool
        self._on_stop = on_stop
        self._clock = clock
        self._lock = threading.RLock()
        self._errors = Errors(debug=settings.debug)
        self._outbox = Outbox(settings.relay_buffer_bytes)
        self._streams: dict[str, _Stream] = {}
        self._callers: dict[int, RankConnection] = {}
        self._v1 = v1.Senders(f"v1-{node.hostname}")
        self._lost: list[str] = []
        about: dict[str, str | int | float | None] = {"pid": os.getpid(), "incarnation": self.incarnation}
        self._events = [wire.Event("relay_start", time.time_ns(), data=about)]
        self._reported = 0
        """Errors that the newest packet tells of."""
        self._closing = self._closed = False
        self._ending: Generator[None, None, wire.Finished] | None = None
        self._ender: RankConnection | None = None
        self._answer = _WAITING
        """What the aggregator has said last of the end."""
        self._failures = 0
        self._next_sign = 0.0
        self._sign: float | None = None
        """When the aggregator has last stored something, or said its first word, or one about the end."""
        self._heard = self._progress = self._next_tick = clock()
        self._next_spool = clock()
        self._collected: list[Path] = []
        self._unreadable: set[Path] = set()
        self._path = path
        self._peers = RankConnections(path, wire.MAX_BATCH_BYTES, self._packet, self._gone)

    def start(self) -> None:
        """Run in a thread of its own until the relay ends itself or is closed."""
        threading.Thread(target=self._run, name="traceml-relay", daemon=True).start()

    def _run(self) -> None:
        while not self.stopped:
            try:
                self.turn(BUSY_S if self._ending else max(0.0, self._next_tick - self._clock()))
            except Exception as error:
                self._errors.note("turn", error)
                time.sleep(BUSY_S)
        self.close()
        self._on_stop()

    def turn(self, timeout: float = 0.0) -> None:
        """Read what is there, waiting at most `timeout` seconds for it, and do what is due."""
        ready = self._peers.select(timeout)
        with self._lock:
            for act in ready:
                act()
            now = self._clock()
            for reply in self._transport.poll():
                self._replied(reply, now)
            if self._ending is not None:
                self._next_tick = now
                self._end()
            elif self._closing:
                self._next_tick = now
            elif now - self._heard > self._idle_ttl and not self._in_use():
                self.stopped = True
            if now >= self._next_tick:
                self._next_tick = now + (BUSY_S if self._tick(now) else TICK_S)
            if now >= self._next_spool:
                self._next_spool = now + SPOOL_S
                self._collect()

    def _in_use(self) -> bool:
        """Whether a process that reported still lives; one that cannot be watched has to call for that."""
        watched = any(caller.pidfd is not None for caller in self._callers.values())
        return watched or self._peers.ranks_connected

    def take(self, data: bytes, fresh: bool = True) -> bytes:
        """
        Take one RankBatch, or a message of version 1, from a process of this node that calls and does not
        connect.

        Returns RankReply bytes; raises `wire.WireError` for a message that is not accepted, and LookupError
        for one of a stream that is not known here and does not begin `fresh`: Ray has restarted this relay,
        its caller has not noticed, and is to send again what may be lost.
        """
        with self._lock:
            if v1.is_v1(data):
                return self._take_v1(data, None)
            try:
                batch = wire.decode(data, wire.RankBatch, max_bytes=wire.MAX_BATCH_BYTES)
                if not fresh and batch.stream not in self._streams:
                    raise LookupError("this relay is another one than before")
                pid = batch.identity.pid if batch.identity else None
                reply = self._take(batch, data, pid)
            except wire.WireError as error:
                self._errors.note("batch of a caller", error)
                raise
            if pid is not None:
                if pid not in self._callers:
                    self._callers[pid] = self._peers.watch(pid)
                self._callers[pid].streams.add(batch.stream)
            return reply

    def flush(self, timeout_s: float) -> bool:
        """
        Have everything that is here, and in the spool, stored now. Called from another thread.

        Returns whether the aggregator has confirmed all of it within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            read = self._read_spool()
            self._hurry()
        stored = False
        while not (stored or self.stopped) and time.monotonic() < deadline:
            with self._lock:
                stored = self._all_stored()
            time.sleep(0 if stored else BUSY_S)
        with self._lock:
            self._closing = self._ending is not None
        if stored:
            remove(read)
        return stored

    def end(self, timeout_s: float) -> None:
        """
        Hand over what is held, or leave it in the folder when nobody takes it. Then close, unless a launcher
        waits for what becomes of the end. Called from another thread.
        """
        if not self.flush(timeout_s):
            self.salvage()
        if self._ending is None:
            self.close()

    def close(self) -> None:
        """Stop listening, let go of every connection, and take the socket away; safe to call twice."""
        with self._lock:
            self.stopped = True
            if self._closed:
                return
            self._closed = True
            remove([self._path])
            self._peers.close()
            if self._has_own_folder():
                folders.leave(self._path.parent)  # unless somebody's rows are still in there

    # -- from the ranks --------------------------------------------------------------------------

    def _packet(self, peer: RankConnection, data: bytes, cut: bool) -> None:
        try:
            if cut:
                raise wire.WireError("too_large")
            if v1.is_v1(data):
                self._take_v1(data, peer)
                return
            if wire.tag_of(data) == "finish":
                self._begin_end(peer, wire.decode(data, wire.Finish))
                return
            batch = wire.decode(data, wire.RankBatch)
            reply = self._take(batch, data, peer.pid)
        except wire.WireError as error:
            self._errors.note("packet", error, f"pid {peer.pid}")
            return
        peer.streams.add(batch.stream)
        if not peer.send(reply):  # a later reply acknowledges this one too
            self._errors.count("reply not sent")

    def _take(self, batch: wire.RankBatch, data: bytes, pid: int | None = None) -> bytes:
        """Take a batch, return RankReply. Raises `wire.WireError` where there are too many streams."""
        if batch.stream not in self._streams and not self._has_room():
            raise wire.WireError("too_many_streams")
        self._heard = self._clock()
        stream = self._streams.setdefault(batch.stream, _Stream())
        stream.heard = self._heard
        if stream.pid is None and pid is not None:
            stream.pid, stream.memory_events = pid, processes.memory_events(pid)
            stream.oom_kills = processes.oom_kills(stream.memory_events)
        if batch.seq > stream.seq:
            self._outbox.add(batch.stream, batch.seq, len(batch.flags), data)
            stream.seq = batch.seq
            stream.final = batch.final
        settled = self._outbox.stored.get(batch.stream, -1)
        who = batch.identity
        verdict = self._verdicts.get(who.job_id, {}) if who is not None and who.global_rank == 0 else {}
        reply = wire.RankReply(wire.VERSION, batch.stream, stream.seq, self._commands, settled, verdict)
        return wire.encode(reply)

    def _has_room(self) -> bool:
        """Whether one more stream may begin; those that have said their last word make room."""
        if len(self._streams) >= MAX_STREAMS:
            for name in [name for name, stream in self._streams.items() if stream.final]:
                del self._streams[name]
                self._outbox.stored.pop(name, None)
        return len(self._streams) < MAX_STREAMS

    def _take_v1(self, data: bytes, peer: RankConnection | None) -> bytes:
        """
        Take a message of version 1; whoever is connected reads no reply. Raises the last of what is refused
        where nothing was taken.
        """
        reply, refused = b"", wire.WireError("malformed")
        pid = peer.pid if peer else None
        for found in self._v1.read(data, pid or 0, time.time_ns()):
            try:
                if isinstance(found, wire.WireError):
                    raise found
                reply = self._take(found, wire.encode(found), pid)
            except wire.WireError as error:
                place, who = ("packet", f"pid {pid}") if pid else ("batch of a caller", "")
                self._errors.note(place, error, who)
                refused = error
                continue
            if peer is not None:
                peer.streams.add(found.stream)
        if not (reply or peer):
            raise refused
        return reply

    def _gone(self, peer: RankConnection) -> None:
        """Forget the streams of a process that has ended; what it did not end itself is lost."""
        self._callers.pop(peer.pid, None)
        self._v1.forget(peer.pid)
        for name in peer.streams:
            stream = self._streams.get(name)
            if stream is None:
                continue
            if not stream.final:
                if self._spooled(name):  # its last words are read at the end of the run
                    continue
                self._lost.append(name)
                self._events.append(_how_it_ended(name, peer.pid, stream))
            del self._streams[name]
            self._outbox.stored.pop(name, None)

    def _spooled(self, stream: str) -> bool:
        return self._spool is not None and (self._spool / f"{stream}{SUFFIX}").exists()

    # -- to the aggregator -----------------------------------------------------------------------

    def _tick(self, now: float) -> bool:
        """Send what there is; return whether more is waiting that may go soon."""
        if not self._outbox.unconfirmed:
            self._progress = now
        elif now - self._progress > RESEND_S:
            self._outbox.rewind()
            self._progress = now
        moved = self._send()
        sample = self._sampler.latest()
        if sample is not None:
            self._tell(xid_events(sample))
        while self._outbox.may_pack and (sample or self._news()):
            self._pack(sample)
            sample = None
            moved = self._send() or moved
        if sample is not None:
            self._errors.count("node sample: no room")
        return moved and (self._outbox.waiting or not self._outbox.may_pack)

    def _tell(self, events: list[wire.Event]) -> None:
        """Have what happened on the node told, when somebody asks; the end of a flood is only counted."""
        room = max(0, _MOST - len(self._events))
        self._events += events[:room]
        for _ in events[room:]:
            self._errors.count("event: no room")

    def _news(self) -> bool:
        told = self._outbox.waiting or self._outbox.untold or self._lost or self._events
        return bool(told or self._errors_seen() != self._reported)

    def _errors_seen(self) -> int:
        return sum(errors.total() for errors in self._counted())

    def _counted(self) -> list[Counter[str]]:
        return [self._errors, self._sampler.errors, self._peers.errors, self._outbox.lost]

    def _pack(self, sample: wire.NodeSample | None) -> None:
        self._reported = self._errors_seen()
        lost, self._lost = self._lost[:_MOST], self._lost[_MOST:]
        events, self._events = self._events[:_MOST], self._events[_MOST:]
        message = wire.RelayBatch(
            v=wire.VERSION,
            node=self._node,
            incarnation=self.incarnation,
            seq=self._outbox.next_seq,
            sent_ns=time.time_ns(),
            batches=self._outbox.take(),
            dropped=self._outbox.take_dropped(_MOST),
            sample=sample,
            lost=lost,
            events=events + self._errors.causes() + self._peers.errors.causes(),
            errors={name: n for errors in self._counted() for name, n in errors.items()},
        )
        self._outbox.pack(wire.encode(message))

    def _send(self) -> bool:
        moved = False
        while packet := self._outbox.to_send():
            last = self._closing and self._outbox.is_last(packet)
            if not self._transport.ingest(packet.data, last):
                break
            self._outbox.sent()
            moved = True
        return moved

    def _replied(self, reply: bytes | Exception, now: float) -> None:
        try:
            if isinstance(reply, Exception):
                raise reply
            self._heard = now
            self._sign = self._sign or now
            if wire.tag_of(reply) == "finished":
                self._answer, self._sign = wire.decode(reply, wire.Finished), now
                return
            answer = wire.decode(reply, wire.RelayReply)
            self._obey(answer.commands, now)
            self._verdicts = answer.verdicts
            if self._outbox.confirm(answer.stored_seq):
                self._progress = self._sign = now
        except Exception as error:
            self._errors.note("aggregator", error)
            self._failures += 1
            self._outbox.rewind()

    def _obey(self, commands: list[wire.Command], now: float) -> None:
        """Pass on what is asked of the ranks; of those that do not answer any more, say what can be seen."""
        self._commands = commands
        for command in commands:
            asked = command.args.get("id")
            if command.name not in ("where", "dump") or asked in self._obeyed:
                continue
            self._obeyed.add(asked)
            for name, stream in self._streams.items():
                if stream.pid is not None and not stream.final and now - stream.heard > self._silent_s:
                    told = (name, stream.pid, str(asked), command.name == "dump")
                    threading.Thread(target=self._spy, args=told, name="traceml-spy", daemon=True).start()

    def _spy(self, stream: str, pid: int, asked: str, dump: bool) -> None:
        """Look at a process from outside; in a thread, because that may take seconds."""
        data: dict[str, wire.Value] = {"dump": asked, "stream": stream, "state": processes.state(pid)}
        text, kind = (processes.spy(pid), "stacks") if dump else ("", "standing")
        with self._lock:
            self._events.append(wire.Event(kind, time.time_ns(), message=text, data=data))

    # -- the end ---------------------------------------------------------------------------------

    def _hurry(self) -> None:
        """Send what is unconfirmed again, so that the last of it asks for a commit."""
        self._closing = True
        self._outbox.rewind()

    def _all_stored(self) -> bool:
        return not self._news() and not self._outbox.unconfirmed

    def _begin_end(self, peer: RankConnection, message: wire.Finish) -> None:
        self._ender, self._answer = peer, _WAITING
        self._ending = self._steps(msgspec.structs.replace(message, node_id=self._node.node_id))

    def _end(self) -> None:
        """Go on with the end; whoever asked for it is told how far it is."""
        assert self._ending is not None
        assert self._ender is not None
        try:
            next(self._ending)
            if self._clock() >= self._next_sign:
                self._next_sign = self._clock() + SIGN_S
                self._ender.send(wire.encode(self._answer))
            return
        except StopIteration as done:
            finished: wire.Finished = done.value
        except Exception as error:
            self._errors.note("end", error)
            finished = wire.Finished(wire.VERSION, "failed", f"{type(error).__name__}: {error}")
        self._ending = None
        self._closing = False
        self._ender.send(wire.encode(finished))
        self.stopped = True

    def _steps(self, message: wire.Finish) -> Generator[None, None, wire.Finished]:
        """Let the ranks end, read what they left, have all of it stored, ask until the session is ended."""
        started = since = self._clock()
        while self._peers.ranks_connected and self._clock() < started + DRAIN_S:
            yield
        read = self._read_spool()
        self._hurry()
        asked_at: int | None = None
        asks, told = started, self._answer
        while self._clock() < WORD_S + min(since, max(self._sign or started, started - WORD_S / 2)):
            if self._answer is not told:
                asked_at, asks, told = None, self._clock() + ASK_S, self._answer
                if not told.pending:
                    remove(read if told.ok else ())
                    return told
                self._next_sign = self._clock()
                since = self._clock() if told.waiting or told.state == "writing" else since
            if asked_at != self._failures and self._clock() >= asks and self._all_stored():
                message = msgspec.structs.replace(message, waited_s=self._clock() - started)
                asked_at = self._failures if self._transport.finish(wire.encode(message)) else None
            yield
        self.salvage()
        return wire.Finished(wire.VERSION, "failed", "the aggregator did not answer in time")

    def _has_own_folder(self) -> bool:
        return self._spool == self._path.parent

    def _collect(self) -> None:
        """Take what agents left, where no launcher asks for it at the end: processes of Ray come and go."""
        if not self._has_own_folder():
            return
        if self._collected and self._all_stored():
            remove(self._collected)
            self._collected = []
        self._collected += self._read_spool(besides=self._unreadable.union(self._collected))

    def _read_spool(self, besides: Iterable[Path] = ()) -> list[Path]:
        """Take what agents left, a bad frame is counted; return the files that can go once it is stored."""
        read = []
        found = set(self._spool.glob(f"*{SUFFIX}")) if self._spool else set()
        for path in sorted(found.difference(besides)):
            try:
                frames = read_spool(path)
            except OSError as error:
                self._errors.note("spool", error)
                self._unreadable.add(path)
                continue
            for frame in frames:
                try:
                    self._take(wire.decode(frame, wire.RankBatch), frame)
                except wire.WireError as error:
                    self._errors.note("spool", error)
            read.append(path)
        return read

    def salvage(self) -> None:
        """Leave what is not known to be stored in the spool folder; any thread may. Raises OSError."""
        if self._spool is None:
            return
        with self._lock:
            packets, waiting = self._outbox.salvage()
        packed = [frame for packet in packets for frame in wire.decode(packet, wire.RelayBatch).batches]
        frames: dict[str, list[bytes]] = {}
        for frame in [*packed, *waiting]:
            frames.setdefault(wire.decode(frame, wire.RankBatch).stream, []).append(frame)
        for stream, held in frames.items():
            # Beside what its agent may have left, which begins later or goes further: this is read first.
            write_spool(self._spool / f"{stream}.0{SUFFIX}", held)


def _how_it_ended(name: str, pid: int, stream: _Stream) -> wire.Event:
    """Return event `process_ended`: `exit_code` where the process is still a zombie, and kernel's kills."""
    code, before = processes.exit_code(pid), stream.oom_kills
    kills = processes.oom_kills(stream.memory_events)
    data: dict[str, wire.Value] = {"stream": name, "exit_code": code}
    if kills is not None and before is not None and kills > before:
        data["oom_kills"] = kills - before
    return wire.Event("process_ended", time.time_ns(), data=data)
