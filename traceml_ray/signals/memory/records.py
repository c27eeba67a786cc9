"""Samples of the memory of a rank process and its devices."""

from __future__ import annotations

from traceml_ray.signals.kind import Kind
from traceml_ray.wire.codec import Count, Int64, Part


class MemorySample(Part, frozen=True):
    """
    Memory of a rank's process and of one of its devices. `None` is "not known", never 0.

    A process without a CUDA device has one sample, with `device` None and nothing of an allocator.
    """

    t_ns: Int64
    """Time of the sample, in ns on the wall clock of the rank's node."""
    step: Count | None
    """The newest step that has begun."""
    device: Count | None
    """Index as the process sees it."""
    allocated_bytes: Count | None = None
    reserved_bytes: Count | None = None
    active_bytes: Count | None = None
    inactive_split_bytes: Count | None = None
    peak_bytes: Count | None = None
    """Largest memory allocated since the sample before, in bytes. In the first sample: since the start."""
    retries: Count | None = None
    """Allocations so far that succeeded after the cache was emptied."""
    ooms: Count | None = None
    """Allocations so far that failed."""
    process_bytes: Count | None = None
    """Memory of this process on the device according to the driver, in bytes."""
    device_used_bytes: Count | None = None
    device_total_bytes: Count | None = None
    rss_bytes: Count | None = None
    uss_bytes: Count | None = None
    """
    Memory that only this process uses, in bytes; not in every sample, because the kernel takes long to count
    it.
    """
    limit_bytes: Count | None = None
    """Limit of host memory, in bytes: that of the tightest cgroup, or the machine's memory."""
    limit_used_bytes: Count | None = None
    """Used part of `limit_bytes`, in bytes, without the file cache that can be reclaimed."""


MEMORY = Kind(
    "memory",
    MemorySample,
    "memory samples",
    table="memory_sample",
    exported="memory_samples",
    bundle="seconds",
)

SNAPSHOT = "memory_snapshot"
"""Kind of the event that announces a file with torch's record of allocations."""
SNAPSHOT_NAME = "allocator-"
"""First part of the name of such a file."""
SNAPSHOTS = "snapshots"
"""Folder of such files in that of a session, and a link to it in the spool."""
