"""
The lines that a person reads first: a verdict, its cost and severity, the episode that it is about, and the
conclusion. The conclusion is the verdict, or a finding of another signal that is more severe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from traceml_ray import text
from traceml_ray.analysis.episodes import Brief
from traceml_ray.analysis.labels import LABELS, Severity
from traceml_ray.analysis.verdict_shapes import TimedEpisode
from traceml_ray.document.model import SIGNS
from traceml_ray.signals.finding import Finding, OnSteps, headline, nodes_named
from traceml_ray.store import query
from traceml_ray.store.results import EarlierStart
from traceml_ray.store.summary_shape import Conclusion, Tone

_LEAST_HOURS = 0.01
"""Costs below this number of hours count as none."""


def named(verdict: OnSteps | TimedEpisode) -> str:
    """Return a verdict or an episode in one line: "straggler: rank 5 (node-1) in data"."""
    stages = verdict.stages or [verdict.stage or ""]
    inside = f"{verdict.span}" if verdict.label == "stalled" else " and ".join(stages)
    nodes = nodes_named(verdict) if verdict.ranks else ()
    return headline(verdict.label, verdict.ranks, nodes, inside=inside)


def part_of(verdict: OnSteps | Finding) -> str:
    """Return which time the cost of a verdict is a share of: "of the run", or of the time since it began."""
    return "of the run" if verdict.about == "run" else "of the time"


def costs(verdict: OnSteps) -> str:
    """Return the cost of the named cause: "28 % of the run, 41 s"; "" if it is not known."""
    return _cost(verdict.cost_pct, part_of(verdict), verdict.cost_s)


def _cost(cost_pct: float | None, part: str, cost_s: float | None) -> str:
    spent = f", {text.duration(cost_s)}" if cost_s else ""
    return f"{text.percent(cost_pct)} {part}{spent}" if cost_pct else ""


def cost_of(finding: Finding) -> str:
    """Return the cost of a finding: "28 % of the run, 41 s"."""
    cost_pct = None if finding.cost is None else 100 * finding.cost
    return _cost(cost_pct, part_of(finding), finding.cost_s)


def line_of(finding: Finding) -> str:
    """Return a finding in a line: "straggler: rank 1 (node-0) in forward, 5 % of the run, 3 s"."""
    return ", ".join(filter(None, (finding.headline, cost_of(finding))))


def beside(findings: Iterable[Finding], first: str | None, *, all_of: bool = False) -> list[Finding]:
    """
    Return the findings of a run that are shown besides the `first` one (its key) and the verdict. Findings
    that are only information are left out, unless they may explain one that is shown; `all_of` includes them.
    Also left out is what the verdict already says, see `unsaid`.
    """
    listed = unsaid(findings)
    verdict = next((one.key for one in listed if one.signal == "steps"), None)
    keys = {one.key for one in listed if all_of or one.severity != "info"}
    read = {first, verdict}
    return [
        one
        for one in listed
        if one.key not in read and (one.key in keys or one.explains in keys | read - {None})
    ]


def unsaid(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings without those that are part of the reason of the finding that they explain."""
    listed = list(findings)
    reasons = {one.key: one.why for one in listed}
    return [one for one in listed if not one.why or one.why not in reasons.get(one.explains or "", "")]


def lost(verdict: OnSteps) -> str:
    """Return the cost of all named causes of the run: "cost 41 s of 16 min"."""
    return f"cost {text.duration(verdict.lost_s)} of {text.duration(verdict.elapsed_s)}"


def since(episode: TimedEpisode) -> str:
    """Return "since step 1,203 (2026-03-01T03:31:10Z), for 4.1 min"."""
    began = f" ({episode.started_at})" if episode.started_at else ""
    until = "" if episode.goes_on else f" to step {episode.to_step:,}"
    return f"since step {episode.from_step:,}{began}{until}, for {text.duration(episode.seconds)}"


def cost(episode: TimedEpisode, gpus: bool) -> str:
    """Return the cost of an episode so far: "61 s and 0.14 GPU-hours so far"; see `hours_of` for `gpus`."""
    hours = episode.rank_hours
    also = f" and {text.number(hours)} {hours_of(gpus)}" if hours >= _LEAST_HOURS else ""
    return f"{text.duration(episode.cost_s)}{also}{' so far' if episode.goes_on else ''}"


def wasted(hours_per_hour: float | None, gpus: bool) -> str:
    """Return "1.2 GPU-hours wasted per hour"."""
    return f"{text.number(hours_per_hour)} {hours_of(gpus)} wasted per hour"


