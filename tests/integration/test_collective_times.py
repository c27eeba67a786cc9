"""Three real ranks of gloo, late in turn. They also write files as NCCL Inspector does."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_cluster import until
from watched_job import WORLD, Job

from traceml_ray.signals.collectives.judge import (
    NOT_BETWEEN_ALL,
    ONLY_STARTED,
    CollectiveKind,
    CollectiveTimes,
)
from traceml_ray.signals.collectives.view import GetCollectives
from traceml_ray.store import query

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from inspector_lines import line

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=world)
pair = dist.new_group([0, 1], group_desc="tp")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data, small = torch.ones(1 << 20), torch.ones(4)
written = open(f"host-pid{os.getpid()}.log", "wb", buffering=0)
step = 0
while True:
    model(torch.ones(2, 8)).sum().backward()
    if rank == step % world:
        time.sleep(0.03)
    dist.all_reduce(data)
    if rank < 2:
        dist.all_reduce(small, group=pair)
    dist.all_reduce(small, async_op=True).wait()
    dist.broadcast(data, 0)
    optimizer.step()
    optimizer.zero_grad()
    written.write(line(step, 2000 if rank == step % world else 5000, rank=rank, ranks=world))
    step += 1
"""


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    here = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as name, contextlib.closing(Job(Path(name), SCRIPT, [here])) as made:
        yield made


def answer(job: Job) -> CollectiveTimes:
    return query.ask_one(job.aggregator.query, GetCollectives())


def kinds(job: Job) -> dict[tuple[str, str, str, int], CollectiveKind]:
    """By source, operation, what the group is called, and MB of a call."""
    return {
        (one.source, one.op, one.description, round((one.bytes_per_call or 0) / 1e6)): one
        for one in answer(job).kinds
    }


@pytest.mark.long
def test_time_is_without_the_wait_for_late_ranks(job: Job) -> None:
    job.wait_for_steps(150)
    until(lambda: ("inspector", "all_reduce", "", 67) in kinds(job), "a file of NCCL Inspector", 60)
    until(lambda: kinds(job)["inspector", "all_reduce", "", 67].ms is not None, "calls of all ranks", 60)
    known = kinds(job)
    reduced = known["host", "all_reduce", "", 4]
    assert (reduced.group_size, reduced.groups, reduced.nodes, reduced.why) == (WORLD, 1, 1, "")
    assert reduced.ms is not None and reduced.wait_ms is not None and reduced.host_ms is not None
    assert reduced.wait_ms > 15  # two of three ranks wait for 30 ms
    assert reduced.ms < reduced.host_ms
    assert reduced.bus_gb_per_s == pytest.approx((reduced.algorithm_gb_per_s or 0) * 4 / 3)
    assert known["host", "all_reduce", "tp", 0].group_size == 2
    assert known["host", "broadcast", "", 4].why == NOT_BETWEEN_ALL
    inspected = known["inspector", "all_reduce", "", 67]
    assert (inspected.ms, inspected.group_size) == (2.0, WORLD)
    assert inspected.wait_ms == pytest.approx(2.0, rel=0.1)  # two of three ranks take 3 ms more
    assert all(one.why != ONLY_STARTED for one in known.values())  # NCCL Inspector measures all-reduces
    with job.aggregator.stored() as file:
        assert all(not process.errors for process in file.processes())
