"""A straggler beside a check of its node: confirmed, not confirmed, or nothing said."""

from __future__ import annotations

from typing import Any

import pytest

from traceml_ray.signals.check.confirm import explained, not_confirmed
from traceml_ray.signals.check.judge import CheckResult, Level, Slow
from traceml_ray.signals.finding import Finding

RANKS = {"node-0": [0, 1], "node-1": [2, 3], "node-2": [4, 5, 6]}


def straggler(*ranks: int, label: str = "straggler") -> Finding:
    nodes = tuple(node for node, users in RANKS.items() if set(users) & set(ranks))
    key = f"{label}:{ranks}"
    return Finding(key=key, signal="steps", label=label, severity="warning", ranks=ranks, nodes=nodes)


def slow(**more: Any) -> Slow:
    given = {"what": "node", "nodes": ["node-1"], "part": "CPU", "probe": "cpu_matmul", "lower": 0.3}
    return Slow(**{**given, "value": 7.0, "usual": 10.0, "unit": "FLOP/s", "peers": 3, **more})


def level(node: str, probe: str = "cpu_matmul", state: Any = "alike") -> Level:
    return Level(node=node, subject="CPU", probe=probe, unit="FLOP/s", value=1.0, state=state)


ALIKE = CheckResult(levels=[level("node-0"), level("node-1"), level("node-1", "host_memory")])


@pytest.mark.parametrize(
    ("one", "ranks", "explains"),
    [
        (slow(), (2, 3), True),
        (slow(), (3,), True),
        (slow(nodes=["node-2"]), (5,), False),
        (slow(nodes=["node-0"]), (3,), False),
        (slow(what="link", nodes=["node-0", "node-1"], probe="all_reduce"), (3,), True),
        (slow(what="device", part="GPU 1", device=1, probe="gpu_matmul"), (3,), True),
        (slow(what="device", part="GPU 0", device=0, probe="gpu_matmul"), (3,), False),
        (slow(nodes=["elsewhere"]), (3,), False),
    ],
)
def test_slow_part_explains_a_straggler_that_uses_it(
    one: Slow, ranks: tuple[int, ...], explains: bool
) -> None:
    step = straggler(*ranks)
    assert explained(one, [step], RANKS) is (step if explains else None)
    beside = not_confirmed(CheckResult(slow=[one], levels=ALIKE.levels, ranks=RANKS), [step])
    assert not ({*one.nodes} & {*step.nodes} and [*beside]), (
        "a node with a slow part is not as fast as others"
    )


def test_straggler_on_a_node_that_is_as_fast_as_others_is_not_confirmed() -> None:
    (finding,) = not_confirmed(ALIKE, [straggler(3)])
    assert (finding.label, finding.severity, finding.nodes, finding.ranks) == (
        "node_alike",
        "info",
        ("node-1",),
        (3,),
    )
    assert finding.why == (
        "Not confirmed: a check measured node-1 as fast as other nodes "
        "(matrix multiplication, all cores; memory of the host)."
    )
    assert finding.next.startswith("Look at what rank 3 does: its data")
    assert finding.explains == "straggler:(3,)"


@pytest.mark.parametrize(
    "levels",
    [
        [],
        [level("node-0")],
        [level("node-0"), level("node-1", state="unsure")],
        [level("node-0"), level("node-1", state="no peers")],
        [level("node-0", "disk_read"), level("node-1", "disk_read")],
    ],
)
def test_without_a_sure_comparison_nothing_is_said(levels: list[Level]) -> None:
    assert [*not_confirmed(CheckResult(levels=levels), [straggler(3)])] == []


def test_only_stragglers_are_confirmed() -> None:
    for step in (straggler(3, label="hang"), straggler(label="imbalance")):
        assert [*not_confirmed(ALIKE, [step])] == []
        assert explained(slow(), [step]) is None


def test_ranks_of_several_nodes_need_all_of_them_to_be_alike() -> None:
    (finding,) = not_confirmed(ALIKE, [straggler(0, 3)])
    assert finding.nodes == ("node-0", "node-1") and "do: their data" in finding.next
    half = CheckResult(levels=[level("node-0"), level("node-1", state="unsure")])
    assert [*not_confirmed(half, [straggler(0, 3)])] == []
