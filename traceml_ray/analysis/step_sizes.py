"""Batch sizes of each rank in each step, unpacked from the pieces in which they are sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from traceml_ray.analysis.window import Float, Int64
from traceml_ray.signals.throughput.records import StepSizes

NAMES = ("samples", "tokens")


def unpacked(piece: StepSizes) -> Int64:
    """
    Return samples and tokens of each step (n, 2), -1 if not known.

    Raises ValueError if `piece` is damaged.
    """
    return np.frombuffer(piece.values(), "<i8").reshape(2, piece.steps).T


def amounts(
    pieces: Mapping[int, Iterable[StepSizes]], ranks: Iterable[int], steps: Int64
) -> dict[str, Float]:
    """
    Return the sizes of the batches of `ranks` in `steps` (S,), ascending, by name: (S, R), NaN where not
    known. `pieces` are by rank. Raises ValueError, see `unpacked`.
    """
    ranks = [*ranks]
    sizes = np.full((2, len(steps), len(ranks)), np.nan)
    for place, rank in enumerate(ranks):
        for piece in pieces.get(rank, ()):
            first, end = np.searchsorted(steps, (piece.first_step, piece.last_step + 1))
            if first == end:
                continue
            values = unpacked(piece)[steps[first:end] - piece.first_step].astype(np.float64)
            sizes[:, first:end, place] = np.where(values < 0, np.nan, values).T
    return dict(zip(NAMES, sizes, strict=True))
