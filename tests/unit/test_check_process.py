"""The check before a job, over several launchers: played nodes over real connections of this process."""

from __future__ import annotations

import argparse
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from played import Played
from torch.distributed.elastic.multiprocessing.api import SignalException

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.launchers import check as launcher_check
from traceml_ray.launchers import check_process, worker_starts
from traceml_ray.launchers import confirm as launcher_confirm
from traceml_ray.launchers.arguments import Nodes
from traceml_ray.launchers.check_process import CheckReply, CheckRequest
from traceml_ray.launchers.cluster import free_port
from traceml_ray.reports.answers import Answers
from traceml_ray.settings import Settings
from traceml_ray.signals.check import conclusion, coordinator, nodes
from traceml_ray.signals.check.agent import FILE, CheckReport
from traceml_ray.signals.check.nodes import NoAnswerError
from traceml_ray.signals.check.records import Checked, Measure
from traceml_ray.signals.check.tasks import (
    Collect,
    Describe,
    Exchange,
    Listen,
    NodeUse,
    Plan,
    Task,
    TaskReply,
)
from traceml_ray.store.query import Findings


class PlayedProcess:
    """Answers tasks in place of a process that measures."""

    number = 0
    silent = -1
    """Which of them does not answer a round."""

    def __init__(self, _environ: object) -> None:
        self.mine = PlayedProcess.number
        PlayedProcess.number += 1
        self.ended = False

    def ask(self, task: Task, _limit_s: float) -> TaskReply:
        if isinstance(task, Describe):
            return TaskReply(machine=NodeUse("host", f"boot-{self.mine}", 8))
        if isinstance(task, Collect):
            if self.mine == PlayedProcess.silent:
                raise NoAnswerError("its measuring process ended (-9)")
            measure = Measure("cpu_matmul", "CPU", "FLOP/s", [1e9 + self.mine])
            return TaskReply(checked=Checked(1, "", measures=[measure]))
        if isinstance(task, Listen):
            return TaskReply(port=1)
        if isinstance(task, Exchange):
            return TaskReply(measures=(Measure("all_reduce", "link", "B/s", [1.0]),))
        return TaskReply()

    def end(self) -> None:
        self.ended = True


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_process, "TaskProcess", PlayedProcess)
    monkeypatch.setattr(nodes, "TaskProcess", PlayedProcess)
    monkeypatch.setattr(coordinator, "next_round", lambda *_: [])
    monkeypatch.setattr(conclusion, "judge_pairs", lambda *_: ([], [], []))
    monkeypatch.setattr(PlayedProcess, "number", 0)
    monkeypatch.setattr(PlayedProcess, "silent", -1)
    for limit in ("_HELLO_S", "_SPARE_S"):  # the threads of a test may get no core for long
        monkeypatch.setattr(check_process, limit, 240.0)


def check_of(count: int, **more: Any) -> list[CheckReply]:
    """Run the check of a job of `count` nodes; return their replies."""
    port = free_port()
    replies: dict[int, CheckReply] = {}

    def take_part(rank: int) -> None:
        request = CheckRequest(0, Plan(seconds=0.1), count, rank == 0, "127.0.0.1", port, 240.0, **more)
        replies[rank] = check_process.check(request)

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    return [replies[rank] for rank in sorted(replies)]


def test_each_node_gets_what_it_has_measured_and_the_result_of_all() -> None:
    replies = check_of(3)
    assert [reply.error for reply in replies] == [""] * 3
    assert len({reply.lines for reply in replies}) == 1
    names = [check.node for reply in replies for check in reply.checks]
    host = socket.gethostname()
    assert names[0] == host and sorted(names) == [host, f"{host} (2)", f"{host} (3)"]
    assert {check.kind for reply in replies for check in reply.checks} == {"check"}


def test_node_whose_process_fails_is_named_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlayedProcess, "silent", 0)
    replies = check_of(2)
    assert all(any("its measuring process ended (-9)" in line for line in reply.lines) for reply in replies)


def test_job_of_one_node_needs_no_port() -> None:
    (reply,) = check_of(1)
    assert reply.error == "" and len(reply.checks) == 1


def test_node_that_does_not_come_is_waited_for_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_process, "_TELL_S", 0.0)
    request = CheckRequest(0, Plan(seconds=0.1), 3, True, "127.0.0.1", free_port(), 0.2)
    reply = check_process.check(request)
    assert "2 nodes did not come within 0.2 s" in reply.lines and reply.error == ""


def test_node_that_may_join_later_does_not_wait_for_a_check_of_the_first_one() -> None:
    request = CheckRequest(0, Plan(), 1, False, "127.0.0.1", free_port(), 60.0)
    assert "only the first node is checked" in check_process.check(request).error
    assert launcher_check._request(flags(), Nodes(2, fixed=False)).join_s == 60.0
    assert launcher_check._request(flags(), Nodes(2)).join_s == 300.0


