"""
What Stormlog records of memory, as `Recording`s: its events, schema 2 to 4 and those without a version.

Two things are not taken over as they are written. On CUDA, ROCm and MPS `device_used_bytes` is the larger of
the allocator's own two numbers, not what the driver says: where it never differs from them it is left out,
since what lies outside of the allocator is then not known. On a CPU, allocated, reserved and used are all the
process's resident memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
import numpy as np

from traceml_ray.analysis.memory.recordings import (
    Floats,
    Recording,
    RefusedFileError,
    column,
)
from traceml_ray.identity import MAX_RANKS
from traceml_ray.importers.stormlog_marks import collectives, operation
from traceml_ray.wire.codec import Count

VERSIONS = (2, 3, 4)
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
_Device = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
_REPEAT = {"start", "stop", "phase_enter", "phase_exit", "collector_degraded", "collector_recovered", "error"}
"""Kinds of events that repeat the values of a sample before, or have none."""
_NO_METADATA = msgspec.Raw()
EARLIEST_WALL_NS = 10**17
"""In 1973. A smaller time is not one of the wall clock."""
_NO_JOB = {"", "none"}
"""Job ids that say nothing: torchrun's without a rendezvous id is "none"."""


class StormlogEvent(msgspec.Struct, gc=False):
    """An event of schema 2, 3 or 4: what is read of it."""

    timestamp_ns: Count
    event_type: str
    collector: str
    pid: int
    host: str
    device_id: _Device
    allocator_allocated_bytes: Count | None
    allocator_reserved_bytes: Count | None
    device_used_bytes: Count | None
    sampling_interval_ms: Count = 0
    allocator_active_bytes: Count | None = None
    allocator_inactive_bytes: Count | None = None
    device_total_bytes: Count | None = None
    session_id: str | None = None
    job_id: str | None = None
    rank: Rank = 0
    world_size: Size = 1
    context: str | None = None
    metadata: msgspec.Raw = _NO_METADATA
    """As it is in the file; of a CSV not read."""


class Legacy(msgspec.Struct, gc=False):
    """An event without a version, as older exports and dumps after an OOM have them."""

    memory_allocated: Count | None
    timestamp: Annotated[float, msgspec.Meta(ge=0, lt=9e9)]
    """Seconds since the epoch."""
    event_type: str = "sample"
    memory_reserved: Count | None = None
    active_memory: Count | None = None
    inactive_memory: Count | None = None
    device_used: Count | None = None
    device_total: Count | None = None
    total_memory: Count | None = None
    device_id: _Device | None = None
    backend: str | None = None
    host: str | None = None
    pid: int | None = None
    session_id: str | None = None
    job_id: str | None = None
    rank: Rank = 0
    world_size: Size = 1
    context: str | None = None
    metadata: msgspec.Raw = _NO_METADATA

    def event(self) -> StormlogEvent:
        """Return it as an event of the newest schema."""
        total = self.total_memory if self.device_total is None else self.device_total
        on_cpu = self.backend == "cpu"
        return StormlogEvent(
            timestamp_ns=round(self.timestamp * 1e9),
            event_type=self.event_type,
            collector=f"legacy.{self.backend or 'unknown'}",
            pid=-1 if self.pid is None else self.pid,
            host=self.host or "unknown",
            device_id=-1 if on_cpu else self.device_id or 0,
            allocator_allocated_bytes=self.memory_allocated,
            allocator_reserved_bytes=self.memory_reserved,
            device_used_bytes=self.device_used,
            allocator_active_bytes=self.active_memory,
            allocator_inactive_bytes=self.inactive_memory,
            device_total_bytes=total,
            session_id=self.session_id,
            job_id=self.job_id,
            rank=self.rank,
            world_size=self.world_size,
            context=self.context,
            metadata=self.metadata,
        )


def recordings(events: Iterable[StormlogEvent]) -> list[Recording]:
    """
    Return the events of one file by process, rank and device. Raises `RefusedFileError` for a rank beyond the
    world size.
    """
    events_of_key: dict[tuple[object, ...], list[StormlogEvent]] = {}
    for event in events:
        key = (event.session_id, event.host, event.pid, event.rank, max(event.device_id, -1))
        events_of_key.setdefault(key, []).append(event)
    return [_recording(of_key) for of_key in events_of_key.values()]


