"""Sentences about episodes: what is not named yet, how long it has lasted, and what it has cost."""

from __future__ import annotations

from collections.abc import Sequence

from traceml_ray.analysis.verdict import Verdict
from traceml_ray.text import count, duration, listed, ranks, share

_NODES = 2
"""Largest number of nodes listed beside their ranks."""


def over_the_run(
    late: Sequence[int], stages: Sequence[str], all_ranks: bool, taken: float, cost: float
) -> tuple[str, str]:
    """
    Describe the share of the run (0..1) in which the `late` ranks are late in `stages`, and what fixing it
    saves.
    """
    what, verb = _listed(stages) or "the whole step", "is" if len(late) == 1 else "are"
    who = f"{ranks(late)} {verb} late" if late else "ranks are late in turn"
    seen = f"{what} is slower than the baseline" if all_ranks else f"{who} out of {what}"
    return f"In {share(taken)} of the run {seen}.", f"Fixing that saves {share(cost)} of the run."


def last_steps(findings: Sequence[tuple[Verdict, int, float]], elapsed_s: float) -> str:
    """
    Return what was late in the last steps of a run, too briefly to be named: each with how many steps, and
    its cost (s).
    """
    parts = [
        f"{_what(verdict)} in the last {count(steps, 'step')}: {duration(cost_s)}, "
        f"{share(cost_s / max(elapsed_s, 1e-9))} of the run"
        for verdict, steps, cost_s in findings[:2]
    ]
    return "; ".join(parts)


def passing(strongest: str) -> str:
    """Explain that the finding over the whole run ended too early for a rank to be named."""
    return f"No rank is late for long. Once: {strongest}"


def was_named(times: int, cost_s: float, worst: Verdict, first: int, last: int) -> str:
    """
    Explain that causes were named in a run that is healthy as a whole. `worst` was named in
    these steps.
    """
    often = "once" if times == 1 else f"{times:,} times"
    which = f"{_what(worst)} in steps {first:,}–{last:,}"
    return f"a cause was named {often}, which cost {duration(cost_s)} in all ({which})"


def pending(findings: Sequence[tuple[float, Verdict]]) -> str:
    """Describe what is not named yet. `findings` are pairs: how long it was seen (s), and the verdict."""
    return "; ".join(f"{_what(verdict)} for {duration(lasted_s)}" for lasted_s, verdict in findings[:2])


def _what(verdict: Verdict) -> str:
    """Describe a finding in a few words: "rank 1 late in `data`", "whole step slower"."""
    stages = _listed(verdict.stages)
    what = f"{ranks(verdict.ranks)} late" if verdict.ranks else "ranks late in turn"
    if verdict.meaning.names == "all":
        what = "slower" if stages else "whole step slower"
    return what + (f" in {stages}" if stages else "")


def _listed(stages: Sequence[str]) -> str:
    return listed([f"`{stage}`" for stage in stages])


def not_now(silent_s: float) -> str:
    """Say for how long the named finding has not been seen."""
    return f"not seen for {duration(silent_s)}"


def watched(verdict: Verdict, began: int, lasted_s: float, cost_s: float, cost: float, lacking: str) -> str:
    """
    Describe what is seen, since when, its cost (in s, and as a share of that time), and what it lacks to be
    named.
    """
    since = f"for {duration(lasted_s)}, since step {began:,}"
    spent = f"It has cost {duration(cost_s)}, {share(cost)} of that time. It is not named yet: {lacking}."
    return f"{_seen(verdict, 'has been', 'have been')} {since}. {spent}"


def too_brief(hold_s: float) -> str:
    """Explain why nothing is named or watched although the window shows something."""
    return f"What this window shows has lasted less than {duration(hold_s)}, or is over."


def too_early(verdict: Verdict, hold_s: float) -> str:
    """Explain why a run without a verdict so far names nobody although something is late or slower."""
    return f"{_seen(verdict, 'is', 'are')}. That is not named yet: it has to last {duration(hold_s)}."


def _seen(verdict: Verdict, one: str, several: str) -> str:
    """Describe who is late, or what is slower. `one` and `several` are the verb in singular and plural."""
    stages = _listed(verdict.stages)
    if verdict.meaning.names == "all":
        return f"{stages or 'The whole step'} {one} slower than the baseline"
    if not verdict.ranks:
        return f"Ranks {several} late in turn" + (f" in {stages}" if stages else "")
    who = f"{ranks(verdict.ranks)}{f' ({listed(verdict.nodes)})' if 0 < len(verdict.nodes) <= _NODES else ''}"
    verb = one if len(verdict.ranks) == 1 else several
    return f"{who[:1].upper()}{who[1:]} {verb} late" + (f" in {stages}" if stages else "")


def so_far(lasted_s: float, cost_s: float) -> str:
    """Say what an episode that is still open has cost."""
    return f"for {duration(lasted_s)}, of which it cost {duration(cost_s)}"


def more(count: int) -> str:
    """Say how many further findings are named beyond those that are listed."""
    return f"{count:,} more {'is' if count == 1 else 'are'} named" if count > 0 else ""
