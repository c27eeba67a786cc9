"""The process of a session's sinks, asked over its pipe by a real one; and what it serves for Prometheus."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
from played import Played, session_of
from prometheus_client.parser import text_string_to_metric_families

from traceml_ray.errors import Errors
from traceml_ray.monitor.sink_process import SinkProcess
from traceml_ray.ray import membership
from traceml_ray.ray.actors import ActorConfig, configure
from traceml_ray.settings import Settings
from traceml_ray.sinks.process import Reporter, finish, opened
from traceml_ray.sinks.report import Report
from traceml_ray.sinks.scraped import Scraped
from traceml_ray.sinks.sink import Sender
from traceml_ray.sinks.table import environment_of, wanted
from traceml_ray.store import query
from traceml_ray.store.results import SinkState
from traceml_ray.store.session import SINKS


def read(url: str, token: str = "") -> dict[str, dict[tuple[str, ...], float]]:
    """Return the samples of a scrape by name, then by the values of their labels but `run`."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=240) as answer:
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


def wait_for(played: Played, timeout_s: float = 240.0) -> SinkState:
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
    process.join(240)
    assert not errors
    with pytest.raises(urllib.error.URLError):
        read(sink.where)


def test_a_port_that_is_taken_is_said_and_nothing_else_suffers(played: Played) -> None:
    session = session_of(played)
    first = Scraped(session, Settings(metrics_port=0))
    port = int(first.where.rpartition(":")[2].partition("/")[0])
    settings = Settings(metrics_port=port)
    Reporter(session, [opened(kind, session, settings) for kind in wanted(settings)], 4).tick()
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


def test_the_process_sees_the_environment_of_the_user_where_the_aggregator_does_not(played: Played) -> None:
    user = {"TRACEML_METRICS_TOKEN": "secret", "TRACEML_METRICS_TOKEN_2": "other", "HOME": "/root"}
    settings = Settings(metrics_port=0)
    assert environment_of(Settings(), user) == {}
    environ = environment_of(settings, user)
    assert environ == {"TRACEML_METRICS_TOKEN": "secret"}
    alerts = Settings(alerts="[to.a]\nkind = 'slack'\nurl = 'https://${SLACK_HOST}/$${NOT}'\n")
    assert environment_of(alerts, {"SLACK_HOST": "a", "NOT": "b", "OTHER": "c"}) == {"SLACK_HOST": "a"}
    process = SinkProcess(played.folder, settings, played.aggregator.query, Errors(), environ=environ)
    where = wait_for(played).where
    with pytest.raises(urllib.error.HTTPError, match="401"):
        read(where)
    assert read(where, "secret")["traceml_ranks"]["reporting",] == 8
    process.end()
    process.join(240)


def test_only_the_aggregator_gets_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEML_METRICS_TOKEN", "secret")
    config = configure(Settings(metrics_port=0))
    assert config.environ == {"TRACEML_METRICS_TOKEN": "secret"}
    made: list[ActorConfig] = []
    monkeypatch.setattr(membership, "make", lambda *given: made.append(given[3]))
    membership.ensure_relay(config, "node")
    assert [relay.environ for relay in made] == [{}]


