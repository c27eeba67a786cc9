"""The state machine alone, on a clock that only moves when told to."""

from __future__ import annotations

import struct
import threading

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from traceml_ray.agent import rows as rows_module
from traceml_ray.agent.marks import (
    BACKWARD_BEGIN,
    COST,
    EVAL_MODE_FORWARD_BEGIN,
    FORWARD_BEGIN,
    GRADIENTS_DONE,
    NO_GRAD_FORWARD_BEGIN,
    OPTIMIZER_BEGIN,
    OPTIMIZER_END,
    OPTIMIZERS,
    SCALER_BEGIN,
    SYNC_BEGIN,
    SYNC_END,
    SYNCED_BACKWARD_END,
    SpanSums,
)
from traceml_ray.agent.recorder import Recorder
from traceml_ray.agent.ring import StepRing
from traceml_ray.stages import (
    BACKWARD,
    DATA,
    FLAG_DEVICE_CLOCK,
    FLAG_EXCLUDED,
    FLAG_INSEPARABLE,
    FLAG_NO_BACKWARD,
    FLAG_NO_DATA,
    FLAG_NO_FORWARD,
    FLAG_NO_PEERS,
    FLAG_NO_SPLIT,
    FORWARD,
    N_STAGES,
    POST_SYNC,
    PREPARE,
    ROW_BYTES,
    SEGMENT_BITS,
    SYNC_WAIT,
)


class Clock:
    """Time that passes by hand; starts away from 0 because 0 means "never" in places."""

    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        return self.now

    def wait(self, ns: int) -> None:
        self.now += ns


