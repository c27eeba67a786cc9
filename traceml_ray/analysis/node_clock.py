"""Converts times of a node's wall clock to the aggregator's, with the error of the conversion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Int64 = np.ndarray[Any, np.dtype[np.int64]]
Float = np.ndarray[Any, np.dtype[np.float64]]

UNCOMPARED_BOUND_NS = 1_000_000_000
"""Error bound that is assumed for clocks of several nodes that were not compared."""
DRIFT = 1e-4
"""Largest rate at which two clocks drift apart: each crystal is within 50 ppm of its nominal rate."""
MAX_OFFSET_NS = 1 << 60
"""Offsets beyond this (36 years) are rejected: no clock is that far off."""


@dataclass(frozen=True)
class NodeClock:
    """
    Measurements of a node's clock.

    All times are ns since the epoch. The arrays hold k ≥ 1 measurements, ordered by `t_ns`.
    """

    t_ns: Int64
    """Time of each measurement on the node's clock, in ns."""
    offset_ns: Int64
    """Amount to add to a node time to get aggregator time, in ns."""
    bound_ns: Int64
    """Largest error of `offset_ns`, in ns."""

    @classmethod
    def of(cls, t_ns: Int64, offset_ns: Int64, bound_ns: Int64) -> NodeClock:
        """
        Return the clock from measurements in order of `t_ns`. Each measurement is made as exact as its
        neighbours allow: the first one is from a moment when little was known.
        """
        away = np.diff(t_ns)
        apart = np.abs(np.diff(offset_ns)) > bound_ns[1:] + bound_ns[:-1] + np.ceil(DRIFT * away)
        parts = np.split(np.arange(len(t_ns)), np.flatnonzero(apart) + 1)  # between two the clock was set
        low, high = (offset_ns - bound_ns).astype(np.float64), (offset_ns + bound_ns).astype(np.float64)
        for part in parts:
            passed = DRIFT * (t_ns[part] - t_ns[part[0]])
            low[part] = -_least(-low[part], passed)
            high[part] = _least(high[part], passed)
        wrong = low > high  # three that fit two by two, and not together
        low[wrong], high[wrong] = (offset_ns - bound_ns)[wrong], (offset_ns + bound_ns)[wrong]
        offset = np.rint((low + high) / 2).astype(np.int64)
        return cls(t_ns, offset, np.ceil((high - low) / 2).astype(np.int64))

    def of_node(self, t_ns: int) -> int:
        """Return the node's time, approximately, at a time of the aggregator's clock."""
        nearest = int(np.argmin(np.abs((self.t_ns + self.offset_ns).astype(np.float64) - t_ns)))
        return t_ns - int(self.offset_ns[nearest])

    def to_aggregator(self, t_ns: Int64) -> tuple[Int64, Int64]:
        """
        Return times of the node (n,) on the aggregator's clock, and the largest error of each.

        Each time is corrected by the nearest measurement. The further away that is, the more the clocks may
        have drifted apart.
        """
        t_ns = np.asarray(t_ns, np.int64)
        right = np.clip(np.searchsorted(self.t_ns, t_ns), 0, len(self.t_ns) - 1)
        left = np.maximum(right - 1, 0)
        nearest = np.where(np.abs(t_ns - self.t_ns[left]) <= np.abs(self.t_ns[right] - t_ns), left, right)
        away = np.abs(t_ns - self.t_ns[nearest])
        bound = self.bound_ns[nearest] + np.ceil(DRIFT * away).astype(np.int64)
        return t_ns + self.offset_ns[nearest], bound


@dataclass
class ClockEstimate:
    """
    Estimate of the offset of a node's clock (the aggregator's time minus the node's), between two bounds.

    A message of the node cannot arrive before it was sent, nor can an answer of the aggregator. In each
    direction, the message with the shortest transit bounds the offset from one side, whatever the other
    direction takes. A bound widens with its age by the largest possible drift of the clocks. If the two
    bounds exclude each other, one of the clocks was set; then only the new measurement counts.
    """

    low: float | None = None
    high: float | None = None
    at_ns: int = 0
    """Time of the bound on the aggregator's clock, in ns."""
    restarts: int = 0
    """Number of times that one of the clocks was set."""

    def add(self, now_ns: int, sent_ns: int, answer: tuple[int, int] | None = None) -> None:
        """
        Update the estimate with a message.

        Args:
            now_ns: when the message arrived, on the aggregator's clock.
            sent_ns: when it was sent, on the node's clock.
            answer: when the aggregator sent an answer (its clock), and when the node received it (the node's
                clock).
        """
        high, low = float(now_ns - sent_ns), None
        if abs(high) > MAX_OFFSET_NS:
            return
        if answer is not None and 0 <= now_ns - answer[0] < MAX_OFFSET_NS > abs(answer[0] - answer[1]):
            low = answer[0] - answer[1] - DRIFT * (now_ns - answer[0])
        wider = DRIFT * abs(now_ns - self.at_ns)
        known_low, known_high = self.low, self.high
        self.at_ns = now_ns
        self.low = _tightest(max, low, None if known_low is None else known_low - wider)
        self.high = _tightest(min, high, None if known_high is None else known_high + wider)
        if self.low is not None and self.high is not None and self.low > self.high:
            self.restarts += 1
            self.low, self.high = low if low is not None and low <= high else None, high

    @property
    def offset_ns(self) -> int | None:
        """Amount to add to a node time to get aggregator time, in ns. None while it is not known."""
        return None if self.low is None or self.high is None else round((self.low + self.high) / 2)

    @property
    def bound_ns(self) -> int | None:
        """Largest error of `offset_ns`, in ns."""
        return None if self.low is None or self.high is None else int(np.ceil((self.high - self.low) / 2))


def _least(values: Float, passed: Float) -> Float:
    """
    Return the minimum of all values at each position. Each value first grows by the time `passed` between its
    position and that position.
    """
    before = np.minimum.accumulate(values - passed) + passed
    after = np.minimum.accumulate((values + passed)[::-1])[::-1] - passed
    return np.minimum(before, after)


def _tightest(choose: Any, new: float | None, known: float | None) -> float | None:
    values = [value for value in (new, known) if value is not None]
    return choose(values) if values else None
