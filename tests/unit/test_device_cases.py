"""
Two ranks, each with a host, a compute stream and an exchange that ends when the last has come.

What a rank's rows say is compared with when its device came to each mark, kept by the test itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from unit.test_device import MS, DeviceLoop, drained

from traceml_ray.agent.marks import (
    BACKWARD_BEGIN,
    FORWARD_BEGIN,
    GRADIENTS_DONE,
    SYNCED_BACKWARD_END,
)
from traceml_ray.stages import (
    BACKWARD,
    DATA,
    FLAG_DEVICE_CLOCK,
    FORWARD,
    N_STAGES,
    POST_SYNC,
    PREPARE,
    SYNC_WAIT,
)

STEPS = 16
EXCHANGE = 4.0


@dataclass(frozen=True)
class Job:
    """What host and device take for each part of a step, in ms."""

    host: tuple[float, float, float, float, float] = (1, 0, 3, 4, 1)
    """data, prepare, forward, backward, optimizer"""
    device: tuple[float, float, float] = (10, 20, 4)
    """forward, backward, optimizer"""
    ahead: int = 4
    """How many steps the host may be before its device."""
    waits: str = ""
    """`loss`: for the loss; `step`: for the whole step."""
    kernels: int = 5


HOST_BOUND = Job(host=(2, 0, 12, 20, 5), device=(6, 12, 2))


@dataclass
class Rank:
    job: Job
    loop: DeviceLoop = field(default_factory=DeviceLoop)
    truth: list[list[int]] = field(default_factory=list)
    """When the device came to the marks of each step."""
    exits: deque[int] = field(default_factory=deque)

    def train(self) -> Generator[int, int, None]:
        """Go through the steps; gives when its gradients are there, takes when the exchange is over."""
        for _ in range(STEPS):
            yield from self._step()

    def _step(self) -> Generator[int, int, None]:
        device, recorder, job = self.loop.device, self.loop.recorder, self.job
        data, prepare, forward, backward, optimizer = (round(ms * MS) for ms in job.host)
        if len(self.exits) == job.ahead:
            device.now = max(device.now, self.exits.popleft())
        self.truth.append([])
        assert recorder.data_begin(self.loop.loader)
        self._note()
        device.wait(data)
        recorder.data_end(True)
        self._note()
        device.wait(prepare)
        self._write(FORWARD_BEGIN, lambda: recorder.forward_begin(FORWARD_BEGIN))
        self._work(forward, job.device[0])
        if job.waits == "loss":
            device.item()
        self._write(BACKWARD_BEGIN, recorder.backward_begin)
        recorder.ready, ready = 0, recorder.ready
        self._work(backward, job.device[1])
        recorder.log.append(GRADIENTS_DONE)
        recorder.log.append(recorder.stamp())
        self._note()
        device.wait_for((yield device.ends["default"]))
        recorder.ready = ready
        self._write(SYNCED_BACKWARD_END, lambda: recorder.backward_end(True))
        self.exits.append(device.ends["default"])
        began = recorder.optimizer_begin()
        self._work(optimizer, job.device[2])
        recorder.optimizer_end(began)
        if job.waits == "step":
            device.item()
        recorder.replay()
        self.loop.use.resolve(recorder.first_event())

    def _work(self, host: int, device_ms: float) -> None:
        for _ in range(self.job.kernels):
            self.loop.device.wait(host // self.job.kernels)
            self.loop.device.launch(round(device_ms * MS) // self.job.kernels)

    def _write(self, mark: int, at_once: Callable[[], object]) -> None:
        if not self.loop.recorder.write(mark):
            at_once()
        self._note()

    def _note(self) -> None:
        device = self.loop.device
        self.truth[-1].append(max(device.ends["default"], device.now + device.epsilon_ns))


def play(*jobs: Job) -> list[Rank]:
    """Train all ranks, each exchange ending EXCHANGE after the last has come."""
    ranks = [Rank(job) for job in jobs]
    runs = [rank.train() for rank in ranks]
    arrivals = [next(run) for run in runs]
    while True:
        end = max(arrivals) + round(EXCHANGE * MS)
        try:
            arrivals = [run.send(end) for run in runs]
        except StopIteration:
            break
    for run in runs[1:]:
        with pytest.raises(StopIteration):
            run.send(end)
    for rank in ranks:
        rank.loop.device.now += 1000 * MS
        rank.loop.recorder.optimizer_begin()
        rank.loop.recorder.replay()
        rank.loop.use.resolve(rank.loop.recorder.first_event())
    return ranks


def slower(job: Job, field: str, part: int, ms: float) -> Job:
    """Return `job` with so much more in one part of its host or device."""
    parts = list(getattr(job, field))
    parts[part] += ms
    return replace(job, **{field: tuple(parts)})


LOSS, STEP = replace(Job(), waits="loss"), replace(Job(), waits="step")
DEVICE_BOUND = (4.0, 0.0, 0.0, 10.0, 20.0, 4.0)
CASES: dict[str, tuple[Job, Job, tuple[float, ...], tuple[float, ...]]] = {
    "C1 balanced": (Job(), Job(), DEVICE_BOUND, DEVICE_BOUND),
    "C2 data, hidden": (slower(Job(), "host", 0, 20), Job(), DEVICE_BOUND, DEVICE_BOUND),
    "C3 data": (slower(Job(), "host", 0, 45), Job(), (4, 15.5, 0, 10.6, 20, 4), (4, 0, 0, 10, 20, 20)),
    "C4 data, item": (slower(STEP, "host", 0, 20), STEP, (4, 21, 0, 10.6, 20, 4), (4, 1, 0, 10.6, 20, 24)),
    "C5 backward": (slower(Job(), "device", 1, 12), Job(), (4, 0, 0, 10, 32, 4), (4, 0, 0, 10, 20, 16)),
    "C6 forward, item": (slower(STEP, "host", 2, 12), STEP, (4, 1, 0, 17, 20, 4), (4, 1, 0, 10.6, 20, 10.4)),
    "C7 throttled": (
        replace(Job(), device=(13, 26, 5.2)),
        Job(),
        (5.2, 0, 0, 13, 26, 4),
        (4, 0, 0, 10, 20, 14),
    ),
    "C8 optimizer": (slower(LOSS, "device", 2, 9), LOSS, (13, 0, 0, 10, 20, 4), (4, 0, 0, 10, 20, 13)),
    "C9 forward, host-bound": (
        slower(HOST_BOUND, "host", 2, 10),
        HOST_BOUND,
        (2, 0, 0, 23, 20, 4),
        (2, 0, 0, 6, 12, 29),
    ),
    "C10 device, host-bound": (
        slower(HOST_BOUND, "device", 0, 10),
        HOST_BOUND,
        (2, 0, 0, 18, 15, 4),
        (2, 0, 0, 13, 20, 4),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_the_worked_case(name: str) -> None:
    slow, usual, late_row, other_row = CASES[name]
    ranks = play(slow, usual)
    for rank, expected in zip(ranks, (late_row, other_row), strict=True):
        rows = drained(rank.loop)
        assert len(rows) == STEPS and all(flags & FLAG_DEVICE_CLOCK for _, flags, *_ in rows[1:])
        for number, (_, _, row, _, _) in enumerate(rows[1:], 1):
            truth = [rank.truth[number - 1][-1], *rank.truth[number]]
            assert list(row) == [after - before for before, after in pairwise(truth)]
        assert [ns / MS for ns in rows[-1][2]] == pytest.approx(expected, abs=1.3)


def bits(*stages: int) -> int:
    return sum(1 << stage for stage in stages)


ALL = bits(*range(N_STAGES))


@pytest.mark.parametrize(
    ("name", "late", "sure"),
    [
        ("C1 balanced", 0, ALL),
        ("C3 data", bits(PREPARE), bits(POST_SYNC, BACKWARD, SYNC_WAIT)),
        ("C4 data, item", bits(DATA, PREPARE), bits(BACKWARD, SYNC_WAIT)),
        ("C6 forward, item", bits(DATA, PREPARE, FORWARD), bits(SYNC_WAIT)),
    ],
)
def test_leads_say_where_the_device_had_caught_up(name: str, late: int, sure: int) -> None:
    ranks = play(*CASES[name][:2])
    leads = drained(ranks[0].loop)[-1][4]
    assert leads == (late, 0, sure)


def test_host_time_is_not_sure_where_the_host_has_waited_in_it() -> None:
    """`.item()` after a step: the host's time there is that of its device."""
    ranks = play(*CASES["C4 data, item"][:2])
    for rank in ranks:
        *_, leads = drained(rank.loop)[-1]
        assert not leads[2] & bits(POST_SYNC)
