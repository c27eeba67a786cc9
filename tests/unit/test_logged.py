"""What a script logs: never an error or a wait for it, of the right step, bounded, kept and shown."""

from __future__ import annotations

import math
import threading
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from integration import loops
from messages import RECORDS
from sessions import Clock, Rank, Relay, aggregation, written_summary

import traceml_ray
from traceml_ray import text
from traceml_ray.agent import bootstrap
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.document.model import Number
from traceml_ray.errors import Errors
from traceml_ray.reports.answers import Answers
from traceml_ray.signals.logged import copies
from traceml_ray.signals.logged.agent import ROOM, MetricLog
from traceml_ray.signals.logged.judge import MOST, LoggedHistory, joined
from traceml_ray.signals.logged.records import MAX_NAMES, LoggedValues
from traceml_ray.signals.logged.view import GetLogged, LoggedView
from traceml_ray.store import query
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.summary_shape import summary_of
from traceml_ray.text import sparkline, value

NAN, INF = math.nan, math.inf


class Steps:
    """A recorder whose step is set by hand."""

    def __init__(self) -> None:
        self.step = 0
        self.room = True

    def at_step(self, call: Any, *args: Any) -> bool:
        if self.room:
            call(self.step, *args)
        return self.room


class FakeGpu(copies.DeviceCopies):
    """Values of tensors arrive when `arrive` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[int, float]] = []

    def number_of(self, tensor: Any) -> Any:
        place = self._copied(SimpleNamespace())
        self.waiting.append((place.slot, tensor.item()))
        return place

    def _allocated(self) -> Any:
        return torch.empty(copies.SLOTS, dtype=torch.float64)

    def _copied(self, tensor: Any) -> Any:
        if self._values is None:
            self._use(self._allocated())
        real, self._values = self._values, [SimpleNamespace(copy_=lambda *_, **__: None)] * copies.SLOTS
        try:
            return super()._copied(tensor)
        finally:
            self._values = real

    def arrive(self) -> None:
        for slot, number in self.waiting:
            self._values[slot] = number
        self.waiting = []


def log_of(steps: Steps | None = None) -> tuple[MetricLog, Steps, Errors, list[float]]:
    steps, errors, now = steps or Steps(), Errors(), [0.0]
    recorder: Any = steps
    return MetricLog(recorder, errors, lambda: now[0]), steps, errors, now


def test_last_value_of_a_step_counts_and_steps_are_summed_up() -> None:
    log, steps, errors, _ = log_of()
    for step, number in enumerate([3.0, 1.0, NAN, 2.0]):
        steps.step = step
        log.log({"loss": 99.0})
        log.log({"loss": number, "lr": 1})
    loss, lr = log.collect(True)
    assert loss == LoggedValues("loss", 0, 3, 4, 1.0, 3.0, 1, 2, None, 2.0)
    assert (lr.name, lr.low, lr.high, lr.last) == ("lr", 1.0, 1.0, 1.0) and not errors
    assert log.collect(True) == []


def test_what_is_no_number_is_refused_and_the_others_are_kept() -> None:
    log, _, errors, _ = log_of()
    for bad in ("0.5", None, [1.0], torch.ones(2), torch.ones((), dtype=torch.complex64), 10**400, object()):
        with pytest.raises(TypeError, match="'bad'"):
            log.log({"bad": bad, "good": 1.5})
    good = {"a": np.float32(0.5), "b": np.int64(2), "c": np.array([3.0]), "d": True, "e": Fraction(1, 2)}
    log.log({**good, "f": torch.tensor(7.0, requires_grad=True), "g": torch.tensor([8])})
    by_name = {one.name: one.last for one in log.collect(True)}
    assert by_name == {"good": 1.5, "a": 0.5, "b": 2, "c": 3, "d": 1, "e": 0.5, "f": 7, "g": 8}
    assert not errors


def test_names_are_bounded_and_what_is_too_much_is_counted() -> None:
    log, _, errors, _ = log_of()
    log.log({f"n{number}": 1.0 for number in range(MAX_NAMES + 2)})
    log.log({"n0": 2.0, "x" * 100: 1.0, 5: 1.0})  # type: ignore[dict-item]
    records = log.collect(True)
    assert [one.name for one in records] == [f"n{number}" for number in range(MAX_NAMES)]
    assert errors["log: ValueError"] == 4
    assert [event.message for event in errors.causes()] == [
        "swallowed in log: ValueError: more than 32 names: 'n32' is not kept"
    ]
    log, _, errors, _ = log_of()
    log.log({"x" * 100: 1.0, "\ud800": 2.0})
    assert [one.name for one in log.collect(True)] == ["x" * 64, "?"] and not errors


def test_calls_that_nobody_reads_are_lost_and_counted() -> None:
    log, steps, errors, _ = log_of()
    for _ in range(ROOM + 3):
        log.log({"loss": 1.0})
    steps.room = False
    log.log({"loss": 2.0})
    (record,) = log.collect(True)
    assert record.last == 1.0 and errors == {"logged values lost: no room": 4}


def test_records_are_sent_more_rarely_the_longer_a_run_is() -> None:
    log, steps, _, now = log_of()
    sent = []
    for second in range(4000):
        now[0], steps.step = float(second), second
        log.log({"loss": 1.0})
        sent += [(second, one.first_step, one.last_step) for one in log.collect(False)]
    assert sent[0] == (0, 0, 0) and len(sent) < 500
    assert [first for _, first, _ in sent[1:]] == [last + 1 for _, _, last in sent[:-1]], "no step is lost"


def test_value_on_a_device_is_read_once_it_has_arrived_and_in_order() -> None:
    log, steps, errors, _ = log_of()
    log._copies = gpu = FakeGpu()
    log.log({"loss": torch.tensor(0.25)})
    steps.step = 1
    log.log({"loss": 0.5})
    log.log({"loss": torch.tensor(NAN)})
    assert log.collect(False) == []
    gpu.arrive()
    (record,) = log.collect(True)
    assert (record.low, record.steps, record.not_finite_since) == (0.25, 2, 1) and not errors
    assert len(gpu._free) == copies.SLOTS


def test_value_that_never_arrives_is_counted_and_places_are_bounded() -> None:
    log, _, errors, _ = log_of()
    log._copies = FakeGpu()
    for _ in range(copies.SLOTS):
        log.log({"loss": torch.tensor(1.0)})
    with pytest.raises(TypeError, match="on their way"):
        log.log({"loss": torch.tensor(1.0)})
    assert log.collect(True) == []
    assert errors == {"logged values lost: not copied from the device": copies.SLOTS}


def test_places_of_calls_that_were_lost_are_used_again() -> None:
    log, steps, errors, _ = log_of()
    log._copies, steps.room = FakeGpu(), False
    log.log({"loss": torch.tensor(1.0)})
    log._copies.arrive()
    assert log.collect(True) == [] and len(log._copies._free) == copies.SLOTS
    assert errors == {"logged values lost: no room": 1}


def test_tensor_on_another_device_is_refused() -> None:
    log, *_ = log_of()
    with pytest.raises(TypeError, match="a tensor on meta is not read"):
        log.log({"loss": torch.ones((), device="meta")})


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Any:
    job: Any = loops.Job()
    job.instrumentation.errors.debug = False
    job.log = MetricLog(job.recorder, job.instrumentation.errors)
    agent = SimpleNamespace(
        recorder=job.recorder, instrumentation=job.instrumentation, collector=lambda _: job.log
    )
    monkeypatch.setattr(bootstrap, "_agent", agent)
    job.instrumentation.install()
    yield job
    job.instrumentation.remove()


def _training(job: Any, after: Any = None, before: Any = None, forward: Any = None) -> None:
    net = job.nets[0] if job.nets else job.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in torch.utils.data.DataLoader(torch.ones(6, loops.WIDTH), batch_size=2):
        if forward:
            forward()
        net(batch).sum().backward()
        if before:
            before()
        optimizer.step()
        if after:
            after()


@pytest.mark.parametrize("where", ["after", "before", "forward"])
def test_value_is_of_the_step_it_is_logged_in(job: Any, where: str) -> None:
    seen: list[int] = []

    def log() -> None:
        seen.append(len(seen))
        traceml_ray.log(loss=seen[-1])

    _training(job, **{where: log})
    job.recorder.replay()
    assert [(step, values["loss"]) for step, values in job.log._calls] == [(0, 0), (1, 1), (2, 2)]
    assert [row["step"] for row in job.rows()] == [0, 1, 2] and not job.instrumentation.errors


def test_value_of_an_evaluation_is_of_the_step_before_it(job: Any) -> None:
    net = job.model()

    def evaluate() -> None:
        with torch.no_grad():
            net.eval()(torch.ones(2, loops.WIDTH))
        traceml_ray.log({"val/loss": 1.0})
        net.train()

    _training(job, after=evaluate)
    job.recorder.replay()
    assert [step for step, _ in job.log._calls] == [0, 1, 2]


def test_call_never_raises_and_is_nothing_where_nobody_watches(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    traceml_ray.log({"a": "no number"}, b=1.0)
    traceml_ray.log(3)  # type: ignore[arg-type]
    thread = threading.Thread(target=traceml_ray.log, kwargs={"c": 2.0})
    thread.start()
    thread.join()
    job.recorder.replay()
    assert {one.name for one in job.log.collect(True)} == {"b", "c"}
    assert job.instrumentation.errors == {"log: TypeError": 2}
    monkeypatch.setattr(bootstrap, "_agent", None)
    traceml_ray.log(loss=1.0)
    traceml_ray.log(object())  # type: ignore[arg-type]


NUMBERS = st.one_of(st.floats(-1e6, 1e6), st.sampled_from([NAN, INF, -INF]))


@given(st.lists(NUMBERS, min_size=1, max_size=300), st.integers(0, 4))
def test_joined_pieces_say_of_all_steps_what_single_ones_say(numbers: list[float], times: int) -> None:
    log, steps, _, _ = log_of()
    history, whole = LoggedHistory(), []
    for step, number in enumerate(numbers):
        steps.step = step
        log.log({"loss": number})
        whole += log.collect(True)
    for record in whole:
        history.add(1, record)
    rows = history._rows()
    for _ in range(times):
        rows = joined(rows)
    history._table = rows
    (metric,) = history.metrics({0: [1]})
    finite = [number for number in numbers if math.isfinite(number)]
    assert (metric.low, metric.high) == (min(finite, default=None), max(finite, default=None))
    assert repr(metric.values.tolist()) == repr([float(numbers[-1])])
    bad = [step for step, number in enumerate(numbers) if not math.isfinite(number)]
    since = next((s for s in range(len(numbers)) if not any(map(math.isfinite, numbers[s:]))), None)
    assert [(one.first_step, one.since) for one in metric.not_finite] == ([(bad[0], since)] if bad else [])
    assert rows[:, 3].sum() == len(numbers)


def test_history_is_bounded_and_a_restart_replaces_what_it_does_again() -> None:
    history = LoggedHistory()
    for step in range(5 * MOST):
        history.add(1, LoggedValues("loss", step, step, 1, float(step), float(step), last=float(step)))
    history.add(2, LoggedValues("loss", 1000, 1000, 1, -1.0, -1.0, last=-1.0))
    (metric,) = history.metrics({0: [1, 2]})
    assert len(history._table) <= MOST + 1
    assert metric.steps.tolist() == [1000] and metric.value == -1.0
    assert metric.first[0] == 0 and metric.last[-1] == 1000 and len(metric.line) == 120
    assert history.metrics({0: [7]}) == []


def _session(folder: Path, values: dict[int, list[float]]) -> Path:
    aggregator, relay = aggregation(folder, Clock()), Relay()
    ranks = [Rank(number, len(values)) for number in values]
    for step in range(len(values[0])):
        batches = []
        for rank, numbers in zip(ranks, values.values(), strict=True):
            log, steps, _, _ = log_of()
            steps.step = step
            log.log({"loss": numbers[step], "lr": 3e-5})
            batches.append(rank.batch(1, logged=log.collect(True)))
        aggregator.ingest(relay.message(*batches))
        aggregator.commit()
    aggregator.close()
    return folder / "session.sqlite"


def test_logged_values_are_answered_stored_and_in_the_summary(tmp_path: Path) -> None:
    _session(tmp_path, {0: [3.0, 2.0, NAN], 1: [1.0, 2.0, 4.0]})
    loss, lr = Answers(tmp_path, Thresholds()).answer(GetLogged())
    assert (loss.name, loss.ranks, loss.steps.tolist()) == ("loss", [0, 1], [2, 2])
    assert np.array_equal(loss.values, [NAN, 4.0], equal_nan=True) and (loss.low, loss.high) == (1.0, 4.0)
    assert loss.line.tolist() == [2.0, 2.0, 4.0] and lr.line.tolist() == [3e-5] * 3
    assert loss.lowest.tolist() == [1.0, 2.0, 4.0] and loss.highest.tolist() == [3.0, 2.0, 4.0]
    (finding,) = Answers(tmp_path, Thresholds()).answer(query.Findings())
    assert (finding.label, finding.severity, finding.ranks, finding.from_step) == (
        *("not_finite", "critical", (0,), 2),
    )
    with SessionFile(tmp_path / "session.sqlite") as file:
        summary = written_summary(file, Thresholds())
    block = summary["logged"]
    assert block[0]["values"] == [None, 4.0] and block[1]["values"] == [3e-5] * 2
    view, numbers = LoggedView(), summary_of(summary).logged
    assert view.block(view.of_block(numbers)) == numbers
    assert len(view.sections(view.of_block(numbers))) == 1


def test_value_that_was_not_finite_once_is_no_more_than_a_notice(tmp_path: Path) -> None:
    _session(tmp_path, {0: [3.0, INF, 2.0]})
    (finding,) = Answers(tmp_path, Thresholds()).answer(query.Findings())
    assert (finding.severity, finding.from_step) == ("notice", 1)
    (loss, _) = Answers(tmp_path, Thresholds()).answer(GetLogged())
    assert loss.value == 2.0 and loss.not_finite[0].since is None


def test_pages_have_the_newest_value_and_gauges_leave_out_what_is_not_finite(tmp_path: Path) -> None:
    _session(tmp_path, {0: [3.0, 2.0, NAN], 1: [1.0, 2.0, 4.0]})
    view = LoggedView()
    (section,) = view.sections(Answers(tmp_path, Thresholds()).answer(GetLogged()))
    loss, lr = section.numbers
    assert (loss.value, loss.about, loss.short) == (None, "not finite since step 2", ("LOSS", "nan"))
    assert (lr.label, lr.short) == ("lr", ("LR", "3e−05"))
    values, bad = section.gauges
    assert [*values.series] == [(("loss",), None), (("lr",), 3e-5)]
    assert [*bad.series] == [(("loss",), 1), (("lr",), 0)]


def test_sparkline_is_bars_between_the_extremes() -> None:
    assert sparkline([0, 1, None, NAN, 7]) == "▁▂  █" and sparkline([1.0]) == "" and sparkline([]) == ""
    assert sparkline([1, 2, 9], between=(0, 4)) == "▃▅█", "what is beyond the scale ends at its edge"
    assert sparkline([*range(48)]) == "▁▁▂▂▂▃▃▃▃▄▄▄▅▅▅▆▆▆▆▇▇▇██"
    assert value(12345.678) == "1.235e+04" and value(None) == "n/a"


def test_record_of_logged_values_is_among_those_that_are_tried() -> None:
    assert any(isinstance(record, LoggedValues) for record in RECORDS)


def test_numbers_of_any_size_are_written_with_their_figures() -> None:
    number = Number("lr", "lr", 7.572e-4, "")
    assert (number.written(number.value), number.written(None)) == ("0.0007572", "n/a")
    assert Number("t", "t", 21.25, "ms").written(21.25) == text.number(21.25)
