"""What stands in `integrations/` asks for metrics and labels that there are."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import yaml
from grafana import DASHBOARD, QUESTIONS, VARIABLES
from played import Played
from prometheus_client.parser import text_string_to_metric_families

from traceml_ray.analysis.labels import LABELS
from traceml_ray.sinks.figures import STATES
from traceml_ray.sinks.prometheus import Metrics
from traceml_ray.views.session_poll import SessionPoll

FOLDER = Path(__file__).parents[2] / "integrations"
_ONLY_SOMETIMES = {"traceml_logged", "traceml_throughput"}
"""Metrics of what the played script does not do; `test_logged` and `test_throughput` have them."""
_ADDED = {"job", "instance", "alertname", "severity", "alertstate"}
"""Labels that Prometheus itself adds."""


def expressions() -> list[str]:
    """Return every expression of the dashboard and of the alerts."""
    rules = yaml.safe_load((FOLDER / "prometheus" / "traceml.rules.yml").read_text())
    asked = [question.expression for question in QUESTIONS]
    asked += [str(one["query"]["query"]) for one in VARIABLES if one["type"] == "query"]
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


# -- the dashboard as Grafana reads it -----------------------------------------------------------

UNITS = {
    "seconds": "s",
    "ratio": "percentunit",
    "bytes": "bytes",
    "celsius": "celsius",
    "watts": "watt",
    "hertz": "hertz",
}
"""Unit of Grafana for the unit that the name of a metric ends in."""
_SHOWN = ("x", "y", "w", "h")


def test_dashboard_can_be_imported_and_asks_the_chosen_data_source() -> None:
    """Fields of the dashboard model that an import needs, and that nothing refers to a source of ours."""
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", DASHBOARD["uid"])
    assert DASHBOARD["schemaVersion"] >= 36, "older ones name data sources by their names"
    assert DASHBOARD.get("id") is None, "an import would replace the dashboard with this number"
    sources = re.findall(r'"datasource": (\{.*?"\})', json.dumps(DASHBOARD))
    assert set(sources) == {'{"type": "prometheus", "uid": "${datasource}"}'}
    assert len(sources) > len(QUESTIONS)
    assert DASHBOARD["__inputs"] == [], "the data source is a variable, so an import asks for nothing"
    needed = {(one["type"], one["id"]) for one in DASHBOARD["__requires"]}
    panels = {("panel", panel["type"]) for panel in DASHBOARD["panels"] if panel["type"] != "row"}
    assert needed == {("grafana", "grafana"), ("datasource", "prometheus"), *panels}


def test_every_variable_that_is_used_is_defined_before() -> None:
    defined = {"datasource", "job", "run"}
    assert [variable["name"] for variable in VARIABLES] == ["datasource", "job", "run"]
    builtin = {"__range", "__rate_interval"}
    for expression in [question.expression for question in QUESTIONS]:
        assert set(re.findall(r"\$(\w+)", expression)) <= defined | builtin, expression
        assert '="$' not in expression, "a variable with several values needs =~"
    for number, variable in enumerate(VARIABLES):
        earlier = {other["name"] for other in VARIABLES[:number]} | {"datasource"}
        assert set(re.findall(r"\$\{?(\w+)", json.dumps(variable))) - {"__all"} <= earlier
        if variable["type"] == "query":
            assert variable["multi"] and variable["includeAll"] and variable["refresh"] == 2


def test_panels_lie_within_the_page_beside_each_other_and_below_their_row() -> None:
    places = [(panel, *(panel["gridPos"][name] for name in _SHOWN)) for panel in DASHBOARD["panels"]]
    assert len({panel["id"] for panel, *_ in places}) == len(places)
    for panel, x, y, w, h in places:
        assert min(x, y) >= 0 and min(w, h) > 0 and x + w <= 24, panel["title"]
        assert panel["type"] != "row" or (x, w, h, panel["panels"]) == (0, 24, 1, []), panel["title"]
    for (one, x, y, w, h), (other, x2, y2, w2, h2) in itertools.combinations(places, 2):
        overlap = x < x2 + w2 and x2 < x + w and y < y2 + h2 and y2 < y + h
        assert not overlap, (one["title"], other["title"])
    order = [(y, x) for _, x, y, _, _ in places]
    assert order == sorted(order), "panels are listed in the order in which they are read"
    covered = {
        (column, line) for _, x, y, w, h in places for column in range(x, x + w) for line in range(y, y + h)
    }
    assert len(covered) == 24 * max(y + h for _, _, y, _, h in places), "there is an empty place"


def test_unit_of_a_panel_is_that_of_its_metrics() -> None:
    for panel, target in QUESTIONS:
        expression, unit = target["expr"], panel["fieldConfig"]["defaults"].get("unit")
        for name in re.findall(r"\btraceml_\w+", expression):
            last = name.rpartition("_")[2]
            expected = "rowsps" if last == "total" and "rate(" in expression else UNITS.get(last)
            assert unit == expected, (panel["title"], name)


def test_legend_names_labels_that_the_series_have(labels_of: dict[str, set[str]]) -> None:
    for question in QUESTIONS:
        (name, *_) = re.findall(r"\btraceml_\w+", question.expression)
        grouped = re.search(r"\bby \((.*?)\)", question.expression)
        kept = set(re.split(r",\s*", grouped[1])) if grouped else labels_of.get(name, {"what", "name"})
        assert set(question.legend_labels) <= kept, question.panel["title"]


def test_each_question_of_a_panel_has_a_letter_of_its_own() -> None:
    for panel in DASHBOARD["panels"]:
        letters = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(letters)) == len(letters), panel["title"]
        tables = {target.get("format") for target in panel.get("targets", ())}
        assert (panel["type"] == "table") == (tables == {"table"}), panel["title"]
