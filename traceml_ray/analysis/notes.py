"""Sentences about episodes: what is not named yet, how long it has lasted, what it has cost."""

from __future__ import annotations

from collections.abc import Sequence

from traceml_ray.analysis.verdict import Verdict
from traceml_ray.text import duration, listed, ranks, share


def over_the_run(worst: Verdict, taken: float, cost: float) -> str:
    """Return the shares of the run (0..1) that something takes and costs; `worst`: where it was largest."""
    what, verb = _stages(worst) or "the whole step", "is" if len(worst.ranks) == 1 else "are"
    late = f"{ranks(worst.ranks)} {verb} late" if worst.ranks else "ranks are late in turn"
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


def pending(found: Sequence[tuple[float, Verdict]]) -> str:
    """Return what is not named yet; `found` has for how long (s) each was found."""
    each = []
    for lasted_s, verdict in found[:2]:
        stages = _stages(verdict)
        what = f"{ranks(verdict.ranks)} late" if verdict.ranks else "ranks late in turn"
        if verdict.meaning.names == "all":
            what = "slower" if stages else "whole step slower"
        each.append(f"{what}{stages and f' in {stages}'} for {duration(lasted_s)}")
    return "; ".join(each)


def _stages(verdict: Verdict) -> str:
    return listed([f"`{stage}`" for stage in verdict.stages])


def not_now(silent_s: float) -> str:
    """Return for how long the named finding has not been seen."""
    return f"not seen for {duration(silent_s)}"


def too_brief(hold_s: float) -> str:
    """Return why no rank is named although something was found."""
    return f"What is late or slower now has lasted less than {duration(hold_s)}, or costs almost nothing."


def too_early(found: Verdict, hold_s: float) -> str:
    """Return why a run without a verdict so far names nobody although something is late, or slower."""
    stages = _stages(found)
    if found.meaning.names == "all":
        what = f"{stages or 'The whole step'} is slower than the baseline"
    elif found.ranks:
        who, verb = ranks(found.ranks), "is" if len(found.ranks) == 1 else "are"
        what = f"{who[:1].upper()}{who[1:]} {verb} late" + (f" in {stages}" if stages else "")
    else:
        what = "Ranks are late in turn"
    return f"{what}. That is not named yet: it has to last {duration(hold_s)}."


def so_far(lasted_s: float, cost_s: float) -> str:
    """Return what an episode that goes on has cost."""
    return f"for {duration(lasted_s)}, of which it cost {duration(cost_s)}"
