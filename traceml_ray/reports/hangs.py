"""Hangs of a run, from its live verdicts: afterwards the rows only show one long step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from traceml_ray.analysis.verdict import Verdict


def hangs(verdicts: Iterable[dict[str, Any]]) -> list[Verdict]:
    """Return the hangs among the live verdicts of a run, each once, in its last version."""
    found: dict[int, Verdict] = {}
    for verdict in verdicts:
        if verdict.get("began_ns") is not None:
            found[verdict["began_ns"]] = msgspec.convert(verdict, Verdict)
    return list(found.values())


def still_open(found: Sequence[Verdict], status: str | None) -> Verdict | None:
    """
    Return the hang in which the run ended, or is at present.

    Deaths after it (a collective's time-out, a person who ended the job) only followed from it.
    """
    return found[-1] if found and found[-1].lasted_s is None and status != "finished" else None
