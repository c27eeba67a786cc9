"""
The thread that carries a rank's rows to the relay of its node.

Once an interval it drains the ring, looks at the process, and offers one `RankBatch` to its
channel. What is not known to be stored is kept, within a bound, and offered again to a relay that
comes anew; beyond it the oldest batch is dropped, and counted where no relay has taken it. Nothing here
runs on the training thread but `close`.
"""

from __future__ import annotations

import functools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from traceml_ray import identity as identities
from traceml_ray import wire
from traceml_ray.agent import dump
from traceml_ray.agent.channel import Channel
from traceml_ray.agent.details import Details
from traceml_ray.agent.instrument import Instrumentation
from traceml_ray.agent.mark_log import LOCK_S
from traceml_ray.agent.recorder import Recorder
from traceml_ray.agent.ring import StepRing
from traceml_ray.agent.sampler import ProcessSampler
from traceml_ray.errors import sendable
from traceml_ray.settings import Settings

MANY_RANKS = 256
"""In a larger job an agent reports half as often: the aggregator has as much to take."""
LOOK_S = 0.9
"""Between two looks at the process, which cost more than a batch."""
CLOSE_WAIT_S = 0.3
"""Longest wait at the end of the process for the relay to confirm the last batch."""
CONFIRM_POLL_S = 0.005
SETTLE_S = 1.0
_TOLD_BYTES = 28 * 1024
"""Of events and named parts in one batch; the rest of them waits for the next one."""
_FIXED_BYTES = 7 * 1024
"""Of a batch, for what is neither these nor rows."""
_CERTAIN = ("torch.distributed", "ray_train", "explicit")
"""Sources that know it for good; the others are asked again."""


_T = TypeVar("_T")
_Item = TypeVar("_Item", wire.Event, wire.Detail)


def new_stream() -> str:
    """Return the id of one rank's process."""
    return secrets.token_hex(8)


class _Batch(msgspec.Struct, gc=False):
    seq: int
    rows: int
    events: int
    spans: int
    data: bytes
    offered: bool = False
    handed: bool = False
    """A relay has been given it, though maybe not the one that is there now."""


