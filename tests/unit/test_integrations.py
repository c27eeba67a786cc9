"""What stands in `integrations/` asks for metrics and labels that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from played import Played
from prometheus_client.parser import text_string_to_metric_families

from traceml_ray.analysis.labels import LABELS
from traceml_ray.sinks.prometheus import STATES, Metrics
from traceml_ray.views.session_poll import SessionPoll

FOLDER = Path(__file__).parents[2] / "integrations"
_ONLY_SOMETIMES = {"traceml_logged", "traceml_throughput"}
"""Metrics of what the played script does not do; `test_logged` and `test_throughput` have them."""
_ADDED = {"job", "instance", "alertname", "severity", "alertstate"}
"""Labels that Prometheus itself adds."""


def expressions() -> list[str]:
    """Return every expression of the dashboard and of the alerts."""
    dashboard = json.loads((FOLDER / "grafana" / "traceml-ray.json").read_text())
    rules = yaml.safe_load((FOLDER / "prometheus" / "traceml.rules.yml").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    asked += [str(one["query"]["query"]) for one in dashboard["templating"]["list"] if one["type"] == "query"]
    return asked + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def labels_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Return the labels of each metric of a session with a straggler, findings, nodes and GPUs."""
    played = Played(tmp_path_factory.mktemp("played") / "demo")
    session = SessionPoll(played.source, clock=played.clock, timer=played.clock.timer)
    for _ in range(30):
        played.play()
        session.poll()
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(Metrics(session).exposition()[0].decode()):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    played.aggregator.close()
    return labels


def test_every_metric_and_label_that_is_asked_for_exists(labels_of: dict[str, set[str]]) -> None:
    asked = expressions()
    names = {name for expression in asked for name in re.findall(r"\btraceml_\w+", expression)}
    assert len(names) > 12
    assert names - _ONLY_SOMETIMES <= labels_of.keys()
    selectors = [pair for expression in asked for pair in re.findall(r"(traceml_\w+)\{([^}]*)\}", expression)]
    for name, selector in selectors:
        matched = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)) - _ADDED
        assert matched <= labels_of.get(name, {"run"}), (name, selector)


def test_every_label_of_a_verdict_and_every_state_that_is_asked_for_exists() -> None:
    for expression in expressions():
        for name, matched in re.findall(r'\b(label|state)=~?"([\w|]+)"', expression):
            known = set(LABELS) if name == "label" else set(STATES)
            assert set(matched.split("|")) <= known, expression
