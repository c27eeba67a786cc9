"""Progress for Kubeflow Trainer: what is posted, and what a real HTTPS server with a CA and a token takes."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kubeflow_server import PATH, StatusServer, make_certificates
from msgspec.structs import replace
from played import Played, session_of

from traceml_ray.settings import Settings
from traceml_ray.sinks import kubeflow
from traceml_ray.sinks.figures import Family
from traceml_ray.sinks.kubeflow import CA, TOKEN, URL, Kubeflow, opened, status_of
from traceml_ray.sinks.process import Reporter
from traceml_ray.sinks.process import opened as opened_kind
from traceml_ray.sinks.report import Report, report_of
from traceml_ray.sinks.sink import Sink, Unusable
from traceml_ray.sinks.table import environment_of, wanted
from traceml_ray.store.results import SinkState
from traceml_ray.views.session_poll import SessionPoll


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StatusServer]:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here")
    folder = tmp_path / "server"
    folder.mkdir()
    server = StatusServer(folder)
    yield server
    server.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    """Reports of a played session: before its first step, with 150 steps, and at its end."""
    played = Played(tmp_path_factory.mktemp("played") / "demo")
    session = session_of(played)
    made = [report_of(session)]
    for _ in range(30):
        played.play()
    session.poll()
    made.append(report_of(session))
    played.end()
    session.poll()
    made.append(report_of(session))
    return made


def with_steps(report: Report, total: int, eta_s: float | None = None) -> Report:
    return replace(report, total_steps=total, eta_s=eta_s)


def metrics_of(status: dict[str, Any] | None) -> dict[str, str]:
    assert status is not None
    return {metric["name"]: metric["value"] for metric in status["metrics"]}


def test_nothing_is_posted_before_the_first_step(reports: list[Report]) -> None:
    assert status_of(reports[0]) is None


def test_progress_without_a_number_of_steps_has_metrics_and_no_percentage(reports: list[Report]) -> None:
    status = status_of(reports[1])
    assert status is not None
    assert status.keys() == {"metrics", "lastUpdatedTime"}
    metrics = metrics_of(status)
    assert (metrics["step"], metrics["verdict"]) == ("149", "straggler")
    assert (metrics["ranks_reporting"], metrics["ranks_expected"]) == ("8", "8")
    assert 0.02 < float(metrics["step_time_median_s"]) < 0.04
    assert 10 < float(metrics["verdict_cost_percent"]) < 60
    time.strptime(status["lastUpdatedTime"], "%Y-%m-%dT%H:%M:%SZ")


@pytest.mark.parametrize(
    ("total", "eta_s", "percentage", "left"),
    [(600, 13.2, 25, 14), (151, 0.02, 99, 1), (150, 0.0, 100, 0), (150, None, 100, 0), (100, 0.0, 100, 0),
     (10**15, 1e15, 0, 2**31 - 1), (600, None, 25, None)],
)  # fmt: skip
def test_percentage_and_time_left(
    reports: list[Report], total: int, eta_s: float | None, percentage: int, left: int | None
) -> None:
    status = status_of(with_steps(reports[1], total, eta_s))
    assert status is not None
    assert status["progressPercentage"] == percentage
    assert status.get("estimatedRemainingSeconds") == left
    assert metrics_of(status)["total_steps"] == str(total)


def test_what_the_server_would_refuse_is_left_out(reports: list[Report]) -> None:
    logged = [((reports[1].run or "", name), 0.5) for name in ("loss", "", "x" * 65, *map(str, range(99)))]
    family = Family("logged", "about", ("run", "name"), logged)
    metrics = metrics_of(status_of(replace(reports[1], figures=(*reports[1].figures, family))))
    assert metrics["loss"] == "0.5"
    assert "" not in metrics and "x" * 65 not in metrics
    assert len(metrics) < 50


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is a thread of this process, which may get no core for some seconds."""
    monkeypatch.setattr(kubeflow, "TIMEOUT_S", 240.0)


@contextmanager
def posting(server: StatusServer, **environ: str) -> Iterator[Kubeflow]:
    sink = opened(None, Settings(kubeflow=True), {**server.environ(), **environ})  # type: ignore[arg-type]
    sink._sender._every_s = 0.0
    yield sink
    sink.close(time.monotonic() + 240)


def ended(sink: Kubeflow) -> SinkState:
    sink.close(time.monotonic() + 240)
    return sink.state()


def test_a_post_has_the_token_of_its_moment(server: StatusServer, reports: list[Report]) -> None:
    with posting(server) as sink:
        sink.offer(reports[0])
        sink.offer(with_steps(reports[1], 600, 13.2))
        assert server.answered.acquire(timeout=240)
        server.token = "second-token"
        server.token_file.write_text(server.token)
        sink.offer(with_steps(reports[2], 150))
    assert [post["trainerStatus"]["progressPercentage"] for post in server.posts] == [25, 100]
    assert ended(sink) == SinkState(name="kubeflow", where=server.base + PATH, sent=2)


