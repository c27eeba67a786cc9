"""How far the device's clock is from the CPU's, from events recorded on an idle stream (beats)."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

_KEPT_NS = 60_000_000_000
_FEW = 3
"""Fewer beats than these tell nothing: any of them may have been held up."""
_SLOPE_NS = 1_000_000_000
"""A drift is not estimated from less time than this."""
_MAX_SCATTER_NS = 1_000_000
"""If the device comes to beats that late, our stream is not idle: it shares a queue with others."""


class ClockOffset:
    """
    The straight line below all offsets (device - CPU, ns) of the last minute.

    A beat may reach the device late, never early, so the line that none is below and that is closest to them
    is the offset: the edge of the lower hull above their mean time.
    """

    def __init__(self) -> None:
        self._beats: deque[tuple[int, int]] = deque()
        self._line: tuple[int, float, float] | None = None
        """(time, offset then, slope)."""

    def add(self, cpu_ns: int, offset_ns: int) -> None:
        """Take a beat that was recorded at `cpu_ns`."""
        beats = self._beats
        beats.append((cpu_ns, offset_ns))
        while beats[0][0] < cpu_ns - _KEPT_NS:
            beats.popleft()
        self._line = self._fit() if len(beats) >= _FEW else None

    def at(self, cpu_ns: int) -> int | None:
        """Return the offset at that time; None where it is not known."""
        if self._line is None or abs(cpu_ns - self._beats[-1][0]) > _KEPT_NS:
            return None
        time, offset, slope = self._line
        return round(offset + slope * (cpu_ns - time))

    def _fit(self) -> tuple[int, float, float] | None:
        beats = self._beats
        time, offset = min(beats, key=lambda beat: beat[1])
        slope = 0.0
        if beats[-1][0] - beats[0][0] >= _SLOPE_NS:
            middle = sum(beat[0] for beat in beats) / len(beats)
            hull = _lower_hull(beats)
            for (a, low), (b, high) in pairwise(hull):
                if a <= middle <= b:
                    time, offset, slope = a, low, (high - low) / (b - a)
        over = sorted(beat[1] - (offset + slope * (beat[0] - time)) for beat in beats)
        return (time, offset, slope) if over[len(over) // 2] <= _MAX_SCATTER_NS else None


def _lower_hull(points: deque[tuple[int, int]]) -> list[tuple[int, int]]:
    hull: list[tuple[int, int]] = []
    for x, y in points:
        while len(hull) > 1:
            (ax, ay), (bx, by) = hull[-2:]
            if (by - ay) * (x - ax) < (y - ay) * (bx - ax):
                break
            hull.pop()
        hull.append((x, y))
    return hull
