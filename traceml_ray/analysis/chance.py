"""
Tests whether a rank is late more often than chance explains.

If no rank is late, the ranks of a step are exchangeable: chance decides which one is last. The test therefore
compares ranks' *scores* within the same step, not times, and assumes no distribution of times: neither a
heavy tail nor work drawn anew in each step names a rank. This is Friedman's test (1937,
doi:10.1080/01621459.1937.10503522), with aligned ranks as scores (Hodges and Lehmann 1962,
doi:10.1214/aoms/1177704575). If there are few ranks, the amount of lateness counts too.

Work may stay the same for some steps (buckets of lengths). These steps are then one piece of evidence, not
many. Their number is the integrated autocorrelation time of the scores, over more steps than those that are
judged.

If work stays at a level for some steps, the rank with the most work is late in each of them, which looks like
a fault. The other ranks decide: beside a fault they work alike; with levels each has its own level. So the
spread of the peers' levels is added to the error of a rank's mean lateness, besides the variation from step
to step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from traceml_ray.analysis.window import Bool, Float, Int64

Z_LEAST = 4.2
"""
Smallest z from which a rank is late by more than chance, among up to `_FEW` ranks: chance reaches it once in
75,000 healthy windows.
"""
_FEW = 32
_OF_LARGEST = 0.8
_CHANGES = 2
"""Number of changes taken out of each rank's series: one rank becomes late, then another one."""
COMPARED = 16
"""Largest number of ranks that the autocorrelation is computed over."""
_PEERS = 64
"""Largest number of ranks that show how much chance moves a rank."""
_UNCORRELATED = 0.05
FEW_STEPS = 200
"""Below this number of steps, work that stays alike for long looks as if it did not."""


def least_z(ranks: int, steps: int) -> float:
    """
    Return the z from which the latest of `ranks` ranks is late by more than chance. Two ranks cannot reach it
    in few steps; for them the limit is to be last in nine of ten steps.
    """
    largest = math.sqrt(3 * steps * (ranks - 1) / (ranks + 1))
    return min(math.sqrt(Z_LEAST**2 + 2 * math.log(max(1.0, ranks / _FEW))), _OF_LARGEST * largest)


def scores_of(lateness: Float) -> Float:
    """
    Return how late each rank is in each step (K, R), relative to the other ranks of that step, as its
    position among all ranks and steps.

    Args:
        lateness: in any unit (K, R).
    """
    aligned = (lateness - _median(lateness)[:, None]).ravel()
    order = np.argsort(aligned)
    ordered = aligned[order]
    differs = np.ones(len(order), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=differs[1:])
    begins = np.flatnonzero(differs)
    counts = np.diff(begins, append=len(order))
    scores = np.empty(len(order))
    scores[order] = np.repeat((begins + (counts - 1) / 2) / len(order), counts)
    return scores.reshape(lateness.shape)


def z_late(
    lateness: Float, ranks: Sequence[int], stay: float | None = None, newest: int | None = None
) -> Float:
    """
    Return by how many standard errors each of `ranks` is late more often than by chance (len(ranks),).

    Several ranks may be late together. Ranks that are late by more than chance are therefore left out, and
    the others are compared with the remaining ranks, as long as these are the majority.

    Args:
        lateness: lateness of each rank in each step, in any unit (K, R).
        ranks: columns of the ranks that may be late.
        stay: number of steps for which work stays alike, measured over more steps than these; None: measure
            it here.
        newest: number of newest steps in which the ranks may be late. The other steps show what is usual.
    """
    if not len(ranks) or not len(lateness):
        return np.zeros(len(ranks))
    correlated = correlation_steps(lateness) if stay is None else stay
    scores = [scores_of(lateness), _places(lateness)]
    if newest is not None and newest < len(lateness):
        scores.append(scores[1][-newest:])  # what came before may have been another rank
    z: Float = np.max([_z_of(values, ranks, correlated, newest) for values in scores], axis=0)
    return z


def _z_of(scores: Float, ranks: Sequence[int], correlated: float, newest: int | None) -> Float:
    """Return what `z_late` returns, from the scores of all ranks (K, R)."""
    z, left = np.zeros(len(ranks)), np.arange(len(ranks))
    columns, steps = np.asarray(ranks), newest or len(scores)
    others = np.ones(scores.shape[1], dtype=bool)
    while len(left) and (count := int(others.sum())) > 1:
        among = scores[:, others]
        mean = np.add.reduce(among, axis=1, keepdims=True) / count
        variance = np.add.reduce((among - mean) ** 2, axis=1) / count
        error = math.sqrt(float(variance.mean()) * steps * correlated)
        apart = (scores[-steps:, columns[left]] - mean[-steps:]).sum(axis=0)
        z[left] = apart / error if error > 0 else 0.0
        late = z[left] >= least_z(count, steps)
        if not late.any():
            break
        others[columns[left[late]]] = False
        left = left[~late]
    return z


