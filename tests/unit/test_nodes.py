"""Nodes that come, go and come back: their labels stay apart, and what was on them is told as lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sessions import Clock, Rank, Relay, aggregation, ask, check_ledger, run_message, stored
from snapshot import Snapshot

from traceml_ray import live_session
from traceml_ray.errors import Errors
from traceml_ray.live_session import Session
from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.ray import membership
from traceml_ray.ray.actors import ActorConfig
from traceml_ray.reports.files import text_of
from traceml_ray.reports.status import render_status
from traceml_ray.settings import Settings
from traceml_ray.store.rank_processes import Node, label_nodes
from traceml_ray.store.results import NodeInfo
from traceml_ray.store.summary_shape import summary_of
from traceml_ray.wire import messages as wire


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _feed(
    aggregator: AggregatorCore, ranks: list[Rank], relays: list[Relay], clock: Clock, seconds: int
) -> None:
    """Ranks 0, 1, … are on the nodes of `relays` in turn."""
    for _ in range(seconds):
        for index, relay in enumerate(relays):
            aggregator.ingest(relay.message(*(rank.batch(10) for rank in ranks[index :: len(relays)])))
        clock.tick()
        assert aggregator.commit()
        aggregator.judge()


def _events(aggregator: AggregatorCore) -> list[tuple[str, str]]:
    aggregator.commit()
    return [(event.kind, event.message) for event in ask(aggregator, "events")]


def test_ranks_of_a_lost_node_are_lost_and_their_rows_kept(tmp_path: Path, clock: Clock) -> None:
    aggregator, relays = aggregation(tmp_path, clock), [Relay(0), Relay(1)]
    for node in range(3):
        aggregator.node_state(f"node-{node}", f"host-{node}", f"10.0.0.{node + 1}", True)
    ranks = [Rank(i, 4, hostname=f"host-{i % 2}", node_rank=i % 2) for i in range(4)]
    _feed(aggregator, ranks, relays, clock, 8)
    assert _events(aggregator) == []  # all of them were there from the start
    error = wire.Event("exception", clock(), message="RuntimeError: Connection closed by peer")
    aggregator.ingest(relays[0].message(ranks[0].batch(0, final=True, events=[error])))
    clock.tick(18)
    for _ in range(2):
        aggregator.node_state("node-1", "host-1", "10.0.0.2", False)
    aggregator.judge()
    assert [kind for kind, _ in _events(aggregator)] == ["exception", "node_lost", "rank_lost", "rank_lost"]
    verdict = ask(aggregator, "verdict")
    assert (verdict["label"], verdict["rank"], verdict["exit_reason"]) == (
        "rank_lost",
        1,
        "its node was lost",
    )
    assert "(host-1)" in verdict["why"]
    nodes = {node.node_id: node for node in ask(aggregator, "nodes")}
    assert [(node.alive, node.ranks) for node in nodes.values()] == [
        (True, [0, 2]), (False, [1, 3]), (True, []),
    ]  # fmt: skip
    assert nodes["node-1"].last_seen < nodes["node-1"].lost_at
    assert nodes["node-2"].last_seen is None
    summary = ask(aggregator, "summary")
    assert [node["lost"] for node in summary["session"]["nodes"]] == [False, True]
    assert summary["ranks"]["3"]["ended"] == "died"
    assert summary["ledger"]["per_rank"]["3"]["stored"] == 80
    assert "host-1 (lost)" in text_of(summary_of(summary), tmp_path)
    assert "host-1 (lost)" in render_status(stored(tmp_path), tmp_path, None, clock())
    aggregator.close()
    restarted = aggregation(tmp_path, clock)
    restarted.node_state("node-1", "host-1", "10.0.0.2", False)
    restarted.judge()
    assert ask(restarted, "verdict")["rank"] == 1
    assert len(_events(restarted)) == 4


def test_all_relays_of_a_lost_node_are_lost(tmp_path: Path, clock: Clock) -> None:
    """Of two launches on one node of a running cluster."""
    aggregator, relays = aggregation(tmp_path, clock), [Relay(0), Relay(0, "other"), Relay(1)]
    node = "0123456789abcdef" * 3
    for relay, launch in zip(relays, ("", ".7f3a"), strict=False):
        relay.node = wire.NodeIdentity(node + launch, "host-0", "10.0.0.1")
    ranks = [Rank(i, 3, per_node=1) for i in range(3)]
    _feed(aggregator, ranks, relays, clock, 8)
    aggregator.node_state(node, "host-0", "10.0.0.1", False)
    aggregator.judge()
    summary = ask(aggregator, "summary")
    nodes = summary["session"]["nodes"]
    assert [(node["ranks"], node["lost"]) for node in nodes] == [([0], True), ([1], True), ([2], False)]
    assert len({node["hostname"] for node in nodes}) == 3


def test_node_lost_after_a_failure_is_not_its_cause(tmp_path: Path, clock: Clock) -> None:
    aggregator, relays = aggregation(tmp_path, clock), [Relay(0), Relay(1)]
    ranks = [Rank(i, 2, per_node=1) for i in range(2)]
    _feed(aggregator, ranks, relays, clock, 8)
    error = wire.Event("exception", clock(), message="ValueError: label 17 is out of range")
    aggregator.ingest(relays[0].message(ranks[0].batch(0, final=True, events=[error])))
    clock.tick(2)
    aggregator.ingest(relays[1].message(ranks[1].batch(0)))
    clock.tick(9)  # the cluster takes back its nodes
    aggregator.node_state("node-1", "host-1", "10.0.0.2", False)
    aggregator.judge()
    assert ask(aggregator, "verdict")["ranks"] == [0]


def test_machine_that_comes_back_is_another_node_with_its_own_label(
    tmp_path: Path, clock: Clock, snapshot: Snapshot
) -> None:
    aggregator, relays = aggregation(tmp_path, clock), [Relay(0), Relay(1)]
    ranks = [Rank(i, 2, per_node=1) for i in range(2)]
    _feed(aggregator, ranks, relays, clock, 5)
    aggregator.node_state("node-1", "host-1", "10.0.0.2", False)
    back = Relay(1, "back")
    back.node = wire.NodeIdentity("back-again-and-long", "host-1", "10.0.0.2")
    aggregator.node_state("back-again-and-long", "host-1", "10.0.0.2", True)
    second = [Rank(i, 2, per_node=1, attempt=1) for i in range(2)]
    _feed(aggregator, second, [relays[0], back], clock, 5)
    assert ("node_joined", "host-1 (10.0.0.2) joined") in _events(aggregator)
    summary = ask(aggregator, "summary")
    assert [(node["hostname"], node["ranks"], node["lost"]) for node in summary["session"]["nodes"]] == [
        ("host-0", [0], False),
        ("host-1 (10.0.0.2, back-aga)", [1], False),
        ("host-1 (10.0.0.2, node-1)", [], True),
    ]
    assert summary["session"]["nnodes"] == 2
    snapshot("report", text_of(summary_of(summary), Path("<folder>")))
    snapshot("cli", render_status(stored(tmp_path), Path("<folder>"), None, clock()))
    assert [node.ranks for node in ask(aggregator, "nodes")] == [[1], [0], []]
    assert ask(aggregator, "verdict")["label"] == "healthy"


def test_what_a_node_lacks_is_not_measured_and_no_error(tmp_path: Path, clock: Clock) -> None:
    aggregator, relay = aggregation(tmp_path, clock), Relay()
    errors = {"not measured: nvml power: not supported by the device": 8, "nvml clock: RuntimeError": 1}
    aggregator.ingest(relay.message(Rank(0, 1).batch(5), errors=errors))
    aggregator.commit()
    swallowed, lacks = (
        render_status(stored(tmp_path), tmp_path, None, clock())
        .partition("Swallowed errors\n")[2]
        .split("Not measured\n")
    )
    assert " ".join(swallowed.split()) == "1 × relay of host-0, nvml clock: RuntimeError"
    assert " ".join(lacks.split()) == "8 × relay of host-0, nvml power: not supported by the device"
    aggregator.close()


def test_node_that_was_out_of_sight_is_alive_again(tmp_path: Path, clock: Clock) -> None:
    aggregator = aggregation(tmp_path, clock)
    _feed(aggregator, [Rank(0, 1)], [Relay()], clock, 1)
    for alive in (False, True, True):
        aggregator.node_state("node-0", "host-0", "10.0.0.1", alive)
    aggregator.node_state("never-seen", "host-9", "10.0.0.9", False)
    aggregator.commit()
    (node,) = ask(aggregator, "nodes")
    assert (node.alive, node.lost_at) == (True, None)


def test_rows_held_by_a_lost_node_are_not_waited_for(tmp_path: Path, clock: Clock) -> None:
    aggregator, rank = aggregation(tmp_path, clock), Rank(0, 1)
    aggregator.ingest(Relay().message(rank.batch(30, produced=37)))
    assert run_message(aggregator, "job", status="failed").waiting == 1
    aggregator.node_state("node-0", "host-0", "10.0.0.1", False)
    assert run_message(aggregator, "job", status="failed").waiting == 0
    assert check_ledger(tmp_path)["dropped"]["relay"] == 7


def _nodes(
    folder: Path, clock: Clock, *ranks: tuple[int, dict[str, Any]]
) -> list[tuple[int, str | None, list[int]]]:
    """(node rank, node id, ranks) as the summary has them, for ranks on the node of that number."""
    aggregator = aggregation(folder, clock)
    for rank, (node, who) in enumerate(ranks):
        batch = Rank(rank, len(ranks), hostname=f"host-{node}", **who).batch(20)
        aggregator.ingest(Relay(node, f"{rank}").message(batch))
    aggregator.commit()
    nodes = ask(aggregator, "summary")["session"]["nodes"]
    return [(node["node_rank"], node["node_id"], node["ranks"]) for node in nodes]


def test_ranks_that_guess_their_node_are_grouped_by_where_they_are(tmp_path: Path, clock: Clock) -> None:
    guess = {"node_rank": 0, "source": "torch.distributed"}
    numbered = _nodes(tmp_path, clock, (1, guess), (0, guess), (1, guess), (0, guess))
    assert numbered == [(0, "node-1", [0, 2]), (1, "node-0", [1, 3])]


def test_node_ranks_that_fit_together_are_trusted(tmp_path: Path, clock: Clock) -> None:
    numbered = _nodes(tmp_path, clock, (1, {"node_rank": 1}), (0, {"node_rank": 0}), (1, {"node_rank": 1}))
    assert numbered == [(0, "node-0", [1]), (1, "node-1", [0, 2])]


@given(
    st.dictionaries(
        st.text("ab", min_size=9, max_size=9),
        st.tuples(st.sampled_from("xy"), st.sampled_from("12")),
        max_size=8,
    )
)
def test_node_labels_are_unique_and_as_short_as_possible(places: dict[str, tuple[str, str]]) -> None:
    nodes = [Node(id, name, address) for id, (name, address) in places.items()]
    labels = label_nodes(nodes, [])
    for node in nodes:
        name = [other for other in nodes if other.hostname == node.hostname]
        place = [other for other in name if other.address == node.address]
        short = [other for other in place if other.node_id[:8] == node.node_id[:8]]
        same = [other for other in nodes if labels[other.node_id] == labels[node.node_id]]
        assert len(same) == len(short)
        assert (labels[node.node_id] == node.hostname) == (len(name) == 1)
        assert (node.node_id[:8] in labels[node.node_id]) == (len(place) > 1)


class Cluster:
    """A cluster of one node, whose relay has its name for `lasts` looks after it was made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.lasts = 1
        self.made: list[float] = []
        self._left = 0
        self.errors = Errors()
        node = {"NodeID": "n", "Alive": True, "NodeManagerHostname": "host-n", "NodeManagerAddress": "a"}
        monkeypatch.setattr(membership, "cluster_nodes", lambda: [node])
        monkeypatch.setattr(membership, "relay_nodes", lambda _: {"n"} if self._left > 0 else set())
        monkeypatch.setattr(membership, "ensure_relay", self._make)
        config = ActorConfig("s", Settings(), everywhere=True)
        self._membership = membership.Membership(config, lambda *_: None, self.errors, lambda: self.now)

    def _make(self, *_: Any) -> None:
        self.made.append(self.now)
        self._left = self.lasts

    def look(self, seconds: float, *, asked: bool = False) -> None:
        for _ in range(int(seconds / membership.CHECK_S)):
            self._membership._check(asked)
            self._left -= 1
            self.now += membership.CHECK_S


