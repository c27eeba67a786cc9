"""Whether steps of a session's runs can still be measured, and why not: for those who ask and wait."""

from __future__ import annotations

from collections.abc import Sequence

from traceml_ray import text
from traceml_ray.results import RunInfo

_GOES_ON = "running"


def why_over(runs: Sequence[RunInfo], run: str | None) -> str:
    """
    Return why no step of a run is left to measure; "" where it goes on, or may be yet to begin.

    Args:
        runs: those of the session.
        run: id or name; None: any that goes on.
    """
    asked = [info for info in runs if run in (None, info["id"], info["name"])]
    if not asked or any(info["status"] == _GOES_ON for info in asked):
        return ""
    last = asked[-1]
    state = f"{last['status']} at {last['ended_at']}" if last["ended_at"] else last["status"]
    going = [info["name"] for info in runs if info["status"] == _GOES_ON]
    others = f"; {text.listed(going)} goes on" if going else ""
    return f"run {last['name']!r} has no step left to record: {state}{others}"
