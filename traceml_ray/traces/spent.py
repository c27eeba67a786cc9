"""Time of a rank in a step, operation by operation, and how much of it is waiting."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from traceml_ray.traces import interval_sets as sets
from traceml_ray.traces.collectives import exchanges, is_collective
from traceml_ray.traces.key_averages import Kind, kind_of
from traceml_ray.traces.nesting import Mask, Nesting, innermost, nest
from traceml_ray.traces.sources import Source
from traceml_ray.traces.step_rows import intervals
from traceml_ray.traces.trace import Ints, Trace, read_trace

OUTSIDE = "(outside of operations)"
Key = tuple[str, Kind | Literal["outside"]]
_SYNCHRONISES = "Synchronize"
"""In the names of the calls of CUDA's runtime in which a thread waits for its device."""
_STEP = "ProfilerStep#"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+(?=>)")
"""Address of an object in the name of a Python function; it differs from process to process."""


class RecordingError(ValueError):
    """The requested step or stage was not recorded; the message says what was."""


@dataclass
class Spent:
    """Time that one rank spends in a step, or in one stage of it."""

    steps: int
    """Number of completely recorded steps; 0: the trace has no steps, all numbers cover the whole trace."""
    step_ns: float
    """Mean length of a step, in ns."""
    waiting_ns: float = 0.0
    """Part of `step_ns` in which a thread waits for other ranks or for its device."""
    device: bool = False
    """Whether work of a device was recorded."""
    operations: dict[Key, tuple[float, float, float]] = field(default_factory=dict)
    """
    Calls, thread time (ns) and device time (ns) of each operation in a step, without the operations inside.
    Of a collective in a thread of its own, only the time in which the rank does nothing but wait for it.
    """
    waits: set[Key] = field(default_factory=set)
    """Operations in which the rank waits."""

    def of(self, key: Key) -> tuple[float, float, float]:
        """Return (calls, thread ns, device ns) of one operation in a step."""
        return self.operations.get(key, (0.0, 0.0, 0.0))


def spent(source: Source, stage: str | None = None) -> Spent:
    """
    Return the time of a rank in a step, or in `stage` of it.

    Raises:
        RecordingError: no whole step, or stage, was recorded.
        TraceError: the trace cannot be read.
    """
    trace = read_trace(source.path, source.window)
    return spent_in(source, trace, nest(trace), stage)


def spent_in(source: Source, trace: Trace, nesting: Nesting, stage: str | None = None) -> Spent:
    """Return the time of a rank as `spent` does, from a trace that has been read. Raises RecordingError."""
    windows, steps = _windows(source, trace, stage)
    spent = Spent(steps, sets.length(windows) / max(steps, 1), device=bool(trace.on_device.any()))
    reading = _Reading(trace, nesting, windows)
    reading.fill(spent)
    return spent


def _windows(source: Source, trace: Trace, stage: str | None) -> tuple[Ints, int]:
    """Return the time that is looked at, and how many steps, or stages, are whole in it."""
    if stage is not None:
        first_ns = min((step.begin_ns for step in source.steps), default=0)
        stage_intervals = [
            interval
            for interval in intervals(source.steps)
            if interval.stage == stage and interval.begin_ns >= first_ns
        ]
        if not stage_intervals:
            raise RecordingError(
                f"no whole `{stage}` of {source.label} was recorded: it needs the rows of these steps, and "
                "more than one step where it begins before the step does"
            )
        bounds = [(interval.begin_ns, interval.end_ns) for interval in stage_intervals]
    elif source.steps:
        bounds = [(step.begin_ns, step.end_ns) for step in source.steps]
    else:
        number = {index for index, name in enumerate(trace.names) if name.startswith(_STEP)}
        places = np.flatnonzero(np.isin(trace.name, [*number]) & ~trace.on_device)
        bounds = np.stack([trace.begin_ns[places], trace.end_ns[places]], axis=1).tolist()
    if bounds:
        windows = np.array(bounds, np.int64)
        return sets.union(windows[:, 0], windows[:, 1]), len(bounds)
    if not len(trace):
        raise RecordingError(f"nothing was recorded of {source.label}")
    return np.array([[trace.begin_ns.min(), trace.end_ns.max()]]), 0


