"""Histories of live runs: what is answered of them is what is answered of the session file."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from fuzzing import fuzz
from hypothesis import given, settings
from hypothesis import strategies as st
from played import Played
from sessions import Clock, Rank, Relay, aggregation
from unit.sample_windows import processes
from unit.test_query import differences
from unit.test_step_history import LIMITS, rows

from traceml_ray.analysis import step_numbers
from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.analysis.step_store import ALL, Between
from traceml_ray.errors import Errors
from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.monitor.live_steps import LiveSteps
from traceml_ray.reports.answers import Answers
from traceml_ray.signals.goodput.totals import TOTALS, RankTotals
from traceml_ray.signals.live import LiveSignal
from traceml_ray.store import query
from traceml_ray.store.session_file import SessionFile
from traceml_ray.views.session_poll import joined
from traceml_ray.views.source import StoredSource

QUESTIONS: list[query.Request[Any]] = [
    query.GetTimes("job", whole=False),
    query.GetTimes("job", whole=True),
    *(query.GetColumns("job", stage, whole) for stage in ("total", "data") for whole in (False, True)),
    query.GetBusy("job", (1, 2, 9), 50),
    query.GetRankSteps("job", 1, 100),
    query.GetCell("job", 1, 20, 30),
]
NEWEST = query.GetColumns("job", whole=False)


def asked(aggregator: AggregatorCore, request: query.Request[Any]) -> Any:
    return query.ask_one(aggregator.query, request)


def same(one: Any, other: Any) -> None:
    assert [*differences(one, other)] == []


def check_against_file(aggregator: AggregatorCore, folder: Path) -> None:
    """Check that each answer is the one that the file gives."""
    for request in QUESTIONS:
        same(asked(aggregator, request), asked_of_file(folder, request))


def asked_of_file(folder: Path, request: Any) -> Any:
    """The answer while the session goes on: somebody holds it."""
    answers = Answers(folder, LIMITS)
    with contextlib.closing(answers), patch.object(answers, "_over", return_value=False):
        return query.ask_one(answers.reply, request)


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Played]:
    made = Played(tmp_path / "demo", 4, per_node=2, late=2)
    yield made
    made.aggregator.close()


@fuzz(1 / 3)
@given(st.data())
def test_live_answers_are_those_of_the_session_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever is lost, late, or silent for a while."""
    played = Played(tmp_path_factory.mktemp("s") / "demo", 4, per_node=2, late=2, onset=20)
    some = st.lists(st.integers(0, 3), max_size=2).map(tuple)
    for _ in range(data.draw(st.integers(4, 14))):
        played.play(
            data.draw(st.integers(0, 9)), late=data.draw(some), lost=data.draw(some), silent=data.draw(some)
        )
    played.play(5)
    check_against_file(played.aggregator, played.folder)
    played.aggregator.close()


