"""Pairs of nodes: which nodes are paired in each round, and what is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traceml_ray.signals.check.judge import Slow
from traceml_ray.signals.check.pairs import (
    MOST_ROUNDS,
    OPERATIONS,
    Pair,
    first_round,
    judge_pairs,
    next_round,
)
from traceml_ray.signals.check.records import Measure

TRIALS = 10


class Network:
    """Nodes and links with a speed. An exchange is as fast as the slowest of them."""

    def __init__(
        self,
        nodes: int,
        slow: Mapping[int | Pair, float] | None = None,
        *,
        noise: float = 0.03,
        seed: int = 0,
        broken: Sequence[Pair] = (),
        models: Sequence[str] = (),
    ) -> None:
        self.nodes, self.slow, self.broken, self._models = nodes, slow or {}, broken, models
        self._noise, self._rng = noise, np.random.default_rng(seed)

    def exchange(self, pair: Pair) -> list[Measure]:
        if pair in self.broken:
            return []
        speed = min([1.0, *(self.slow.get(part, 1.0) for part in (*pair, pair))])
        models = sorted(self._models[node] for node in pair) if self._models else []
        speed *= 0.5 if "old" in models else 1.0
        factors = np.exp(self._rng.normal(0, self._noise, (len(OPERATIONS), TRIALS)))
        return [
            Measure(name, "link", "B/s", (1e9 * speed * row).tolist(), f"gloo: {models}")
            for name, row in zip(OPERATIONS, factors, strict=True)
        ]

    def rounds(self) -> list[dict[Pair, list[Measure]]]:
        """Run all rounds."""
        measured: list[dict[Pair, list[Measure]]] = []
        pairs = first_round(self.nodes)
        while pairs:
            assert len({node for pair in pairs for node in pair}) == 2 * len(pairs), (
                "all run at the same time"
            )
            assert not {pair for one in measured for pair in one}.intersection(pairs), "no pair runs twice"
            measured.append({pair: self.exchange(pair) for pair in pairs})
            pairs = next_round(self.nodes, measured)
        return measured

    def judged(self) -> tuple[list[Slow], list[str]]:
        slow, _, unsure = judge_pairs([f"node-{node}" for node in range(self.nodes)], self.rounds())
        return slow, unsure


def named(slow: Sequence[Slow]) -> set[tuple[str, ...]]:
    return {tuple(one.nodes) for one in slow}


def test_neighbours_are_paired_first() -> None:
    assert first_round(5) == [(0, 1), (2, 3)]
    assert first_round(1) == first_round(0) == []


def test_slow_pairs_meet_fast_ones_in_the_second_round() -> None:
    network = Network(8, {2: 0.4})
    first, second, *_ = network.rounds()
    assert set(first) == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert not {(2, 3)} & set(second)
    assert {node for pair in second for node in pair} == {*range(8)}


@pytest.mark.parametrize("nodes", [4, 5, 6, 7, 8, 9, 16, 33, 256])
def test_healthy_nodes_need_few_rounds_and_name_nothing(nodes: int) -> None:
    network = Network(nodes)
    assert len(network.rounds()) <= 3
    assert network.judged() == ([], [])


@given(
    nodes=st.integers(3, 40), seed=st.integers(0, 9_999), by=st.sampled_from([0.3, 0.5, 0.6]), data=st.data()
)
def test_a_slow_node_is_named(nodes: int, seed: int, by: float, data: st.DataObject) -> None:
    node = data.draw(st.integers(0, nodes - 1))
    slow, _ = Network(nodes, {node: by}, seed=seed).judged()
    assert named(slow) == {(f"node-{node}",)}
    assert slow[0].what == "node" and slow[0].lower == pytest.approx(1 - by, abs=0.06)


@given(nodes=st.integers(3, 40), seed=st.integers(0, 9_999), data=st.data())
def test_a_slow_link_that_is_used_is_named_as_link(nodes: int, seed: int, data: st.DataObject) -> None:
    pairs = first_round(nodes)
    pair = data.draw(st.sampled_from(pairs))
    slow, _ = Network(nodes, {pair: 0.5}, seed=seed).judged()
    assert named(slow) == {(f"node-{pair[0]}", f"node-{pair[1]}")}
    assert slow[0].what == "link"


@given(nodes=st.integers(2, 40), seed=st.integers(0, 9_999), noise=st.sampled_from([0.01, 0.05, 0.15]))
def test_healthy_nodes_name_nothing(nodes: int, seed: int, noise: float) -> None:
    network = Network(nodes, noise=noise, seed=seed)
    assert len(network.rounds()) <= MOST_ROUNDS
    assert network.judged()[0] == []


@given(seed=st.integers(0, 9_999), data=st.data(), nodes=st.integers(3, 24))
def test_nodes_of_an_older_model_are_not_named(nodes: int, seed: int, data: st.DataObject) -> None:
    models = data.draw(st.lists(st.sampled_from(["old", "new"]), min_size=nodes, max_size=nodes))
    assert Network(nodes, models=models, seed=seed).judged()[0] == []


@given(seed=st.integers(0, 9_999), node=st.integers(0, 15))
def test_slow_node_among_two_models_is_named(seed: int, node: int) -> None:
    slow, _ = Network(16, {node: 0.5}, models=["old"] * 8 + ["new"] * 8, seed=seed).judged()
    assert named(slow) == {(f"node-{node}",)}


def test_nodes_without_equal_pairs_are_said() -> None:
    slow, unsure = Network(4, models=["a", "b", "c", "d"]).judged()
    assert slow == []
    assert unsure == [
        "node-0, node-1, node-2 and node-3: no other pair has the same models to compare their links with."
    ]


def test_pair_that_is_the_only_one_of_its_models_clears_no_node() -> None:
    models = ["old", "old", "new", "new", "new", "new"]
    slow, _ = Network(6, {0: 0.5}, models=models).judged()
    assert [(one.what, one.nodes) for one in slow] == [("node", ["node-0"])]


@given(nodes=st.integers(8, 40), seed=st.integers(0, 9_999), data=st.data())
def test_two_slow_nodes_are_both_named(nodes: int, seed: int, data: st.DataObject) -> None:
    two = data.draw(st.lists(st.integers(0, nodes - 1), min_size=2, max_size=2, unique=True))
    slow, _ = Network(nodes, dict.fromkeys(two, 0.5), seed=seed).judged()
    assert named(slow) == {(f"node-{node}",) for node in two}


def test_two_nodes_are_one_pair_of_which_nothing_can_be_said() -> None:
    slow, unsure = Network(2, {0: 0.3}).judged()
    assert slow == [] and "no other one to compare it with" in unsure[0]


def test_a_pair_that_failed_is_said_and_its_nodes_are_tried_with_others() -> None:
    network = Network(6, broken=[(2, 3)])
    second = network.rounds()[1]
    assert {node for pair in second for node in pair} >= {2, 3} and (2, 3) not in second
    slow, unsure = network.judged()
    assert slow == [] and unsure == ["node-2 and node-3 could not exchange data."]


def test_sentences_say_who_with_whom() -> None:
    (node,), _ = Network(6, {3: 0.5}).judged()
    assert node.why.startswith("node-3 ") and "with each partner: node-2 and node-" in node.why
    (link,), _ = Network(6, {(2, 3): 0.5}).judged()
    assert (
        link.why.startswith("The link of node-2 and node-3 ") and link.name == "the link of node-2 and node-3"
    )
