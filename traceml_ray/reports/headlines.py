"""One line each: a verdict, the cost of all that was named, and the findings too short to be named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from traceml_ray import text
from traceml_ray.analysis.labels import Label
from traceml_ray.signals.finding import Finding, from_plain, headline
from traceml_ray.signals.findings import nodes_named
from traceml_ray.store.results import EarlierStart

_LEAST_HOURS = 0.01
"""Less is not told from none."""


def named(verdict: Mapping[str, Any]) -> str:
    """Return a verdict in one line: "straggler: rank 5 (node-1) in data"."""
    label: Label = verdict["label"]
    stages = verdict["stages"] or [verdict["stage"] or ""]
    inside = f"{verdict['span']}" if label == "stalled" else " and ".join(stages)
    nodes = nodes_named(verdict) if verdict["ranks"] else ()
    return headline(label, verdict["ranks"], nodes, inside=inside)


def part_of(verdict: Mapping[str, Any]) -> str:
    """Return what the cost of a verdict is a share of: "of the run", or of the time since it began."""
    return "of the run" if verdict.get("about") == "run" else "of the time"


def costs(verdict: Mapping[str, Any]) -> str:
    """Return "28 % of the run, 41 s": what is named costs; "" where that is not known."""
    return _cost(verdict["cost_pct"], part_of(verdict), verdict.get("cost_s"))


def _cost(cost_pct: float | None, part: str, cost_s: float | None) -> str:
    spent = f", {text.duration(cost_s)}" if cost_s else ""
    return f"{text.percent(cost_pct)} {part}{spent}" if cost_pct else ""


def cost_of(finding: Finding) -> str:
    """Return the same of a finding."""
    cost_pct = None if finding.cost is None else 100 * finding.cost
    return _cost(cost_pct, part_of({"about": finding.about}), finding.cost_s)


def line_of(finding: Finding) -> str:
    """Return a finding in a line: "straggler: rank 1 (node-0) in forward, 5 % of the run, 3 s"."""
    return ", ".join(filter(None, (finding.headline, cost_of(finding))))


def findings_in(summary: Mapping[str, Any]) -> list[Finding]:
    """Return the findings of a summary; none of one that is older than they are."""
    return [from_plain(one) for one in summary.get("findings") or ()]


def beside(findings: Iterable[Finding], first: str | None, *, all_of: bool = False) -> list[Finding]:
    """
    Return what else is to be read of the findings of a run beside the `first` one (its key) and the verdict:
    without what is only information, unless it may explain another one that is shown (`all_of`: with it).
    """
    listed = list(findings)
    verdict = next((one.key for one in listed if one.signal == "steps"), None)
    keys = {one.key for one in listed if all_of or one.severity != "info"}
    read = {first, verdict}
    return [
        one
        for one in listed
        if one.key not in read and (one.key in keys or one.explains in keys | read - {None})
    ]


def lost(verdict: Mapping[str, Any]) -> str:
    """Return the cost of all that was named in the run: "cost 41 s of 16 min"."""
    return f"cost {text.duration(verdict['lost_s'])} of {text.duration(verdict['elapsed_s'])}"


def since(episode: Mapping[str, Any]) -> str:
    """Return "since step 1,203 (2026-03-01T03:31:10Z), for 4.1 min"."""
    began = f" ({episode['started_at']})" if episode.get("started_at") else ""
    until = "" if episode["goes_on"] else f" to step {episode['to_step']:,}"
    return f"since step {episode['from_step']:,}{began}{until}, for {text.duration(episode['seconds'])}"


def cost(episode: Mapping[str, Any], gpus: bool) -> str:
    """Return "61 s and 0.14 GPU-hours so far": what an episode has cost; see `hours_of` for `gpus`."""
    hours = episode["rank_hours"]
    also = f" and {text.number(hours)} {hours_of(gpus)}" if hours >= _LEAST_HOURS else ""
    return f"{text.duration(episode['cost_s'])}{also}{' so far' if episode['goes_on'] else ''}"


def wasted(hours_per_hour: float | None, gpus: bool) -> str:
    """Return "1.2 GPU-hours wasted per hour"."""
    return f"{text.number(hours_per_hour)} {hours_of(gpus)} wasted per hour"


def hours_of(gpus: bool) -> str:
    """Return what wasted time is counted in: that of GPUs, or of ranks in a job that has none."""
    return "GPU-hours" if gpus else "rank-hours"


def coverage(known: int, world: int, died: int) -> str:
    """Return of how many ranks of a run that is over there is data, and how many died."""
    return f"data from {known:,} of {text.count(world, 'rank')}" + (f", {died:,} died" if died else "")


def restarted(earlier: Sequence[EarlierStart]) -> str:
    """Return which steps were made before a run was started again; "" where it was not."""
    if not earlier:
        return ""
    often = "once" if len(earlier) == 1 else f"{len(earlier):,} times"
    steps = text.listed([f"{one.steps:,}" for one in earlier])
    took = text.duration(sum(one.seconds for one in earlier))
    noun = "step" if len(earlier) == 1 and earlier[0].steps == 1 else "steps"
    return (
        f"Restarted {often}, after {steps} {noun} ({took}). Steps are counted from 0 again, and all numbers "
        "are of those since. Of the steps before, those after the last checkpoint were lost and made again."
    )


def brief(brief_findings: Mapping[str, Any]) -> str:
    """Return the findings too short to be named: "9 brief findings, 1.1 s in all"."""
    counted = text.count(brief_findings["count"], "brief finding")
    return f"{counted}, {text.duration(brief_findings['cost_s'])} in all" if brief_findings["count"] else ""
