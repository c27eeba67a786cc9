"""
The process of a session's sinks, started by its aggregator (`monitor.sink_process`), which it asks over a
pipe: a sink that hangs or fails touches neither training nor the aggregator.

    python -m traceml_ray.sinks.process FD FOLDER < settings
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from traceml_ray.errors import error_text
from traceml_ray.settings import Settings
from traceml_ray.store import query
from traceml_ray.store.results import SinkState
from traceml_ray.views.session_poll import SessionPoll
from traceml_ray.views.source import PipeSource
from traceml_ray.wire.codec import ready

from .sink import Sink, Unusable

POLL_S = 2.0
"""Seconds between two polls of the session."""


def opened(session: SessionPoll, settings: Settings) -> list[Sink]:
    """Return the sinks that the settings ask for; in place of one that cannot be used, why."""
    sinks: list[Sink] = []
    if settings.metrics_port is not None:
        sinks.append(_opened("prometheus", lambda: _scraped(session, settings)))
    return sinks


def _opened(name: str, make: Callable[[], Sink]) -> Sink:
    try:
        return make()
    except ModuleNotFoundError as error:
        return Unusable(name, f"it needs {error.name}: pip install 'traceml-ray[metrics]'")
    except Exception as error:
        return Unusable(name, error_text(error))


def _scraped(session: SessionPoll, settings: Settings) -> Sink:
    from .scraped import Scraped

    return Scraped(session, settings)


class Reporter:
    """
    Polls the session, and tells it how its sinks are doing.

    Args:
        session: polled here.
        sinks: told of each new state.
    """

    def __init__(self, session: SessionPoll, sinks: Sequence[Sink]) -> None:
        self._session, self._sinks = session, sinks
        self._noted: list[SinkState] = []

    def tick(self) -> None:
        """Bring the session up to date, and note what is new of the sinks. Never raises."""
        self._session.poll()
        states = [sink.state() for sink in self._sinks]
        if states != self._noted:
            with contextlib.suppress(query.QueryError):
                query.ask(self._session.source.reply, [query.NoteSinks(states)], watching=True)
                self._noted = states


def main() -> int:
    """Report the session until its aggregator is gone."""
    descriptor, folder = sys.argv[1:]
    os.nice(5)  # training comes first
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=ready(Settings))
    source = PipeSource(Connection(int(descriptor)), Path(folder))
    session = SessionPoll(source, thresholds=settings.thresholds)
    reporter = Reporter(session, opened(session, settings))
    while not source.closed.wait(POLL_S):
        reporter.tick()
    return 0


if __name__ == "__main__":
    sys.exit(main())
