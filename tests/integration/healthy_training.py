"""
A healthy job of four gloo ranks with long pauses between steps: nothing in it is a hang.

    python healthy_training.py MINUTES

In each round one of these comes after some steps: rank 0 evaluates alone while the others wait in a barrier,
all ranks evaluate, rank 0 saves a checkpoint or computes a metric alone, ranks work unevenly in two groups.
"""

from __future__ import annotations

import io
import itertools
import random
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

minutes = float(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
everyone = dist.new_group(list(range(4)))
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
chance = random.Random(7)
"""The same on all ranks: they agree on what comes next."""


def train(steps: int) -> None:
    for _ in range(steps):
        time.sleep(0.02)
        model(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluate(seconds: float) -> None:
    """Work on batches, with pauses as of a loader."""
    end = time.monotonic() + seconds
    model.eval()
    with torch.no_grad():
        while time.monotonic() < end:
            model.module(torch.ones(8, 64))
            time.sleep(0.05)
    model.train()


def compute_metric(seconds: float) -> None:
    """Work without torch: what a script does with text, or files."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sorted(str(number) for number in range(20_000))
        time.sleep(0.05)


class SlowFile(io.BytesIO):
    """A disk that takes time."""

    def write(self, data: object) -> int:
        time.sleep(0.5)
        return super().write(data)  # type: ignore[arg-type]


def save(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.save(model.state_dict(), SlowFile())


def alone(work: object, seconds: float) -> None:
    if rank == 0:
        work(seconds)  # type: ignore[operator]
    dist.barrier()


def together(seconds: float) -> None:
    evaluate(seconds)
    dist.all_reduce(torch.ones(1))


def unevenly(seconds: float) -> None:
    for _ in range(5):
        time.sleep(chance.uniform(0, seconds / 5) * (rank + 1) / 4)
        dist.all_reduce(torch.ones(4), group=halves[rank // 2])
        dist.all_reduce(torch.ones(4), group=everyone)


end = time.monotonic() + 60 * minutes
rounds = itertools.cycle(["evaluate alone", "save alone", "evaluate", "metric alone", "uneven"])
for kind in rounds:
    going = torch.tensor(float(time.monotonic() < end))
    dist.broadcast(going, 0)
    if not going:
        break
    train(chance.randint(100, 400))
    seconds = chance.uniform(60, 120)
    if rank == 0:
        print(time.time(), kind, round(seconds), flush=True)
    if kind == "evaluate":
        together(seconds)
    elif kind == "uneven":
        unevenly(seconds)
    else:
        alone({"evaluate alone": evaluate, "save alone": save, "metric alone": compute_metric}[kind], seconds)
