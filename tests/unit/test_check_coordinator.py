"""A check of several nodes: who measures when, and what comes of nodes that do not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from traceml_ray.ray.check import labelled, node_environment, reserved
from traceml_ray.signals.check import coordinator
from traceml_ray.signals.check.coordinator import TRIALS, Coordinator, joined, waves
from traceml_ray.signals.check.nodes import NoAnswerError
from traceml_ray.signals.check.pairs import Pair
from traceml_ray.signals.check.records import Checked, Measure
from traceml_ray.signals.check.tasks import (
    Begin,
    Collect,
    Describe,
    Exchange,
    Listen,
    NodeUse,
    Plan,
    Round,
    Task,
    TaskReply,
)


@pytest.fixture(autouse=True)
def two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a second round of pairs: each node with the next but one."""

    def after(nodes: int, measured: Sequence[Mapping[Pair, Sequence[Measure]]]) -> list[Pair]:
        return [(node, node + 2) for node in (0, 1) if node + 2 < nodes] if len(measured) == 1 else []

    monkeypatch.setattr(coordinator, "next_round", after)


@dataclass
class Hosts:
    """Which hosts are busy with measuring."""

    busy: list[str] = field(default_factory=list)
    together: set[frozenset[str]] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    meet: dict[str, threading.Barrier] = field(default_factory=dict)
    """Where the first measurement of a host waits for that of another one."""

    @contextmanager
    def measuring(self, host: str, times: int = 1) -> Iterator[None]:
        with self.lock:
            assert self.busy.count(host) < times, f"{host} measures itself and another node"
            self.busy.append(host)
            self.together.add(frozenset(self.busy))
            meeting = self.meet.pop(host, None)
        if meeting is not None:
            meeting.wait()
        yield
        time.sleep(0.002)
        with self.lock:
            self.busy.remove(host)


@dataclass
class PlayedNode:
    """A node that answers as a process of a check does."""

    name: str
    host: str
    hosts: Hosts
    silent_at: type[Task] | None = None
    fails_at: type[Task] | None = None
    ends_at: type[Task] | None = None
    reserved: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    tasks: list[Task] = field(default_factory=list)
    address: str = "10.0.0.1"

    def ask(self, task: Task, limit_s: float) -> TaskReply:
        assert limit_s > 0
        self.tasks.append(task)
        if self.silent_at is type(task):
            raise NoAnswerError("it did not answer within 1 s")
        if self.fails_at is type(task):
            return TaskReply("OSError: no such disk")
        if self.ends_at is type(task):
            return TaskReply("its measuring process ended (-9)", ended=True)
        if isinstance(task, Describe):
            return TaskReply(machine=NodeUse(self.name, self.host, 8, **self.machine))
        if isinstance(task, Round):
            with self.hosts.measuring(self.host):
                return TaskReply()
        if isinstance(task, Collect):
            return TaskReply(checked=Checked(1, "as it names itself"))
        if isinstance(task, Listen):
            return TaskReply(port=1234)
        if isinstance(task, Exchange):
            with self.hosts.measuring(self.host, 2):  # both nodes of a pair may be on one host
                return TaskReply(measures=(Measure("all_reduce", "link", "B/s", [1.0], "gloo"),))
        return TaskReply()


def played(*hosts: str, **more: Any) -> list[PlayedNode]:
    """Return a node on each of `hosts`."""
    shared = Hosts()
    return [PlayedNode(f"node-{number}", host, shared, **more) for number, host in enumerate(hosts)]


def test_each_node_makes_all_trials_and_all_pairs_exchange() -> None:
    nodes = played("a", "b", "c", "d")
    outcome = Coordinator(nodes, Plan(seconds=10)).run()
    assert sorted(check.node for check in outcome.checks) == outcome.names == [node.name for node in nodes]
    assert [sorted(measured) for measured in outcome.rounds] == [[(0, 1), (2, 3)], [(0, 2), (1, 3)]]
    assert all(measures for measured in outcome.rounds for measures in measured.values())
    for node in nodes:
        rounds = [task for task in node.tasks if isinstance(task, Round)]
        assert len(rounds) == TRIALS
        exchanges = [task for task in node.tasks if isinstance(task, Exchange)]
        assert sum(task.seconds for task in (*rounds, *exchanges)) == pytest.approx(10)
    assert not (outcome.silent or outcome.errors or outcome.in_use)


