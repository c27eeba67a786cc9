"""
The queue of a relay. It holds data until the aggregator confirms that the data is on disk. Packets are sent
in order, and sent again until they are known to be stored.

Rank batches wait here without a number. They get a sequence number when they are packed into a message, and
from then on they are never dropped. An overflow drops the oldest waiting batches, so it makes no gap in the
numbers and counts each lost row exactly once.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from traceml_ray.errors import Errors
from traceml_ray.monitor.bulk import BulkTransport
from traceml_ray.signals.kinds import KINDS
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import MAX_ITEMS, WireError, decode
from traceml_ray.wire.messages import RankBatch

PACK_BYTES = 60 * 1024
"""
Size of the rank batches in one message, in bytes, chosen so that a message stays below 64 KiB
if it can.
"""


@dataclass(slots=True)
class _Held:
    """A rank batch as it arrived."""

    process_id: str
    seq: int
    rows: int
    data: bytes


@dataclass(slots=True)
class _Packet:
    """
    A message for the aggregator, and the number of the newest batch of each rank process in the
    message.
    """

    seq: int
    data: bytes
    holds: dict[str, int]


class Outbox:
    """
    A queue bounded by `limit` bytes: waiting → packed → stored.

    Args:
        limit: largest total size of rank batches and packed messages, in bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[_Held] = deque()
        self._waiting_bytes = 0
        self._packed: deque[_Packet] = deque()
        self._packed_bytes = 0
        self._unsent = 0
        """Number of packets at the end of `_packed` that must be sent, or sent again."""
        self._last_seq = 0
        self._taken: dict[str, int] = {}
        self.dropped: Counter[str] = Counter()
        """Number of rows dropped for lack of memory, by rank process."""
        self.lost: Counter[str] = Counter()
        """Number of records dropped with the rows, by kind."""
        self._to_report: dict[str, None] = {}
        """Rank processes whose dropped rows are not counted in any packet yet."""
        self.stored: dict[str, int] = {}
        """
        Number of the newest stored batch of each rank process; -1: none. The caller removes forgotten
        processes.
        """

    def add(self, process_id: str, seq: int, rows: int, data: bytes) -> None:
        """Add a rank batch with its number of rows. Drops the oldest waiting batches if there is no room."""
        self.stored.setdefault(process_id, -1)
        self._waiting.append(_Held(process_id, seq, rows, data))
        self._waiting_bytes += len(data)
        while self._waiting and self._waiting_bytes + self._packed_bytes > self._limit:
            oldest = self._pop()
            self.dropped[oldest.process_id] += oldest.rows
            self._to_report[oldest.process_id] = None
            self.lost += _besides_rows(oldest.data)

    @property
    def waiting(self) -> bool:
        """Whether rank batches wait to be packed."""
        return bool(self._waiting)

    @property
    def drops_to_report(self) -> bool:
        """Whether dropped rows are not counted in any packet yet."""
        return bool(self._to_report)

    @property
    def unconfirmed(self) -> bool:
        """Whether packets wait to be stored by the aggregator."""
        return bool(self._packed)

    @property
    def may_pack(self) -> bool:
        """Whether a packet may be made: all earlier ones are sent, and not too many are unconfirmed."""
        return not self._unsent and self._packed_bytes <= self._limit // 2

    @property
    def next_seq(self) -> int:
        """The number of the next packet. Numbers begin at 1 and have no gaps."""
        return self._last_seq + 1

    def select(self) -> list[bytes]:
        """Return the oldest waiting batches, as many as fit in one packet."""
        taken: list[bytes] = []
        size = 0
        while self._waiting and len(taken) < MAX_ITEMS:
            if taken and size + len(self._waiting[0].data) > PACK_BYTES:
                break
            held = self._pop()
            taken.append(held.data)
            size += len(held.data)
            self._taken[held.process_id] = held.seq
        return taken

    def pop_dropped(self, most: int) -> dict[str, int]:
        """Return and clear the unreported dropped rows of at most `most` rank processes."""
        processes = [*self._to_report][:most]
        for process in processes:
            del self._to_report[process]
        return {process: self.dropped[process] for process in processes}

    def pack(self, data: bytes) -> None:
        """
        Keep a message until it is confirmed. It was made from the selected batches, with number
        `next_seq`.
        """
        self._last_seq += 1
        self._packed.append(_Packet(self._last_seq, data, self._taken))
        self._taken = {}
        self._packed_bytes += len(data)
        self._unsent += 1

    def to_send(self) -> _Packet | None:
        """Return the oldest packet that is still to be sent."""
        return self._packed[-self._unsent] if self._unsent else None

    def is_last(self, packet: _Packet) -> bool:
        """Whether `packet` is the last one and no batch waits after it."""
        return packet.seq == self._last_seq and not self._waiting

    def sent(self) -> None:
        """Record that the packet returned by `to_send` was sent."""
        self._unsent -= 1

    def rewind(self) -> None:
        """Mark all unconfirmed packets to be sent again, in order: they may be lost."""
        self._unsent = len(self._packed)

    def confirm(self, stored_seq: int) -> bool:
        """Forget the packets up to `stored_seq`; return whether there were any."""
        before = len(self._packed)
        while self._packed and self._packed[0].seq <= stored_seq:
            packet = self._packed.popleft()
            self._packed_bytes -= len(packet.data)
            self.stored.update({name: seq for name, seq in packet.holds.items() if name in self.stored})
        self._unsent = min(self._unsent, len(self._packed))
        return len(self._packed) < before

    def salvage(self) -> tuple[list[bytes], list[bytes]]:
        """Return (unconfirmed messages, waiting rank batches), so that they can be saved elsewhere."""
        return [packet.data for packet in self._packed], [held.data for held in self._waiting]

    def _pop(self) -> _Held:
        held = self._waiting.popleft()
        self._waiting_bytes -= len(held.data)
        return held


