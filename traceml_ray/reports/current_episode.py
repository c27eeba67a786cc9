"""The episode that a verdict is about, and the question what a step took before it and since."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from traceml_ray.store import query


def current_episode(verdict: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the episode that a verdict (with its `episodes`) is about, None without any."""
    if verdict is None:
        return None
    who = itemgetter("label", "rank", "stage")
    same = [episode for episode in verdict.get("episodes") or () if who(episode) == who(verdict)]
    return max(same, key=itemgetter("goes_on", "cost_s"), default=None)


def change(run: str | None, verdict: Mapping[str, Any] | None) -> query.GetChange | None:
    """Return the question what a step took before the verdict's onset and since; None without any."""
    episode = current_episode(verdict)
    if verdict is None or episode is None:
        return None
    first = episode["from_step"]
    ended = [episode["to_step"] + 1 for episode in verdict["episodes"] if episode["to_step"] < first]
    return query.GetChange(
        run, max(ended, default=0), first, None if episode["goes_on"] else episode["to_step"]
    )
