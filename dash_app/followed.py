"""One run of a session as the board keeps it: what was answered of its steps, ranks, nodes and events."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.store.streams import Stream, reporting, world_size

MAX_EVENTS = 2000
SLOW_RANKS, SLOW_S = 256, 5.0
"""From so many ranks on, who they are is asked this often only."""


class Run:
    """One run as it is kept: the numbers of its steps, and its ranks, nodes, events and verdicts."""

    def __init__(self, run: str, limits: Thresholds) -> None:
        self.id = run
        self.limits = limits
        self.looked_at = 0.0
        self.times: dict[str, Any] | None = None
        """The numbers of its steps, see `analysis.step_numbers.times`."""
        self.verdict: dict[str, Any] | None = None
        self.ranks: dict[int, Stream] = {}
        self.nodes: list[dict[str, Any]] = []
        self.labels: dict[str, str] = {}
        """How nodes are shown, by id."""
        self.samples: dict[str, dict[str, Any]] = {}
        """The newest of each node, by its id."""
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.verdicts: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._patience_ns = int(limits.report_timeout_s * 1e9)
        self._cursors = {"events": 0, "verdicts": 0}
        self._asked_who = float("-inf")

    @property
    def whole(self) -> bool:
        """Whether all that is stored has been read."""
        return self.times is not None and bool(self.times["whole"])

    @property
    def last_step(self) -> int | None:
        """The newest step that all ranks have reported."""
        return self.times["last_step"] if self.times else None

    def questions(self, now: float) -> list[dict[str, Any]]:
        """Return what to ask; `take` takes the answers."""
        asked: list[dict[str, Any]] = [{"what": "verdict"}, {"what": "times"}]
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
        found = {question["what"]: answer for question, answer in zip(asked, answers, strict=True)}
        for name in self._cursors:
            self._cursors[name] = found[name]["cursor"]
            getattr(self, name).extend(found[name]["result"])
            new |= bool(found[name]["result"])
        verdict = found["verdict"]["result"] or (self.verdicts[-1] if self.verdicts else None)
        new |= verdict != self.verdict
        self.verdict = verdict
        if "ranks" in found:
            nodes = found["nodes"]["result"]
            ranks = msgspec.convert(found["ranks"]["result"], dict[int, Stream])
            new |= (ranks, nodes) != (self.ranks, self.nodes)
            self.ranks, self.nodes = ranks, nodes
            self.labels = {node["node_id"]: node["label"] for node in nodes}
            self.samples = {sample["node_id"]: sample for sample in found["node_samples_of"]["result"]}
        return self.take_times(found["times"]["result"]) or new

    def take_times(self, times: dict[str, Any]) -> bool:
        """Take the numbers of its steps; return whether there are new ones."""
        before, self.times = self.times, times
        same = ("version", "last_step", "steps", "whole", "world")
        return before is None or any(before[name] != times[name] for name in same)

    @property
    def world(self) -> int:
        """How many ranks the job has, as far as they have said so."""
        return world_size(self.ranks, None)

    def reporting(self) -> set[int]:
        """Return the ranks that may still deliver: neither ended nor silent for long while others are not."""
        return reporting(self.ranks, self._patience_ns)