def test_a_foreign_page_cannot_read_what_is_served_to_this_machine(played: Played) -> None:
    served = Scraped(session_of(played), Settings(metrics_port=0))
    request = urllib.request.Request(served.where, headers={"Host": "evil.example:9464"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request, timeout=240)
    for name in ("localhost", "127.0.0.1:9464", "[::1]:9464", "[::1]"):
        request = urllib.request.Request(served.where, headers={"Host": name})
        with urllib.request.urlopen(request, timeout=240) as answer:
            assert answer.status == 200
    served.close()


def test_a_state_is_noted_once_it_is_new(played: Played) -> None:
    session = session_of(played)
    served = Scraped(session, Settings(metrics_port=0))
    reporter = Reporter(session, [served], 4)
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


class Place:
    """A place outside that takes what is sent, once it is let; it fails as often as told."""

    def __init__(self, fails: int = 0) -> None:
        self.items: list[Any] = []
        self.reached, self.let = threading.Semaphore(0), threading.Semaphore(0)
        self.fails = fails

    def send(self, item: Any) -> None:
        self.reached.release()
        assert self.let.acquire(timeout=240)
        if self.fails:
            self.fails -= 1
            raise ConnectionRefusedError("connection refused")
        self.items.append(item)


def test_a_place_that_hangs_is_sent_the_newest_and_what_it_missed_is_counted() -> None:
    place = Place()
    sender = Sender("webhook", "http://place", place.send)
    sender.offer(1)
    assert place.reached.acquire(timeout=240)
    for item in (2, 3, 4):
        sender.offer(item)
    assert sender.state() == SinkState(name="webhook", where="http://place", dropped=2)
    place.let.release(2)
    sender.close(time.monotonic() + 240)
    assert place.items == [1, 4]
    assert sender.state() == SinkState(name="webhook", where="http://place", sent=2, dropped=2)


def test_a_place_that_hangs_for_ever_does_not_hold_up_the_end() -> None:
    place = Place()
    sender = Sender("webhook", "http://place", place.send)
    sender.offer(1)
    assert place.reached.acquire(timeout=240)
    sender.close(time.monotonic() + 0.05)
    assert sender.state().sent == 0
    place.let.release()


def test_a_failure_is_said_until_something_arrives() -> None:
    place = Place(fails=1)
    sender = Sender("webhook", "http://place", place.send, most=8)
    sender.offer(1)
    sender.offer(2)
    place.let.release()
    assert place.reached.acquire(timeout=240)
    assert place.reached.acquire(timeout=240), "the second is tried after the first has failed"
    assert (sender.state().failed, sender.state().error) == (1, "ConnectionRefusedError: connection refused")
    place.let.release()
    sender.close(time.monotonic() + 240)
    assert (sender.state().sent, sender.state().failed, sender.state().error) == (1, 1, "")


def test_the_newest_is_sent_again_where_a_place_forgets() -> None:
    place = Place()
    sender = Sender("ray", "metrics", place.send, every_s=0.01, again=True)
    for item in (1, 2):
        sender.offer(item)
        for _ in range(2):
            assert place.reached.acquire(timeout=240)
            place.let.release()
    place.let.release(1 << 10)
    sender.close(time.monotonic() + 240)
    assert place.items[:2] == [1, 1]
    assert place.items.count(1) + place.items.count(2) == len(place.items)
    assert place.items.count(2) >= 1
    assert sender.state().dropped == 0


class Taker:
    """A sink that keeps the reports."""

    takes_reports = True

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.closed = False

    def offer(self, report: Report) -> None:
        self.reports.append(report)

    def state(self) -> SinkState:
        return SinkState(name="taker", where="here")

    def close(self, deadline_s: float) -> None:
        self.closed = True


def test_a_report_says_what_the_pages_say_and_comes_when_something_has_changed(played: Played) -> None:
    session, taker = session_of(played), Taker()
    reporter = Reporter(session, [taker], 4)
    reporter.tick()
    reporter.tick()  # that there is a sink is new
    report, _ = taker.reports
    reporter.tick()
    assert len(taker.reports) == 2, "nothing has changed"
    assert (report.session, report.state, report.world, report.over) == ("demo", "live", 8, False)
    assert report.verdict is not None
    assert (report.verdict.label, report.verdict.rank) == ("straggler", 5)
    assert report.findings[0].ranks == (5,)
    figures = {family.name: family for family in report.figures}
    assert [values[1:] for values, _ in figures["rank_busy"].series] == [("5", "host-1")]
    played.play()
    reporter.tick()
    assert len(taker.reports) == 3
    assert (taker.reports[-1].step or 0) > (report.step or 0)


def test_the_end_of_a_session_is_reported_from_its_file(played: Played) -> None:
    running, ended = Taker(), Taker()
    finish(played.folder, Settings(), [running])
    assert (running.reports, running.closed) == ([], True), "the aggregator was killed; another one follows"
    played.end()
    finish(played.folder, Settings(), [ended])
    (report,) = ended.reports
    assert (report.over, report.run_over, report.findings[0].ranks) == (True, True, (5,))


def test_a_sink_that_hangs_at_the_end_takes_no_time_from_the_others(played: Played) -> None:
    let, closed = threading.Event(), threading.Event()

    class Hanging(Taker):
        def close(self, deadline_s: float) -> None:
            let.wait(240)

    class Closing(Taker):
        def close(self, deadline_s: float) -> None:
            closed.set()

    played.end()
    finish(played.folder, Settings(), [Hanging(), Closing()], within_s=0.05)
    assert closed.wait(240)
    let.set()


def test_what_could_not_be_sent_at_the_end_is_known_after_the_end(played: Played) -> None:
    place = Place(fails=1)
    sender = Sender[Report]("webhook", "http://place", place.send)
    played.end()
    place.let.release()
    finish(played.folder, Settings(), [sender], within_s=240.0)
    (state,) = sinks_of(played)
    assert (state.failed, state.error) == (1, "ConnectionRefusedError: connection refused")
    (played.folder / SINKS).write_text("[{]")
    assert sinks_of(played) == [], "the session file has the states of before"
