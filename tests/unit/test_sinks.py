"""The process of a session's sinks, asked over its pipe by a real one; and what it serves for Prometheus."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from played import Played
from prometheus_client.parser import text_string_to_metric_families

from traceml_ray.errors import Errors
from traceml_ray.monitor.sink_process import SinkProcess
from traceml_ray.settings import Settings
from traceml_ray.sinks.process import Reporter, opened
from traceml_ray.sinks.scraped import Scraped
from traceml_ray.store import query
from traceml_ray.store.results import SinkState
from traceml_ray.views.session_poll import SessionPoll


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Played]:
    played = Played(tmp_path / "demo")
    for _ in range(30):
        played.play()
    yield played
    played.aggregator.close()


def session_of(played: Played) -> SessionPoll:
    session = SessionPoll(played.source, clock=played.clock, timer=played.clock.timer)
    session.poll()
    return session


def read(url: str, token: str = "") -> dict[str, dict[tuple[str, ...], float]]:
    """Return the samples of a scrape by name, then by the values of their labels but `run`."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        body = answer.read().decode()
    samples: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(body):
        for sample in family.samples:
            labels = tuple(value for name, value in sample.labels.items() if name != "run")
            samples.setdefault(sample.name, {})[labels] = sample.value
    return samples


def sinks_of(played: Played) -> list[SinkState]:
    sinks: list[SinkState] = query.ask_one(played.source.reply, query.GetStatus()).sinks
    return sinks


def wait_for(played: Played, timeout_s: float = 60.0) -> SinkState:
    """Return the state of the one sink once its process has reported it."""
    deadline = time.monotonic() + timeout_s
    while not (sinks := sinks_of(played)):
        assert time.monotonic() < deadline, "no sink has reported"
        time.sleep(0.1)
    (sink,) = sinks
    return sink


def test_a_process_of_its_own_serves_the_metrics_and_ends_with_the_session(played: Played) -> None:
    errors = Errors()
    process = SinkProcess(
        played.folder, Settings(metrics_port=0, metrics_ranks=4), played.aggregator.query, errors
    )
    sink = wait_for(played)
    assert (sink.name, sink.error) == ("prometheus", "")
    metrics = read(sink.where)
    assert metrics["traceml_verdict"]["straggler",] == 1
    assert metrics["traceml_verdict"]["healthy",] == 0
    assert metrics["traceml_verdict_info"]["straggler", "host-1", "5", "data"] == 1
    assert [*metrics["traceml_rank_busy_seconds"]] == [("host-1", "5")], "of 8 ranks, with series for 4"
    process.end()
    process.join(30)
    assert not errors
    with pytest.raises(urllib.error.URLError):
        read(sink.where)


def test_a_port_that_is_taken_is_said_and_nothing_else_suffers(played: Played) -> None:
    session = session_of(played)
    first = Scraped(session, Settings(metrics_port=0))
    port = int(first.where.rpartition(":")[2].partition("/")[0])
    Reporter(session, opened(session, Settings(metrics_port=port))).tick()
    (sink,) = sinks_of(played)
    first.close()
    assert (sink.failed, sink.where) == (1, "")
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in sink.error


def test_a_token_is_asked_for_where_there_is_one(played: Played) -> None:
    served = Scraped(session_of(played), Settings(metrics_port=0), token="secret")
    for given in ("", "wrong"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            read(served.where, given)
    assert read(served.where, "secret")["traceml_ranks"]["reporting",] == 8
    assert (served.state().sent, served.state().failed) == (1, 0)
    served.close()


def test_a_foreign_page_cannot_read_what_is_served_to_this_machine(played: Played) -> None:
    served = Scraped(session_of(played), Settings(metrics_port=0))
    request = urllib.request.Request(served.where, headers={"Host": "evil.example:9464"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request, timeout=30)
    for name in ("localhost", "127.0.0.1:9464", "[::1]:9464", "[::1]"):
        request = urllib.request.Request(served.where, headers={"Host": name})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200
    served.close()


def test_a_state_is_noted_once_it_is_new(played: Played) -> None:
    session = session_of(played)
    served = Scraped(session, Settings(metrics_port=0))
    reporter = Reporter(session, [served])
    reporter.tick()
    asked = played.source.asked
    reporter.tick()
    quiet = played.source.asked - asked
    read(served.where)
    asked = played.source.asked
    reporter.tick()
    assert played.source.asked - asked == quiet + 1
    assert sinks_of(played)[0].sent == 1
    served.close()