def test_relay_that_never_stays_is_made_ever_less_often_and_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch)
    cluster.look(7200)
    waits = [after - before for before, after in zip(cluster.made, cluster.made[1:], strict=False)]
    assert waits == [2, 4, 8, 16, 32, 64, 128, 256, *[300] * (len(waits) - 8)]
    assert cluster.errors == {"no relay stays: RuntimeError": 1}
    assert "(host-n)" in cluster.errors.causes()[0].message
    before = len(cluster.made)
    cluster.look(100, asked=True)
    assert len(cluster.made) <= before + 1, "they ask every second"


def test_relay_that_was_killed_is_made_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.lasts = 100
    cluster.look(3000)
    assert cluster.made == [1000 + 200 * n for n in range(15)]
    cluster.lasts = 1
    cluster.look(30, asked=True)
    assert cluster.made[15:] == [4000, 4002, 4004, 4006, 4008], "whoever finds none may ask, but not for ever"
    assert cluster.errors == {"no relay stays: RuntimeError": 1}


class _Unlisted(Session):
    """A session on one node whose aggregator lists no node yet."""

    def __init__(self, relay_answers: bool) -> None:
        self.id = "s"  # nothing of it asks Ray
        self._relay_answers = relay_answers

    def _check_running(self) -> None: ...

    def nodes(self) -> list[NodeInfo]:
        return []

    def _with_relay(self, nodes: set[str], deadline: float) -> set[str]:
        return nodes if self._relay_answers else set()


@pytest.mark.parametrize(("answers", "reason"), [(False, "no relay"), (True, "aggregator does not list")])
def test_wait_for_a_session_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, answers: bool, reason: str
) -> None:
    node = {"NodeID": "n", "NodeManagerHostname": "host-n", "Alive": True}
    monkeypatch.setattr(live_session, "cluster_nodes", lambda: [node])
    with pytest.raises(live_session.StartError, match=f"^{reason}.*: host-n$"):
        _Unlisted(answers).wait_ready(0.1)
