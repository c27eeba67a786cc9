"""
Models that FSDP2 divides among four ranks in every way it has, and what is computed of each by hand.

A parameter of `rows` is divided as `torch.chunk` does: each of `shards` ranks gets ⌈rows ÷ shards⌉ of them,
the last ones fewer, or none. What is gathered and reduced is padded to as many for all.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from integration import loops
from torch import nn

from traceml_ray.signals.sharding.agent import Shards
from traceml_ray.signals.sharding.records import Sharding

WORLD, STEPS = 4, 3
COUNTED = STEPS - 1
"""In the first step ranks still connect to each other."""
INNER = [(10, loops.WIDTH), (10, 1)]
"""Weight and bias of the inner layer, (rows, elements of a row): the last rank has one row of ten."""
OUTER = [(3, 10), (3, 1)]
"""Of the root itself: the last rank has none of three rows."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(loops.WIDTH, 10), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x).relu()) * 1.0


def _with(**options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: options


def _hybrid() -> dict[str, Any]:
    return {"mesh": dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}


def _mixed_and_offloaded() -> dict[str, Any]:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return {"mp_policy": mixed, "offload_policy": CPUOffloadPolicy(pin_memory=False)}


@dataclass(frozen=True)
class Case:
    """How `fully_shard` is called, and what follows from that."""

    options: Callable[[], dict[str, Any]]
    shards: int = WORLD
    gathered_as: int = 4
    """Bytes of an element."""
    inner_gathers: int = 3
    """In two forwards, and in backward where it was resharded before."""
    outer_gathers: int = 1
    resharded: dict[str, int] = field(default_factory=lambda: {"yes": 1, "no": 1})
    """The root is kept whole unless it is told otherwise: its backward comes next."""
    offloaded: bool = False
    unseen: bool = False
    """`fully_shard` was imported before the monitor came."""

    def position(self, rank: int) -> int:
        return rank % self.shards

    def held(self, rank: int) -> int:
        """Return the bytes of parameters that a rank holds."""
        position = self.position(rank)
        return sum(4 * size * _rows(rows, self.shards)[position] for rows, size in (*INNER, *OUTER))

    def padded(self, group: list[tuple[int, int]]) -> int:
        """Return the elements of a group as it is gathered and reduced."""
        return sum(self.shards * size * _rows(rows, self.shards)[0] for rows, size in group)


def _rows(rows: int, shards: int) -> list[int]:
    most = -(-rows // shards)
    return [max(0, min(most, rows - most * shard)) for shard in range(shards)]


CASES = {
    "uneven": Case(_with()),
    "hsdp": Case(_hybrid, shards=2),
    "mixed": Case(_mixed_and_offloaded, gathered_as=2, offloaded=True),
    "kept": Case(_with(reshard_after_forward=False), inner_gathers=1, resharded={"no": 2}, unseen=True),
    "to_two": Case(_with(reshard_after_forward=2), outer_gathers=3, resharded={"2": 2}),
}


def train(job: loops.Job, case: Case) -> dict[str, Any]:
    """Train a model that is divided so, and return what the agent would send."""
    from torch.distributed.fsdp import fully_shard

    net, options, stats = Net(), case.options(), itertools.count(1)
    divide: Any = fully_shard.__wrapped__ if case.unseen else fully_shard
    divide(net.inner, **options)
    divide(net, **options)
    played = job.instrumentation.data_parallel.memory  # a device that has one byte more at each look
    played._stat = lambda _: dict.fromkeys(("current", "peak", "allocated"), next(stats))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    sent = list[Sharding]()
    shards = Shards(job.instrumentation.data_parallel, spans=job.recorder.sums.collect)
    for batch in job.loader(STEPS):
        with torch.no_grad():
            net(batch[:0])  # an evaluation gathers, too, but its memory is not that of a step
        net(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        job.recorder.replay()
        sent += shards.collect(final=False)
    job.recorder.finish()
    for _ in range(2):
        sent += shards.collect(final=True)
    ref = weakref.ref(net)
    del net, optimizer
    gc.collect()
    return {"sharding": msgspec.to_builtins(sent[-1]), "freed": ref() is None}