@pytest.mark.parametrize(
    "answer", [(401, {}, b"<html>"), (500, {}, b"{}"), (403, {}, b"[]"), (422, {}, b"\xff")]
)
def test_a_refusal_is_counted_and_the_next_post_is_tried(
    server: StatusServer, reports: list[Report], answer: tuple[int, dict[str, str], bytes]
) -> None:
    server.answers.append(answer)
    with posting(server) as sink:
        sink.offer(reports[1])
        assert server.answered.acquire(timeout=240)
        sink.offer(reports[1])
    state = ended(sink)
    assert (state.sent, state.failed, len(server.posts)) == (1, 1, 1)


def test_a_refusal_says_why_and_not_the_token(server: StatusServer, reports: list[Report]) -> None:
    server.token_file.write_text("wrong-token")
    with posting(server) as sink:
        sink.offer(reports[1])
    assert ended(sink).error == "OSError: 403: Forbidden for Bearer ***"


@pytest.mark.parametrize("text", ["", "one\ntwo", "one two", "caf\u00e9"])
def test_a_file_without_a_token_is_said_without_its_contents(
    server: StatusServer, reports: list[Report], text: str
) -> None:
    server.token_file.write_text(text)
    with posting(server) as sink:
        sink.offer(reports[1])
    assert ended(sink).error == f"OSError: {server.token_file} has no token"


def test_a_redirect_is_not_followed_with_the_token(server: StatusServer, reports: list[Report]) -> None:
    server.answers.append((302, {"Location": f"{server.base}/elsewhere"}, b""))
    with posting(server) as sink:
        sink.offer(reports[1])
    assert ended(sink).failed == 1
    assert not server.elsewhere


def test_a_server_of_another_authority_gets_no_token(
    server: StatusServer, reports: list[Report], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    make_certificates(other)
    with posting(server, **{CA: str(other / "ca.crt")}) as sink:
        sink.offer(reports[1])
    assert "CERTIFICATE_VERIFY_FAILED" in ended(sink).error
    assert not server.posts


def test_a_server_that_hangs_is_given_up(
    server: StatusServer, reports: list[Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubeflow, "TIMEOUT_S", 0.2)
    server.let = threading.Semaphore(0)
    with posting(server) as sink:
        sink.offer(reports[1])
    assert (ended(sink).failed, "timed out" in ended(sink).error) == (1, True)
    server.let.release()


def test_no_server_is_no_harm(server: StatusServer, reports: list[Report]) -> None:
    server.close()
    with posting(server) as sink:
        sink.offer(reports[1])
    assert "refused" in ended(sink).error


@pytest.mark.parametrize("name", [URL, CA, TOKEN])
def test_outside_of_a_train_job_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for variable in (URL, CA, TOKEN):
        monkeypatch.setenv(variable, "https://host/path")
    monkeypatch.delenv(name)
    (kind,) = wanted(Settings(kubeflow=True))
    sink: Sink = opened_kind(kind, None, Settings())  # type: ignore[arg-type]
    assert isinstance(sink, Unusable)
    assert sink.state().error.startswith(f"ValueError: {name} not set where the session is started: ")


def test_the_variables_are_those_of_who_starts_the_session(server: StatusServer) -> None:
    environ = server.environ()
    assert environment_of(Settings(kubeflow=True), {**environ, "HOME": "/root"}) == environ
    assert environment_of(Settings(), environ) == {}


def test_a_token_is_sent_to_https_alone_and_no_login_is_shown(server: StatusServer) -> None:
    with pytest.raises(ValueError, match="must be an https URL"):
        opened(None, Settings(), {**server.environ(), URL: "http://host/path"})  # type: ignore[arg-type]
    url = "https://me:secret@host:1/path?key=secret"
    sink = opened(None, Settings(), {**server.environ(), URL: url})  # type: ignore[arg-type]
    assert ended(sink).where == "https://host:1/path"


def test_a_session_posts_its_progress(
    server: StatusServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)
    played = Played(tmp_path / "demo")
    for _ in range(30):
        played.play()
    session = SessionPoll(played.source, clock=played.clock, timer=played.clock.timer)
    (kind,) = wanted(Settings(kubeflow=True))
    sink = opened_kind(kind, session, Settings(kubeflow=True))
    Reporter(session, [sink], 4).tick()
    sink.close(time.monotonic() + 240)
    (post,) = server.posts
    assert metrics_of(post["trainerStatus"])["step"] == "149"
    played.aggregator.close()
