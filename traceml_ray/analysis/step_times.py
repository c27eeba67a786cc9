"""When a rank went through its steps, from its rows."""

from __future__ import annotations

import numpy as np

from traceml_ray.analysis.window import Int64
from traceml_ray.stages import SEGMENT_BITS


def span(
    keys: Int64, rows: Int64, end_ns: int, from_step: int | None, to_step: int | None
) -> tuple[int, int] | None:
    """
    Return when a rank went through the steps `from_step` to `to_step` (ns since the epoch), None where it
    has no row of them. `keys` (n,) and `rows` (n, 6) in order; the newest had come by `end_ns`.

    Rows follow one another without a gap, so the time of each is known from those after it. Dropped rows,
    and the delivery of the last ones, make it that much later or earlier.
    """
    steps, took = keys >> SEGMENT_BITS, rows.sum(axis=1)
    ends = end_ns - (took.sum() - np.cumsum(took))
    inside = np.flatnonzero(
        (steps >= (from_step or 0)) & (steps <= (to_step if to_step is not None else 1 << 62))
    )
    if not len(inside):
        return None
    return int(ends[inside[0]] - took[inside[0]]), int(ends[inside[-1]])


def trained_since(keys: Int64, rows: Int64, end_ns: int, warmup: int) -> int:
    """
    Return since when (ns since the epoch) a rank was through the first `warmup` of its steps; `end_ns`
    where it is not. `keys`, `rows` and `end_ns` are as for `span`.
    """
    warm = span(keys, rows, end_ns, int(keys[0] >> SEGMENT_BITS) + warmup, None) if len(keys) else None
    return end_ns if warm is None else warm[0]
