"""
Nearly empty steps at a given rate, watched like any training: `soaking.py PLAN.json`, run by `soak.py`.

Loader, model, backward and optimizer are real and tiny, so that a step goes through every patched function.
There is no exchange of gradients: each step of every rank ends at the same time of one clock, and the
remaining time is slept where DDP would wait for its peers. Each rank writes its number of steps to
`<PLAN>.<rank>.json`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

import traceml_ray
from traceml_ray.agent import bootstrap

LATE_S, TURN_S = 0.3, 20.0
"""LATE_S: how late a rank is, as a share of a step. TURN_S: seconds for which each rank is late in turn."""
PARTS_A_STEP, PARTS = 20, 400
"""
Named parts per step of a rank that floods its monitor, and number of names: more than the monitor
keeps.
"""


class Pace:
    """The end of each step: `rate` times a second from `begin` (s, monotonic), equal on all ranks."""

    def __init__(self, plan: dict[str, Any], rank: int, begin: float) -> None:
        self.steps = 0
        self._plan = plan
        self._rank = rank
        self._begin = begin
        self._end = begin + plan["seconds"]

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self._end

    @property
    def floods(self) -> bool:
        """Whether this rank should flood its monitor now."""
        now = time.monotonic() - self._begin
        return self._rank == 0 and any(first <= now < last for first, last in self._plan["floods"])

    def collate(self, samples: list[Any]) -> Any:
        """Make a batch; late if it is this rank's turn."""
        turn = int((time.monotonic() - self._begin) / TURN_S)
        if turn % self._plan["ranks"] == self._rank:
            time.sleep(LATE_S / self._plan["rate"])
        return default_collate(samples)

    def wait(self) -> None:
        """Wait until the step is over."""
        self.steps += 1
        left = self._begin + self.steps / self._plan["rate"] - time.monotonic()
        if left > 0:
            time.sleep(left)


def train(pace: Pace) -> None:
    """Train until time is up."""
    agent = bootstrap.current()
    if agent is not None:
        agent.recorder.exchange.peers = lambda: True  # without DDP no rank would have peers
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(2000, 8)), batch_size=2, collate_fn=pace.collate)
    callback = torch.autograd.Variable._execution_engine.queue_callback

    def exchange(_: Tensor) -> None:
        callback(pace.wait)

    model.weight.register_hook(exchange)
    while not pace.over:
        for (batch,) in loader:
            model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if pace.floods:
                flood(pace.steps)
            if pace.over:
                return


def flood(step: int) -> None:
    """Name many parts."""
    for number in range(step * PARTS_A_STEP, (step + 1) * PARTS_A_STEP):
        with traceml_ray.stage(f"part {number % PARTS}"):
            pass


def main() -> None:
    """Report that this rank is ready, wait for the start, train, and store the number of steps."""
    path, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    path.with_suffix(f".{rank}.ready").touch()
    go = path.with_suffix(".go")
    while not go.exists():
        time.sleep(0.05)
    pace = Pace(json.loads(path.read_text()), rank, float(go.read_text()))
    time.sleep(max(0.0, float(go.read_text()) - time.monotonic()))
    train(pace)
    path.with_suffix(f".{rank}.json").write_text(json.dumps({"steps": pace.steps}))


if __name__ == "__main__":
    main()
