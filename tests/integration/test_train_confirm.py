"""Ray Train restarts a straggler: its node is checked before the workers start again."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray.train")

import ray
import ray.cloudpickle
import torch
from check_rigs import FINE_US, first_cpu, hold_back, put, slow_cpu, why_no_cgroups
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray_cluster import fake_cluster

import traceml_ray

NODES = 3
WAIT_S = 100.0


def train(config: dict[str, Any]) -> None:
    """
    Compute for 60 ms a step, one rank after the other: their machines share cores here. All ranks of the
    first attempt fail after the same step.
    """
    torch.manual_seed(0)
    model: Any = ray.train.torch.prepare_model(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    folder, rank = Path(config["folder"]), ray.train.get_context().get_world_rank()
    is_first, last = not (folder / f"failed-{rank}").exists(), torch.zeros(1)
    (folder / f"pid-{'first' if is_first else 'second'}-{rank}").write_text(str(os.getpid()))
    while not last:
        model(torch.ones(64, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.07 * rank)
        end = time.thread_time() + 0.06
        while time.thread_time() < end:
            pass
        time.sleep(0.07 * (NODES - 1 - rank) + 0.1 * (rank == config["asleep"]))
        last[0] = (folder / ("fail" if is_first else "end")).exists()
        torch.distributed.all_reduce(last)
    if is_first:
        (folder / f"failed-{rank}").touch()
        torch.distributed.barrier()
        raise RuntimeError("planted")


def wait(done: Callable[[], Any]) -> Any:
    """Return the first true result of `done`, or its last one: the job must go on, or it would not end."""
    end = time.monotonic() + WAIT_S
    while not (result := done()) and time.monotonic() < end:
        time.sleep(0.5)
    return result


def straggler(session: Any) -> Any:
    """Return the straggler that a session names; None: it names none."""
    with contextlib.suppress(RuntimeError):  # no rank is there yet
        return next((finding for finding in session.findings() if finding.label == "straggler"), None)
    return None


def is_judged(session: Any) -> bool:
    """Return whether a straggler is confirmed, or not."""
    named = straggler(session)
    return named is not None and "confirmed" in named.evidence


def trained(folder: Path, steer: Callable[[Any], None], asleep: int) -> dict[str, Any]:
    """Train two attempts, and return the summary. `steer` says when they end, in a thread."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests
    session = traceml_ray.start(session="s", out=folder / "out", interval=0.2, confirm="restart")

    def steered() -> None:
        try:
            steer(session)
        finally:
            for name in ("fail", "end"):
                (folder / name).touch()

    threading.Thread(target=steered, daemon=True).start()
    TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "asleep": asleep},
        scaling_config=ScalingConfig(num_workers=NODES, placement_strategy="STRICT_SPREAD"),
        run_config=RunConfig(storage_path=str(folder), failure_config=FailureConfig(max_failures=1)),
    ).fit()
    session.stop()
    summary: dict[str, Any] = json.loads((session.folder / "summary.json").read_text())
    notes = [event["message"] for event in summary["events"] if event["kind"] == "note"]
    assert [note for note in notes if note.startswith("check: ")], (notes, summary["findings"])
    report = " ".join((session.folder / "report.txt").read_text().split())
    return {"named": {one["label"]: one for one in summary["findings"]}, "notes": notes, "report": report}


@pytest.mark.long
@pytest.mark.timeout(400)
def test_straggler_that_sleeps_is_not_the_fault_of_its_node(tmp_path: Path) -> None:
    def steer(session: Any) -> None:
        wait(lambda: straggler(session))
        (tmp_path / "fail").touch()
        wait(lambda: is_judged(session))

    with fake_cluster(NODES, 1):
        result = trained(tmp_path, steer, asleep=1)
    named = result["named"]["straggler"]
    assert named["ranks"] == [1] and "slow_node" not in result["named"], result
    assert named["evidence"]["confirmed"] is False, result
    why = "Not confirmed by a check at the restart: "
    assert why in named["why"] and why in result["report"]


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(why_no_cgroups()), reason=why_no_cgroups())
def test_straggler_on_a_node_with_less_cpu_is_the_fault_of_its_node(tmp_path: Path) -> None:
    with fake_cluster(NODES, 1) as cluster, first_cpu() as first, slow_cpu(0.6, FINE_US) as cgroup:
        raylets = [node.all_processes["raylet"][0].process.pid for node in (cluster.head, *cluster.others)]
        put(first, raylets)

        def pids(attempt: str) -> list[int]:
            files = [tmp_path / f"pid-{attempt}-{rank}" for rank in range(NODES)]
            return [int(file.read_text() or 0) for file in files if file.exists()]

        def steer(session: Any) -> None:
            wait(lambda: len(pids("first")) == NODES and all(pids("first")))
            # Only while the ranks compute: a process of a check takes long to start with so little.
            hold_back(cgroup, 0.2)
            put(cgroup, [psutil.Process(pids("first")[1]).ppid()])
            wait(lambda: straggler(session))
            hold_back(cgroup, 0.6)
            (tmp_path / "fail").touch()
            wait(lambda: len(pids("second")) == NODES and all(pids("second")))
            hold_back(cgroup, 0.2)
            wait(lambda: is_judged(session))
            hold_back(cgroup, 0.6)

        result = trained(tmp_path, steer, asleep=-1)
    named = result["named"]["straggler"]
    assert named["evidence"]["confirmed"] is True, result
    why = "Confirmed by a check at the restart: The CPU of "
    assert why in named["why"] and why in result["report"], result
    assert "The CPU quota of its container allows 1.2 of 2 cores." in named["why"]