class RankAgent:
    """Everything of ours in one training process: recorder, patches, thread and channel."""

    def __init__(
        self,
        settings: Settings,
        channel: Channel,
        identity: Callable[[], identities.RankIdentity] = identities.resolve,
    ) -> None:
        self.settings = settings
        self.channel = channel
        self._who = identity
        self.ring = StepRing(settings.ring_rows)
        self.recorder = Recorder(self.ring)
        self.details = Details()
        self.instrumentation = Instrumentation(self.recorder, self.details, debug=settings.debug)
        self.stream = new_stream()
        self.identity: identities.RankIdentity | None = None
        self._identity_known = False
        self.verdict: dict[str, wire.Value] = {}
        """On rank 0: how its run is judged just now, see `wire.RankReply`."""
        self._events: list[wire.Event] = []
        self._parts: list[wire.Detail] = []
        self._outbox: deque[_Batch] = deque()
        self._outbox_bytes = 0
        self._generation = 0
        self._acked = -1
        """The newest batch that the relay of this connection has taken over."""
        self._seq = 0
        self._dropped = 0
        self._dumped: set[wire.Value] = set()
        self._sent_bytes = 0
        self._began_ns = time.monotonic_ns()
        self._cpu_ns = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._sampler: ProcessSampler | None = None
        self._looked = -LOOK_S

    def start(self) -> None:
        """Start the thread; it does the rest, so that the import of torch is not held up."""
        self._thread = threading.Thread(target=self._run, name="traceml-agent", daemon=True)
        self._thread.start()

    def tell(self, event: wire.Event) -> None:
        """Have an event sent with the next batch; any thread may."""
        self._events.append(event)

    def close(self, events: list[wire.Event] | None = None) -> None:
        """Send what is left as the final batch; what nobody takes goes to the spool. Bounded in time."""
        self._events.extend(events or [])
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * CLOSE_WAIT_S + 0.4)

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        due = time.monotonic() + self._interval_s()
        while not self._closing.wait(max(0.0, min(SETTLE_S, due - time.monotonic()))):
            if time.monotonic() < due:  # however long the interval: what is written down stays short
                self.guard("settle", self.recorder.settle)
                continue
            self.guard("tick", self.tick)
            self._cpu_ns = time.thread_time_ns()
            due = time.monotonic() + self._interval_s()
        self.guard("close", self._finish)

    def _interval_s(self) -> float:
        many = self.identity is not None and (self.identity.world_size or 0) > MANY_RANKS
        return self.settings.interval * (2 if many else 1)

    def guard(self, place: str, action: Callable[[], _T]) -> _T | None:
        """Return what `action` does; None, and counted, when it raises."""
        try:
            return action()
        except Exception as error:
            self.instrumentation.errors.note(place, error)
            return None

    def tick(self, final: bool = False) -> None:
        """Do one round: rows into batches, batches to the relay, its replies into account."""
        if not self.recorder.settle(LOCK_S):
            self.instrumentation.errors.count("marks: not read, a thread holds the recorder")
        self._parts += self.guard("details", functools.partial(self._details, final)) or []
        while self._enqueue(final):
            pass
        self._exchange()
        if self._events and not final:  # what the relay has asked for
            self._enqueue(final)
            self._exchange()

    def _enqueue(self, final: bool) -> bool:
        """Make one batch; True when there is more, for another."""
        self._make_room()
        batch, room = self._without_rows()
        # Rows come last: from here on nothing but the encoding may go wrong.
        most = (wire.MAX_BATCH_BYTES - _FIXED_BYTES - (_TOLD_BYTES - room)) // (wire.ROW_BYTES + 9)
        first, keys, flags, rows = self.ring.drain(min(wire.MAX_ROWS, most))
        more = bool(self.ring.accepted > first + len(flags) or self._events or self._parts)
        lost = self.ring.dropped + self.recorder.lost_rows
        batch = msgspec.structs.replace(
            batch,
            produced=self.ring.accepted + lost,
            dropped=lost + self._dropped,
            first_row=first,
            keys=keys,
            flags=flags,
            rows=rows,
            final=final and not more,
        )
        data = self.guard("batch", functools.partial(wire.encode, batch))
        made = _Batch(self._seq + 1, len(flags), len(batch.events), len(batch.details), data or b"")
        if data is None:
            self._lose(made)
            return more
        self._seq += 1
        self._outbox.append(made)
        self._outbox_bytes += len(data)
        return more

    def _without_rows(self) -> tuple[wire.RankBatch, int]:
        """Return a batch with all but rows, and the room that events and named parts have left in it."""
        patches = self.instrumentation
        self._events += patches.errors.causes() + self.channel.errors.causes()
        batch = wire.RankBatch(
            v=wire.VERSION,
            stream=self.stream,
            seq=self._seq + 1,
            sent_ns=time.time_ns(),
            produced=0,
            dropped=0,
            first_row=0,
            keys=b"",
            flags=b"",
            rows=b"",
            identity=self.guard("identity", self._resolve),
            open=self.guard("open stage", self._open_stage),
            process=self.guard("process", self._look),
            missing={name: sendable(why) for name, why in dict(patches.missing).items()},
            overhead=wire.Overhead(
                self.recorder.marks_ns,
                self._cpu_ns,
                time.monotonic_ns() - self._began_ns,
                self._sent_bytes,
            ),
            strategy=patches.strategy,
            group=patches.group,
        )
        events, room = self._told(self._events, _TOLD_BYTES)
        details, room = self._told(self._parts, room)
        return msgspec.structs.replace(batch, events=events, details=details, errors=self._errors()), room

    def _errors(self) -> dict[str, int]:
        """
        Return what went wrong by place, and what was lost before it was in a batch.

        Dictionaries that other threads count in are copied whole: they may not change in a loop over them.
        """
        recorder = self.recorder
        found = dict(self.instrumentation.errors)
        found.update({f"channel.{kind}": n for kind, n in dict(self.channel.errors).items()})
        lost = {
            "marks lost: no room": recorder.lost_marks,
            "spans lost: more than 256 names": self.details.refused,
            "spans lost: too many open": recorder.parts.lost,
        }
        return found | {place: count for place, count in lost.items() if count}

    def _lose(self, batch: _Batch) -> None:
        """Count what a batch held that nobody will have."""
        self._dropped += batch.rows
        self.instrumentation.errors.count("events lost with their batch", batch.events)
        self.instrumentation.errors.count("spans lost with their batch", batch.spans)

    def _told(self, waiting: list[_Item], room: int) -> tuple[list[_Item], int]:
        """Take what fits into `room` bytes from `waiting`, in order; return it, and the room that is left."""
        taken: list[_Item] = []
        while waiting and len(taken) < wire.MAX_ITEMS:
            size = self.guard("telling", functools.partial(wire.size_of, waiting[0]))
            if size is None or size > _TOLD_BYTES:
                self.instrumentation.errors.count("too large to tell")
                del waiting[0]
                continue
            if size > room:
                break
            taken.append(waiting.pop(0))
            room -= size
        return taken, room

    def _make_room(self) -> None:
        """Drop the oldest batches beyond the bound; those handed over are the relay's to account for."""
        while self._outbox_bytes > self.settings.agent_buffer_bytes:
            old = self._outbox.popleft()
            self._outbox_bytes -= len(old.data)
            if not old.handed:
                self._lose(old)

    def _exchange(self) -> None:
        self._take_replies()
        for batch in self._outbox:
            if batch.offered:
                continue
            if not self.channel.offer(batch.data):
                break
            self._begin_anew()
            batch.offered = batch.handed = True
            self._sent_bytes += len(batch.data)
        self._take_replies()

    def _begin_anew(self) -> None:
        """
        After a connection was lost or made: what went into the one before may be lost, so all of it goes
        again, in order. The aggregator knows each batch by its number and keeps one.
        """
        if self._generation != self.channel.generation:
            self._generation, self._acked = self.channel.generation, -1
            for batch in self._outbox:
                batch.offered = False

    def _take_replies(self) -> None:
        for data in self.channel.replies():
            try:
                reply = wire.decode(data, wire.RankReply)
            except wire.WireError as error:
                self.instrumentation.errors.note("reply", error)
                continue
            if reply.stream == self.stream:
                self.verdict = reply.verdict or self.verdict
                self._acked = max(self._acked, reply.acked_seq)
                settled = reply.acked_seq if reply.settled_seq is None else reply.settled_seq
                while self._outbox and self._outbox[0].seq <= settled:
                    self._outbox_bytes -= len(self._outbox.popleft().data)
            for command in reply.commands:
                self.guard("command", functools.partial(self._obey, command))
        self._begin_anew()  # a lost connection is noticed here; what it has acked counts no more

    def _obey(self, command: wire.Command) -> None:
        """Do what the aggregator asks for; what is not known, or of another run, is nothing to this rank."""
        asked, run = command.args.get("id"), command.args.get("run")
        if command.name not in ("where", "dump") or asked in self._dumped:
            return
        if run is not None and (self.identity is None or run != self.identity.job_id):
            return
        self._dumped.add(asked)
        opened = self._open_stage()
        event = dump.stacks(self.recorder.owner, opened, str(asked))
        self.guard("flight recorder", functools.partial(self._add_pending, event, opened, command.name))
        if command.name == "where":
            event = msgspec.structs.replace(event, kind="standing", message="")
        self._events.append(event)

    def _add_pending(self, event: wire.Event, opened: wire.OpenStage, asked: str) -> None:
        """Add the collective under way to what `event` says; asked for a dump, all that the recorder has."""
        found = dump.flight_recorder(opened, str(event.data["dump"]))
        if found is not None:
            event.data.update({name: value for name, value in found.data.items() if name != "by"})
            self._events.extend([found] if asked == "dump" else [])

    def _open_stage(self) -> wire.OpenStage:
        opened = self.recorder.open_stage()
        return msgspec.structs.replace(opened, part=self.details.open or opened.part)

    def _details(self, final: bool) -> list[wire.Detail]:
        """Collect the named parts."""
        if not final:
            return self.details.collect()
        self.recorder.finish()
        return [*self.details.collect(), *self.details.collect()]

    def _resolve(self) -> identities.RankIdentity | None:
        """Resolve who this is; again until torch.distributed, which knows best, is up."""
        if not self._identity_known:
            try:
                self.identity = self._who()
                self._identity_known = self.identity.source in _CERTAIN
            except identities.IdentityError as error:
                self.instrumentation.missing["identity"] = str(error)[:200]
        return self.identity

    def _look(self) -> wire.ProcessSample | None:
        if self._sampler is None:
            self._sampler = ProcessSampler()
        if time.monotonic() - self._looked < LOOK_S:
            return None
        self._looked = time.monotonic()
        return self._sampler.sample()

    def _finish(self) -> None:
        self.guard("last tick", functools.partial(self.tick, final=True))
        deadline = time.monotonic() + CLOSE_WAIT_S
        while self._unacked() and self._generation and time.monotonic() < deadline:
            time.sleep(CONFIRM_POLL_S)
            self._exchange()
        if self._unacked() and self.settings.spool is not None:
            from traceml_ray.spool import write_spool

            write_spool(Path(self.settings.spool) / f"{self.stream}.spool", [b.data for b in self._outbox])
        self.channel.close()

    def _unacked(self) -> bool:
        """Whether there is a batch that no relay is known to have."""
        return bool(self._outbox) and self._outbox[-1].seq > self._acked
