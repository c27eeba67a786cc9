"""
What the monitor costs on a cluster of many idle nodes: `nodes.py [NODES [SECONDS]]`.

The nodes are raylets on this one machine, so relays that start at the same time share its cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import psutil
from figures import machine, publish
from ray_cluster import actor_processes, fake_cluster

import traceml_ray


def measure(nodes: int, quiet: int) -> None:
    """Start, wait for every relay, observe them idle, stop. Print the cost of each phase."""
    with fake_cluster(nodes=nodes, cpus=1) as _, tempfile.TemporaryDirectory() as out:
        print(f"{machine()}\n{nodes} nodes\n")
        began = time.monotonic()
        session = traceml_ray.start(session="nodes", out=out)
        started_s = time.monotonic() - began
        print(f"start() returned after   {started_s:6.2f} s")
        session.wait_ready(120)
        answered_s = time.monotonic() - began
        print(f"every relay answered     {answered_s:6.2f} s")
        time.sleep(min(5, quiet))
        processes = actor_processes("NodeRelay") + actor_processes("Aggregator")
        before = cpu_s(processes)
        time.sleep(quiet)
        used = (cpu_s(processes) - before) / quiet
        print(f"idle, all {len(processes)} processes   {used:6.3f} of a core")
        relays = [process.memory_full_info().pss / 2**20 for process in actor_processes("NodeRelay")]
        print(f"memory of a relay        {sum(relays) / len(relays):6.1f} MiB (PSS)")
        began = time.monotonic()
        session.stop(30)
        print(f"stop() returned after    {time.monotonic() - began:6.2f} s")
    publish(
        "nodes",
        (f"{nodes} nodes of Ray on one machine", "measured", "budget"),
        [
            ("`start()` until every relay answers", f"{answered_s:.1f} s", "< 15 s"),
            (f"all {len(processes)} processes, idle", f"{used:.2f} of a core", "< 0.3"),
            ("a relay (PSS)", f"{sum(relays) / len(relays):.0f} MiB", "≤ 160 MB"),
        ],
    )


def cpu_s(processes: list[psutil.Process]) -> float:
    """Return the CPU seconds of these processes so far."""
    return sum(map(cpu_one, processes))


def cpu_one(process: psutil.Process) -> float:
    """Return the CPU seconds of one process so far."""
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("nodes", type=int, nargs="?", default=24, help="number of nodes (default: 24)")
    parser.add_argument(
        "seconds", type=int, nargs="?", default=20, help="measured idle time, s (default: 20)"
    )
    args = parser.parse_args()
    measure(args.nodes, args.seconds)
