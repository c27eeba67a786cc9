"""
Compares the levels of subjects that should be alike, and says which are lower by more than chance explains.

The subjects above the largest step in the levels are the **peers** of those below it, so that one slow
subject, several, or half of them are recognized alike. A subject below must differ from the level of the
peers by more than the peers' spread and the error of both levels explain. The spread of a few peers is hardly
known: it is estimated from them and from `PRIOR` further ones with the usual spread, and the test is
Student's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

Float = np.ndarray[Any, np.dtype[np.float64]]
Bool = np.ndarray[Any, np.dtype[np.bool_]]

PRIOR = 16
"""Number of imagined peers with the usual spread. They stand for what is known of healthy hardware."""
LEAST_PEERS = 0.4
"""Smallest share of the subjects that the peers may be. Fewer fast ones do not show what is usual."""
LEAST_TRIALS = 4
"""Smallest number of trials that show a level."""
DISTURBED = 0.5
"""A trial counts only if other processes took at most this share of it."""
_UNKNOWN = 0.4
"""A level counts if chance changes it by at most this much (a logarithm)."""
_EXCEPTIONS = 0.1
"""Share of its trials in which a slow subject may be faster; of six trials or more, at least one may be."""
_PERSISTS = 2 / 3
"""Part of the least difference by which each of the other trials must be below the peers' level."""
_OF_ITS_MEDIAN = 0.5
"""The same, as a part of the difference of its level."""
_SEVERAL = 6
_OF_MEDIAN = 1.2533
"""Standard error of a median, relative to that of a mean."""
_OF_MAD = 1.4826


class Trials(NamedTuple):
    """The trials of one subject, on a logarithmic scale."""

    values: Float
    """Values that count, in order of time: (K,)."""
    level: float
    """Median; NaN if fewer than LEAST_TRIALS count."""
    error: float
    """Standard error of the level."""
    spread: float
    """Standard deviation of the trials, without outliers."""
    disturbed: int
    """Number of trials that do not count, because other processes took too much of them."""


class PeerComparison(NamedTuple):
    """What the comparison says of n subjects. Differences are logarithms of ratios."""

    level: float
    """Level of the peers; NaN: there are none."""
    lower: Float
    """By how much each subject is below that level: (n,)."""
    needed: Float
    """Difference from which each subject is lower by more than chance: (n,)."""
    beyond: Bool
    """Subjects that are lower by the least difference and by more than chance: (n,)."""
    fast: Sequence[int] = ()
    """Subjects that are faster than all others, but too few to be their peers."""


def trials_of(values: Sequence[float], others: Sequence[float] | None = None) -> Trials:
    """Return the trials of a subject. Values that are not positive and finite do not count."""
    every = np.asarray(values, dtype=np.float64)
    taken = np.zeros(len(every)) if others is None or len(others) != len(every) else np.asarray(others)
    known = np.isfinite(every) & (every > 0)
    counted = np.log(every[known & (taken <= DISTURBED)])
    disturbed, count = int(np.count_nonzero(known & (taken > DISTURBED))), len(counted)
    if count < LEAST_TRIALS:
        return Trials(counted, math.nan, math.inf, math.nan, disturbed)
    level, half = float(np.median(counted)), count // 2
    spread = _OF_MAD * float(np.median(np.abs(counted - level))) * (1 + 2 / count)
    drift = abs(float(np.median(counted[:half]) - np.median(counted[half:]))) / 2
    return Trials(
        counted, level, math.hypot(_OF_MEDIAN * spread / math.sqrt(count), drift), spread, disturbed
    )


def compare(
    trials: Sequence[Trials], least: float, usual: float, alpha: float, least_peers: float = LEAST_PEERS
) -> PeerComparison:
    """
    Compare subjects that should be alike.

    Args:
        trials: of each subject.
        least: least difference worth naming, as a logarithm.
        usual: usual standard deviation of healthy subjects' levels.
        alpha: probability that one healthy subject is beyond chance.
        least_peers: smallest share of the subjects that the peers may be.
    """
    levels, errors = np.array([one.level for one in trials]), np.array([one.error for one in trials])
    z = NormalDist().inv_cdf(1 - min(alpha, 0.1))
    known = np.flatnonzero(np.isfinite(levels) & (z * errors <= _UNKNOWN))
    noisy = z * errors > least
    if len(known) < 2:
        nothing = np.full(len(levels), math.nan)
        return PeerComparison(math.nan, nothing, nothing, np.zeros(len(levels), dtype=bool))
    order = known[np.argsort(-levels[known], kind="stable")]
    fewest, fast = math.ceil(least_peers * len(order)), list[int]()
    peers = order
    for number in _steps(levels[order], least):
        upper, below = order[:number], order[number:]
        level, needed = _needed(levels, errors, upper, usual, z)
        lower = level - levels[below]
        beyond = lower >= np.maximum(needed[below], least)
        if beyond.any() and np.all(beyond | (noisy[below] & (lower >= least))):
            if number >= fewest:
                peers = upper
                break
            fast = upper.tolist()
    if len(peers) < len(order):
        fast = []
    level, needed = _needed(levels, errors, peers, usual, z)
    lower = level - levels
    with np.errstate(invalid="ignore"):
        beyond = (lower >= np.maximum(needed, least)) & ~np.isin(np.arange(len(levels)), peers)
    return PeerComparison(level, lower, needed, beyond if not fast else np.zeros_like(beyond), fast)


def _steps(falling: Float, least: float) -> list[int]:
    """Return after how many of the sorted levels the next one is below the median of these by `least`."""
    count = np.arange(1, len(falling))
    medians = (falling[(count - 1) // 2] + falling[count // 2]) / 2
    return [int(number) for number in count[medians - falling[1:] >= least]]


def _needed(levels: Float, errors: Float, peers: Bool | Any, usual: float, z: float) -> tuple[float, Float]:
    """Return the level of peers, and the difference from it that is beyond chance, for each subject."""
    among, count = levels[peers], len(peers)
    level = float(np.median(among))
    deviations = np.minimum(among - level, level - among.min())  # a fast one does not widen the spread
    variance = (PRIOR * usual**2 + float(deviations @ deviations)) / (PRIOR + count - 1)
    of_level = _OF_MEDIAN**2 * float(np.mean(errors[peers] ** 2)) / count
    t = _student(z, PRIOR + count - 1)
    return level, t * np.sqrt(variance * (1 + 1 / count) + errors**2 + of_level)


def _student(z: float, freedom: int) -> float:
    """Return the quantile of Student's t that is as improbable as `z` of a normal distribution (Wallace)."""
    return math.sqrt(freedom * math.expm1((z * (8 * freedom + 3) / (8 * freedom + 1)) ** 2 / freedom))


def persists(trials: Trials, level: float, least: float) -> bool:
    """Return whether nearly all trials are below the peers' `level`. Else something else disturbed some."""
    count = len(trials.values)
    exceptions = max(1, int(_EXCEPTIONS * count)) if count >= _SEVERAL else 0
    return lower_trials(trials, level, least) >= count - exceptions


def lower_trials(trials: Trials, level: float, least: float) -> int:
    """Return the number of trials that are below the peers' `level` by enough to count as slow."""
    enough = max(_PERSISTS * least, _OF_ITS_MEDIAN * (level - trials.level))
    return int(np.count_nonzero(trials.values <= level - enough))
