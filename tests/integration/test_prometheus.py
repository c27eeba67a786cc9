"""
A real Prometheus scrapes a launch that goes on: the alert on a planted straggler fires, and is resolved when
the rank is as fast as its peer again. Needs `prometheus` and `promtool` (Debian: prometheus).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray_cluster import until

from traceml_ray.launchers.cluster import free_port

RULES = Path(__file__).parents[2] / "integrations" / "prometheus"
SCRIPT = """
import os, sys, time, torch
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
rank, folder = dist.get_rank(), sys.argv[1]
batches = torch.utils.data.DataLoader([torch.ones(64)] * 100_000, batch_size=4)
for x in batches:
    time.sleep(0.02)
    if rank == 1 and os.path.exists(folder + "/late"):
        time.sleep(0.04)
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    end = torch.tensor(float(os.path.exists(folder + "/end")))
    dist.all_reduce(end)
    if end:
        break
dist.destroy_process_group()
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no prometheus here"),
]


def test_the_rules_are_valid_and_alert_as_they_should() -> None:
    for command in (["check", "rules", "traceml.rules.yml"], ["test", "rules", "traceml.rules.test.yml"]):
        subprocess.run(["promtool", *command], cwd=RULES, check=True, timeout=60)


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def quick_rules(folder: Path) -> Path:
    """Write the rules as they are, but each holds for 2 s."""
    rules = yaml.safe_load((RULES / "traceml.rules.yml").read_text())
    for rule in rules["groups"][0]["rules"]:
        rule["for"] = "2s" if "for" in rule else "0s"
    path = folder / "rules.yml"
    path.write_text(yaml.safe_dump(rules))
    return path


def firing(port: int) -> dict[str, str]:
    """Return the summaries of the alerts that fire, by name."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/alerts", timeout=10) as answer:
            alerts: list[dict[str, Any]] = json.load(answer)["data"]["alerts"]
    except OSError:
        return {}
    return {
        alert["labels"]["alertname"]: alert["annotations"]["summary"]
        for alert in alerts
        if alert["state"] == "firing"
    }


def test_an_alert_fires_and_is_resolved(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    metrics, port = free_port(), free_port()
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(quick_rules(tmp_path))],
        "scrape_configs": [
            {"job_name": "traceml", "static_configs": [{"targets": [f"127.0.0.1:{metrics}"]}]}
        ],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    scrape = [
        *("prometheus", f"--config.file={tmp_path / 'prometheus.yml'}"),
        *(f"--storage.tsdb.path={tmp_path / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}"),
    ]
    train = [
        *(sys.executable, "-m", "traceml_ray.launch", "--nproc-per-node", "2", "--session", "scraped"),
        *("--sessions", str(tmp_path / "sessions"), "--metrics-port", str(metrics)),
        *(str(script), str(tmp_path)),
    ]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with running(train, tmp_path / "train.log") as job, running(scrape, tmp_path / "prometheus.log"):
        (tmp_path / "late").touch()
        until(lambda: "TrainingStraggler" in firing(port), "an alert", 180)
        summary = firing(port)["TrainingStraggler"]
        assert summary.startswith("straggler: rank 1 on ") and summary.endswith(", in prepare"), summary
        (tmp_path / "late").unlink()
        until(lambda: not firing(port), "no alert any more", 180)
        (tmp_path / "end").touch()
        assert job.wait(120) == 0, (tmp_path / "train.log").read_text()[-2000:]
