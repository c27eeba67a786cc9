"""When a rank went through its steps, computed from how long they took."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from traceml_ray.analysis.window import Int64
from traceml_ray.stages import SEGMENT_BITS


class Timeline(NamedTuple):
    """How long a rank took for the steps `first` to `last` (n,) each: `took` ns (n,), no gap between."""

    first: Int64
    last: Int64
    took: Int64


def of_rows(keys: Int64, rows: Int64) -> Timeline:
    """Return the timeline of rows: `keys` (n,) and `rows` ns (n, 6), in order."""
    steps = keys >> SEGMENT_BITS
    return Timeline(steps, steps, rows.sum(axis=1))


def span(line: Timeline, end_ns: int, from_step: int | None, to_step: int | None) -> tuple[int, int] | None:
    """
    Return when a rank went through the steps `from_step` to `to_step` (ns since the epoch), None where it has
    none of them. The newest had come by `end_ns`.

    Steps follow one another without a gap, so the time of each is known from those after it. Dropped rows,
    and the delivery of the last ones, make it that much later or earlier; steps of a sum count as
    equally long.
    """
    begins, ends = from_step or 0, to_step if to_step is not None else 1 << 62
    inside = np.flatnonzero((line.last >= begins) & (line.first <= ends))
    if not len(inside):
        return None
    until = end_ns - (line.took.sum() - np.cumsum(line.took))
    a, b = (int(place) for place in (inside[0], inside[-1]))
    return (
        int(until[a]) - _share(line, a, int(line.last[a]) + 1 - max(begins, int(line.first[a]))),
        int(until[b]) - _share(line, b, int(line.last[b]) - min(ends, int(line.last[b]))),
    )


def ended(line: Timeline, end_ns: int) -> tuple[Int64, Int64]:
    """
    Return step numbers (n,), and when a rank finished each of them, in ns since the epoch (n,);
    see `span`.
    """
    return line.last, end_ns - (line.took.sum() - np.cumsum(line.took))


def _share(line: Timeline, index: int, steps: int) -> int:
    """Return the time of `steps` of the steps that were added up at `index`, in ns."""
    return int(line.took[index]) * steps // (int(line.last[index]) - int(line.first[index]) + 1)


def trained_since(line: Timeline, end_ns: int, warmup: int) -> int:
    """
    Return since when (ns since the epoch) a rank was through the first `warmup` of its steps; `end_ns`
    where it is not. `line` and `end_ns` are as for `span`.
    """
    warm = span(line, end_ns, int(line.first[0]) + warmup, None) if len(line.first) else None
    return end_ns if warm is None else warm[0]
