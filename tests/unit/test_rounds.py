"""Attempts under torchrun have the same number on all nodes: that of the rendezvous."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from traceml_ray.identity import ATTEMPT, resolve
from traceml_ray.launchers import rounds, worker_starts


class PlayedAgent:
    """Starts ranks in place of torchrun's agent; returns the attempt that they would report."""

    def _start_workers(self, group: argparse.Namespace) -> int:
        restarts = {"TORCHELASTIC_RESTART_COUNT": "0"}  # the ranks of another node have failed
        return resolve(environ={**os.environ, **restarts}).attempt


@pytest.fixture(autouse=True)
def agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_starts, "LocalElasticAgent", PlayedAgent)


def starts(handler: Any, times: int, between: Any = lambda: None) -> list[int]:
    group = argparse.Namespace(spec=argparse.Namespace(rdzv_handler=handler))
    numbers = []
    with rounds.numbering():
        for _ in range(times):
            between()
            numbers.append(PlayedAgent()._start_workers(group))  # type: ignore[arg-type]
    assert ATTEMPT not in os.environ
    return numbers


def test_ranks_have_the_number_of_their_rendezvous(tmp_path: Path) -> None:
    parameters = RendezvousParameters("c10d", str(tmp_path / "store"), "job", 1, 1, store_type="file")
    backend, store = create_backend(parameters)
    handler = create_handler(store, backend, parameters)
    try:
        assert starts(handler, 3, handler.next_rendezvous) == [0, 1, 2]
    finally:
        handler.shutdown()


@pytest.mark.parametrize("handler", [object(), argparse.Namespace(_state_holder=None), None])
def test_ranks_have_the_count_of_torchrun_if_there_is_no_common_number(handler: object) -> None:
    assert starts(handler, 2) == [0, 0]