def test_first_node_that_does_not_come_is_an_error() -> None:
    with socket.socket() as taken:  # it does not listen, and nobody else can
        taken.bind(("127.0.0.1", 0))
        request = CheckRequest(0, Plan(), 2, False, "127.0.0.1", taken.getsockname()[1], 0.1)
        assert "nothing answers at 127.0.0.1" in check_process.check(request).error


def connected(port: int) -> socket.socket:
    """Connect to the first node once it listens."""
    end = time.monotonic() + 240
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 240)
        except OSError:
            assert time.monotonic() < end
        time.sleep(0.05)


def test_stranger_at_the_port_is_no_node() -> None:
    port, replies = free_port(), list[CheckReply]()
    request = CheckRequest(0, Plan(seconds=0.1), 2, True, "127.0.0.1", port, 240.0)
    first = threading.Thread(target=lambda: replies.append(check_process.check(request)))
    first.start()
    stranger = connected(port)
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert stranger.recv(1) == b""
    other = check_process.check(msgspec.structs.replace(request, first=False))
    first.join(240)
    assert [len(reply.checks) for reply in (*replies, other)] == [1, 1]
    stranger.close()


def test_check_at_a_restart_is_marked_as_such() -> None:
    replies = check_of(2, kind="restart")
    assert [check.kind for reply in replies for check in reply.checks] == ["restart"] * 2


@pytest.mark.parametrize("late", [None, 2])
def test_straggler_is_read_from_the_file_of_the_session_that_runs(late: int | None, tmp_path: Path) -> None:
    session = Played(tmp_path, 4, per_node=2, late=late, late_ms=40.0, onset=0, gpus=0)
    for _ in range(20):
        session.play(10)
    session.aggregator.commit()
    reply = check_process.check(CheckRequest(0, Plan(), 3, session=str(tmp_path)))
    assert reply == CheckReply(straggler=late is not None)


@pytest.mark.parametrize("late", [None, 2])
def test_straggler_of_an_attempt_whose_rank_raised_an_error_is_known(
    late: int | None, tmp_path: Path
) -> None:
    session = Played(tmp_path, 4, per_node=2, late=late, late_ms=40.0, onset=0, gpus=0)
    for _ in range(20):
        session.play(10)
        session.aggregator.judge()
    session.dies(1, 1, "RuntimeError: planted")
    session.aggregator.judge()
    session.aggregator.commit()
    (finding,) = Answers(tmp_path, Thresholds()).answer(Findings(None))
    assert finding.label == "rank_lost"
    reply = check_process.check(CheckRequest(0, Plan(), 3, session=str(tmp_path)))
    assert reply == CheckReply(straggler=late is not None)


# -- the launcher -------------------------------------------------------------------------------


def flags(**more: Any) -> argparse.Namespace:
    given = {"check": True, "check_seconds": None, "check_path": None, "check_stop": False}
    given |= {"rdzv_backend": "static"}
    return argparse.Namespace(**{**given, **more})