class Loop:
    """A training loop made of marks, each part as long as it is told."""

    def __init__(self, *, peers: bool = True, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.ring = StepRing(256)
        self.recorder = Recorder(self.ring, self.clock)
        if peers:
            self.recorder.exchange.peers = lambda: True
        self.loader = object()

    @property
    def at_once(self) -> Recorder:
        """The recorder, which makes its next mark at once."""
        self.recorder.ready = 0
        return self.recorder

    def data(self, ns: int, loader: object | None = None, *, got: bool = True) -> None:
        assert self.at_once.data_begin(loader or self.loader)
        self.clock.wait(ns)
        self.at_once.data_end(got)

    def forward(self, ns: int, mark: int = FORWARD_BEGIN) -> None:
        self.recorder.forward_begin(mark)
        self.clock.wait(ns)

    def backward(self, own_ns: int, wait: int, *, split: bool = True) -> None:
        self.recorder.backward_begin()
        self.clock.wait(own_ns)
        if split:
            self.recorder.gradients_done()
        self.clock.wait(wait)
        self.recorder.backward_end(True)

    def optimizer(self, ns: int, number: int = 1) -> None:
        began = self.recorder.optimizer_begin(False, number)
        self.clock.wait(ns)
        self.recorder.optimizer_end(began)

    def sync(self, ns: int) -> None:
        before = self.recorder.sync_begin()
        self.clock.wait(ns)
        self.recorder.sync_end(before)

    def reduce(self, local: int, wait: int, *, on_device: bool = False) -> None:
        self.clock.wait(local)
        self.sync(wait)
        self.recorder.reduced(on_device)

    def step(self, *, post: int = 1, data: int = 2, prepare: int = 3, forward: int = 4) -> None:
        self.data(data)
        self.clock.wait(prepare)
        self.forward(forward)
        self.backward(5, 6)
        self.optimizer(post)

    def rows(self) -> list[tuple[int, int, list[int]]]:
        """(key, flags, row) of everything that has come out so far."""
        self.recorder.replay()
        _, keys, flags, rows = self.ring.drain(10_000)
        return [
            (
                struct.unpack_from("<q", keys, 8 * i)[0],
                flags[i],
                list(struct.unpack_from(f"<{N_STAGES}q", rows, 8 * N_STAGES * i)),
            )
            for i in range(len(flags))
        ]


class WrittenLoop(Loop):
    """The same loop; marks are written down wherever the instrumentation would."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock=clock)
        self.written = 0

    def write(self, mark: int) -> bool:
        done = self.recorder.write(mark)
        self.written += done
        return done

    def data(self, ns: int, loader: object | None = None, *, got: bool = True) -> None:
        self.written += 2 * (self.recorder.ready != 0)
        assert self.recorder.data_begin(loader or self.loader)
        self.clock.wait(ns)
        self.recorder.data_end(got)

    def forward(self, ns: int, mark: int = FORWARD_BEGIN) -> None:
        if not self.write(mark):
            self.recorder.forward_begin(mark)
        self.clock.wait(ns)

    def backward(self, own_ns: int, wait: int, *, split: bool = True) -> None:
        recorder = self.recorder
        if not self.write(BACKWARD_BEGIN):
            super().backward(own_ns, wait, split=split)
            return
        thread, recorder.ready = recorder.ready, 0
        self.clock.wait(own_ns)
        if split:
            recorder.log.append(GRADIENTS_DONE)
            recorder.log.append(recorder.stamp())
            self.written += 1
        self.clock.wait(wait)
        recorder.ready = thread
        self.write(SYNCED_BACKWARD_END)

    def optimizer(self, ns: int, number: int = 1) -> None:
        if self.recorder.ready:
            self.recorder.log.append(OPTIMIZERS - number)
        began = self.write(OPTIMIZER_BEGIN) or self.recorder.optimizer_begin(False, number)
        self.clock.wait(ns)
        if not self.write(OPTIMIZER_END):
            self.recorder.optimizer_end(began)

    def sync(self, ns: int) -> None:
        if not self.write(SYNC_BEGIN):
            super().sync(ns)
            return
        self.clock.wait(ns)
        self.write(SYNC_END)


def test_plain_steps_are_cut_at_sync_exit() -> None:
    loop = Loop()
    for _ in range(3):
        loop.step(post=7)
    assert loop.rows() == [
        (0 << SEGMENT_BITS, FLAG_EXCLUDED, [0, 2, 3, 4, 5, 6]),
        (1 << SEGMENT_BITS, 0, [7, 2, 3, 4, 5, 6]),
        (2 << SEGMENT_BITS, 0, [7, 2, 3, 4, 5, 6]),
    ]
    assert loop.recorder.tail_ns() == 7


def test_accumulation_without_sync_is_one_row() -> None:
    loop = Loop()
    loop.step()
    loop.recorder.exchange.peers = lambda: False
    for _ in range(3):
        loop.data(2)
        loop.forward(4)
        loop.backward(5, 0)
        loop.clock.wait(10)  # loss.item() and the like between two micro-batches
    loop.recorder.exchange.peers = lambda: True
    loop.step(post=0)
    assert loop.rows()[1:] == [(1 << SEGMENT_BITS, 0, [1 + 30, 8, 3, 16, 20, 6])]


def test_synced_backwards_of_a_step_are_its_segments() -> None:
    loop = Loop()
    loop.step()
    for _ in range(2):
        loop.data(2)
        loop.forward(4)
        loop.backward(5, 6)
    loop.optimizer(1)
    assert [(key, row) for key, _, row in loop.rows()[1:]] == [
        (1 << SEGMENT_BITS, [1, 2, 0, 4, 5, 6]),
        (1 << SEGMENT_BITS | 1, [0, 2, 0, 4, 5, 6]),
    ]


def test_second_optimizer_is_no_second_step() -> None:
    loop = Loop()
    for _ in range(2):
        loop.step(post=3)
        loop.optimizer(4)
    rows = loop.rows()
    assert [key >> SEGMENT_BITS for key, _, _ in rows] == [0, 1]
    assert rows[1][2][0] == 7


def test_skipped_optimizer_still_closes_the_row() -> None:
    """GradScaler.step marks first; on overflow no optimizer follows."""
    loop = Loop()
    loop.step()
    loop.data(2)
    loop.forward(4)
    loop.backward(5, 6)
    loop.recorder.optimizer_begin()
    loop.step()
    assert [key >> SEGMENT_BITS for key, _, _ in loop.rows()] == [0, 1, 2]


def test_evaluation_between_steps_belongs_to_post_sync() -> None:
    loop = Loop()
    loop.step()
    validation = object()
    for _ in range(3):
        loop.data(10, validation)
        loop.forward(20, NO_GRAD_FORWARD_BEGIN)
    loop.data(1, validation, got=False)
    loop.step()
    assert loop.rows()[1][2] == [1 + 91, 2, 3, 4, 5, 6]


def test_evaluation_after_the_fetch_leaves_the_fetch_in_data() -> None:
    loop = Loop()
    for _ in range(2):
        loop.step()
    loop.data(2)
    for _ in range(3):
        loop.data(10, loop.ring)
        loop.forward(20, NO_GRAD_FORWARD_BEGIN)
    loop.forward(4)
    loop.backward(5, 6)
    loop.optimizer(1)
    assert loop.rows()[2][2] == [1 + 90, 2, 0, 4, 5, 6]


def test_evaluation_of_an_unknown_model_belongs_to_post_sync() -> None:
    loop = Loop()
    for _ in range(2):
        loop.step()
    validation = object()
    for _ in range(3):
        loop.data(10, validation)
        loop.clock.wait(20)
    loop.step()
    assert loop.rows()[2][2] == [1 + 90, 2, 3, 4, 5, 6]


def test_no_grad_forward_after_the_fetch_does_not_move_the_fetch() -> None:
    loop = Loop()
    for _ in range(2):
        loop.step()
    loop.data(2)
    loop.forward(20, NO_GRAD_FORWARD_BEGIN)  # a teacher's labels for this very batch
    loop.forward(4)
    loop.backward(5, 6)
    loop.optimizer(1)
    assert loop.rows()[2][2] == [1, 2, 20, 4, 5, 6]


def test_two_loaders_that_feed_one_step_both_count() -> None:
    loop = Loop()
    other = object()
    for _ in range(4):
        loop.data(2)
        loop.data(30, other)
        loop.forward(4)
        loop.backward(5, 6)
        loop.optimizer(1)
    assert [row[1] for _, _, row in loop.rows()] == [32] * 4


def test_model_in_eval_mode_is_trained_where_its_data_has_come() -> None:
    loop = Loop()
    for _ in range(3):
        loop.data(2)
        loop.clock.wait(3)
        loop.forward(4, EVAL_MODE_FORWARD_BEGIN)
        loop.backward(5, 6)
        loop.optimizer(1)
    assert [row for _, _, row in loop.rows()[1:]] == [[1, 2, 3, 4, 5, 6]] * 2
    loop.forward(20, EVAL_MODE_FORWARD_BEGIN)  # an evaluation that does not turn gradients off
    assert loop.recorder.open_stage().span == "evaluation"
    for _ in range(2):
        loop.data(10, loop.ring)  # another one, with data of its own
        loop.forward(20, EVAL_MODE_FORWARD_BEGIN)
    loop.step()
    assert loop.rows()[0][2] == [1 + 80, 2, 3, 4, 5, 6]


def test_accumulated_backward_waits_for_the_one_in_the_closure() -> None:
    loop = Loop()
    loop.step()
    for synced in (False, True):
        for _ in range(3):
            loop.recorder.exchange.peers = lambda synced=synced: synced  # type: ignore[misc]
            loop.data(2)
            loop.forward(4)
            loop.backward(5, 6)
            loop.recorder.exchange.peers = lambda: True
            loop.data(2)
            loop.clock.wait(3)
            began = loop.recorder.optimizer_begin(True)
            loop.forward(4)
            loop.backward(5, 6)
            loop.clock.wait(7)
            loop.recorder.optimizer_end(began)
    rows = loop.rows()[1:]
    assert [(key >> SEGMENT_BITS, key & 255) for key, _, _ in rows] == [
        *((1, 0), (2, 0), (3, 0)),
        *((4, 0), (4, 1), (5, 0), (5, 1), (6, 0), (6, 1)),
    ]
    assert [row for _, _, row in rows[:3]] == [[1, 4, 3, 8, 10, 12]] + [[7, 4, 3, 8, 10, 12]] * 2


def test_closure_time_is_not_time_of_the_optimizer() -> None:
    loop = Loop()
    loop.step(post=0)
    for _ in range(2):
        loop.data(2)
        began = loop.recorder.optimizer_begin(True)
        for _ in range(2):
            loop.forward(40)
            loop.backward(50, 60)
            loop.clock.wait(7)
        loop.recorder.optimizer_end(began)
    began = loop.recorder.optimizer_begin(True)
    loop.clock.wait(8)  # nothing in it but the optimizer
    loop.recorder.optimizer_end(began)
    loop.recorder.finish()
    details = loop.recorder.sums
    details.collect()
    spans = [(part.name, part.stage, part.total_ns) for part in details.collect() if part.total_ns]
    assert {part[:2] for part in spans} == {("optimizer", POST_SYNC)}
    assert sum(ns for _, _, ns in spans) == 7 * 4 + 8


def test_epoch_end_is_no_data_wait() -> None:
    loop = Loop()
    loop.step()
    loop.step()
    loop.data(9, got=False)
    loop.recorder.new_iterator()
    loop.step()
    assert loop.rows()[2][2] == [1 + 9, 2, 3, 4, 5, 6]


def test_fetch_ahead_between_backward_and_optimizer_counts_for_the_next_row() -> None:
    loop = Loop()
    loop.step()
    for _ in range(2):
        loop.forward(4)
        loop.backward(5, 6)
        loop.data(2)
        loop.optimizer(1)
    assert loop.rows()[2][2] == [1, 2, 0, 4, 5, 6]


def test_missing_marks_merge_neighbouring_stages_and_set_a_flag() -> None:
    loop = Loop()
    loop.step()
    loop.forward(4)
    loop.backward(5, 6)
    loop.optimizer(1)  # no data
    loop.data(2)
    loop.clock.wait(3)
    loop.backward(5, 6)
    loop.optimizer(1)  # no forward
    loop.data(2)
    loop.forward(4)
    loop.backward(5, 6, split=False)
    loop.optimizer(1)  # no split
    assert loop.rows()[1:] == [
        (1 << SEGMENT_BITS, FLAG_NO_DATA, [1, 0, 0, 4, 5, 6]),
        (2 << SEGMENT_BITS, FLAG_NO_FORWARD, [1, 2, 0, 3, 5, 6]),
        (3 << SEGMENT_BITS, FLAG_NO_SPLIT, [1, 2, 0, 4, 11, 0]),
    ]


def test_nested_backward_sums_its_waits() -> None:
    """Reentrant checkpointing: DDP finalises inside a nested backward."""
    loop = Loop()
    recorder, clock = loop.recorder, loop.clock
    loop.step()
    loop.data(2)
    loop.forward(4)
    assert recorder.backward_begin()
    clock.wait(10)
    assert recorder.backward_begin()
    clock.wait(10)
    recorder.gradients_done()
    clock.wait(7)
    recorder.backward_end(True)
    clock.wait(1)
    recorder.gradients_done()
    clock.wait(2)
    recorder.backward_end(True)
    loop.optimizer(0)
    assert loop.rows()[1][2] == [1, 2, 0, 4, 21, 9]


def test_optimizer_inside_the_backward_closes_at_its_end() -> None:
    loop = Loop(peers=False)
    for _ in range(2):
        loop.data(2)
        loop.forward(4)
        loop.recorder.backward_begin()
        loop.optimizer(5)
        loop.recorder.gradients_done()
        loop.recorder.backward_end(True)
    assert loop.rows() == [
        (0, FLAG_EXCLUDED | FLAG_NO_PEERS, [0, 2, 0, 4, 5, 0]),
        (1 << SEGMENT_BITS, FLAG_NO_PEERS, [0, 2, 0, 4, 5, 0]),
    ]


def test_closures_of_lbfgs_are_one_row() -> None:
    loop = Loop(peers=False)
    for _ in range(2):
        loop.data(2)
        began = loop.recorder.optimizer_begin()
        for _ in range(3):
            loop.forward(4)
            loop.backward(5, 0)
        loop.recorder.optimizer_end(began)
    assert [(key >> SEGMENT_BITS, row) for key, _, row in loop.rows()] == [
        (0, [0, 2, 0, 12, 15, 0]),
        (1, [0, 2, 0, 12, 15, 0]),
    ]


def test_trace_step_cuts_steps_where_it_is_called() -> None:
    loop = Loop()
    recorder = loop.recorder
    for _ in range(2):
        recorder.trace()
        for _ in range(2):
            loop.data(2)
            loop.forward(4)
            loop.backward(5, 0)
            recorder.exchange.peers = None
            loop.optimizer(1)
        recorder.close_traced()
        recorder.steps.manual = False
    recorder.close_traced()
    rows = loop.rows()
    assert [key >> SEGMENT_BITS for key, _, _ in rows if not key & 255] == [0, 1, 2]
    assert rows[-1][1] & FLAG_NO_BACKWARD


def test_waiting_for_buffers_is_sync_wait() -> None:
    loop = Loop()
    loop.step()
    loop.data(2)
    loop.forward(1)
    loop.sync(50)
    loop.clock.wait(3)
    loop.backward(5, 6)
    loop.optimizer(1)
    assert loop.rows()[1][2] == [1, 2, 0, 4, 5, 56]


def flags_and_rows(loop: Loop) -> list[tuple[int, list[int]]]:
    return [(flags, row) for _, flags, row in loop.rows()[1:]]


def test_reduction_before_the_optimizer_is_the_exchange_where_none_is_known() -> None:
    loop = Loop(peers=False)
    for _ in range(2):
        loop.data(2)
        loop.forward(4)
        loop.backward(5, 0)
        loop.reduce(1, 20)
        loop.reduce(1, 3)
        loop.clock.wait(7)
        loop.optimizer(10)
        loop.reduce(1, 30)  # of what is logged
    assert flags_and_rows(loop) == [(0, [18, 2, 0, 4, 7, 53])]
    assert loop.recorder.exchange.inferred


def test_reduction_is_no_exchange_where_one_is_known_or_without_a_backward() -> None:
    known, logged = Loop(), Loop(peers=False)
    for loop in (known, logged):
        loop.step()
        loop.reduce(0, 8)
        loop.step()
    known.data(2)
    known.backward(5, 6)
    known.reduce(1, 20)
    known.optimizer(1)
    assert flags_and_rows(logged) == [(FLAG_NO_PEERS, [1, 2, 3, 4, 5, 14])]
    assert flags_and_rows(known) == [(0, [1, 2, 3, 4, 5, 14]), (FLAG_NO_FORWARD, [1, 2, 0, 0, 5, 6])]
    assert not known.recorder.exchange.inferred and not logged.recorder.exchange.inferred


def test_reductions_inside_the_backward_end_with_it() -> None:
    loop = Loop(peers=False)
    for _ in range(2):
        loop.data(2)
        loop.forward(4)
        loop.recorder.backward_begin()
        loop.reduce(5, 20)
        loop.clock.wait(1)
        loop.recorder.backward_end(True)
        loop.optimizer(3)
    assert flags_and_rows(loop) == [(0, [3, 2, 0, 4, 6, 20])]


def test_optimizer_that_reduces_in_its_step_ends_the_row_there() -> None:
    loop = Loop(peers=False)
    for _ in range(4):
        loop.data(2)
        loop.forward(4)
        loop.backward(5, 0)
        began = loop.recorder.optimizer_begin()
        loop.reduce(1, 20)
        loop.optimizer(3)  # the one that it is made of
        loop.recorder.optimizer_end(began)
    learned, *rows = flags_and_rows(loop)
    assert learned == (0, [4, 2, 0, 4, 6, 40])  # it begins at the end of a backward
    assert rows == [(0, [3, 2, 0, 4, 6, 20])] * 2


@pytest.mark.parametrize("kind", [Loop, WrittenLoop])
def test_optimizer_that_reduces_in_its_step_does_so_under_a_grad_scaler(kind: type[Loop]) -> None:
    loop = kind()
    loop.recorder.exchange.peers = None
    for number in range(8):
        loop.data(2)
        loop.forward(4)
        loop.recorder.backward_begin()
        loop.clock.wait(5)
        loop.recorder.gradients_done()
        loop.recorder.backward_end(True)
        if not loop.recorder.write(SCALER_BEGIN):
            loop.recorder.scaler_begin()
        if number in (4, 5):  # an overflow
            continue
        began = loop.recorder.optimizer_begin()
        loop.reduce(1, 20)
        loop.clock.wait(3)
        loop.recorder.optimizer_end(began)
    rows = loop.rows()
    assert [key >> SEGMENT_BITS for key, _, _ in rows] == list(range(8)), "an overflow is a step"
    assert [(flags, row) for _, flags, row in rows[2:]] == [
        *[(0, [3, 2, 0, 4, 6, 20])] * 2,
        (FLAG_NO_PEERS, [3, 2, 0, 4, 5, 0]),
        (FLAG_NO_PEERS, [0, 2, 0, 4, 5, 0]),
        (0, [0, 2, 0, 4, 6, 20]),
        (0, [3, 2, 0, 4, 6, 20]),
    ]


def test_device_side_reduction_is_flagged_as_coupled() -> None:
    loop = Loop(peers=False)
    for _ in range(2):
        loop.data(2)
        loop.backward(5, 0)
        loop.reduce(1, 0, on_device=True)
        loop.optimizer(1)
    assert [flags & ~FLAG_NO_FORWARD for flags, _ in flags_and_rows(loop)] == [FLAG_INSEPARABLE]


def test_spans_before_an_inferred_exchange_belong_to_its_row() -> None:
    loop = Loop(peers=False)
    number = loop.recorder.sums.number("all_reduce")
    assert number is not None
    for _ in range(3):
        loop.data(2)
        loop.backward(5, 0)
        loop.recorder.span_begin(number)
        loop.clock.wait(3)
        loop.sync(20)
        loop.recorder.span_end(number)
        loop.recorder.reduced(False)
        loop.optimizer(1)
    loop.recorder.finish()
    details = loop.recorder.sums
    span = [*details.collect(), *details.collect()]
    sums = {
        (counted.stage, counted.total_ns, counted.first_step, counted.last_step)
        for counted in span
        if counted.name == "all_reduce"
    }
    assert {(BACKWARD, 6, 1, 2), (SYNC_WAIT, 40, 1, 2)} <= sums


def test_failed_backward_leaves_no_row() -> None:
    loop = Loop()
    loop.step()
    loop.data(2)
    loop.forward(4)
    loop.recorder.backward_begin()
    loop.recorder.backward_end(False)
    loop.optimizer(1)
    assert len(loop.rows()) == 1


def test_other_thread_does_not_mark_until_the_trainer_is_silent() -> None:
    loop = Loop()
    loop.step()
    results: list[bool] = []

    def elsewhere() -> None:
        results.append(loop.recorder.data_begin(object()))
        results.append(loop.recorder.backward_begin())

    def run() -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(240)

    run()
    assert results == [False, False]
    loop.clock.wait(6_000_000_000)
    run()
    assert results[2:] == [False, True]
    assert loop.recorder.steps.rows.first, "the first row of a new training thread has no sync exit before it"


def test_full_ring_drops_and_counts() -> None:
    loop = Loop()
    for _ in range(300):
        loop.step()
    assert loop.ring.dropped == 300 - 256
    assert len(loop.rows()) == 256
    loop.step()
    assert loop.rows()[0][0] == 300 << SEGMENT_BITS
    assert loop.ring.accepted + loop.ring.dropped == 301


def test_drain_takes_rows_in_order_across_the_end_of_the_buffer() -> None:
    ring = StepRing(4)
    for number in range(10):
        ring.push(number, 0, [number] * N_STAGES)
        first, keys, flags, rows = ring.drain(1)
        assert (first, struct.unpack("<q", keys), flags) == (number, (number,), b"\0")
        assert struct.unpack(f"<{N_STAGES}q", rows) == (number,) * N_STAGES


def test_host_rows_are_in_every_batch_while_the_device_clock_goes_on() -> None:
    """So rows without the device's times are known to be no rows of a rank without a device clock."""
    ring, row = StepRing(8), [1] * N_STAGES

    def hosts() -> int:
        return len(ring.drain_hosts(8)[4]) // ROW_BYTES

    ring.push(0, 0, row)
    assert hosts() == 0
    ring.push(1, FLAG_DEVICE_CLOCK, row, row, bytes(3))
    assert hosts() == 1
    ring.push(2, 0, row)
    assert hosts() == 1
    ring.push(3, 0, row)
    ring.end_hosts()
    ring.push(4, 0, row)
    assert hosts() == 2
    ring.push(5, 0, row)
    assert hosts() == 0
    assert ring.row_bytes == 9 + ROW_BYTES


FORWARDS = {
    "forward": FORWARD_BEGIN,
    "eval": NO_GRAD_FORWARD_BEGIN,
    "eval-mode": EVAL_MODE_FORWARD_BEGIN,
}
MARKS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "data",
                "none",
                "val",
                *FORWARDS,
                "backward",
                "nested",
                "unsplit",
                "optimizer",
                "other optimizer",
                "closure",
                "failed",
                "sync",
                "reduce",
                "reducing",
                "replay",
                "begin a",
                "end a",
                "begin b",
                "end b",
            ]
        ),
        st.integers(0, 1000),
    ),
    max_size=80,
)


