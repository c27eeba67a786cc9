"""Rows on a device's clock: the real recorder, a device that is played."""

from __future__ import annotations

import struct

from fake_device import EPSILON_NS, FakeDevice, use
from hypothesis import example, given
from hypothesis import strategies as st
from unit.test_recorder import MARKS, Loop, WrittenLoop, play

from traceml_ray.agent.device import DeviceClock
from traceml_ray.stages import (
    FLAG_COUPLED,
    FLAG_DEVICE_CLOCK,
    FLAG_FIRST,
    LEAD_UNKNOWN,
    N_STAGES,
    SEGMENT_BITS,
)

Row = tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
MS = 1_000_000


class DeviceLoop(WrittenLoop):
    """A training loop of marks whose clock is a device's."""

    def __init__(self, device: FakeDevice | None = None) -> None:
        self.device = device or FakeDevice()
        super().__init__(self.device)
        self.use: DeviceClock = use(self.recorder, self.device)

    def both(self) -> list[Row]:
        """(key, flags, row, host row, leads) of what the device is done with."""
        self.recorder.settle()
        self.use.resolve(self.recorder.first_event())
        return drained(self)


def drained(loop: Loop) -> list[Row]:
    _, keys, flags, rows, hosts, leads = loop.ring.drain_hosts(10_000)
    size = 8 * N_STAGES
    hosts, leads = hosts or rows, leads or bytes([LEAD_UNKNOWN] * 3 * len(flags))
    return [
        (
            struct.unpack_from("<q", keys, 8 * i)[0],
            flags[i],
            struct.unpack_from(f"<{N_STAGES}q", rows, size * i),
            struct.unpack_from(f"<{N_STAGES}q", hosts, size * i),
            struct.unpack_from("<3B", leads, 3 * i),
        )
        for i in range(len(flags))
    ]


def test_device_without_delays_gives_the_row_of_its_host() -> None:
    loop = DeviceLoop()
    for _ in range(4):
        loop.step(post=7)
    loop.device.wait(EPSILON_NS)
    first, *rows = loop.both()
    assert first[1] == FLAG_FIRST | FLAG_COUPLED and first[2] == first[3]
    assert len(rows) == 3
    for number, (key, flags, row, host, _) in enumerate(rows, 1):
        assert (key, flags) == (number << SEGMENT_BITS, FLAG_DEVICE_CLOCK)
        assert row == host == (7, 2, 3, 4, 5, 6)


@example([("val", 5), ("failed", 1), ("data", 3), ("val", 2)])
@given(MARKS)
def test_device_row_follows_its_host_whatever_the_order_of_marks(marks: list[tuple[str, int]]) -> None:
    """Key and flags are the same, and where the device has no delays the times are, too."""
    plain, loop = WrittenLoop(), DeviceLoop()
    for one in (plain, loop):
        play(one, marks)
        one.step()
        one.step()
    loop.device.wait(EPSILON_NS)
    found = loop.both()
    assert [(key, flags & ~FLAG_DEVICE_CLOCK & ~FLAG_COUPLED) for key, flags, *_ in found] == [
        (key, flags) for key, flags, _ in plain.rows()
    ]
    for _, flags, row, host, _ in found:
        assert row == host
        assert bool(flags & FLAG_DEVICE_CLOCK) != bool(flags & FLAG_COUPLED)
    assert found[-1][1] == FLAG_DEVICE_CLOCK


@given(MARKS, st.lists(st.integers(0, 3000), min_size=1))
def test_stages_of_a_device_row_are_all_of_it(marks: list[tuple[str, int]], kernels: list[int]) -> None:
    """Whatever the device has to do, stages are not negative and sum to the time between the exits."""
    loop = DeviceLoop()
    for start in range(0, len(marks), 3):
        loop.device.launch(kernels[start % len(kernels)])
        play(loop, marks[start : start + 3], begun=start > 0)
    loop.step()
    loop.step()
    loop.device.wait(10 * MS)
    found = loop.both()
    assert not loop.use.waiting
    for _, flags, row, host, leads in found:
        assert min(row) >= 0 and min(host) >= 0
        assert flags & FLAG_DEVICE_CLOCK or row == host
        assert all(lead < 64 or lead == LEAD_UNKNOWN for lead in leads)
    exits = loop.device.recorded
    assert sum(found[-1][2]) in {until - since for since in exits for until in exits}