def hours_of(gpus: bool) -> str:
    """Return the unit of wasted time: GPU-hours, or rank-hours in a job without GPUs."""
    return "GPU-hours" if gpus else "rank-hours"


def coverage(known: int, world: int, died: int) -> str:
    """Return for how many ranks of a finished run there is data, and how many died."""
    return f"data from {known:,} of {text.count(world, 'rank')}" + (f", {died:,} died" if died else "")


def restarted(earlier: Sequence[EarlierStart]) -> str:
    """Return which steps were made before a restart of the run; "" if there was none."""
    if not earlier:
        return ""
    often = "once" if len(earlier) == 1 else f"{len(earlier):,} times"
    steps = text.listed([f"{one.steps:,}" for one in earlier])
    took = text.duration(sum(one.seconds for one in earlier))
    noun = "step" if len(earlier) == 1 and earlier[0].steps == 1 else "steps"
    return (
        f"Restarted {often}, after {steps} {noun} ({took}). Steps are counted from 0 again; all numbers "
        "cover the steps since then. Steps after the last checkpoint were lost and repeated."
    )


def brief(brief_findings: Brief) -> str:
    """Return the number and cost of the findings too short to be named: "9 brief findings, 1.1 s in all"."""
    counted = text.count(brief_findings.count, "brief finding")
    return f"{counted}, {text.duration(brief_findings.cost_s)} in all" if brief_findings.count else ""


_SEVERITY: dict[str, Severity] = {
    **{label: meaning.severity for label, meaning in LABELS.items()},
    **dict.fromkeys(("node_lost", "exception", "xid"), "critical"),
    **dict.fromkeys(("restart", "note", "swallowed"), "warning"),
}


def severity(kind: str) -> Severity:
    """Return the severity of a kind of event, or of a verdict's label."""
    return _SEVERITY.get(kind, "info")


def tone_of(verdict: OnSteps | None) -> tuple[str, str]:
    """Return the severity of a verdict as (tone, sign)."""
    label = verdict.label if verdict else ""
    tone = "good" if label == "healthy" else severity(label).replace("info", "unsure")
    return tone, sign_of(tone)


def sign_of(tone: str) -> str:
    """Return the sign of a tone."""
    return {"good": "✓", "unsure": "○"}.get(tone) or SIGNS[tone]


def current_episode(verdict: OnSteps | None, episodes: Sequence[TimedEpisode] | None) -> TimedEpisode | None:
    """Return the one of `episodes` that a verdict is about; None if there is none."""
    if verdict is None:
        return None
    who = attrgetter("label", "rank", "stage")
    same = [episode for episode in episodes or () if who(episode) == who(verdict)]
    return max(same, key=attrgetter("goes_on", "cost_s"), default=None)


def change(
    run: str | None, verdict: OnSteps | None, episodes: Sequence[TimedEpisode] | None
) -> query.GetChange | None:
    """
    Return the question for the step times before the verdict's onset and since; None if
    there is no episode.
    """
    episode = current_episode(verdict, episodes)
    if episode is None:
        return None
    first = episode.from_step
    ended = [one.to_step + 1 for one in episodes or () if one.to_step < first]
    return query.GetChange(run, max(ended, default=0), first, None if episode.goes_on else episode.to_step)


_WORST: tuple[Tone, ...] = ("critical", "warning", "notice", "unsure", "good")
"""Tones, the most severe first."""
_BEFORE_VERDICT = ("critical", "warning")
"""Severities of findings that may be shown before the verdict."""


def conclude(verdict: OnSteps, findings: Iterable[Finding]) -> Conclusion:
    """
    Return the most severe of the verdict and the findings of other signals. If several are equally severe,
    return the verdict, else the first of the `findings`.
    """
    first, others = None, list[Conclusion]()
    for one in findings:
        if one.signal == "steps":
            first = first or one.key
        elif one.severity in _BEFORE_VERDICT:
            others.append(_of(one))
    return min([_of_steps(verdict, first), *others], key=lambda one: _WORST.index(one.tone))


def _of_steps(verdict: OnSteps, key: str | None) -> Conclusion:
    tone: Any = tone_of(verdict)[0]
    about = named(verdict), verdict.why, verdict.next, verdict.rank
    return Conclusion("steps", tone, text.words(verdict.label), *about, key)


def _of(one: Finding) -> Conclusion:
    tone: Any = one.severity
    rank = one.ranks[0] if one.ranks else None
    return Conclusion(one.signal, tone, text.words(one.label), one.headline, one.why, one.next, rank, one.key)
