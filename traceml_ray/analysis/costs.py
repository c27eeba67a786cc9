"""One finding, one cost: the figure of its whole episode, or of the run, in every place of its verdict."""

from __future__ import annotations

import re

import msgspec

from traceml_ray.analysis.verdict import Verdict
from traceml_ray.text import percent

_FIGURE = re.compile(r"(?P<figure>[\d.,−]+ %)(?P<of> of (?:the|each) step(?!s))?")
_SAVING = re.compile(
    r" Fixing [a-z ]+? saves (at most )?[\d.,]+ % of the (step|run)(, fixing all together [\d.,]+ %)?"
    r"(, probably much less)?\."
)

_SHARE = re.compile(r": [\d.,]+ % of the (step|run)\.")


def with_cost(
    verdict: Verdict,
    cost_s: float,
    of_s: float,
    ranks: int,
    cost_range: tuple[float, float] | None = None,
) -> Verdict:
    """
    Return the `verdict` of a window with another cost, in all figures and in its sentence.

    Args:
        verdict: of the window.
        cost_s: time that was waited for what it names, s,
        of_s: of so much time, s: that of its episode, or of the run.
        ranks: how many waited.
        cost_range: of the cost, over the windows, %.
    """
    cost = min(100.0, 100 * cost_s / max(of_s, 1e-9))
    alone, together = verdict.gain_pct, verdict.cost_pct
    gain = cost if not alone or not together else min(cost, cost * alone / together)
    return msgspec.structs.replace(
        verdict,
        cost_pct=cost,
        cost_s=cost_s,
        gain_pct=gain,
        cost_range_pct=cost_range,
        rank_hours_per_hour=cost / 100 * ranks,
        why=_restated(verdict, gain, cost),
    )


def _restated(verdict: Verdict, gain: float, cost: float) -> str:
    """Return why, with the cost of the whole in place of that of the window."""
    alone, together = verdict.gain_pct, verdict.cost_pct
    if together is None:
        return verdict.why
    new = {percent(together): percent(cost)}
    if alone is not None:
        new.setdefault(percent(alone), percent(gain))
    what = " of the run" if verdict.about == "run" else " of the step"

    def restate(match: re.Match[str]) -> str:
        figure, of = match["figure"], match["of"] or ""
        is_cost = bool(of) or verdict.why[: match.start()].endswith("together ")
        return f"{new.get(figure, figure)}{of and what}" if is_cost and figure in new else match[0]

    return _FIGURE.sub(restate, verdict.why)


def with_suspects(verdict: Verdict) -> Verdict:
    """Return `verdict` with the cost of what it names, where that is one suspect, in the suspect, too."""
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


def without_saving(why: str) -> str:
    """Return why without what it costs, which is said beside it for a longer time."""
    return _SHARE.sub(".", _SAVING.sub("", why))
