"""A part that is slow on one rank, under the launcher: the verdict names it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from integration.test_faults import GAIN_TOLERANCE, check_ledger, launch, summary_of

SCRIPT = """
import time
import torch
import torch.distributed as dist
import traceml_ray
from torch import nn
from torch.utils.data import DataLoader

dist.init_process_group("gloo")

class State:
    def __reduce__(self):
        time.sleep(0.02 if dist.get_rank() == 1 else 0.001)
        return dict, ()

net = nn.parallel.DistributedDataParallel(nn.Linear(16, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for batch in DataLoader([torch.ones(16)] * 240, batch_size=2):
    time.sleep(0.005)
    net(batch).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with traceml_ray.stage("keep"):
        time.sleep(0.002)
        torch.save(State(), "/dev/null")
if dist.get_rank() == 1:
    with traceml_ray.stage("goodbye"):
        time.sleep(2)  # after the last step: part of no row
dist.barrier()
dist.destroy_process_group()
"""


def test_slow_checkpoint_inside_a_user_stage_is_named_with_its_cost(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = launch(tmp_path, "s", 2, 120, script=(str(script),))
    assert done.returncode == 0, done.stderr[-4000:]
    summary = summary_of(tmp_path, "s")
    verdict = summary["verdict"]
    named = verdict["label"], verdict["stage"], verdict["rank"], verdict["span"]
    assert named == ("straggler", "post_sync", 1, "checkpoint"), verdict["why"]
    planted = 19 / sum(stage["exposed_ms"] for stage in summary["stages"])
    assert verdict["cost_pct"] / 100 == pytest.approx(planted, rel=GAIN_TOLERANCE)
    assert "straggler: rank 1" in done.stderr
    assert summary["verdicts"][-1]["span"] == "checkpoint"
    parts = {part["name"]: part for part in summary["spans"] if part["stage"] == "post_sync"}
    assert parts["checkpoint"]["worst_rank"] == parts["keep"]["worst_rank"] == 1
    assert 20 < parts["checkpoint"]["max_ms"] < parts["keep"]["max_ms"]
    assert 0.5 < parts["checkpoint"]["share"] < parts["keep"]["share"] <= 1
    assert parts.get("goodbye", {"max_ms": 0.0})["max_ms"] == 0.0
    report = (tmp_path / "s" / "report.txt").read_text()
    assert re.search(r"In `checkpoint`, rank 1 takes [\d.]+ ms longer per step", " ".join(report.split()))
    assert "Parts inside the stages" in report
    check_ledger(summary, 2, 120)