VALIDATION = object()


def play(loop: Loop, marks: list[tuple[str, int]], *, begun: bool = False) -> int:
    """Make one plain step (if it has not `begun`), then `marks`; returns when the latter began."""
    if not begun:
        loop.data(0)
        loop.forward(0)
        loop.backward(0, 0)
        loop.optimizer(0)
    began = loop.clock.now
    for name, ns in marks:
        if name == "wait":
            loop.clock.wait(ns)
        elif name in ("data", "none"):
            loop.data(ns, got=name == "data")
        elif name == "val":
            loop.data(ns, VALIDATION)
        elif name in FORWARDS:
            loop.forward(ns, FORWARDS[name])
        elif name == "nested":
            loop.recorder.backward_begin()
            loop.backward(ns, ns)
            loop.recorder.backward_end(True)
        elif name in ("backward", "unsplit"):
            loop.backward(ns, ns, split=name == "backward")
        elif name == "failed":
            loop.recorder.backward_begin()
            loop.clock.wait(ns)
            loop.recorder.backward_end(False)
        elif name in ("optimizer", "other optimizer"):
            loop.optimizer(ns, 1 + (name != "optimizer"))
        elif name == "closure":
            began_step = loop.recorder.optimizer_begin(True)
            loop.forward(ns)
            loop.backward(ns, ns)
            loop.recorder.optimizer_end(began_step)
        elif name == "sync":
            loop.sync(ns)
        elif name == "reduce":
            loop.reduce(ns, ns)
        elif name == "reducing":
            step = loop.recorder.optimizer_begin()
            loop.reduce(ns, ns)
            loop.recorder.optimizer_end(step)
        elif name == "replay":
            loop.recorder.replay()
        else:
            what, _, part = name.partition(" ")
            number = loop.recorder.sums.number(part)
            assert number is not None
            if what == "begin":
                assert loop.recorder.span_begin(number)
            else:
                loop.recorder.span_end(number, ns)
            loop.clock.wait(ns)
    return began


