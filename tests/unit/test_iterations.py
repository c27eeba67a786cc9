"""Which optimizer steps are one step of the rows: those of one batch, by the order of the calls alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.sample_windows import align, judge
from unit.test_recorder import VALIDATION, Loop, WrittenLoop

from traceml_ray.agent.rows import MOST_STEPS
from traceml_ray.analysis.window import RankRows
from traceml_ray.stages import BACKWARD, DATA, FLAG_NO_DATA, FORWARD, POST_SYNC, SEGMENT_BITS, SYNC_WAIT

KINDS = pytest.mark.parametrize("kind", [Loop, WrittenLoop])


class Script:
    """
    A training loop in letters. `b` takes a batch, `c` one of a second loader; `e` asks for one, and there is
    none; `v` is a batch of an evaluation that nothing else shows. `g` is a forward and a backward; a capital
    letter is the same and a step of the optimizer of that name, `s` a `GradScaler` step that is skipped.
    """

    def __init__(self, kind: type[Loop] = Loop, wait: Callable[[], int] = lambda: 1) -> None:
        self.loop, self.wait = kind(), wait
        self._second = object()

    def run(self, letters: str) -> Script:
        for letter in letters.replace(" ", ""):
            self._do(letter)
        return self

    def _do(self, letter: str) -> None:
        loop, ns = self.loop, self.wait()
        if letter in "be":
            loop.data(ns, got=letter == "b")
        elif letter in "cv":
            loop.data(ns, self._second if letter == "c" else VALIDATION)
        else:
            loop.forward(ns)
            loop.backward(ns, ns)
            if letter == "s":
                loop.recorder.scaler_begin(1)
            elif letter != "g":
                loop.optimizer(ns, ord(letter))

    def keys(self) -> list[tuple[int, int]]:
        return [divmod(key, 1 << SEGMENT_BITS) for key, _, _ in self.loop.rows()]

    def steps(self) -> list[int]:
        return [step for step, _ in self.keys()]


@KINDS
def test_two_optimizers_on_each_batch_are_one_step(kind: type[Loop]) -> None:
    script = Script(kind).run("bDG bDG bDG")
    assert script.keys() == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


@KINDS
@pytest.mark.parametrize(
    ("letters", "steps"),
    [
        ("CACACA", [0, 1, 2, 3, 4, 5]),  # batches made by hand
        ("A" * 5, [0, 1, 2, 3, 4]),
        ("bDbG bDbG bDbG", [0, 1, 2, 3, 4, 5]),  # each optimizer has batches of its own
        ("bDcG bDcG bDcG", [0, 1, 2, 3, 4, 5]),  # and a loader of its own
        ("bcDG bcDG", [0, 0, 1, 1]),  # two loaders feed a step
        ("bbDG bbDG", [0, 0, 1, 1]),  # one loader is read twice
        ("bDbDbDbDbDG bDbDbDbDbDG bD", [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9, 9, 10]),  # five critic steps
        ("bTAPE bTAPE", [0] * 4 + [1] * 4),
        ("bDG vbDG bDG vbDG", [0, 0, 1, 1, 2, 2, 3, 3]),  # evaluations
        ("bD vbD bD vbD", [0, 1, 2, 3]),
        ("bbDG bDG eDG bbDG eDG", [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]),  # one batch is held back
        ("bbA bA eA bbA eA", [0, 1, 2, 3, 4]),
        ("bDbG DbG DbG D", [0, 1, 1, 2, 2, 3, 3]),  # the next batch is taken in the middle of an iteration
        ("bA" + "A" * 30, [*range(31)]),  # one batch for ever
        ("bDG" + "DG" * 5, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]),
        ("bDs bDs bDG", [0, 1, 2, 3, 4, 4]),  # `GradScaler` has optimizer 1
        ("bbbb" + "Ab" * 40 + "AAA", [*range(43)]),  # the last batches of a long prefetch
    ],
)
def test_steps_follow_from_batches_and_optimizers(kind: type[Loop], letters: str, steps: list[int]) -> None:
    if "s" in letters:
        steps = [0, 0, 1, 1, 2, 2]  # a skipped step is one of an optimizer all the same
    assert Script(kind).run(letters).steps() == steps


def test_several_steps_of_one_optimizer_on_each_batch_are_one_step_once_two_batches_show_it() -> None:
    script = Script().run("bAAAA" * 4)
    assert script.steps() == [*range(8), 8, 8, 8, 8, 9, 9, 9, 9]
    assert Script().run("bDDDDDG" * 4).steps()[-12:] == [10] * 6 + [11] * 6
    # Of more on a batch each stays one: a loader of files, or of prompts that are trained on for long.
    many = MOST_STEPS + 1
    assert Script().run(("b" + "A" * many) * 5).steps() == [*range(5 * many)]
    # One batch that is trained on again, at the beginning, shows nothing.
    assert Script().run("bAAA" + "bA" * 20 + "AA").steps() == [*range(25)]


def test_loader_that_comes_late_changes_nothing() -> None:
    """Evaluation on one rank alone, of which only its loader is seen: steps are counted as before."""
    alike = Script().run("CA" * 6 + "CA" * 4).steps()
    assert Script().run("CA" * 6 + "vCA" * 4).steps() == alike == [*range(20)]


def test_accumulated_backwards_are_rows_of_the_same_step() -> None:
    script = Script().run("bgbDG bgbDG")  # each backward is synced
    assert script.keys() == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    script = Script().run("bggDgG bggDgG bggDgG")  # both of several backwards
    assert script.keys()[10:] == [(2, index) for index in range(5)]
    script = Script()
    script.loop.recorder.exchange.peers = lambda: False
    assert script.run("bgbDgG bgbDgG").keys() == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_rows_of_one_step_say_what_each_of_them_lacks() -> None:
    script = Script().run("bDG bDG")
    assert [(flags & FLAG_NO_DATA, row[DATA]) for _, flags, row in script.loop.rows()[2:]] == [(0, 1), (1, 0)]


@KINDS
def test_optimizers_with_closures_that_do_nothing_are_one_step(kind: type[Loop]) -> None:
    """Lightning's manual optimization: each optimizer step is given a closure, after its backward."""
    script = Script(kind)
    recorder = script.loop.recorder
    for _ in range(3):
        script.run("b")
        for number in (7, 8):
            script.run("g")
            began = recorder.optimizer_begin(True, number)
            recorder.optimizer_end(began)
    assert script.keys() == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_closure_that_is_called_several_times_is_one_step() -> None:
    """LBFGS, on a batch each."""
    script = Script()
    for _ in range(3):
        script.run("b")
        began = script.loop.recorder.optimizer_begin(True, 7)
        script.run("ggg")
        script.loop.recorder.optimizer_end(began)
    assert script.steps() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_step_that_a_script_traces_is_one_whatever_is_in_it() -> None:
    script = Script()
    for _ in range(3):
        script.loop.recorder.trace()
        script.run("bDbG")
        script.loop.recorder.close_traced()
    script.run("bDG bDG")
    assert script.steps() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_step_that_is_open_is_the_one_that_its_row_gets() -> None:
    """Layers, FLOPs and profiles begin and end where steps do."""
    script = Script().run("bDG bDG bD")
    recorder = script.loop.recorder
    assert recorder.step_now(0)[0] == 2 and recorder.step_begins(0) is None  # type: ignore[index]
    script.run("G")
    assert recorder.step_begins(0)[0] == 3 == recorder.open_stage().step  # type: ignore[index]


