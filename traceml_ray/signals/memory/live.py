"""
Judges the memory of the ranks of live runs: a few ranks at a time, from the newest samples of each.

A finding becomes an event once, after it has been found twice in a row. Growth must also have been found for
some time, because a run is judged many times and noise sometimes looks like growth. Growth that is too even
to be noise becomes an event immediately.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from traceml_ray import text
from traceml_ray.signals.live import LiveSignal, Ranks
from traceml_ray.signals.memory.findings import RankFindings, rank_findings
from traceml_ray.signals.memory.judge import compare
from traceml_ray.signals.memory.limits import MEMORY
from traceml_ray.signals.memory.records import MEMORY as MEMORY_SAMPLES
from traceml_ray.signals.memory.records import MemorySample
from traceml_ray.signals.memory.sentences import GROWTH
from traceml_ray.signals.memory.shapes import (
    NO_STEP,
    Collective,
    FirstCause,
    Float,
    Int64,
    Memory,
    MemoryFinding,
    Series,
    Value,
)
from traceml_ray.signals.memory.view import GetMemory, is_collective, when
from traceml_ray.store.results import EventRow
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

KIND = "memory"
_Key = tuple[Value, ...]
"""Kind, rank, and whatever else distinguishes findings."""
_EACH = 8
"""If more ranks than this have the same finding, it becomes one event."""
_ORDER = ("info", "warning", "critical")


class MemoryEvents:
    """The memory events of one run."""

    def __init__(self) -> None:
        self._seen: dict[_Key, int] = {}
        """
        Findings of the round before: for each, the time up to which memory was known when it was first found
        without interruption.
        """
        self._reported: dict[_Key, int] = {}
        """Severity of each reported finding."""

    def resume(self, data: Mapping[str, codec.Value]) -> None:
        """Load the data of a stored event of this run: the event is not sent again."""
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
        """Return the result without growth that may be noise, that is, growth without an event so far."""
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
        """Return whether there has been an event about the memory of a rank."""
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
    data: dict[str, codec.Value] = {
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
    data: dict[str, codec.Value] = {
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


FIELDS = (
    *("allocated_bytes", "reserved_bytes", "inactive_split_bytes", "peak_bytes", "retries", "process_bytes"),
    *("device_used_bytes", "device_total_bytes", "rss_bytes", "uss_bytes", "limit_bytes", "limit_used_bytes"),
)
"""Fields of a sample that are judged."""
SIZE = 512
"""
Largest number of samples per place: the newest half as received, the others evenly spread over the time
before.
"""
_FIRST_SIZE = 32
_RARE = "uss_bytes"
"""Not in every sample. When samples are dropped, the newest value is kept with the sample before them."""
_PEAK = "peak_bytes"
"""
Largest value since the sample before. When samples are dropped, the largest value is kept with the sample
before them.
"""


class SampleBuffer:
    """
    Samples of one rank process on one device, in order of time.

    If there is no room, only each `every`-th sample of those older than the newest half is kept. If these
    take more than a quarter, `every` doubles.
    """

    def __init__(self, size: int = SIZE) -> None:
        self.taken = 0
        """Number of samples received."""
        self._size = size
        self._every = 1
        self._old = self._n = 0
        """Of `n` samples the first `old` are thinned out."""
        self._number: Int64 = np.empty(_FIRST_SIZE, np.int64)
        self._t_ns: Int64 = np.empty(_FIRST_SIZE, np.int64)
        self._step: Int64 = np.empty(_FIRST_SIZE, np.int64)
        self._columns: dict[str, Float] = {}

    @classmethod
    def from_arrays(
        cls, t_ns: Int64, step: Int64, columns: Mapping[str, Float], size: int = SIZE
    ) -> SampleBuffer:
        """Return the buffer that results from these samples, except for the peaks of dropped samples."""
        kept, n = cls(size), len(t_ns)
        if not n:
            return kept
        while max(n - size // 2, 0) > size // 4 * kept._every:
            kept._every *= 2
        older = np.arange(0, max(n - size // 2, 0), kept._every)
        chosen = np.concatenate([older, np.arange(max(n - size // 2, 0), n)])
        kept._number, kept._t_ns, kept._step = chosen, t_ns[chosen], step[chosen]
        kept._columns = {name: columns[name][chosen] for name in FIELDS if name in columns}
        kept._old = len(older) if kept._every > 1 else 0
        kept._n, kept.taken = len(chosen), n
        return kept

    def add(self, sample: MemorySample) -> None:
        """Add a sample."""
        if self._n == len(self._t_ns):
            self._make_room()
        index = self._n
        self._number[index] = self.taken
        self._t_ns[index] = sample.t_ns
        self._step[index] = NO_STEP if sample.step is None else sample.step
        for name in FIELDS:
            value = getattr(sample, name)
            column = self._columns.get(name)
            if column is not None:
                column[index] = np.nan if value is None else value
            elif value is not None:
                column = self._columns[name] = np.full(len(self._t_ns), np.nan)
                column[index] = value
        self._n += 1
        self.taken += 1

    @property
    def nbytes(self) -> int:
        """Return the size of the samples in bytes."""
        return sum(
            column.nbytes for column in (self._number, self._t_ns, self._step, *self._columns.values())
        )

    def arrays(self) -> tuple[Int64, Int64, dict[str, Float]]:
        """Return copies of the times, the steps and what was measured, see `shapes.Series`."""
        n = self._n
        columns = {name: column[:n].copy() for name, column in self._columns.items()}
        return self._t_ns[:n].copy(), self._step[:n].copy(), columns

    def _make_room(self) -> None:
        n = self._n
        if n < self._size:
            more = min(n, self._size - n)
            self._number, self._t_ns, self._step = (
                _longer(column, more, NO_STEP) for column in (self._number, self._t_ns, self._step)
            )
            self._columns = {name: _longer(column, more, np.nan) for name, column in self._columns.items()}
            return
        if self._every == 1 or self._old > self._size // 4:
            self._every *= 2
            self._old = self._thin(0, self._old)
        self._old = self._thin(self._old, self._n - self._size // 2)

    def _thin(self, first: int, end: int) -> int:
        """Keep those samples from `first` to `end` that thinning selects. Return their new end."""
        kept = first + np.flatnonzero(self._number[first:end] % self._every == 0)
        done, rest = first + len(kept), self._n - end
        columns: dict[str, Any] = {"number": self._number, "t_ns": self._t_ns, "step": self._step}
        for name, column in (*columns.items(), *self._columns.items()):
            values = column[kept]
            if len(kept) and name == _PEAK:
                values = np.fmax.reduceat(column[:end], kept)
            elif len(kept) and name == _RARE:
                parts = np.split(column[kept[0] : end], kept[1:] - kept[0])
                values = np.array([_newest(part) for part in parts])
            column[first:done] = values
            column[done : done + rest] = column[end : end + rest].copy()
        self._n = done + rest
        return done


def _longer(column: Any, more: int, fill: float) -> Any:
    return np.concatenate([column, np.full(more, fill, column.dtype)])


def _newest(values: Float) -> float:
    known = values[~np.isnan(values)]
    return float(known[-1]) if len(known) else float("nan")


SHARE = 0.035
"""Largest share of a CPU core for judging memory."""
SLICE_S = 0.05
"""CPU time of one round of judging, in s. The last rank of a round may exceed it."""
MAX_PLACES = 8192
"""Largest number of rank processes and devices whose samples are kept. Beyond it the oldest are dropped."""
MAX_RESUMED = 200_000
"""Largest number of memory samples of a run that are read after a restart."""
MAX_FRESH = 32
"""Up to this many ranks with new samples, a question is answered by judging them immediately."""
Place = tuple[int, int | None]
"""(id of a rank process, its device)."""


@dataclass
class _Use:
    """The collectives of one name and group of a rank process, from its first step to its last."""

    first: int
    last: int
    count: int
    bytes: int | None


@dataclass
class _Run:
    """State of the judging of one run."""

    judged: dict[Place, list[RankFindings]] = field(default_factory=dict)
    n_judged: dict[Place, int] = field(default_factory=dict)
    """Number of samples judged, by place."""
    queue: deque[Place] = field(default_factory=deque)
    """Places still to be judged in the current round."""
    memory: Memory | None = None
    """Result of the last completed round."""
    rounds: int = 0


class LiveMemory(LiveSignal):
    """
    See `LiveSignal`: `add` and `add_spans` are called with the writer's lock. Any thread may call the rest.

    Args:
        lock: the writer's lock.
        clock: monotonic seconds.
        busy: returns the CPU seconds of the judging thread.
    """

    name = "memory"
    question = GetMemory
    kind = MEMORY_SAMPLES

    def __init__(
        self,
        lock: threading.Lock,
        clock: Callable[[], float] = time.monotonic,
        busy: Callable[[], float] = time.thread_time,
    ) -> None:
        self._writers, self._clock, self._busy = lock, clock, busy
        self._lock = threading.RLock()
        self._kept: dict[Place, SampleBuffer] = {}
        self._of_process: dict[int, list[Place]] = {}
        self._spans: dict[int, dict[tuple[str, str | None], _Use]] = {}
        self._runs: dict[str, _Run] = {}
        self._events: dict[str, MemoryEvents] = {}
        self._due = 0.0

    def add(self, process: int, sample: MemorySample) -> None:
        """Add a sample of a rank process."""
        place = process, sample.device
        kept = self._kept.get(place)
        if kept is None:
            while len(self._kept) >= MAX_PLACES:
                self._forget(next(iter(self._kept))[0])
            kept = self._kept[place] = SampleBuffer()
            self._of_process.setdefault(process, []).append(place)
        kept.add(sample)

    def resume(
        self, run: str, file: SessionFile, processes: Collection[int], events: Iterable[EventRow]
    ) -> None:
        """Load the stored samples of a run, before any other, and the findings that were events."""
        reported = self._events.setdefault(run, MemoryEvents())
        for event in events:
            if event.kind == KIND:
                reported.resume(event.data)
        for columns in file.memory_samples(processes, most=MAX_RESUMED)[0]:
            if len(self._kept) < MAX_PLACES:
                place = columns.process, columns.device
                self._kept[place] = SampleBuffer.from_arrays(columns.t_ns, columns.step, columns.columns)
                self._of_process.setdefault(columns.process, []).append(place)

    def add_spans(self, process: int, spans: Sequence[wire.SpanSum]) -> None:
        """Add those spans of a rank process that are collectives, if its samples are kept."""
        if process in self._of_process:
            for span in spans:
                if is_collective(span.name):
                    self._add_use(process, span)

    def _add_use(self, process: int, span: wire.SpanSum) -> None:
        known = self._spans.setdefault(process, {})
        key = span.name, span.process_group
        use = known.get(key)
        if use is None:
            known[key] = _Use(span.first_step, span.last_step, span.count, span.bytes)
            return
        use.first, use.last = min(use.first, span.first_step), max(use.last, span.last_step)
        use.count += span.count
        use.bytes = span.bytes if use.bytes is None else use.bytes + (span.bytes or 0)

    @property
    def nbytes(self) -> int:
        """Return the size of the samples in bytes."""
        return sum(kept.nbytes for kept in self._kept.values())

    def judge(self, runs: Mapping[str, Ranks]) -> list[str]:
        """
        Judge as many ranks as time allows. Return the runs whose ranks have all been judged again.

        Args:
            runs: the live runs. All others are forgotten.
        """
        with self._lock:
            self._keep(runs)
            if self._clock() < self._due:
                return []
            began, finished = self._busy(), []
            for run, ranks in runs.items():
                state = self._runs.setdefault(run, _Run())
                if not state.queue:
                    state.queue.extend(self._changed(state, ranks))
                    if not state.queue:
                        continue
                while state.queue and self._busy() - began < SLICE_S:
                    self._judge(state, ranks, state.queue.popleft())
                if not state.queue:
                    self._compare(state, ranks)
                    finished.append(run)
            self._due = self._clock() + (self._busy() - began) / SHARE
            return finished

    def events(self, run: str, now_ns: int) -> list[tuple[int, wire.Event]]:
        """Return the events of the last result for a run, each with its rank."""
        memory = self.latest(run)
        return self._events.setdefault(run, MemoryEvents()).of(memory, now_ns) if memory is not None else []

    def latest(self, run: str) -> Memory | None:
        """Return the last result. None before the first one."""
        state = self._runs.get(run)
        return state.memory if state is not None else None

    def worst(self, run: str) -> Memory | None:
        """Return only the most severe lasting finding. None if there is none."""
        memory, events = self.latest(run), self._events.get(run)
        findings = events.lasting(memory).findings[:1] if memory is not None and events is not None else []
        return Memory(findings=findings) if findings else None

    def fresh(self, run: str, ranks: Ranks) -> Memory | None:
        """Return the current result if few ranks have new samples; otherwise the same as `latest`."""
        with self._lock:
            state = self._runs.setdefault(run, _Run())
            changed = self._changed(state, ranks)
            if len(changed) > MAX_FRESH or (not changed and state.memory is not None):
                return state.memory
            for place in changed:
                self._judge(state, ranks, place)
            state.queue.clear()
            return self._compare(state, ranks)

    def _keep(self, runs: Mapping[str, Ranks]) -> None:
        for run in self._runs.keys() - runs.keys():
            del self._runs[run]
        for run in self._events.keys() - runs.keys():
            del self._events[run]

    def _collectives(self, ranks: Ranks) -> list[Collective]:
        """
        Return which collectives the ranks were in, and when. Times are estimated from the steps of the
        samples.
        """
        collectives = []
        for process, rank_process in ranks.processes.items():
            with self._writers:
                uses = list(self._spans.get(process, {}).items())
                places = self._of_process.get(process, ())
                arrays = [self._kept[place].arrays()[:2] for place in places[:1] if uses]
            if rank_process.rank is None or not any((step >= 0).any() for _, step in arrays):
                continue
            [(t_ns, step)], (offset_ns, _) = arrays, ranks.clock(rank_process)
            for (name, group), use in uses:
                first, last = when(t_ns + offset_ns, step, use.first, use.last + 1)
                collectives.append(
                    Collective(rank_process.rank, name, group, first, last, use.count, use.bytes)
                )
        return collectives

    def _forget(self, process: int) -> None:
        self._spans.pop(process, None)
        for place in self._of_process.pop(process, ()):
            self._kept.pop(place, None)

    def _changed(self, state: _Run, ranks: Ranks) -> list[Place]:
        """Return the places of a run with samples that have not been judged."""
        with self._writers:
            places = [place for process in ranks.processes for place in self._of_process.get(process, ())]
            return [place for place in places if self._kept[place].taken != state.n_judged.get(place)]

    def _judge(self, state: _Run, ranks: Ranks, place: Place) -> None:
        process, device = place
        with self._writers:
            rank_process, kept = ranks.processes.get(process), self._kept.get(place)
            if rank_process is None or rank_process.rank is None or kept is None:
                return
            taken, (t_ns, step, columns) = kept.taken, kept.arrays()
        offset_ns, bound_ns = ranks.clock(rank_process)
        series = Series(
            rank=rank_process.rank,
            node=ranks.labels.get(process, ""),
            process=rank_process.process_id,
            device=device,
            t_ns=t_ns + offset_ns,
            step=step,
            columns=columns,
            bound_ns=bound_ns,
        )
        state.n_judged[place] = taken
        state.judged[place] = rank_findings(series, MEMORY)

    def _compare(self, state: _Run, ranks: Ranks) -> Memory:
        state.judged = {
            place: series_judged
            for place, series_judged in state.judged.items()
            if place[0] in ranks.processes
        }
        judged = [series_judged for one in state.judged.values() for series_judged in one]
        uses = self._collectives(ranks) if any(series_judged.hidden for series_judged in judged) else []
        state.memory = compare(judged, uses, expected=ranks.world)
        state.rounds += 1
        return state.memory
