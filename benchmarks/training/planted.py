"""
Real DDP training over gloo with faults planted where a plan says: `planted.py PLAN.json`.

`faults.py` runs this under a launcher. A step is mostly sleep, with a little noise, so that ranks do not
compete for cores. With `busy` a step is all work, so that they do compete. With `device` a step is kernels on
a simulated device, for which the host waits at the end of the step. The model, the loader, the optimizer and
the exchange of gradients are real. Rank 0 leaves `<PLAN>.times.json`: when each row began (ns since the
epoch) and how long a step without a fault takes.

A fault belongs to a row, and a row begins when the previous exchange ends. So the delay in `post_sync` of row
k is slept after the optimizer's step that follows row k - 1.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, default_collate

SHARES = {"post_sync": 0.1, "data": 0.1, "prepare": 0.05, "forward": 0.25, "backward": 0.5}
"""Shares of the step time that the plan requests, by stage."""
BATCH, WIDTH = 4, 128
_BURNT = torch.eye(64)


def burn(seconds: float) -> None:
    """Keep a core busy until this thread has used it for `seconds` seconds."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        torch.mm(_BURNT, _BURNT)


class Pace:
    """The time that one rank takes for each stage of each row, in s."""

    def __init__(self, plan: dict[str, Any], rank: int, device: Any = None) -> None:
        self.base_s = plan["step_ms"] / 1e3
        """Length of a step without a fault, in s: the requested one until it has been measured."""
        self.began_ns: list[int] = []
        self._plan = plan
        self._rank = rank
        self._late = time.sleep if plan["work"] == "sleep" else burn
        self._take = burn if plan.get("busy") else time.sleep
        self._device = device
        self._planted = {
            row: segment
            for segment in plan["segments"]
            for row in range(segment["first"], segment["first"] + segment["steps"])
        }
        noise = np.random.default_rng((plan["seed"], rank)).normal(
            1, plan["noise"], (plan["rows"] + 1, len(SHARES))
        )
        self._noise = np.clip(noise, 0.5, 2.0)

    def begin(self) -> None:
        """Record the beginning of a row. After the first rows, the measured step time is used."""
        self.began_ns.append(time.time_ns())
        first, last = self._plan["measured"]
        if len(self.began_ns) == last:
            self.base_s = statistics.median(np.diff(self.began_ns[first:]).tolist()) / 1e9

    def pass_time(self, stage: str) -> None:
        """Take the time of `stage` in this row."""
        row = len(self.began_ns) - 1
        column = list(SHARES).index(stage)
        take, be_late = self._take, self._late
        if self._device is not None and stage != "data":
            take = be_late = self._launch
        take(SHARES[stage] * self._plan["step_ms"] / 1e3 * self._noise[row, column])
        for late in self._planted.get(row, {}).get("late", ()):
            ranks = [late["ranks"][row % len(late["ranks"])]] if late["rotating"] else late["ranks"]
            if stage == late["stage"] and self._rank in ranks:
                be_late(late["share"] / (1 - late["share"]) * self.base_s)

    def _launch(self, seconds: float) -> None:
        self._device.launch(int(seconds * 1e9))


class _Backward(torch.autograd.Function):
    """Identity whose gradient takes time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pace: Pace) -> Tensor:
        ctx.pace = pace
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.pace.pass_time("backward")
        return grads[0], None


class Net(nn.Module):
    """
    Three layers. The gradients of the first layer, and so the last bucket, are late when backward
    is late.
    """

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self.pace = pace
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rest = nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return one number for each row of x (n, WIDTH)."""
        self.pace.pass_time("forward")
        hidden = _Backward.apply(self.first(x), self.pace)
        output: Tensor = self.rest(hidden)
        return output


def train(plan: dict[str, Any], rank: int) -> Pace:
    """Train as planned."""
    device = None
    if plan.get("device"):
        from played_device import PlayedDevice, exchange_on, measure  # type: ignore[import-not-found]

        device = PlayedDevice()
        measure(device)
    pace = Pace(plan, rank, device)

    def collate(samples: list[Any]) -> Any:
        pace.pass_time("data")
        return default_collate(samples)

    torch.manual_seed(plan["seed"])
    model = DistributedDataParallel(Net(pace))
    if device is not None:
        exchange_on(device, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    samples = TensorDataset(torch.randn(64, WIDTH).repeat(BATCH * plan["rows"] // 64 + 1, 1))
    step = _traced(model) if plan.get("traceml") else contextlib.nullcontext
    pace.begin()
    for (batch,) in itertools.islice(
        DataLoader(samples, BATCH, shuffle=True, collate_fn=collate), plan["rows"]
    ):
        with step():
            pace.pass_time("prepare")
            model(batch).pow(2).mean().backward()
            pace.begin()
            optimizer.step()
            optimizer.zero_grad()
            pace.pass_time("post_sync")
            if device is not None:
                device.item()
    return pace


def _traced(model: nn.Module) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return what TraceML needs around a step; only under TraceML's launcher."""
    import traceml_ai  # type: ignore[import-not-found]

    traceml_ai.init(mode="auto")
    return functools.partial(traceml_ai.trace_step, model)


def main() -> None:
    """Train, and store the times."""
    path = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pace = train(json.loads(path.read_text()), rank)
    if rank == 0:
        result = {"began_ns": pace.began_ns, "base_ms": 1e3 * pace.base_s}
        path.with_suffix(".times.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
