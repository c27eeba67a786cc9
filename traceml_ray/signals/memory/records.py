"""What is sampled of the memory of a rank process and its devices."""

from __future__ import annotations

from traceml_ray.codec import Count, Int64, Part
from traceml_ray.signals.kind import Kind


class MemorySample(Part, frozen=True):
    """
    Memory of a rank's process and of one of its devices. `None` is "not known", never 0.

    A process without a CUDA device has one sample, with `device` None and nothing of an allocator.
    """

    t_ns: Int64
    """On the wall clock of the rank's node."""
    step: Count | None
    """The newest step that has begun."""
    device: Count | None
    """Index as the process sees it."""
    allocated_bytes: Count | None = None
    reserved_bytes: Count | None = None
    active_bytes: Count | None = None
    inactive_split_bytes: Count | None = None
    peak_bytes: Count | None = None
    """The most that was allocated since the sample before; of the first sample, until then."""
    retries: Count | None = None
    """Cumulative: allocations that succeeded after the cache was emptied,"""
    ooms: Count | None = None
    """and that failed."""
    process_bytes: Count | None = None
    """What the driver says this process has on the device."""
    device_used_bytes: Count | None = None
    device_total_bytes: Count | None = None
    rss_bytes: Count | None = None
    uss_bytes: Count | None = None
    """Not in every sample: the kernel takes long to count it."""
    limit_bytes: Count | None = None
    """Of host memory: the tightest limit of a cgroup, or what the machine has."""
    limit_used_bytes: Count | None = None
    """What is used of it, without the file cache that can be had back."""


MEMORY = Kind(
    "memory",
    MemorySample,
    "memory samples",
    table="memory_sample",
    exported="memory_samples",
    bundle="seconds",
)
