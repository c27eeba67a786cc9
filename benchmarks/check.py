"""
How often a check names a healthy node, and how often it names a slow one, by number of nodes:
`check.py [--repeats N] [--quick]`.

The trials are drawn, as a node with one CPU, memory and a disk measures them, and judged as those of a real
check. Healthy nodes differ by 1 % and their trials by 1 %. Where other work runs beside, it is on every other
node: it takes up to half of a trial now and then, or 30 % of each from the middle of the check on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
from figures import machine

from traceml_ray.signals.check.judge import judged
from traceml_ray.signals.check.records import Checked, Measure

NODES = 2, 3, 4, 8, 32, 256, 1024
TRIALS = 10
SPREAD, NOISE = 0.01, 0.01
PROBES = (("cpu_matmul", "CPU", "FLOP/s"), ("host_memory", "memory", "B/s"), ("disk_read", "/data", "B/s"))


class Nodes:
    """
    Nodes that are checked.

    Args:
        count: number of nodes.
        rng: draws their trials.
        slower: share (0..1) by which the CPU of the last node is slower.
        load: work that runs beside the check: none, `now and then`, or `from the middle on`.
    """

    def __init__(self, count: int, rng: np.random.Generator, slower: float = 0.0, load: str = "") -> None:
        self._count, self._rng, self._slower, self._load = count, rng, slower, load

    def checks(self) -> list[Checked]:
        """Return one check of each node."""
        return [self._check(number) for number in range(self._count)]

    def _check(self, number: int) -> Checked:
        free = self._free(number)
        measures = []
        for probe, subject, unit in PROBES:
            slow = self._slower and number == self._count - 1 and probe == "cpu_matmul"
            level = (1 - self._slower * bool(slow)) * np.exp(self._rng.normal(0, SPREAD))
            values = 1e11 * level * free * np.exp(self._rng.normal(0, NOISE, TRIALS))
            measures.append(Measure(probe, subject, unit, values.tolist()))
        return Checked(0, f"node-{number}", measures=measures)

    def _free(self, number: int) -> np.ndarray:
        """Return the share of each trial that other work leaves."""
        taken = np.zeros(TRIALS)
        if self._load and number % 2:
            taken = self._rng.uniform(0, 0.5, TRIALS) * (self._rng.random(TRIALS) < 0.5)
            if self._load == "from the middle on":
                taken = 0.3 * (np.arange(TRIALS) >= TRIALS // 2)
        return 1 - taken


def named(nodes: Nodes) -> list[str]:
    """Return the nodes that a check names."""
    return sorted({node for slow in judged(nodes.checks()).slow for node in slow.nodes})


def row(count: int, repeats: int, rng: np.random.Generator) -> Sequence[str]:
    """Return a line of the table: for some number of nodes, how often something was named."""
    cells = [f"{count:,}"]
    for load in ("", "now and then", "from the middle on"):
        wrong = sum(bool(named(Nodes(count, rng, load=load))) for _ in range(repeats))
        cells.append(f"{wrong} of {repeats}")
    for slower, load in ((0.14, ""), (0.4, ""), (0.4, "now and then")):
        hits = sum(named(Nodes(count, rng, slower, load)) == [f"node-{count - 1}"] for _ in range(repeats))
        cells.append(f"{hits} of {repeats}")
    return cells


COLUMNS = (
    "nodes",
    "healthy: named",
    "healthy, load now and then: named",
    "healthy, load from the middle on: named",
    "14 % slower: named alone",
    "40 % slower: named alone",
    "40 % slower, load now and then: named alone",
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=300, help="checks per cell (default: 300)")
    parser.add_argument("--quick", action="store_true", help="few checks, at most 32 nodes")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    print(machine())
    for count in NODES[: 5 if args.quick else None]:
        repeats = 20 if args.quick else max(20, min(args.repeats, args.repeats * 32 // count))
        cells = zip(COLUMNS, row(count, repeats, rng), strict=True)
        print("  ".join(f"{head}: {cell}" for head, cell in cells), flush=True)


if __name__ == "__main__":
    main()