def test_restarted_aggregator_brings_the_history_back(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traceml_ray.monitor.live_steps.OLDER_ROWS", 1000)
    for _ in range(60):
        played.play(20)
    before = {str(question): asked(played.aggregator, question) for question in QUESTIONS}
    played.aggregator.close()
    played.aggregator = aggregation(played.folder, played.clock)
    played.aggregator.judge()
    columns = asked(played.aggregator, NEWEST)
    assert columns.last[-1] == 1199 and len(columns.first) == 300  # the newest are there at once
    whole = query.GetTimes("job", whole=True)
    assert not asked(played.aggregator, whole).whole  # and the others are to come
    for _ in range(8):
        played.aggregator.judge()
    assert asked(played.aggregator, whole).whole
    for question in QUESTIONS:
        same(asked(played.aggregator, question), before[str(question)])
    played.play(20)
    check_against_file(played.aggregator, played.folder)
    assert not played.aggregator.errors


def test_rank_in_a_new_process_restarts_its_history(tmp_path: Path) -> None:
    clock, relay = Clock(), Relay()
    aggregator = aggregation(tmp_path / "s", clock)
    ranks = [Rank(number) for number in (0, 1)]
    for second in range(20):
        if second == 10:  # it goes on where the other was
            ranks[1] = Rank(1, pid=77, process_id="another")
            ranks[1].produced = ranks[0].produced
        aggregator.ingest(relay.message(*(rank.batch(10) for rank in ranks)))
        assert aggregator.commit()
        clock.tick()
        aggregator.judge()
    check_against_file(aggregator, tmp_path / "s")
    busy = asked(aggregator, NEWEST)
    assert busy.first[0] == 1 and busy.last[-1] == 199
    assert aggregator.verdict is not None and aggregator.verdict.window_steps == 50
    aggregator.close()


def test_length_of_a_step_is_known_at_once_whatever_its_number(tmp_path: Path) -> None:
    clock, relay, rank = Clock(), Relay(), Rank(0)
    rank.produced = 5000
    aggregator = aggregation(tmp_path / "s", clock)
    aggregator.ingest(relay.message(rank.batch(10)))
    aggregator.judge()
    assert [run.step_s for run in aggregator._judge.running()] == [pytest.approx(0.01)]
    aggregator.close()


def test_rows_that_are_not_judged_have_a_bound_and_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traceml_ray.monitor.live_steps.MAX_ARRIVED", 100)
    aggregator, relay, rank = aggregation(tmp_path / "s"), Relay(), Rank(0, 1)
    for _ in range(30):
        aggregator.ingest(relay.message(rank.batch(10)))
    assert aggregator._steps._rows <= 100
    (count,) = [n for place, n in aggregator.errors.items() if "not judged" in place]
    assert 200 <= count < 300
    aggregator.close()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=12),
    st.sampled_from([None, ALL, Between(350), Between(100, 900), Between(990)]),
    st.sampled_from(["total", "data"]),
)
def test_columns_fetched_in_steps_are_those_fetched_at_once(
    counts: list[int], between: Between | None, stage: str
) -> None:
    """Most of them are no longer kept one by one."""
    history, every, held, done = StepHistory(LIMITS), processes(rows(sum(counts), 2)), None, 0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("traceml_ray.analysis.step_store._STEPS", 300)
        for count in counts:
            history.add_rows([rank_rows.select(slice(done, done + count)) for rank_rows in every])
            history.advance({0, 1}, 0, 2)
            done += count
            answer = step_numbers.columns(history, stage, between, 2, held.next if held else None)
            held = joined(held, query.ask_one(lambda _, a=answer: query.encode([a]), NEWEST))
            same(held, step_numbers.columns(history, stage, between, 2))


def test_columns_that_go_on_from_others_change_nothing() -> None:
    """Whoever asked has forgotten what it held, or another answer came first."""
    history = StepHistory(LIMITS)
    history.add_rows(processes(rows(30, 2)))
    history.advance({0, 1}, 0, 2)
    held = step_numbers.columns(history, "total", None, 2)
    part = step_numbers.columns(history, "total", None, 2, (held.token, 20))
    assert part.since == 20 and part.first[0] == 20 and not part.ranks
    same(joined(held, part), held)
    other = msgspec.structs.replace(held, token=[*held.token, 1])
    assert joined(None, part) is None and joined(other, part) is other


