"""Sentences about episodes: what is not named yet, how long it has lasted, what it has cost."""

from __future__ import annotations

from collections.abc import Sequence

from traceml_ray.analysis.verdict import Verdict
from traceml_ray.text import duration, share


def over_the_run(worst: Verdict, taken: float, cost: float) -> str:
    """Return the shares of the run (0..1) that something takes and costs; `worst`: where it was largest."""
    what = f"`{worst.stage}`" if worst.stage else "the whole step"
    late = "ranks are late in turn" if worst.rank is None else f"rank {worst.rank} is late"
    slower = worst.meaning.names == "all"
    who = f"{what} is slower than the baseline" if slower else f"{late} out of {what}"
    return f"In {share(taken)} of the run {who}: {share(cost)} of its time. Where it was worst: {worst.why}"


def passing(strongest: str) -> str:
    """Return that the finding over the whole run was over too soon to name a rank."""
    return f"No rank is late for long. Once: {strongest}"


def was_named(times: int, cost_s: float) -> str:
    """Return that causes were named in a run that is healthy as a whole."""
    often = "once" if times == 1 else f"{times:,} times"
    return f"a cause was named {often}, which cost {duration(cost_s)} in all"


def pending(found: Sequence[tuple[int | None, str, bool, float]]) -> str:
    """Return what is not named yet; `found` has (rank, stage or "", rotating, seconds) of each."""
    each = []
    for rank, stage, rotating, lasted_s in found[:2]:
        slower = "slower" if stage else "whole step slower"
        who = f"rank {rank} late" if rank is not None else "ranks late in turn" if rotating else slower
        each.append(f"{who}{f' in `{stage}`' if stage else ''} for {duration(lasted_s)}")
    return "; ".join(each)


def not_now(silent_s: float) -> str:
    """Return for how long the named finding has not been seen."""
    return f"not seen for {duration(silent_s)}"


def too_brief(hold_s: float) -> str:
    """Return why no rank is named although something was found."""
    return f"What is late or slower now has lasted less than {duration(hold_s)}, or costs almost nothing."


def too_early(found: Verdict, hold_s: float) -> str:
    """Return why a run that begins with a late rank, or slower than a baseline, has no verdict yet."""
    what = "The first steps are slow" if found.meaning.names == "all" else "A rank is late in the first steps"
    return f"{what}; whether that lasts is known after {duration(hold_s)}."


def so_far(lasted_s: float, cost_s: float) -> str:
    """Return what an episode that goes on has cost."""
    return f"for {duration(lasted_s)}, of which it cost {duration(cost_s)}"
