"""Robust numbers: noise, slopes, and whether a curve is a ramp or a step."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from traceml_ray.signals.memory.shapes import Float

Index = np.ndarray[Any, np.dtype[np.intp]]
TO_SIGMA = 1.4826
"""Factor from a median absolute deviation to the standard deviation of a Gaussian."""
_FEW = 8
"""Number of values up to which Python sorts faster than numpy."""
_STARTS = 8
"""Number of parts of the points. A ramp may begin at each part, up to `_LATEST`."""
_LATEST = 6
"""Last part that a ramp may begin at."""
_HINGES = 48
"""Number of times that are tried for the beginning of a growth."""
_FITTED = 20
"""Fewest samples that tell it."""
_SIGMAS = 3.0
"""The error of a beginning, in standard errors."""


def median(x: Float) -> float:
    """Return the median of (n,), n > 0; without the checks that `np.median` pays for."""
    n = len(x)
    half = n // 2
    if n <= _FEW:
        few = sorted(x.tolist())
        return float(few[half] if n % 2 else (few[half - 1] + few[half]) / 2)
    part = x.copy()
    part.partition(half if n % 2 else (half - 1, half))
    return float(part[half]) if n % 2 else float(part[half - 1] + part[half]) / 2


def mad_sigma(x: Float) -> float:
    """Return the robust standard deviation of (n,) around its median; 0 for fewer than two."""
    return TO_SIGMA * median(np.abs(x - median(x))) if len(x) > 1 else 0.0


def noise(x: Float) -> float:
    """Return the robust standard deviation of the noise of a curve; steps and bends of it do not count."""
    return mad_sigma(x[2:] - 2 * x[1:-1] + x[:-2]) / 6**0.5 if len(x) > 3 else 0.0


def lowered(low: Float, threshold: float) -> int:
    """
    Return from where on a curve goes from its lowest level, where it began higher by `threshold`: it gave
    memory back then. 0: it did not.
    """
    base = max(1, len(low) // 8)
    lowest = float(low.min())
    if lowest >= low[:base].min() - threshold:
        return 0
    return min(int(np.argmax(low <= lowest + threshold / 2)) + 1, len(low) - 1)


def starts(n: int, size: int) -> Index:
    """Return where the blocks of `size` begin in n values; a remainder is part of the last block."""
    return np.arange(max(n // size, 1), dtype=np.intp) * size


def block_means(x: Float, begins: Index) -> Float:
    """Return the mean of each block."""
    sums: Float = np.add.reduceat(x, begins)
    return sums / np.diff(begins, append=len(x))


def block_medians(x: Float, size: int) -> Float:
    """Return the median of each block of `size`, as `starts` has them."""
    blocks = max(len(x) // size, 1)
    if size == 1 or blocks == 1:
        return x if size == 1 else np.array([median(x)])
    whole = np.sort(x[: blocks * size].reshape(blocks, size), axis=1)
    return (whole[:, (size - 1) // 2] + whole[:, size // 2]) / 2


@lru_cache(64)
def _pairs(n: int) -> tuple[Index, Index]:
    first, second = np.triu_indices(n, 1)
    return first, second


def theil_sen(t: Float, y: Float) -> float:
    """Return the median slope over all pairs of n points (n ≥ 2, a few hundred at most); 0 without any."""
    first, second = _pairs(len(t))
    across = t[second] - t[first]
    if not (across > 0).all():
        first, second, across = first[across > 0], second[across > 0], across[across > 0]
    return median((y[second] - y[first]) / across) if len(across) else 0.0


def r_squared(t: Float, y: Float, slope: float) -> float:
    """Return the share of the variance of y that a line of that slope explains."""
    rest = y - slope * t
    rest = rest - rest.mean()
    around = y - y.mean()
    total = float(around @ around)
    return 1 - float(rest @ rest) / total if total > 0 else 0.0


def over_walk(t: Float, y: Float, most: int, least: int, floor: bool = False) -> float:
    """
    Return how improbable the growth of y over t would be for a random walk, in standard deviations of a
    Gaussian: Student's t of the increments of `most` blocks at most, or of the last `least` or more of them.
    With `floor`, of the lowest values of the blocks, not of their means.
    """
    begins = starts(len(y), max(1, len(y) // (most + 1)))
    ys = np.minimum.reduceat(y, begins) if floor else block_means(y, begins)
    across, up = np.diff(block_means(t, begins)), np.diff(ys)
    across, up = across[across > 0], up[across > 0]
    highest = 0.0
    for first in range(max(1, len(up) - least + 1)):
        rest, durations = len(up) - first - 1, across[first:]
        total, grown = float(durations.sum()), float(up[first:].sum())
        if rest < 1 or grown <= 0:
            continue
        off = up[first:] - grown / total * durations
        spread = float((off * off / durations).sum()) / rest
        chance = np.log1p(grown * grown / total / spread / rest) if spread > 0 else np.inf
        highest = max(highest, (8 * rest + 1) / (8 * rest + 3) * float(np.sqrt(rest * chance)))
    return highest


def best_ramp(t: Float, y: Float, least: int) -> tuple[int, float]:
    """
    Return from which of n points on a line that is flat before explains y best, and its share of the
    variance; at least so many points are left.
    """
    around = y - y.mean()
    total = float(around @ around)
    if total <= 0:
        return 0, 0.0
    begins = sorted({n * len(t) // _STARTS for n in range(_LATEST + 1)})
    begins = [begin for begin in begins if begin == 0 or len(t) - begin >= least]
    ramps = np.maximum(0.0, t[None, :] - t[begins][:, None])
    ramps -= ramps.mean(axis=1, keepdims=True)
    sizes = np.einsum("ij,ij->i", ramps, ramps)
    along = ramps @ around
    shares = np.where((sizes > 0) & (along > 0), along**2 / np.where(sizes > 0, sizes, 1.0) / total, 0.0)
    best = int(np.argmax(shares))
    if shares[0] >= shares[best] - 0.01:
        best = 0
    return begins[best], float(shares[best])


def hinge(t: Float, y: Float, began: float, error: float) -> tuple[float, float]:
    """
    Return when y left its level to grow along a line, and the error of that: by the least squares of all n
    points, with noise that goes on for some points counted as fewer of them.

    Args:
        t: (n,) seconds, ascending.
        y: (n,) bytes.
        began: what is known of it,
        error: to within so much; returned where the points do not tell more.
    """
    tried = np.linspace(max(began - 3 * error, t[0]), min(began + 3 * error, t[-1]), _HINGES)
    if len(t) < _FITTED or tried[0] >= tried[-1]:
        return began, error
    ramps = np.maximum(t[None, :] - tried[:, None], 0.0)
    ramps -= ramps.mean(axis=1, keepdims=True)
    around = y - y.mean()
    sizes = np.maximum(np.einsum("ij,ij->i", ramps, ramps), 1e-9)
    slopes = (ramps @ around) / sizes
    rests = float(around @ around) - slopes**2 * sizes
    best = int(np.argmin(rests))
    rest = around - slopes[best] * ramps[best]
    total = float(rest @ rest)
    if slopes[best] <= 0 or total <= 0:
        return began, error
    lasting = min(max(float(rest[1:] @ rest[:-1]) / total, 0.0), 0.95)
    points = max(len(t) * (1 - lasting) / (1 + lasting), 4.0)
    near = np.flatnonzero(rests <= float(rests[best]) * (1 + _SIGMAS**2 / points))
    low, high = tried[max(near[0] - 1, 0)], tried[min(near[-1] + 1, _HINGES - 1)]
    return float(tried[best]), min(float(max(high - tried[best], tried[best] - low)), error)


def steps_share(y: Float, depth: int = 2) -> float:
    """Return the share of the variance of y that up to `2**depth - 1` steps explain."""
    around = y - y.mean()
    total = float(around @ around)
    return _between(y, depth) / total if total > 0 else 0.0


def _between(y: Float, depth: int) -> float:
    """Return by how much steps lower the sum of squares."""
    n = len(y)
    if n < 2 or depth == 0:
        return 0.0
    sums = np.cumsum(y - y.mean())[:-1]
    left = np.arange(1, n)
    gains = sums**2 * (n / (left * (n - left)))
    split = int(np.argmax(gains)) + 1
    return float(gains[split - 1]) + _between(y[:split], depth - 1) + _between(y[split:], depth - 1)
