"""When the stages of a row happen: one after the other, in the order of `STAGES`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def begins(stages: npt.NDArray[Any], follows: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[Any]:
    """
    Return when each stage begins, counted from where its row begins, [n, STAGES].

    Args:
        stages: how long each takes, [n, STAGES].
        follows: rows that go on where the one before them ends, and are counted from where that begins, [n].
    """
    ends = np.cumsum(stages, axis=1)
    for row in [] if follows is None else np.flatnonzero(follows).tolist():
        ends[row] += ends[row - 1, -1]
    found: npt.NDArray[Any] = ends - stages
    return found
