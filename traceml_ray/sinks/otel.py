"""
OpenTelemetry, by its SDK: the figures of a session as metrics, the episodes of its runs as traces. The
standard variables `OTEL_…` say where they are sent, and how.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from opentelemetry.metrics import Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from traceml_ray import text
from traceml_ray.errors import error_text
from traceml_ray.settings import Settings
from traceml_ray.store import query
from traceml_ray.store.results import SinkState
from traceml_ray.text import without_login
from traceml_ray.views.session_poll import SessionPoll
from traceml_ray.views.source import SourceError, StoredSource

from .figures import Family
from .otel_spans import EpisodeSpans, Ids
from .report import Report
from .sink import Sender

R = TypeVar("R")
UNITS = {"seconds": "s", "bytes": "By", "ratio": "1", "celsius": "Cel", "watts": "W", "hertz": "Hz", "": ""}
"""Unit of a figure → its unit in UCUM."""
_FLUSH_S = 12.0
"""Longest time for which the end of a run is sent, in s: less than the sinks have together."""
_MESSAGE_CHARS = 400
_PORTS = {"http": 4318, "grpc": 4317}
_NAMES = {"metrics": "metric_exporter.OTLPMetricExporter", "traces": "trace_exporter.OTLPSpanExporter"}
"""Signal of OpenTelemetry → module and class of its exporter."""


class Outcomes(logging.Handler):
    """Counts what exporters have sent, and keeps why they failed: the SDK only logs that."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._counting = threading.Lock()
        self._messages = threading.local()
        self._newest = "the export failed"
        self.sent = self.failed = 0
        self.error = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message of the exporter that runs in this thread."""
        with contextlib.suppress(TypeError, ValueError):  # a message that does not fit its values
            self._newest = record.getMessage()
            self._messages.newest = [*getattr(self._messages, "newest", [])[-1:], self._newest]

    def exported(self, export: Callable[[], R]) -> R:
        """Export, and count the result."""
        self._messages.newest = []
        try:
            result = export()
        except Exception as error:
            self.fail(error_text(error))
            raise
        if getattr(result, "name", "") == "SUCCESS":
            with self._counting:
                self.sent, self.error = self.sent + 1, ""
        else:
            # the SDK does not log the same again within some seconds
            self.fail("; ".join(self._messages.newest) or self._newest)
        return result

    def fail(self, why: str) -> None:
        """Count a failure."""
        with self._counting:
            self.failed, self.error = self.failed + 1, text.masked(why)[:_MESSAGE_CHARS]


def counted(kind: type, outcomes: Outcomes) -> type:
    """Return a kind of exporter whose exports are counted."""

    def export(self: Any, *items: Any, **options: Any) -> Any:
        return outcomes.exported(lambda: kind.export(self, *items, **options))  # type: ignore[attr-defined]

    return type(f"Counted{kind.__name__}", (kind,), {"export": export})


class _Gauges:
    """The instruments of the figures, made when a figure is first known; they show the newest report."""

    def __init__(self, provider: MeterProvider) -> None:
        self._meter = provider.get_meter("traceml_ray")
        self._newest: dict[str, Family] = {}
        self._made: set[str] = set()

    def take(self, families: Iterable[Family]) -> None:
        """Show these figures from now on."""
        self._newest = {family.name: family for family in families}
        for name in self._newest.keys() - self._made:
            self._made.add(name)
            self._make(self._newest[name])

    def _make(self, family: Family) -> None:
        make = (
            self._meter.create_observable_counter if family.counter else self._meter.create_observable_gauge
        )
        unit = UNITS.get(family.unit, f"{{{family.unit}}}")
        make(f"traceml.{family.name}", [lambda _: self._observed(family.name)], unit, family.about)

    def _observed(self, name: str) -> Iterable[Observation]:
        family = self._newest.get(name)
        for values, value in family.series if family is not None else ():
            labels = zip(family.labels if family is not None else (), values, strict=True)
            yield Observation(value, {label: known for label, known in labels if known})


class _Run:
    """What is sent of one run: its resource names session and run."""

    def __init__(
        self,
        report: Report,
        session: str,
        reader: Callable[[], MetricReader] | None,
        processor: Callable[[], SpanProcessor] | None,
        ask: Callable[[query.Request[Any]], Any],
        failed: Callable[[Exception], None],
    ) -> None:
        self.id = report.run
        resource, ids = resource_of(report), Ids()
        readers = [reader()] if reader is not None else []
        self._meters = MeterProvider(readers, resource, shutdown_on_exit=False)
        self._tracers = TracerProvider(resource=resource, shutdown_on_exit=False, id_generator=ids)
        if processor is not None:
            self._tracers.add_span_processor(processor())
        self._gauges = _Gauges(self._meters)
        self.spans = EpisodeSpans(self._tracers, ids, session, ask, failed)

    def take(self, report: Report) -> None:
        """Show the figures of `report`, and send what is new of its episodes."""
        self._gauges.take(report.figures)
        self.spans.take(report)

    def end(self) -> None:
        """Send what is waiting, and the newest figures."""
        deadline = time.monotonic() + _FLUSH_S
        spans = threading.Thread(target=self._tracers.shutdown, daemon=True)
        spans.start()
        self._meters.shutdown(timeout_millis=1e3 * _FLUSH_S)
        spans.join(max(0.0, deadline - time.monotonic()))


class OpenTelemetry:
    """
    Sends reports of a session. Threads of the SDK export, at its intervals and with its time-outs.

    Args:
        session: what is asked for the times of steps.
        settings: of the session.
        where: where exporters send to, without secrets.
        outcomes: results of the exports.
        reader: makes what reads the metrics of a run; None: there are no metrics.
        processor: makes what takes the spans of a run; None: there are none.
    """

    takes_reports = True

    def __init__(
        self,
        session: SessionPoll,
        settings: Settings,
        where: str,
        outcomes: Outcomes,
        reader: Callable[[], MetricReader] | None,
        processor: Callable[[], SpanProcessor] | None,
    ) -> None:
        self._session, self._settings, self._outcomes = session, settings, outcomes
        self._reader, self._processor = reader, processor
        self._run: _Run | None = None
        self._newest: Report | None = None
        self._stored: StoredSource | None = None
        self._dropped = 0
        logging.getLogger("opentelemetry").addHandler(outcomes)
        self._sender = Sender[Report]("opentelemetry", where, self._take, end=self._close)

    def offer(self, report: Report) -> None:
        """Show the figures of `report` from now on, and send what is new of its episodes."""
        self._sender.offer(report)

    def state(self) -> SinkState:
        """Return how many exports succeeded and failed, and how many episodes have no trace."""
        sender, outcomes = self._sender.state(), self._outcomes
        dropped = self._dropped + (self._run.spans.dropped if self._run is not None else 0)
        return SinkState(
            name=sender.name,
            where=sender.where,
            sent=outcomes.sent,
            failed=outcomes.failed + sender.failed,
            dropped=dropped,
            error=sender.error or outcomes.error,
        )

    def close(self, deadline_s: float) -> None:
        """Export what is waiting, until `deadline_s` (`time.monotonic`) at the latest."""
        self._sender.close(deadline_s)

    def _take(self, report: Report) -> None:
        if report.run is None:
            return
        if self._run is None or self._run.id != report.run:
            self._next_run(report)
        self._newest = report
        if self._run is not None:
            self._run.take(report)

    def _next_run(self, report: Report) -> None:
        if self._run is not None and self._newest is not None:
            self._run.spans.finish(self._newest)
            self._end()
        status = self._session.status
        session = f"{report.session}/{status.started_at if status is not None else None}"
        self._run = _Run(report, session, self._reader, self._processor, self._ask, self._not_known)

    def _close(self) -> None:
        self._end()
        logging.getLogger("opentelemetry").removeHandler(self._outcomes)

    def _end(self) -> None:
        if self._run is not None:
            self._dropped += self._run.spans.dropped
            run, self._run = self._run, None
            run.end()

    def _ask(self, request: query.Request[Any]) -> Any:
        """Ask the session; once it has ended, its file."""
        try:
            return query.ask(self._session.source.reply, [request], watching=True)[0]
        except SourceError:
            if self._newest is None or not self._newest.over:
                raise
        if self._stored is None:
            source = self._session.source
            self._stored = StoredSource(Path(source.out) / source.target, self._settings.thresholds)
        return query.ask(self._stored.reply, [request], watching=True)[0]

    def _not_known(self, error: Exception) -> None:
        self._outcomes.fail(f"the stages of an episode are not known: {error_text(error)}")


def resource_of(report: Report) -> Resource:
    """Return what the SDK and its variables know of this process, with session and run."""
    resource = Resource.create({"traceml.session": report.session, "traceml.run": report.run or ""})
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "traceml-ray"}))
    return resource


def _variable(environ: Mapping[str, str], signal: str, name: str) -> str:
    """Return a variable of OTLP; that of one signal comes first."""
    return (
        environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}")
        or environ.get(f"OTEL_EXPORTER_OTLP_{name}")
        or ""
    )


def exporter_of(signal: str, environ: Mapping[str, str]) -> tuple[type, str] | None:
    """
    Return the exporter of a signal (`metrics`, `traces`) that the variables ask for, and where it sends to.
    None: the signal is not to be sent. Raises `ValueError` for what cannot be used here.
    """
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    if (chosen := environ.get(variable) or "otlp") not in ("otlp", "none"):
        raise ValueError(f"{variable}={chosen} must be otlp or none")
    if chosen == "none":
        return None
    protocol = _variable(environ, signal, "PROTOCOL") or "http/protobuf"
    if protocol not in ("http/protobuf", "grpc"):
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol} must be http/protobuf or grpc")
    way = protocol.partition("/")[0]
    module, _, name = _NAMES[signal].partition(".")
    try:
        exporters = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{way}.{module}")
    except ModuleNotFoundError:
        if way == "http":
            raise
        raise ValueError(
            f"the protocol {protocol} needs: pip install opentelemetry-exporter-otlp-proto-grpc"
        ) from None
    kind: type = getattr(exporters, name)
    return kind, shown(_variable(environ, signal, "ENDPOINT") or f"http://localhost:{_PORTS[way]}")


def shown(endpoint: str) -> str:
    """Return an endpoint without what may be secret: its user, password and query."""
    return without_login(endpoint if "//" in endpoint else f"//{endpoint}").removeprefix("//")


def opened(session: SessionPoll, settings: Settings) -> OpenTelemetry:
    """Return the sink that the variables `OTEL_…` describe."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        raise ValueError("OTEL_SDK_DISABLED is true")
    metrics, traces = (exporter_of(signal, os.environ) for signal in ("metrics", "traces"))
    outcomes = Outcomes()
    where = ", ".join(dict.fromkeys(place for _, place in filter(None, (metrics, traces))))
    reader = None if metrics is None else _reader_of(counted(metrics[0], outcomes))
    processor = None if traces is None else _processor_of(counted(traces[0], outcomes))
    return OpenTelemetry(session, settings, where, outcomes, reader, processor)


def _reader_of(exporter: type) -> Callable[[], MetricReader]:
    return lambda: PeriodicExportingMetricReader(exporter())


def _processor_of(exporter: type) -> Callable[[], SpanProcessor]:
    return lambda: BatchSpanProcessor(exporter())
