"""
Lateness that varies from step to step: is it one rank's, is it hidden, in which stages do ranks have unequal
work?
"""

from __future__ import annotations

import math

import numpy as np

from traceml_ray.analysis.chance import correlation_steps
from traceml_ray.analysis.evidence import Cause, Evidence
from traceml_ray.analysis.onset import late_steps
from traceml_ray.analysis.past_steps import PastSteps
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import Float
from traceml_ray.stages import BACKWARD, SYNC_WAIT

_IMPROBABLE = 3e-5
"""Number of healthy windows in one of which chance makes it always the same rank, as `chance.Z_LEAST`."""
_HIDDEN = 0.7
"""A rank's lateness is hidden if a step gets longer by less than this share of it."""
_SURE = 0.5
"""
If a step may get longer by less than this share of the lateness, what fixing the rank saves is
"at most".
"""
_ERRORS = 2.0
_ERRORS_HIDDEN = 3.0
"""Standard errors of a slope. More of them are needed to say that a late rank costs nothing."""
_LEAST_STEPS = 15
_STAYS = 2.0
"""Work that stays alike for fewer steps than this may as well be drawn anew in each."""
_PART = 0.25


def now_and_then(evidence: Evidence, cause: Cause, thresholds: Thresholds, past: PastSteps | None) -> bool:
    """Whether the rank of `cause` is the last one of the stage in more of its late steps than by chance."""
    lateness = evidence.by_step[:, :, cause.stage].astype(np.float64)
    if past is not None:
        lateness, stay = past.lateness(cause.stage).astype(np.float64), past.stay(cause.stage)
    elif len(lateness) < thresholds.first_window_steps:
        return True
    else:
        stay = correlation_steps(lateness)
    late = late_steps(lateness.max(axis=1))
    last = lateness[late].argmax(axis=1)
    pieces = stay if stay >= _STAYS else 1.0
    times, its_own = (
        math.ceil(count / pieces) for count in (len(last), int((last == cause.places[0]).sum()))
    )
    ranks = lateness.shape[1]
    return bool(ranks * _at_least(its_own, times, 1 / ranks) <= _IMPROBABLE)


def _at_least(successes: int, trials: int, chance: float) -> float:
    """Return the probability (0..1) of at least so many successes, if each has probability `chance` < 1."""
    if successes <= trials * chance:
        return 1.0
    log_chance, log_other = math.log(chance), math.log1p(-chance)
    return sum(
        math.exp(
            math.lgamma(trials + 1) - math.lgamma(count + 1) - math.lgamma(trials - count + 1)
            + count * log_chance + (trials - count) * log_other
        )
        for count in range(successes, trials + 1)
    )  # fmt: skip


def is_hidden(evidence: Evidence, causes: tuple[Cause, ...]) -> bool | None:
    """
    Whether steps in which the ranks of `causes` are later end no later; None: that cannot be told.

    An exchange that overlaps with backward may take so long that a late rank is in time for its end. Rows do
    not show it. But where lateness varies, the elapsed time either follows it or does not: the slope of one
    over the other, in the steps in which these ranks are the last.
    """
    window = evidence.window
    if any(cause.stage != BACKWARD for cause in causes):  # before backward nothing is exchanged
        return False
    if window.waits_inside or evidence.hosts is not None or window.arrived is not None:
        return False
    local = window.by_step(evidence.local_ns)
    mine = np.isin(np.arange(local.shape[1]), causes[0].places)
    last = local[:, mine].max(axis=1) > local[:, ~mine].max(axis=1)
    others = np.median(local[last][:, ~mine], axis=1)
    late, took = local[last][:, mine].max(axis=1) - others, evidence.step_ns[last] - others
    if len(late) < _LEAST_STEPS or late.std() <= 0:
        return False
    x, y = late - late.mean(), took - took.mean()
    slope = float(x @ y / (x @ x))
    error = math.sqrt(float(np.sum((y - slope * x) ** 2)) / (len(x) - 2) / float(x @ x))
    if slope + _ERRORS_HIDDEN * error < _HIDDEN:
        return True
    return None if slope - _ERRORS * error < _SURE else False


def largest_share(evidence: Evidence, named: list[Cause]) -> float:
    """
    Return the share (0..1) of what ranks wait for unequal work, beside what is `named`, that one of them
    causes.
    """
    local = evidence.window.by_step(evidence.fixed_ns(tuple(named)))
    longest = local.max(axis=1) - local.mean(axis=1)
    by_rank = np.bincount(local.argmax(axis=1), weights=longest, minlength=local.shape[1])
    return float(by_rank.max() / max(by_rank.sum(), 1.0))


def uneven_stages(evidence: Evidence) -> list[int]:
    """Return the stages in which ranks have unequal work from step to step, that of most first."""
    local = np.where(evidence.rows.waits[:, None], 0, evidence.rows.d)[:, :, :SYNC_WAIT]
    by_step = evidence.window.by_step(local)
    apart: Float = by_step - by_step.mean(axis=1, keepdims=True)
    apart -= apart.mean(axis=0)  # what a rank is always late by is no unequal work
    total = apart.sum(axis=2)
    # What a stage adds to the spread of the sums.
    parts = np.mean(apart * total[:, :, None], axis=(0, 1))
    order = [int(stage) for stage in np.argsort(-parts) if parts[stage] >= _PART * parts.sum() > 0]
    return order or [int(np.argmax(parts))]
