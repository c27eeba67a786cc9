"""
What the first steps of a run cost, which are in no statistic: compilation, warm-up, the start
of loaders.
"""

from __future__ import annotations

import msgspec
import numpy as np

from traceml_ray import text
from traceml_ray.analysis.window import Bool, Int64
from traceml_ray.stages import BACKWARD, DATA, POST_SYNC, STAGES, SYNC_WAIT

LEAST_SHARE, _LEAST_NS = 0.1, 2_000_000_000
"""First steps are mentioned from this share of the run, and from this time in ns, on."""
_LONG = 2.0
"""A first step counts while it takes at least this multiple of the other steps."""
_APART = 0.25
"""Ranks are told apart if the others took less than the longest by at least this share of it."""


class FirstSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The first steps of a run that took much longer than the others."""

    steps: int
    """Number of these steps."""
    ranks: tuple[int, ...]
    """Ranks that worked longest in these steps. Empty if all took about as long, or if that is not known."""
    stage: str
    """Stage that most of the time was spent in."""
    longest_s: float
    """Work of the longest rank in these steps, in s."""
    others_s: float | None
    """Median work of the ranks that are not named, in s. None if no rank is named."""
    cost_s: float
    """Time that these steps took beyond that of as many usual steps, in s."""
    cost_pct: float
    """`cost_s` as a share of the run, in %."""
    why: str = ""
    """The facts as a sentence."""


def first_steps(d: Int64, split: Bool, ranks: Int64, usual_ns: float, run_ns: float) -> FirstSteps | None:
    """
    Return what the first steps of a run cost; None where that is less than a tenth of it, or than 2 s.

    The time before the first step begins (imports, building the model) is the `post_sync` of its row and does
    not count.

    Args:
        d: the rows of the first steps of the run, one a step, ns (K, R, 6).
        split: whether a rank's waiting is separate from its backward in all of these (R,).
        ranks: their numbers (R,).
        usual_ns: what a step takes afterwards.
        run_ns: how long the run took.
    """
    work = d[:, :, :SYNC_WAIT].copy()
    work[:1, :, POST_SYNC] = 0
    longest = work.sum(axis=2).max(axis=1, initial=0)
    usual = longest < _LONG * usual_ns
    count = int(np.argmax(usual)) if usual.any() else len(longest)
    cost_ns = float(longest[:count].sum()) - count * usual_ns
    if not count or run_ns <= 0 or cost_ns < max(_LEAST_NS, LEAST_SHARE * run_ns):
        return None
    by_rank = work[:count].sum(axis=(0, 2))
    stage = int(np.argmax(work[:count, int(np.argmax(by_rank))].sum(axis=0)))
    places = _longest(by_rank) if stage != BACKWARD or split.all() else np.empty(0, np.int64)
    others = np.delete(by_rank, places)
    named = tuple(ranks[places].tolist())
    first = FirstSteps(
        steps=count,
        ranks=named,
        stage=STAGES[stage],
        longest_s=float(by_rank.max()) / 1e9,
        others_s=float(np.median(others)) / 1e9 if named else None,
        cost_s=cost_ns / 1e9,
        cost_pct=min(100.0, 100 * cost_ns / run_ns),
    )
    return msgspec.structs.replace(first, why=_why(first))


def _longest(by_rank: Int64) -> Int64:
    """Return the indices of the ranks, fewer than half of them, that took longer than all others."""
    most, middle = int(by_rank.max()), int(np.sort(by_rank)[(len(by_rank) - 1) // 2])
    if most - middle < _APART * most:
        return np.empty(0, np.int64)
    return np.flatnonzero(by_rank > (most + middle) / 2)


def _why(first: FirstSteps) -> str:
    which = "the first step" if first.steps == 1 else f"the first {first.steps:,} steps"
    cause = "the start of its loader" if first.stage == STAGES[DATA] else "compilation or warm-up"
    on = ""
    if first.others_s is not None:
        on = f" on {text.ranks(first.ranks)}, {text.duration(first.others_s)} on the others"
    return (
        f"{which} took {text.duration(first.longest_s)}{on} ({cause}, in `{first.stage}`): "
        f"{text.duration(first.cost_s)} more than usual, {text.percent(first.cost_pct)} of the run"
    )