@example([("backward", 0), ("val", 1), ("reduce", 0), ("data", 0), ("closure", 0)], False)
@given(MARKS, st.booleans())
def test_nanoseconds_are_each_in_one_stage_whatever_the_order_of_marks(
    marks: list[tuple[str, int]], peers: bool
) -> None:
    """Rows plus tail are all the time since the first row began; nothing is negative; marks never raise."""
    loop = Loop(peers=peers)
    began = play(loop, marks)
    rows = loop.rows()
    pending = loop.recorder.steps.rows.pending or []
    assert all(value >= 0 for _, _, row in rows for value in row)
    counted = sum(sum(row) for _, _, row in rows) + sum(pending) + loop.recorder.tail_ns()
    assert counted == loop.clock.now - began
    keys = [key for key, _, _ in rows]
    assert keys == sorted(set(keys)) or any(key & 255 == 255 for key in keys)


@given(MARKS)
def test_logged_marks_mean_the_same_as_immediate_ones(marks: list[tuple[str, int]]) -> None:
    at_once, written = Loop(), WrittenLoop()
    for loop in (at_once, written):
        play(loop, marks)
        loop.step()
        loop.step()
    assert written.written
    assert written.rows() == at_once.rows()
    assert written.recorder.open_stage() == at_once.recorder.open_stage()
    assert written.recorder.tail_ns() == at_once.recorder.tail_ns()
    for loop in (at_once, written):
        loop.recorder.finish()
        loop.recorder.sums.collect()
    assert written.recorder.sums.collect() == at_once.recorder.sums.collect()