def node(host: str | None) -> str:
    """Return the node's name; "" where it is not known."""
    return "" if host in (None, "unknown") else str(host)


def job(given: str | None) -> str | None:
    """Return the job's id where it says anything."""
    return None if given is None or given.lower() in _NO_JOB else given


def measured(columns: dict[str, Floats]) -> dict[str, Floats]:
    """
    Return the columns of a device in which anything is known, without a `device_used_bytes` that only repeats
    the allocator's numbers.
    """
    used = columns.get("device_used_bytes")
    if used is not None:
        largest = np.fmax(columns["allocated_bytes"], columns.get("reserved_bytes", np.nan))
        if (used == largest)[np.isfinite(used)].all():
            columns = {name: values for name, values in columns.items() if name != "device_used_bytes"}
    return {name: values for name, values in columns.items() if np.isfinite(values).any()}


def _recording(of_process: list[StormlogEvent]) -> Recording:
    """Return the events of one process and device as a recording."""
    first = of_process[0]
    if first.rank >= first.world_size:
        raise RefusedFileError(f"rank {first.rank} of a world of {first.world_size}")
    marks, of_process = _marks(of_process), _samples(of_process)
    on_cpu = first.device_id < 0 or "cpu" in first.collector.lower()
    named = first.world_size > 1
    return Recording(
        process=f"{first.session_id or ''}/{first.host}/{first.pid}",
        node=node(first.host),
        device=None if on_cpu else first.device_id,
        t_ns=np.array([event.timestamp_ns for event in of_process], np.int64),
        columns=_host(of_process) if on_cpu else _device(of_process),
        # One process of a world of one is also what Stormlog writes where it knows of no ranks.
        rank=first.rank if named else None,
        world_size=first.world_size if named else None,
        run=job(first.job_id),
        wall=first.timestamp_ns >= EARLIEST_WALL_NS,
        collectives=collectives(marks),
    )


def _marks(events: list[StormlogEvent]) -> list[tuple[StormlogEvent, str]]:
    """Return the events that mark a collective, in order of time, and which one."""
    marked = [(event, name) for event in events if (name := operation(event)) is not None]
    return sorted(marked, key=lambda mark: mark[0].timestamp_ns)


def _samples(of_process: list[StormlogEvent]) -> list[StormlogEvent]:
    """
    Return what was measured, in order of time: not what is repeated, no marks of collectives, and of several
    events about one sample (its peak, its change) the last.
    """
    kept = [
        event for event in of_process if event.event_type not in _REPEAT and not _only_marks(event)
    ] or of_process
    kept.sort(key=lambda event: event.timestamp_ns)
    apart = kept[0].sampling_interval_ms * 1_000_000 // 4
    after = [*kept[1:], None]
    return [
        event
        for event, later in zip(kept, after, strict=True)
        if later is None or later.timestamp_ns - event.timestamp_ns > apart
    ]


def _only_marks(event: StormlogEvent) -> bool:
    return event.event_type != "sample" and operation(event) is not None


def _host(of_process: Sequence[StormlogEvent]) -> dict[str, Floats]:
    return measured({"rss_bytes": column(event.allocator_allocated_bytes for event in of_process)})


def _device(of_process: Sequence[StormlogEvent]) -> dict[str, Floats]:
    values = {
        "allocated_bytes": (event.allocator_allocated_bytes for event in of_process),
        "reserved_bytes": (event.allocator_reserved_bytes for event in of_process),
        "active_bytes": (event.allocator_active_bytes for event in of_process),
        "inactive_split_bytes": (event.allocator_inactive_bytes for event in of_process),
        "device_used_bytes": (event.device_used_bytes for event in of_process),
        "device_total_bytes": (event.device_total_bytes for event in of_process),
    }
    return measured({name: column(of_events) for name, of_events in values.items()})
