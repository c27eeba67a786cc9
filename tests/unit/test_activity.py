"""Whether the training thread is found to do something, while no step ends."""

from __future__ import annotations

import hashlib
import linecache
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from traceml_ray.agent.activity import MIN_BYTES, OPEN_NS, RUNS, Activity, ThreadLook, has_moved


class Ticks:
    """A clock of monotonic seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def thread(work: Callable[[threading.Event], None]) -> Iterator[int]:
    over = threading.Event()
    worker = threading.Thread(target=work, args=(over,))
    worker.start()
    try:
        assert worker.ident is not None
        yield worker.ident
    finally:
        over.set()
        worker.join(240)


def wait(over: threading.Event) -> None:
    over.wait(240)


def until_it_waits(ident: int) -> None:
    """Return once a thread is in its wait: the line that it is in does not go on before."""
    while True:
        frame = sys._current_frames()[ident]
        if frame.f_code is threading.Condition.wait.__code__:
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if "waiter.acquire(True, timeout)" in line:
                return
        time.sleep(0.001)


def looks(activity: Activity, clock: Ticks, owner: int, count: int, opened_s: float) -> None:
    for _ in range(count):
        clock.now += 0.5
        opened_s += 0.5
        activity.look(owner, int(opened_s * 1e9))


def test_thread_that_waits_is_still_since_it_entered_its_stage() -> None:
    clock = Ticks()
    activity = Activity(clock)
    assert activity.still_s is None
    with thread(wait) as owner:
        until_it_waits(owner)
        looks(activity, clock, owner, 20, 0.0)
    assert activity.still_s == pytest.approx(10.0)


def test_thread_that_works_is_not_still() -> None:
    rounds = 0

    def work(over: threading.Event) -> None:
        nonlocal rounds
        while not over.is_set():
            sorted(range(1000), key=str)
            rounds += 1

    clock = Ticks()
    activity = Activity(clock)
    with thread(work) as owner:
        for _ in range(60):
            looks(activity, clock, owner, 1, 20.0)
            if activity.still_s == 0.0:
                break
            before = rounds
            while rounds == before:
                time.sleep(0.001)
    assert activity.still_s == 0.0


def test_thread_that_sleeps_between_its_work_is_found_by_how_often_it_slept() -> None:
    naps = 0

    def nap(over: threading.Event) -> None:
        nonlocal naps
        while not over.is_set():
            time.sleep(0.001)
            naps += 1

    clock = Ticks()
    activity = Activity(clock)
    with thread(nap) as owner:
        looks(activity, clock, owner, 1, 20.0)
        before = naps
        while naps < before + 3 * RUNS:
            time.sleep(0.01)
        looks(activity, clock, owner, 1, 20.5)
    assert activity.still_s == 0.0


def test_thread_that_computes_without_python_is_not_still() -> None:
    """One call that lasts holds the same instruction, and gives up no core by itself."""

    def hash_bytes(over: threading.Event) -> None:
        while not over.is_set():
            hashlib.pbkdf2_hmac("sha256", b"x", b"y", 3_000_000)

    activity = Activity()
    with thread(hash_bytes) as owner:
        end = time.monotonic() + 240  # a thread that waits for a core is only seen to do so once it has one
        while (activity.still_s or 20.0) >= 10.0:
            assert time.monotonic() < end
            time.sleep(0.02)
            activity.look(owner, int(20e9))


@pytest.mark.parametrize(
    ("changed", "moved"),
    [
        ({}, False),
        ({"stack": ((1, 3),)}, True),
        ({"switches": 10 + RUNS - 1, "core_ns": 9_000_000, "started_s": 1.1, "started_bytes": 400}, False),
        ({"core_ns": 700_000_000}, True),
        ({"core_ns": None}, False),
        ({"started_s": 1.7}, True),
        ({"started_s": 0.0, "started_bytes": 0}, False),
        ({"started_bytes": MIN_BYTES}, True),
        ({"awaited_switches": RUNS}, True),
    ],
)
def test_what_counts_as_work(changed: dict[str, Any], moved: bool) -> None:
    first = ThreadLook(100.0, ((1, 2),), 10, 0, 1.0, 0, 0)
    before = [first._replace(t_s=100.0 + i / 2) for i in range(6)]
    assert has_moved(before, first._replace(t_s=103.0, **changed)) == moved


def test_work_with_pauses_of_a_second_is_seen_over_some_looks() -> None:
    """A batch each second: two looks in turn have at most one pause between them."""
    looks = [ThreadLook(100.0 + i / 2, ((1, 2),), 10 + i // 2, 0, 0.0, 0, 0) for i in range(7)]
    assert not has_moved(looks[2:3], looks[3])
    assert has_moved(looks[:6], looks[6])
    waits = [look._replace(switches=10 + i // 6) for i, look in enumerate(looks)]
    assert not has_moved(waits[:6], waits[6]), "a wait that wakes up every three seconds"


@pytest.mark.parametrize(("function", "still_s"), [("_cmdloop", 0.0), ("run", 22.0)])
def test_thread_that_is_paused_in_a_debugger_is_not_still(function: str, still_s: float) -> None:
    """What runs in a debugger has it in its stack all the time."""
    space: dict[str, Any] = {}
    code = f"def {function}(over):\n    over.wait(240)\n"
    exec(compile(code, "/usr/lib/python3.11/pdb.py", "exec"), space)
    clock = Ticks()
    activity = Activity(clock)
    with thread(space[function]) as owner:
        until_it_waits(owner)
        looks(activity, clock, owner, 4, 20.0)
    assert activity.still_s == pytest.approx(still_s)


def test_thread_is_not_looked_at_while_steps_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError

    monkeypatch.setattr("traceml_ray.agent.activity.current_frames", refuse)
    clock = Ticks()
    activity = Activity(clock)
    activity.look(None, OPEN_NS)
    assert activity.still_s == pytest.approx(OPEN_NS / 1e9)
