"""Curves of the memory of ranks over time: one for each rank and device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from traceml_ray.signals.memory.records import MemorySample

COUNTERS = {
    "allocated_bytes": "allocated by torch",
    "process_bytes": "on the device, by the driver",
    "rss_bytes": "resident (RSS)",
}
"""Title of the chart for each field of a memory sample."""
Curve = tuple[list[int], list[float]]
"""Times (ns since the epoch) and values (bytes)."""


def memory_curves(
    processes: Mapping[int, int], samples: Sequence[tuple[int, MemorySample]]
) -> dict[str, dict[str, Curve]]:
    """
    Return curves by field of a sample, then by rank and device ("rank 3, GPU 1"). A field that no sample has
    is left out.

    Args:
        processes: process number of each rank to draw, by rank.
        samples: pairs of process number and sample, in order of time.
    """
    ranks = {process: rank for rank, process in processes.items()}
    charts: dict[str, dict[str, Curve]] = {name: {} for name in COUNTERS}
    for process, sample in samples:
        device = "" if sample.device is None else f", GPU {sample.device}"
        for name, curves in charts.items():
            value = getattr(sample, name)
            if value is not None:
                times, values = curves.setdefault(f"rank {ranks[process]}{device}", ([], []))
                times.append(sample.t_ns)
                values.append(value)
    return {name: curves for name, curves in charts.items() if curves}
