"""One finding, one cost: every place of a verdict gives the cost of the whole episode, or of the run."""

from __future__ import annotations

import msgspec

from traceml_ray.analysis import wording
from traceml_ray.analysis.verdict import Verdict


def with_cost(
    verdict: Verdict,
    cost_s: float,
    of_s: float,
    ranks: int,
    cost_range: tuple[float, float] | None = None,
) -> Verdict:
    """
    Return the `verdict` of a window with the cost of more than that, and what fixing it saves in its `why`.

    Args:
        verdict: of the window, which does not say yet what it costs.
        cost_s: time that was waited for what it names, s,
        of_s: of so much time, s: that of its episode, or of the run.
        ranks: how many waited.
        cost_range: of the cost, over the windows, %.
    """
    cost = min(100.0, 100 * cost_s / max(of_s, 1e-9))
    alone, together = verdict.gain_pct, verdict.cost_pct
    gain = cost if not alone or not together else min(cost, cost * alone / together)
    costed = msgspec.structs.replace(
        verdict,
        cost_pct=cost,
        cost_s=cost_s,
        gain_pct=gain,
        cost_range_pct=cost_range,
        rank_hours_per_hour=cost / 100 * ranks,
    )
    return with_saving(costed)


def with_saving(verdict: Verdict) -> Verdict:
    """Return the finding with a sentence on what fixing it saves, from the cost it has."""
    if verdict.cost_pct is None or verdict.meaning.kind != "finding":
        return verdict
    saving = wording.saving(
        verdict.label,
        len(verdict.ranks),
        len(verdict.stages),
        verdict.gain_pct or 0.0,
        verdict.cost_pct,
        at_most=verdict.at_most,
        whole_time="the run" if verdict.about == "run" else "the step",
    )
    return msgspec.structs.replace(verdict, why=f"{verdict.why} {saving}", saving=saving)


def with_suspects(verdict: Verdict) -> Verdict:
    """Return `verdict` with its cost repeated in its suspect, if it names exactly one."""
    known = {
        (one.rank, one.stage): one.cost_pct or 0.0
        for one in (*reversed(verdict.also), verdict)
        if len(one.ranks) == len(one.stages) == 1
    }
    step_ms = verdict.mean_step_ms or 0.0
    suspects = [
        msgspec.structs.replace(one, cost_pct=cost, gain_ms=cost / 100 * step_ms)
        if (cost := known.get((one.rank, one.stage))) is not None
        else one
        for one in verdict.suspects
    ]
    return msgspec.structs.replace(verdict, suspects=tuple(suspects))
