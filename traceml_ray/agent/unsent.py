"""What a rank has to send beside its rows, until it is in a batch: as much of it as fits into each."""

from __future__ import annotations

from typing import Any, TypeVar

from traceml_ray import wire
from traceml_ray.codec import Part
from traceml_ray.errors import Errors

_ITEM_BYTES = 28 * 1024
"""Of events, spans and samples of memory in one batch; the rest of them waits for the next one."""
_FIXED_BYTES = 7 * 1024
"""Of a batch, for what is neither these nor rows."""

_Item = TypeVar(
    "_Item",
    wire.Event,
    wire.SpanSum,
    wire.MemorySample,
    wire.TracePiece,
    wire.Output,
    wire.LayerWindow,
    wire.StepWork,
)


class Unsent:
    """
    Of one rank process. Any thread may append to `events`; all else is the agent's thread's.

    Args:
        errors: counts what cannot be sent.
    """

    def __init__(self, errors: Errors) -> None:
        self.events: list[wire.Event] = []
        self.spans: list[wire.SpanSum] = []
        self.memory: list[wire.MemorySample] = []
        self.memory_from: dict[str, str] = {}
        self.pieces: list[wire.TracePiece] = []
        self.output: list[wire.Output] = []
        self.sharding: wire.Sharding | None = None
        self.layers: list[wire.LayerWindow] = []
        self.work: list[wire.StepWork] = []
        self._errors = errors

    def __bool__(self) -> bool:
        """Whether there is something for another batch."""
        waiting = self.events, self.spans, self.memory, self.pieces, self.output, self.layers, self.work
        return any(waiting)

    def take(self) -> tuple[dict[str, Any], int]:
        """Take what fits into the next batch; return it by field, and how many bytes rows may have there."""
        events, room = self._fitting(self.events, _ITEM_BYTES)
        spans, room = self._fitting(self.spans, room)
        memory, room = self._fitting(self.memory, room)
        work, room = self._fitting(self.work, room)
        output, room = self._fitting(self.output, room)
        layers, room = self._fitting(self.layers, room)
        pieces, room = self._fitting(self.pieces, room)
        sources, self.memory_from = self.memory_from, {}
        sharding, self.sharding = self.sharding, None
        taken = {"events": events, "spans": spans, "memory": memory, "memory_from": sources, "pieces": pieces}
        taken |= {"output": output, "sharding": sharding, "layers": layers, "work": work}
        return taken, wire.MAX_BATCH_BYTES - _FIXED_BYTES - (_ITEM_BYTES - room)

    def _fitting(self, waiting: list[_Item], room: int) -> tuple[list[_Item], int]:
        """Take what fits into `room` bytes from `waiting`, in order; return it, and the room that is left."""
        taken: list[_Item] = []
        while waiting and len(taken) < wire.MAX_ITEMS:
            size = self._size_of(waiting[0])
            if size is None or size > _ITEM_BYTES:
                self._errors.count("event or span too large to send")
                del waiting[0]
                continue
            if size > room:
                break
            taken.append(waiting.pop(0))
            room -= size
        return taken, room

    def _size_of(self, item: Part) -> int | None:
        """Return how many bytes that takes; None, and counted, where it cannot be encoded."""
        try:
            return wire.size_of(item)
        except Exception as error:
            self._errors.note("size", error)
            return None
