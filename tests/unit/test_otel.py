"""The session as OpenTelemetry has it: in memory by the SDK's exporters, and as a collector gets it."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from otlp_collector import Collector
from played import Played, session_of

from traceml_ray.settings import Settings
from traceml_ray.signals.finding import Finding
from traceml_ray.sinks import otel, otel_spans, process
from traceml_ray.sinks.otel import OpenTelemetry, Outcomes, exporter_of, opened, resource_of, shown
from traceml_ray.sinks.otel_spans import EpisodeSpans, Ids
from traceml_ray.sinks.report import Report, report_of
from traceml_ray.sinks.sink import Unusable
from traceml_ray.sinks.table import wanted
from traceml_ray.store import query
from traceml_ray.store.results import SinkState
from traceml_ray.views.session_poll import SessionPoll

SETTINGS = Settings(otel=True)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the machine, and time-outs that no machine is too busy for."""
    for name in ("ENDPOINT", "HEADERS", "PROTOCOL"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "240")
    monkeypatch.setattr(otel, "_FLUSH_S", 240.0)


class Kept(MetricExporter):
    """An exporter that keeps the metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.exports: list[MetricsData] = []

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 0, **kwargs: Any
    ) -> MetricExportResult:
        self.exports.append(metrics_data)
        return MetricExportResult.SUCCESS

    def shutdown(self, timeout_millis: float = 0, **kwargs: Any) -> None: ...

    def force_flush(self, timeout_millis: float = 0) -> bool:
        return True

    def points(self, name: str) -> dict[tuple[str, ...], float]:
        """Return the points of a metric in the newest export, by their attributes but `run`."""
        (resource,) = self.exports[-1].resource_metrics
        (metric,) = (m for scope in resource.scope_metrics for m in scope.metrics if m.name == name)
        return {
            tuple(value for label, value in point.attributes.items() if label != "run"): point.value
            for point in metric.data.data_points
        }

    def metric(self, name: str) -> Any:
        (resource,) = self.exports[-1].resource_metrics
        return next(m for scope in resource.scope_metrics for m in scope.metrics if m.name == name)


class Memory:
    """The sink, with exporters that keep what they get."""

    def __init__(self, session: SessionPoll) -> None:
        self.metrics, self.spans = Kept(), InMemorySpanExporter()
        self.sink = OpenTelemetry(
            session,
            SETTINGS,
            "memory",
            Outcomes(),
            lambda: PeriodicExportingMetricReader(self.metrics),
            lambda: SimpleSpanProcessor(self.spans),
        )

    def take(self, report: Report, spans: int) -> list[ReadableSpan]:
        """Offer a report; return all spans once there are so many."""
        self.sink.offer(report)
        wait_until(lambda: len(self.spans.get_finished_spans()) >= spans)
        return [*self.spans.get_finished_spans()]

    def end(self) -> list[ReadableSpan]:
        self.sink.close(time.monotonic() + 240)
        return [*self.spans.get_finished_spans()]


def wait_until(is_so: Callable[[], bool], timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.02)


def attributes(span: ReadableSpan, *names: str) -> tuple[Any, ...]:
    return tuple((span.attributes or {}).get(f"traceml.{name}") for name in names)


def test_figures_are_metrics_in_base_units(played: Played) -> None:
    memory = Memory(session_of(played))
    memory.sink.offer(report_of(session_of(played)))
    memory.end()
    metrics = memory.metrics
    assert metrics.points("traceml.verdict_info") == {("straggler", "data", "5", "host-1"): 1}
    assert metrics.points("traceml.ranks") == {("expected",): 8, ("reporting",): 8}
    assert metrics.points("traceml.rank_busy")["5", "host-1"] == pytest.approx(0.031, abs=0.005)
    assert metrics.metric("traceml.rank_busy").unit == "s"
    assert metrics.metric("traceml.verdict_cost").unit == "1"
    assert metrics.metric("traceml.node_mem_used").unit == "By"
    rows = metrics.metric("traceml.rows")
    assert (rows.unit, rows.data.is_monotonic) == ("", True)
    assert metrics.points("traceml.rows")["stored",] == 1200
    (resource,) = metrics.exports[-1].resource_metrics
    known = resource.resource.attributes
    assert (known["service.name"], known["traceml.session"], known["traceml.run"]) == (
        *("traceml-ray", "demo"),
        report_of(session_of(played)).run,
    )


def test_a_series_that_is_gone_is_not_sent_any_more(played: Played) -> None:
    memory = Memory(session_of(played))
    report = report_of(session_of(played))
    memory.take(report, 1)
    figures = tuple(family for family in report.figures if family.name != "verdict_info")
    memory.sink.offer(msgspec.structs.replace(report, figures=figures))
    memory.end()
    with pytest.raises(ValueError, match="not enough values"):
        memory.metrics.points("traceml.verdict_info")


def test_an_episode_is_a_trace_with_the_stages_of_the_named_rank_and_of_the_other_ranks(
    played: Played,
) -> None:
    session = session_of(played)
    memory = Memory(session)
    spans = memory.take(report_of(session), 1)
    wait_until(lambda: "window" in [span.name for span in memory.spans.get_finished_spans()])
    spans = [*memory.spans.get_finished_spans()]
    assert "straggler" not in [span.name for span in spans], "it goes on: its root comes at the end"
    played.play()
    played.play()
    played.end()
    played.source.down = True  # the aggregator is gone: times of steps come from the file
    process.finish(played.folder, SETTINGS, [memory.sink], within_s=240.0)
    spans = [*memory.spans.get_finished_spans()]
    assert memory.sink.state().failed == 0, memory.sink.state().error
    (root,) = (span for span in spans if span.name == "straggler")
    assert attributes(root, "label", "rank", "node", "stage", "ranks") == (
        *("straggler", 5, "host-1", "data"),
        (5,),
    )
    assert root.parent is None
    assert root.status.status_code is StatusCode.ERROR
    assert (root.status.description or "").startswith("straggler: rank 5 (host-1)")
    (cost,) = attributes(root, "cost")
    assert 0.1 < cost < 1
    windows = [span for span in spans if span.name == "window"]
    assert len(windows) == 2, "one when it was named, one at the end"
    assert {span.parent.span_id for span in windows} == {root.context.span_id}
    assert {span.context.trace_id for span in spans} == {root.context.trace_id}
    assert len({span.context.span_id for span in spans}) == len(spans)
    steps = [attributes(window, "from_step", "to_step") for window in windows]
    assert (steps[0][0], steps[1][0]) == (attributes(root, "from_step")[0], steps[0][1] + 1)
    for window in windows:
        named, others = (rows(spans, window, name) for name in ("named rank", "other ranks"))
        assert named["data"] == pytest.approx(0.0141, abs=0.002)
        assert others["data"] == pytest.approx(0.0021, abs=0.002)
        assert others["sync_wait"] > named["sync_wait"] + 0.005, "the others wait"
        assert root.start_time <= window.start_time <= window.end_time <= root.end_time


def rows(spans: list[ReadableSpan], window: ReadableSpan, name: str) -> dict[str, float]:
    """Return stage → mean seconds of a row of a window, whose spans follow each other."""
    (row,) = (s for s in spans if s.name == name and s.parent.span_id == window.context.span_id)
    (steps,) = attributes(row, "steps")
    stages = [s for s in spans if s.parent is not None and s.parent.span_id == row.context.span_id]
    assert [s.start_time for s in stages] == [row.start_time, *(s.end_time for s in stages[:-1])]
    means = {}
    for stage in stages:
        (mean_s,) = attributes(stage, "mean_s")
        assert stage.end_time - stage.start_time == pytest.approx(mean_s * steps * 1e9, abs=2)
        means[stage.name] = mean_s
    return means


class Direct:
    """The spans of a session's episodes, without a thread."""

    def __init__(self, session: SessionPoll) -> None:
        self.memory, self.failures, ids = InMemorySpanExporter(), [], Ids()
        provider = TracerProvider(id_generator=ids, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.memory))
        self.episodes = EpisodeSpans(
            provider,
            ids,
            "demo",
            lambda asked: query.ask_one(session.source.reply, asked),
            self.failures.append,
        )

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.memory.get_finished_spans() if span.name == name]


