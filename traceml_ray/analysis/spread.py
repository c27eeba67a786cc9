"""Spread over ranks and nodes of one number per rank, or of a row of numbers per rank. NaN: not known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from traceml_ray.analysis.window import Float, Int64, UInt8

Values = npt.NDArray[np.floating[Any]]
MISSING = 255
"""Level that `deviations` uses for values that are not known."""
_MOST = 4.0
"""Ratio that the highest level represents."""


class Spread(NamedTuple):
    """
    Spread of busy time over ranks, from a value of each rank, (R, C). Values of nodes (N, C), in the order of
    `nodes`, are the median of the node's ranks. Skew in %: (worst − median) ÷ median over ranks, (slowest −
    fastest) ÷ fastest over nodes.
    """

    median: Float
    """Median over the ranks (C,)."""
    worst: Int64
    """Index of the rank with the largest value (C,); -1 if no value is known."""
    nodes: tuple[str, ...]
    per_node: Float
    global_skew_pct: Float
    """Skew over the ranks, in % (C,). NaN with one rank."""
    node_skew_pct: Float
    """Skew over the nodes, in % (C,). NaN with one node."""


def spread(values: Values, nodes: Sequence[str]) -> Spread:
    """Return the spread of `values` (R, C), R ≥ 1; `nodes` has the node of each rank."""
    places_of = by_name(nodes)
    per_node, sizes = (
        np.empty((len(places_of), values.shape[1])),
        np.array([len(places) for places in places_of.values()]),
    )
    for size in np.unique(sizes):  # nodes of one size all at once: a job has a thousand of them
        where = np.array([places for places in places_of.values() if len(places) == size])
        per_node[sizes == size] = quantiles(np.swapaxes(values[where], 0, 1), (0.5,))[0]
    median = quantiles(values, (0.5,))[0]
    known = np.where(np.isnan(values), -np.inf, values)
    worst, largest = known.argmax(axis=0), known.max(axis=0)
    several = (~np.isnan(values)).sum(axis=0) > 1
    seen = ~np.isnan(per_node)
    slowest = np.where(seen, per_node, -np.inf).max(axis=0)
    fastest = np.where(seen, per_node, np.inf).min(axis=0)
    return Spread(
        median=median,
        worst=np.where(np.isfinite(largest), worst, -1),
        nodes=tuple(places_of),
        per_node=per_node,
        global_skew_pct=np.where(several, over_pct(largest, median), np.nan),
        node_skew_pct=np.where(seen.sum(axis=0) > 1, over_pct(slowest, fastest), np.nan),
    )


def by_name(names: Sequence[str]) -> dict[str, list[int]]:
    """Return the indices at which each name occurs."""
    places_of: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places_of.setdefault(name, []).append(place)
    return places_of


def over_pct(value: Values, base: Values) -> Float:
    """Return by how many % `value` is above `base`; NaN where either is unknown, or `base` is 0."""
    known = np.isfinite(value) & np.isfinite(base) & (base > 0)
    return np.where(known, 100 * (np.where(known, value, 0) - base) / np.where(known, base, 1), np.nan)


def quantiles(values: Values, shares: Sequence[float]) -> Float:
    """Return the quantiles (0..1, linear between two values) of the known values along the first axis."""
    ordered = np.sort(values, axis=0)  # NaN comes last
    count = (~np.isnan(ordered)).sum(axis=0)
    values_at = np.full((len(shares), *count.shape), np.nan)
    for row, share in enumerate(shares):
        place = share * np.maximum(count - 1, 0)
        low = np.floor(place).astype(np.int64)
        high = np.minimum(low + 1, np.maximum(count - 1, 0))
        below, above = (np.take_along_axis(ordered, indices[None], axis=0)[0] for indices in (low, high))
        values_at[row] = below + (above - below) * (place - low)
    return values_at


def deviations(values: Values, middle: Values, unit: Values) -> UInt8:
    """
    Return, as levels (see `level`), by which factor a step becomes longer through the distance of `values`
    (R, C) from `middle` (C,), in `unit`s (C,). MISSING marks unknown values.
    """
    known = np.isfinite(unit) & (unit > 0)
    over = 1 + (values - middle) / np.where(known, unit, np.nan)
    levels = np.rint(level(np.maximum(over, 1 / _MOST)))
    return np.where(np.isnan(levels), MISSING, levels).astype(np.uint8)


def level(over: Any) -> Any:
    """
    Return the level of a ratio. Levels 0..254 are a quarter to four times, logarithmic, clipped; 127 is a
    ratio of 1.
    """
    return np.clip(127 + 127 * np.log(over) / np.log(_MOST), 0, 254)


def ratio(levels: Any) -> Any:
    """Return the ratio that a level represents."""
    return _MOST ** ((np.asarray(levels, dtype=float) - 127) / 127)


def excess(levels: UInt8) -> Float:
    """
    Return the mean share by which each line of levels (R, C) is above the median (R,);
    NaN without any value.
    """
    known = levels != MISSING
    count = known.sum(axis=1)
    over = np.where(known, ratio(levels) - 1, 0.0).sum(axis=1)
    return np.where(count > 0, over / np.maximum(count, 1), np.nan)
