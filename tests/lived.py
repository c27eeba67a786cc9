"""A played session whose ranks report their lives: when they were started, what they did between steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from played import Played
from sessions import SECOND

from traceml_ray.signals.goodput.records import Life, LifeInterval
from traceml_ray.stages import FORWARD, SEGMENT_BITS, SYNC_WAIT
from traceml_ray.wire import messages as wire

PREPARES_S = 6
"""From the start of a process to its first step: 2 s until the monitor attaches, 4 s of preparation."""


class Lived(Played):
    """A played session whose second is filled by one step of 1 s."""

    def __init__(self, folder: Path, world: int = 4, late_ms: float = 200.0, **fields: Any) -> None:
        usual = {"per_node": world // 2, "late": 1, "onset": 0, "jitter_ms": 0.0}
        super().__init__(folder, world, late_ms=late_ms, **{**usual, **fields})
        self.born = self.clock()
        self.intervals: dict[int, list[LifeInterval]] = {}
        self.ended = False
        self.stood_s = 0
        """Time that the next steps waited for each other in addition, in s."""

    def begin(self, **who: Any) -> None:
        super().begin(**who)
        self.ended, self.intervals = False, {}
        self.first = self.newest = None

    def start(self, **who: Any) -> None:
        """Start all processes; the first step begins `PREPARES_S` later."""
        self.begin(**who)
        self.born = self.clock()
        self.clock.tick(PREPARES_S)

    def rows(self, n: int) -> Any:
        rows = super().rows(n)
        rows[:, :, FORWARD] += SECOND - rows.sum(axis=2)
        rows[:, :, SYNC_WAIT] += self.stood_s * SECOND
        return rows

    def step_on(self, steps: int, **fields: Any) -> None:
        for _ in range(steps):
            now = self.clock() + SECOND
            self.newest, self.first = now, self.first or now
            self.play(1, **fields)

    def of_rank(self, number: int) -> dict[str, Any]:
        life = Life(
            self.clock(), self.born + 2 * SECOND, self.born, self.first and self.first - SECOND, self.first,
            self.newest, self.step + 1, self.clock() if self.ended else None,
        )  # fmt: skip
        key = np.array([self.step << SEGMENT_BITS], "<i8").tobytes()
        keys = {"keys": key} if self.newest == self.clock() else {}
        return {"life": [life], "lifecycle": self.intervals.pop(number, []), **keys}

    def interval(self, what: Any, seconds: int, ranks: tuple[int, ...], step: int | None = None) -> None:
        """An interval of some ranks that is over now. It lies in their newest step."""
        end = self.clock()
        for rank in ranks:
            one = LifeInterval(self.step, what, end - seconds * SECOND, end, seconds * SECOND, 1, step)
            self.intervals.setdefault(rank, []).append(one)

    def killed(self, after_s: float = 0) -> None:
        """All processes are killed, so long after their last message."""
        self.clock.tick(after_s)
        lost = [rank.process_id for rank in self.ranks]
        ends = [wire.Event("process_ended", self.clock(), data={"process_id": one}) for one in lost]
        for relay in self.relays:
            self.aggregator.ingest(relay.message(lost=lost, events=ends[:: len(self.relays)]))
            ends = ends[1:]
        self.aggregator.commit()
        self.aggregator.judge()

    def again(self, attempt: int, first_step: int, gap_s: float = 8) -> None:
        """The next attempt starts `gap_s` later. Its first step has this number."""
        self.clock.tick(gap_s)
        self.start(attempt=attempt)
        self.step = first_step
