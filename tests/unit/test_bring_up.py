"""Ray and the helper of a launch: when they are started, at which priority, and what is said of it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from traceml_ray.launchers import bring_up
from traceml_ray.launchers.bring_up import BringUp
from traceml_ray.launchers.helper import HelperRequest
from traceml_ray.ray.actors import ActorConfig
from traceml_ray.settings import Settings
from traceml_ray.store.session import MonitorState

REQUEST = HelperRequest(1, "127.0.0.1:1", ActorConfig("s", Settings()), 1.0)
OK = """print('{"ok": true}')"""
NO = """print('{"ok": false, "detail": "no room"}')"""
DIES = "raise SystemExit(9)"


class Launch:
    """A launch that notes what happens, in order; it is its own Ray, and its helper is a line of Python."""

    def __init__(self, helper: str, nice: int = 10) -> None:
        self.seen = list[str]()
        self.settled = threading.Event()
        ray: Any = self
        self.bring_up = BringUp(ray, REQUEST, {}, Path("/"), nice, self.show)
        self._helper = helper
        self.bring_up._start_helper = self.start_helper  # type: ignore[method-assign]

    def show(self, state: MonitorState, detail: str) -> None:
        self.seen.append(f"{state} {detail}".strip())

    def start(self) -> None:
        self.seen.append("Ray")

    def start_helper(self) -> subprocess.Popen[bytes]:
        self.seen.append("helper")
        words = [sys.executable, "-IS", "-c", self._helper]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def exited(self) -> bool:
        return False

    def yield_cores(self, nice: int) -> None:
        self.seen.append(f"nice {nice}")
        self.settled.set()

    def stop(self) -> None:
        self.seen.append("Ray is stopped")
        self.settled.set()


@pytest.fixture
def launch() -> Iterator[Callable[..., Launch]]:
    made = list[Launch]()

    def make(helper: str, nice: int = 10) -> Launch:
        made.append(Launch(helper, nice))
        return made[-1]

    yield make
    for relay_host in made:
        relay_host.bring_up.end()
        relay_host.bring_up.close()


def test_start_waits_for_an_idle_core_and_yields_only_when_it_is_done(
    launch: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start at low priority takes minutes beside busy cores."""
    asked = list[float]()
    monkeypatch.setattr(bring_up, "wait_for_idle_core", lambda most_s, *_: asked.append(most_s))
    made = launch(OK)
    made.bring_up.begin()
    assert made.settled.wait(240)
    assert asked == [bring_up.START_WAIT_S]
    assert made.seen == ["waiting_for_cpu", "starting", "Ray", "helper", "running", "nice 10"]


def _unreadable(_: float) -> float:
    raise FileNotFoundError("/proc/stat")


@pytest.mark.parametrize("cpu_pct", [lambda _: 100.0, _unreadable], ids=["busy", "unknown"])
def test_start_takes_a_core_after_a_while_where_none_is_idle(
    launch: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch, cpu_pct: Callable[[float], float]
) -> None:
    monkeypatch.setattr(bring_up, "START_WAIT_S", 0.01)
    monkeypatch.setattr(psutil, "cpu_percent", cpu_pct)
    made = launch(OK)
    made.bring_up.begin()
    assert made.settled.wait(240) and "running" in made.seen


@pytest.mark.parametrize(("helper", "why"), [(NO, "no room"), (DIES, "the helper ended with exit code 9")])
def test_monitor_that_cannot_start_is_one_line_and_its_ray_is_stopped(
    launch: Callable[..., Launch], capsys: pytest.CaptureFixture[str], helper: str, why: str
) -> None:
    made = launch(helper, nice=0)
    made.bring_up.begin()
    assert made.settled.wait(240)
    assert made.seen == ["starting", "Ray", "helper", f"failed {why}", "Ray is stopped"]
    assert capsys.readouterr().err == f"traceml-ray: training goes on without a live monitor: {why}\n"


def test_job_that_ends_before_a_core_is_idle_starts_nothing(
    launch: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, go_on = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        waits.set()
        go_on.wait(240)

    monkeypatch.setattr(bring_up, "wait_for_idle_core", wait)
    made = launch(OK)
    made.bring_up.begin()
    assert waits.wait(240)
    made.bring_up.end()
    go_on.set()
    made.bring_up.close()
    for thread in threading.enumerate():
        if thread.name == "traceml-start":
            thread.join(240)
    assert made.seen == ["waiting_for_cpu"]


def test_end_while_the_helper_works_is_no_failure(
    launch: Callable[..., Launch], capsys: pytest.CaptureFixture[str]
) -> None:
    made = launch("import time; time.sleep(600)", nice=0)
    started = threading.Event()
    begins = made.start_helper

    def start_helper() -> subprocess.Popen[bytes]:
        helper = begins()
        started.set()
        return helper

    made.bring_up._start_helper = start_helper  # type: ignore[method-assign]
    made.bring_up.begin()
    assert started.wait(240)
    made.bring_up.end()
    made.bring_up.close()
    for thread in threading.enumerate():
        if thread.name == "traceml-start":
            thread.join(240)
    assert made.seen == ["starting", "Ray", "helper"]
    assert capsys.readouterr().err == ""
