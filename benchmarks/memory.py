"""
How fast the memory analysis is: for a whole stored run, and for a live run.

    python benchmarks/memory.py [--ranks 512] [--samples 2000] [--live 1024] [--seconds 180]
    python benchmarks/memory.py --families 400

One rank leaks, and another has a step in its hidden gap. The others allocate and free gigabytes in each step.
Prints CPU time, peak memory of the process and the findings. In the live case each rank sends a sample a
second, after half an hour of samples. Only the aggregator's work is measured; time itself is simulated.
`--families N` instead counts how often families of series with a known truth are judged right, over N seeds.
"""

from __future__ import annotations

import argparse
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from figures import Figure, machine, publish, publish_figures, table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from memory_families import FAMILIES, outcomes
from memory_series import GIB, MIB, on_device

from traceml_ray.identity import RankIdentity
from traceml_ray.signals.live import Ranks
from traceml_ray.signals.memory.judge import judge
from traceml_ray.signals.memory.live import FIELDS, LiveMemory
from traceml_ray.signals.memory.records import MemorySample
from traceml_ray.signals.memory.shapes import Memory, Series
from traceml_ray.store.rank_processes import RankProcess

_BEFORE_S = 1800
"""Seconds of samples that a run has before it is judged."""
LEAKS, STEPS = 77, 13
"""The ranks with something to find, if there are that many ranks."""


def series(rank: int, n: int) -> Series:
    """Return what a rank on a node of eight ranks sends in `n` seconds."""
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


def live(ranks: int, seconds: int) -> list[Figure]:
    """Judge a live run, for `seconds` simulated seconds."""
    now = 0.0
    memory = LiveMemory(threading.Lock(), lambda: now)
    source = {rank: _samples(rank, _BEFORE_S + seconds) for rank in (0, LEAKS)}
    who = Ranks({rank: _process(rank, ranks) for rank in range(ranks)}, {}, ranks)
    for second in range(_BEFORE_S):
        for rank in range(ranks):
            memory.add(rank, source.get(rank, source[0])[second])
    kept, judged, rounds, ended = 0.0, 0.0, 0, 0.0
    for second in range(_BEFORE_S, _BEFORE_S + seconds):
        now, cpu = float(second), time.thread_time()
        for rank in range(ranks):
            memory.add(rank, source.get(rank, source[0])[second])
        kept, cpu = kept + time.thread_time() - cpu, time.thread_time()
        for tenth in range(10):
            now = second + tenth / 10
            if memory.judge({"run": who}):
                rounds, ended = rounds + 1, now - _BEFORE_S
        judged += time.thread_time() - cpu
    answer = memory.latest("run")
    interval = f"{ended / rounds:.0f} s" if rounds else f"more than {seconds} s"
    return [
        Figure("live", f"judging {ranks:,} ranks", f"{100 * judged / seconds:.1f} % of a core", "< 5 %"),
        Figure("live", "keeping their samples", f"{100 * kept / seconds:.1f} % of a core"),
        Figure("live", "each rank is judged every", interval),
        Figure("live", "memory of their samples", f"{memory.nbytes / 1e6:.0f} MB"),
        Figure("live", "found", _found(answer) if answer else "nothing yet"),
    ]


def families(seeds: int) -> list[Figure]:
    """Judge every family with `seeds` seeds."""
    return [
        Figure(
            "families",
            name.replace("_", " "),
            ", ".join(f"{count} {outcome}" for outcome, count in counts.items()),
            "0 wrong",
        )
        for name, family in FAMILIES.items()
        for counts in [outcomes(family, range(seeds))]
    ]


def summed(figures: Iterable[Figure]) -> list[tuple[str, str]]:
    """
    Return the rows of RESULTS.md: the outcomes of all families together, and the families with a wrong
    outcome.
    """
    counts, wrong = Counter[str](), list[str]()
    for one in figures:
        outcomes_of_family = [part.split(" ", 1) for part in one.value.split(", ") if part]
        counts.update({outcome: int(count) for count, outcome in outcomes_of_family})
        if any(outcome == "wrong" and int(count) for count, outcome in outcomes_of_family):
            wrong.append(f"{one.what} ({one.value})")
    every = sum(counts.values())
    rows = [(outcome, f"{count:,} of {every:,}") for outcome, count in counts.most_common()]
    return [*rows, ("families with a wrong answer", "; ".join(wrong) or "none")]


def _samples(rank: int, n: int) -> list[MemorySample]:
    made = series(rank, n)
    names = [name for name in made.columns if name in FIELDS]
    values = np.stack([made.columns[name] for name in names], axis=1).astype(np.int64).tolist()
    times, steps = made.t_ns.tolist(), made.step.tolist()
    return [
        MemorySample(times[index], steps[index], 0, **dict(zip(names, values[index], strict=True)))
        for index in range(n)
    ]


def _process(rank: int, world: int) -> RankProcess:
    node = rank // 8
    who = RankIdentity(
        rank, rank % 8, node, world, 8, world // 8, f"node-{node}", None, "run", 0, rank, "torchrun"
    )
    return RankProcess(rank, f"{rank:016x}", who)


def _found(memory: Memory) -> str:
    named = [f"{finding.kind} rank {finding.rank}" for finding in memory.findings]
    cause = memory.first_cause
    return ", ".join([f"first cause rank {cause.rank}" if cause else "no first cause", *named])


def main() -> None:
    """Measure, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=512, help="ranks of the stored run (default: 512)")
    parser.add_argument(
        "--samples", type=int, default=2000, help="samples of each rank of the stored run (default: 2000)"
    )
    parser.add_argument(
        "--live", type=int, default=1024, help="ranks of the live run; 0: no live run (default: 1024)"
    )
    parser.add_argument(
        "--seconds", type=int, default=180, help="measured time of the live run, s (default: 180)"
    )
    parser.add_argument(
        "--families",
        type=int,
        default=0,
        help="judge families of series with this many seeds each instead; 0: measure costs",
    )
    parser.add_argument("--markdown", action="store_true", help="print the section for RESULTS.md")
    args = parser.parse_args()
    print(machine() + "\n")
    figures = families(args.families) if args.families else offline(args.ranks, args.samples)
    if args.live and not args.families:
        figures += live(args.live, args.seconds)
    print(table(figures, args.markdown))
    if args.families:
        publish("families", ("what", "measured"), summed(figures))
    else:
        publish_figures("memory", figures)


if __name__ == "__main__":
    main()
