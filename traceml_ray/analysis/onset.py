"""The onset of an excess: one change point in a series of late steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traceml_ray.analysis.window import Bool, Float

_BEFORE, _AFTER, _LEAST = 0.3, 0.7, 3


@dataclass(frozen=True)
class Timing:
    """
    When the first cause is late.

    `late` (S,) per step of the window; `began` is the place in it of the first late step, `None` when that is
    before the window; `goes_on`: it has not stopped since.
    """

    late: Bool
    began: int | None
    goes_on: bool

    @property
    def since(self) -> Bool:
        """Which steps (S,) are at or after the beginning."""
        return self.late[self.began or 0 :]


def late_steps(series: Float) -> Bool:
    """
    Return the late steps (S,) of a series of excess: those above half of what is typical of a late step.

    Typical is the size that splits the sum of all excess in halves (the median weighted by size): neither
    a majority of punctual steps nor a few huge ones move it.
    """
    ordered = np.sort(np.maximum(series, 0.0))
    passed = np.cumsum(ordered)
    typical = ordered[np.searchsorted(passed, passed[-1] / 2)]
    late: Bool = series > 0.5 * typical
    return late


def onset(late: Bool) -> int | None:
    """
    Return the place at which `late` (S,) turns from mostly no to mostly yes, or `None`.

    Least squares over all single splits; a split counts when at most 30 % are late before it, at
    least 70 % from it on, and three or more steps follow. Only whether a step is late is used,
    not by how much, so that one huge step moves nothing.
    """
    count = len(late)
    if count < 2 * _LEAST:
        return None
    before = np.arange(1, count)
    passed = np.cumsum(late)[:-1]
    low = passed / before
    high = (late.sum() - passed) / (count - before)
    score = np.where(high > low, (high - low) ** 2 * before * (count - before), -1.0)
    best = int(np.argmax(score))
    if score[best] < 0 or low[best] > _BEFORE or high[best] < _AFTER or count - before[best] < _LEAST:
        return None
    return best + 1
