"""What a rank reports about its life: timed spans, checkpoints of all kinds, and the records of them."""

from __future__ import annotations

import struct
import sys
import threading
import time
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from traceml_ray.agent.instrument import Instrumentation
from traceml_ray.agent.marks import FORWARD_BEGIN, NO_GRAD_FORWARD_BEGIN, RESTORE_SPAN
from traceml_ray.agent.patch.checkpoint import is_checkpoint, patch_framework, steps_in
from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.agent.recorder import Recorder
from traceml_ray.agent.ring import StepRing
from traceml_ray.agent.span_times import EXACT, JOIN_NS, LONGEST_NS, TimedSpan, TimedSpans
from traceml_ray.errors import Errors
from traceml_ray.signals.goodput.agent import LifeReport, ahead_ns, born_ns
from traceml_ray.signals.goodput.records import Life, LifeInterval
from traceml_ray.signals.goodput.reported import Intervals
from traceml_ray.stages import N_STAGES

SECOND = 1_000_000_000
WALL = 1_800_000_000 * SECOND


class Clock:
    """Time that passes by hand."""

    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        return self.now

    def wait(self, ns: int) -> None:
        self.now += ns


class Loop:
    """A training loop made of marks, each part as long as it is told."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.ring = StepRing(1 << 13)
        self.recorder = Recorder(self.ring, self.clock)
        self.loader = object()

    def data(self, ns: int, loader: object | None = None, *, got: bool = True) -> None:
        self.recorder.ready = 0
        assert self.recorder.data_begin(loader or self.loader)
        self.clock.wait(ns)
        self.recorder.ready = 0
        self.recorder.data_end(got)

    def forward(self, ns: int, mark: int = FORWARD_BEGIN) -> None:
        self.recorder.forward_begin(mark)
        self.clock.wait(ns)

    def train(self) -> None:
        self.forward(4)
        self.recorder.backward_begin()
        self.clock.wait(5)
        self.recorder.backward_end(True)
        self.recorder.optimizer_end(self.recorder.optimizer_begin(False, 1))

    def step(self) -> None:
        self.data(2)
        self.train()

    def rows_ns(self) -> list[int]:
        _, _, flags, rows = self.ring.drain(1 << 13)
        values = struct.unpack(f"<{len(flags) * N_STAGES}q", rows)
        return [sum(values[n : n + N_STAGES]) for n in range(0, len(values), N_STAGES)]


def shown(spans: list[TimedSpan]) -> list[tuple[str, int, int, int, int]]:
    return [(span.name, span.began, span.ended, span.busy, span.count) for span in spans]


# -- times of spans ------------------------------------------------------------------------------


def test_span_inside_another_counts_as_itself_and_not_as_the_outer_one() -> None:
    times = TimedSpans()
    times.begin("evaluation", 0, 5)
    times.begin("checkpoint", 4 * SECOND, 5)
    times.begin("checkpoint", 5 * SECOND, 5)  # `torch.save` inside what a framework calls its checkpoint
    times.end("checkpoint", 6 * SECOND)
    assert [(span.name, span.over) for span in times.pending(6 * SECOND)] == [
        ("evaluation", True),
        ("checkpoint", False),
    ]
    assert shown(times.pending(6 * SECOND)) == [
        ("evaluation", 0, 4 * SECOND, 4 * SECOND, 1),
        ("checkpoint", 4 * SECOND, 6 * SECOND, 2 * SECOND, 1),
    ]
    times.end("checkpoint", 9 * SECOND)
    times.end("evaluation", 10 * SECOND)
    assert shown(times.drain(60 * SECOND, False)) == [
        ("evaluation", 0, 4 * SECOND, 4 * SECOND, 1),
        ("checkpoint", 4 * SECOND, 9 * SECOND, 5 * SECOND, 1),
        ("evaluation", 9 * SECOND, 10 * SECOND, SECOND, 0),
    ]
    assert times.pending(60 * SECOND) == times.drain(99 * SECOND, True) == []


def test_span_that_outlives_the_one_around_it_keeps_its_time() -> None:
    times = TimedSpans()
    times.begin("evaluation", 0, 5)
    times.begin("checkpoint", 3 * SECOND, 5)
    times.end("evaluation", 5 * SECOND)
    times.end("checkpoint", 8 * SECOND)
    assert shown(times.drain(9 * SECOND, True)) == [
        ("evaluation", 0, 3 * SECOND, 3 * SECOND, 1),
        ("checkpoint", 3 * SECOND, 8 * SECOND, 5 * SECOND, 1),
    ]


def test_short_neighbours_are_joined_and_are_not_lost_meanwhile() -> None:
    times = TimedSpans()
    for number in range(10):  # of 0.1 s, 0.5 s apart
        times.begin("evaluation", number * 600_000_000, number)
        times.end("evaluation", number * 600_000_000 + 100_000_000)
        (pending,) = times.pending(number * 600_000_000 + 200_000_000)
        assert (pending.count, pending.busy, pending.over) == (number + 1, (number + 1) * 100_000_000, True)
        assert times.drain(number * 600_000_000 + 200_000_000, False) == []
    (joined,) = times.drain(7 * SECOND, False)
    assert (joined.began, joined.ended, joined.busy, joined.count) == (0, 5_500_000_000, SECOND, 10)
    assert joined.step == 9


def test_an_evaluation_in_each_step_of_a_week_makes_few_records() -> None:
    times, count, records = TimedSpans(), 0, 0
    for now in range(0, 7 * 86_400 * SECOND, 20 * SECOND):  # too far apart to be joined
        times.begin("evaluation", now, now)
        times.end("evaluation", now + 2 * SECOND)
        spans = times.drain(now + 10 * SECOND, False)
        records, count = records + len(spans), count + sum(span.count for span in spans)
    spans = times.drain(8 * 86_400 * SECOND, True)
    assert count + sum(span.count for span in spans) == 7 * 86_400 / 20
    assert records <= EXACT + 7 * 86_400 * SECOND / LONGEST_NS + 1
    assert times.lost == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "end", "add"]),
            st.sampled_from(["evaluation", "checkpoint", "checkpoint load"]),
            st.integers(0, 3 * JOIN_NS),
        ),
        max_size=30,
    )
)
def test_spans_of_the_training_thread_never_hold_more_time_than_has_passed(
    calls: list[tuple[str, str, int]],
) -> None:
    times, now, before = TimedSpans(), 0, 0
    depth = {"evaluation": 0, "checkpoint": 0, "checkpoint load": 0}
    busy = covered = 0
    for call, name, ns in calls:
        before, now = now, now + ns
        covered += ns if any(depth.values()) or call == "add" else 0
        if call == "add":
            times.add(name, before, now, 0)
            continue
        depth[name] = max(0, depth[name] + (1 if call == "begin" else -1))
        times.begin(name, now, 0) if call == "begin" else times.end(name, now)
        busy += sum(span.busy for span in times.drain(now, False))
    pending = times.pending(now)
    assert all(span.began <= span.ended and span.busy <= span.ended - span.began for span in pending)
    assert busy + sum(span.busy for span in pending) == covered


# -- what the marks say of evaluations, and of rows ----------------------------------------------------


def test_evaluations_before_between_and_after_the_steps() -> None:
    loop = Loop()
    begin = loop.clock.now

    def evaluate() -> None:
        for _ in range(3):
            loop.data(2 * SECOND, validation)
            loop.forward(3 * SECOND, NO_GRAD_FORWARD_BEGIN)
        loop.data(SECOND, validation, got=False)

    validation = object()
    evaluate()
    loop.clock.wait(100 * SECOND)  # other preparations
    loop.step()
    evaluate()
    loop.step()
    loop.clock.wait(2 * SECOND)
    evaluate()
    loop.clock.wait(50 * SECOND)
    loop.recorder.finish()
    times = loop.recorder.span_times(True)
    assert times is not None
    before, between, after = times.over
    assert (before.began, before.ended) == (begin, begin + 16 * SECOND)
    assert between.busy == after.busy == 16 * SECOND
    assert times.first_row is not None
    first_began, first_ended = times.first_row
    assert first_began == before.ended + 100 * SECOND
    assert first_ended - first_began == loop.rows_ns()[0]
    assert times.now - after.ended == 50 * SECOND and times.step == 2


def test_labels_of_a_teacher_are_part_of_the_step() -> None:
    loop = Loop()
    for _ in range(2):
        loop.step()
    loop.data(2)
    loop.forward(20 * SECOND, NO_GRAD_FORWARD_BEGIN)
    loop.train()
    times = loop.recorder.span_times(True)
    assert times is not None and times.over == times.pending == []


def test_rows_add_up_to_the_time_from_the_first_step_to_the_end_of_the_last() -> None:
    loop = Loop()
    loop.clock.wait(77)
    for _ in range(5):
        loop.clock.wait(9)
        loop.step()
    times = loop.recorder.span_times(True)
    assert times is not None and times.first_row is not None and times.last_row is not None
    assert times.first_data == 2
    assert times.last_row - times.first_row[0] == sum(loop.rows_ns())
    assert times.first_row[0] == 1000 + 77 + 9


# -- calls that save and load ---------------------------------------------------------------------------


class Bench:
    """An instrumented process whose steps do not matter."""

    def __init__(self) -> None:
        self.recorder = Recorder(StepRing(64))
        self.instrumentation = Instrumentation(self.recorder, Patcher(debug=True))
        self.instrumentation.install()

    def spans(self) -> dict[str, list[TimedSpan]]:
        times = self.recorder.span_times(True)
        assert times is not None
        named: dict[str, list[TimedSpan]] = {}
        for span in (*times.over, *times.pending):
            named.setdefault(span.name, []).append(span)
        return named


@pytest.fixture
def bench() -> Any:
    made = Bench()
    yield made
    made.instrumentation.remove()


def test_saves_count_before_the_first_step_and_loads_only_of_a_checkpoint(
    bench: Bench, tmp_path: Path
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}, tmp_path / "all.pt"
    )
    (saved,) = bench.spans()["checkpoint"]
    assert saved.count == 2 and 0 < saved.busy <= saved.ended - saved.began
    torch.load(tmp_path / "weights.pt")
    assert "checkpoint load" not in bench.spans()
    torch.load(tmp_path / "all.pt")
    (restored,) = bench.spans()["checkpoint load"]
    assert restored.count == 1 and restored.busy > 0
    assert restored.step == 7


def test_checkpoint_of_a_thread_beside_training_is_recorded_as_such(bench: Bench, tmp_path: Path) -> None:
    bench.recorder.owner = threading.get_ident()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(torch.save, {"x": 1}, tmp_path / "x.pt").result()
        with_open = bench.instrumentation.spans.begin("checkpoint")
        assert with_open is not None
        pool.submit(torch.save, {"x": 1}, tmp_path / "y.pt").result()  # a part of the checkpoint
        bench.instrumentation.spans.end(with_open)
    bench.recorder.replay()
    spans = bench.spans()
    assert [span.count for span in spans["checkpoint beside"]] == [1]
    assert [span.count for span in spans["checkpoint"]] == [1]


def test_async_save_blocks_shortly_and_goes_on_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload: Future[None] = Future()
    monkeypatch.setattr(dcp, "async_save", lambda *_args, **_kwargs: upload)
    made = Bench()
    assert dcp.async_save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "c") is upload
    spans = made.spans()
    assert [span.over for span in spans["checkpoint beside"]] == [False]
    assert [span.over for span in spans["checkpoint"]] == [True]
    time.sleep(0.01)
    upload.set_result(None)
    (beside,) = made.spans()["checkpoint beside"]
    assert beside.over and beside.busy >= 10_000_000
    made.instrumentation.remove()


class Upload(Future[None]):
    """It is done 10 ms after somebody waits for it."""

    def result(self, timeout: float | None = None) -> None:
        if not self.done():
            time.sleep(0.01)
            self.set_result(None)
        return super().result(timeout)


@dataclass
class Response:
    """What newer versions of torch return."""

    staging_completion: Future[None]
    upload_completion: Future[None]


@pytest.mark.parametrize("awaited", ["upload_completion", "staging_completion", ""])
def test_a_wait_for_an_async_save_in_the_loop_is_timed_until_it_is_done(
    monkeypatch: pytest.MonkeyPatch, awaited: str
) -> None:
    returned = Response(Upload(), Upload()) if awaited else Upload()
    monkeypatch.setattr(dcp, "async_save", lambda *_args, **_kwargs: returned)
    made = Bench()
    future = getattr(dcp.async_save({}), awaited) if awaited else dcp.async_save({})
    assert "result" in vars(future)
    assert future.result() is None and future.result(1) is None
    (waited,) = made.spans()["checkpoint wait"]
    assert (waited.count, waited.over) == (1, True) and waited.busy >= 10_000_000
    assert not {"result", "exception"} & vars(future).keys()  # it is as torch made it
    made.instrumentation.remove()


def test_a_wait_for_an_async_save_that_fails_or_takes_too_long_raises_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    upload: Future[None] = Future()
    monkeypatch.setattr(dcp, "async_save", lambda *_args, **_kwargs: upload)
    made = Bench()
    with pytest.raises((TimeoutError, futures.TimeoutError)):
        dcp.async_save({}).result(timeout=0.001)
    assert [span.count for span in made.spans()["checkpoint wait"]] == [1]
    upload.set_exception(OSError("disk full"))
    with pytest.raises(OSError, match="disk full"):
        upload.result()
    assert isinstance(upload.exception(), OSError)
    made.instrumentation.remove()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_real_async_save_and_load_of_distributed_checkpoint(bench: Bench, tmp_path: Path) -> None:
    if not hasattr(dcp, "async_save"):
        pytest.skip("this torch has none")
    state = {"x": torch.ones(1000)}
    saved = dcp.async_save(state, checkpoint_id=str(tmp_path / "c"))
    getattr(saved, "upload_completion", saved).result()
    until = time.monotonic() + 240
    while not (spans := bench.spans()).get("checkpoint beside", [None])[0] and time.monotonic() < until:
        time.sleep(0.01)
    assert [span.count for span in spans["checkpoint beside"]] == [1]
    dcp.load(state, checkpoint_id=str(tmp_path / "c"))
    assert [span.count for span in bench.spans()["checkpoint load"]] == [1]


def test_functions_of_frameworks_are_timed_once_they_are_imported(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "accelerate.py").write_text(
        "import torch\n"
        "class Accelerator:\n"
        "    def save_state(self, path):\n"
        "        torch.save({}, path)\n"
        "        return path\n"
        "    def load_state(self, path):\n"
        "        return torch.load(path)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "accelerate", raising=False)
    import accelerate

    path = tmp_path / "x.pt"
    assert accelerate.Accelerator().save_state(path) == path
    assert accelerate.Accelerator().load_state(path) == {}
    spans = bench.spans()
    assert (
        [span.count for span in spans["checkpoint"]]
        == [span.count for span in spans["checkpoint load"]]
        == [1]
    )
    del sys.modules["accelerate"]  # what was there before comes back after the test


def test_state_that_frameworks_put_back_is_loading_if_there_is_a_checkpoint(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They call these functions in each run. Without a checkpoint nothing is loaded, and none is claimed."""
    module = ModuleType("framework")

    class Connector:
        _loaded_checkpoint: Any = None

        def restore_model(self) -> str:
            return "done"

        def restore_training_state(self) -> None: ...

    class Trainer:
        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> str | None:
            return checkpoint

    module.Connector, module.Trainer = Connector, Trainer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "framework", module)
    of_connector = {"restore_model": RESTORE_SPAN, "restore_training_state": RESTORE_SPAN}
    of_trainer = {"_load_optimizer_and_scheduler": RESTORE_SPAN}
    patcher, spans = bench.instrumentation.patcher, bench.instrumentation.spans
    patch_framework(patcher, spans, "framework", "Connector", of_connector)
    patch_framework(patcher, spans, "framework", "Trainer", of_trainer)
    connector, trainer = Connector(), Trainer()
    assert connector.restore_model() == "done"
    connector.restore_training_state()
    assert trainer._load_optimizer_and_scheduler(None) is None
    del Connector._loaded_checkpoint  # another version
    patcher.errors.debug = False
    assert connector.restore_model() == "done"
    assert "checkpoint load" not in bench.spans()
    connector._loaded_checkpoint = {"state": 1}
    assert connector.restore_model() == "done"
    connector.restore_training_state()
    assert trainer._load_optimizer_and_scheduler("here") == "here"
    assert trainer._load_optimizer_and_scheduler(checkpoint="here") == "here"
    assert [span.count for span in bench.spans()["checkpoint load"]] == [4]


