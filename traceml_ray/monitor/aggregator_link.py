"""A relay's way to the aggregator: packets go out in order, and again until they are known to be stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from traceml_ray import wire
from traceml_ray.errors import Errors
from traceml_ray.monitor.outbox import Outbox

RESEND_S = 3.0
"""Without a confirmation for so long (commits are 1 s apart), what is unconfirmed is sent again."""
WAITING = wire.Finished(wire.VERSION, "waiting")


class Transport(Protocol):
    """Calls to the aggregator. None blocks or raises; replies come later, in order."""

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
    alive_at: float | None = None
    """When the aggregator last stored something, first replied, or replied about the end."""
    failures: int = 0
    end_state: wire.Finished = WAITING
    """The aggregator's last reply about the end."""
    tick_s: float = wire.TICK_S
    """How long to collect before the next packet."""
    hurry: bool = False
    """Have the last packet stored at once."""

    def __post_init__(self) -> None:
        self._progress = self.heard

    def poll(self, now: float) -> None:
        """Take the replies that have come."""
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
        """Have packets sent again that were not confirmed for long."""
        if not self.outbox.unconfirmed:
            self._progress = now
        elif now - self._progress > max(RESEND_S, 4 * self.tick_s):
            self.outbox.rewind()
            self._progress = now

    def send(self) -> bool:
        """Send what the aggregator takes now; return whether that was anything."""
        sent = False
        while packet := self.outbox.to_send():
            if not self.transport.ingest(packet.data, self.hurry and self.outbox.is_last(packet)):
                break
            self.outbox.sent()
            sent = True
        return sent

    def finish(self, message: wire.Finish) -> bool:
        """Ask how far the end is; the reply becomes `end_state`. False: not now."""
        return self.transport.finish(wire.encode(message))

    def _take(self, data: bytes, now: float) -> None:
        self.heard, self.alive_at = now, self.alive_at or now
        if wire.tag_of(data) == "finished":
            self.end_state, self.alive_at = wire.decode(data, wire.Finished), now
            return
        reply = wire.decode(data, wire.RelayReply)
        self.tick_s = reply.tick_s
        self.on_reply(reply)
        if self.outbox.confirm(reply.stored_seq):
            self._progress = self.alive_at = now
