"""
Our metrics in a scrape of a Ray node, beside those of Ray Train, while a trainer of two workers runs, and
after. Needs `ray[default]`: without it Ray serves no metrics.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.train")
pytest.importorskip("torch")
pytest.importorskip("opentelemetry.exporter.prometheus")
pytest.importorskip("aiohttp_cors")

import ray
import ray.train.torch
import torch
from prometheus_client.parser import text_string_to_metric_families
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray_cluster import fake_cluster, until

import traceml_ray
from traceml_ray.launchers.cluster import free_port

pytestmark = pytest.mark.long

Samples = dict[tuple[tuple[str, str], ...], float]


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port at which a cluster's only node serves its metrics. Processes pass theirs on every second."""
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "1000")
    monkeypatch.setenv("RAY_TRAIN_METRICS_ENABLED", "1")
    port = free_port()
    with fake_cluster(cpus=4, metrics_export_port=port):
        yield port


def train(config: dict[str, Any]) -> None:
    """Rank 1 is late, until there is a file `end`. Ray Train has metrics of a worker that reports."""
    model = ray.train.torch.prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in itertools.count():
        if number % 20 == 0:  # Ray drops a series that is not recorded again
            ray.train.report({"number": number})
        time.sleep(0.05 if ray.train.get_context().get_world_rank() else 0.01)
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        end = torch.tensor(float(Path(config["end"]).exists()))
        torch.distributed.all_reduce(end)
        if end:
            return


def scrape(port: int) -> tuple[str, dict[str, Samples]]:
    """Return the lines of a scrape about us and Ray Train, and our samples by name and labels."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            body = answer.read().decode()
    except OSError:
        return "", {}
    samples: dict[str, Samples] = {}
    for family in text_string_to_metric_families(body):
        if family.name.startswith("ray_traceml_"):
            for sample in family.samples:
                samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    lines = [line for line in body.splitlines() if "ray_traceml_" in line or "ray_train_" in line]
    return "\n".join(lines), samples


def of(samples: dict[str, Samples], name: str, **labels: str) -> list[float]:
    return [value for known, value in samples.get(name, {}).items() if labels.items() <= {*known}]


class Scraper(threading.Thread):
    """Scrapes until it has seen the verdict on run `name`, then lets the run end."""

    def __init__(self, port: int, name: str, end: Path) -> None:
        super().__init__(daemon=True)
        self.port, self.name_of_run, self.end = port, name, end
        self.text, self.samples = "", dict[str, Samples]()
        self.start()

    def run(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            self.text, self.samples = scrape(self.port)
            tags = {"ray_train_run_name": self.name_of_run, "label": "straggler"}
            named = of(self.samples, "ray_traceml_verdict", **tags) == [1.0]
            if named and "ray_train_report" in self.text:
                break
            time.sleep(0.5)
        self.end.touch()


def fit(port: int, name: str, folder: Path) -> Scraper:
    """Train as run `name` until its verdict has been scraped; return what was scraped then."""
    scraper = Scraper(port, name, folder / f"end-{name}")
    trainer = TorchTrainer(
        train,
        train_loop_config={"end": str(scraper.end)},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name=name, storage_path=str(folder)),
    )
    trainer.fit()
    scraper.join()
    return scraper


def test_our_metrics_are_among_those_of_ray(port: int, tmp_path: Path) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests
    session = traceml_ray.start(session="gpt", out=str(tmp_path), ray_metrics=True)
    first = fit(port, "first", tmp_path)
    (tmp_path / "scrape.txt").write_text(first.text)
    (run,) = session.runs()
    tags = {"ray_train_run_name": "first", "ray_train_run_id": run.id}
    assert of(first.samples, "ray_traceml_ranks", which="reporting", **tags) == [2.0]
    assert of(first.samples, "ray_traceml_verdict", label="straggler", **tags) == [1.0]
    assert of(first.samples, "ray_traceml_verdict", label="healthy", **tags) == [0.0]
    late = {"ray_train_worker_world_rank": "1", **tags}
    assert of(first.samples, "ray_traceml_verdict_info", label="straggler", **late) == [1.0]
    (busy,) = of(first.samples, "ray_traceml_rank_busy_seconds", **late)
    assert 0.05 < busy < 0.5
    theirs = [line for line in first.text.splitlines() if line.startswith("ray_train_report_total")]
    for line in theirs:
        assert f'ray_train_run_id="{run.id}"' in line and 'ray_train_run_name="first"' in line
    assert any('ray_train_worker_world_rank="1"' in line for line in theirs), "Ray Train has the same tags"
    second = fit(port, "second", tmp_path)
    (tmp_path / "second.txt").write_text(second.text)
    assert of(second.samples, "ray_traceml_ranks", ray_train_run_name="second") == [2.0, 2.0]
    for name, samples in second.samples.items():
        for value in of({name: samples}, name, ray_train_run_name="first"):
            assert value == 0.0 or math.isnan(value), name
    session.stop()
    until(lambda: not scrape(port)[1], "none of ours once the aggregator has ended", 60)