def test_ray_trains_report_counts_if_it_has_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("ray.train")
    calls: list[Any] = []
    module.report = lambda metrics, checkpoint=None, **_: calls.append((metrics, checkpoint))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray.train", module)
    monkeypatch.setattr(sys.modules.setdefault("ray", ModuleType("ray")), "train", module, raising=False)
    made = Bench()
    try:
        module.report({"loss": 1})  # type: ignore[attr-defined]
        assert "checkpoint" not in made.spans()
        module.report({"loss": 1}, checkpoint="c")  # type: ignore[attr-defined]
        assert [span.count for span in made.spans()["checkpoint"]] == [1]
        assert calls == [({"loss": 1}, None), ({"loss": 1}, "c")]
    finally:
        made.instrumentation.remove()


@pytest.mark.parametrize(
    ("loaded", "expected"),
    [
        ({"weight": torch.ones(1)}, False),
        ({"state_dict": {"weight": torch.ones(1)}}, False),
        ({"state_dict": {"weight": torch.ones(1)}, "epoch": 3}, True),
        ({"features": torch.ones(1), "step": 3}, False),  # a sample of a data set
        ({"state": {}, "param_groups": [{}]}, True),
        ({"train": {"optimizer": {"state": {}, "param_groups": [{}]}}}, True),
        ({"base_lrs": [0.1], "last_epoch": 4, "_step_count": 5}, True),
        (torch.ones(1), False),
        ([1, 2], False),
    ],
)
def test_a_checkpoint_says_how_far_training_was(loaded: Any, expected: bool) -> None:
    assert is_checkpoint(loaded) is expected