def _besides_rows(data: bytes) -> Counter[str]:
    """
    Return the number of records other than rows in a rank batch, by the name under which dropped ones are
    counted.
    """
    try:
        batch = decode(data, RankBatch)
    except WireError:
        return Counter()
    counts = {
        "event": len(batch.events),
        "span": len(batch.spans),
        "process sample": int(batch.process is not None),
        "request": len(batch.requests),
        **{
            (KINDS[name].lost if name in KINDS else "records of other versions"): _amount(name, records)
            for name, records in batch.records.items()
        },
    }
    return Counter({f"{what}: no room": n for what, n in counts.items() if n})


def _amount(name: str, records: list[msgspec.Raw]) -> int:
    """Return how much is lost with records of one kind. A record that cannot be read counts as one."""
    kind, amount = KINDS.get(name), 0
    for raw in records:
        try:
            amount += 1 if kind is None else kind.amount(kind.decode(raw))
        except WireError:
            amount += 1
    return amount


RESEND_S = 3.0
"""Time without a confirmation after which unconfirmed packets are sent again, in s. Commits are 1 s apart."""
WAITING = wire.Finished(codec.VERSION, "waiting")
LISTEN_S = 0.05
"""Time after a packet in which replies are polled frequently, in s."""
LOOK_S = 0.001
"""Interval of these frequent polls, in s."""
LISTEN_EVERY_S = 10.0
"""Interval of packets whose replies are polled frequently, in s."""


class Transport(BulkTransport, Protocol):
    """
    Calls to the aggregator. Another thread makes the calls of `BulkTransport`. No call blocks or raises.
    Replies arrive later, in order.
    """

    def ingest(self, data: bytes, commit: bool) -> bool:
        """
        Send a `RelayBatch`; `commit`: store it at once. The reply is a `RelayReply`. False: it cannot be sent
        now.
        """

    def finish(self, data: bytes) -> bool:
        """Send a `Finish`; the reply is a `Finished`. False: it cannot be sent now."""

    def poll(self) -> list[bytes | Exception]:
        """
        Return the replies that have arrived. After an exception, nothing sent before it will be
        answered.
        """