def test_while_an_episode_lasts_each_window_is_as_long_as_all_before_it(played: Played) -> None:
    session = session_of(played)
    spans = Direct(session)
    spans.episodes.take(report_of(session))
    for _ in range(40):
        played.play()
        session.poll()
        spans.episodes.take(report_of(session))
    steps = [attributes(window, "from_step", "to_step") for window in spans.named("window")]
    lengths = [last - first + 1 for first, last in steps]
    assert 2 < len(steps) <= otel_spans.MOST_WINDOWS
    assert all(length >= sum(lengths[:place]) for place, length in enumerate(lengths))
    assert spans.named("straggler") == []
    spans.episodes.finish(report_of(session))
    assert [attributes(root, "from_step")[0] for root in spans.named("straggler")] == [steps[0][0]]


def test_ids_do_not_change_when_the_process_starts_again(played: Played) -> None:
    session = session_of(played)
    one, other = Direct(session), Direct(session)
    for spans in (one, other):
        spans.episodes.take(report_of(session))
        spans.episodes.finish(report_of(session))
    first, second = ([span.context for span in spans.memory.get_finished_spans()] for spans in (one, other))
    assert first
    assert first == second


def test_times_that_cannot_be_asked_for_are_told_and_the_trace_is_sent_without(played: Played) -> None:
    session = session_of(played)
    spans, report = Direct(session), report_of(session)
    played.source.down = True
    spans.episodes.take(report)
    spans.episodes.finish(report)
    assert [span.name for span in spans.memory.get_finished_spans()] == ["window", "straggler"]
    assert len(spans.failures) == 1


