"""
The process of a session's sinks, started by its aggregator (`monitor.sink_process`), which it asks over a
pipe: a sink that hangs or fails touches neither training nor the aggregator. `apart` starts it.

When the aggregator has ended, the sinks are given the end of the session, as its file has it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from traceml_ray.errors import error_text
from traceml_ray.files import write_file
from traceml_ray.settings import Settings
from traceml_ray.store import query
from traceml_ray.store.results import SinkState
from traceml_ray.store.session import SINKS
from traceml_ray.views.session_poll import SessionPoll
from traceml_ray.views.source import PipeSource, SourceError, StoredSource
from traceml_ray.wire.codec import ready

from .report import report_of
from .sink import Sink, Unusable, close_all
from .table import SinkKind, wanted

POLL_S = 2.0
"""Seconds between two polls of the session."""
CLOSE_S = 15.0
"""Longest time for which the sinks may still send after the session has ended, in s."""


def opened(kind: SinkKind, session: SessionPoll, settings: Settings) -> Sink:
    """Open a sink; in place of one that cannot be used, return why. Never raises."""
    try:
        module = importlib.import_module(f"{__package__}.{kind.module}")
        sink: Sink = module.opened(session, settings)
    except ModuleNotFoundError as error:
        return Unusable(kind.name, f"it needs {error.name}: pip install 'traceml-ray[{kind.extra}]'")
    except Exception as error:
        return Unusable(kind.name, error_text(error))
    return sink


class Reporter:
    """
    Polls the session, gives its sinks reports of it, and tells the session how its sinks are doing.

    Args:
        session: polled here.
        sinks: they are given a report whenever something has changed.
        most: largest number of ranks with series in a report.
    """

    def __init__(self, session: SessionPoll, sinks: Sequence[Sink], most: int) -> None:
        self._session, self._sinks, self._most = session, sinks, most
        self._noted: list[SinkState] = []
        self._version = -1

    def tick(self) -> None:
        """Bring the session up to date, report it, and note what is new of the sinks. Never raises."""
        self._session.poll()
        self.report()
        states = [sink.state() for sink in self._sinks]
        if states != self._noted:
            with contextlib.suppress(query.QueryError):
                query.ask(self._session.source.reply, [query.NoteSinks(states)], watching=True)
                self._noted = states

    def report(self) -> None:
        """Give the sinks a report, if anything has changed. Never raises."""
        takers = [sink for sink in self._sinks if sink.takes_reports]
        if not takers or self._session.version == self._version or self._session.status is None:
            return
        self._version = self._session.version
        try:
            report = report_of(self._session, self._most)
        except Exception as error:
            self._session.errors.note("report", error)
            return
        for sink in takers:
            sink.offer(report)


def finish(folder: Path, settings: Settings, sinks: Sequence[Sink], within_s: float = CLOSE_S) -> None:
    """
    Report the end of the session in `folder`, if it has ended, and close the sinks. Their last states are
    left in the folder. Never raises.
    """
    deadline = time.monotonic() + within_s
    with contextlib.suppress(SourceError):
        session = SessionPoll(StoredSource(folder, settings.thresholds), thresholds=settings.thresholds)
        session.poll()
        if session.is_over:
            Reporter(session, sinks, settings.metrics_ranks).report()
    close_all([sink.close for sink in sinks], deadline)
    with contextlib.suppress(OSError):
        write_file(folder / SINKS, msgspec.json.encode([sink.state() for sink in sinks]))


def main() -> int:
    """Report the session until its aggregator is gone."""
    descriptor, folder = int(sys.argv[1]), Path(sys.argv[2])
    os.nice(5)  # training comes first
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=ready(Settings))
    source = PipeSource(Connection(descriptor), folder)
    session = SessionPoll(source, thresholds=settings.thresholds)
    sinks = [opened(kind, session, settings) for kind in wanted(settings)]
    reporter = Reporter(session, sinks, settings.metrics_ranks)
    while not source.closed.wait(POLL_S):
        reporter.tick()
    finish(folder, settings, sinks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
