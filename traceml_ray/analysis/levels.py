"""
Does a rank's work stay at a level for some steps, as sequence lengths by bucket or the load of experts do?

Then a rank that has most to do is late in each of these steps, and a few steps look like a fault. What tells
the two apart are the other ranks: beside a fault they work alike, where work stays at levels each has its
own. So the spread of the peers' levels is the error of a rank's mean lateness, besides what varies from step
to step (`chance`).
"""

from __future__ import annotations

import math

import numpy as np

from traceml_ray.analysis.chance import stay_steps
from traceml_ray.analysis.window import Bool, Float

_LEAST, _MOST = 5.0, 40.0
"""A rank is late by more than its level from so many standard errors on; of few levels, from more."""
_STAYS, _STAYS_SHARE = 6.0, 0.125
"""
Work that stays for fewer steps is no level: it comes and goes, as turns that ranks take at a core. In few
steps less is seen of it: this share of them.
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
_UNCORRELATED = 0.05
_ERRORS = 2.0
LOUD_STEPS = 100
"""Number of steps required where levels differ by more: a single level per rank shows nothing."""
_FEW_STEPS = 200
"""With fewer steps, ranks that always differ cannot be told from ranks whose levels stay."""


def usually_alike(work: Float, late: Bool, lateness: Float) -> Bool:
    """
    Return which ranks usually worked as the others do (len(lateness),): what they are late by now is no level
    of theirs, however long others were late before.

    Args:
        work: what each rank works in each step, in any unit (K, R).
        late: the ranks that are late now (R,).
        lateness: by how much each of them is, in their order.
    """
    blocks = len(work) // _BLOCK
    if blocks * _BLOCK < _ALIKE_STEPS or late.all():
        return np.zeros(len(lateness), dtype=bool)
    means = work[len(work) % _BLOCK :].reshape(blocks, _BLOCK, -1).mean(axis=1)
    apart = np.abs(means[:, late] - np.median(means[:, ~late], axis=1, keepdims=True))
    part = _ALIKE + _ALIKE_MORE * math.log2(work.shape[1])
    alike = np.count_nonzero(part * apart <= lateness, axis=0)
    share = _ALIKE_FEW if len(work) < _MANY_STEPS else _ALIKE_MANY
    result: Bool = alike >= max(_ALIKE_STEPS / _BLOCK, share * blocks)
    return result


def least_lateness(work: Float, late: Bool, lateness: float, judged: int) -> float:
    """
    Return by how much a rank must be late at least, on average over `judged` steps, to be so by more than
    its level of work, in the unit of `work`.

    Args:
        work: what each rank works in each step, in any unit (K, R).
        late: the ranks that may be late (R,); the others show what levels there are.
        lateness: by how much they are late, > 0.
        judged: the steps, of the newest of these, in which they may be late.
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
        lambda lag: float(np.mean(apart[lag:] * apart[:-lag])) / variance, 1 + steps // 2, least
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
    Return by how much each peer's work differs from what is usual (K, peers), limited to `most`.

    What all ranks have in common is not a difference. With few peers that is what they share with the late
    ranks.
    """
    theirs: Float = work[:, ~late].astype(np.float64)
    if theirs.shape[1] >= _FEW_PEERS:
        return _clipped(theirs - np.median(theirs, axis=1, keepdims=True), most)
    beside = _clipped(theirs - work[:, late].mean(axis=1, keepdims=True), most)
    alone = _clipped(theirs, most)
    return beside if np.var(beside) < np.var(alone) else alone


def _clipped(values: Float, most: float) -> Float:
    """Return by how much values differ from their median, limited to `most`."""
    return np.clip(values - np.median(values), -most, most)
