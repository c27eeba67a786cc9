"""What a relay accepts from the rank processes of its node, how it answers them, and how they ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from traceml_ray.errors import Errors
from traceml_ray.importers import v1
from traceml_ray.monitor import rank_connections
from traceml_ray.monitor.bulk import TraceSender
from traceml_ray.monitor.outbox import Outbox
from traceml_ray.monitor.rank_connections import RankConnection
from traceml_ray.monitor.rank_files import RankFiles
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import Count, Name, Part, ready
from traceml_ray.wire.spool import SUFFIX

MAX_PROCESSES = 4096
"""
Largest number of processes of this node that report at the same time. Messages of further ones
are refused.
"""


class _BatchHeader(Part, frozen=True):
    """The first fields of a RankBatch. They identify its sender even if the rest cannot be read."""

    tag: Literal["rank"]
    v: Count
    process_id: Name
    seq: Count


_header_decoder = msgspec.msgpack.Decoder(ready(_BatchHeader))


@dataclass(slots=True)
class _RankProcess:
    """State of one rank process."""

    seq: int = -1
    final: bool = False
    pid: int | None = None
    heard: float = 0.0
    reported: bool = False
    """Whether a batch has arrived since `begin_round`."""
    memory_events: Path | None = None
    oom_kills: int | None = None
    """Number of out-of-memory kills in the process's cgroup when its first batch arrived."""


