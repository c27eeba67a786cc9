"""
What a check during training (`confirm=during`) costs the job: `check_cost.py [--pairs N]`.

Two ranks train a small model on the CPU, and wait for each other in each step. Periods with a check on their
machine and periods without one alternate. The check is the process that a relay starts, with all its trials.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
from figures import machine

from traceml_ray.monitor.node_check import NodeCheck
from traceml_ray.signals.check.during import PERIOD_S, TRIALS, TrainingCheckPlan
from traceml_ray.wire.codec import ready

RANKS = 2
START_S = 3.0
"""Time between the start of the process and its first trial, in s."""
LENGTH_S = START_S + TRIALS * PERIOD_S + 1.0
SCRIPT = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist

rank, ranks, folder, width = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
layers = [torch.nn.Linear(width, width) for _ in range(4)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
batch = torch.randn(128, width)
with (folder / f"steps-{rank}").open("w", buffering=1 << 16) as steps:
    while not (folder / "stop").exists():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.write(f"{time.monotonic()}\\n")
        over = torch.tensor(float((folder / "stop").exists()))
        dist.all_reduce(over)
        if over:
            break
"""


class Period(NamedTuple):
    """A time in which the ranks trained."""

    begin: float
    end: float
    checked: bool


class Cost(NamedTuple):
    """What the checks cost."""

    medians: list[float]
    """Median step time with a check, as a ratio of that without, of each pair of periods."""
    means: list[float]
    """The same for the mean step time."""
    step_ms: float
    cpu_s: float
    """CPU time of one check, in s."""


def train(folder: Path, width: int) -> list[subprocess.Popen[bytes]]:
    """Start the ranks."""
    return [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(rank), str(RANKS), str(folder), str(width)])
        for rank in range(RANKS)
    ]


def check(pids: list[int]) -> None:
    """Make a check, in the process and with the priority with which a relay makes it."""
    made = NodeCheck(lambda _: None, threading.RLock())
    plan = TrainingCheckPlan(time.time_ns() + int(START_S * 1e9), 0, dict(enumerate(pids)))
    output = list[bytes]()
    thread = threading.Thread(target=lambda: output.append(made.in_process(plan, 60.0)))
    thread.start()  # it lowers its own priority
    thread.join()
    assert output and msgspec.json.decode(output[0], type=ready(list))


def measure(pairs: int, width: int) -> Cost:
    """Let the ranks train, with a check and without one in turn."""
    cpu_s = list[float]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = train(folder, width)
        time.sleep(8.0)
        periods = list[Period]()
        for number in range(2 * pairs + 1):
            begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
            if number % 2:
                check([rank.pid for rank in ranks])
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                cpu_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            time.sleep(max(0.0, begin + LENGTH_S - time.monotonic()))
            periods.append(Period(begin, time.monotonic(), bool(number % 2)))
        (folder / "stop").touch()
        for rank in ranks:
            rank.wait(30)
        ends = [float(line) for line in (folder / "steps-0").read_text().split()]
    steps = [(end, end - before) for before, end in itertools.pairwise(ends)]
    took = [[s for end, s in steps if period.begin < end <= period.end] for period in periods]
    medians, means = [], []
    for number in range(1, len(periods), 2):  # compared with both neighbours: what drifts is no cost
        for values, how in ((medians, statistics.median), (means, statistics.fmean)):
            without = (how(took[number - 1]) + how(took[number + 1])) / 2
            values.append(how(took[number]) / without)
    return Cost(medians, means, 1e3 * statistics.median(took[0]), statistics.fmean(cpu_s))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    cost = measure(args.pairs, args.width)
    print(f"{machine()}\n")
    print("| step | pairs | median step, with a check | mean step | of the pairs | CPU time of a check |")
    print("|---|---|---|---|---|---|")
    share = [f"{100 * (statistics.median(values) - 1):+.2f} %" for values in (cost.medians, cost.means)]
    spread = f"{100 * (min(cost.means) - 1):+.2f} to {100 * (max(cost.means) - 1):+.2f} %"
    values = f"{cost.step_ms:.1f} ms", f"{len(cost.means)}", *share, spread, f"{cost.cpu_s:.2f} s"
    print(f"| {' | '.join(values)} |")


if __name__ == "__main__":
    main()