@example([("data", 0), ("begin a", 1), ("failed", 0), ("val", 0), ("data", 0)])
@example([("data", 0), ("begin a", 1), ("end a", 0), ("failed", 0), ("val", 0), ("data", 0)])
@given(MARKS)
def test_span_never_takes_longer_than_the_stages_it_is_in(marks: list[tuple[str, int]]) -> None:
    """Whatever is folded into other stages, folded back or never ended; and rows are the same without it."""
    loop, bare = Loop(), Loop()
    play(loop, marks)
    spans = ("begin", "end")
    play(bare, [("wait" if name.startswith(spans) else name, ns) for name, ns in marks])
    rows = whole(loop)
    assert rows == whole(bare)
    stages = [sum(column) for column in zip(*rows, strict=True)]
    loop.recorder.finish()
    assert loop.recorder.sums.collect() == []
    spent: dict[str, list[int]] = {}
    for part in loop.recorder.sums.collect():
        assert part.total_ns >= 0 and part.count > 0
        spent.setdefault(part.name, [0] * N_STAGES)[part.stage] += part.total_ns
    for parts in (*spent.values(), stages):
        parts[FORWARD] += parts.pop(PREPARE)  # of a row without forward, what was prepared is its forward
    for name, parts in spent.items():
        assert all(part <= stage for part, stage in zip(parts, stages, strict=True)), name


