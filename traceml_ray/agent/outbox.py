"""
Batches of a rank that are not known to be stored.

They are offered in order, and all again after a connection was lost or made: what went into the one before
may be lost. The aggregator knows each batch by its number and keeps one.

What a rank has reported before its relay is there lies in a file: Ray takes long to start where ranks take
every core. A rank that is killed until then, or ended by a launcher whose other rank has failed, leaves
nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path

import msgspec

from traceml_ray.agent.channel import Channel
from traceml_ray.files import remove
from traceml_ray.wire.spool import SUFFIX, add_to_spool


class Batch(msgspec.Struct, gc=False):
    """One encoded `wire.RankBatch`, and how much is in it."""

    seq: int
    rows: int
    events: int
    spans: int
    requests: int
    data: bytes
    records: dict[str, int] = {}
    """Amount of records in the batch, by kind."""
    offered: bool = False
    handed: bool = False
    """Whether the batch was handed to a relay, though maybe not to the present one."""


class RankOutbox:
    """
    Keeps batches until they are stored, the oldest first.

    Args:
        max_bytes: what is kept beyond this is dropped by `make_room`.
    """

    def __init__(self, max_bytes: int) -> None:
        self.sent_bytes = 0
        """Total number of bytes handed over, including repeats."""
        self.connected = False
        """Whether there is, or was, a relay."""
        self._max_bytes = max_bytes
        self._batches: deque[Batch] = deque()
        self._bytes = 0
        self._generation = 0
        self._acked = -1
        """Number of the newest batch that the relay of this connection has taken over."""

    def put(self, batch: Batch) -> None:
        """Add a batch."""
        self._batches.append(batch)
        self._bytes += len(batch.data)

    def make_room(self) -> list[Batch]:
        """
        Drop the oldest batches beyond the bound. Return those that no relay has been given.

        The relay accounts for the others.
        """
        dropped = []
        while self._bytes > self._max_bytes:
            old = self._batches.popleft()
            self._bytes -= len(old.data)
            if not old.handed:
                dropped.append(old)
        return dropped

    def offer(self, channel: Channel) -> None:
        """Hand over as many batches as `channel` takes now."""
        for batch in self._batches:
            if batch.offered:
                continue
            if not channel.offer(batch.data):
                break
            self.follow(channel)
            batch.offered = batch.handed = True
            self.sent_bytes += len(batch.data)

    def follow(self, channel: Channel) -> None:
        """Start over if `channel` has lost or made a connection: earlier acknowledgements are void."""
        if self._generation != channel.generation:
            self._generation, self._acked = channel.generation, -1
            self.connected = bool(self._generation)
            for batch in self._batches:
                batch.offered = False

    def confirm(self, acked: int, stored: int) -> None:
        """Record up to which batch the relay has taken over, and up to which batches are stored."""
        self._acked = max(self._acked, acked)
        while self._batches and self._batches[0].seq <= stored:
            self._bytes -= len(self._batches.popleft().data)

    def refused(self, reasons: Mapping[int, str]) -> list[tuple[Batch, str]]:
        """Remove the batches that the relay refuses, by number. Return them with the reason."""
        if not reasons:
            return []
        removed = [(batch, reasons[batch.seq]) for batch in self._batches if batch.seq in reasons]
        for batch, _ in removed:
            self._batches.remove(batch)
            self._bytes -= len(batch.data)
        return removed

    def unacked(self) -> bool:
        """Return whether there is a batch that no relay has taken over."""
        return bool(self._batches) and self._batches[-1].seq > self._acked

    def after(self, seq: int) -> list[Batch]:
        """Return the batches newer than number `seq`."""
        return [batch for batch in self._batches if batch.seq > seq]

    def holds(self, seq: int) -> bool:
        """Return whether batch `seq`, or an earlier one, is still here."""
        return bool(self._batches) and self._batches[0].seq <= seq

    def frames(self) -> list[bytes]:
        """Return the batches that are kept, for the spool."""
        return [batch.data for batch in self._batches]


NAME = f".+{SUFFIX}"
"""Sorts before the other spool files of the process, which go on where this one ends."""


class EarlyCopy:
    """
    The copy of one rank process; nothing here runs on the training thread.

    Args:
        spool: the folder; None: there is none.
        most: bytes; what comes after these is not copied.
    """

    def __init__(self, spool: str | None, most: int) -> None:
        self._spool, self._most = spool, most
        self._path: Path | None = None
        """Path of the file, once there is one."""
        self._last = self._bytes = 0
        """Number of the newest batch in the file; `_bytes` is the size of all of them."""

    def tick(self, process_id: str, outbox: RankOutbox) -> None:
        """
        Copy new batches. Remove the file once there is a relay and everything is stored. Raises
        OSError.
        """
        if outbox.connected:
            if self._path is not None and not outbox.holds(self._last):
                self.remove()
            return
        new = [batch for batch in outbox.after(self._last) if batch.data]
        size = sum(len(batch.data) for batch in new)
        if self._spool is None or not new or self._bytes + size > self._most:
            return
        self._path = Path(self._spool) / f"{process_id}{NAME}"
        add_to_spool(self._path, [batch.data for batch in new])
        self._last, self._bytes = new[-1].seq, self._bytes + size

    def remove(self) -> None:
        """Remove the file: what is in it is stored, or in another one."""
        if self._path is not None:
            remove([self._path])
            self._path = None
