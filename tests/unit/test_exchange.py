"""Marks of exchanges, through torch itself: what goes wrong in them stays away from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from integration import loops
from torch.nn.parallel import DistributedDataParallel

from traceml_ray.agent.mark_log import REPLAY_AT, MarkLog
from traceml_ray.agent.marks import COLLATED
from traceml_ray.stages import FLAG_NO_PEERS


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    """A watched process that is a group of one."""
    job = loops.Job()
    job.instrumentation.errors.debug = False
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    job.instrumentation.install()
    yield job
    job.instrumentation.remove()
    dist.destroy_process_group()


def test_fault_in_an_exchange_mark_is_counted_and_raises_nothing_into_torch(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops.plain(job)
    net = DistributedDataParallel(torch.nn.BatchNorm1d(4))

    def fault(_: Any) -> None:
        raise RuntimeError("a fault of ours")

    job.recorder.log.extend((COLLATED, job.recorder.clock()) * REPLAY_AT)
    monkeypatch.setattr(MarkLog, "_replay", fault)
    work = dist.all_reduce(torch.ones(2), async_op=True)
    job.instrumentation.collectives._handles[id(work)] = False
    assert work.wait()
    job.instrumentation.collectives._waited(False)
    assert net(torch.ones(2, 4)).shape == (2, 4)
    dist.monitored_barrier()  # no span, so no wait of one
    assert job.instrumentation.errors["sync: RuntimeError"] == 2, "the wait, the buffers"
    assert job.instrumentation.errors["span: RuntimeError"] >= 1


def test_exchange_inside_the_optimizer_step_is_inferred_under_a_grad_scaler(job: Any) -> None:
    class Sharded(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            job.recorder.reduced(False)
            return super().step(closure)

    net, scaler = torch.nn.Linear(4, 1), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = Sharded(net.parameters(), lr=0.1)
    for number in range(6):
        scaler.scale(net(torch.ones(2, 4)).mean()).backward()
        if number == 4:
            net.bias.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    job.recorder.replay()
    rows = job.rows()
    assert [row["step"] for row in rows] == list(range(6))
    assert [bool(row["flags"] & FLAG_NO_PEERS) for row in rows] == [True, False, False, False, True, False]
    assert job.recorder.exchange.inferred and not job.instrumentation.errors
