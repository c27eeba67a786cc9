"""Which findings about memory become events: each once, when it has been found twice in a row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping

from traceml_ray import text, wire
from traceml_ray.analysis.memory.shapes import Finding, FirstCause, Memory

KIND = "memory"
_EACH = 8
"""More ranks that have the same are one event."""
_ORDER = ("info", "warning", "critical")


class MemoryEvents:
    """Of one run."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        """In the round before."""
        self._reported: dict[Hashable, int] = {}
        """How severe that was."""

    def resume(self, data: Mapping[str, wire.Value]) -> None:
        """Take the data of an event of this run that is stored: it is not sent again."""
        rank, severity = data.get("rank"), str(data.get("severity"))
        if data.get("finding") == "first_cause":
            self._reported["first_cause", rank] = 1
        elif severity in _ORDER:
            key = data.get("finding"), rank, data.get("device"), data.get("counter")
            self._reported[key] = max(_ORDER.index(severity), self._reported.get(key, 0))

    def of(self, memory: Memory, now_ns: int) -> list[tuple[int, wire.Event]]:
        """Return the events of a round, each with its rank."""
        bad = {_key(each): each for each in reversed(memory.findings) if each.severity != "info"}
        new: dict[str, list[Finding]] = defaultdict(list)
        for key, finding in reversed(bad.items()):
            severe = _ORDER.index(finding.severity)
            if key in self._seen and severe > self._reported.get(key, 0):
                self._reported[key] = severe
                new[finding.kind].append(finding)
        events = [event for found in new.values() for event in _events(found, now_ns)]
        cause = memory.first_cause
        seen: set[Hashable] = set(bad)
        if cause is not None and cause.confidence != "low":
            key = "first_cause", cause.rank
            seen.add(key)
            if key in self._seen and key not in self._reported:
                self._reported[key] = 1
                events.append((cause.rank, _first(cause, now_ns)))
        self._seen = seen
        return events


def _key(finding: Finding) -> Hashable:
    return finding.kind, finding.rank, finding.device, finding.evidence.get("counter")


def _events(found: list[Finding], now_ns: int) -> Iterable[tuple[int, wire.Event]]:
    if len(found) <= _EACH:
        return [(finding.rank, _event(finding, now_ns)) for finding in found]
    ranks = sorted({finding.rank for finding in found})
    event = _event(found[0], now_ns)
    who = text.ranks(ranks)
    message = f"{text.words(found[0].kind)} on {who}. {event.message}"
    data = {**event.data, "ranks": len(ranks)}
    return [(found[0].rank, wire.Event(KIND, now_ns, event.step, None, message, data))]


def _event(finding: Finding, now_ns: int) -> wire.Event:
    to_step = finding.evidence.get("to_step") or finding.evidence.get("step")
    data: dict[str, wire.Value] = {
        "finding": finding.kind,
        "rank": finding.rank,
        "device": finding.device,
        "severity": finding.severity,
        "confidence": finding.confidence,
        "from_ns": finding.from_ns,
        "to_ns": finding.to_ns,
        "next": " ".join(finding.next),
        **finding.evidence,
    }
    return wire.Event(KIND, now_ns, to_step if isinstance(to_step, int) else None, None, finding.why, data)


def _first(cause: FirstCause, now_ns: int) -> wire.Event:
    data: dict[str, wire.Value] = {
        "finding": "first_cause",
        "rank": cause.rank,
        "device": cause.device,
        "severity": "warning",
        "confidence": cause.confidence,
        "at_ns": cause.at_ns,
        "lead_ns": cause.lead_ns,
        "lead_bound_ns": cause.lead_bound_ns,
        "delta_bytes": cause.delta_bytes,
        "counter": cause.counter,
        "next": " ".join(cause.next),
    }
    return wire.Event(KIND, now_ns, None, None, cause.why, data)
