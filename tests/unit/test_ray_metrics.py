"""Figures of the run among Ray's own metrics: which, with which tags, and how a series ends."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from played import Played, session_of

from traceml_ray.errors import Errors
from traceml_ray.monitor.sink_process import SinkProcess
from traceml_ray.settings import Settings
from traceml_ray.sinks.figures import Family
from traceml_ray.sinks.process import Reporter, opened
from traceml_ray.sinks.ray_metrics import MOST_RANKS, RANK, RUN, RayMetrics, gauges_of
from traceml_ray.sinks.report import report_of
from traceml_ray.sinks.table import wanted
from traceml_ray.store import query
from traceml_ray.store.query import RayGauge
from traceml_ray.views.session_poll import SessionPoll

Recorded = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """The newest value of each series in this process, as Ray keeps it: no series is ever dropped."""
    pytest.importorskip("ray")
    from traceml_ray.ray import gauges

    values: Recorded = {}

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            self.name, self.keys = name, tag_keys

        def set(self, value: float, tags: dict[str, str]) -> None:
            assert tuple(tags) == self.keys
            values[self.name, frozenset(tags.items())] = value

    monkeypatch.setattr(gauges, "Gauge", Gauge)
    monkeypatch.setattr(gauges, "check_served", lambda: None)
    return values


def of(recorded: Recorded, name: str, **tags: str) -> list[float]:
    """Return the values of the series of a gauge that have these tags, too."""
    return [
        value for (known, labels), value in recorded.items() if known == name and tags.items() <= {*labels}
    ]


def series_of(gauges: list[RayGauge], name: str) -> dict[tuple[str, ...], float]:
    (gauge,) = [gauge for gauge in gauges if gauge.name == name]
    return {labels[2:]: value for labels, value in gauge.series}


def test_the_gauges_say_what_the_pages_say_with_the_tags_of_ray_train(played: Played) -> None:
    report = replace(report_of(session_of(played)), run_name="gpt")
    gauges = gauges_of(report)
    for gauge in gauges:
        assert gauge.tags[:2] == ("ray_train_run_name", "ray_train_run_id")
        assert {labels[:2] for labels, _ in gauge.series} == {("gpt", report.run)}
    verdict = series_of(gauges, "traceml_verdict")
    assert (len(verdict), verdict["straggler",], sum(verdict.values())) == (13, 1.0, 1.0)
    assert series_of(gauges, "traceml_verdict_info") == {("straggler", "data", "5", "host-1"): 1.0}
    assert series_of(gauges, "traceml_ranks") == {("expected",): 8.0, ("reporting",): 8.0}
    assert series_of(gauges, "traceml_last_step") == {(): 149.0}
    assert 0.02 < series_of(gauges, "traceml_step_seconds")["0.5",] < 0.04
    assert "data" in {stage for (stage,) in series_of(gauges, "traceml_exposed_seconds")}
    assert 0.1 < series_of(gauges, "traceml_verdict_cost_ratio")[()] < 0.6
    (busy,) = (gauge for gauge in gauges if gauge.name == "traceml_rank_busy_seconds")
    assert busy.tags[2:] == ("ray_train_worker_world_rank", "node")
    assert [labels[2] for labels, _ in busy.series] == [str(rank) for rank in range(8)]


def test_the_tags_are_those_of_ray_train() -> None:
    base = pytest.importorskip("ray.train.v2._internal.metrics.base")
    worker = pytest.importorskip("ray.train.v2._internal.metrics.worker")
    assert (base.RUN_NAME_TAG_KEY, base.RUN_ID_TAG_KEY) == RUN
    assert worker.WORKER_WORLD_RANK_TAG_KEY == RANK


def test_of_many_ranks_only_the_slowest_has_a_series(played: Played) -> None:
    report = report_of(session_of(played))
    series = [((report.run or "", str(rank), "host"), float(rank)) for rank in range(MOST_RANKS + 1)]
    family = Family("rank_busy", "about", ("run", "rank", "node"), series, "seconds")
    gauges = gauges_of(replace(report, figures=(family,)))
    assert series_of(gauges, "traceml_rank_busy_seconds") == {(str(MOST_RANKS), "host"): MOST_RANKS}
    gauges = gauges_of(replace(report, figures=(replace(family, series=series[1:]),)))
    assert len(series_of(gauges, "traceml_rank_busy_seconds")) == MOST_RANKS


def test_what_is_gone_keeps_no_old_value(recorded: Recorded) -> None:
    from traceml_ray.ray.gauges import RayGauges

    def busy(*ranks: str) -> RayGauge:
        return RayGauge("busy", "about", ("rank",), [((rank,), 0.5) for rank in ranks])

    ranks = RayGauge("ranks", "about", ("run",), [(("a",), 8.0)], 0.0)
    gauges = RayGauges()
    gauges.set([busy("0", "1"), ranks])
    gauges.set([busy("1")])
    assert math.isnan(*of(recorded, "busy", rank="0"))
    assert of(recorded, "busy", rank="1") == [0.5]
    assert of(recorded, "ranks") == [0.0]
    recorded.clear()
    gauges.set([busy("1")])
    assert [*recorded] == [("busy", frozenset({("rank", "1")}))], "a series ends once"
    gauges.set([])
    assert math.isnan(*of(recorded, "busy", rank="1"))


def watched(tmp_path: Path) -> Played:
    """Return a session of four ranks whose aggregator records gauges."""
    from traceml_ray.ray.gauges import RayGauges

    played = Played(tmp_path / "demo", world=4, late=None, job_id="one")
    played.aggregator._answers._gauges = RayGauges().set
    return played


def tick(played: Played, session: SessionPoll) -> None:
    """Have what is known reported and recorded."""
    session.poll()
    sink = RayMetrics(played.source.reply, every_s=0.0)
    Reporter(session, [sink], 64).report()
    sink.close(time.monotonic() + 240)
    assert (sink.state().failed, sink.state().error) == (0, "")


def test_a_new_run_ends_the_series_of_the_old_one(recorded: Recorded, tmp_path: Path) -> None:
    played = watched(tmp_path)
    session = SessionPoll(played.source, clock=played.clock, timer=played.clock.timer)
    for _ in range(10):
        played.play()
    tick(played, session)
    assert of(recorded, "traceml_ranks", ray_train_run_id="one", which="reporting") == [4.0]
    played.begin(job_id="two")
    for _ in range(10):
        played.play()
    tick(played, session)
    assert of(recorded, "traceml_ranks", ray_train_run_id="two", which="reporting") == [4.0]
    assert {*of(recorded, "traceml_ranks", ray_train_run_id="one")} == {0.0}
    assert {*of(recorded, "traceml_verdict", ray_train_run_id="one")} == {0.0}
    for name in ("traceml_step_seconds", "traceml_rank_busy_seconds", "traceml_last_step"):
        old = of(recorded, name, ray_train_run_id="one")
        assert old and all(map(math.isnan, old)), name
    played.end()
    tick(played, session)
    played.aggregator.close()


def test_an_aggregator_outside_of_ray_says_so(played: Played) -> None:
    with pytest.raises(query.QueryError, match="the aggregator is no process of Ray"):
        query.ask_one(played.source.reply, query.SetRayMetrics([]))
    (kind,) = wanted(Settings(ray_metrics=True))
    session = session_of(played)
    sink = opened(kind, session, Settings())
    Reporter(session, [sink], 4).tick()
    sink.close(time.monotonic() + 240)
    assert (sink.state().failed, sink.state().sent) == (1, 0)


def test_the_series_end_when_the_process_of_the_sinks_does(played: Played) -> None:
    ended: list[bool] = []
    settings = Settings(ray_metrics=True)
    process = SinkProcess(
        played.folder, settings, played.aggregator.query, Errors(), ended=lambda: ended.append(True)
    )
    deadline = time.monotonic() + 240
    while not query.ask_one(played.source.reply, query.GetStatus()).sinks:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not ended
    process.end()
    process.join(240)
    assert ended


@pytest.mark.parametrize(("port", "served"), [(8080, True), (-1, False), (0, False)])
def test_a_ray_that_serves_no_metrics_is_said(
    monkeypatch: pytest.MonkeyPatch, port: int, served: bool
) -> None:
    """Ray gives a node without the agent that serves its metrics the port -1."""
    pytest.importorskip("ray")
    from traceml_ray.ray import gauges

    nodes = [
        {"NodeID": "other", "MetricsExportPort": 8080 - port},
        {"NodeID": "here", "MetricsExportPort": port},
    ]
    context = SimpleNamespace(get_node_id=lambda: "here")
    fake = SimpleNamespace(nodes=lambda: nodes, get_runtime_context=lambda: context)
    monkeypatch.setattr(gauges, "ray", fake)
    gauges.RayGauges().set([])
    if served:
        gauges.check_served()
    else:
        with pytest.raises(query.QueryError, match=r"serves no metrics: .*ray\[default\]"):
            gauges.RayGauges().set([RayGauge("ranks", "about", ("run",), [(("a",), 8.0)])])
