"""
A real Prometheus scrapes a launch that goes on: the alert on a planted straggler fires, and is resolved when
the rank is as fast as its peer again. Needs `prometheus` and `promtool` (Debian: prometheus).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from grafana import INTERVAL_S, QUESTIONS, RANGE_S, VARIABLES, filled
from played import Played
from prometheus_client.parser import text_string_to_metric_families
from ray_cluster import until
from switched_straggler import SCRIPT, running

from traceml_ray.launchers.cluster import free_port
from traceml_ray.signals.logged.records import LoggedValues
from traceml_ray.sinks.prometheus import Metrics
from traceml_ray.views.session_poll import SessionPoll

RULES = Path(__file__).parents[2] / "integrations" / "prometheus"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no prometheus here"),
]


def test_the_rules_are_valid_and_alert_as_they_should() -> None:
    for command in (["check", "rules", "traceml.rules.yml"], ["test", "rules", "traceml.rules.test.yml"]):
        subprocess.run(["promtool", *command], cwd=RULES, check=True, timeout=60)


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


def test_configuration_in_the_documentation_is_valid(tmp_path: Path) -> None:
    page = (RULES.parents[1] / "docs" / "read" / "prometheus.md").read_text()
    (config,) = re.findall(r"```yaml\n(global:.*?)```", page, re.DOTALL)
    (tmp_path / "prometheus.yml").write_text(config)
    shutil.copy(RULES / "traceml.rules.yml", tmp_path)
    subprocess.run(["promtool", "check", "config", "prometheus.yml"], cwd=tmp_path, check=True, timeout=60)


class Logging(Played):
    """A played session whose ranks log a loss. GPU 0 of each rank grows."""

    def _batch(self, rank: Any, rows: np.ndarray, **fields: Any) -> bytes:
        last = self.step + len(rows) - 1
        loss = LoggedValues("loss", self.step, last, len(rows), 1.0, 2.0, last=1.5)
        return super()._batch(rank, rows, **{"logged": [loss], **fields})


def recorded(folder: Path, end_s: float) -> str:
    """
    Return what a session exposes in the `RANGE_S` seconds before `end_s`, every `INTERVAL_S` / 4 s, as
    OpenMetrics with times. The session is of job `training`.
    """
    played = Logging(folder, onset=50)
    session = SessionPoll(played.source, clock=played.clock, timer=played.clock.timer)
    samples: list[tuple[str, float, float]] = []
    for age_s in range(RANGE_S, -1, -INTERVAL_S // 4):
        played.play(10)
        session.poll()
        for family in text_string_to_metric_families(Metrics(session).exposition()[0].decode()):
            for name, labels, value, *_ in family.samples:
                where = {**labels, "job": "training", "instance": "node-a:9464"}
                pairs = ",".join(f"{key}={json.dumps(text)}" for key, text in where.items())
                samples.append((f"{name}{{{pairs}}}", end_s - age_s, value))
    played.aggregator.close()
    lines = [f"{series} {value!r} {time_s}" for series, time_s, value in sorted(samples)]
    return "\n".join([*lines, "# EOF", ""])


def asked_of(port: int, path: str, **parameters: str) -> Any:
    """Return what Prometheus answers. An expression that it cannot read is an error, with its text."""
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{parameters}: {error.read().decode()}") from None


def values_of(port: int, query: str, end_s: float, **chosen: str) -> list[str]:
    """Return the values of a variable of the dashboard, `label_values(series, label)`, as Grafana asks."""
    series, label = query.removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
    during = {"start": str(end_s - RANGE_S), "end": str(end_s)}
    values: list[str] = asked_of(
        port, f"label/{label}/values", **{"match[]": filled(series, **chosen)}, **during
    )
    return values


def test_every_panel_of_the_dashboard_has_series_of_a_session(tmp_path: Path) -> None:
    end_s, port, data = float(1_700_000_000 // 7200 * 7200 + 3600), free_port(), tmp_path / "tsdb"
    (tmp_path / "metrics.txt").write_text(recorded(tmp_path / "played", end_s))
    (tmp_path / "prometheus.yml").write_text("")
    blocks = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "metrics.txt", str(data)]
    subprocess.run(blocks, cwd=tmp_path, check=True, timeout=120, capture_output=True)
    serve = [
        *("prometheus", f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={data}"),
        *("--storage.tsdb.retention.time=100y", f"--web.listen-address=127.0.0.1:{port}"),
    ]
    with running(serve, tmp_path / "prometheus.log"):
        until(lambda: is_ready(port), "Prometheus", 60)
        chosen: dict[str, str] = {}
        for variable in VARIABLES:
            if variable["type"] == "query":
                values = values_of(port, variable["query"]["query"], end_s, **chosen)
                assert values == {"job": ["training"], "run": ["job"]}[variable["name"]]
                chosen[variable["name"]] = "|".join(values)
        for question in QUESTIONS:
            panel, target = question
            during = {"start": str(end_s - RANGE_S), "end": str(end_s), "step": str(INTERVAL_S // 4)}
            query = filled(target["expr"], **chosen)
            if target.get("instant"):
                series = asked_of(port, "query", query=query, time=str(end_s))["result"]
            else:
                series = asked_of(port, "query_range", query=query, **during)["result"]
            assert series, (panel["title"], query)
            labels = set.intersection(*(set(one["metric"]) for one in series))
            assert set(question.legend_labels) <= labels, (panel["title"], labels)
        lines = [(p["title"], t) for p, t in QUESTIONS if p["type"] == "state-timeline"]
        for title, target in lines:
            query = filled(target["expr"], **chosen)
            for one in asked_of(port, "query_range", query=query, **during)["result"]:
                assert len(one["values"]) == RANGE_S // (INTERVAL_S // 4) + 1, f"{title} has gaps"
                assert {value for _, value in one["values"]} <= {"0", "1"}


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


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