def test_nodes_on_one_host_take_turns_and_hosts_do_not_wait_for_each_other() -> None:
    nodes = played("a", "a", "a", "b")
    nodes[0].hosts.meet = dict.fromkeys("ab", threading.Barrier(2, timeout=240))
    Coordinator(nodes, Plan()).run()
    assert frozenset("ab") in nodes[0].hosts.together  # and PlayedNode asserts the turns


def test_pairs_on_one_host_take_turns() -> None:
    outcome = Coordinator(played("a", "a", "a", "a"), Plan()).run()
    assert [len(measured) for measured in outcome.rounds] == [2, 2]


@pytest.mark.parametrize("silent_at", [Describe, Begin, Round, Collect, Exchange])
def test_node_that_does_not_answer_is_named_once_and_the_others_are_checked(silent_at: type[Task]) -> None:
    nodes = played("a", "b", "c", "d")
    nodes[2].silent_at = silent_at
    outcome = Coordinator(nodes, Plan()).run()
    assert outcome.silent == {"node-2": "it did not answer within 1 s"}
    asked = [type(task) for task in nodes[2].tasks]
    assert asked.count(silent_at) == 1 and asked[-1] is silent_at
    others = {check.node for check in outcome.checks}
    assert others >= {"node-0", "node-1", "node-3"}
    if silent_at is Exchange:
        assert outcome.rounds[0][0, 1] and not outcome.rounds[0][2, 3]
    else:
        assert "node-2" not in outcome.names


@pytest.mark.parametrize("ends_at", [Describe, Begin, Round, Collect])
def test_node_whose_measuring_process_had_to_be_ended_is_named_as_silent(ends_at: type[Task]) -> None:
    """The actor, or the launcher, of the node answers, but what it measures with hangs: on a disk, say."""
    nodes = played("a", "b", "c", "d")
    nodes[2].ends_at = ends_at
    outcome = Coordinator(nodes, Plan()).run()
    assert outcome.silent == {"node-2": "its measuring process ended (-9)"} and outcome.errors == []
    assert type(nodes[2].tasks[-1]) is ends_at and len(outcome.checks) == 3


def test_exchange_that_ends_the_processes_of_a_pair_leaves_its_nodes_in_the_check() -> None:
    nodes = played("a", "b", "c", "d")
    nodes[0].ends_at = nodes[1].ends_at = Exchange
    outcome = Coordinator(nodes, Plan()).run()
    assert outcome.silent == {} and not outcome.rounds[0][0, 1] and outcome.rounds[0][2, 3]
    assert {node.name for node in nodes} == {check.node for check in outcome.checks}


@pytest.mark.parametrize(
    ("machines", "like"),
    [
        (({"cpu": "Xeon"}, {"cpu": "EPYC"}), "gloo: EPYC – Xeon"),
        (({"gpu": "H100", "gpus": 8}, {"gpu": "A100", "gpus": 8}), "gloo: A100 – H100"),
        (({"gpu": "H100", "gpus": 8, "cpu": "Xeon"}, {"cpu": "EPYC"}), "gloo: EPYC – Xeon"),
    ],
)
def test_pairs_are_compared_with_pairs_of_the_same_models(
    machines: Sequence[dict[str, Any]], like: str
) -> None:
    nodes = played("a", "b")
    for node, machine in zip(nodes, machines, strict=True):
        node.machine = machine
    (measured,) = Coordinator(nodes, Plan(disturb=True)).run().rounds
    assert [measure.like for measure in measured[0, 1]] == [like]


def test_failed_exchange_is_a_pair_without_measures_and_says_why() -> None:
    nodes = played("a", "b")
    nodes[1].fails_at = Exchange
    outcome = Coordinator(nodes, Plan()).run()
    assert outcome.rounds == [{(0, 1): ()}]
    assert outcome.errors == ["node-1: OSError: no such disk"]
    assert outcome.silent == {}