@pytest.mark.parametrize(
    ("loaded", "expected"),
    [
        ({"model": {}, "step": 40}, 40),
        ({"step": 3, "global_step": 40}, 40),
        ({"trainer": {"iteration": 40}, "epoch": 2}, 40),
        ({"optimizer": {"param_groups": [], "step": 40}, "epoch": 2}, None),
        ({"model": {}, "step": "40"}, None),
        ({"model": {}, "step": True}, None),
        ({"model": {}}, None),
    ],
)
def test_a_checkpoint_says_how_many_steps_it_has(loaded: Any, expected: int | None) -> None:
    assert steps_in(loaded) == expected


# -- pauses -----------------------------------------------------------------------------------------------


def pauses(loop: Loop) -> list[tuple[int, int]]:
    times = loop.recorder.span_times(True)
    assert times is not None
    return [(span.ended - span.began, span.count) for span in times.over if span.name == "pause"]


def test_a_pause_between_two_steps_is_recorded_if_it_is_longer_than_steps() -> None:
    loop = Loop()
    loop.clock.wait(9 * SECOND)  # before the first step
    for step in range(9):
        loop.step()
        loop.clock.wait({4: 5 * SECOND, 7: SECOND // 2}.get(step, 1))
    loop.recorder.replay()
    assert pauses(loop) == [(5 * SECOND, 1)]


def test_what_happens_in_each_step_is_no_pause() -> None:
    loop = Loop()
    for _ in range(9):
        loop.step()
        loop.clock.wait(5 * SECOND)
    loop.step()
    loop.recorder.replay()
    assert pauses(loop) == []


def test_an_optimizer_or_a_span_between_two_steps_is_no_pause() -> None:
    loop = Loop()
    for _ in range(4):
        loop.step()
    loop.data(2)
    loop.forward(4)
    loop.recorder.backward_begin()
    loop.recorder.backward_end(True)
    running = loop.recorder.optimizer_begin(False, 1)
    loop.clock.wait(5 * SECOND)
    loop.recorder.optimizer_end(running)
    number = loop.recorder.steps.sums.number("upload")
    assert number is not None and loop.recorder.span_begin(number)
    loop.clock.wait(5 * SECOND)
    loop.recorder.span_end(number)
    loop.step()
    loop.recorder.replay()
    assert pauses(loop) == []


# -- the records ------------------------------------------------------------------------------------------


class Reported:
    """A report of a loop on a clock by hand, whose wall clock is `WALL` ahead."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.loop = Loop(clock=self.clock)
        self.errors = Errors()
        self.set_ns = 0
        self.report = LifeReport(
            self.loop.recorder, self.errors,
            wall_ns=lambda: WALL + self.clock.now + self.set_ns, up_ns=lambda: self.clock.now,
        )  # fmt: skip
        self.intervals: list[LifeInterval] = []
        self.lives: list[Life] = []

    def collect(self, final: bool = False) -> None:
        for record in self.report.collect(final):
            (self.lives if isinstance(record, Life) else self.intervals).append(record)  # type: ignore[arg-type]

    def checkpoint(self, ns: int) -> None:
        number = self.loop.recorder.sums.number("checkpoint")
        assert number is not None
        self.loop.recorder.span_begin(number)
        self.clock.wait(ns)
        self.loop.recorder.span_end(number)
        self.loop.recorder.replay()


def test_life_of_a_process_from_its_birth_to_its_end() -> None:
    rank = Reported()
    attached = WALL + rank.clock.now
    rank.collect()
    (life,) = rank.lives
    assert (life.attached_ns, life.first_step_ns, life.last_row_ns, life.ended_ns) == (
        attached,
        None,
        None,
        None,
    )
    rank.clock.wait(5 * SECOND)
    began = WALL + rank.clock.now
    for _ in range(3):
        rank.loop.step()
    rank.checkpoint(2 * SECOND)
    rank.collect()
    life = rank.lives[-1]
    assert (life.first_step_ns, life.step) == (began, 3)
    (held,) = life.open_intervals()
    assert (held.what, held.busy_ns, held.count, held.step) == ("checkpoint_save", 2 * SECOND, 1, 3)
    assert held.ended_ns == life.t_ns and rank.intervals == []
    rank.clock.wait(SECOND)
    rank.collect(final=True)
    (saved,) = rank.intervals
    assert saved == held and rank.lives[-1].open == []
    assert rank.lives[-1].ended_ns == rank.lives[-1].t_ns == held.ended_ns + SECOND
    assert not rank.errors


def test_a_life_stays_as_long_as_it_is_when_the_wall_clock_is_set_back() -> None:
    rank = Reported()
    set_back, clock = [0], rank.clock
    began = clock.now
    rank.report = LifeReport(rank.loop.recorder, rank.errors, wall_ns=lambda: WALL + clock.now - set_back[0])
    rank.report.install()
    rank.clock.wait(5 * SECOND)
    rank.loop.step()
    rank.collect()
    set_back[0] = 3600 * SECOND
    rank.clock.wait(5 * SECOND)
    rank.loop.step()
    rank.collect(final=True)
    before, after = rank.lives[0], rank.lives[-1]
    assert after.born_ns is not None and before.born_ns is not None and after.last_row_ns is not None
    assert before.attached_ns - after.attached_ns == before.born_ns - after.born_ns == 3600 * SECOND
    assert after.ended_ns == after.t_ns == after.attached_ns + clock.now - began
    assert after.attached_ns < after.last_row_ns <= after.ended_ns


def test_a_wait_for_a_checkpoint_says_nothing_about_what_is_in_it() -> None:
    """It was begun after 1 step, and the wait for it comes after 3."""
    rank = Reported()
    for name, steps in (("checkpoint", 1), ("checkpoint wait", 2)):
        for _ in range(steps):
            rank.loop.step()
        number = rank.loop.recorder.sums.number(name)
        assert number is not None
        rank.loop.recorder.span_begin(number)
        rank.clock.wait(3 * SECOND)
        rank.loop.recorder.span_end(number)
    rank.loop.recorder.replay()
    rank.clock.wait(2 * SECOND)
    rank.collect()
    assert [(one.what, one.step) for one in rank.intervals] == [
        ("checkpoint_save", 1),
        ("checkpoint_save", None),
    ]
    known = Intervals()
    for one in rank.intervals:
        known.add(0, one)
    assert known.checkpoints[0].saved_step == 1
    assert sum(piece.busy_ns for piece in known.pieces[0]) == 6 * SECOND


def test_a_wall_clock_that_is_set_is_reported_at_once_with_the_boot_that_tells() -> None:
    rank = Reported()
    rank.clock.wait(600 * SECOND)
    rank.collect()
    rank.checkpoint(SECOND)
    rank.clock.wait(2 * SECOND)
    rank.collect()
    (saved,), count = rank.intervals, len(rank.lives)
    rank.clock.wait(200_000_000)
    rank.collect()
    assert len(rank.lives) == count  # nothing has changed, and it is not due
    rank.set_ns = -3600 * SECOND
    rank.clock.wait(200_000_000)
    rank.collect()
    life = rank.lives[-1]
    assert len(rank.lives) == count + 1
    assert (saved.booted_ns, life.booted_ns) == (WALL, WALL - 3600 * SECOND)
    assert life.boot is not None and life.boot == rank.lives[0].boot


def test_the_difference_of_two_clocks_is_read_again_if_the_thread_had_to_wait() -> None:
    waits, clock = iter([0, 30 * SECOND, *[0] * 20]), Clock()

    def wall() -> int:
        clock.wait(next(waits))
        return WALL + clock.now

    def other() -> int:
        clock.wait(next(waits))
        return clock.now

    assert ahead_ns(wall, other) == WALL


def test_what_is_going_on_is_known_before_it_is_over() -> None:
    """A process that is killed during a checkpoint has said that it was writing one."""
    rank = Reported()
    rank.collect()
    number = rank.loop.recorder.sums.number("checkpoint")
    assert number is not None
    rank.loop.recorder.span_begin(number)
    for _ in range(2):
        rank.clock.wait(400_000_000)
        rank.collect()
    (going_on,) = rank.lives[-1].open
    assert (going_on.what, going_on.ended_ago_ns) == ("checkpoint_save", None)
    assert going_on.began_ago_ns == rank.lives[-1].t_ns - (WALL + 1000)


def test_an_hour_without_news_and_one_full_of_news_send_few_lives() -> None:
    for busy in (False, True):
        rank = Reported()
        for _ in range(3600):
            rank.loop.step()
            if busy:
                rank.checkpoint(100_000_000)
            rank.clock.wait(SECOND)
            rank.collect()
        assert len(rank.lives) < (450 if busy else 400)


def test_birth_is_before_now_and_a_process_older_than_its_part_of_the_run_begins_with_that() -> None:
    born = born_ns()
    assert born is not None and 0 < time.time_ns() - born < 86_400 * SECOND
    assert abs(psutil.Process().create_time() - born / 1e9) < 2
    later = time.time_ns() - 1000
    for since, expected in ((None, born), (later, later)):
        report = LifeReport(Loop().recorder, Errors(), since)
        report.install()
        (life,) = (one for one in report.collect(False) if isinstance(one, Life))
        assert life.born_ns is not None and abs(life.born_ns - expected) < 20_000_000
        assert life.attached_ns >= life.born_ns