def test_number_of_a_framework_goes_before_and_what_was_lost_begins_a_step() -> None:
    script = Script().run("bDG bD")
    script.loop.recorder.number(10)
    assert script.run("G bDG").steps() == [0, 0, 1, 10, 11, 11]
    script = Script().run("bDG bDG bD")
    script.loop.recorder.replay()
    script.loop.recorder.steps.forget(script.loop.clock.now)
    assert script.run("G bDG").steps() == [0, 0, 1, 1, 2, 3, 4, 4]


def test_work_is_counted_by_iteration() -> None:
    script = Script()
    for _ in range(6):
        script.run("b")
        script.loop.recorder.steps.work.batch(32 + 1)
        script.run("DG")
    counted = script.loop.recorder.drain_work()
    assert counted is not None and (counted.steps, counted.first, counted.last) == (6, 0, 5)
    assert counted.samples == 6 * 32


@settings(max_examples=200, deadline=None)
@given(st.text("bbcegDDGGA", max_size=60), st.data())
def test_keys_follow_from_the_order_of_calls_alone(letters: str, data: st.DataObject) -> None:
    """However long each part takes, and whenever another thread reads the log: ranks number rows alike."""
    slow = Script(WrittenLoop, lambda: 1 + data.draw(st.integers(0, 10**10)))
    for letter in letters:
        slow.run(letter)
        if data.draw(st.booleans()):
            slow.loop.recorder.replay()
    keys = slow.keys()
    assert keys == Script().run(letters).keys()
    assert keys == sorted(set(keys))


def test_time_of_an_iteration_is_all_in_its_rows() -> None:
    script = Script().run("bDG bDG bDG")
    row = [0] * 6
    for _, _, part in script.loop.rows()[4:]:
        row = [a + b for a, b in zip(row, part, strict=True)]
    assert [row[index] for index in (POST_SYNC, DATA, FORWARD, BACKWARD, SYNC_WAIT)] == [2, 1, 2, 2, 2]


def test_ranks_that_number_their_rows_otherwise_are_not_compared() -> None:
    """One rank alone reads the loader, and sends batches to the other; both step two optimizers on each."""
    ns = 5_000_000
    reads, is_sent = Script(wait=lambda: ns).run("bDG" * 100), Script(wait=lambda: ns).run("DG" * 100)
    ranks = []
    for rank, script in enumerate((reads, is_sent)):
        keys, flags, rows = zip(*script.loop.rows(), strict=True)
        every = np.array(keys), np.array(flags, np.uint8), np.array(rows)
        ranks.append(RankRows(rank, "node-0", *every))
    verdict = judge(align(ranks, expected=2))
    assert verdict.label == "telemetry_limited" and "do not line up" in verdict.why