@dataclass(eq=False)
class AggregatorLink:
    """
    Sends the packets of an outbox to the aggregator and processes its replies.

    Args:
        transport: calls the aggregator.
        outbox: packets to send.
        errors: counts calls that failed.
        on_reply: called with each RelayReply.
        heard: the current time, in monotonic seconds.
    """

    transport: Transport
    outbox: Outbox
    errors: Errors
    on_reply: Callable[[wire.RelayReply], None]
    heard: float
    """Time at which the last reply arrived, in monotonic seconds."""
    wall: Callable[[], int] = time.time_ns
    """The node's clock, ns since the epoch."""
    alive_at: float | None = None
    """Time at which the aggregator last stored something, first replied, or replied about the end."""
    failures: int = 0
    end_state: wire.Finished = WAITING
    """The aggregator's last reply about the end."""
    tick_s: float = wire.TICK_S
    """Interval between packets, in which data is collected, in s."""
    hurry: bool = False
    """Whether the last packet must be stored at once."""
    _answer: tuple[int, int] | None = None
    _listens_until: float = -1.0
    _next_listen: float = -1.0

    def __post_init__(self) -> None:
        self._progress = self.heard

    def pop_answer(self) -> tuple[int, int] | None:
        """Return what the replies since the last call say about the node's clock, see `RelayBatch.answer`."""
        answer, self._answer = self._answer, None
        return answer

    def patience(self, now: float) -> float:
        """
        Return the time until replies should be polled again, in s. A reply read as soon as it arrives shows
        how far off the clock is.
        """
        return LOOK_S if now < self._listens_until else wire.TICK_S

    def poll(self, now: float) -> None:
        """Process the replies that have arrived."""
        for reply in self.transport.poll():
            try:
                if isinstance(reply, Exception):
                    raise reply
                self._take(reply, now)
            except Exception as error:
                self.errors.note("aggregator", error)
                self.failures += 1
                self.outbox.rewind()

    def resend(self, now: float) -> None:
        """Send packets again that have not been confirmed for long."""
        if not self.outbox.unconfirmed:
            self._progress = now
        elif now - self._progress > max(RESEND_S, 4 * self.tick_s):
            self.outbox.rewind()
            self._progress = now

    def send(self, now: float) -> bool:
        """Send what the aggregator accepts now. Return whether anything was sent."""
        sent = False
        while packet := self.outbox.to_send():
            if not self.transport.ingest(packet.data, self.hurry and self.outbox.is_last(packet)):
                break
            self.outbox.sent()
            sent = True
        if sent and now >= self._next_listen:
            self._listens_until, self._next_listen = now + LISTEN_S, now + LISTEN_EVERY_S
        return sent

    def finish(self, message: wire.Finish) -> bool:
        """
        Ask about the progress of the end. The reply becomes `end_state`. False: the question cannot be sent
        now.
        """
        return self.transport.finish(codec.encode(message))

    def _time(self, reply: wire.RelayReply) -> None:
        self._listens_until = -1.0
        if reply.sent_ns is not None:
            answer = reply.sent_ns, self.wall()
            if self._answer is None or answer[1] - answer[0] < self._answer[1] - self._answer[0]:
                self._answer = answer

    def _take(self, data: bytes, now: float) -> None:
        self.heard, self.alive_at = now, self.alive_at or now
        if codec.tag_of(data) == "finished":
            self.end_state, self.alive_at = codec.decode(data, wire.Finished), now
            return
        reply = codec.decode(data, wire.RelayReply)
        self._time(reply)
        self.tick_s = reply.tick_s
        self.on_reply(reply)
        if self.outbox.confirm(reply.stored_seq):
            self._progress = self.alive_at = now
