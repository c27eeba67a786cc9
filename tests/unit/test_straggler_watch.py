"""A straggler that lasts: when its node is checked during training, and which nodes with it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from sessions import SECOND, Clock, identity

from traceml_ray.analysis.verdict import Verdict
from traceml_ray.errors import Errors
from traceml_ray.monitor.live_steps import RunNow
from traceml_ray.monitor.straggler_watch import (
    AHEAD_S,
    EVERY_S,
    LASTS_S,
    MOST,
    PEERS,
    StragglerWatch,
    nodes_to_check,
)
from traceml_ray.settings import Settings
from traceml_ray.signals.check.records import CHECKS
from traceml_ray.signals.nodes.records import NODE
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.wire import messages as wire

WORLD, PER_NODE = 16, 2


def process(rank: int, **more: Any) -> RankProcess:
    who = identity(rank, WORLD, per_node=PER_NODE, node_id=f"node-{rank // PER_NODE}")
    return RankProcess(rank, f"process{rank}", who, **more)


def verdict(*ranks: int, label: str = "straggler", also: tuple[Verdict, ...] = ()) -> Verdict:
    empty = Verdict(label=label, why="")
    return msgspec.structs.replace(empty, ranks=ranks, also=also)


class Watched:
    """A run whose verdict a test sets."""

    def __init__(self, confirm: str = "during", nodes: int = WORLD // PER_NODE) -> None:
        self.clock, self.errors = Clock(), Errors()
        self.verdict: Verdict | None = None
        self.ranks = {rank: process(rank) for rank in range(PER_NODE * nodes)}
        self.clocks: dict[str, tuple[int, int]] = {}
        self.orders: list[dict[str, wire.Command]] = []
        self._watch = StragglerWatch(Settings(confirm=confirm), self._running, self.clock, self.errors)  # type: ignore[arg-type]

    def _running(self) -> list[RunNow]:
        labels = {rank: f"node-{rank // PER_NODE}" for rank in self.ranks}
        return [RunNow("job", "job", self.ranks, labels, self.clocks, self.verdict, 0.1)]

    def tick(self, seconds: float) -> None:
        """Judge every two seconds for so long. New orders are added to `orders`."""
        for _ in range(round(seconds / 2)):
            self.clock.tick(2)
            self._watch.tick()
            nodes = {
                f"node-{node}": self._watch.commands(f"node-{node}") for node in range(WORLD // PER_NODE)
            }
            order = {node: commands[0] for node, commands in nodes.items() if commands}
            if order and order not in self.orders:
                self.orders.append(order)


def test_straggler_that_lasts_has_its_node_and_peers_checked_at_one_moment() -> None:
    watched = Watched()
    watched.verdict = verdict(5)
    watched.tick(LASTS_S)
    assert watched.orders == []
    watched.tick(2)
    (order,) = watched.orders
    assert len(order) == 1 + PEERS and "node-2" in order
    assert order["node-2"].args["processes"] == "4:process4 5:process5"
    assert order["node-2"].args["rank"] == 5
    begins = {command.args["begin_ns"] for command in order.values()}
    assert len(begins) == 1 and AHEAD_S - 2 <= (begins.pop() - watched.clock.now) / SECOND <= AHEAD_S  # type: ignore[operator]


def test_order_is_on_the_clock_of_each_node() -> None:
    watched = Watched()
    watched.clocks = {"node-2": (5 * SECOND, 1000), "node-0": (100, 1000)}
    watched.verdict = verdict(5)
    watched.tick(LASTS_S + 2)
    begins = {node: command.args["begin_ns"] for node, command in watched.orders[0].items()}
    assert begins["node-0"] - begins["node-2"] == 5 * SECOND  # type: ignore[operator]


def test_order_is_sent_only_until_the_check_begins() -> None:
    watched = Watched()
    watched.verdict = verdict(5)
    watched.tick(LASTS_S + 2)
    watched.clock.tick(AHEAD_S)
    assert watched._watch.commands("node-2") == []


@pytest.mark.parametrize(
    "given",
    [verdict(5, label="hang"), verdict(label="imbalance"), verdict(label="straggler"), None],
)
def test_only_a_straggler_is_checked(given: Verdict | None) -> None:
    watched = Watched()
    watched.verdict = given
    watched.tick(3 * LASTS_S)
    assert watched.orders == []


def test_straggler_that_passes_is_not_checked() -> None:
    watched = Watched()
    for _ in range(5):
        watched.verdict = verdict(5)
        watched.tick(LASTS_S / 2)
        watched.verdict = None
        watched.tick(LASTS_S / 2)
    assert watched.orders == []


def test_straggler_that_is_not_the_first_finding_is_checked() -> None:
    watched = Watched()
    watched.verdict = verdict(label="imbalance", also=(verdict(5),))
    watched.tick(LASTS_S + 2)
    assert len(watched.orders) == 1


def test_each_straggler_is_checked_once() -> None:
    watched = Watched()
    watched.verdict = verdict(5)
    watched.tick(3 * EVERY_S)
    assert len(watched.orders) == 1


def test_another_straggler_waits_until_it_is_not_too_soon() -> None:
    watched = Watched()
    watched.verdict = verdict(5)
    watched.tick(LASTS_S + 2)
    watched.verdict = verdict(9)
    watched.tick(EVERY_S / 2)
    assert len(watched.orders) == 1
    watched.tick(EVERY_S)
    assert [min(order, key=lambda node: node != "node-4") for order in watched.orders][1] == "node-4"
    assert len(watched.orders) == 2


def test_checks_of_a_run_are_bounded() -> None:
    watched = Watched()
    for rank in range(WORLD):
        watched.verdict = verdict(rank)
        watched.tick(EVERY_S + LASTS_S)
    assert len(watched.orders) == MOST < WORLD


def test_nothing_is_checked_unless_it_is_wanted() -> None:
    for confirm in ("off", "restart"):
        watched = Watched(confirm)
        watched.verdict = verdict(5)
        watched.tick(3 * LASTS_S)
        assert watched.orders == []


def test_node_without_peers_is_checked_alone() -> None:
    watched = Watched(nodes=1)
    watched.verdict = verdict(1)
    watched.tick(LASTS_S + 2)
    assert [[*order] for order in watched.orders] == [["node-0"]]


def test_nodes_of_all_stragglers_are_checked_and_none_of_them_is_a_peer() -> None:
    ranks = {rank: process(rank) for rank in range(WORLD)}
    assert [*nodes_to_check((5, 9, 4), ranks)] == ["node-2", "node-4", "node-0", "node-1", "node-5", "node-6"]
    assert len(nodes_to_check(range(12), ranks)) == 4 + 2, "two nodes have no straggler"


def test_straggler_whose_process_has_ended_is_checked_once_there_is_another_one() -> None:
    watched = Watched()
    watched.verdict, watched.ranks[5] = verdict(5), process(5, final=True)
    watched.tick(LASTS_S + 10)
    assert watched.orders == []
    watched.ranks[5] = process(5)
    watched.tick(4)
    assert len(watched.orders) == 1


def test_ranks_that_have_ended_are_not_looked_at() -> None:
    ranks = {rank: process(rank, final=rank in (2, 3)) for rank in range(6)}
    assert nodes_to_check((0,), ranks) == {
        "node-0": {0: "process0", 1: "process1"},
        "node-2": {4: "process4", 5: "process5"},
    }
    assert nodes_to_check((2,), ranks) == {}


def test_nodes_that_do_not_answer_are_counted() -> None:
    watched = Watched()
    watched.verdict = verdict(5)
    watched.tick(LASTS_S + 2)
    watched._watch.answered("node-2", [(NODE, None), (CHECKS, None)])
    watched._watch.answered("node-0", [(NODE, None)])
    watched.tick(30)
    assert not watched.errors
    watched.tick(60)
    assert watched.errors == {"check during training: no answer": PEERS}
    watched.tick(60)
    assert watched.errors == {"check during training: no answer": PEERS}
