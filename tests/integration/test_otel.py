"""A collector is reached with the variables of launcher or driver; what is secret in them is in no file."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from otlp_collector import Collector

pytest.importorskip("ray.train")
pytest.importorskip("torch")

import ray
import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray_cluster import fake_cluster

import traceml_ray

pytestmark = pytest.mark.long
SECRET = "open-sesame"
SCRIPT = """
import time, torch
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(400):
    time.sleep(0.05 if dist.get_rank() else 0.01)
    optimizer.zero_grad()
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def variables_of(collector: Collector) -> dict[str, str]:
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_EXPORTER_OTLP_HEADERS": f"x-key={SECRET}",
        "OTEL_METRIC_EXPORT_INTERVAL": "1000",
    }


def test_a_launched_job_is_sent_with_its_episode_up_to_its_end(collector: Collector, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [
        *(sys.executable, "-m", "traceml_ray.launch", "--nproc-per-node", "2", "--session", "job", "--otel"),
        *("--sessions", str(tmp_path / "sessions"), str(script)),
    ]
    environ = {**os.environ, **variables_of(collector), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "straggler" in names_of(collector)
    check(collector, tmp_path)


def names_of(collector: Collector) -> list[str]:
    """Return the names of the spans. Waits for the root of an episode, which is sent after the end."""
    deadline = time.monotonic() + 30
    while True:
        bodies = [
            ExportTraceServiceRequest.FromString(body) for body in collector.bodies.get("/v1/traces", [])
        ]
        spans = [s for b in bodies for r in b.resource_spans for scope in r.scope_spans for s in scope.spans]
        if any(not span.parent_span_id for span in spans) or time.monotonic() > deadline:
            return [span.name for span in spans]
        time.sleep(0.2)


def check(collector: Collector, folder: Path) -> None:
    """Check metrics, header and files."""
    assert set(collector.headers) == {SECRET}
    bodies = [ExportMetricsServiceRequest.FromString(body) for body in collector.bodies["/v1/metrics"]]
    names = {m.name for r in bodies[-1].resource_metrics for s in r.scope_metrics for m in s.metrics}
    assert {"traceml.step", "traceml.verdict", "traceml.rank_busy"} <= names
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert len(files) > 3


def train() -> None:
    model = ray.train.torch.prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(100):
        time.sleep(0.02)
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("is_started", [True, False], ids=["started by the driver", "by the callback"])
def test_a_cluster_that_does_not_know_the_variables_has_those_of_the_driver(
    is_started: bool, collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests
    for name in ("TRACEML_SESSION", "TRACEML_OUT", "RAY_TRAIN_CALLBACKS"):
        monkeypatch.delenv(name, raising=False)
    with fake_cluster(cpus=2):
        for name, value in variables_of(collector).items():  # after the cluster has begun
            monkeypatch.setenv(name, value)
        given: dict[str, Any] = {"session": "job", "out": str(tmp_path / "out"), "otel": True}
        session = traceml_ray.start(**given) if is_started else None
        callbacks = [] if is_started else [traceml_ray.TraceMLTrainCallback(**given)]
        TorchTrainer(
            train,
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(name="job", storage_path=str(tmp_path), callbacks=callbacks),
        ).fit()
        if session is not None:
            settings = session.status().settings or {}
            assert settings["otel"] == "True"
            assert SECRET not in str(session.status())
            session.stop()
        check(collector, tmp_path / "out")
