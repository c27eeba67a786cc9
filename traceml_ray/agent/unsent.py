"""
What a rank has to send beside its rows, until it is in a batch: as much of it as fits into each; and one
`wire.RankBatch` while it is put together: what is in it beside rows, and how many bytes these may have.

Whatever goes in has its share of `wire.MAX_BATCH_BYTES` and is checked as the relay will check it. So a value
that the relay would refuse costs itself, not the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from traceml_ray.errors import Errors
from traceml_ray.signals.kinds import KINDS, OF_RECORD
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import Part

ITEM_BYTES = 28 * 1024
"""Largest size of the lists (events, spans, …) in one batch, in bytes; the rest waits for the next batch."""
VALUE_BYTES = 16 * 1024
"""Largest size of single values (identity, placement, …) in one batch, in bytes."""
_ROW_BYTES = 8 * 1024
"""Space reserved for rows, in bytes."""
_HEADER_BYTES = 64
"""Space for the name and number of a kind of records, in bytes."""
_ENVELOPE_BYTES = 256
"""Space for the numbers that every batch has and the headers of its lists and columns, in bytes."""

_Item = TypeVar("_Item", bound=Part)


class BatchDraft:
    """
    Args:
        errors: counts what cannot be sent, by field.
    """

    def __init__(self, errors: Errors) -> None:
        self.fields: dict[str, Any] = {}
        """Fields of the batch, as keywords."""
        self._errors = errors
        self._for_items, self._for_values = ITEM_BYTES, VALUE_BYTES
        self._room = wire.MAX_BATCH_BYTES - _ENVELOPE_BYTES

    @property
    def row_bytes(self) -> int:
        """How many bytes the rows may have."""
        return self._room

    def put(self, field: str, value: Any) -> None:
        """Set a field, if it fits; None leaves it out."""
        self._for_values -= self._put(field, value, self._for_values)

    def put_last(self, field: str, value: Any) -> None:
        """Set a field that may have all that the others, and the least of rows, have left."""
        self._put(field, value, self._room - _ROW_BYTES)

    def fill(self, field: str, waiting: list[_Item]) -> None:
        """Move as many items as fit from `waiting` into a field. Those that never fit are dropped."""
        taken: list[_Item] = []
        while waiting and len(taken) < wire.MAX_ITEMS:
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
        Move as many encoded records as fit from `waiting`, where each has its amount, into `records`; return
        the amounts by kind.
        """
        records: dict[str, list[msgspec.Raw]] = {}
        amounts: dict[str, int] = {}
        for name, of_kind in waiting.items():
            count = 0
            while count < min(len(of_kind), wire.MAX_ITEMS):
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
        """Return how many bytes the field has taken."""
        size = None if value is None else self._size_of(field, value, most)
        if size is None:
            return 0
        self.fields[field] = value
        self._room -= size
        return size

    def _size_of(self, field: str, value: Any, most: int) -> int | None:
        """Return how many bytes `value` takes; None, and counted, where it cannot be sent."""
        try:
            size = wire.checked_size(wire.RankBatch, field, value)
            if size > most:
                raise wire.WireError("too_large", f"{size} bytes, limit {most}")
        except wire.WireError as error:
            self._errors.note(f"{field} not sent", error)
            return None
        return size


class Unsent:
    """
    Of one rank process. Any thread may append to `events` and `requests`; all else is the agent's thread's.

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
        """Whether there is something for another batch."""
        return bool(self.events or self.requests or self.spans) or any(self._records.values())

    def add(self, records: Iterable[Part]) -> None:
        """
        Have records of signals sent, each encoded and checked here as the aggregator will check it. One that
        would be refused, or is too large for a batch, is counted.
        """
        for record in records:
            kind = OF_RECORD[type(record)]
            try:
                raw = codec.encode_part(record)
                kind.decode(raw)
                if len(raw) > ITEM_BYTES:
                    raise wire.WireError("too_large", f"{len(raw)} bytes, limit {ITEM_BYTES}")
            except (*wire.UNREADABLE, TypeError) as error:
                self._errors.note(f"{kind.lost} not sent", error)
            else:
                self._records[kind.name].append((raw, kind.amount(record)))

    def move_into(self, draft: BatchDraft) -> dict[str, int]:
        """Move what fits into the next batch; return how much of each kind of record that is."""
        draft.fill("events", self.events)
        draft.fill("requests", self.requests)
        draft.fill("spans", self.spans)
        return draft.fill_records(self._records)
