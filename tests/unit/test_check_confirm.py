"""A straggler and a check of its node: confirmed, not confirmed, or nothing said."""

from __future__ import annotations

from typing import Any

import pytest

from traceml_ray.analysis.labels import Label
from traceml_ray.analysis.uneven_work import Reason
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.signals.check.confirm import confirmed, explained
from traceml_ray.signals.check.judge import CheckResult, Level, Slow
from traceml_ray.signals.finding import of_verdict

RANKS = {"node-0": [0, 1], "node-1": [2, 3], "node-2": [4, 5, 6]}


def straggler(*ranks: int, label: Label = "straggler", **more: Any) -> Verdict:
    nodes = tuple(node for node, users in RANKS.items() if set(users) & set(ranks))
    usual = {"stages": ("forward",), "why": "It is late.", "next": "Look at the inputs."}
    return Verdict(label=label, rank=min(ranks, default=None), ranks=ranks, nodes=nodes, **{**usual, **more})


def slow(**more: Any) -> Slow:
    given = {"what": "node", "nodes": ["node-1"], "part": "CPU", "probe": "cpu_matmul", "lower": 0.3}
    return Slow(**{**given, "value": 7.0, "usual": 10.0, "unit": "FLOP/s", "peers": 3, **more})


XEON, EPYC = {"like": "Xeon, 8 cores"}, {"like": "EPYC, 8 cores"}


def level(node: str, probe: str = "cpu_matmul", state: Any = "alike", **more: Any) -> Level:
    usual = {"subject": "CPU", "unit": "FLOP/s", "value": 1.0}
    return Level(node=node, probe=probe, state=state, **{**usual, **more})


ALIKE = CheckResult(levels=[level("node-0"), level("node-1"), level("node-1", "host_memory")])
SLOW = {"why": "It multiplies 14 % slower.", "next": "Replace it."}


@pytest.mark.parametrize(
    ("one", "ranks", "stage", "explains"),
    [
        (slow(), (2, 3), "forward", True),
        (slow(), (3,), "data", True),
        (slow(rank=2), (2, 3), "forward", True),
        (slow(rank=2), (3,), "forward", True),
        (slow(nodes=["node-2"]), (5,), "forward", False),
        (slow(nodes=["node-0"]), (3,), "forward", False),
        (slow(what="link", nodes=["node-0", "node-1"], probe="all_reduce"), (3,), "forward", True),
        (slow(what="device", part="GPU 1", device=1, probe="gpu_matmul"), (3,), "backward", True),
        (slow(what="device", part="GPU 1", device=1, probe="gpu_matmul"), (3,), "data", False),
        (slow(what="device", part="GPU 0", device=0, probe="gpu_matmul"), (3,), "forward", False),
        (slow(what="disk", part="/data", probe="disk_read"), (3,), "data", True),
        (slow(what="disk", part="/data", probe="disk_read"), (3,), "forward", False),
        (slow(nodes=["elsewhere"]), (3,), "forward", False),
    ],
)
def test_slow_part_explains_a_straggler_that_uses_it(
    one: Slow, ranks: tuple[int, ...], stage: str, explains: bool
) -> None:
    verdict = straggler(*ranks, stages=(stage,))
    (finding,) = steps = of_verdict(verdict)
    assert explained(one, steps, RANKS) is (finding if explains else None)
    answer = confirmed(verdict, CheckResult(slow=[one], levels=ALIKE.levels, ranks=RANKS))
    theirs = bool({*one.nodes} & {*verdict.nodes})
    assert answer.confirmed is (True if explains else None if theirs else answer.confirmed)
    assert not (theirs and answer.confirmed is False), "a node with a slow part is not as fast as others"


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        ("check", "a check before training"),
        ("restart", "a check at the restart"),
        ("during", "a check during training"),
        ("", "a check"),
        ("of a newer version", "a check"),
    ],
)
def test_verdict_says_that_the_machine_is_slow_and_what_to_do(kind: str, check: str) -> None:
    result = CheckResult(slow=[slow(**SLOW)], levels=[level("node-1", state="slow")], ranks=RANKS, kind=kind)
    answer = confirmed(straggler(2, 3), result)
    assert answer.confirmed is True and answer.next == "Replace it."
    assert answer.why == f"It is late. Confirmed by {check}: It multiplies 14 % slower."


def test_verdict_on_a_node_that_is_as_fast_as_others_says_so() -> None:
    answer = confirmed(straggler(3), ALIKE)
    assert answer.confirmed is False
    assert answer.why == (
        "It is late. Not confirmed by a check: node-1 is as fast as other nodes "
        "(matrix multiplication, all cores; memory of the host)."
    )
    assert answer.next.startswith("Look at what rank 3 does differently: its data")


@pytest.mark.parametrize(
    "given",
    [
        {"span": "checkpoint"},
        {"reason": Reason(what="tokens", times=2.0, share=0.9)},
        {"stages": ("data",)},
    ],
)
def test_advice_that_is_specific_or_about_what_was_not_compared_stays(given: dict[str, Any]) -> None:
    answer = confirmed(straggler(3, **given), ALIKE)
    assert answer.confirmed is False and answer.next == "Look at the inputs."
    with_disk = CheckResult(levels=[*ALIKE.levels, level("node-1", "disk_read")])
    general = "stages" in given
    assert confirmed(straggler(3, **given), with_disk).next.startswith("Look at what rank 3") is general


