"""A check as people read it: the command, the session that it is stored in, and a finding."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from sessions import Rank, Relay, aggregation

from traceml_ray.cli import main
from traceml_ray.document.text import page
from traceml_ray.reports.answers import Answers
from traceml_ray.settings import Settings
from traceml_ray.signals.check import coordinator
from traceml_ray.signals.check.conclusion import concluded
from traceml_ray.signals.check.coordinator import Outcome
from traceml_ray.signals.check.judge import judged
from traceml_ray.signals.check.nodes import LocalNode
from traceml_ray.signals.check.records import Checked, Measure
from traceml_ray.signals.check.tasks import Collect, Describe, NodeUse, Task, TaskReply
from traceml_ray.signals.check.view import CheckView, GetCheck, blocks, headline, one_per_node
from traceml_ray.store import query


def gpus(node: str, *levels: float, rank: int | None = None, t_ns: int = 5) -> Checked:
    """A check of a node whose GPUs have these levels, 1 is usual."""
    trials = 1.0, 1.002, 0.998, 1.001, 0.999, 1.0
    measures = [
        Measure(
            "gpu_matmul", f"GPU {gpu}", "FLOP/s", [7e14 * level * one for one in trials], "H200", device=gpu
        )
        for gpu, level in enumerate(levels)
    ]
    return Checked(t_ns, node, rank=rank, measures=measures, seconds=20.0)


def test_what_is_slow_is_said_first_and_at_the_top_of_the_table() -> None:
    result = judged([gpus("node-0", 1, 1, 1, 1), gpus("node-1", 1, 0.86, 1, 1)])
    assert headline(result) == "2 nodes checked in 20 s: GPU 1 of node-1 is slower than peers."
    written = page(blocks(result))
    text = " ".join(written.split())
    assert "GPU 1 of node-1 multiplies matrices 14 % slower than its 7 peers (602 TFLOP/s, usual 700" in text
    first = written[written.index("Measured by the check") :].splitlines()[2]
    assert " ".join(first.split()) == "node-1 GPU 1 matmul 602 TFLOP/s 700 TFLOP/s −14 % 0.2 % slow"


def test_healthy_nodes_say_what_would_have_been_named() -> None:
    result = judged([gpus("node-0", 1, 1), gpus("node-1", 1, 1)])
    assert "nothing is slower than its peers" in headline(result)
    assert "Differences are named from 7" in headline(result)
    assert "nothing could be compared" in headline(judged([gpus("node-0", 1)]))
    assert headline(judged([Checked(1, "node-0")])) == "Nothing was measured on 1 node."


def test_many_subjects_are_cut_to_the_lowest() -> None:
    result = judged([gpus(f"node-{number}", *[1.0] * 8) for number in range(16)])
    assert "(the 40 lowest of 128)" in page(blocks(result))


def test_nodes_that_are_silent_or_in_use_are_said() -> None:
    outcome = Outcome(
        checks=[gpus("node-0", 1, 1)],
        silent={"node-1": "it did not answer in time"},
        in_use={"node-2": "8 of 8 CPUs"},
    )
    result = concluded(outcome)
    assert result.nodes == 2
    assert result.errors == ["node-1 gave no result: it did not answer in time."]
    assert result.unsure[0].startswith("node-2: 8 of 8 CPUs. Only what is not in use was measured")


def test_ranks_of_one_node_measure_its_cpu_once() -> None:
    measure = Measure("cpu_matmul", "CPU", "FLOP/s", [1.0])
    both = [Checked(1, "node-0", rank=rank, measures=[measure]) for rank in (1, 0)]
    kept = one_per_node(both)
    assert [(one.rank, len(one.measures)) for one in kept] == [(0, 1), (1, 0)]


_NODE = "host-0 (10.0.0.2)"
"""What the session calls the second of two nodes with one host name; the check may call it otherwise."""


def test_a_check_is_stored_with_its_ranks_and_judged_in_the_session(tmp_path: Path) -> None:
    aggregator = aggregation(tmp_path)
    for number in range(2):
        relay, ranks = Relay(number), [Rank(2 * number + local, 4) for local in range(2)]
        for rank in ranks:
            old = gpus(f"node-{number}", 0.5, t_ns=1)
            level = 0.8 if rank.identity.global_rank == 2 else 1.0
            newest = gpus(f"node-{number}", level, rank=rank.identity.global_rank)
            renamed = [
                msgspec.structs.replace(one, subject=f"GPU {rank.identity.global_rank}")
                for one in newest.measures
            ]
            check = msgspec.structs.replace(newest, measures=renamed, number=1)
            aggregator.ingest(relay.message(rank.batch(10, check=[old, check])))
    aggregator.commit()
    live = query.ask_one(aggregator.query, GetCheck())
    stored = Answers(tmp_path, Settings().thresholds).answer(GetCheck())
    assert live == stored
    assert [(slow.rank, slow.part, slow.nodes) for slow in stored.slow] == [(2, "GPU 2", [_NODE])]
    (finding,) = [one for one in query.ask_one(aggregator.query, query.Findings()) if one.signal == "check"]
    assert (finding.label, finding.ranks, finding.device) == ("slow_device", (2,), 0)
    view = CheckView()
    assert view.of_block(msgspec.to_builtins(view.block(stored))) == stored
    assert view.of_block(None).levels == [] and view.sections(view.of_block(None)) == ()
    (section,) = view.sections(stored)
    assert section.gauges[0].series[0][0] == (_NODE, "GPU 2", "gpu_matmul")


class PlayedNode(LocalNode):
    """A machine with GPUs."""

    levels = 1.0, 1.0, 0.7

    def ask(self, task: Task, limit_s: float) -> TaskReply:
        if isinstance(task, Describe):
            return TaskReply(machine=NodeUse("here", "boot", 2, busy_cores=0.0, gpus=3, free_gpus=(0, 1, 2)))
        return TaskReply(checked=gpus("here", *self.levels) if isinstance(task, Collect) else None)


@pytest.mark.parametrize(("levels", "code"), [((1.0, 1.0, 0.7), 3), ((1.0, 1.0, 1.0), 0), ((), 1)])
def test_command_exits_with_3_if_something_is_slow(
    levels: tuple[float, ...], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PlayedNode, "levels", levels)
    monkeypatch.setattr("traceml_ray.signals.check.nodes.LocalNode", PlayedNode)
    assert main(["check", "--seconds", "2", "--json"]) == code
    printed = json.loads(capsys.readouterr().out)
    assert [slow["part"] for slow in printed["slow"]] == (["GPU 2"] if code == 3 else [])
    assert main(["check", "--seconds", "2"]) == code
    assert ("GPU 2 of this machine multiplies matrices 30 % slower" in capsys.readouterr().out) == (code == 3)
    assert coordinator.TRIALS >= 6


@pytest.mark.parametrize("given", ["0", "nan", "x", "1e9"])
def test_seconds_that_are_no_time_are_bad_input(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["check", "--seconds", given])
    assert "no number from 2 to 3600" in capsys.readouterr().err
