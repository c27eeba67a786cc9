"""What is asked about memory. The shapes of what is found are in `signals.memory.shapes`."""

from __future__ import annotations

import msgspec

from traceml_ray.signals.memory.shapes import Memory
from traceml_ray.store.query import OfRun


class MemoryOfRank(msgspec.Struct, frozen=True):
    """Memory of a rank's newest process, in bytes; what is not known is None."""

    rss_peak_bytes: int | None = None
    rss_last_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    """The most that torch's allocator ever had allocated."""


class RunMemory(Memory, frozen=True, kw_only=True):
    """What can be said about the memory of a run, and how much its ranks have used."""

    per_rank: dict[int, MemoryOfRank] = {}
    """Peak and last memory of each rank's newest process; empty where it was not asked for."""


class GetMemory(OfRun[RunMemory], frozen=True):
    """
    What is found about the memory of the ranks of a run, as of now; with `peaks`, also what each has used:
    that takes a pass over all samples that are stored.
    """

    peaks: bool = True
