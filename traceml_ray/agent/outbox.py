"""
What a rank still has to send: items that are not in a batch yet, and batches that are not confirmed as
stored.

Each field of a batch has its share of `wire.MAX_BATCH_BYTES` and is validated as the relay will validate it.
So a value that the relay would refuse is lost alone, without the rest of the batch. Batches are offered in
order. After a connection was lost or made all are offered again, because data sent on the previous connection
may be lost. The aggregator identifies each batch by its number and keeps it once.

Until its relay is there, a rank also writes its batches to a file: Ray starts slowly where ranks use every
core. If the rank is killed before, or its launcher ends it because another rank has failed, the file is all
that remains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from traceml_ray.agent.channel import Channel
from traceml_ray.errors import Errors
from traceml_ray.files import remove
from traceml_ray.signals.kinds import KINDS, OF_RECORD
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import Part
from traceml_ray.wire.spool import SUFFIX, add_to_spool

ITEM_BYTES = 28 * 1024
"""Largest size of the lists (events, spans, …) in one batch, in bytes. The rest waits for the next batch."""
VALUE_BYTES = 16 * 1024
"""Largest size of single values (identity, placement, …) in one batch, in bytes."""
_ROW_BYTES = 8 * 1024
"""Space reserved for rows, in bytes."""
_HEADER_BYTES = 64
"""Space reserved for the name and number of a kind of records, in bytes."""
_ENVELOPE_BYTES = 256
"""Space reserved for the numbers that every batch has and the headers of its lists and columns, in bytes."""

_Item = TypeVar("_Item", bound=Part)


class BatchDraft:
    """
    A batch that is being filled, within the limits of its size.

    Args:
        errors: counts what cannot be sent, by field.
    """

    def __init__(self, errors: Errors) -> None:
        self.fields: dict[str, Any] = {}
        """Fields of the batch, as keyword arguments."""
        self._errors = errors
        self._for_items, self._for_values = ITEM_BYTES, VALUE_BYTES
        self._room = wire.MAX_BATCH_BYTES - _ENVELOPE_BYTES

    @property
    def row_bytes(self) -> int:
        """Number of bytes that are left for rows."""
        return self._room

    def put(self, field: str, value: Any) -> None:
        """Set a field if the value fits. None leaves the field out."""
        self._for_values -= self._put(field, value, self._for_values)

    def put_last(self, field: str, value: Any) -> None:
        """Set a field that may use all bytes that the other fields, and the minimum of rows, have left."""
        self._put(field, value, self._room - _ROW_BYTES)

    def fill(self, field: str, waiting: list[_Item]) -> None:
        """Move as many items as fit from `waiting` into a field. Items that can never fit are dropped."""
        taken: list[_Item] = []
        while waiting and len(taken) < codec.MAX_ITEMS:
            size = self._size_of(field, [waiting[0]], ITEM_BYTES)
            if size is not None and size > self._for_items:
                break
            item = waiting.pop(0)
            if size is not None:
                taken.append(item)
                self._take(size)
        self.fields[field] = taken

    def fill_records(self, waiting: dict[str, list[tuple[msgspec.Raw, int]]]) -> dict[str, int]:
        """
        Move as many encoded records as fit from `waiting` into `records`. Each has an amount. Returns the sum
        of the amounts by kind.
        """
        records: dict[str, list[msgspec.Raw]] = {}
        amounts: dict[str, int] = {}
        for name, of_kind in waiting.items():
            count = 0
            while count < min(len(of_kind), codec.MAX_ITEMS):
                size = len(of_kind[count][0])
                if size + _HEADER_BYTES * (not count) > self._for_items:
                    break
                self._take(size + _HEADER_BYTES * (not count))
                count += 1
            if count:
                records[name] = [raw for raw, _ in of_kind[:count]]
                amounts[name] = sum(amount for _, amount in of_kind[:count])
                del of_kind[:count]
        self.fields["records"] = records
        return amounts

    def _take(self, size: int) -> None:
        self._for_items -= size
        self._room -= size

    def _put(self, field: str, value: Any, most: int) -> int:
        """Set a field and return the number of bytes that it uses."""
        size = None if value is None else self._size_of(field, value, most)
        if size is None:
            return 0
        self.fields[field] = value
        self._room -= size
        return size

    def _size_of(self, field: str, value: Any, most: int) -> int | None:
        """Return the encoded size of `value` in bytes. If it cannot be sent, count that and return None."""
        try:
            size = codec.checked_size(wire.RankBatch, field, value)
            if size > most:
                raise codec.WireError("too_large", f"{size} bytes, limit {most}")
        except codec.WireError as error:
            self._errors.note(f"{field} not sent", error)
            return None
        return size


class Unsent:
    """
    What one rank process has not put into a batch yet. Any thread may append to `events` and `requests`; only
    the agent's thread uses the rest.

    Args:
        errors: counts records that cannot be sent, by kind.
    """

    def __init__(self, errors: Errors) -> None:
        self.events: list[wire.Event] = []
        self.requests: list[wire.MeasureRequest] = []
        self.spans: list[wire.SpanSum] = []
        self._records: dict[str, list[tuple[msgspec.Raw, int]]] = {name: [] for name in KINDS}
        """Encoded records by kind, with the amount of each."""
        self._errors = errors

    def __bool__(self) -> bool:
        """Whether something is left for another batch."""
        return bool(self.events or self.requests or self.spans) or any(self._records.values())

    def add(self, records: Iterable[Part]) -> None:
        """
        Add records of signals. Each is encoded and validated here, as the aggregator will validate it. A
        record that would be refused, or is too large for a batch, is counted.
        """
        for record in records:
            kind = OF_RECORD[type(record)]
            try:
                raw = codec.encode_part(record)
                kind.decode(raw)
                if len(raw) > ITEM_BYTES:
                    raise codec.WireError("too_large", f"{len(raw)} bytes, limit {ITEM_BYTES}")
            except (*codec.UNREADABLE, TypeError) as error:
                self._errors.note(f"{kind.lost} not sent", error)
            else:
                self._records[kind.name].append((raw, kind.amount(record)))

    def move_into(self, draft: BatchDraft) -> dict[str, int]:
        """Move what fits into the next batch. Returns the amount of records moved, by kind."""
        draft.fill("events", self.events)
        draft.fill("requests", self.requests)
        draft.fill("spans", self.spans)
        return draft.fill_records(self._records)


class Batch(msgspec.Struct, gc=False):
    """One encoded `wire.RankBatch`, with the amounts of rows and records in it."""

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
    """Whether the batch was given to a relay, possibly an earlier one."""


class RankOutbox:
    """
    Keeps batches until they are stored, the oldest first.

    Args:
        max_bytes: `make_room` drops the oldest batches beyond this size.
    """

    def __init__(self, max_bytes: int) -> None:
        self.sent_bytes = 0
        """Total number of bytes sent, including repeats."""
        self.connected = False
        """Whether there is, or was, a relay."""
        self._max_bytes = max_bytes
        self._batches: deque[Batch] = deque()
        self._bytes = 0
        self._generation = 0
        self._acked = -1
        """Number of the newest batch that the relay of this connection has acknowledged."""

    def put(self, batch: Batch) -> None:
        """Add a batch."""
        self._batches.append(batch)
        self._bytes += len(batch.data)

    def make_room(self) -> list[Batch]:
        """
        Drop the oldest batches beyond the limit. Return the dropped ones that no relay has received.

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
        """Send as many batches as `channel` accepts now."""
        for batch in self._batches:
            if batch.offered:
                continue
            if not channel.offer(batch.data):
                break
            self.follow(channel)
            batch.offered = batch.handed = True
            self.sent_bytes += len(batch.data)

    def follow(self, channel: Channel) -> None:
        """
        Offer all batches again if `channel` has lost or made a connection: earlier
        acknowledgements are void.
        """
        if self._generation != channel.generation:
            self._generation, self._acked = channel.generation, -1
            self.connected = bool(self._generation)
            for batch in self._batches:
                batch.offered = False

    def confirm(self, acked: int, stored: int) -> None:
        """
        Record that the relay has acknowledged batches up to `acked`, and that batches up to `stored` are
        stored.
        """
        self._acked = max(self._acked, acked)
        while self._batches and self._batches[0].seq <= stored:
            self._bytes -= len(self._batches.popleft().data)

    def refused(self, reasons: Mapping[int, str]) -> list[tuple[Batch, str]]:
        """Remove the batches that the relay refuses, by number. Return each with the reason."""
        if not reasons:
            return []
        removed = [(batch, reasons[batch.seq]) for batch in self._batches if batch.seq in reasons]
        for batch, _ in removed:
            self._batches.remove(batch)
            self._bytes -= len(batch.data)
        return removed

    def unacked(self) -> bool:
        """Return whether there is a batch that no relay has acknowledged."""
        return bool(self._batches) and self._batches[-1].seq > self._acked

    def after(self, seq: int) -> list[Batch]:
        """Return the batches newer than number `seq`."""
        return [batch for batch in self._batches if batch.seq > seq]

    def holds(self, seq: int) -> bool:
        """Return whether batch `seq`, or an earlier one, is still here."""
        return bool(self._batches) and self._batches[0].seq <= seq

    def frames(self) -> list[bytes]:
        """Return all batches that are kept, for the spool."""
        return [batch.data for batch in self._batches]


NAME = f".+{SUFFIX}"
"""
Name of the file. It sorts before the other spool files of the process, which continue where this file ends.
"""


class EarlyCopy:
    """
    Copy on disk of the first batches of one rank process. Nothing here runs on the training thread.

    Args:
        spool: folder of the file. None: no copy is made.
        most: largest size in bytes. Later batches are not copied.
    """

    def __init__(self, spool: str | None, most: int) -> None:
        self._spool, self._most = spool, most
        self._path: Path | None = None
        """Path of the file, once there is one."""
        self._last = self._bytes = 0
        """Number of the newest batch in the file. `_bytes` is the size of all batches in it."""

    def tick(self, process_id: str, outbox: RankOutbox) -> None:
        """
        Copy new batches to the file. Remove the file once there is a relay and everything is stored. Raises
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
        """Remove the file: its batches are stored, or are in another file."""
        if self._path is not None:
            remove([self._path])
            self._path = None
