"""The times at which the steps of a run were over. Every axis of steps shows them beside the step numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from traceml_ray.analysis.shapes import RunTimeline
from traceml_ray.document import timezone

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class StepClock:
    """When certain steps were over. Between two of them, all steps are assumed to take equally long."""

    steps: Array
    """Step numbers, ascending: (n,) with n ≥ 1."""
    t_ns: Array
    """When each step was over: (n,) int64 ns since the epoch."""

    @classmethod
    def of(cls, timeline: RunTimeline | None) -> StepClock | None:
        """Return the clock of a run; None if its times are not known."""
        if timeline is None or timeline.t_ns is None or not len(timeline.last):
            return None
        steps, t_ns = timeline.last, timeline.t_ns
        took_ns = (timeline.last[0] - timeline.first[0]) * timeline.step_ms[0] * 1e6
        if np.isfinite(took_ns) and timeline.first[0] < timeline.last[0]:
            steps, t_ns = np.r_[timeline.first[0], steps], np.r_[t_ns[0] - np.int64(took_ns), t_ns]
        return cls(steps, t_ns)

    @property
    def span(self) -> tuple[int, int]:
        """The first and the last step whose time is known."""
        return int(self.steps[0]), int(self.steps[-1])

    def times(self, steps: Iterable[float]) -> list[int | None]:
        """Return when steps were over, ns since the epoch; None for a step outside the known range."""
        first, last = self.span
        end = int(self.t_ns[-1])
        wanted = np.array([*steps], dtype=float)
        before = np.interp(wanted, self.steps, self.t_ns - end)
        return [
            end + int(t_ns) if first <= step <= last else None
            for step, t_ns in zip(wanted, before, strict=True)
        ]

    def seconds(self, steps: Array) -> Array:
        """Return how long after the first step each of steps (n,) was over: (n,) s; NaN: not known."""
        since_ns = np.interp(steps, self.steps, self.t_ns - self.t_ns[0], left=np.nan, right=np.nan)
        seconds: Array = since_ns / 1e9
        return seconds

    def texts(self, steps: Iterable[float], *, brief: bool = False) -> list[str]:
        """Return when steps were over, formatted by `timezone.clocks`; "" if not known."""
        return timezone.clocks(self.times(steps), brief=brief)


def tick_steps(first: int, last: int, least: float) -> range:
    """
    Return the steps from `first` to `last` at which plotly.js puts ticks at least `least` steps apart: at
    multiples of 1, 2 or 5 times a power of ten.
    """
    size = 10 ** max(0, math.floor(math.log10(max(least, 1))))
    every = next((size * factor for factor in (1, 2, 5, 10) if size * factor >= least), 10 * size)
    return range(-(-first // every) * every, last + 1, every)