@dataclass(eq=False)
class RankIntake:
    """
    Accepts the batches of rank processes. Used with the relay's lock held. Each process is inspected in a
    separate thread, which takes that lock.

    Args:
        node: this machine.
        outbox: receives the batches.
        files: reads the files that the processes write.
        traces: sends the traces that they leave in files.
        errors: counts refused messages.
        watch: returns the watched process of a pid that calls instead of connecting.
        spool: folder where agents leave what they could not deliver.
        silent_s: seconds without a batch after which a rank is inspected from outside when its stacks are
            wanted.
        lock: the relay's.
        clock: monotonic seconds.
    """

    node: wire.NodeIdentity
    outbox: Outbox
    files: RankFiles
    traces: TraceSender
    errors: Errors
    watch: Callable[[int], RankConnection]
    spool: Path | None
    silent_s: float
    lock: threading.RLock
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.heard = self.clock()
        """Time at which the last batch arrived, in monotonic seconds."""
        self.lost: list[str] = []
        """Rank processes that ended without a final batch; still to be sent."""
        self.events: list[wire.Event] = []
        """Events of the node and its processes; still to be sent."""
        self.requests: list[wire.MeasureRequest] = []
        """Requests of people on this node; still to be sent."""
        self.verdicts: dict[str, dict[str, codec.Value]] = {}
        """Verdict on each run, for the log of its rank 0."""
        self.figures: dict[str, wire.Figures] = {}
        """Figures of each run, for the trackers of its rank 0."""
        self._commands: list[wire.Command] = []
        """Commands sent with every reply to a rank, for as long as the aggregator repeats them."""
        self._obeyed: set[codec.Value] = set()
        self._processes: dict[str, _RankProcess] = {}
        self._v1 = v1.Senders(f"v1-{self.node.hostname}")

    def receive(
        self, data: bytes, place: str, peer: RankConnection | None = None, fresh: bool = True
    ) -> bytes:
        """
        Accept a RankBatch, or a message of version 1, which may hold several batches. Return RankReply bytes.

        Each refusal is counted at `place`, and the reply tells the sender that its batch was refused. Raises
        `codec.WireError` if nothing is accepted and the sender cannot be read. Raises LookupError for a rank
        process that is not known here and does not begin `fresh`.
        """
        reply: bytes | None = None
        refused = codec.WireError("malformed")
        who = f"pid {peer.pid}" if peer else ""
        for batch in self._batches(data, peer):
            try:
                if isinstance(batch, codec.WireError):
                    raise batch
                if not fresh and batch.process_id not in self._processes:
                    raise LookupError("this relay is another one than before")
                pid = peer.pid if peer else batch.identity.pid if batch.identity else 0
                reply = self.accept(batch, codec.encode(batch) if v1.is_v1(data) else data, pid)
            except codec.WireError as error:
                self.errors.note(place, error, who)
                refused = error
                continue
            if sender := peer or (self.watch(pid) if pid else None):
                sender.processes.add(batch.process_id)
        reply = reply or self._refusal(data, refused)
        if reply is None:
            raise refused
        return reply

    def accept(self, batch: wire.RankBatch, data: bytes, pid: int = 0) -> bytes:
        """
        Accept a batch, encoded in `data`, of process `pid` (0: not known). Return RankReply bytes.

        Raises `codec.WireError` if there are too many rank processes.
        """
        if batch.process_id not in self._processes and not self._has_room():
            raise codec.WireError("too_many_processes")
        self.heard = self.clock()
        process = self._processes.setdefault(batch.process_id, _RankProcess())
        process.heard, process.reported = self.heard, True
        if process.pid is None and pid:
            process.pid, process.memory_events = pid, rank_connections.memory_events(pid)
            process.oom_kills = rank_connections.oom_kills(process.memory_events)
            self.files.follow(batch.process_id, pid)
        if batch.seq > process.seq:
            self.outbox.add(batch.process_id, batch.seq, len(batch.flags), data)
            process.seq, process.final = batch.seq, batch.final
            if batch.capture is not None:
                self.traces.offer(batch.process_id, batch.capture)
            if batch.final:
                self.files.poll_soon()  # its last output is there, and soon nobody waits for it
        settled = self.outbox.stored.get(batch.process_id, -1)
        rank = batch.identity
        run = rank.job_id if rank is not None and rank.global_rank == 0 else ""
        reply = wire.RankReply(
            codec.VERSION, batch.process_id, process.seq, settled, self._commands,
            self.verdicts.get(run, {}), figures=self.figures.get(run),
        )  # fmt: skip
        return codec.encode(reply)

    def _refusal(self, data: bytes, why: codec.WireError) -> bytes | None:
        """Return the reply to a refused batch. None: the sender of the batch cannot be read."""
        try:
            header = _header_decoder.decode(data)
        except codec.UNREADABLE:
            return None
        process = self._processes.get(header.process_id, _RankProcess())
        settled = self.outbox.stored.get(header.process_id, -1)
        refused = {header.seq: why.reason}
        return codec.encode(
            wire.RankReply(codec.VERSION, header.process_id, process.seq, settled, refused=refused)
        )

    def begin_round(self) -> None:
        """Begin a new round, for the next packet."""
        for process in self._processes.values():
            process.reported = False

    def round_is_complete(self) -> bool:
        """Whether each active rank has sent a batch since `begin_round`. False if there are no ranks."""
        silent = self.clock() - self.silent_s
        return bool(self._processes) and all(
            process.reported or process.final or process.heard < silent
            for process in self._processes.values()
        )

    def gone(self, peer: RankConnection) -> None:
        """Forget the rank processes of an ended process. Those without a final batch are reported as lost."""
        self._v1.forget(peer.pid)
        for name in peer.processes:
            self.files.ended(name)
            self.traces.process_ended(name)
            process = self._processes.get(name)
            if process is None or (self.spool is not None and (self.spool / f"{name}{SUFFIX}").exists()):
                continue  # its last batches, in that file, may be read yet
            if not process.final:
                self.lost.append(name)
                self.events.append(_process_ended(name, peer.pid, process))
            self._forget(name)

    def pid_of(self, process_id: str) -> int | None:
        """Return the pid of a rank process that has not ended. None: it is not known here."""
        process = self._processes.get(process_id)
        return None if process is None or process.final else process.pid

    def handle_commands(self, commands: list[wire.Command]) -> None:
        """Pass commands on to the ranks. Ranks that have fallen silent are inspected from outside."""
        self._commands = commands
        silent = self.clock() - self.silent_s
        for command in commands:
            number = command.args.get("id")
            if command.name not in ("where", "dump") or number in self._obeyed:
                continue
            self._obeyed.add(number)
            for name, process in self._processes.items():
                if process.pid is not None and not process.final and process.heard < silent:
                    args = (name, process.pid, str(number), command.name == "dump")
                    threading.Thread(target=self._inspect, args=args, name="traceml-spy", daemon=True).start()

    def _inspect(self, process_id: str, pid: int, number: str, dump: bool) -> None:
        """Add an event with the state of a process, and with its stacks for a `dump`. May take seconds."""
        data: dict[str, codec.Value] = {
            "dump": number,
            "process_id": process_id,
            "state": rank_connections.state(pid),
        }
        text, kind = (rank_connections.spy(pid), "stacks") if dump else ("", "standing")
        with self.lock:
            self.events.append(wire.Event(kind, time.time_ns(), message=text, data=data))

    def _batches(
        self, data: bytes, peer: RankConnection | None
    ) -> Iterable[wire.RankBatch | codec.WireError]:
        if v1.is_v1(data):
            return self._v1.read(data, peer.pid if peer else 0, time.time_ns())
        try:
            return [codec.decode(data, wire.RankBatch, max_bytes=wire.MAX_BATCH_BYTES)]
        except codec.WireError as error:
            return [error]

    def _has_room(self) -> bool:
        """Whether one more rank process may begin. Processes that sent their final batch make room."""
        if len(self._processes) >= MAX_PROCESSES:
            for name in [name for name, process in self._processes.items() if process.final]:
                self._forget(name)
        return len(self._processes) < MAX_PROCESSES

    def _forget(self, name: str) -> None:
        self.files.ended(name)
        del self._processes[name]
        self.outbox.stored.pop(name, None)


def _process_ended(name: str, pid: int, process: _RankProcess) -> wire.Event:
    """
    Return a `process_ended` event, with `exit_code` if the process is still a zombie, and the
    kernel's kills.
    """
    code, before = rank_connections.exit_code(pid), process.oom_kills
    kills = rank_connections.oom_kills(process.memory_events)
    data: dict[str, codec.Value] = {"process_id": name, "exit_code": code}
    if kills is not None and before is not None and kills > before:
        data["oom_kills"] = kills - before
    return wire.Event("process_ended", time.time_ns(), data=data)