@pytest.mark.parametrize(
    ("reply", "printed"),
    [
        (CheckReply(False, ("no link is slower",)), "check: no link is slower"),
        (CheckReply(True, ("GPU 3 of node-1 multiplies 14 % slower.",)), "check: GPU 3 of node-1 multiplies"),
        (CheckReply(error="it was not done within 5 s"), "no check: it was not done within 5 s"),
        (OSError("no more processes"), "no check: OSError: no more processes"),
    ],
)
def test_launcher_prints_the_result_and_goes_on_whatever_it_is(
    reply: CheckReply | OSError,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ask(*_: object) -> CheckReply:
        if isinstance(reply, OSError):
            raise reply
        return reply

    monkeypatch.setattr(launcher_check, "_ask", ask)
    result = launcher_check.check_nodes(flags(), Nodes(), {})
    assert printed in capsys.readouterr().err
    assert not launcher_check.must_stop(flags(), result)
    named = result is not None and result.named
    assert launcher_check.must_stop(flags(check_stop=True), result) == named


def test_checks_are_sent_by_one_rank_once(tmp_path: Path) -> None:
    ranks = [CheckReport(str(tmp_path)) for _ in range(3)]
    assert [list(rank.collect(False)) for rank in ranks] == [[], [], []]
    checks = [Checked(1, "a"), Checked(2, "a", kind="restart")]
    (tmp_path / FILE).write_bytes(msgspec.json.encode(checks))
    sent = [one for rank in ranks for one in rank.collect(False)]
    assert [(one.t_ns, one.number) for one in sent] == [(1, 0), (2, 1)]
    assert not any(list(rank.collect(True)) for rank in ranks) and not list(tmp_path.iterdir())


# -- restarts under torchrun --------------------------------------------------------------------


@dataclass
class PlayedMonitor:
    settings: Settings
    nodes: Nodes = field(default_factory=lambda: Nodes(4))
    folder: str = "/session"
    stored: list[CheckReply | None] = field(default_factory=list)

    def store(self, reply: CheckReply | None) -> None:
        self.stored.append(reply)


class PlayedAgent:
    """Starts workers in place of torchrun's agent."""

    started = 0

    def _start_workers(self, group: argparse.Namespace) -> dict[int, int]:
        self.started += 1
        return {0: group.group_world_size}


class PlayedStore:
    """A store of torchrun."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]


@dataclass
class Restarts:
    """Starts and restarts of the ranks of one node of three, and the checks there."""

    monitor: Any
    group: Any
    late: bool = True
    checks: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Number of nodes of each check, and what the first node had said."""

    def check(self, _args: object, nodes: Nodes, _environ: object) -> CheckReply:
        decisions = list(self.group.store.values.values())
        self.checks.append((nodes.count, decisions[-1] if decisions else None))
        if len(self.checks) == 2:
            raise RuntimeError("it fails")
        return CheckReply(checks=(Checked(1, "a"),))

    def has_straggler(self, session: str, _environ: object) -> bool:
        assert session == "/session"
        return self.late

    def run(self, starts: int, **more: str) -> None:
        agent, start = PlayedAgent(), PlayedAgent._start_workers
        with launcher_confirm.confirming(flags(**more), self.monitor, {}):
            assert [agent._start_workers(self.group) for _ in range(starts)] == [{0: 3}] * starts
        assert agent.started == starts and PlayedAgent._start_workers is start


@pytest.fixture
def restarts(monkeypatch: pytest.MonkeyPatch) -> Restarts:
    group = argparse.Namespace(group_world_size=3, store=PlayedStore())
    played = Restarts(PlayedMonitor(Settings.load(confirm="restart")), group)
    monkeypatch.setattr(worker_starts, "LocalElasticAgent", PlayedAgent)
    monkeypatch.setattr(launcher_confirm, "check_at_restart", played.check)
    monkeypatch.setattr(launcher_confirm, "has_straggler", played.has_straggler)
    monkeypatch.setattr(launcher_confirm, "_ANSWER_S", 0.0)
    return played


def test_signal_during_a_check_at_a_restart_ends_the_job(
    restarts: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch makes an exception of a signal, and ends its ranks when it catches it."""

    def is_ended(*_: object) -> bool:
        raise SignalException("a signal", signal.SIGTERM)

    monkeypatch.setattr(launcher_confirm, "has_straggler", is_ended)
    agent = PlayedAgent()
    with launcher_confirm.confirming(flags(), restarts.monitor, {}):
        agent._start_workers(restarts.group)
        with pytest.raises(SignalException):
            agent._start_workers(restarts.group)
    assert agent.started == 1


def test_signal_while_nodes_are_checked_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_ended(*_: object) -> CheckReply:
        raise SignalException("a signal", signal.SIGTERM)

    monkeypatch.setattr(launcher_check, "_ask", is_ended)
    with pytest.raises(SignalException):
        launcher_check.check_at_restart(flags(), Nodes(), {})


def test_stragglers_are_confirmed_between_two_starts_of_the_ranks(restarts: Restarts) -> None:
    restarts.run(3)
    assert restarts.checks == [(3, b"check")] * 2  # the second one fails
    assert len(restarts.monitor.stored) == 1
    decisions = restarts.group.store.values
    assert list(decisions.values()) == [b"no check"] * 2  # a node that comes later


def test_setting_that_is_off_checks_nothing(restarts: Restarts) -> None:
    restarts.monitor = PlayedMonitor(Settings.load(confirm="off"))
    restarts.run(2)
    assert restarts.checks == [] and restarts.group.store.values == {}


def test_healthy_restart_waits_for_no_other_node(restarts: Restarts) -> None:
    restarts.late = False
    restarts.run(2)
    assert restarts.checks == [] and list(restarts.group.store.values.values()) == [b"no check"]


@pytest.mark.parametrize(("decision", "checks"), [(b"check", 1), (b"no check", 0), (None, 0)])
def test_other_nodes_do_as_the_first_one_says(
    decision: bytes | None, checks: int, restarts: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = restarts.group.store
    restarts.run(2)
    (key,) = first.values
    restarts.checks.clear()
    restarts.group.store = PlayedStore()
    if decision is not None:
        restarts.group.store.set(key, decision)
        monkeypatch.setattr(launcher_confirm, "_ANSWER_S", 60.0)
    restarts.monitor = PlayedMonitor(Settings.load(confirm="restart"), Nodes(3, first=False))
    restarts.run(2)
    assert restarts.checks == [(3, b"check")] * checks


def test_node_that_has_replaced_another_one_knows_the_restart_of_the_others(restarts: Restarts) -> None:
    """The store of c10d is one of each rendezvous; a static one is the same, and so are the nodes."""
    restarts.run(2, rdzv_backend="c10d")
    of_second = dict(restarts.group.store.values)
    restarts.run(3, rdzv_backend="c10d")
    assert restarts.group.store.values.keys() == of_second.keys()
    restarts.run(3, rdzv_backend="static")
    assert len(restarts.group.store.values) == 3
