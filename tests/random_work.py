"""Random jobs with varying work: kinds, sizes and causes that no family in `work_families` contains."""

from __future__ import annotations

from typing import Any

import numpy as np
from varying_work import (
    Cause,
    Played,
    Sizes,
    Stalls,
    Work,
    any_one,
    costing,
    documents,
    experts,
    heavy_tailed,
    in_turn,
    late,
    lognormal,
    play,
    uniform,
)

from traceml_ray.stages import BACKWARD, DATA, FORWARD, POST_SYNC, PREPARE, SYNC_WAIT

Rng = np.random.Generator
_JOBS = 77_001
_HEALTHY, _TWO, _LASTING, _NOW_AND_THEN, _PART = 0.4, 0.47, 0.7, 0.8, 0.92
"""Cumulative shares of the kinds of jobs. The rest has two kinds of ranks."""
_LONG = 8
"""If sizes stay for this many steps, a rank with a rare large size looks as if it had become late."""
_VARIES = ((FORWARD, BACKWARD), (FORWARD, BACKWARD), (FORWARD,), (DATA,), (BACKWARD,))
_STAGES = ((POST_SYNC,), (DATA,), (PREPARE,), (FORWARD,), (BACKWARD,), (FORWARD, BACKWARD))


def random_job(seed: int) -> tuple[Played, str]:
    """Return the run of a seed, always the same one, and its kind according to the truth about it."""
    rng = np.random.default_rng((_JOBS, seed))
    work, rare = random_work(rng)
    run = play(work, random_causes(rng, work, seed), seed)
    return run, kind_of(run) + ", rare and long sizes" * (rare and work.stay >= _LONG)


def random_work(rng: Rng) -> tuple[Work, bool]:
    """
    Return a random job of 2 to 48 ranks with steps of 40 to 600 ms, and whether large sizes are rare in the
    job.
    """
    ranks = int(rng.choice([2, 3, 4, 6, 8, 12, 16, 24, 32, 48]))
    step_ms = _between(rng, 40, 600)
    base_ms = tuple((step_ms * rng.dirichlet((0.8, 0.6, 0.4, 5, 9))).tolist())
    stay = int(rng.choice([1, 1, 1, 1, 2, 4, 8, 15, 30]))
    sizes, stays, rare = _sizes(rng, stay)
    steps = int(rng.choice([300, 500, 800] if stays <= 5 else [800, 1200]))
    varies = _VARIES[int(rng.integers(len(_VARIES)))]
    stalls = None
    if rng.random() < 0.15:
        often, stage = float(rng.choice([0.002, 0.01, 0.03])), int(rng.choice([DATA, FORWARD, BACKWARD]))
        stalls = Stalls(often, step_ms / 2, 2 * step_ms, stage)
    work = Work(
        ranks=ranks,
        steps=steps,
        base_ms=base_ms,
        noise=float(rng.choice([0.01, 0.03, 0.06])),
        spread=float(rng.choice([0, 0.003, 0.01])),
        exchange_ms=float(rng.uniform(0.02, 0.5)) * step_ms,
        buckets=int(rng.choice([1, 3, 5, 20])),
        sizes=sizes,
        varies=varies,
        stay=stays,
        stalls=stalls,
    )
    return work, rare


def random_causes(rng: Rng, work: Work, seed: int) -> list[Cause]:
    """
    Return zero, one or two causes of any size that last, occur now and then, or last for a part
    of the run.
    """
    kind = rng.random()
    if kind < _HEALTHY:
        return []
    rank = int(rng.integers(work.ranks))
    stages = _STAGES[int(rng.integers(len(_STAGES)))]
    share = _between(rng, 0.02, 0.35)
    if kind >= _PART and work.ranks >= 4:
        slow = rng.choice(work.ranks, int(rng.integers(2, work.ranks - 1)), replace=False).tolist()
        return [late(slow, (FORWARD, BACKWARD), times=float(rng.uniform(1.08, 1.6)))]
    how: dict[str, Any] = {"spread": float(rng.choice([0, 0.3, 0.8]))}
    if _LASTING <= kind < _NOW_AND_THEN:
        how["often"] = float(rng.choice([0.15, 0.4, 0.7]))
    elif kind >= _NOW_AND_THEN:
        how |= _part(rng, work.steps)
    causes = [costing(share, work, late(rank, stages, **how), seed)]
    if kind < _TWO:
        ms = float(rng.uniform(0.02, 0.2)) * work.step_ms
        causes.append(late((rank + 1) % work.ranks, int(rng.integers(SYNC_WAIT)), ms=ms))
    return causes


def kind_of(run: Played) -> str:
    """Return the kind of a run, according to the truth about it."""
    place = run.costliest
    if place is None:
        return "healthy, random" if run.imbalance is None or run.imbalance < 0.12 else "imbalance, random"
    cost = run.costs[place]
    size = "costs ≥ 8 %" if cost >= 0.08 else "costs 2 to 8 %" if cost >= 0.02 else "costs < 2 %"
    return f"random, {size}" + (", not sure" if not run.sure[place] else "")


def _sizes(rng: Rng, stay: int) -> tuple[Sizes | None, float, bool]:
    """Return how sizes are drawn, for how many steps they stay, and whether large ones are rare."""
    memory = float(rng.uniform(0.3, 0.93))
    width, sigma = float(rng.uniform(0.15, 0.85)), float(rng.uniform(0.1, 0.7))
    kinds: list[tuple[Sizes | None, float]] = [
        (uniform(1 - width, 1 + width, stay), stay),
        (lognormal(sigma, stay), stay),
        (heavy_tailed(float(rng.uniform(1.8, 4)), stay), stay),
        (documents(float(rng.uniform(0.02, 0.3)), float(rng.uniform(1.5, 5)), stay), stay),
        (in_turn(float(rng.uniform(0.1, 1))), 1),
        (any_one(float(rng.uniform(0.1, 1))), 1),
        (experts(float(rng.uniform(0.1, 0.5)), memory), (1 + memory) / (1 - memory)),
        (None, 1),
        (None, 1),
    ]
    which = int(rng.integers(len(kinds)))
    return *kinds[which], which in (2, 3)


def _part(rng: Rng, steps: int) -> dict[str, int]:
    which = int(rng.integers(3))
    if which == 0:
        return {"first": int(steps * rng.uniform(0.4, 0.95))}
    if which == 1:
        return {"end": int(steps * rng.uniform(0.1, 0.7))}
    return {"first": int(steps * 0.3), "end": int(steps * 0.7)}


def _between(rng: Rng, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))
