"""`/metrics`, read by Prometheus' own parsers in both of its formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from played import Played
from prometheus_client.core import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from traceml_ray.analysis.labels import LABELS
from traceml_ray.dash_app.session_pages import SessionPages
from traceml_ray.sinks.prometheus import Metrics, health

Parse = Callable[[str], Iterable[Metric]]


@pytest.fixture
def pages(tmp_path: Path) -> SessionPages:
    played = Played(tmp_path / "demo")
    played.memory_s = 5
    pages = SessionPages(played.source, clock=played.clock, timer=played.clock.timer)
    for _ in range(30):
        played.play()
        pages.poll()
    return pages


def values(body: bytes, parse: Parse) -> dict[str, dict[frozenset[str], float]]:
    """Return the samples by name and values of the labels."""
    series: dict[str, dict[frozenset[str], float]] = {}
    for family in parse(body.decode()):
        assert family.samples and family.documentation, family
        for sample in family.samples:
            assert sample.value == sample.value, sample
            labels = frozenset(sample.labels.values())
            assert labels not in series.setdefault(sample.name, {}), sample
            series[sample.name][labels] = sample.value
    return series


def test_metrics_hold_verdict_ledger_and_ranks(pages: SessionPages) -> None:
    body, content_type = Metrics(pages).exposition()
    metrics_read = values(body, text_string_to_metric_families)
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert b"# TYPE traceml_rank_busy_seconds gauge\n" in body and b"# EOF" not in body
    assert metrics_read["traceml_verdict"] == {
        frozenset({"job", label}): float(label == "straggler") for label in LABELS
    }
    assert metrics_read["traceml_verdict_info"] == {frozenset({"job", "straggler", "data", "5", "host-1"}): 1}
    assert metrics_read["traceml_rows_total"][frozenset({"stored"})] == 8 * 150
    assert metrics_read["traceml_ranks"][frozenset({"job", "reporting"})] == 8
    assert len(metrics_read["traceml_rank_busy_seconds"]) == 8


def test_metrics_have_how_long_gpus_wait_for_their_hosts(tmp_path: Path) -> None:
    played = Played(tmp_path / "demo", device=True)
    played.memory_s = 5
    pages = SessionPages(played.source, clock=played.clock, timer=played.clock.timer)
    for _ in range(60):
        played.play()
    pages.poll()
    idle = values(Metrics(pages).exposition()[0], text_string_to_metric_families)[
        "traceml_rank_gpu_idle_ratio"
    ]
    assert len(idle) == 8
    assert 0.4 < idle.pop(frozenset({"job", "5", "host-1"})) < 0.5
    assert max(idle.values()) < 0.1


def test_metrics_of_nodes_follow_the_table_of_quantities(pages: SessionPages) -> None:
    metrics_read = values(Metrics(pages).exposition()[0], text_string_to_metric_families)
    node, device = frozenset({"job", "host-1"}), frozenset({"job", "host-1", "1"})
    assert metrics_read["traceml_node_cpu_ratio"][node] == 0.5
    assert metrics_read["traceml_node_net_rx_bytes_total"][node] > 1 << 27
    assert metrics_read["traceml_gpu_mem_total_bytes"][device] == 140 * (1 << 30)
    assert metrics_read["traceml_gpu_sm_hertz"][device] > 1e9
    assert metrics_read["traceml_node_psi_io_ratio"][node] == 0.02


def test_metrics_are_openmetrics_on_request(pages: SessionPages) -> None:
    body, content_type = Metrics(pages).exposition(
        "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
    )
    assert content_type.startswith("application/openmetrics-text; version=1.0.0; charset=utf-8")
    assert body.endswith(b"# EOF\n") and b"# UNIT traceml_step_seconds seconds\n" in body
    metrics_read = values(body, openmetrics.text_string_to_metric_families)
    assert metrics_read == values(Metrics(pages).exposition()[0], text_string_to_metric_families)


@pytest.mark.parametrize(
    "accept", ["application/openmetrics-text; version=x", "text/plain;version=1.y", ",;;="]
)
def test_metrics_are_plain_text_for_an_invalid_header(pages: SessionPages, accept: str) -> None:
    assert Metrics(pages).exposition(accept)[1] == "text/plain; version=0.0.4; charset=utf-8"


def test_metrics_of_a_session_without_ranks_have_only_its_state(tmp_path: Path) -> None:
    played = Played(tmp_path / "demo")
    played.memory_s = 5
    pages = SessionPages(played.source, clock=played.clock, timer=played.clock.timer)
    assert health(pages) == {"status": "ok", "state": "empty"}
    metrics_read = values(Metrics(pages).exposition()[0], text_string_to_metric_families)
    assert metrics_read["traceml_state"][frozenset({"empty"})] == 1
    assert sum(metrics_read["traceml_state"].values()) == 1
    assert not {"traceml_step_seconds", "traceml_node_cpu_ratio", "traceml_verdict"} & metrics_read.keys()
