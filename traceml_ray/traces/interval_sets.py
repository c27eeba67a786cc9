"""Sets of time: arrays [k, 2] of begin and end in ns, sorted and disjoint."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def union(begins: Ints, ends: Ints) -> Ints:
    """Return the union of intervals, given as begins and ends of shape [n]; they may overlap."""
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], ends[order]
    latest = np.maximum.accumulate(ends)
    first = np.r_[True, begins[1:] > latest[:-1]] if len(begins) else np.empty(0, bool)
    last = np.r_[first[1:], True] if len(begins) else first
    intervals = np.stack([begins[first], latest[last]], axis=1)
    return intervals[intervals[:, 1] > intervals[:, 0]]


def both(one: Ints, other: Ints) -> Ints:
    """Return the intersection of two sets."""
    return _where(one, other, 2)


def without(one: Ints, other: Ints) -> Ints:
    """Return the part of the first set that is not in the second."""
    begin, end = (one[0, 0], one[-1, 1]) if len(one) else (0, 0)
    edges = np.r_[begin, np.clip(other, begin, end).reshape(-1), end]
    rest = edges.reshape(-1, 2)
    return both(one, rest[rest[:, 1] > rest[:, 0]])


def length(one: Ints) -> int:
    """Return the total length of a set, in ns."""
    return int((one[:, 1] - one[:, 0]).sum())


def before(times: Ints, one: Ints) -> Ints:
    """Return how much of the set lies before each time, in ns, shape [n]."""
    if not len(one):
        return np.zeros(len(times), np.int64)
    begun = np.searchsorted(one[:, 0], times, side="right")
    lengths_before = np.r_[0, np.cumsum(one[:, 1] - one[:, 0])]
    last_end = np.r_[0, one[:, 1]][begun]
    return np.where(begun > 0, lengths_before[begun] - np.maximum(last_end - times, 0), 0)


def inside(times: Ints, one: Ints) -> npt.NDArray[np.bool_]:
    """Return whether each time lies in the set, shape [n]."""
    if not len(one):
        return np.zeros(len(times), bool)
    index = np.searchsorted(one[:, 0], times, side="right") - 1
    is_inside: npt.NDArray[np.bool_] = (index >= 0) & (times < one[np.maximum(index, 0), 1])
    return is_inside


def _where(one: Ints, other: Ints, depth: int) -> Ints:
    """Return the time covered by exactly that many of two sets."""
    edges = np.r_[one.reshape(-1), other.reshape(-1)]
    step = np.r_[np.tile([1, -1], len(one)), np.tile([1, -1], len(other))]
    order = np.lexsort((step, edges))  # an end before a beginning at the same time
    edges, depths = edges[order], np.cumsum(step[order])
    starts = np.flatnonzero(depths == depth)
    return np.stack([edges[starts], edges[starts + 1]], axis=1) if len(starts) else np.empty((0, 2), np.int64)
