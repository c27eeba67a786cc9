"""Ray Train's stragglers are confirmed by a check: what the controller waits for, and what it leaves."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from traceml_ray.launchers.train_confirm import confirm
from traceml_ray.signals.check.records import Checked
from traceml_ray.signals.check.tasks import Collect, Describe, NodeUse, Task, TaskReply


@dataclass
class PlayedNode:
    name: str
    address: str = "10.0.0.1"
    reserved: str = ""
    left: list[Checked] = field(default_factory=list)
    ends: int = 0
    hangs: threading.Event | None = None

    def ask(self, task: Task, limit_s: float) -> TaskReply:
        if self.hangs is not None:
            self.hangs.wait(240)
        if isinstance(task, Describe):
            return TaskReply(machine=NodeUse(self.name, self.name, 8))
        if isinstance(task, Collect):
            return TaskReply(checked=Checked(1, self.name))
        return TaskReply()

    def leave(self, session: str, checks: Sequence[Checked]) -> None:
        assert session == "s"
        self.left += checks

    def end(self) -> None:
        self.ends += 1


def confirmed(nodes: Sequence[Any], limit_s: float = 240.0, late: bool = True) -> str:
    def reach(node_ids: object) -> Sequence[Any]:
        assert node_ids == ("a", "b")
        return nodes

    return confirm("s", "r", ("a", "b"), limit_s, 240.0, has_straggler=lambda *_: late, reach=reach)


def end_of(name: str) -> None:
    """Wait for the end of threads with a name."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(240)


def test_nodes_are_left_what_they_measured() -> None:
    nodes = [PlayedNode("node-0"), PlayedNode("node-1")]
    assert confirmed(nodes).startswith("check: ")
    assert [[(one.node, one.kind) for one in node.left] for node in nodes] == [
        [("node-0", "restart")],
        [("node-1", "restart")],
    ]
    end_of("traceml-confirm")
    assert [node.ends for node in nodes] == [1, 1]


def test_without_a_straggler_no_node_is_reached() -> None:
    assert confirmed([None], late=False) == ""


def test_check_that_hangs_is_given_up_and_ended() -> None:
    hangs = threading.Event()
    nodes = [PlayedNode("node-0", hangs=hangs)]
    try:
        assert confirmed(nodes, 0.2).startswith("no check: it was not done within")
        end_of("traceml-confirm-end")
        if not nodes[0].ends:  # its thread got no core before: it reaches the node only to end it
            end_of("traceml-confirm")
        assert nodes[0].ends and nodes[0].left == []
    finally:
        hangs.set()


def test_session_that_does_not_answer_delays_no_attempt() -> None:
    answers, reached = threading.Event(), list[object]()

    def has_straggler(*_: object) -> bool:
        answers.wait(240)
        return True

    message = confirm(
        "s",
        "r",
        ("a",),
        decide_s=0.1,
        has_straggler=has_straggler,
        reach=lambda ids: reached.append(ids) or [],
    )
    assert message.startswith("no check: the session did not answer within")
    answers.set()
    end_of("traceml-confirm")
    assert not reached  # the attempt runs: it must not be disturbed


def test_check_that_fails_is_said() -> None:
    def reach(_: object) -> Sequence[Any]:
        raise ConnectionError("no cluster")

    message = confirm("s", "r", ("a",), has_straggler=lambda *_: True, reach=reach)
    assert message == "no check: ConnectionError: no cluster"


def test_node_that_dies_after_it_has_measured_takes_nothing_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = [PlayedNode("node-0"), PlayedNode("node-1")]
    monkeypatch.setattr(nodes[0], "leave", lambda *_: 1 / 0)
    message = confirmed(nodes)
    assert message.startswith("check: ")
    assert "node-0: its check is not in the session: ZeroDivisionError" in message
    assert [one.node for one in nodes[1].left] == ["node-1"]
    end_of("traceml-confirm")
    assert [node.ends for node in nodes] == [1, 1]
