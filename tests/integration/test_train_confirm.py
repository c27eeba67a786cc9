"""Ray Train restarts a straggler: its node is checked before the workers start again."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.train")

import ray
import ray.cloudpickle
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray_cluster import fake_cluster

import traceml_ray

NODES = 3
WAIT_S = 160.0


def train_that_sleeps(config: dict[str, Any]) -> None:
    """Rank 1 sleeps 50 ms a step. All ranks of the first attempt fail after the same step."""
    torch.manual_seed(0)
    model: Any = ray.train.torch.prepare_model(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    folder, rank = Path(config["folder"]), ray.train.get_context().get_world_rank()
    is_first, last = not (folder / f"failed-{rank}").exists(), torch.zeros(1)
    while not last:
        model(torch.ones(64, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05 * (rank == 1))
        last[0] = (folder / ("fail" if is_first else "end")).exists()
        torch.distributed.all_reduce(last)
    if is_first:
        (folder / f"failed-{rank}").touch()
        torch.distributed.barrier()
        raise RuntimeError("planted")


def steer(session: Any, folder: Path) -> None:
    """Have the first attempt fail when a straggler is known, and the second one end when it is judged."""
    for what in ("fail", "end"):
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            with contextlib.suppress(RuntimeError):  # no rank is there yet
                named = {finding.label: finding for finding in session.findings()}
                if "straggler" in named and (what == "fail" or "confirmed" in named["straggler"].evidence):
                    break
            time.sleep(0.5)
        (folder / what).touch()  # else the job would not end


@pytest.mark.long
@pytest.mark.timeout(400)
def test_straggler_that_sleeps_is_not_the_fault_of_its_node(tmp_path: Path) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests
    with fake_cluster(NODES, 1):
        session = traceml_ray.start(session="s", out=tmp_path / "out", interval=0.2, confirm="restart")
        steering = threading.Thread(target=steer, args=(session, tmp_path), daemon=True)
        steering.start()
        TorchTrainer(
            train_that_sleeps,
            train_loop_config={"folder": str(tmp_path)},
            scaling_config=ScalingConfig(num_workers=NODES, placement_strategy="STRICT_SPREAD"),
            run_config=RunConfig(storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=1)),
        ).fit()
        session.stop()
    summary = json.loads((session.folder / "summary.json").read_text())
    notes = [event["message"] for event in summary["events"] if event["kind"] == "note"]
    assert [note for note in notes if note.startswith("check: ")], (notes, summary["findings"])
    named = {finding["label"]: finding for finding in summary["findings"]}
    straggler = named["straggler"]
    assert straggler["ranks"] == [1] and "slow_node" not in named, (named, notes)
    assert straggler["evidence"]["confirmed"] is False, (named, notes)
    why = "Not confirmed by a check at the restart: "
    assert why in straggler["why"] and why in " ".join((session.folder / "report.txt").read_text().split())
