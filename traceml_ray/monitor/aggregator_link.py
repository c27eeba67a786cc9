"""
The connection of a relay to the aggregator: packets are sent in order, and sent again until
they are stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from traceml_ray.errors import Errors
from traceml_ray.monitor.bulk import BulkTransport
from traceml_ray.monitor.outbox import Outbox
from traceml_ray.wire import messages as wire

RESEND_S = 3.0
"""Time without a confirmation after which unconfirmed packets are sent again, in s. Commits are 1 s apart."""
WAITING = wire.Finished(wire.VERSION, "waiting")
LISTEN_S = 0.05
"""Time after a packet in which replies are polled frequently, in s."""
LOOK_S = 0.001
"""Interval of these frequent polls, in s."""
LISTEN_EVERY_S = 10.0
"""Interval of packets whose replies are polled frequently, in s."""


class Transport(BulkTransport, Protocol):
    """
    Calls to the aggregator; another thread makes those of `BulkTransport`. None blocks or raises; replies
    come later, in order.
    """

    def ingest(self, data: bytes, commit: bool) -> bool:
        """Hand over a RelayBatch (`commit`: store it at once); reply: RelayReply. False: not now."""

    def finish(self, data: bytes) -> bool:
        """Hand over Finish; reply: Finished. False: not now."""

    def poll(self) -> list[bytes | Exception]:
        """Return the replies so far. After an exception, nothing sent before it will be replied to."""


@dataclass(eq=False)
class AggregatorLink:
    """
    Args:
        transport: calls the aggregator.
        outbox: packets to send.
        errors: counts calls that failed.
        on_reply: called with each RelayReply.
        heard: monotonic seconds, now.
    """

    transport: Transport
    outbox: Outbox
    errors: Errors
    on_reply: Callable[[wire.RelayReply], None]
    heard: float
    """When the last reply came."""
    wall: Callable[[], int] = time.time_ns
    """The node's clock, ns since the epoch."""
    alive_at: float | None = None
    """Time at which the aggregator last stored something, first replied, or replied about the end."""
    failures: int = 0
    end_state: wire.Finished = WAITING
    """The aggregator's last reply about the end."""
    tick_s: float = wire.TICK_S
    """Time to collect before the next packet, in s."""
    hurry: bool = False
    """Whether the last packet is to be stored at once."""
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
        Return the time until replies should be polled again, in s. A reply that is read as it arrives shows
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
        """Send what the aggregator takes now; return whether that was anything."""
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
        """Ask how far the end is; the reply becomes `end_state`. False: not now."""
        return self.transport.finish(wire.encode(message))

    def _time(self, reply: wire.RelayReply) -> None:
        self._listens_until = -1.0
        if reply.sent_ns is not None:
            answer = reply.sent_ns, self.wall()
            if self._answer is None or answer[1] - answer[0] < self._answer[1] - self._answer[0]:
                self._answer = answer

    def _take(self, data: bytes, now: float) -> None:
        self.heard, self.alive_at = now, self.alive_at or now
        if wire.tag_of(data) == "finished":
            self.end_state, self.alive_at = wire.decode(data, wire.Finished), now
            return
        reply = wire.decode(data, wire.RelayReply)
        self._time(reply)
        self.tick_s = reply.tick_s
        self.on_reply(reply)
        if self.outbox.confirm(reply.stored_seq):
            self._progress = self.alive_at = now
