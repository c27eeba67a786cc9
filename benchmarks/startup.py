"""
What the monitor and its private Ray cost a whole launch: `python benchmarks/startup.py [--quick]`.

    idle    ranks that mostly wait: the time before the first step and after the last, and the memory
    full    ranks that keep every core busy, for about ten seconds: the whole run

Launches with a monitor and with `--no-monitor` alternate; the median of the pairs counts. Nothing else should
run meanwhile. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from figures import Figure, machine, publish_figures, table

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_gpt.py"
RANKS = 2
OTHERS = ("RAY_ADDRESS", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
IDLE = ("--slow", "data:0:90")
"""Steps of about 0.1 s, most of which is sleep."""
FULL = ("--batch-size", "16", "--workers", "0")


class Run(NamedTuple):
    """
    One launch: seconds in total, to the first step, and from the last step to the end; bytes of ranks and
    others.
    """

    whole_s: float
    start_s: float
    end_s: float
    rank_bytes: float = 0.0
    other_bytes: float = 0.0


def idle(pairs: int, steps: int) -> list[Figure]:
    """Measure start, end and memory when cores are free."""
    runs = alternate(pairs, (*IDLE, "--steps", str(steps)), steps, memory_at=steps * 3 // 4)

    def added(field: str) -> float:
        with_it, without = ([getattr(run, field) for run in runs[on]] for on in (True, False))
        return statistics.median(with_it) - statistics.median(without)

    return [
        Figure("idle", "added before the first step", f"{added('start_s'):+.2f} s"),
        Figure("idle", "added after the last step", f"{added('end_s'):+.2f} s", "≤ 3 s"),
        Figure("idle", "memory of the monitor and Ray", f"{added('other_bytes') / 1e6:.0f} MB", "≤ 550 MB"),
        Figure("idle", "memory added to a rank", f"{added('rank_bytes') / RANKS / 1e6:+.1f} MB"),
    ]


def full(pairs: int, seconds: float) -> list[Figure]:
    """Measure whole runs of about `seconds` seconds when all cores are busy."""
    steps = 20 if seconds else 5
    while seconds and (took := launch(False, (*FULL, "--steps", str(steps)), steps).whole_s) < 0.8 * seconds:
        steps += max(20, round(steps * (seconds / took - 1)))
    runs = alternate(pairs, (*FULL, "--steps", str(steps)), steps)
    both = [*zip(runs[True], runs[False], strict=True)]
    added = sorted(on.whole_s - off.whole_s for on, off in both)
    start, end = (
        statistics.median(getattr(on, field) - getattr(off, field) for on, off in both)
        for field in ("start_s", "end_s")
    )
    middle, bare = statistics.median(added), statistics.median(run.whole_s for run in runs[False])
    return [
        Figure("full", "whole run without monitor", f"{bare:.1f} s"),
        Figure("full", f"added to it, median of {pairs} pairs", f"{middle:+.2f} s", "≤ 1 s"),
        Figure("full", "least and most", f"{added[0]:+.2f} … {added[-1]:+.2f} s"),
        Figure("full", "of that before the first step", f"{start:+.2f} s"),
        Figure("full", "of that after the last step", f"{end:+.2f} s"),
    ]


def alternate(
    pairs: int, arguments: tuple[str, ...], steps: int, memory_at: int = 0
) -> dict[bool, list[Run]]:
    """Launch with a monitor and without, in random order within each pair."""
    runs: dict[bool, list[Run]] = {True: [], False: []}
    for _ in range(pairs):
        for monitored in random.sample((True, False), 2):
            runs[monitored].append(launch(monitored, arguments, steps, memory_at))
    return runs


def launch(monitored: bool, arguments: tuple[str, ...], steps: int, memory_at: int = 0) -> Run:
    """Run the launcher once. Measure memory when `step` steps are done (0: not at all)."""
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as folder:
        losses = Path(folder) / "losses"
        ours = ("--out", folder) if monitored else ("--no-monitor",)
        command = [sys.executable, "-m", "traceml_ray.launch", "--nproc-per-node", str(RANKS)]
        command += ["--master-port", free_port(), *ours, str(EXAMPLE), *arguments, "--loss-log", str(losses)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "BENCH_MARK": mark}
        for name in OTHERS:
            environ.pop(name, None)
        began, ranks, others = time.time(), 0.0, 0.0
        with open(f"{folder}/stderr", "w+") as stderr:  # noqa: PTH123
            process = subprocess.Popen(
                command, cwd=folder, env=environ, stdout=subprocess.DEVNULL, stderr=stderr
            )
            first = until(lambda: losses.exists() and losses.stat().st_size, process) and time.time()
            if memory_at:
                until(lambda: losses.read_text().count("train") >= memory_at, process)
                ranks, others = memory(mark)
            code = process.wait(timeout=300)
            ended = time.time()
            if code:
                stderr.seek(0)
                raise RuntimeError(f"exit code {code}: {stderr.read()[-2000:]}")
        if monitored:
            (summary,) = Path(folder).glob("*/summary.json")
            stored = json.loads(summary.read_text())["ledger"]["stored"]
            if stored < RANKS * steps:
                raise RuntimeError(f"only {stored} rows were stored: this was no watched run")
        return Run(ended - began, first - began, ended - losses.stat().st_mtime, ranks, others)


def until(done: Callable[[], Any], process: subprocess.Popen[bytes]) -> bool:
    """
    Wait until `done()` is true or the process has ended. It polls rarely, because that takes a core from the
    ranks.
    """
    while process.poll() is None and not done():
        time.sleep(0.05)
    return True


def free_port() -> str:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def memory(mark: str) -> tuple[float, float]:
    """Return the bytes (PSS) of all ranks, and of all other processes of the run that carries `mark`."""
    marked, sessions = set(), set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get("BENCH_MARK") == mark:
                marked.add(process.pid)
                sessions.add(os.getsid(process.pid))
    sessions.discard(os.getsid(0))
    ranks = others = 0.0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # Ray's workers wipe the mark, not the session
            if process.pid in marked or os.getsid(process.pid) in sessions:
                size = process.memory_full_info().pss
                if "LOCAL_RANK" in process.environ():
                    ranks += size
                else:
                    others += size
    return ranks, others


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5, help="number of pairs of launches (default: 5)")
    parser.add_argument(
        "--seconds", type=float, default=10, help="time of a run on full cores, s (default: 10)"
    )
    parser.add_argument("--only", choices=("idle", "full"), help="only this kind of run")
    parser.add_argument(
        "--quick", action="store_true", help="one pair of a few steps, as a check of the benchmark"
    )
    parser.add_argument("--markdown", action="store_true", help="print the section for RESULTS.md")
    args = parser.parse_args()
    pairs, seconds = (1, 0.0) if args.quick else (args.pairs, args.seconds)
    where, figures = machine(), list[Figure]()
    if args.only != "full":
        figures += idle(pairs, 20 if args.quick else 80)
    if args.only != "idle":
        figures += full(pairs, seconds)
    print(where, table(figures, args.markdown), sep="\n\n")
    publish_figures("startup", figures)


if __name__ == "__main__":
    main()
