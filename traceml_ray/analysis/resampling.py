"""
How far a number of a run would differ by chance: a circular block bootstrap over its steps.

Steps are correlated (a busy neighbour lasts for many of them), so whole blocks of consecutive steps are
drawn. Circular blocks: Politis and Romano, "A circular block-resampling procedure for stationary data"
(1992). Their length: Politis and White, "Automatic block-length selection for the dependent bootstrap"
(2004), with the correction by Patton, Politis and White (2009).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from traceml_ray.analysis.spread import Values
from traceml_ray.analysis.window import Float, Int64

_SEED = 20_040_101
_CELLS = 1 << 21
"""Largest number of values drawn at a time."""
_OUTLIER_MADS = 5.0
PARTS = 5
"""Number of parts of a run. How much they differ shows how much the next run may."""


class Drawn(NamedTuple):
    """Numbers of a run: `values` (Q,), and `replicates` (B, Q) of them."""

    values: Float
    replicates: Float


def block_length(series: Float) -> int:
    """
    Return the block length, 1 to n ÷ 3, for drawing blocks of a series (n,).

    A single slow step does not show how long steps remember each other, so outliers are clipped first.
    """
    n = len(series)
    longest = max(1, int(min(3 * np.sqrt(n), n / 3)))
    middle = np.median(series)
    mad = np.median(np.abs(series - middle))
    centred = np.clip(series - middle, -_OUTLIER_MADS * mad, _OUTLIER_MADS * mad) if mad else series - middle
    centred = centred - centred.mean()
    if n < 4 or not np.any(centred):
        return 1
    quiet = max(5, int(np.sqrt(np.log10(n))))
    lags = min(n - 1, int(np.ceil(np.sqrt(n))) + quiet)
    covariance = np.array([centred[: n - lag] @ centred[lag:] / n for lag in range(lags + 1)])
    window = _window(covariance / covariance[0], n, quiet)
    lag = np.arange(-window, window + 1)
    weight = np.clip(2 * (1 - np.abs(lag) / max(1, window)), 0, 1)
    known = weight * covariance[np.minimum(np.abs(lag), lags)]
    spectrum = float(known.sum())
    if spectrum <= 0:
        return 1
    ratio = 2 * float((np.abs(lag) * known).sum()) ** 2 / (4 / 3 * spectrum**2)
    return int(np.clip(np.ceil((ratio * n) ** (1 / 3)), 1, longest))


def _window(correlation: Float, n: int, quiet: int) -> int:
    """Return twice the lag after which so many correlations in a row are as small as those of noise."""
    small = np.abs(correlation[1:]) < 2 * np.sqrt(np.log10(n) / n)
    for lag in range(len(small) - quiet + 1):
        if small[lag : lag + quiet].all():
            return min(2 * max(1, lag), len(small))
    return len(small)


def starts_of_blocks(n: int, block: int, replicates: int) -> Int64:
    """
    Return the start of each block of each replicate (B, n ÷ block rounded up). The result is the same at each
    call.
    """
    drawn = np.random.default_rng(_SEED).integers(0, n, (replicates, -(-n // block)))
    return drawn.astype(np.int64)


def means(columns: Values, block: int, starts: Int64) -> Drawn:
    """Return the means of `columns` (n, Q) and their replicates. A replicate is cut to n values."""
    n, replicates = len(columns), len(starts)
    last = n - (starts.shape[1] - 1) * block
    sums, rest = (_sums_of_blocks(columns, length) for length in (block, last))
    replicated = np.empty((replicates, columns.shape[1]))
    for chunk in _some(replicates, n):
        drawn = starts[chunk]
        times = np.zeros((len(drawn), n))
        np.add.at(times, (np.arange(len(drawn))[:, None], drawn[:, :-1]), 1)
        replicated[chunk] = (times @ sums + rest[drawn[:, -1]]) / n
    return Drawn(columns.mean(axis=0, dtype=float), replicated)


def quantiles_of(series: Values, shares: tuple[float, ...], block: int, starts: Int64) -> Drawn:
    """Return quantiles (0..1) of a series (n,), and replicates."""
    n, replicates = len(series), len(starts)
    replicated = np.empty((replicates, len(shares)))
    for chunk in _some(replicates, n):
        blocks = starts[chunk][:, :, None] + np.arange(block)
        indices = blocks.reshape(-1, starts.shape[1] * block)[:, :n] % n
        replicated[chunk] = np.quantile(series[indices], shares, axis=1).T
    return Drawn(np.quantile(series, shares), replicated)


def error_of_means(columns: Values, block: int) -> Float:
    """Return the standard error of the means of `columns` (n, …): that of all replicates there could be."""
    sums = _sums_of_blocks(columns, block) / block
    error: Float = np.sqrt(sums.var(axis=0) * block / len(columns)) * few_blocks(len(columns) / block)
    return error


def parts_of(n: int) -> list[slice]:
    """Return the fifths of n values, in order."""
    edges = np.linspace(0, n, PARTS + 1).astype(int).tolist()
    return [slice(*ends) for ends in itertools.pairwise(edges)]


def drift(of_parts: Values) -> Float:
    """
    Return by how much the next run may differ, as a standard deviation (…): by as much as the fifths of this
    one (5, …) differ from one another. What goes on around a run has no length at which it averages out.
    """
    deviation: Float = of_parts.std(axis=0, ddof=1)
    return deviation


def few_blocks(blocks: float) -> float:
    """Return the factor by which replicates of so many blocks scatter too little: √(m ÷ (m − 1))."""
    return float(np.sqrt(max(blocks, 2.0) / (max(blocks, 2.0) - 1)))


def student(blocks: float, share: float) -> float:
    """
    Return the quantile `share` of Student's t with one degree of freedom less than there are blocks, in
    standard errors; by the expansion of Cornish and Fisher, within 2 % from four blocks on.
    """
    z, free = NormalDist().inv_cdf(share), max(blocks, 2.0) - 1
    return float(z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2))


def _sums_of_blocks(columns: Values, length: int) -> Float:
    """Return the sum of the `length` values that begin at each index (n, …), continuing at the beginning."""
    n = len(columns)
    around = np.concatenate([columns, columns[:length]], dtype=float)
    ends = np.concatenate([np.zeros((1, *columns.shape[1:])), np.cumsum(around, axis=0)])
    sums: Float = ends[length : length + n] - ends[:n]
    return sums


def _some(replicates: int, n: int) -> Iterator[slice]:
    per_chunk = max(1, _CELLS // n)
    yield from (slice(first, first + per_chunk) for first in range(0, replicates, per_chunk))
