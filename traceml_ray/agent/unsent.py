"""What a rank has to send beside its rows, until it is in a batch: as much of it as fits into each."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from traceml_ray.agent.batch_draft import ITEM_BYTES, BatchDraft
from traceml_ray.errors import Errors
from traceml_ray.signals.kinds import KINDS, OF_RECORD
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import Part


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