@pytest.mark.parametrize(
    "levels",
    [
        [],
        [level("node-0")],
        [level("node-0"), level("node-1", state="unsure")],
        [level("node-0"), level("node-1", state="no peers")],
        [level("node-0", "disk_read"), level("node-1", "disk_read")],
        [level("node-1"), level("node-1", state="unsure")],
        [level("node-1", "core_matmul"), level("node-1", state="unsure")],
        [level("node-1"), level("node-1", "gpu_matmul", device=1, state="unsure")],
        [level("node-1"), level("node-1", "to_host", device=1)],
        [level("node-1", "ready_time"), level("node-1", "unstolen")],
        [level("node-1", "idle_matmul"), level("node-1", "ready_time", state="unsure")],
    ],
)
def test_without_a_sure_comparison_nothing_is_said(levels: list[Level]) -> None:
    verdict = straggler(3)
    assert confirmed(verdict, CheckResult(levels=levels)) is verdict


def test_only_stragglers_are_confirmed() -> None:
    for verdict in (straggler(3, label="hang"), straggler(label="imbalance"), straggler(3, label="watching")):
        assert confirmed(verdict, ALIKE) is verdict
        assert confirmed(verdict, CheckResult(slow=[slow()])) is verdict
        assert explained(slow(), of_verdict(verdict)) is None


def test_ranks_of_several_nodes_need_all_of_them_to_be_alike() -> None:
    answer = confirmed(straggler(0, 3), ALIKE)
    assert (
        "node-0 and node-1 are as fast as other nodes" in answer.why
        and "do differently: their data" in answer.next
    )
    half = CheckResult(levels=[level("node-0"), level("node-1", state="unsure")])
    assert confirmed(straggler(0, 3), half).confirmed is None


def test_other_causes_are_confirmed_too() -> None:
    verdict = straggler(label="imbalance", also=(straggler(3), straggler(0)))
    answer = confirmed(verdict, CheckResult(slow=[slow(**SLOW)], levels=ALIKE.levels, ranks=RANKS))
    assert (answer.label, answer.confirmed, answer.why) == ("imbalance", None, verdict.why)
    assert [one.confirmed for one in answer.also] == [True, False]


@pytest.mark.parametrize("state", ["alike", "no peers"])
def test_node_that_is_as_fast_as_those_of_its_older_model_is_not_as_fast_as_others(state: Any) -> None:
    """In a mixed cluster all ranks on old machines are late, and these are as fast as each other."""
    levels = [
        level("node-0", value=2.0, **EPYC),
        level("node-1", state=state, value=1.0, **XEON),
        level("node-2", state=state, value=1.0, **XEON),
    ]
    answer = confirmed(straggler(2, 3), CheckResult(levels=levels, kind="during"))
    assert answer.confirmed is None
    assert answer.why == (
        "It is late. A check during training compares only equal hardware: node-1 has Xeon, 8 cores; "
        "node-0 has EPYC, 8 cores. node-1 multiplies matrices 50 % slower."
    )
    assert answer.next.startswith("Train on nodes with the same hardware")


def test_node_of_a_faster_model_is_as_fast_as_those_of_its_model() -> None:
    levels = [level("node-0", **EPYC), level("node-1", value=2.0, **XEON), level("node-2", value=2.0, **XEON)]
    assert confirmed(straggler(2, 3), CheckResult(levels=levels)).confirmed is False


def test_nodes_with_the_same_two_kinds_of_cores_are_the_same_hardware() -> None:
    """For example a NUMA node with eight cores, and one with six."""
    levels = [
        level(node, "core_matmul", subject=subject, value=value, like=like)
        for node in ("node-0", "node-1", "node-2")
        for subject, value, like in (
            ("cores 0-7", 4.0, "Xeon, 8 cores"),
            ("cores 8-13", 3.0, "Xeon, 6 cores"),
        )
    ]
    assert confirmed(straggler(2, 3), CheckResult(levels=levels)).confirmed is False


def test_clocks_of_other_models_of_gpu_are_not_compared() -> None:
    gpus = [
        level(node, "gpu_clock", device=0, like=like)
        for node, like in (("node-0", "H100"), ("node-1", "A100"), ("node-2", "A100"))
    ]
    answer = confirmed(straggler(2, 3), CheckResult(levels=gpus))
    assert answer.confirmed is None and "node-1 has A100; node-0 has H100." in answer.why


def test_slow_part_of_a_node_of_another_model_is_the_reason() -> None:
    levels = [level("node-0", value=2.0, **EPYC), level("node-2", **XEON)]
    levels.append(level("node-1", state="slow", **XEON))
    answer = confirmed(straggler(2, 3), CheckResult(slow=[slow(**SLOW)], levels=levels, ranks=RANKS))
    assert answer.confirmed is True and "equal hardware" not in answer.why