class _Reading:
    """The part of a trace inside some windows of time."""

    def __init__(self, trace: Trace, nesting: Nesting, windows: Ints) -> None:
        self._trace, self._nesting, self._windows = trace, nesting, windows
        categories = len(trace.categories)
        self._pairs, self._pair = np.unique(trace.name * categories + trace.category, return_inverse=True)
        self._keys: list[Key] = []
        waits, work = [], []
        for name, category in zip(*(part.tolist() for part in divmod(self._pairs, categories)), strict=True):
            key = _ADDRESS.sub("", trace.names[name]), kind_of(trace.categories[category])
            self._keys.append(key)
            waits.append(_waits(key[0], trace.categories[category]))
            work.append(key[1] in ("operation", "runtime"))
        self._waits, self._work = np.array(waits, bool), np.array(work, bool)
        host = ~trace.on_device
        exchanging = np.array([bool(exchanges(name)) for name in trace.names], bool)[trace.name] & host
        aside = np.isin(trace.lane, trace.lane[exchanging])
        self._exchanging = exchanging
        """Collectives in threads that do nothing else, shape [n]."""
        self._in_flight = sets.union(trace.begin_ns[exchanging], trace.end_ns[exchanging])
        """Times at which any such collective is in flight."""
        self._host = host & ~aside
        """Operations of the threads that train, shape [n]."""

    def fill(self, spent: Spent) -> None:
        """Add up what is spent, by operation."""
        trace, nesting = self._trace, self._nesting
        steps = np.array([name.startswith(_STEP) for name in trace.names], bool)[trace.name]
        inside = nesting.counted & ~nesting.launched & ~steps & sets.inside(trace.begin_ns, self._windows)
        waited, moved = self._waited()
        self_ns = nesting.self_host_ns.copy()
        self_ns[self._exchanging] = self._waited_for(waited)
        inside |= self._exchanging & (self_ns > 0)
        np.subtract.at(self_ns, moved[moved >= 0], (waited[:, 1] - waited[:, 0])[moved >= 0])
        sums = np.zeros((len(self._keys), 3))
        columns = np.stack([np.ones(len(trace)), np.maximum(self_ns, 0), nesting.self_device_ns], axis=1)
        np.add.at(sums, self._pair[inside], columns[inside])
        waiting = self._waits[self._pair] & inside
        host_ns = sets.length(waited) + int(self_ns[waiting & self._host].sum())
        device_ns = int(nesting.self_device_ns[waiting].sum())
        n_steps = max(spent.steps, 1)
        spent.waiting_ns = max(host_ns, device_ns) / n_steps
        for key, values, wait in zip(self._keys, sums.tolist(), self._waits.tolist(), strict=True):
            if values[0]:
                calls, host, device = (value / n_steps for value in values)
                before = spent.of(key)
                spent.operations[key] = before[0] + calls, before[1] + host, before[2] + device
                spent.waits |= {key} if wait else set()
        outside = self._outside(waited[moved < 0]) / n_steps
        spent.operations[OUTSIDE, "outside"] = (0.0, outside, 0.0)

    def _time_of(self, mask: Mask) -> Ints:
        return sets.union(self._trace.begin_ns[mask], self._trace.end_ns[mask])

    def _waited(self) -> tuple[Ints, Ints]:
        """
        Return when no operation runs while a collective is in flight: a thread waits for it. And in which
        range or function that is, [k]; -1: in none.
        """
        trace = self._trace
        working = self._time_of(self._host & self._work[self._pair])
        waited = sets.both(sets.without(self._windows, working), self._in_flight)
        middle = waited.mean(axis=1).astype(np.int64) if len(waited) else np.empty(0, np.int64)
        among = self._host & self._nesting.counted
        lane = np.full(len(waited), self._training_lane())
        return waited, innermost(trace, self._nesting.parent, among, lane, middle)

    def _waited_for(self, waited: Ints) -> Ints:
        """
        Return how much of the `waited` time belongs to each collective in flight, [n]: of several at a time
        to the one that began first, so that all of them together are the time that was waited.
        """
        begin_ns = self._trace.begin_ns[self._exchanging]
        end_ns = self._trace.end_ns[self._exchanging]
        order = np.argsort(begin_ns, kind="stable")
        begin_ns, end_ns = begin_ns[order], end_ns[order]
        covered_ns = np.r_[0, np.maximum.accumulate(end_ns)[:-1]] if len(end_ns) else end_ns
        first_ns = np.clip(covered_ns, begin_ns, np.maximum(begin_ns, end_ns))
        waited_ns = np.empty(len(order), np.int64)
        waited_ns[order] = sets.before(end_ns, waited) - sets.before(first_ns, waited)
        return waited_ns

    def _training_lane(self) -> int:
        lanes = self._trace.lane[self._host]
        return int(np.bincount(lanes).argmax()) if len(lanes) else -1

    def _outside(self, waited: Ints) -> int:
        """Return for how long nothing that has a name runs, and no rank is waited for."""
        named = np.array([not name.startswith(_STEP) for name in self._trace.names], bool)[self._trace.name]
        running = self._time_of(self._host & named)
        return sets.length(sets.without(sets.without(self._windows, running), waited))


def _waits(name: str, category: str) -> bool:
    """Return whether the time of an operation may be a wait for other ranks, or for a device."""
    return is_collective(name, category) or (kind_of(category) == "runtime" and _SYNCHRONISES in name)
