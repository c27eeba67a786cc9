"""Own time and memory of each operation: without operations inside it, with its device work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from traceml_ray.traces.trace import ANNOTATIONS, Ints, Trace

UNCOUNTED = frozenset(
    {
        *("profiler::_record_function_enter", "profiler::_record_function_enter_new"),
        *("profiler::_record_function_exit", "aten::is_leaf", "aten::output_nr", "aten::_version"),
    }
)
"""Operations that torch's own table leaves out."""
_LAUNCHING = frozenset({"cpu_op", "user_annotation"})
"""Categories of what launches work on a device; the calls of its runtime have the same id."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Nesting:
    """Values of each operation of a trace, arrays of shape [n]; times in ns, memory in bytes."""

    counted: Mask
    """False for an operation that only repeats the one around it, or that torch's own table leaves out."""
    parent: Ints
    """Index of the nearest counted operation around it; -1: none."""
    launched: Mask
    """Whether a device's work was launched by an operation, and is counted as part of it."""
    host_ns: Ints
    """Time of the thread in the operation; 0 for work of a device."""
    self_host_ns: Ints
    """`host_ns` without the operations inside."""
    device_ns: Ints
    """Time of the device for the operation; for work of a device, its own length."""
    self_device_ns: Ints
    """`device_ns` without that of the operations inside."""
    memory: Ints
    """Bytes allocated and not freed in the operation, [n, 2]: of the host, of a device."""
    self_memory: Ints
    """`memory` without that of the operations inside."""
    outside: Ints
    """Bytes allocated outside of all operations, [2]: of the host, of a device."""
    outside_calls: int
    """Number of allocations outside of all operations."""


def nest(trace: Trace) -> Nesting:
    """Return the nesting of a trace's operations, and the own time and memory of each."""
    on_device = trace.on_device
    left_out = on_device | np.array([name in UNCOUNTED for name in trace.names], bool)[trace.name]
    parent, merged = _without_repeats(trace, _enclosing(trace, left_out))
    length = trace.end_ns - trace.begin_ns
    host = np.where(left_out | merged, 0, length)
    work, launched = _device_work(trace)
    work = np.where(on_device, length, _to_parent(work, parent, merged))
    allocated, outside, calls = _memory(trace, parent, left_out)
    allocated = _to_parent(allocated, parent, merged)
    return Nesting(
        counted=~(merged | (left_out & ~on_device)),
        parent=parent,
        launched=launched,
        host_ns=host,
        self_host_ns=host - _of_children(host, parent),
        device_ns=_with_inside(work, parent),
        self_device_ns=work,
        memory=_with_inside(allocated, parent),
        self_memory=allocated,
        outside=outside,
        outside_calls=calls,
    )


def _enclosing(trace: Trace, left_out: Mask) -> list[int]:
    """Return the index of the innermost operation around each, [n]; -1: none."""
    ends = trace.end_ns.tolist()
    parent, stack, lane = [-1] * len(trace), list[int](), -1
    columns = trace.lane.tolist(), trace.begin_ns.tolist(), ends, left_out.tolist()
    for event, (thread, begin, end, skip) in enumerate(zip(*columns, strict=True)):
        if skip:
            continue
        if thread != lane:
            lane, stack = thread, []
        while stack and (begin >= ends[stack[-1]] or end > ends[stack[-1]]):
            stack.pop()
        if stack:
            parent[event] = stack[-1]
        stack.append(event)
    return parent


def _without_repeats(trace: Trace, parent: list[int]) -> tuple[Ints, Mask]:
    """
    Return the parents, and which operations are only a step inside one of the same name: the one thing that
    is inside it. These two are one, as in torch's own table.
    """
    names, inside = trace.name.tolist(), [0] * len(parent)
    for outer in parent:
        if outer >= 0:
            inside[outer] += 1
    merged = [False] * len(parent)
    for event, outer in enumerate(parent):
        if outer < 0:
            continue
        if merged[outer]:
            outer = parent[event] = parent[outer]
        if names[outer] == names[event] and inside[outer] == 1:
            merged[event], inside[outer] = True, inside[event]
    return np.array(parent, np.int64), np.array(merged, bool)


