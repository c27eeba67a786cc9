"""A relay that is told to check its node during training."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from sessions import SECOND, Clock

from traceml_ray.monitor.node_check import NodeCheck
from traceml_ray.signals.check.during import TrainingCheckPlan
from traceml_ray.signals.check.records import COMMAND, DURING, MOST_CHECKS, Checked
from traceml_ray.wire.messages import Command

PIDS = {"aa": 11, "bb": 12}


def command(clock: Clock, name: str = COMMAND, **args: Any) -> Command:
    given = {"id": "1", "rank": 4, "begin_ns": clock.now + 10 * SECOND, "processes": "4:aa 5:bb 6:gone"}
    return Command(name, {**given, **args})


class Made:
    """The checks that a relay makes, without a process."""

    def __init__(self, output: Callable[[TrainingCheckPlan], bytes] | None = None) -> None:
        self.clock, self.plans = Clock(), list[TrainingCheckPlan]()
        self._output = output or (lambda plan: msgspec.json.encode(Checked(plan.begin_ns, "", kind=DURING)))
        self.check = NodeCheck(PIDS.get, threading.RLock(), self.clock, self._run)

    def _run(self, plan: TrainingCheckPlan, most_s: float) -> bytes:
        assert most_s > plan.trials * plan.period_s
        self.plans.append(plan)
        return self._output(plan)

    def handle(self, *commands: Command) -> list[Command]:
        rest = self.check.handle(commands)
        for thread in threading.enumerate():
            if thread.name == "traceml-check-node":
                thread.join(240)
        return rest


def test_check_is_made_once_and_stored_with_the_first_rank_of_the_node() -> None:
    made = Made()
    for _ in range(3):  # a command is in every reply
        assert made.handle(command(made.clock)) == []
    (plan,) = made.plans
    assert (plan.about, plan.pids, plan.number) == (4, {4: 11, 5: 12}, MOST_CHECKS - 1)
    assert made.check.waiting
    assert made.check.drain() == {"aa": [Checked(plan.begin_ns, "", kind=DURING)]}
    assert not made.check.waiting and made.check.drain() == {} and not made.check.errors


def test_commands_for_ranks_are_passed_on() -> None:
    made = Made()
    other = command(made.clock, "where")
    assert made.handle(other, command(made.clock)) == [other]


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ({"begin_ns": 5}, "it would begin in the past, or too late"),
        ({"begin_ns": 1_700_001_000 * SECOND}, "it would begin in the past, or too late"),
        ({"begin_ns": "soon"}, "malformed order"),
        ({"processes": "6:gone x:aa 7"}, "no rank is known here"),
        ({"processes": None}, "malformed order"),
        ({"rank": None}, "malformed order"),
    ],
)
def test_order_that_cannot_be_done_is_counted(args: dict[str, Any], error: str) -> None:
    made = Made()
    made.handle(command(made.clock, **args))
    assert made.plans == [] and made.check.errors == {f"check during training: {error}": 1}


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (subprocess.CalledProcessError(-9, "check"), "exit code -9"),
        (subprocess.TimeoutExpired("check", 1), "TimeoutExpired"),
        (OSError("no room"), "OSError"),
    ],
)
def test_check_that_fails_is_counted_and_the_next_one_is_made(raised: Exception, error: str) -> None:
    def fail(_: TrainingCheckPlan) -> bytes:
        raise raised

    made = Made(fail)
    made.handle(command(made.clock))
    made.handle(command(made.clock, id="2"))
    assert len(made.plans) == 2 and not made.check.waiting
    assert made.check.errors == {f"check during training: {error}": 2}


def test_output_that_cannot_be_read_is_counted() -> None:
    made = Made(lambda _: b"{}")
    made.handle(command(made.clock))
    assert made.check.errors == {"check during training: ValidationError": 1}


def test_relay_that_is_closed_checks_nothing() -> None:
    made = Made()
    made.check.close()
    made.handle(command(made.clock))
    assert made.plans == []
