"""What a rank has to send beside its rows, until it is in a batch: as much of it as fits into each."""

from __future__ import annotations

from traceml_ray import wire
from traceml_ray.agent.batch_draft import BatchDraft


class Unsent:
    """Of one rank process. Any thread may append to `events`; all else is the agent's thread's."""

    def __init__(self) -> None:
        self.events: list[wire.Event] = []
        self.spans: list[wire.SpanSum] = []
        self.memory: list[wire.MemorySample] = []
        self.memory_from: dict[str, str] = {}
        self.pieces: list[wire.TracePiece] = []
        self.output: list[wire.Output] = []
        self.sharding: wire.Sharding | None = None
        self.layers: list[wire.LayerWindow] = []
        self.work: list[wire.StepWork] = []
        self.sizes: list[wire.StepSizes] = []
        self.experts: dict[str, list[int]] = {}

    def __bool__(self) -> bool:
        """Whether there is something for another batch."""
        waiting = self.events, self.spans, self.memory, self.pieces, self.output, self.layers, self.work
        return any(waiting) or bool(self.sizes) or bool(self.experts)

    def move_into(self, draft: BatchDraft) -> None:
        """Move what fits into the next batch."""
        draft.fill("events", self.events)
        draft.fill("spans", self.spans)
        draft.fill("memory", self.memory)
        draft.fill("work", self.work)
        draft.fill("sizes", self.sizes)
        draft.fill("output", self.output)
        draft.fill("layers", self.layers)
        draft.fill_map("experts", self.experts)
        draft.fill("pieces", self.pieces)
        sources, self.memory_from = self.memory_from, {}
        sharding, self.sharding = self.sharding, None
        draft.put("memory_from", sources)
        draft.put("sharding", sharding)