def test_numbers_of_a_run_are_those_of_its_report_while_it_runs_and_when_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it was: more steps than are kept one by one."""
    monkeypatch.setattr("traceml_ray.analysis.step_store._STEPS", 1000)
    played = Played(tmp_path / "demo", 4, per_node=2, late=2)
    for second in range(30):
        played.play(50, judge=second == 29)
    live = asked(played.aggregator, query.GetTimes("job"))
    assert (live.steps, live.of_all) == (LIMITS.window_steps, False)
    live = asked(played.aggregator, query.GetTimes("job", whole=True))
    played.end()
    summary = msgspec.json.decode((played.folder / "summary.json").read_bytes())
    source = StoredSource(played.folder)
    for send in (played.aggregator.query, source.reply):
        times = query.ask_one(send, query.GetTimes("job"))
        assert (times.steps, times.of_all) == (summary["steps"]["judged"], True) == (1489, True)
        for numbers in (live, times):  # the summary is rounded
            for name in ("median_ms", "p95_ms"):
                assert getattr(numbers, name) == pytest.approx(summary["steps"][name], abs=1e-4)
            assert numbers.worst_over == pytest.approx(
                1 + summary["steps"]["global_skew_pct"] / 100, abs=1e-4
            )
            busy, exposed = summary["steps"]["per_rank_median_ms"], summary["stages"]
            assert numbers.busy_ms == pytest.approx([*busy.values()], abs=1e-4)
            stages = [stage["exposed_ms"] for stage in exposed]
            assert [*numbers.stages.values()] == pytest.approx(stages, abs=1e-4)
    assert (live.steps, live.of_all) == (summary["steps"]["judged"], True)
    source.close()
    played.aggregator.close()


def test_productive_time_is_unknown_where_the_first_report_came_too_late(
    tmp_path: Path,
) -> None:
    """Ray came up at the end of a short run: how long the steps took is known, not out of how long."""
    clock, relay, rank = Clock(), Relay(), Rank(0, 1)
    aggregator = aggregation(tmp_path, clock)
    for steps in (90, 10):
        aggregator.ingest(relay.message(rank.batch(steps, [1, 2, 0, 3, 93, 1])))
        assert aggregator.commit()
        aggregator.judge()
        clock.tick(0.1)
    times = asked(aggregator, query.GetTimes("job", whole=True))
    assert times.median_ms == 100
    assert (times.productive_pct, times.wall_s) == (None, None)
    aggregator.close()


def test_run_whose_steps_cannot_be_reduced_goes_on_with_later_ones(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    played.play(20)
    with monkeypatch.context() as broken:
        broken.setattr(StepHistory, "advance", lambda *_: 1 / 0)
        played.play(20)
    assert played.aggregator.errors["steps: ZeroDivisionError"] == 1
    for _ in range(4):
        played.play(20)
    columns = asked(played.aggregator, NEWEST)
    assert columns.first.tolist() == list(range(40, 120))
    assert sum(played.aggregator.errors.values()) == 1 and played.aggregator.verdict is not None


def test_feeding_comes_before_all_readers_that_wait() -> None:
    """The thread that feeds has the next commit to do: it waits for the answer under way alone."""
    steps, order = LiveSteps(LIMITS, lambda _: SessionFile(Path()), Errors()), list[str]()
    begun, go_on = threading.Event(), threading.Event()

    def read(name: str) -> None:
        with steps.lock.reading():
            begun.set()
            go_on.wait(240)
            order.append(name)

    def feed() -> None:
        steps.feed([], {}, {}, set())
        order.append("fed")

    def start(target: Callable[..., None], *given: str) -> threading.Thread:
        thread = threading.Thread(target=target, args=given, daemon=True)
        thread.start()
        return thread

    threads = [start(read, "under way")]
    assert begun.wait(240)
    threads += [start(read, "waits") for _ in range(4)]
    threads.append(start(feed))
    while not steps.lock._feeders:
        time.sleep(0.001)
    go_on.set()
    for thread in threads:
        thread.join(240)
    assert order == ["under way", "fed", *4 * ["waits"]]


class Watching(LiveSignal):
    """A signal that looks at the steps, and has a record stored each time."""

    name = "watching"

    def __init__(self, fails: bool = False) -> None:
        self.seen: list[tuple[int, bool]] = []
        self._fails, self._new = fails, list[Any]()

    def add_steps(
        self, run: str, history: StepHistory, processes: Mapping[int, int], now_ns: int, ends: bool
    ) -> None:
        if self._fails:
            raise ValueError("broken")
        self.seen.append((len(history.ranks), ends))
        self._new.append((TOTALS, processes[0], RankTotals(len(self.seen), 0, 0, 0)))

    def drain(self) -> list[Any]:
        new, self._new = self._new, []
        return new


def test_signal_sees_the_steps_until_they_end_and_its_records_are_stored(tmp_path: Path) -> None:
    played = Played(tmp_path, 2, late=None, gpus=0)
    signal, broken = Watching(), Watching(fails=True)
    signals: Any = played.aggregator._steps.signals
    signals[:] = [broken, signal]
    played.play()
    played.play()
    before = {process.id for process in asked(played.aggregator, query.GetProcesses())}
    assert signal.seen == [(2, False)] * 2
    played.begin(attempt=1)
    played.play()
    assert signal.seen[2:] == [(2, True), (2, False)]
    assert played.aggregator.errors["watching: ValueError"] == 4
    played.end()
    with SessionFile(tmp_path / "session.sqlite") as file:
        stored = file.records_of(TOTALS)
    (first,) = (records[-1].steps for process, records in stored.items() if process in before)
    assert first == 3  # the last one of the first attempt is the one in which it ended
