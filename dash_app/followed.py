"""One run of a session as the board keeps it: its steps, and what was said of its ranks, nodes and events."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.store.streams import Stream, world_size

from .columns import Steps, unpacked

MAX_EVENTS = 2000
SLOW_RANKS, SLOW_S = 256, 5.0
"""From so many ranks on, who they are is asked this often only."""
_FEW_BATCHES, _MANY_BATCHES = 1 << 7, 1 << 14
"""Batches of rows that are asked for at once, so many that about"""
_ROWS = 1 << 15
"""rows come."""


class Run:
    """One run as it is kept: its steps, and what was said of its ranks, nodes, events and verdicts."""

    def __init__(self, run: str, limits: Thresholds, start: int) -> None:
        self.id = run
        self.limits = limits
        self.looked_at = 0.0
        self.verdict: dict[str, Any] | None = None
        self.ranks: dict[int, Stream] = {}
        self.nodes: list[dict[str, Any]] = []
        self.labels: dict[str, str] = {}
        """How nodes are shown, by id."""
        self.samples: dict[str, dict[str, Any]] = {}
        """The newest of each node, by its id."""
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.verdicts: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.whole = False
        """All that is stored has been read."""
        self._start = start
        self._patience_ns = int(limits.report_timeout_s * 1e9)
        self._late: set[int] = set()
        """Ranks that came late, and because of which everything has been read anew."""
        self._batches = _FEW_BATCHES
        self._cursors = {"events": 0, "verdicts": 0}
        self._asked_who = float("-inf")
        self.begin()

    def begin(self) -> None:
        """Forget the steps, and read them anew."""
        self.steps = Steps(self.limits)
        self._cursor = self._start
        self.whole = False

    def question(self) -> dict[str, Any]:
        """Return how to ask for the rows that come next; `take_rows` takes the answer."""
        return {"what": "rows", "run": self.id, "since": self._cursor, "most": self._batches}

    def questions(self, now: float) -> list[dict[str, Any]]:
        """Return what to ask; `take` takes the answers."""
        asked: list[dict[str, Any]] = [{"what": "verdict"}, self.question()]
        few = {"brief": True, "most": MAX_EVENTS}
        asked += [{"what": name, "since": since, **few} for name, since in self._cursors.items()]
        if not self.ranks or len(self.ranks) < SLOW_RANKS or now - self._asked_who > SLOW_S:
            self._asked_who = now
            asked += [{"what": "ranks"}, {"what": "nodes"}]
            asked.append({"what": "node_samples_of", "only": [n["node_id"] for n in self.nodes], "last": 1})
        return [{**question, "run": self.id} for question in asked]

    def take(self, asked: list[dict[str, Any]], answers: list[dict[str, Any]]) -> bool:
        """Take the answers; return whether anything is new."""
        new = False
        said = {question["what"]: answer for question, answer in zip(asked, answers, strict=True)}
        for name in self._cursors:
            self._cursors[name] = said[name]["cursor"]
            getattr(self, name).extend(said[name]["result"])
            new |= bool(said[name]["result"])
        verdict = said["verdict"]["result"] or (self.verdicts[-1] if self.verdicts else None)
        new |= verdict != self.verdict
        self.verdict = verdict
        if "ranks" in said:
            nodes = said["nodes"]["result"]
            ranks = msgspec.convert(said["ranks"]["result"], dict[int, Stream])
            new |= (ranks, nodes) != (self.ranks, self.nodes)
            self.ranks, self.nodes = ranks, nodes
            self.labels = {node["node_id"]: node["label"] for node in nodes}
            self.samples = {sample["node_id"]: sample for sample in said["node_samples_of"]["result"]}
        return self.take_rows(asked[1], answers[1]) or new

    def take_rows(self, asked: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
        """Take rows; return whether any step is whole now."""
        if asked["since"] != self._cursor:
            return False  # another thread was quicker
        found = unpacked(answer["result"])
        count = sum(len(rows.keys) for rows in found)
        self.whole = self._cursor >= 0 and answer["cursor"] < self._cursor + asked["most"]
        self._cursor = answer["cursor"]
        if not self.whole:
            self._batches = int(np.clip(self._batches * _ROWS // max(1, count), _FEW_BATCHES, _MANY_BATCHES))
        late = self.steps.late(found) - self._late
        if late or self.steps.replaced(found):
            self._late = self._late | late if late else set()
            self.begin()
            return True
        self.steps.take(found)
        known = set(self.steps.last_key)
        holding = self.reporting() | (known - self.ranks.keys()) if self.whole else known
        return self.steps.advance(holding, len(self._awaited() - known), self.world)

    def _awaited(self) -> set[int]:
        """Return the ranks that have rows or may soon have some: of a young job, all."""
        streams = self.ranks.values()
        latest = max((stream.last_seen_ns for stream in streams), default=0)
        young = latest - min((stream.first_seen_ns for stream in streams), default=0) < self._patience_ns
        everyone = set(range(self.world)) if young else set()
        return everyone | {rank for rank, stream in self.ranks.items() if stream.stored}

    @property
    def world(self) -> int:
        """How many ranks the job has, as far as they have said so."""
        return world_size(self.ranks, None)

    def reporting(self) -> set[int]:
        """Return the ranks that may still deliver: neither ended nor silent for long while others are not."""
        latest = max((stream.last_seen_ns for stream in self.ranks.values()), default=0)
        since = latest - self._patience_ns
        seen = {rank for rank, stream in self.ranks.items() if stream.last_seen_ns >= since}
        return {rank for rank in seen if not self.ranks[rank].ended}