def test_each_hang_of_a_rank_is_a_trace_and_a_rank_that_died_is_one_however_often_it_is_reported(
    played: Played,
) -> None:
    session = session_of(played)
    spans, report = Direct(session), report_of(session)

    def take(seconds: int, label: str = "", from_s: int | None = None, **fields: Any) -> None:
        from_ns = None if from_s is None else from_s * 10**9
        one = Finding(
            key=label, signal="steps", label=label, severity="critical", ranks=(3,), from_ns=from_ns
        )
        given = {"made_ns": seconds * 10**9, "episodes": (), "findings": (one,) if label else (), **fields}
        spans.episodes.take(msgspec.structs.replace(report, **given))

    take(20, "hang", 10)
    take(30, "hang", 10)
    assert spans.named("hang") == []
    take(40)
    take(70, "hang", 60)
    take(80)
    for seconds in (90, 100, 110):
        take(seconds, "rank_lost", run_over=seconds > 90)
    lasted = [(root.start_time // 10**9, root.end_time // 10**9) for root in spans.named("hang")]
    assert lasted == [(10, 40), (60, 80)]
    (lost,) = spans.named("rank_lost")
    assert attributes(lost, "rank", "label") == (3, "rank_lost")
    assert len({root.context.trace_id for root in (*spans.named("hang"), lost)}) == 3


def test_traces_of_a_run_are_limited_and_the_others_counted_once(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otel_spans, "MOST_TRACES", 0)
    session = session_of(played)
    spans = Direct(session)
    for _ in range(3):
        spans.episodes.take(report_of(session))
    assert spans.memory.get_finished_spans() == ()
    assert spans.episodes.dropped == 1


def test_what_is_not_sampled_is_not_sent(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    memory = Memory(session_of(played))
    memory.sink.offer(report_of(session_of(played)))
    assert memory.end() == []
    assert memory.sink.state().dropped == 0
    assert memory.metrics.exports


def test_a_collector_gets_metrics_and_traces_as_protobuf(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "nightly")
    session = session_of(played)
    sink = opened(session, SETTINGS)
    sink.offer(report_of(session))
    sink.close(time.monotonic() + 240)
    collector.close()
    state = sink.state()
    assert state == SinkState(name="opentelemetry", where=collector.url, sent=2)
    assert set(collector.headers) == {"secret"}
    metrics = ExportMetricsServiceRequest.FromString(collector.bodies["/v1/metrics"][-1])
    (resource,) = metrics.resource_metrics
    known = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
    assert (known["service.name"], known["traceml.session"]) == ("nightly", "demo")
    names = {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}
    (point,) = names["traceml.verdict_info"].gauge.data_points
    labels = {pair.key: pair.value.string_value for pair in point.attributes}
    assert (labels["label"], labels["rank"], labels["node"]) == ("straggler", "5", "host-1")
    traces = ExportTraceServiceRequest.FromString(collector.bodies["/v1/traces"][0])
    (scope,) = traces.resource_spans[0].scope_spans
    assert {"window", "named rank", "other ranks", "data", "backward"} <= {s.name for s in scope.spans}


def test_a_dead_collector_is_a_counted_failure_without_secrets(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.suppress(ImportError):  # the first of two tries names the cause; six take a minute
        monkeypatch.setattr("opentelemetry.exporter.otlp.common.http._MAX_RETRIES", 2, raising=False)
    with socket.socket() as taken:  # it does not listen, and nobody else can
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://me:pa55word@127.0.0.1:{port}?token=s3cr3t")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=k3y")
        session = session_of(played)
        sink = opened(session, SETTINGS)
        sink.offer(report_of(session))
        sink.close(time.monotonic() + 240)
    state = sink.state()
    assert (state.sent, state.failed, state.where) == (0, 2, f"http://127.0.0.1:{port}")
    assert "Connection refused" in state.error
    assert not [secret for secret in ("pa55word", "s3cr3t", "k3y") if secret in str(state)]


def test_a_collector_that_hangs_holds_up_nothing(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as hanging:
        hanging.bind(("127.0.0.1", 0))
        hanging.listen()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{hanging.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        session = session_of(played)
        sink = opened(session, SETTINGS)
        sink.offer(report_of(session))
        sink.close(time.monotonic() + 0.05)
        assert sink.state().sent == 0
        wait_until(lambda: sink.state().failed == 2)
    assert "time" in sink.state().error


def test_variables_choose_exporter_and_endpoint() -> None:
    kind, where = exporter_of("traces", {}) or (object, "")
    assert (kind.__module__, where) == (
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        "http://localhost:4318",
    )
    assert exporter_of("metrics", {"OTEL_METRICS_EXPORTER": "none"}) is None
    one = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://all", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://m/v1"}
    assert (exporter_of("metrics", one) or (object, ""))[1] == "http://m/v1"
    assert (exporter_of("traces", one) or (object, ""))[1] == "http://all"
    with pytest.raises(ValueError, match="OTEL_METRICS_EXPORTER=console must be otlp or none"):
        exporter_of("metrics", {"OTEL_METRICS_EXPORTER": "console"})
    with pytest.raises(ValueError, match="must be http/protobuf or grpc"):
        exporter_of("metrics", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})


def test_an_endpoint_is_shown_without_secrets() -> None:
    assert shown("https://me:secret@host:4318/otlp?key=secret#x") == "https://host:4318/otlp"
    assert shown("host:4317") == "host:4317"


def test_a_service_name_of_the_user_stays(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(session_of(played))
    assert resource_of(report).attributes["service.name"] == "traceml-ray"
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine,team=a")
    assert resource_of(report).attributes["service.name"] == "mine"
    assert resource_of(report).attributes["team"] == "a"


def test_a_disabled_sdk_is_said(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    (kind,) = wanted(SETTINGS)
    sink = process.opened(kind, session_of(played), SETTINGS)
    assert isinstance(sink, Unusable)
    assert "OTEL_SDK_DISABLED" in sink.state().error
