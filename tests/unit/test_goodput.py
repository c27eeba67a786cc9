"""Goodput of played runs: several attempts, live and from the file, on every face."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from lived import Lived
from played import Played
from sessions import LIMITS, SECOND, aggregation

from traceml_ray.analysis.step_totals import _grouped
from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.reports.answers import Answers
from traceml_ray.settings import Settings
from traceml_ray.signals.goodput.answer import Goodput, start_names
from traceml_ray.signals.goodput.records import LIFECYCLE, LifeInterval, OpenInterval
from traceml_ray.signals.goodput.totals import TOTALS
from traceml_ray.signals.goodput.view import GetGoodput, GoodputView
from traceml_ray.signals.throughput.records import StepWork
from traceml_ray.stages import POST_SYNC, SYNC_WAIT
from traceml_ray.store import query
from traceml_ray.wire import messages as wire


def adds_up(answer: Goodput) -> None:
    assert sum(value or 0.0 for value in answer.seconds.values()) == pytest.approx(answer.rank_s, rel=1e-12)
    assert min(value for value in answer.seconds.values() if value is not None) >= 0
    for one in answer.attempts:
        assert sum(value or 0.0 for value in one.seconds.values()) == pytest.approx(one.rank_s, rel=1e-12)
    assert sum(one.rank_s for one in answer.attempts) == pytest.approx(answer.rank_s, rel=1e-12)


def plain(value: Any) -> Any:
    """All numbers of an answer, by where they are."""
    return dict(_numbers("", msgspec.to_builtins(value)))


def _numbers(where: str, value: Any) -> Any:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(f"{where}.{name}", inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _numbers(f"{where}[{index}]", inner)
    else:
        yield where, value if isinstance(value, (int, float)) else str(value)


def both(busy: Lived) -> Goodput:
    """The answer of the aggregator; that of its file is the same."""
    answers = Answers(busy.folder, LIMITS)
    live = query.ask_one(busy.aggregator.query, GetGoodput())
    stored = query.ask_one(answers.reply, GetGoodput())
    answers.close()
    adds_up(live)
    kept, known = plain(stored), plain(live)
    assert kept.keys() == known.keys()
    for where, number in known.items():
        if isinstance(number, str):
            assert kept[where] == number, where
        else:
            assert kept[where] == pytest.approx(number, rel=1e-6, abs=1e-3), where
    return live


def test_where_the_time_of_one_attempt_went(tmp_path: Path) -> None:
    busy = Lived(tmp_path / "demo")
    busy.start()
    busy.step_on(30)
    answer = both(busy)
    of_rank = {name: value / 4 for name, value in answer.seconds.items() if value}
    assert answer.rank_s == 4 * 36
    assert (of_rank["startup"], of_rank["preparation"]) == (2, 5)
    assert of_rank["waiting"] == pytest.approx(29 * 0.2 * 3 / 4, rel=0.05)
    assert of_rank["data"] == pytest.approx(29 * (0.002 + 0.2 / 4), rel=0.05)
    assert (answer.why, answer.twice_s) == ({}, 0)


def test_the_wait_for_the_first_batch_is_data_loading(tmp_path: Path) -> None:
    busy = Lived(tmp_path / "demo")
    busy.start()
    busy.step_on(30)
    before = both(busy)
    of_rank = busy.of_rank

    def slow(rank: int) -> dict[str, Any]:
        """The first step, which took 1 s, began 3 s earlier: with a wait of 3.5 s for its batch."""
        fields = of_rank(rank)
        first = busy.first - 4 * SECOND
        lives = [
            msgspec.structs.replace(life, first_step_ns=first, first_data_ns=7 * SECOND // 2)
            for life in fields["life"]
        ]
        return {**fields, "life": lives}

    busy.of_rank = slow  # type: ignore[method-assign]
    busy.play(0)
    answer = both(busy)
    assert answer.seconds["data"] == pytest.approx(before.seconds["data"] + 4 * 3.5)
    assert answer.seconds["preparation"] == before.seconds["preparation"] - 4 * 3.5
    assert "data" in {one.what for one in answer.timeline}


def restarted(folder: Path, first_step: int = 12, **at_start: Any) -> Lived:
    """20 steps with a checkpoint of 3 s by all ranks; killed; 8 s later 10 steps from `first_step` on."""
    busy = Lived(folder)
    busy.start()
    busy.step_on(11)
    busy.interval("checkpoint_save", 3, (0, 1, 2, 3), step=12)
    busy.step_on(9)
    busy.killed()
    busy.again(1, first_step)
    busy.intervals = {rank: list(ones) for rank, ones in at_start.get("intervals", {}).items()}
    busy.step_on(10)
    return busy


def test_a_restart_has_recovery_and_repeated_steps(tmp_path: Path) -> None:
    answer = both(restarted(tmp_path / "demo"))
    assert answer.rank_s == 4 * (26 + 8 + 16)
    assert answer.seconds["recovery"] == 4 * 8
    assert answer.seconds["checkpoint_save"] == 4 * 3
    one, two = answer.attempts
    assert (one.repeated_from, one.repeated_steps, one.recovery_s) == (12, 8, 8)
    assert (two.repeated_steps, two.recovery_s) == (0, None)
    assert one.seconds["wasted"] == pytest.approx(4 * 8, rel=0.01)  # the checkpoint was before them


def test_a_script_without_numbers_is_judged_by_its_checkpoints(tmp_path: Path) -> None:
    """The next attempt loads one, and begins at step 0: the steps after the last one saved are lost."""
    loads = LifeInterval(1, "checkpoint_restore", 0, 0, 0, 1)
    busy = restarted(tmp_path / "demo", 0, intervals={0: [loads]})
    one = both(busy).attempts[0]
    assert (one.repeated_from, one.repeated_steps) == (12, 8)


def test_a_checkpoint_that_is_not_the_last_one_says_what_is_repeated(tmp_path: Path) -> None:
    """
    Checkpoints have 6 and 12 of 20 steps. The next attempt loads the older one; the one after it loads what
    the second attempt saved after 4 steps of its own, and repeats 6 more.
    """

    def loads(busy: Lived, steps: int) -> None:
        for rank in range(4):
            busy.intervals[rank] = [LifeInterval(1, "checkpoint_restore", 0, 0, 0, 1, steps)]

    busy = Lived(tmp_path / "demo")
    busy.start()
    for steps in (6, 12):
        busy.step_on(6)
        busy.interval("checkpoint_save", 1, (0, 1, 2, 3), step=steps)
    busy.step_on(8)
    busy.killed()
    busy.again(1, 0)
    loads(busy, 6)
    busy.step_on(4)
    busy.interval("checkpoint_save", 1, (0, 1, 2, 3), step=4)
    busy.step_on(6)
    busy.killed()
    busy.again(2, 0)
    loads(busy, 10)
    busy.step_on(5)
    one, two, three = both(busy).attempts
    assert (one.repeated_from, one.repeated_steps) == (6, 14)
    assert (two.repeated_from, two.repeated_steps) == (4, 6)
    assert three.repeated_steps == 0


def test_what_may_have_been_repeated_is_said_to_be_unknown(tmp_path: Path) -> None:
    answer = both(restarted(tmp_path / "demo", 0))
    assert answer.seconds["wasted"] is None
    assert answer.attempts[0].seconds["wasted"] is None
    assert "no loading of one was seen" in answer.why["wasted"]


def test_an_attempt_ends_when_its_processes_ended_and_not_with_their_last_message(tmp_path: Path) -> None:
    busy = Lived(tmp_path / "demo")
    busy.start()
    busy.step_on(10)
    busy.killed(after_s=3)
    busy.again(1, 10)
    busy.step_on(5)
    answer = both(busy)
    assert answer.attempts[0].recovery_s == 8
    assert answer.seconds["other"] == 4 * 3  # what they did after their newest step is not known


def test_an_interval_counts_once_in_whatever_order_several_are_sent(tmp_path: Path) -> None:
    """A life may still hold an interval that began before one that is sent already."""
    busy = Lived(tmp_path / "demo")
    busy.start()
    busy.step_on(10)
    held = OpenInterval(7, "checkpoint_save", 5 * SECOND, 4 * SECOND, SECOND)
    sent = LifeInterval(8, "evaluation", busy.clock() - 3 * SECOND, busy.clock() - SECOND, 2 * SECOND)
    of_rank = busy.of_rank

    def with_open(rank: int) -> dict[str, Any]:
        fields = of_rank(rank)
        return {**fields, "life": [msgspec.structs.replace(life, open=[held]) for life in fields["life"]]}

    busy.intervals = {rank: [sent] for rank in range(4)}
    busy.of_rank = with_open  # type: ignore[method-assign]
    busy.step_on(1)
    answer = both(busy)
    assert (answer.seconds["checkpoint_save"], answer.seconds["evaluation"]) == (4 * 1, 4 * 2)


def alone(busy: Lived, what: Any, seconds: int) -> None:
    """In the next step rank 0 does something by itself first, and the others wait for it."""
    usual = busy.rows

    def rows(n: int) -> Any:
        rows = usual(n)
        rows[0, :, POST_SYNC] += seconds * SECOND
        rows[1:, :, SYNC_WAIT] += seconds * SECOND
        return rows

    busy.clock.tick(seconds)
    busy.interval(what, seconds, (0,), step=busy.step)
    busy.rows = rows  # type: ignore[method-assign]
    busy.step_on(1)
    busy.rows = usual  # type: ignore[method-assign]


@pytest.mark.parametrize("what", ["checkpoint_save", "evaluation"])
def test_ranks_that_wait_for_what_one_does_alone_spend_their_time_on_it_too(
    tmp_path: Path, what: Any
) -> None:
    """They wait in a barrier, or in the next exchange of gradients."""
    busy = Lived(tmp_path / "demo")
    busy.start()
    busy.step_on(20)
    before = both(busy)
    alone(busy, what, 5)
    busy.step_on(10)
    answer = both(busy)
    assert answer.seconds[what] == pytest.approx(4 * 5 - 0.2)  # rank 1 is late by 0.2 s
    waits = 10 / 19 * before.seconds["waiting"]
    assert answer.seconds["waiting"] == pytest.approx(before.seconds["waiting"] + waits, rel=0.1)


def test_what_was_repeated_does_not_depend_on_who_waited_for_a_checkpoint(tmp_path: Path) -> None:
    """After 10 of 20 steps rank 0 saves alone for 60 s; the next attempt begins with step 15."""
    busy = Lived(tmp_path / "demo")
    busy.start()
    busy.step_on(10)
    alone(busy, "checkpoint_save", 60)
    busy.step_on(9)
    busy.killed()
    busy.again(1, 15)
    busy.step_on(5)
    answer = both(busy)
    assert answer.seconds["checkpoint_save"] == pytest.approx(4 * 60 - 0.2)
    assert answer.attempts[0].seconds["wasted"] == pytest.approx(4 * 5, rel=0.05)


def test_a_checkpoint_beside_training_counts_where_the_end_waits_for_it(tmp_path: Path) -> None:
    busy = Lived(tmp_path / "demo")
    busy.start()
    busy.step_on(10)
    busy.clock.tick(7)
    busy.interval("checkpoint_save_async", 9, (0, 1, 2, 3))
    busy.ended = True
    busy.play(0)
    busy.end()
    answer = both(busy)
    assert answer.seconds["checkpoint_save"] == 4 * 7
    assert answer.async_save_s == 4 * 9


def test_steps_stay_productive_while_an_evaluation_goes_on(tmp_path: Path) -> None:
    busy = Lived(tmp_path / "demo")
    busy.start()
    busy.step_on(20)
    before = both(busy)
    of_rank = busy.of_rank

    def with_open(rank: int) -> dict[str, Any]:
        fields = of_rank(rank)
        evaluates = OpenInterval(
            7, "evaluation", busy.clock() - busy.newest, None, busy.clock() - busy.newest
        )
        return {
            **fields,
            "life": [msgspec.structs.replace(life, open=[evaluates]) for life in fields["life"]],
        }

    busy.of_rank = with_open  # type: ignore[method-assign]
    busy.clock.tick(12)
    busy.play(0)
    answer = both(busy)
    assert answer.seconds["evaluation"] == pytest.approx(4 * 13)
    assert answer.seconds["productive"] == pytest.approx(before.seconds["productive"])


@pytest.mark.parametrize("killed", [True, False])
def test_a_checkpoint_goes_on_while_nothing_else_is_reported(tmp_path: Path, killed: bool) -> None:
    """It is in the newest report of each rank. Then they are killed, or report nothing for a while."""
    busy = Lived(tmp_path / "demo")
    busy.start()
    busy.step_on(20)
    of_rank = busy.of_rank
    saves = OpenInterval(7, "checkpoint_save", SECOND, None, SECOND)

    def with_open(rank: int) -> dict[str, Any]:
        fields = of_rank(rank)
        return {**fields, "life": [msgspec.structs.replace(life, open=[saves]) for life in fields["life"]]}

    busy.of_rank = with_open  # type: ignore[method-assign]
    busy.play(0)
    busy.of_rank = lambda _: {}  # type: ignore[method-assign]
    if killed:
        busy.killed(after_s=4)
    else:
        for _ in range(4):
            busy.play(0)
    answer = both(busy)
    assert answer.seconds["checkpoint_save"] == 4 * 5
    assert answer.seconds["other"] == 0


def test_an_attempt_without_a_step_was_all_preparation(tmp_path: Path) -> None:
    busy = restarted(tmp_path / "demo")
    busy.killed()
    busy.again(2, 0)
    busy.play(0)
    busy.killed()
    busy.again(3, 22)
    busy.step_on(5)
    answer = both(busy)
    assert [one.steps for one in answer.attempts] == [20, 10, 0, 5]
    third = {name: value for name, value in answer.attempts[2].seconds.items() if value}
    assert third == {"startup": 4 * 2, "preparation": 4 * 5, "recovery": 4 * 8}
    assert answer.attempts[1].repeated_steps == 0


def test_a_job_that_shrinks_counts_its_ranks_of_each_attempt(tmp_path: Path) -> None:
    busy = restarted(tmp_path / "demo")
    busy.killed()
    busy.world = 2
    busy.again(2, 22)
    busy.step_on(5)
    answer = both(busy)
    assert [one.ranks for one in answer.attempts] == [4, 4, 2]
    assert answer.rank_s == 4 * (26 + 8 + 16 + 8) + 2 * 11


def test_a_restarted_aggregator_still_knows_the_attempts_before(tmp_path: Path) -> None:
    busy = restarted(tmp_path / "demo")
    before = both(busy)
    busy.aggregator = aggregation(busy.folder, busy.clock)
    busy.step_on(1)
    answer = both(busy)
    assert answer.attempts[0] == before.attempts[0]


def test_the_summary_and_the_ended_session_say_the_same(tmp_path: Path) -> None:
    busy = restarted(tmp_path / "demo")
    busy.ended = True
    busy.interval("evaluation", 1, (0, 1, 2, 3))
    busy.play(0)
    busy.end()
    answer = both(busy)
    written = json.loads((busy.folder / "summary.json").read_text())
    block = GoodputView().of_block(written["goodput"])
    adds_up(block)
    assert plain(block).keys() == plain(answer).keys()
    assert block.seconds == pytest.approx(answer.seconds, rel=1e-6)
    assert answer.seconds["evaluation"] == 4


def test_a_hang_that_was_resolved_is_no_waiting(tmp_path: Path) -> None:
    """All ranks stand for 40 s; then the step goes on, and its row has these seconds as a wait."""
    busy = Lived(tmp_path / "demo")
    busy.start()
    busy.step_on(30)
    before = both(busy)
    for second in range(1, 41):
        opened = {"open": wire.OpenStage(busy.step, SYNC_WAIT, second * SECOND)}
        busy.play(0, **opened)
    busy.stood_s = 41
    busy.step_on(1)
    busy.stood_s = 0
    busy.step_on(5)
    answer = both(busy)
    assert answer.seconds["hang"] == pytest.approx(4 * 40, rel=0.05)
    assert answer.seconds["waiting"] == pytest.approx(before.seconds["waiting"], rel=0.3)
    assert "hang" in {one.what for one in answer.timeline}


@pytest.mark.parametrize("tells", [True, False])
def test_a_clock_that_was_set_back_an_hour_between_two_attempts(tmp_path: Path, tells: bool) -> None:
    """The aggregator's own clock, too. Nodes tell when they were booted, or nothing does."""
    busy = Lived(tmp_path / "demo")
    booted, of_rank = [busy.clock() - 86_400 * SECOND], busy.of_rank

    def with_boot(rank: int) -> dict[str, Any]:
        fields = of_rank(rank)
        boot = {"booted_ns": booted[0], "boot": rank // 2} if tells else {}
        return {**fields, "life": [msgspec.structs.replace(life, **boot) for life in fields["life"]]}

    busy.of_rank = with_boot  # type: ignore[method-assign]
    busy.start()
    busy.step_on(20)
    busy.killed()
    busy.clock.tick(-3600)
    booted[0] -= 3600 * SECOND
    busy.again(1, 20)
    busy.step_on(10)
    answer = both(busy)
    gap_s = 8 if tells else 0
    assert answer.rank_s == 4 * (26 + gap_s + 16)
    assert answer.seconds["recovery"] == (4 * 8 if tells else None)
    assert answer.attempts[0].seconds["productive"] == pytest.approx(4 * 19 * 0.8, rel=0.02)
    assert [one.steps for one in answer.attempts] == [20, 10]
    assert len(answer.clocks) == 1
    busy.end()
    report = (busy.folder / "report.txt").read_text()
    assert answer.clocks[0][:40] in " ".join(report.split())


def test_attempts_that_ended_before_the_monitor_attached_are_recovery(tmp_path: Path) -> None:
    """The launcher starts; two attempts end early. The third one begins 30 s later."""
    busy = Lived(tmp_path / "other")
    busy.folder = tmp_path / "demo"
    busy.folder.mkdir()
    settings, facts = Settings(thresholds=LIMITS, auto_profile=0), {"launcher": "torchrun"}
    busy.aggregator = AggregatorCore(busy.folder, settings, facts, busy.clock, busy.clock)
    busy.again(2, 0, gap_s=30)
    busy.step_on(10)
    busy.killed()
    busy.again(5, 5, gap_s=20)
    busy.step_on(10)
    answer = both(busy)
    assert answer.rank_s == 4 * (30 + 16 + 20 + 16)
    assert answer.seconds["recovery"] == 4 * (30 + 20)
    assert [(one.attempt, one.steps, one.recovery_s) for one in answer.attempts] == [
        (0, 0, 30),
        (2, 10, 20),
        (5, 10, None),
    ]
    assert answer.attempts[0].why == {"recovery": "2 attempts ended before the monitor attached"}
    assert answer.attempts[1].why == {"recovery": "2 attempts ended before the monitor attached"}
    assert {one.what for one in answer.timeline if one.attempt == 0} == {"recovery"}


def priced(folder: Path, device: str) -> Goodput:
    """A run of 36 s of 4 ranks, in a session with a price of 100 an hour."""
    busy = Lived(folder)
    busy.folder.rename(folder.with_suffix(".other"))
    busy.folder.mkdir()
    settings = Settings(thresholds=LIMITS, auto_profile=0, gpu_hour_price=100)
    busy.aggregator = AggregatorCore(busy.folder, settings, {}, busy.clock, busy.clock)
    of_rank = busy.of_rank
    work = [StepWork(0, 0, 0, 0, device=device)]
    busy.of_rank = lambda number: {**of_rank(number), "work": work}  # type: ignore[method-assign]
    busy.start()
    busy.step_on(30)
    answer = both(busy)
    busy.end()  # writes the report
    return answer


def test_the_cost_is_the_price_of_all_gpu_hours(tmp_path: Path) -> None:
    answer = priced(tmp_path / "demo", "NVIDIA H100")
    assert answer.price == 100
    assert answer.cost == pytest.approx(100 * 4 * 36 / 3600)
    report = (tmp_path / "demo" / "report.txt").read_text()
    assert "Cost       4 at 100 an hour of a GPU" in report
    assert "GPU-minutes" in report


def test_ranks_without_a_gpu_cost_nothing_by_the_hour_of_a_gpu(tmp_path: Path) -> None:
    assert priced(tmp_path / "demo", "cpu").cost is None
    assert "the ranks have none" in (tmp_path / "demo" / "report.txt").read_text()


def test_a_long_timeline_has_no_holes_and_is_not_too_long(tmp_path: Path) -> None:
    busy = Lived(tmp_path / "demo", world=2)
    busy.start()
    for _ in range(60):
        busy.step_on(2)
        for what in ("checkpoint_save", "evaluation"):
            busy.clock.tick(4)
            busy.interval(what, 3, (0, 1))
    answer = both(busy)
    ends = [(one.from_ns, one.to_ns) for one in answer.timeline]
    assert [since for since, _ in ends[1:]] == [to for _, to in ends[:-1]]
    assert (ends[0][0], ends[-1][1]) == (answer.from_ns, answer.to_ns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("traceml_ray.signals.goodput.answer.MOST_STRETCHES", 20)
        fewer = both(busy).timeline
    assert len(fewer) <= 21
    assert [one.from_ns for one in fewer[1:]] == [one.to_ns for one in fewer[:-1]]
    assert "evaluation" in {one.what for one in fewer}


def test_short_evaluations_that_were_joined_are_not_drawn_as_a_long_one(tmp_path: Path) -> None:
    busy = Lived(tmp_path / "demo", world=2)
    busy.start()
    busy.step_on(30)
    end = busy.clock()
    short = LifeInterval(1, "evaluation", end - 20 * SECOND, end, 2 * SECOND, 10)
    busy.intervals = {0: [short], 1: [short]}
    busy.play(0)
    answer = both(busy)
    assert answer.seconds["evaluation"] == 2 * 2
    assert "evaluation" not in {one.what for one in answer.timeline}


def test_a_start_has_the_number_that_the_launcher_gave_it() -> None:
    assert start_names([0, 1, 1, 2]) == ["0", "1", "1, start 2", "2"]


def test_steps_whose_sums_were_not_stored_are_said_to_be_missing(tmp_path: Path) -> None:
    """
    The aggregator ends with the attempt, some steps after it has stored its sums. The next attempt repeats
    two of these.
    """
    busy = Lived(tmp_path / "demo")
    busy.start()
    busy.step_on(30)
    with busy.aggregator.stored() as file:
        stored = [totals.steps for _, _, totals in file.records(TOTALS)]
    kept = max(stored) + 1  # the first row is in no sum
    assert kept < 30
    busy.killed()
    busy.again(1, 28)
    busy.aggregator = aggregation(busy.folder, busy.clock)
    busy.step_on(10)
    answer = both(busy)
    one = answer.attempts[0]
    assert (one.steps, one.repeated_from, one.repeated_steps) == (30, 28, 2)
    assert one.seconds["other"] == pytest.approx(4 * (30 - kept), rel=0.01)
    assert f"its last {30 - kept} steps was not stored" in one.why["productive"]
    assert "is not known" in one.why["wasted"]
    assert one.seconds["wasted"] is None and one.seconds["productive"]


def test_a_file_without_the_oldest_intervals_says_so(tmp_path: Path) -> None:
    """As the bundle of an incident, which has the newest 5,000."""
    busy = Lived(tmp_path / "demo")
    busy.start()
    for seconds in (3, 2):
        busy.step_on(10)
        busy.interval("checkpoint_save", seconds, (0, 1, 2, 3))
    busy.step_on(10)
    assert both(busy).why == {}
    connection = sqlite3.connect(busy.folder / "session.sqlite")
    with connection:
        connection.execute("DELETE FROM lifecycle WHERE id <= 4")
    connection.close()
    answers = Answers(busy.folder, LIMITS)
    stored = query.ask_one(answers.reply, GetGoodput())
    answers.close()
    adds_up(stored)
    assert stored.seconds["checkpoint_save"] == 4 * 2
    assert "the oldest" in stored.why["checkpoint_save"]


def test_intervals_that_could_not_be_sent_are_said_to_be_missing(tmp_path: Path) -> None:
    busy = Lived(tmp_path / "demo")
    busy.start()
    busy.step_on(20, errors={f"{LIFECYCLE.lost} lost with their batch": 3})
    answer = both(busy)
    assert answer.why["checkpoint_save"].startswith("12 intervals of checkpoints")
    assert answer.seconds["checkpoint_save"] is None


@pytest.mark.long
def test_rows_that_were_compacted_still_count(tmp_path: Path) -> None:
    busy = Lived(tmp_path / "first")
    settings = Settings(thresholds=LIMITS, auto_profile=0, session_bytes=150_000)
    busy.folder = tmp_path / "demo"
    busy.folder.mkdir()
    busy.aggregator = AggregatorCore(busy.folder, settings, {}, busy.clock, busy.clock)
    busy.start()
    busy.step_on(110)
    with busy.aggregator.stored() as file:
        assert sum(file.folded_counts().values()) > 100
    answer = both(busy)
    assert answer.seconds["waiting"] == pytest.approx(109 * 0.2 * 3, rel=0.05)
    assert answer.seconds["other"] < 4 * 10


def test_without_records_of_lives_nothing_is_claimed(tmp_path: Path) -> None:
    played = Played(tmp_path / "demo")
    played.play(5)
    answer = query.ask_one(played.aggregator.query, GetGoodput())
    assert (answer.rank_s, answer.goodput_pct, answer.seconds) == (0, None, {})
    assert answer.why["steps"] == "no rank has reported when it was started"
    assert GoodputView().sections(answer) == ()


def test_the_report_draws_one_bar_that_adds_up_and_a_timeline(tmp_path: Path) -> None:
    busy = restarted(tmp_path / "demo")
    busy.ended = True
    busy.play(0)
    busy.end()
    page = (busy.folder / "report.html").read_text()
    drawn = page[page.index('class="strips"') : page.index("</div></section>", page.index('class="strips"'))]
    for strip in re.findall(r"<svg.*?</svg>", drawn):
        places = [
            (float(x), float(width))
            for x, width in re.findall(r'<rect x="([\d.]+)".*?width="([\d.]+)"', strip)
        ]
        ends = [x + width for x, width in places]
        assert ends[-1] == pytest.approx(1000, abs=0.5)
        assert [x for x, _ in places[1:]] == pytest.approx(ends[:-1], abs=0.2)
    assert "<title>recovery between attempts: 8 s, attempt 0</title>" in drawn
    assert "steps that were repeated" in (busy.folder / "report.txt").read_text()


def test_columns_of_steps_that_claim_to_take_centuries_do_not_overflow() -> None:
    longest = 1 << 62
    columns = _grouped(np.array([[step, step, longest] for step in range(400)]))
    assert columns[:, 2].tolist() == [longest] * len(columns)