def whole(loop: Loop) -> list[list[int]]:
    """Every row, the pending one and the tail."""
    loop.recorder.replay()
    rows = [list(row) for _, _, row in loop.rows()]
    recorder = loop.recorder
    tail = list(recorder.steps.partition.times)
    tail[recorder.open_stage().stage] += recorder.clock() - recorder.steps.partition.last
    return [*rows, recorder.steps.rows.pending or [0] * N_STAGES, tail]


def test_spans_of_process_groups_are_apart_while_there_is_room() -> None:
    sums = SpanSums()
    numbers = [sums.number("all_reduce", str(group)) for group in range(1000)]
    assert len(set(numbers)) < 200 and None not in numbers and sums.number("a stage") not in numbers
    for number in numbers[:2] + numbers[-1:]:
        assert number is not None
        sums.add(sums.names[number], DATA, 1, 10, 4, False, sums.groups[number])
    sums.collect()
    assert [(span.name, span.process_group) for span in sums.collect()] == [
        ("all_reduce", "0"),
        ("all_reduce", "1"),
        ("all_reduce", None),
    ]


def test_spans_are_reported_by_the_row_they_are_in() -> None:
    loop = Loop()
    recorder, details = loop.recorder, loop.recorder.sums
    number = details.number("tokenize")
    assert number is not None

    def tokenize(ns: int) -> None:
        recorder.span_begin(number)
        loop.clock.wait(ns)
        recorder.span_end(number)

    for step in range(3):
        loop.data(10)
        tokenize(1 + step)
        loop.forward(10)
        loop.backward(10, 10)
        loop.optimizer(5)
    tokenize(7)  # in the tail, which no row has
    recorder.finish()
    details.collect()
    spans = [(p.name, p.stage, p.count, p.total_ns, p.first_step, p.last_step) for p in details.collect()]
    assert spans == [
        ("tokenize", PREPARE, 1, 1, 0, 0),
        ("optimizer", POST_SYNC, 2, 10, 1, 2),
        ("tokenize", PREPARE, 2, 5, 1, 2),
        ("optimizer", POST_SYNC, 1, 5, 3, 3),
        ("tokenize", POST_SYNC, 1, 7, 3, 3),
    ]


