"""Jobs that are not only data parallel, two by two on gloo: cases of `test_sync_groups`."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from integration import loops
from torch import nn

STEPS = 56
"""Enough for one peer to show what is chance: 50 steps after those that allocate and connect."""
MICRO = 2
WORK_S = 0.002
"""What a forward and a backward of a stage take."""


class Part(loops.Net):
    """A stage of a pipeline: what goes in has the shape of what comes out."""

    def __init__(self, job: loops.Job) -> None:
        super().__init__(job.slow, pause=job.pause)
        self.second = nn.Linear(loops.WIDTH, loops.WIDTH)
        self.took = job.pause

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.slow == "forward":
            self.took(1 / MICRO)
        hidden = self.first(x).relu()
        if hidden.requires_grad:
            hidden.register_hook(self._backward)
        time.sleep(WORK_S)
        return self.second(hidden)

    def _backward(self, _: torch.Tensor) -> None:
        time.sleep(WORK_S)
        if self.slow == "backward":
            self.took(1 / MICRO)


def _train(job: loops.Job, stage: int, part: nn.Module, schedule: Any) -> None:
    optimizer = torch.optim.SGD(part.parameters(), lr=0.001)
    for batch in job.loader(STEPS):
        schedule.step(batch) if stage == 0 else schedule.step(target=batch)
        job.finish(optimizer)


def pipeline(job: loops.Job, replicas: int = 2) -> None:
    """Two stages, each on `replicas` ranks."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    mesh = dist.init_device_mesh("cpu", (4 // replicas, replicas), mesh_dim_names=("pp", "dp"))
    stage, _ = mesh.get_coordinate()
    part: nn.Module = Part(job)
    if replicas > 1:  # torch's DDP counts parameters of each micro-batch where it may rebuild its buckets
        group = mesh["dp"].get_group()
        part = nn.parallel.DistributedDataParallel(part, process_group=group, find_unused_parameters=True)
    like, stages, device = (torch.ones(2 // MICRO, loops.WIDTH),), 4 // replicas, torch.device("cpu")
    stage_module = PipelineStage(part, stage, stages, device, input_args=like, group=mesh["pp"].get_group())
    kind = Schedule1F1B if replicas > 1 else ScheduleGPipe
    _train(job, stage, part, kind(stage_module, MICRO, loss_fn=lambda y, x: (y - x).square().mean()))


def tensor(job: loops.Job, replicas: int = 2) -> None:
    """Layers split over two ranks, on `replicas` pairs."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    mesh = dist.init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("dp", "tp"))
    net: nn.Module = job.bare()
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    parallelize_module(net, mesh["tp"], plan)
    if replicas > 1:
        _pre_dp_module_transform(net)
        net = nn.parallel.DistributedDataParallel(net, process_group=mesh["dp"].get_group())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, foreach=False)
    for batch in job.loader(STEPS):
        net(batch).mean().backward()
        job.finish(optimizer)


def pipeline_alone(job: loops.Job) -> None:
    """Four stages on one rank each."""
    pipeline(job, replicas=1)


def tensor_alone(job: loops.Job) -> None:
    """All four ranks have a part of each layer."""
    tensor(job, replicas=1)
