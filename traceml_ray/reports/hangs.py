"""Hangs of a run, from what was judged live: afterwards the rows only show one long step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from traceml_ray.analysis.verdict import Verdict


def hangs(verdicts: Iterable[dict[str, Any]]) -> list[Verdict]:
    """Return the hangs among the live verdicts of a run, each once, as was known of it last."""
    found: dict[int, Verdict] = {}
    for verdict in verdicts:
        if verdict.get("began_ns") is not None:
            found[verdict["began_ns"]] = msgspec.convert(verdict, Verdict)
    return list(found.values())


def still_open(found: Sequence[Verdict], status: str | None) -> Verdict | None:
    """
    Return the hang in which the run ended, or is at present.

    What ranks died of after it (a collective's time-out, whoever lost patience) only followed from it.
    """
    return found[-1] if found and found[-1].lasted_s is None and status != "finished" else None