@pytest.mark.parametrize(
    ("reserved_there", "machine", "used"),
    [
        ("8 of 8 CPUs and 4 of 4 GPUs", {"gpus": 4, "free_gpus": (1, 3)}, "8 of 8 CPUs and 4 of 4 GPUs"),
        ("", {"busy_cores": 5.0, "gpus": 4, "free_gpus": (1, 3)}, "5.0 of 8 cores are busy, 2 of 4 GPUs"),
    ],
)
def test_only_what_no_job_uses_is_measured(reserved_there: str, machine: dict[str, Any], used: str) -> None:
    nodes = played("a", "b", "c")
    nodes[1].reserved, nodes[1].machine = reserved_there, machine
    outcome = Coordinator(nodes, Plan(path="/data")).run()
    assert list(outcome.in_use) == ["node-1"] and outcome.in_use["node-1"].startswith(used)
    (begin,) = [task for task in nodes[1].tasks if isinstance(task, Begin)]
    assert (begin.devices, begin.only) == ((1, 3), ("gpu_matmul", "gpu_memory"))
    assert outcome.names == ["node-0", "node-2"]
    disturbed = Coordinator(nodes, Plan(path="/data", disturb=True)).run()
    assert disturbed.in_use == {} and disturbed.names == ["node-0", "node-1", "node-2"]
    assert [task for task in nodes[1].tasks if isinstance(task, Begin)][-1] == Begin("node-1", path="/data")


def test_two_exchanges_of_a_pair_are_one_measure_and_each_pair_has_its_turn_twice() -> None:
    one = Measure("all_reduce", "link", "B/s", [1.0, 2.0], others=[0.1, 0.2])
    other = Measure("all_reduce", "link", "B/s", [3.0], others=[0.3])
    (both,) = joined([one], [other])
    assert (both.values, both.others) == ([1.0, 2.0, 3.0], [0.1, 0.2, 0.3])
    (both,) = joined([one], [msgspec.structs.replace(other, others=None)])
    assert (both.values, both.others) == ([1.0, 2.0, 3.0], None)
    assert joined([one], []) == joined([], [other]) == ()
    nodes = played("a", "a", "a", "a")
    outcome = Coordinator(nodes, Plan()).run()
    assert all(len(measures[0].values) == 2 for one in outcome.rounds for measures in one.values())


def test_one_node_is_measured_all_the_time() -> None:
    (node,) = played("a")
    outcome = Coordinator([node], Plan(seconds=5)).run()
    assert sum(task.seconds for task in node.tasks if isinstance(task, Round)) == pytest.approx(5)
    assert outcome.rounds == [] and len(outcome.checks) == 1


def test_waves_keep_the_order_of_what_waits_for_the_same() -> None:
    done: list[str] = []
    jobs = [(frozenset(uses), lambda uses=uses: done.append(uses)) for uses in ("ab", "a", "c", "bc", "d")]
    order = [[job() or done[-1] for job in wave] for wave in waves(jobs)]
    assert order == [["ab", "c", "d"], ["a", "bc"]]


def test_ray_nodes_have_labels_of_their_own_and_say_what_is_reserved() -> None:
    listed = [
        {"NodeManagerHostname": host, "NodeManagerAddress": address, "NodeID": address}
        for host, address in (("b", "10.0.0.2"), ("a", "10.0.0.1"), ("a", "10.0.0.3"))
    ]
    assert [name for name, _ in labelled(listed)] == ["a 10.0.0.1", "a 10.0.0.3", "b"]
    assert reserved({"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 1.0}) == "3 of 4 GPUs"
    assert reserved({"CPU": 8.0, "memory": 1.0}, {"memory": 0.5}) == "8 of 8 CPUs"
    assert reserved({"CPU": 8.0}, {"CPU": 8.0}) == ""


def test_measuring_process_has_the_cores_and_gpus_of_the_node_and_no_monitor() -> None:
    environ = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRACEML_SOCKET": "x", "HOME": "/root"}
    assert node_environment(environ, {}) == {"TRACEML_SOCKET": "x", "HOME": "/root"}
    assert node_environment(environ, {"CUDA_VISIBLE_DEVICES": "0,1"})["CUDA_VISIBLE_DEVICES"] == "0,1"
