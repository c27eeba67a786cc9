"""The dashboard as people run it: a process, what it prints, what it serves, how it ends."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_cluster import until
from sessions import Clock, Rank, Relay, aggregation, watch

from traceml_ray.dash_app.process import _linger
from traceml_ray.dash_app.session_pages import SessionPages
from traceml_ray.launchers.view_processes import DashboardProcess
from traceml_ray.views.source import open_source


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one stored session."""
    made: Path = tmp_path_factory.mktemp("out")
    aggregator, relay, rank = aggregation(made / "stored"), Relay(), Rank(0, 1)
    aggregator.ingest(relay.message(rank.batch(20)))
    aggregator.commit()
    return made


class Started:
    """`traceml-ray dashboard` of the stored session."""

    def __init__(self, out: Path, *arguments: str, **environ: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "traceml_ray.cli", "dashboard", "stored", "--out", str(out), *arguments],
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def url(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("Dashboard: http://"), (line, self.process.communicate())
        return line.removeprefix("Dashboard: ").strip()

    def end(self, number: int | None = None) -> tuple[int, str, str]:
        if number is not None:
            self.process.send_signal(number)
        output, errors = self.process.communicate(timeout=240)
        return self.process.returncode, output, errors


@pytest.fixture
def start(out: Path) -> Iterator[Any]:
    started: list[Started] = []

    def made(*arguments: str, **environ: str) -> Started:
        started.append(Started(out, *arguments, **environ))
        return started[-1]

    yield made
    for process in started:
        process.process.kill()
        process.process.communicate()


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=240) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_stored_session_is_served_until_sigterm(start: Any) -> None:
    started = start("--port", "0", "--run", "job")
    url = started.url()
    assert url.startswith("http://127.0.0.1:") and url.endswith("/?run=job")
    status, page = get(url)
    assert (status, "_dash-renderer" in page) == (200, True)
    place = url.partition("?")[0]
    assert get(place + "health")[0] == 200
    assert "# TYPE" in get(place + "metrics")[1]
    assert started.end(signal.SIGTERM) == (0, "", "")
    with pytest.raises(OSError, match="refused"):
        get(place)


def test_dashboard_child_that_is_watched_outlives_its_parent_for_a_while(out: Path) -> None:
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    child = DashboardProcess("stored", os.environ, heard.put, sessions=str(out), port="0", linger="1")
    url = child.wait(240)
    until(lambda: "stored file" in watch(url), "its page")
    child.end()
    until(lambda: child.lingers, "it stays")
    child.kill()
    assert child._process.poll() is None
    until(lambda: child._process.poll() is not None, "it ends by itself")
    assert (child._process.returncode, heard.qsize()) == (0, 1)
    with pytest.raises(OSError, match="refused"):
        get(url)


def test_token_is_generated_and_printed_for_a_non_loopback_address(start: Any) -> None:
    started = start("--port", "0", "--host", "0.0.0.0")
    place, _, token = started.url().partition("?token=")
    local = place.replace(socket.gethostname(), "127.0.0.1")
    assert len(token) >= 32
    assert get(local)[0] == 401
    assert get(local, Authorization=f"Bearer {token}")[0] == 200
    assert get(local, Authorization=f"Bearer {token}", Host="evil.example")[0] == 421
    assert get(local + "?token=wrong")[0] == 401
    assert started.end(signal.SIGINT) == (0, "", "")


def test_token_from_the_environment_is_required_and_never_printed(start: Any) -> None:
    started = start(
        "--port", "0", "--allow-host", "job.example", TRACEML_DASHBOARD_TOKEN="of-the-environment"
    )
    url = started.url()
    assert [get(url + "health", Host=name)[0] for name in ("job.example", "evil.example")] == [200, 421]
    assert "token" not in url
    assert get(url)[0] == 401
    assert get(url, Authorization="Bearer of-the-environment")[0] == 200
    assert started.end(signal.SIGTERM) == (0, "", "")


def test_dashboard_that_cannot_serve_fails_in_one_line(start: Any, tmp_path: Path) -> None:
    (tmp_path / "dash.py").write_text("raise ModuleNotFoundError('no dash', name='dash')")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for started, code, expected in (
            (start("--token", ""), 2, "not empty"),
            (start("--port", "many"), 2, "many is not a port"),
            (start("--host", "no such host"), 2, "no such host"),
            (start("--port", port), 1, f"cannot listen on 127.0.0.1:{port}: Address already in use"),
            (start(PYTHONPATH=str(tmp_path)), 1, "pip install 'traceml-ray[dash]'"),
        ):
            ended, output, errors = started.end()
            assert (ended, output) == (code, "")
            assert expected in errors and errors.count("\n") == 1


@pytest.mark.parametrize(("asked", "most_s", "stayed_s"), [(10, 1800, 40), (10**6, 100, 100), (0, 1800, 30)])
def test_dashboard_stays_while_a_browser_asks_and_ends_by_itself(
    out: Path, asked: int, most_s: int, stayed_s: int
) -> None:
    clock = Clock()
    clock.now = 0
    pages = SessionPages(open_source("stored", str(out), None), timer=lambda: clock.now)

    def sleep(seconds: float) -> None:
        clock.now += seconds
        if clock.now <= asked:  # s in which a browser asks
            pages.note_watched()

    _linger(pages, most_s, sleep)
    assert clock.now == pytest.approx(stayed_s, abs=1)


def test_dashboard_child_ends_with_its_parent_and_explains_a_failed_start(out: Path) -> None:
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    child = DashboardProcess("stored", os.environ, heard.put, sessions=str(out), port="0", linger="600")
    url = child.wait(240)
    assert heard.get(timeout=240) == f"dashboard: {url}"
    assert get(url)[0] == 200
    port = url[:-1].rpartition(":")[2]
    same = DashboardProcess("stored", os.environ, heard.put, sessions=str(out), port=port)
    assert same.wait(240) == ""
    assert heard.get(timeout=240).startswith("no dashboard: cannot listen on 127.0.0.1:")
    other = DashboardProcess("stored", os.environ, heard.put, sessions=str(out), port="0")
    assert heard.get(timeout=240) == f"dashboard: {other.url}"
    other._process.kill()
    assert heard.get(timeout=240) == "no dashboard: it ended with exit code -9"
    assert child._process.stdin is not None
    child._process.stdin.close()
    until(lambda: child._process.poll() is not None, "the child ends")
    assert (child._process.returncode, child.wait(0)) == (0, "")
