"""
Marks of collectives in Stormlog's events: an event, or a phase, whose type, context or metadata names one.

They have no values of their own: what they repeat of a sample is not a sample.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Protocol

from traceml_ray.analysis.memory.shapes import Collective

_OPERATION = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|barrier")
_ANY = re.compile(r"[nr]ccl|collective|communication")
UNNAMED = "collective"
"""Operation of a mark that says only that it was a collective."""
_NAMES = {
    name.replace("_", ""): name
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")
}
_ENTER, _EXIT = "phase_enter", "phase_exit"
_UNKNOWN_RANK = 0
"""Until ranks are known, see `merge`."""


class MarkedEvent(Protocol):
    """What of an event says whether it marks a collective."""

    timestamp_ns: int
    event_type: str
    context: str | None
    metadata: Any


def operation(event: MarkedEvent) -> str | None:
    """Return the collective that an event marks; None: it marks none. Of a sample only the context counts."""
    texts = [event.context or ""]
    if event.event_type != "sample":
        texts += [event.event_type, bytes(event.metadata).decode(errors="replace")]
    words = " ".join(texts).lower().replace("-", "_")
    named = _OPERATION.search(words)
    if named is not None:
        return _NAMES[named[0].replace("_", "")]
    return UNNAMED if _ANY.search(words) else None


def collectives(marks: Iterable[tuple[MarkedEvent, str]]) -> list[Collective]:
    """Return marks (event, operation) in order of time as collectives; a phase is one from begin to end."""
    times: list[tuple[str, int, int]] = []
    entered: dict[str, int] = {}
    for event, name in marks:
        if event.event_type == _ENTER:
            entered[name] = event.timestamp_ns
        elif event.event_type == _EXIT and name in entered:
            times.append((name, entered.pop(name), event.timestamp_ns))
        else:
            times.append((name, event.timestamp_ns, event.timestamp_ns))
    times += [(name, begin_ns, begin_ns) for name, begin_ns in entered.items()]
    return [Collective(_UNKNOWN_RANK, name, None, first, last) for name, first, last in times]
