"""Loops of every shape on a played device: rows, results and errors are as on the CPU's clock."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

import pytest
import torch
from fake_device import CALLS, EPSILON_NS, FakeDevice, use
from integration import loops
from unit.test_device import drained

from traceml_ray.agent.device import DeviceClock
from traceml_ray.stages import FLAG_DEVICE_CLOCK, FLAG_INSEPARABLE, FLAG_NO_PEERS, SEGMENT_BITS

TICK_NS = 1000
NAMES = [name for name in loops.ATTRIBUTED | loops.UNBROKEN if name != "spawn_workers"]
QUICK = [name for name in NAMES if not name.startswith("compiled")]


class Ticking(FakeDevice):
    """Its host's clock goes on by a microsecond each time it is looked at."""

    def __call__(self) -> int:
        self.now += TICK_NS
        return self.now


class DeviceJob(loops.Job):
    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        recorder = self.recorder
        recorder.clock = device
        recorder.stamp_with(device)
        recorder.steps.forget(device.now)
        self.device, self.clock = device, use(recorder, device)


def run(name: str, trouble: Callable[[FakeDevice], None] = lambda _: None) -> tuple[DeviceJob, DeviceClock]:
    device = Ticking()
    trouble(device)
    job = DeviceJob(device)
    job.instrumentation.install()
    try:
        (loops.ATTRIBUTED | loops.UNBROKEN)[name](job)
    finally:
        job.instrumentation.remove()
    device.wait(EPSILON_NS)
    job.recorder.replay()
    job.clock.resolve(job.recorder.first_event())
    job.recorder.stop_device_clock()
    return job, job.clock


def same_results(name: str, job: loops.Job, times: int = 1) -> None:
    bare = loops.run(name, watched=False)
    assert times * len(bare.nets) == len(job.nets) > 0
    for one, other in zip(times * bare.nets, job.nets, strict=True):
        for (key, before), (_, after) in zip(
            one.state_dict().items(), other.state_dict().items(), strict=True
        ):
            assert torch.equal(before, after), key
    assert not job.instrumentation.errors


@pytest.mark.parametrize("name", NAMES)
def test_rows_on_an_idle_device_are_those_of_its_host(name: str) -> None:
    job, clock = run(name)
    rows = drained(job)  # type: ignore[arg-type]
    plain = loops.run(name)
    expected = [(row["step"], row["segment"], row["flags"]) for row in plain.rows()]
    clocks = FLAG_DEVICE_CLOCK | FLAG_INSEPARABLE
    assert [(key >> 8, key & 255, flags & ~clocks) for key, flags, *_ in rows] == expected
    assert not clock.stopped
    for _, flags, row, host, _ in rows[1:]:
        assert flags & FLAG_DEVICE_CLOCK and not flags & FLAG_INSEPARABLE
        assert all(abs(a - b) < 20 * TICK_NS for a, b in zip(row, host, strict=True))
        assert flags & FLAG_NO_PEERS


@pytest.mark.parametrize("name", QUICK)
def test_results_are_the_same_to_the_bit_with_a_device_in_trouble(name: str) -> None:
    """An error at one call or another, captures, a queue that is full: the loop does not notice."""

    def fails(nth: int) -> Callable[[FakeDevice], None]:
        def trouble(device: FakeDevice) -> None:
            device.fails = lambda called, count: called == "record" and count == nth

        return trouble

    def captures(device: FakeDevice) -> None:
        device.captures = lambda count: count % 3 == 0
        device.record_takes_ns = lambda count: 10_000_000 * (count % 5 == 0)

    for trouble in (captures, fails(1), fails(2), fails(11), fails(12), fails(30)):
        job, clock = run(name, trouble)
        same_results(name, job)
        assert bool(clock.stopped) == job.device.broken
        keys = [key for key, *_ in drained(job)]  # type: ignore[arg-type]
        assert keys == sorted(set(keys)) and bool(keys) == (name != "autograd_grad")


class AgentsThread(threading.Thread):
    """Reads the device's clock, and stays in its first call of that name until it is `released`."""

    def __init__(self, job: loops.Job, device: FakeDevice, call: str) -> None:
        super().__init__(daemon=True)
        self.inside, self.released, self.over = threading.Event(), threading.Event(), threading.Event()
        self._job, self._device, self._call = job, device, call
        device.during = self._during

    def _during(self, called: str, _: int) -> None:
        if called == self._call and threading.current_thread() is self:
            self.inside.set()
            self.released.wait(60)

    def run(self) -> None:
        recorder = self._job.recorder
        clock = use(recorder, self._device)
        while not self.over.wait(0.001):
            recorder.replay()
            clock.resolve(recorder.first_event())
            clock.device_position(loops.STEPS, recorder.steps.open_cuts())


@pytest.mark.parametrize("call", [name for name in CALLS if name not in ("capturing", "record", "elsewhere")])
def test_agents_call_that_does_not_return_holds_up_no_mark_and_no_child(call: str) -> None:
    """As the driver's calls do while another thread has the lock of the context."""
    device, job = Ticking(), loops.Job()
    job.recorder.clock = device
    job.recorder.stamp_with(device)
    job.recorder.steps.forget(device.now)
    agent = AgentsThread(job, device, call)
    job.instrumentation.install()
    try:
        agent.start()
        while not agent.inside.wait(0.01):
            loops.plain(job)
        loops.plain(job)
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                job.instrumentation.remove()
                list(job.loader())
                status = 0
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0 and not agent.released.is_set()
    finally:
        job.instrumentation.remove()
        agent.released.set()
    agent.over.set()
    agent.join(60)
    device.wait(EPSILON_NS)
    job.recorder.replay()
    job.recorder.stop_device_clock()
    steps = [key >> SEGMENT_BITS for key, *_ in drained(job)]  # type: ignore[arg-type]
    assert steps == list(range(len(job.nets) * loops.STEPS))
    same_results("plain", job, times=len(job.nets))


def test_child_that_is_forked_at_any_mark_asks_nothing_of_the_device() -> None:
    """As a loader's worker does: it leaves the patches, fetches, and ends."""
    device = Ticking()
    job = DeviceJob(device)
    children: list[int] = []

    def fork(_: int) -> int:
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                job.instrumentation.remove()
                asked = sum(device.calls.values())
                list(job.loader())
                job.nets[0](torch.zeros(1, loops.WIDTH))
                status = int(sum(device.calls.values()) != asked)
            os._exit(status)
        children.append(child)
        return 0

    device.record_takes_ns = fork
    job.instrumentation.install()
    try:
        loops.plain(job)
    finally:
        job.instrumentation.remove()
    assert len(children) > 5 * loops.STEPS
    assert {os.waitpid(child, 0)[1] for child in children} == {0}
    same_results("plain", job)
