"""One line each: a verdict, the cost of all that was named, and the findings too short to be named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from traceml_ray import text
from traceml_ray.analysis.labels import Label


def named(verdict: Mapping[str, Any]) -> str:
    """Return a verdict in one line: "straggler: rank 5 (node-1) in data"."""
    label: Label = verdict["label"]
    line = text.words(label)
    if verdict["ranks"]:
        node = f" ({verdict['node']})" if verdict["node"] else ""
        line += f": {text.ranks(verdict['ranks'])}{node}"
    if label == "stalled":
        line += f" in {verdict['span']}"
    elif verdict["stages"] or verdict["stage"]:
        line += " in " + " and ".join(verdict["stages"] or [verdict["stage"]])
    return line


def lost(verdict: Mapping[str, Any]) -> str:
    """Return the cost of all that was named in the run: "cost 41 s of 16 min"."""
    return f"cost {text.duration(verdict['lost_s'])} of {text.duration(verdict['elapsed_s'])}"


def brief(found: Mapping[str, Any]) -> str:
    """Return the findings too short to be named: "9 brief findings, 1.1 s in all"."""
    counted = text.count(found["count"], "brief finding")
    return f"{counted}, {text.duration(found['cost_s'])} in all" if found["count"] else ""
