"""The end of a run: its time-outs fit into each other, and who decides decides so."""

from __future__ import annotations

import pytest
from sessions import Clock

from traceml_ray.monitor import finish
from traceml_ray.monitor.finish import (
    ANSWER_S,
    ASK_S,
    BAR_S,
    DISK_S,
    DRAIN_S,
    EXIT_S,
    HAND_OVER_S,
    HELPER_S,
    KILL_S,
    LATE_S,
    LAUNCHER_S,
    LEAVE_S,
    LINGER_S,
    LOCKED_S,
    OTHERS_S,
    QUIET_S,
    RELAYS_S,
    REPORT_S,
    SIGN_S,
    SILENT_S,
    STARTING_S,
    WORD_S,
    End,
)
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

PATHS = {
    "launcher with its own Ray: the relay hangs": (SILENT_S, KILL_S),
    "launcher with its own Ray: the aggregator hangs": (LAUNCHER_S, KILL_S),
    "launcher on a cluster that stays: the aggregator hangs in a transaction": (LAUNCHER_S, 2 * LOCKED_S),
    "launcher: the disk of the session hangs": (LAUNCHER_S, DISK_S),
    "launcher: the disk hangs once all is written": (ASK_S, SIGN_S, LAUNCHER_S),
    "launcher: a node is missing": (OTHERS_S, ASK_S, SIGN_S),
    "driver: the aggregator hangs": (ANSWER_S, LEAVE_S, KILL_S, 2 * LOCKED_S),
    "driver that exits: the end takes too long": (EXIT_S, KILL_S),
    "Ray Train, then the driver: the aggregator hangs": (ANSWER_S, ANSWER_S, LEAVE_S, KILL_S),
    "Ray Train, then the driver: a relay hangs": (OTHERS_S, RELAYS_S),
    "Ray Train alone: the aggregator does not come up": (STARTING_S,),
}
"""What follows on what where something hangs."""


@pytest.mark.parametrize("path", PATHS)
def test_time_outs_of_every_path_add_up_to_less_than_an_end_may_be_late(path: str) -> None:
    assert sum(PATHS[path]) <= BAR_S


def test_nested_time_outs_fit_into_their_outer_ones() -> None:
    assert max(DRAIN_S, OTHERS_S) < WORD_S < LAUNCHER_S < BAR_S
    assert HELPER_S < LAUNCHER_S
    assert OTHERS_S + 2 * ASK_S + SIGN_S < LAUNCHER_S  # the launcher hears in time that the files are written
    assert 4 * SIGN_S <= SILENT_S and 4 * ASK_S <= LINGER_S
    assert HAND_OVER_S < RELAYS_S
    assert QUIET_S > 2  # twice the time between two samples of a node
    assert REPORT_S > 3 * 9 and LATE_S > REPORT_S


def test_time_outs_of_the_table_each_belong_to_a_path_or_fit_into_another() -> None:
    table = {name for name in vars(finish) if name.endswith("_S")}
    assert table - set(globals()) == {"GOODBYE_S"}  # nobody waits for it


@pytest.fixture
def clock() -> Clock:
    return Clock()


def answer(end: End, missing: int) -> tuple[str, int]:
    answer = end.answer(missing)
    return answer.state, answer.waiting


def test_end_without_a_request_is_not_due(clock: Clock) -> None:
    end = End(clock.timer)
    assert not (end.due(0) or end.open or end.over(LATE_S + 1))


def test_files_are_written_when_no_rank_is_missing(clock: Clock) -> None:
    end = End(clock.timer)
    end.ask()
    assert not end.due(1) and answer(end, 1) == ("waiting", 1)
    assert end.due(0) and answer(end, 0) == ("waiting", 0)
    end.reporting = True
    assert answer(end, 0) == ("writing", 0)
    end.written = 0
    assert answer(end, 0) == ("written", 0)
    assert end.over(0) and not end.due(0)


def test_end_waits_for_others_a_bounded_time_from_the_request_of_the_launcher(clock: Clock) -> None:
    end = End(clock.timer)
    end.ask(waited_s=1.0)
    clock.tick(OTHERS_S - 1.1)
    end.ask(waited_s=1.0)  # asked again, it does not begin anew
    assert not end.due(1)
    clock.tick(0.2)
    assert end.due(1) and answer(end, 1) == ("waiting", 0)
    end.written = 1
    assert answer(end, 1) == ("written", 1)
    assert not (end.due(1) or end.over(LATE_S - 1))
    assert end.due(0)  # it has come
    assert end.over(LATE_S + 1)


def test_ordered_end_waits_for_no_rank(clock: Clock) -> None:
    end = End(clock.timer)
    end.ask(ordered=True)
    assert end.due(3)
    end.written = 3
    assert end.over(0)


def test_failed_end_is_reported_once_and_the_next_request_tries_again(clock: Clock) -> None:
    end = End(clock.timer)
    end.ask()
    end.failed = "OSError: no room"
    assert not end.due(0)
    assert end.answer(0) == wire.Finished(codec.VERSION, "failed", "OSError: no room")
    assert end.due(0)
