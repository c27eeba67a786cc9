"""
Which findings about memory become events: each once, when it has been found twice in a row. Growth has to be
found for some time as well (a run is looked at many times, and noise looks like growth now and then), or be
so even that noise does not look like it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from traceml_ray import text
from traceml_ray.signals.memory.limits import MEMORY
from traceml_ray.signals.memory.sentences import GROWTH
from traceml_ray.signals.memory.shapes import FirstCause, Memory, MemoryFinding, Value
from traceml_ray.wire import messages as wire

KIND = "memory"
_Key = tuple[Value, ...]
"""The kind, the rank, and what else tells findings apart."""
_EACH = 8
"""More ranks that have the same are one event."""
_ORDER = ("info", "warning", "critical")


class MemoryEvents:
    """Of one run."""

    def __init__(self) -> None:
        self._seen: dict[_Key, int] = {}
        """In the round before, and until when memory was known when that was first seen without a break."""
        self._reported: dict[_Key, int] = {}
        """Severity of each reported finding."""

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
        bad = {_key(finding): finding for finding in reversed(memory.findings) if finding.severity != "info"}
        new: dict[str, list[MemoryFinding]] = defaultdict(list)
        for key, finding in reversed(bad.items()):
            severe = _ORDER.index(finding.severity)
            if self._lasts(key, finding) and severe > self._reported.get(key, 0):
                self._reported[key] = severe
                new[finding.kind].append(finding)
        events = [event for findings in new.values() for event in _events(findings, now_ns)]
        self._seen = {key: self._seen.get(key, finding.to_ns) for key, finding in bad.items()}
        cause = memory.first_cause
        if cause is not None and cause.confidence != "low" and self._is_warned(cause.rank):
            key = "first_cause", cause.rank
            if key not in self._reported:
                self._reported[key] = 1
                events.append((cause.rank, _first(cause, now_ns)))
        return events

    def lasting(self, memory: Memory) -> Memory:
        """Return what was found without growth that may be noise: of which there is no event, yet."""
        kept = [
            finding
            for finding in memory.findings
            if finding.kind not in GROWTH or _key(finding) in self._reported
        ]
        return msgspec.structs.replace(memory, findings=kept)

    def _lasts(self, key: _Key, finding: MemoryFinding) -> bool:
        over = finding.evidence.get("over_walk")
        if isinstance(over, float) and over >= MEMORY.over_walk_sure:
            return True
        if key not in self._seen:
            return False
        lasted = finding.to_ns - finding.from_ns if finding.kind in GROWTH else 0
        return finding.to_ns - self._seen[key] >= MEMORY.held * lasted

    def _is_warned(self, rank: int) -> bool:
        """Whether there has been an event about the memory of a rank."""
        return any(key[1] == rank for key in self._reported)


def _key(finding: MemoryFinding) -> _Key:
    return finding.kind, finding.rank, finding.device, finding.evidence.get("counter")


def _events(findings: list[MemoryFinding], now_ns: int) -> Iterable[tuple[int, wire.Event]]:
    if len(findings) <= _EACH:
        return [(finding.rank, _event(finding, now_ns)) for finding in findings]
    ranks = sorted({finding.rank for finding in findings})
    event = _event(findings[0], now_ns)
    who = text.ranks(ranks)
    message = f"{text.words(findings[0].kind)} on {who}. {event.message}"
    data = {**event.data, "ranks": len(ranks)}
    return [(findings[0].rank, wire.Event(KIND, now_ns, event.step, None, message, data))]


def _event(finding: MemoryFinding, now_ns: int) -> wire.Event:
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
