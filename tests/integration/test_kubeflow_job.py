"""A launched job posts its progress to the server that the environment of its pod names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kubeflow_server import StatusServer

SCRIPT = """
import time, torch
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(300):
    time.sleep(0.05)
    optimizer.zero_grad()
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here"),
]


def test_a_launched_job_posts_its_progress_up_to_its_end(tmp_path: Path) -> None:
    server = StatusServer(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [
        *(sys.executable, "-m", "traceml_ray.launch", "--nproc-per-node", "2", "--session", "job"),
        *("--sessions", str(tmp_path / "sessions"), "--kubeflow", "--total-steps", "300", str(script)),
    ]
    environ = {**os.environ, **server.environ(), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-2000:]
    server.close()
    statuses = [post["trainerStatus"] for post in server.posts]
    progress = [status["progressPercentage"] for status in statuses]
    assert len(progress) > 1
    assert progress == sorted(progress)
    assert progress[0] < 100 == progress[-1]
    assert statuses[0]["estimatedRemainingSeconds"] > 0 == statuses[-1]["estimatedRemainingSeconds"]
    assert {metric["name"]: metric["value"] for metric in statuses[-1]["metrics"]}["step"] == "299"
    written = b"".join(path.read_bytes() for path in (tmp_path / "sessions").rglob("*") if path.is_file())
    assert server.token.encode() not in written + ran.stdout.encode() + ran.stderr.encode()
