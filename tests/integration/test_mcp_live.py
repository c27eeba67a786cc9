"""A coding agent beside three ranks that train: a server of its own profiles them and reads their stacks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters
from mcp.types import TextContent
from watched_job import WORLD, Job

from traceml_ray.monitor import captures
from traceml_ray.store.bundles import bundles_of
from traceml_ray.store.profiles import profiles_of

SCRIPT = """
import os
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=3)
model = DistributedDataParallel(nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def pause():
    time.sleep(0.02)

over = torch.zeros(1)
while not over:
    pause()
    model(torch.ones(4, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    over = torch.tensor(float(os.path.exists("stop")))
    dist.all_reduce(over)
dist.destroy_process_group()
"""


@pytest.mark.long
def test_running_job_is_profiled_and_says_where_its_ranks_are_and_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "AHEAD_S", 1.2)  # everything is near here
    job = Job(tmp_path, SCRIPT, auto_profile=0)
    try:
        job.wait_for_steps(20)
        answers = anyio.run(_ask, tmp_path)
        assert job.end() == [0] * WORLD, job.errors()
        assert job.errors() == [""] * WORLD
    finally:
        job.close()
    status, profiled, operations, dumped = answers
    assert status["live"] and status["status"]["status"] == "running"
    (stored,) = profiles_of(job.session.path)
    assert profiled["path"] == str(stored.path)
    assert [rank["state"] for rank in profiled["profile"]["ranks"]] == ["captured"] * WORLD
    assert (operations["id"], operations["rank"]) == (stored.profile.id, 1)
    assert "aten::addmm" in {operation["name"] for operation in operations["operations"]}
    (bundle,) = bundles_of(job.session.path)
    assert (dumped["bundle"], bundle.manifest.reason) == (str(bundle.path), "request")
    assert sum(group["count"] for group in dumped["stacks"]) == WORLD
    assert all("train.py" in group["stacks"] for group in dumped["stacks"])


async def _ask(folder: Path) -> list[Any]:
    """Return what the tools answer."""
    arguments = ["-m", "traceml_ray.cli", "mcp", "--sessions", str(folder)]
    command = StdioServerParameters(command=sys.executable, args=arguments)
    asked: dict[str, dict[str, Any]] = {
        "get_status": {},
        "profile": {"steps": 2},
        "get_profile": {"rank": 1, "most": 200},
        "dump_stacks": {"session": "s"},
    }
    answers = []
    async with Client(command, read_timeout_seconds=120) as client:
        for tool, given in asked.items():
            (content,) = (await client.call_tool(tool, given)).content
            assert isinstance(content, TextContent)
            answers.append(json.loads(content.text))
    return answers
