"""Sentences about episodes: what is not named yet, how long it lasts, what the run has lost."""

from __future__ import annotations

from collections.abc import Sequence

from traceml_ray.text import duration, share


def over_the_run(label: str, rank: int | None, stage: str, taken: float, cost: float, strongest: str) -> str:
    """Return how much of the run something takes; `strongest` is the verdict where it was largest."""
    what = f"`{stage}`" if stage else "the whole step"
    late = "ranks are late in turn" if rank is None else f"rank {rank} is late"
    who = f"{what} is slower than the baseline" if label == "group_wide" else f"{late} out of {what}"
    return f"In {share(taken)} of the run {who}: {share(cost)} of its time. Where it was worst: {strongest}"


def passing(strongest: str) -> str:
    """Return that what the whole run shows was over too soon to name a rank."""
    return f"No rank is late for long. Once: {strongest}"


def was_named(times: int, cost_s: float) -> str:
    """Return that causes were named in a run that is healthy on the whole."""
    often = "once" if times == 1 else f"{times:,} times"
    return f"a cause was named {often}, which cost {duration(cost_s)} in all"


def pending(found: Sequence[tuple[int | None, str, bool, float]]) -> str:
    """Return what is not named yet: of each the rank, the stage ("": all), whether it rotates, seconds."""
    each = []
    for rank, stage, rotating, lasted_s in found[:2]:
        slower = "slower" if stage else "whole step slower"
        who = f"rank {rank} late" if rank is not None else "ranks late in turn" if rotating else slower
        each.append(f"{who}{f' in `{stage}`' if stage else ''} for {duration(lasted_s)}")
    return "; ".join(each)


def not_now(silent_s: float) -> str:
    """Return that what is named is not seen at present."""
    return f"not seen for {duration(silent_s)}"


def too_brief(hold_s: float) -> str:
    """Return why no rank is named although something was found."""
    return f"What is late or slower now has lasted less than {duration(hold_s)}, or costs next to nothing."


def too_early(label: str, hold_s: float) -> str:
    """Return why a run that begins with a late rank, or slower than a baseline, has no verdict yet."""
    what = "The first steps are slow" if label == "group_wide" else "A rank is late in the first steps"
    return f"{what}; whether that lasts is known after {duration(hold_s)}."


def so_far(lasted_s: float, cost_s: float) -> str:
    """Return what an episode that goes on has cost."""
    return f"for {duration(lasted_s)}, of which it cost {duration(cost_s)}"
