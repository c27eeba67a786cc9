"""
How fast the memory analysis is: a whole run after the fact.

    python benchmarks/memory.py [--ranks 512] [--samples 2000]

One rank leaks, another has a step in its hidden gap; the others take and give back gigabytes in each step.
Prints the CPU time, the highest memory of the process above what it had with its arrays, and what was found.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import numpy as np
from figures import Figure, machine, table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from memory_series import GIB, MIB, on_device

from traceml_ray.analysis.memory.judge import judge
from traceml_ray.analysis.memory.shapes import Memory, Series

LEAKS, STEPS = 77, 13
"""The ranks with something to find, where there are so many."""


def series(rank: int, n: int) -> Series:
    """Return what a rank of a node of eight sends in n seconds."""
    rng = np.random.default_rng(rank)
    allocated = 20 * GIB + rng.uniform(0, 10 * GIB, n)
    gap = 800 * MIB + rng.normal(0, 3 * MIB, n)
    if rank == LEAKS:
        allocated += 5 * MIB * np.arange(n)
    if rank == STEPS:
        gap += 2 * GIB * (np.arange(n) > n / 3)
    rss = 3 * GIB + rng.normal(0, 20 * MIB, n)
    host = {"rss_bytes": rss, "limit_bytes": np.full(n, 2048.0 * GIB), "limit_used_bytes": 8 * rss}
    more = {"inactive_split_bytes": np.full(n, 100.0 * MIB), "peak_bytes": np.full(n, 31.0 * GIB), **host}
    return on_device(rank, allocated, gap=gap, held=42 * GIB, node=f"node-{rank // 8}", **more)


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def offline(ranks: int, samples: int) -> list[Figure]:
    """Judge a whole run."""
    all_of = [series(rank, samples) for rank in range(ranks)]
    before = _peak_mb()
    cpu = time.process_time()
    memory = judge(all_of, expected=ranks)
    used = time.process_time() - cpu
    size = f"{ranks:,} ranks × {samples:,} samples"
    return [
        Figure("offline", size, f"{used:.2f} s", "< 2 s"),
        Figure("offline", "peak memory, with the arrays", f"{_peak_mb():.0f} MB", "< 500 MB"),
        Figure("offline", "added to that by the analysis", f"{_peak_mb() - before:.0f} MB"),
        Figure("offline", "found", _found(memory)),
    ]


def _found(memory: Memory) -> str:
    named = [f"{finding.kind} rank {finding.rank}" for finding in memory.findings]
    cause = memory.first_cause
    return ", ".join([f"first cause rank {cause.rank}" if cause else "no first cause", *named])


def main() -> None:
    """Measure, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    print(machine() + "\n")
    print(table(offline(args.ranks, args.samples), args.markdown))


if __name__ == "__main__":
    main()