def _places(lateness: Float) -> Float:
    """
    Return the position 1 … R of each rank in each step (K, R); ranks that are equally late share the mean
    position.
    """
    steps, ranks = lateness.shape
    order = np.argsort(lateness, axis=1)
    flat = (order + np.arange(0, steps * ranks, ranks)[:, None]).ravel()  # all steps, one after the other
    ordered = lateness.ravel()[flat].reshape(steps, ranks)
    differs = np.ones((steps, ranks), dtype=bool)
    np.not_equal(ordered[:, 1:], ordered[:, :-1], out=differs[:, 1:])
    begins = np.flatnonzero(differs)
    counts = np.diff(begins, append=steps * ranks)
    result = np.empty(steps * ranks)
    result[flat] = np.repeat(begins % ranks + (counts + 1) / 2, counts)
    return result.reshape(steps, ranks)


def beyond_chance(excess: Int64, ranks: Sequence[int], peers: Sequence[int] | Int64) -> Int64:
    """
    Return by how much ranks are later than chance makes their peers, row by row, ns (K, len(ranks)).

    If a rank is late for a reason, only the reason can be fixed: without it, the rank's times would have the
    distribution of its peers' times. So the n-th largest excess of the rank is compared with the n-th largest
    (of K) of theirs.

    Args:
        excess: excess of all ranks over a common reference, ns (K, R).
        ranks: columns of the ranks.
        peers: columns of the peers; empty: chance is not known.
    """
    mine = excess[:, list(ranks)]
    if not len(peers):
        return np.maximum(mine, 0)
    sample = np.asarray(peers)[:: -(-len(peers) // _PEERS)]
    theirs = np.sort(excess[:, sample], axis=None)
    order = np.argsort(mine, axis=0, kind="stable")
    shares, of_theirs = ((np.arange(count) + 0.5) / count for count in (len(mine), len(theirs)))
    chance = np.interp(shares, of_theirs, theirs)
    beyond = np.rint(np.take_along_axis(mine, order, axis=0) - chance[:, None]).astype(np.int64)
    result = np.empty_like(mine)
    np.put_along_axis(result, order, beyond, axis=0)
    return np.maximum(result, 0)


def correlation_steps(lateness: Float) -> float:
    """
    Return the number of steps for which the scores of ranks stay alike: their integrated autocorrelation
    time, ≥ 1.

    It is taken from the median rank, because some may be stalled. The largest changes of each rank's mean are
    removed first: a rank that becomes late in these steps is no autocorrelation.

    Args:
        lateness: lateness of each rank in each step, in any unit (K, R).
    """
    steps, count = lateness.shape
    scores = scores_of(lateness[:, :: -(-count // COMPARED)].astype(np.float64))
    centred = scores - scores.mean(axis=1, keepdims=True)
    variance = np.var(centred, axis=0)  # with the changes: beside them, what is left over of one is nothing
    for _ in range(_CHANGES):
        centred = _without_change(centred)
    varies = variance > 1e-9
    if not varies.any():
        return 1.0
    centred, variance = centred[:, varies], variance[varies]
    least = max(_UNCORRELATED, 1 / math.sqrt(steps * max(1, centred.shape[1] - 1)))  # else it may be chance
    total = stay_steps(
        lambda lag: float(_median(_mean_products(centred, lag) / variance)),
        steps // 3,
        least,
    )
    return total * (1 + 4 * (total - 1) / steps) if steps < FEW_STEPS else total


def _mean_products(values: Float, lag: int) -> Float:
    """Return the mean product of values that are `lag` rows apart, by column, as `np.mean` does."""
    products: Float = np.add.reduce(values[lag:] * values[:-lag], axis=0) / (len(values) - lag)
    return products


def _median(values: Float) -> Float:
    """Return medians over the last axis of values (…, n) without NaN; of few values, faster than numpy."""
    ordered, middle = np.sort(values), values.shape[-1] // 2
    median: Float = ordered[..., middle]
    return median if values.shape[-1] % 2 else (ordered[..., middle - 1] + median) / 2


def stay_steps(correlation: Callable[[int], float], lags: int, least: float) -> float:
    """
    Return an integrated autocorrelation time in steps, ≥ 1.

    Args:
        correlation: returns the correlation at a lag ≥ 1.
        lags: only lags below this one count.
        least: lags count up to the first one with a smaller correlation.
    """
    total = 1.0
    for lag in range(1, lags):
        if (value := correlation(lag)) < least:
            break
        total += 2 * value
    return total


def _without_change(values: Float) -> Float:
    """
    Return each column of `values` (K, n) minus its means before and after the point where these
    differ most.
    """
    steps = len(values)
    if steps < 4:
        return np.zeros_like(values)
    before = np.arange(1, steps)[:, None]
    passed = np.cumsum(values, axis=0)
    low, high = passed[:-1] / before, (passed[-1] - passed[:-1]) / (steps - before)
    cut = ((high - low) ** 2 * before * (steps - before)).argmax(axis=0)
    column = np.arange(values.shape[1])
    after = np.arange(steps)[:, None] > cut
    result: Float = values - np.where(after, high[cut, column], low[cut, column])
    return result


_LEAST, _MOST = 5.0, 40.0
"""
Number of standard errors above which a rank is later than its level explains; with few levels it grows from
the first value to the second.
"""
_STAYS, _STAYS_SHARE = 6.0, 0.125
"""
Smallest number of steps for which work must stay alike to count as a level, and the same as a share of the
steps if these are few. Shorter stays come and go, like ranks that take turns on a CPU core.
"""
_QUIET = 0.1
"""Levels whose standard deviation is below this share of a rank's lateness do not count as levels."""
_BLOCK = 10
_ALIKE, _ALIKE_MORE = 8.0, 4.0
"""
A rank worked as the others did where it differed by this part of its lateness at most (more for each doubling
of the ranks, of which the latest one is looked at),
"""
_ALIKE_STEPS = 200
"""
Shares of the steps, of few and of many, in which a rank must have worked as the others did to count as
usually alike.
"""
_ALIKE_FEW, _ALIKE_MANY = 0.6, 0.4
_MANY_STEPS = 500
_FEW_PEERS = 4
"""With fewer peers than this, their mean does not show what all ranks have in common."""
_CLIPPED = 2.0
"""Differences of work beyond this multiple of a rank's lateness count as that much: they are stalls."""
_ERRORS = 2.0
LOUD_STEPS = 100
"""Number of steps required where levels differ by more: a single level per rank shows nothing."""
_FEW_STEPS = 200
"""With fewer steps, ranks that always differ cannot be told from ranks whose levels stay."""


def usually_alike(work: Float, late: Bool, lateness: Float) -> Bool:
    """
    Return which ranks usually worked as the others did (len(lateness),). Their present lateness is not a
    level of work, however long other ranks were late before.

    Args:
        work: work of each rank in each step, in any unit (K, R).
        late: whether each rank is late now (R,).
        lateness: lateness of each late rank, in the order of the ranks.
    """
    blocks = len(work) // _BLOCK
    if blocks * _BLOCK < _ALIKE_STEPS or late.all():
        return np.zeros(len(lateness), dtype=bool)
    means = work[len(work) % _BLOCK :].reshape(blocks, _BLOCK, -1).mean(axis=1)
    apart = np.abs(means[:, late] - _median(means[:, ~late])[:, None])
    part = _ALIKE + _ALIKE_MORE * math.log2(work.shape[1])
    alike = np.count_nonzero(part * apart <= lateness, axis=0)
    share = _ALIKE_FEW if len(work) < _MANY_STEPS else _ALIKE_MANY
    result: Bool = alike >= max(_ALIKE_STEPS / _BLOCK, share * blocks)
    return result


def least_lateness(work: Float, late: Bool, lateness: float, judged: int) -> float:
    """
    Return the smallest mean lateness over `judged` steps that exceeds what a rank's level of work explains,
    in the unit of `work`.

    Args:
        work: work of each rank in each step, in any unit (K, R).
        late: whether each rank may be late (R,); the others show the levels.
        lateness: lateness of these ranks, > 0.
        judged: number of newest steps in which they may be late.
    """
    steps, peers = len(work), int(np.count_nonzero(~late))
    if not peers or steps < 3:
        return 0.0
    apart = _apart(work, late, _CLIPPED * lateness)
    if steps >= _FEW_STEPS:
        apart = apart - apart.mean(axis=0)
    variance = float(np.mean(apart**2))
    if variance <= 0:
        return 0.0
    least = max(_UNCORRELATED, _ERRORS / math.sqrt(steps * max(1, peers - 1)))
    stay = stay_steps(
        lambda lag: float(np.sum(apart[lag:] * apart[:-lag])) / ((steps - lag) * peers) / variance,
        1 + steps // 2,
        least,
    )
    stay = min(stay, float(steps))
    if stay < min(_STAYS, _STAYS_SHARE * steps) or math.sqrt(variance) < _QUIET * lateness:
        return 0.0
    if steps < LOUD_STEPS:
        return math.inf
    seen = max(1.0, (peers - (peers >= _FEW_PEERS)) * steps / stay)
    errors = min(_MOST, math.sqrt(seen * math.expm1(_LEAST**2 / seen)))  # Student's t, about
    return errors * math.sqrt(variance * min(stay, judged) / judged)


def _apart(work: Float, late: Bool, most: float) -> Float:
    """
    Return by how much each peer's work differs from its usual work (K, peers), limited to `most`.

    A change that all ranks share is not a difference. With few peers, it is the change that they share with
    the late ranks.
    """
    theirs: Float = work[:, ~late].astype(np.float64)
    if theirs.shape[1] >= _FEW_PEERS:
        return _clipped(theirs - _median(theirs)[:, None], most)
    beside = _clipped(theirs - work[:, late].mean(axis=1, keepdims=True), most)
    alone = _clipped(theirs, most)
    return beside if np.var(beside) < np.var(alone) else alone


def _clipped(values: Float, most: float) -> Float:
    """Return by how much values differ from their median, limited to `most`."""
    return np.clip(values - _median(values.ravel()), -most, most)
