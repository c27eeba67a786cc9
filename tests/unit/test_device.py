"""Rows on a device's clock: the real recorder, a device that is played."""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from fake_device import CALLS, EPSILON_NS, FakeDevice, use
from hypothesis import example, given
from hypothesis import strategies as st
from unit.test_recorder import MARKS, Loop, WrittenLoop, play

from traceml_ray.agent.device import (
    EVENT_SLOTS,
    MAX_ROWS_BEHIND,
    ClockOffset,
    Cut,
    DeviceClock,
    late_below,
    masks,
)
from traceml_ray.agent.marks import BACKWARD_BEGIN, BRACKET_BEGIN, SYNC_END, SYNCED_BACKWARD_END
from traceml_ray.agent.patch import fsdp
from traceml_ray.agent.patch.collectives import Collectives
from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.agent.recorder import Spans
from traceml_ray.stages import (
    BACKWARD,
    DATA,
    FLAG_DEVICE_CLOCK,
    FLAG_EXCLUDED,
    FLAG_INSEPARABLE,
    FORWARD,
    LEAD_UNKNOWN,
    N_STAGES,
    POST_SYNC,
    PREPARE,
    SEGMENT_BITS,
    SYNC_WAIT,
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
        self.recorder.replay()
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
    assert first[1] == FLAG_EXCLUDED | FLAG_INSEPARABLE and first[2] == first[3]
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
    rows = loop.both()
    assert [(key, flags & ~FLAG_DEVICE_CLOCK & ~FLAG_INSEPARABLE) for key, flags, *_ in rows] == [
        (key, flags) for key, flags, _ in plain.rows()
    ]
    for _, flags, row, host, _ in rows:
        assert row == host
        assert bool(flags & FLAG_DEVICE_CLOCK) != bool(flags & FLAG_INSEPARABLE)
    assert rows[-1][1] == FLAG_DEVICE_CLOCK


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
    rows = loop.both()
    assert not loop.use.waiting
    for _, flags, row, host, leads in rows:
        assert min(row) >= 0 and min(host) >= 0
        assert flags & FLAG_DEVICE_CLOCK or row == host
        assert all(lead < 64 or lead == LEAD_UNKNOWN for lead in leads)
    exits = loop.device.recorded
    assert sum(rows[-1][2]) in {until - since for since in exits for until in exits}


TROUBLE = st.tuples(st.sampled_from(CALLS), st.integers(1, 60))


@given(
    st.lists(st.tuples(st.integers(0, 40 * MS), st.integers(0, 40 * MS), st.booleans()), max_size=40),
    st.none() | TROUBLE,
    st.none() | st.integers(1, 200),
)
def test_no_row_is_lost_or_overtaken_whatever_the_device_does(
    steps: list[tuple[int, int, bool]], trouble: tuple[str, int] | None, captured: int | None
) -> None:
    """Late, captured or broken: each row goes out once, in order; nothing is asked of a broken device."""
    loop = DeviceLoop()
    if trouble is not None:
        loop.device.fails = lambda name, count: (name, count) == trouble
    if captured is not None:
        loop.device.captures = lambda count: count % captured == 0
    rows = []
    for host, kernel, read in steps:
        loop.device.launch(kernel)
        loop.step(post=host)
        if read:
            rows += loop.both()
    waited = loop.use.waiting
    assert loop.ring.accepted + waited <= len(steps)
    loop.recorder.stop_device_clock()
    rows += drained(loop)
    assert [key >> SEGMENT_BITS for key, *_ in rows] == list(range(len(steps)))
    assert bool(loop.use.stopped) == loop.device.broken
    loop.step()
    assert not loop.device.broken or loop.use.stopped.startswith("DeviceError")


@given(st.integers(-50, 50), st.lists(st.booleans(), min_size=17, max_size=17))
def test_offset_is_found_though_clocks_drift_and_beats_come_late(drift: int, late: list[bool]) -> None:
    """Drift in us/s; beats that were held up do not matter while others were not."""
    offset = ClockOffset()
    held = [*late, False, False, False]
    for number in range(200):
        cpu = number * 500 * MS
        offset.add(cpu, 77 * MS + round(cpu * drift / 1e6) + 5 * MS * held[number % 20])
        if number >= 20:
            ns = offset.at(cpu - 100 * MS)
            if ns is not None:
                assert abs(ns - 77 * MS - (cpu - 100 * MS) * drift / 1e6) < 100_000
    assert ns is not None or sum(held) >= 10


def test_lead_is_not_known_where_all_streams_share_a_queue() -> None:
    loop = DeviceLoop()
    loop.device.late_ns = lambda count: (count * 7919) % 50 * MS
    for _ in range(60):
        loop.step()
        loop.device.wait(500 * MS)
        rows = loop.both()
    assert rows[-1][1] & FLAG_DEVICE_CLOCK and rows[-1][4] == (LEAD_UNKNOWN,) * 3


def test_stage_is_full_where_recording_its_mark_blocked() -> None:
    loop = DeviceLoop()
    for _ in range(8):
        loop.step()
        loop.device.wait(300 * MS)
        loop.both()
    begun = loop.device.calls["record"]
    loop.device.record_takes_ns = lambda count: 60_000 if count == begun + 3 else 0
    loop.step()
    loop.device.wait(MS)
    (row,) = loop.both()
    assert row[4][1] == 1 << PREPARE | 1 << FORWARD


class TestDeviceThatIsBehind:
    def behind(self, steps: int) -> DeviceLoop:
        """Its device has nothing done of the newest steps."""
        loop = DeviceLoop()
        loop.step()
        loop.step()
        loop.device.wait(EPSILON_NS)
        assert len(loop.both()) == 2
        loop.device.launch(3_600_000 * MS)
        for _ in range(steps):
            loop.step()
        return loop

    def test_rows_wait_for_it_up_to_a_number(self) -> None:
        loop = self.behind(MAX_ROWS_BEHIND)
        assert loop.both() == [] and loop.use.waiting == MAX_ROWS_BEHIND
        loop.step()
        loop.step()
        late = loop.both()
        assert [key >> SEGMENT_BITS for key, *_ in late] == [2, 3]
        assert all(flags & FLAG_INSEPARABLE for _, flags, *_ in late)
        assert loop.use.counts["device rows late"] == 2

    def test_row_that_never_is_done_is_given_up_once_later_ones_are(self) -> None:
        loop = self.behind(1)
        assert loop.both() == []
        loop.device.wait(60_000 * MS)
        assert loop.both() == []
        loop.device.stream = "another"
        loop.step()
        loop.step()
        loop.device.wait(MS)
        assert [bool(flags & FLAG_DEVICE_CLOCK) for _, flags, *_ in loop.both()] == [False]
        loop.device.wait(60_000 * MS)
        assert [bool(flags & FLAG_DEVICE_CLOCK) for _, flags, *_ in loop.both()] == [False, True]

    def test_marks_have_no_event_once_the_ring_is_full_and_have_again_when_it_is_read(self) -> None:
        loop = self.behind(0)
        loop.device.ends.clear()
        for _ in range(EVENT_SLOTS // 4):
            loop.step()
        loop.device.wait(MS)
        assert loop.use.counts["no event free for a mark"]
        assert loop.device.calls["record"] < EVENT_SLOTS + 20
        loop.both()
        loop.step()
        loop.step()
        loop.device.wait(MS)
        assert [bool(flags & FLAG_DEVICE_CLOCK) for _, flags, *_ in loop.both()] == [False, True]

    def test_open_stage_is_that_of_the_oldest_mark_that_is_not_done(self) -> None:
        """The kernel that does not end was launched after the exit of step 1: the device is behind that."""
        loop = self.behind(3)
        loop.both()
        cuts = loop.recorder.steps.open_cuts()
        assert loop.use.device_position(5, cuts) == (2, POST_SYNC, 0)
        loop.device.wait(20_000 * MS)
        assert loop.use.device_position(5, cuts) == (2, POST_SYNC, 20_000 * MS)

    def test_ranks_that_wait_for_a_peer_stand_in_sync_wait(self) -> None:
        loop = self.behind(0)
        device, recorder = loop.device, loop.recorder
        device.ends.clear()
        loop.data(2)
        loop.forward(4)
        recorder.backward_begin()
        device.launch(5)
        recorder.gradients_done()
        device.wait_for(device.now + 3_600_000 * MS)
        recorder.backward_end(True)
        loop.data(2)
        device.wait(MS)
        loop.both()
        assert loop.use.device_position(2, recorder.steps.open_cuts()) == (2, SYNC_WAIT, 0)

    def test_host_is_meant_where_its_device_has_nothing_to_do(self) -> None:
        loop = self.behind(0)
        loop.device.wait(7_200_000 * MS)
        loop.both()
        assert loop.use.device_position(2, loop.recorder.steps.open_cuts()) is None


def test_marks_of_streams_that_are_far_out_of_order_leave_the_host_row() -> None:
    loop = DeviceLoop()
    loop.step()
    loop.data(2)
    loop.device.launch(5000)
    loop.forward(4)
    loop.device.stream = "another"
    loop.backward(5, 6)
    loop.optimizer(1)
    loop.device.wait(MS)
    *_, last = loop.both()
    assert last[1] & FLAG_INSEPARABLE and last[2] == last[3]
    assert loop.use.counts["device rows out of order: several streams"] == 1


def test_long_row_is_read_from_mark_to_mark() -> None:
    """The device's float of ms has steps of 4 us after a minute, and of 0.25 ms after an hour."""
    loop = DeviceLoop()
    loop.device.rounds = True
    loop.step()
    loop.data(3_600_000 * MS)
    loop.forward(1_000_001)
    loop.backward(2_000_002, 3)
    loop.optimizer(1)
    loop.device.wait(MS)
    *_, last = loop.both()
    assert last[2][FORWARD : FORWARD + 2] == pytest.approx((1_000_001, 2_000_002), abs=1000)


def test_foreign_thread_and_sealed_clock_record_nothing() -> None:
    loop = DeviceLoop()
    loop.step()
    before = loop.device.calls["record"]
    thread = threading.Thread(target=lambda: loop.recorder.data_begin(object()))
    thread.start()
    thread.join()
    loop.use.seal()
    loop.step()
    loop.both()
    assert loop.device.calls["record"] == before
    assert not loop.use.counts["no event free for a mark"]


def test_events_are_in_what_marks_cost_also_after_the_device_clock_has_stopped() -> None:
    loop = DeviceLoop()
    loop.step()
    loop.both()
    before, first = loop.recorder.marks_ns, loop.use.next
    loop.device.record_takes_ns = lambda _: 3000
    for _ in range(10):
        loop.step()
    assert loop.both() and loop.use.next > first
    cost_ns = loop.recorder.marks_ns
    assert cost_ns - before == 3000 * (loop.use.next - first)
    assert loop.recorder.stop_device_clock() and loop.recorder.marks_ns == cost_ns


def test_event_of_an_immediate_mark_is_counted_once_in_what_marks_cost() -> None:
    loop = DeviceLoop()
    loop.step()
    loop.both()
    before, first = loop.recorder.marks_ns, loop.use.next
    loop.device.record_takes_ns = lambda _: 3000
    loop.recorder.optimizer_end(loop.recorder.optimizer_begin())
    loop.both()
    assert loop.use.next == first + 2
    assert loop.recorder.marks_ns - before == 2 * 3000


def test_agent_goes_on_while_a_mark_blocks_with_the_lock() -> None:
    """Recording an event may block for as long as the device hangs; the agent has to report that."""
    loop = DeviceLoop()
    loop.step()
    loop.step()
    held, over = threading.Event(), threading.Event()

    def mark() -> None:
        with loop.recorder._lock:
            held.set()
            over.wait(240)

    thread = threading.Thread(target=mark)
    thread.start()
    held.wait(240)
    assert loop.recorder.first_event() == 0
    loop.use.resolve(0)
    assert not loop.recorder.stop_device_clock()
    assert loop.use.device_position(2, loop.recorder.steps.open_cuts()) is None
    over.set()
    thread.join()
    assert loop.recorder.stop_device_clock() and loop.recorder.device is None


def test_wait_of_autograds_thread_counts_inside_a_backward_only() -> None:
    """On a device FSDP's hooks run in autograd's thread, while the one that trains waits for the backward."""
    loop = DeviceLoop()
    loop.step()
    marks: list[bool] = []

    def wait() -> None:
        marks.append(loop.recorder.bracket(BRACKET_BEGIN))
        if marks[-1]:
            loop.device.launch(7)
            loop.device.wait(100)
            loop.recorder.bracket(SYNC_END)

    def elsewhere() -> None:
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()

    elsewhere()
    loop.data(2)
    loop.forward(4)
    loop.recorder.write(BACKWARD_BEGIN)
    loop.recorder.ready, ready = 0, loop.recorder.ready
    loop.device.wait(30)
    elsewhere()
    loop.device.wait(20)
    loop.recorder.ready = ready
    loop.recorder.write(SYNCED_BACKWARD_END)
    loop.optimizer(1)
    loop.device.wait(MS)
    *_, last = loop.both()
    assert marks == [False, True]
    assert last[3][BACKWARD:] == (50, 100) and last[2][BACKWARD:] == (50, 100)


def test_wait_of_another_stream_is_none_of_the_stages() -> None:
    """FSDP gathers on a stream of its own, from the training thread: the compute stream waits elsewhere."""
    loop = DeviceLoop()
    device, recorder = loop.device, loop.recorder
    loop.step()
    loop.data(2)
    loop.forward(4)
    device.launch(10 * MS)
    device.stream = "gather"
    device.wait_for(device.now + 50 * MS)
    assert not recorder.sync_begin()
    device.stream = "default"
    assert recorder.sync_begin()
    device.wait_for(device.ends["gather"])
    recorder.sync_end(True)
    loop.backward(5, 6)
    loop.optimizer(1)
    device.wait(100 * MS)
    *_, last = loop.both()
    assert last[1] & FLAG_DEVICE_CLOCK and not loop.use.counts["device ns out of order"]
    assert [round(ns / MS) for ns in last[2][FORWARD:]] == [10, 0, 40]


def in_autograds_thread(call: Any, hook: bool = True) -> None:
    """Call it in a thread that is not the one that trains: in a hook of a backward, or of a thread's own."""

    def run() -> None:
        x = torch.zeros(1, requires_grad=True)
        doubled = x * 2
        doubled.register_hook(lambda _: call() and None)
        doubled.sum().backward()

    thread = threading.Thread(target=run if hook else call)
    thread.start()
    thread.join()


class TestCollectives:
    def made(self) -> tuple[DeviceLoop, Collectives]:
        loop = DeviceLoop()
        loop.step()
        return loop, Collectives(loop.recorder, Spans(loop.recorder, Mock()), Mock())

    def test_one_that_runs_on_the_compute_stream_is_a_wait_as_a_whole(self) -> None:
        """Its kernel is what waits for peers; when torch then waits for its `Work`, there is nothing left."""
        loop, collectives = self.made()

        def all_reduce(_: torch.Tensor, group: Any = None) -> None:  # noqa: ARG001
            loop.device.wait_for(loop.device.now + 7 * MS)

        loop.data(2)
        loop.forward(4)
        collectives._collective("all_reduce")(all_reduce)(torch.zeros(1))
        loop.backward(5, 6)
        loop.optimizer(1)
        loop.device.wait(20 * MS)
        *_, last = loop.both()
        assert last[1] & FLAG_DEVICE_CLOCK and not last[1] & FLAG_INSEPARABLE
        assert last[2][FORWARD] < MS < 6 * MS < last[2][SYNC_WAIT]

    @pytest.mark.parametrize(
        ("device", "stream", "handle", "inside", "inseparable"),
        [
            ("meta", "default", None, True, True),
            ("cpu", "default", None, True, False),
            ("meta", "reduce", None, True, False),
            ("meta", "default", dist.Work(), True, False),
            ("meta", "default", None, False, False),
        ],
    )
    def test_one_in_a_hook_of_a_backward_couples_where_it_makes_the_stages_wait(
        self, device: str, stream: str, handle: Any, inside: bool, inseparable: bool
    ) -> None:
        """On a device hooks run in autograd's thread, whose waits cannot be marked."""
        loop, collectives = self.made()
        tensor = torch.zeros(1, device=device)
        if inside:
            loop.recorder.write(BACKWARD_BEGIN)
            loop.recorder.ready = 0
        loop.device.stream = stream
        reduce = collectives._collective("all_reduce")(lambda *_: handle)
        in_autograds_thread(lambda: reduce(tensor))
        assert loop.recorder.exchange.inseparable == inseparable

    @pytest.mark.parametrize("future", [False, True])
    def test_wait_in_a_hook_of_a_backward_couples_where_it_makes_the_stages_wait(self, future: bool) -> None:
        for stream, hook, inseparable in (
            ("default", True, True),
            ("reduce", True, False),
            ("default", False, False),
        ):
            loop, collectives = self.made()
            wait = collectives._wait(future=future)(Mock())
            loop.recorder.write(BACKWARD_BEGIN)
            loop.recorder.ready = 0
            loop.device.stream = stream
            in_autograds_thread(wait, hook)
            assert loop.recorder.exchange.inseparable == inseparable, (stream, hook)

    @pytest.mark.parametrize("on_device", [True, False])
    def test_wait_for_a_future_is_marked_on_a_device_only(self, on_device: bool) -> None:
        """`work.get_future().wait()`; on the CPU a future may be for anything."""
        loop, collectives = self.made()
        if not on_device:
            loop.recorder.stop_device_clock()
        marks = len(loop.recorder.log)
        collectives._wait(future=True)(lambda: loop.device.wait_for(loop.device.now + 7 * MS))()
        assert (len(loop.recorder.log) > marks) == on_device
        loop.backward(5, 6)
        loop.optimizer(1)
        loop.device.wait(20 * MS)
        if on_device:
            *_, last = loop.both()
            assert last[2][SYNC_WAIT] > 6 * MS and not last[1] & FLAG_INSEPARABLE

    def test_coalesced_ones_couple_where_they_are_waited_for(self) -> None:
        loop, collectives = self.made()
        manager = collectives._coalesced(Mock())
        manager(None, None, async_ops=True)
        assert not loop.recorder.exchange.inseparable
        manager()
        assert loop.recorder.exchange.inseparable


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_all_waits_of_this_torchs_fsdp_are_found_and_put_back(strategy: str) -> None:
    import torch.distributed.fsdp  # noqa: F401

    loop, patcher = DeviceLoop(), Patcher(debug=True)
    owners = [
        getattr(sys.modules[module], cls) if cls else sys.modules[module]
        for module, cls, _ in fsdp._WAITS[strategy]
    ]
    before = [vars(owner)[name] for owner, (*_, name) in zip(owners, fsdp._WAITS[strategy], strict=True)]
    fsdp.ShardedWaits(strategy, loop.recorder, loop.use, patcher)
    names = [name for *_, name in fsdp._WAITS[strategy]]
    assert all(vars(o)[n] is not b for o, n, b in zip(owners, names, before, strict=True))
    patcher.restore()
    assert all(vars(o)[n] is b for o, n, b in zip(owners, names, before, strict=True))


def test_wait_inside_those_of_fsdp_does_not_couple(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP waits for its gathers in autograd's thread, between marks, or in steps that have none."""
    from torch.distributed.fsdp import _runtime_utils

    loop, patcher = DeviceLoop(), Patcher(debug=True)
    wait = Collectives(loop.recorder, Spans(loop.recorder, Mock()), Mock())._wait()(Mock())
    monkeypatch.setattr(_runtime_utils, "_pre_backward_hook", wait)
    waits = fsdp.ShardedWaits("fsdp", loop.recorder, loop.use, patcher)
    loop.step()
    loop.recorder.ready = 0
    for stops in (False, True):
        if stops:
            waits.stop()
        in_autograds_thread(lambda: _runtime_utils._pre_backward_hook())  # type: ignore[call-arg]
        assert not loop.recorder.exchange.inseparable
    patcher.restore()
    in_autograds_thread(wait)
    assert loop.recorder.exchange.inseparable


def test_fsdp_without_one_of_its_waits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.fsdp  # noqa: F401

    loop, patcher = DeviceLoop(), Patcher(debug=True)
    monkeypatch.setitem(fsdp._WAITS, "fsdp", (("torch.distributed.fsdp", "", "_gone"),))
    with pytest.raises(RuntimeError, match=r"has no torch\.distributed\.fsdp\._gone"):
        fsdp.ShardedWaits("fsdp", loop.recorder, loop.use, patcher)


def test_host_that_waits_for_room_in_its_launch_queue_is_not_late() -> None:
    cuts = [Cut(FORWARD, 0, 1), Cut(BACKWARD, 1, 2), Cut(SYNC_WAIT, 2, 3)]
    times = [10 * MS, 30 * MS, 31 * MS]

    def host(number: int, full: Sequence[int]) -> tuple[int, bool]:
        return [0, *times][number] - MS, number in full  # 1 ms ahead at each mark, below 5 % of the row

    free, held = (masks(cuts, times, partial(host, full=full), 0, 2 * MS) for full in ((), (1,)))
    assert free[:2] == (1 << FORWARD | 1 << BACKWARD | 1 << SYNC_WAIT, 0)
    assert held[:2] == (1 << SYNC_WAIT, 1 << FORWARD | 1 << BACKWARD)


def test_host_is_late_by_a_share_of_a_micro_batch() -> None:
    waits = [Cut(BACKWARD, 4, 5), Cut(SYNC_WAIT, 5, 6), Cut(BACKWARD, 6, 7), Cut(SYNC_WAIT, 7, 8)]
    once = [Cut(DATA, 1, 2), Cut(FORWARD, 2, 4), *waits]
    assert late_below(once, 40 * MS) == 2 * MS
    assert late_below([*once, *once], 40 * MS) == MS
    assert late_below([], MS) == 100_000
