"""Reductions that are started and waited for later, in a world of two ranks of which one is made up."""

from __future__ import annotations

from collections.abc import Iterator
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from unit.test_recorder import Loop

from traceml_ray.agent.patch.collectives import Collectives
from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.agent.recorder import Recorder, Spans

ONE = torch.ones(1)


class Noted:
    """Collectives of a loop that is in a step; `reductions` is how many its recorder was told of."""

    def __init__(self, patcher: Patcher, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = Loop(peers=False)
        loop.step()
        loop.data(1)
        recorder = loop.recorder
        self.collectives = Collectives(recorder, Spans(recorder, patcher.failed), patcher.failed)
        self.reductions = 0
        self.collectives.patch(patcher)
        monkeypatch.setattr(Recorder, "reduced", self._count)

    def _count(self, _on_device: bool) -> None:
        self.reductions += 1

    @property
    def under_way(self) -> int:
        return len(self.collectives._handles)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    patcher = Patcher()
    try:
        yield Noted(patcher, monkeypatch)
    finally:
        patcher.restore()
        dist.destroy_process_group()
    assert not patcher.errors and not patcher.missing


def wait(handle: dist.Work) -> None:
    """Wait as for the handle of a real backend, which has no `wait` of its own."""
    dist.Work.wait(handle)


def test_started_reduction_is_noted_once_when_it_has_been_waited_for(noted: Noted) -> None:
    handle = dist.all_reduce(ONE, async_op=True)
    assert noted.reductions == 0
    wait(handle)
    wait(handle)
    assert noted.reductions == 1


def test_reduction_that_nobody_waits_for_is_forgotten_with_its_handle(noted: Noted) -> None:
    handle = dist.all_reduce(ONE, async_op=True)
    known = ref(handle)
    del handle
    assert known() is None, "nothing of ours keeps it"
    for _ in range(200):
        dist.all_reduce(ONE, async_op=True)
        wait(dist.broadcast(ONE, 0, async_op=True))  # often with the id of the handle before
    assert noted.reductions == 0 and not noted.under_way


def test_last_of_many_reductions_under_way_is_noted(noted: Noted) -> None:
    handles = [dist.all_reduce(ONE, async_op=True) for _ in range(5000)]
    wait(handles[-1])
    assert noted.reductions == 1
    handles.clear()
    assert not noted.under_way