def test_nested_spans_of_one_name_count_once_and_evaluation_ends_with_training() -> None:
    loop = Loop()
    recorder, validation = loop.recorder, object()
    number = recorder.sums.number("checkpoint")
    assert number is not None
    for _ in range(3):
        loop.step()
    for _ in range(2):
        recorder.span_begin(number)
        loop.clock.wait(4)
    for _ in range(2):
        recorder.span_end(number)
    for _ in range(3):
        loop.data(100, validation)
        loop.forward(10, NO_GRAD_FORWARD_BEGIN)
        assert recorder.open_stage().span == "evaluation"
    loop.data(5)
    assert recorder.open_stage().span is None
    loop.forward(1)
    loop.backward(1, 1)
    recorder.sums.collect()
    total_ns = {(p.name, p.stage): p.total_ns for p in recorder.sums.collect() if p.last_step == 3}
    assert total_ns["checkpoint", POST_SYNC] == 8
    assert total_ns["evaluation", POST_SYNC] == 330
    assert total_ns.keys() <= {("checkpoint", POST_SYNC), ("evaluation", POST_SYNC), ("optimizer", POST_SYNC)}


def test_mark_cut_in_two_by_a_signal_is_ignored() -> None:
    loop = WrittenLoop()
    loop.step()
    loop.data(2)
    loop.recorder.log.append(BACKWARD_BEGIN)  # and no time
    loop.recorder.replay()
    loop.clock.wait(3)
    loop.forward(4)
    loop.backward(5, 6)
    loop.optimizer(1)
    assert loop.rows()[1][2] == [1, 2, 3, 4, 5, 6]