def _device_work(trace: Trace) -> tuple[Ints, Mask]:
    """Return what a device did of what each operation launched by itself, ns, and what that was; [n] each."""
    device_ns, launched = np.zeros(len(trace), np.int64), np.zeros(len(trace), bool)
    named = trace.external >= 0
    work = np.flatnonzero(named & trace.on_device & ~trace.has_category(ANNOTATIONS))
    ours = np.flatnonzero(named & trace.has_category(_LAUNCHING) & ~trace.on_device)
    if len(work) and len(ours):
        ours = ours[np.argsort(trace.external[ours], kind="stable")]
        positions = np.searchsorted(trace.external[ours], trace.external[work])
        by = ours[np.minimum(positions, len(ours) - 1)]
        matched = trace.external[by] == trace.external[work]
        np.add.at(device_ns, by[matched], (trace.end_ns - trace.begin_ns)[work[matched]])
        launched[work[matched]] = True
    return device_ns, launched


def innermost(trace: Trace, parent: Ints, among: Mask, lane: Ints, t_ns: Ints) -> Ints:
    """
    Return which operation of a thread a time is in, the innermost; -1 for none, [m].

    Args:
        trace: n operations.
        parent: those they are inside of, [n].
        among: those that have been nested, [n].
        lane: threads, [m].
        t_ns: times, [m].
    """
    begun = _begun_last(trace, np.flatnonzero(among), lane, t_ns).tolist()
    lanes, ends, outer = trace.lane.tolist(), trace.end_ns.tolist(), parent.tolist()
    innermost_events = []
    for event, thread, at_ns in zip(begun, lane.tolist(), t_ns.tolist(), strict=True):
        while event >= 0 and lanes[event] == thread and ends[event] < at_ns:
            event = outer[event]
        innermost_events.append(event if event >= 0 and lanes[event] == thread else -1)
    return np.array(innermost_events, np.int64)


def _begun_last(trace: Trace, among: Ints, lane: Ints, t_ns: Ints) -> Ints:
    """Return which operation began last, on a thread or one before it; -1 for none, [m]."""
    events = np.full(len(t_ns), -1)
    if len(among) and len(t_ns):
        asking = np.r_[np.zeros(len(among), np.int64), np.ones(len(t_ns), np.int64)]
        times, lanes = np.r_[trace.begin_ns[among], t_ns], np.r_[trace.lane[among], lane]
        order = np.lexsort((asking, times, lanes))
        seen = np.maximum.accumulate(np.where(order < len(among), order, -1))
        asked = order >= len(among)
        last = seen[asked]
        events[order[asked] - len(among)] = np.where(last >= 0, among[np.maximum(last, 0)], -1)
    return events


def _memory(trace: Trace, parent: Ints, left_out: Mask) -> tuple[Ints, Ints, int]:
    """Return what each operation allocated by itself, [n, 2], and what none did, [2], in how many events."""
    memory, bytes_by_event, outside = trace.memory, np.zeros((len(trace), 2), np.int64), np.zeros(2, np.int64)
    events = innermost(trace, parent, ~left_out, memory.lane, memory.t_ns)
    device, inside = memory.on_device.astype(np.int64), events >= 0
    np.add.at(bytes_by_event, (events[inside], device[inside]), memory.nbytes[inside])
    np.add.at(outside, device[~inside], memory.nbytes[~inside])
    return bytes_by_event, outside, int((~inside).sum())


def _to_parent(values: Ints, parent: Ints, moved: Mask) -> Ints:
    """Return values with those of `moved` operations added to their parents, [n, ...]."""
    kept = values.copy()
    kept[moved] = 0
    np.add.at(kept, parent[moved], values[moved])
    return kept


def _of_children(values: Ints, parent: Ints) -> Ints:
    """Return the sums over what is directly inside each operation, [n]."""
    sums = np.zeros_like(values)
    np.add.at(sums, parent[parent >= 0], values[parent >= 0])
    return sums


def _with_inside(values: Ints, parent: Ints) -> Ints:
    """Return values with those of all operations inside each, [n, ...]."""
    sums = values.copy()
    for event in np.flatnonzero(parent >= 0)[::-1].tolist():  # what is inside an operation comes after it
        sums[parent[event]] += sums[event]
    return sums
