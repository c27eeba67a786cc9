"""One line each: a verdict, the cost of all that was named, and the findings too short to be named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from traceml_ray import text
from traceml_ray.analysis.labels import Label

_LEAST_HOURS = 0.01
"""Less is not told from none."""
_NAMED = 2
"""So many nodes are listed; others are counted."""


def named(verdict: Mapping[str, Any]) -> str:
    """Return a verdict in one line: "straggler: rank 5 (node-1) in data"."""
    label: Label = verdict["label"]
    line = text.words(label)
    if verdict["ranks"]:
        line += f": {text.ranks(verdict['ranks'])}{_where(verdict)}"
    if label == "stalled":
        line += f" in {verdict['span']}"
    elif verdict["stages"] or verdict["stage"]:
        line += " in " + " and ".join(verdict["stages"] or [verdict["stage"]])
    return line


def part_of(verdict: Mapping[str, Any]) -> str:
    """Return what the cost of a verdict is a share of: "of the run", or of the time since it began."""
    return "of the run" if verdict.get("about") == "run" else "of the time"


def costs(verdict: Mapping[str, Any]) -> str:
    """Return "28 % of the run, 41 s": what is named costs; "" where that is not known."""
    if not verdict["cost_pct"]:
        return ""
    spent = f", {text.duration(verdict['cost_s'])}" if verdict.get("cost_s") else ""
    return f"{text.percent(verdict['cost_pct'])} {part_of(verdict)}{spent}"


def also(verdict: Mapping[str, Any]) -> list[str]:
    """Return what else is named, each in a line: "straggler: rank 1 in forward, 5 % of the run, 3 s"."""
    return [", ".join(filter(None, (named(one), costs(one)))) for one in verdict.get("also") or ()]


def lost(verdict: Mapping[str, Any]) -> str:
    """Return the cost of all that was named in the run: "cost 41 s of 16 min"."""
    return f"cost {text.duration(verdict['lost_s'])} of {text.duration(verdict['elapsed_s'])}"


def since(episode: Mapping[str, Any]) -> str:
    """Return "since step 1,203 (2026-03-01T03:31:10Z), for 4.1 min"."""
    at = f" ({episode['started_at']})" if episode.get("started_at") else ""
    until = "" if episode["goes_on"] else f" to step {episode['to_step']:,}"
    return f"since step {episode['from_step']:,}{at}{until}, for {text.duration(episode['seconds'])}"


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


def restarted(earlier: Sequence[Mapping[str, Any]]) -> str:
    """Return which steps were made before a run was started again; "" where it was not."""
    if not earlier:
        return ""
    often = "once" if len(earlier) == 1 else f"{len(earlier):,} times"
    steps = text.listed([f"{one['steps']:,}" for one in earlier])
    took = text.duration(sum(one["seconds"] for one in earlier))
    noun = "step" if len(earlier) == 1 and earlier[0]["steps"] == 1 else "steps"
    return (
        f"Restarted {often}, after {steps} {noun} ({took}). Steps are counted from 0 again, and all numbers "
        "are of those since. Of the steps before, those after the last checkpoint were lost and made again."
    )


def brief(found: Mapping[str, Any]) -> str:
    """Return the findings too short to be named: "9 brief findings, 1.1 s in all"."""
    counted = text.count(found["count"], "brief finding")
    return f"{counted}, {text.duration(found['cost_s'])} in all" if found["count"] else ""


def _where(verdict: Mapping[str, Any]) -> str:
    """Return the nodes of its ranks; an episode knows that of one rank only."""
    alone = [verdict["node"]] if verdict["node"] and len(verdict["ranks"]) == 1 else []
    nodes = verdict.get("nodes") or alone
    return f" ({text.listed(nodes[:_NAMED], max(0, len(nodes) - _NAMED))})" if nodes else ""