class Door:
    """A lock that somebody else holds, or not, as the test says."""

    def __init__(self) -> None:
        self.shut = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return not self.shut

    def release(self) -> None:
        pass


class HeldUpLoop(WrittenLoop):
    """The same loop; between "hold" and "let go" the recorder is another thread's."""

    def __init__(self) -> None:
        super().__init__()
        self.recorder._lock = self.door = Door()  # type: ignore[assignment]


def span_ns(marks: list[tuple[str, int]], most: int) -> dict[str, int]:
    """Return what spans took in all, where more than `most` that are over are handed out early."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "_MAX_CLOSED", most)
        loop = Loop()
        play(loop, marks)
        for _ in range(2):
            loop.step()
    loop.recorder.steps._own.hand_out()
    ns: dict[str, int] = {}
    for part in loop.recorder.sums.collect() + loop.recorder.sums.collect():
        ns[part.name] = ns.get(part.name, 0) + part.total_ns
    return ns


@settings(max_examples=40)
@given(MARKS)
@example([("eval", 0), ("val", 1), ("forward", 0)])
def test_spans_handed_out_before_their_row_ends_are_neither_lost_nor_counted_twice(
    marks: list[tuple[str, int]],
) -> None:
    assert span_ns(marks, 0) == span_ns(marks, 1024)


@given(MARKS, st.sets(st.integers(0, 80)), st.booleans())
def test_deferred_marks_mean_the_same_as_immediate_ones(
    marks: list[tuple[str, int]], turns: set[int], at_once: bool
) -> None:
    plain, held_up = Loop(), HeldUpLoop()
    play(plain, marks)
    play(held_up, [])
    for number, mark in enumerate(marks):
        held_up.door.shut ^= number in turns
        if at_once:
            held_up.recorder.ready = 0
        play(held_up, [mark], begun=True)
    held_up.door.shut = False
    for loop in (plain, held_up):
        loop.step()
        loop.step()
    assert held_up.rows() == plain.rows()
    assert held_up.recorder.open_stage() == plain.recorder.open_stage()
    assert held_up.recorder.tail_ns() == plain.recorder.tail_ns()
    assert not held_up.recorder.lost_marks


def test_deferred_mark_of_another_thread_does_not_count() -> None:
    loop = HeldUpLoop()
    loop.step()
    loop.data(2)
    loop.door.shut = True

    def elsewhere() -> None:
        assert loop.recorder.data_begin(object())
        loop.recorder.data_end(True)
        assert loop.recorder.backward_begin()
        loop.recorder.backward_end(True)
        loop.recorder.optimizer_end(loop.recorder.optimizer_begin())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(240)
    loop.door.shut = False
    loop.forward(4)
    loop.backward(5, 6)
    loop.optimizer(1)
    assert loop.rows()[1][2] == [1, 2, 0, 4, 5, 6]


def test_marks_are_logged_by_the_training_thread_only() -> None:
    loop = WrittenLoop()
    assert not loop.recorder.write(FORWARD_BEGIN), "nobody has trained yet"
    loop.step()
    assert loop.recorder.write(FORWARD_BEGIN)
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(loop.recorder.write(FORWARD_BEGIN)))
    thread.start()
    thread.join(240)
    loop.recorder.backward_begin()
    results.append(loop.recorder.write(FORWARD_BEGIN))
    assert results == [False, False]


def test_cost_of_all_marks_is_estimated_from_those_measured() -> None:
    loop = WrittenLoop()
    loop.step()
    before = loop.recorder.marks_ns
    for _ in range(10):
        loop.step()  # 8 marks
    loop.recorder.log.extend((OPTIMIZER_BEGIN, loop.clock(), COST, loop.clock() + 50))
    loop.recorder.replay()
    assert (before, loop.recorder.marks_ns) == (0, 50 * (loop.written + 1))


@pytest.mark.parametrize("segments", [300])
def test_segments_stay_inside_their_bits(segments: int) -> None:
    loop = Loop()
    for _ in range(segments):
        loop.backward(1, 1)
    loop.optimizer(0)
    assert max(key & ((1 << SEGMENT_BITS) - 1) for key, _, _ in loop.rows()) == 255
