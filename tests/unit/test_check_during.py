"""A check during training: what is read, what it says, and what it leaves open."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from played import Played
from sessions import LIMITS

from traceml_ray.monitor import straggler_watch
from traceml_ray.reports.summary import summarize
from traceml_ray.settings import Settings
from traceml_ray.signals.check import wanted
from traceml_ray.signals.check.judge import CheckResult, judged
from traceml_ray.signals.check.judge_during import judged_during, newest_set, together
from traceml_ray.signals.check.records import COMMAND, DURING, Checked, MachineState, Measure
from traceml_ray.signals.check.view import headline
from traceml_ray.signals.check.wanted import (
    CoreTimes,
    CpuCounters,
    RankThreads,
    between,
    core_times,
)
from traceml_ray.signals.nodes.records import GpuSample
from traceml_ray.stages import FORWARD
from traceml_ray.store import query
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import encode_part

NOISE = 1.0, 1.004, 0.997, 1.002, 0.999, 1.001, 0.998, 1.003, 1.0, 0.996
QUOTA = MachineState(cores=2, quota_cores=1.2, throttled_ns=4_000_000_000, throttled_periods=90)


def shares(level: float) -> list[float]:
    return [min(1.0, level * one) for one in NOISE]


def checked(number: int, *got: float, host: str | None = None, **more: Any) -> Checked:
    """A check of a node whose ranks get these shares of the CPU time that they want."""
    idle, others = more.pop("idle", 1.0), more.pop("others", 0.1)
    clocks = more.pop("clocks", ())
    ranks = [len(got) * number + place for place in range(len(got))]
    measures = [
        Measure("ready_time", f"rank {rank}", "share", shares(share), "ranks", rank=rank)
        for rank, share in zip(ranks, got, strict=True)
    ]
    measures.append(Measure("unstolen", "CPU", "share", shares(more.pop("unstolen", 1.0)), "cores"))
    flops = [1e11 * idle * one for one in NOISE]
    measures.append(Measure("idle_matmul", "CPU", "FLOP/s", flops, "EPYC", [others] * len(NOISE)))
    measures += [
        Measure("gpu_clock", f"GPU {gpu}", "Hz", [mhz * 1e6 * one for one in NOISE], "H200", device=gpu)
        for gpu, mhz in enumerate(clocks)
    ]
    given = {"t_ns": 50, "host": host or f"boot-{number}", "seconds": 20.0, "kind": DURING, "about": 1}
    return Checked(node=f"node-{number}", measures=measures, **{**given, **more})  # type: ignore[arg-type]


def named(result: CheckResult) -> list[tuple[str, str, int | None]]:
    return [(one.nodes[0], one.part, one.rank) for one in result.slow]


def states(result: CheckResult, node: str) -> dict[str, str]:
    return {row.probe: row.state for row in result.levels if row.node == node}


def test_node_that_a_quota_holds_back_is_named_with_the_quota_as_cause() -> None:
    nodes = [checked(0, 0.99, 0.98), checked(1, 0.6, 0.62, state=QUOTA), checked(2, 0.99, 0.99)]
    result = judged_during(nodes, "node-1")
    assert named(result) == [("node-1", "CPU", None)]
    (slow,) = result.slow
    assert (
        slow.why.startswith("The CPU of node-1 gets 3") and "less of the CPU time that it wants" in slow.why
    )
    assert "The CPU quota of its container allows 1.2 of 2 cores." in slow.why
    assert result.kind == DURING
    assert (
        headline(result) == "3 nodes checked during training in 20 s: the CPU of node-1 is slower than peers."
    )


def test_one_rank_whose_cores_others_use_is_named() -> None:
    state = MachineState(cores=8, others_cores=3.0)
    nodes = [checked(0, 0.99, 0.5, state=state), checked(1, 0.99, 0.98), checked(2, 0.99, 0.99)]
    result = judged_during(nodes, "node-0")
    assert named(result) == [("node-0", "rank 1", 1)]
    assert "Processes of no rank kept 3.0 of 8 cores busy." in result.slow[0].why


def test_rank_that_wants_more_than_there_is_is_not_the_machine() -> None:
    nodes = [
        checked(0, 0.5, state=MachineState(cores=8, others_cores=0.1)),
        checked(1, 0.99),
        checked(2, 0.99),
    ]
    result = judged_during(nodes, "node-0")
    assert result.slow == [] and states(result, "node-0")["ready_time"] == "unsure"
    assert any("nothing on the node says why: its processes may want more" in one for one in result.unsure)


def test_what_the_peers_have_as_well_is_no_reason() -> None:
    quota = [checked(number, 0.5 if number == 1 else 0.95, state=QUOTA) for number in range(3)]
    result = judged_during(quota, "node-1")
    assert result.slow == [] and states(result, "node-1")["ready_time"] == "unsure"
    assert any("a CPU quota allows 1.2 of 2 cores; it withheld " in note for note in result.notes)
    busy = MachineState(cores=8, others_cores=3.0)
    others = [checked(number, 0.5 if number == 1 else 0.95, state=busy) for number in range(3)]
    assert judged_during(others, "node-1").slow == []


def test_trials_that_vary_too_much_say_nothing() -> None:
    nodes = [checked(number, 0.4) for number in range(3)]
    rng = np.random.default_rng(0)
    for node in nodes:
        node.measures[0].values[:] = (0.35 * np.exp(rng.normal(0, 0.25, 10))).tolist()
    result = judged_during(nodes, "node-1")
    assert result.slow == [] and states(result, "node-1")["ready_time"] == "unsure"
    assert any(one.startswith("CPU time that the ranks get") for one in result.unsure)


def test_time_that_the_hypervisor_takes_is_named() -> None:
    nodes = [
        checked(0, 0.99, unstolen=0.7, state=MachineState(steal=0.2)),
        checked(1, 0.99),
        checked(2, 0.99),
    ]
    result = judged_during(nodes, "node-0")
    assert named(result) == [("node-0", "CPU", None)]
    assert "The hypervisor gave 20 % of its CPU time to other machines." in result.slow[0].why


def test_slow_core_is_named_only_if_the_job_left_it_idle() -> None:
    def check(others: float) -> CheckResult:
        nodes = [checked(0, 0.99, idle=0.7, others=others), checked(1, 0.99), checked(2, 0.99)]
        return judged_during(nodes, "node-0")

    assert named(check(0.1)) == [("node-0", "CPU", None)]
    for others in (0.4, 0.8):
        assert check(others).slow == [] and states(check(others), "node-0")["idle_matmul"] == "unsure"


@pytest.mark.parametrize(
    ("reasons", "slow"),
    [
        (["hw_thermal_slowdown"], True),
        (["hw_slowdown", "sw_power_cap"], True),
        (["sw_power_cap"], False),
        ([], False),
    ],
)
def test_low_clock_of_a_gpu_is_named_only_for_a_reason_that_the_load_does_not_explain(
    reasons: list[str], slow: bool
) -> None:
    hot = GpuSample(0, "H200", 99.0, None, None, sm_mhz=1500.0, sm_max_mhz=1980.0, throttle=reasons)
    nodes = [
        checked(0, 0.99, clocks=(1500, 1980), state=MachineState(gpus=[hot])),
        checked(1, 0.99, clocks=(1980, 1975)),
        checked(2, 0.99, clocks=(1980, 1980)),
    ]
    result = judged_during(nodes, "node-0")
    assert named(result) == ([("node-0", "GPU 0", None)] if slow else [])
    if slow:
        assert "runs at a 24 % lower clock than its 5 peers (1,500 MHz, usual 1,980 MHz" in result.slow[0].why
    else:
        assert any("a heavier load explains it as well" in one for one in result.unsure)
    assert "The GPUs are in use: only their clocks and reasons for throttling were compared." in result.notes


def test_healthy_nodes_are_alike_and_what_was_not_measured_is_said() -> None:
    result = judged_during([checked(number, 0.97, 0.98) for number in range(4)], "node-2")
    assert result.slow == [] and set(states(result, "node-2").values()) == {"alike"}
    assert "Memory, disk and network were not measured, because the job uses them." in result.notes


def test_nodes_of_one_machine_are_no_peers() -> None:
    one_machine = [checked(number, 0.6 if number else 0.99, host="boot", state=QUOTA) for number in range(3)]
    result = judged_during(one_machine, "node-1")
    assert {row.node for row in result.levels} == {"node-1"} and result.slow == []
    assert result.unsure == ["There is no other machine that node-1 can be compared with."]
    with_another = judged_during([*one_machine, checked(3, 0.99), checked(4, 0.99)], "node-1")
    assert named(with_another) == [("node-1", "CPU", 1)]
    assert {row.node for row in with_another.levels} == {"node-1", "node-3", "node-4"}


def test_single_node_says_that_there_is_no_peer() -> None:
    result = judged_during([checked(0, 0.97, 0.98)], "node-0")
    assert result.unsure == ["There is no other machine that node-0 can be compared with."]
    assert {row.state for row in result.levels} == {"no peers"}


def test_trials_that_are_missing_are_no_measure() -> None:
    nodes = [checked(0, 0.99), checked(1, 0.99)]
    nodes[0].measures[0].values.clear()
    result = judged_during(nodes, "node-0")
    assert states(result, "node-0")["ready_time"] == "unsure"


def test_only_checks_of_the_newest_moment_belong_together() -> None:
    older = [checked(number, 0.99, t_ns=50) for number in range(3)]
    newer = [checked(number, 0.99, t_ns=700_000_000_000 + number) for number in range(2)]
    before = Checked(800_000_000_000, "node-0")
    assert newest_set([*older, *newer, before]) == newer
    assert newest_set([before]) == []


def test_checks_before_and_during_training_are_one_answer() -> None:
    memory = [Measure("host_memory", "memory", "B/s", [2e10 * level] * 10, "EPYC") for level in (1, 1, 0.5)]
    full = judged([Checked(1, f"node-{number}", measures=[one]) for number, one in enumerate(memory)])
    during = judged_during([checked(0, 0.99), checked(1, 0.6, state=QUOTA), checked(2, 0.99)], "node-1")
    both = together(full, during)
    assert [one[:2] for one in named(both)] == [("node-2", "memory"), ("node-1", "CPU")]
    assert len(both.levels) == len(full.levels) + len(during.levels) and both.kind == ""
    assert together(full, CheckResult()) is full and together(CheckResult(), during) is during


# -- readings of the kernel ------------------------------------------------------------------------


def test_share_of_wanted_time_is_that_of_threads_that_were_seen_twice() -> None:
    second = 1_000_000_000
    before = CpuCounters({3: {1: (0, 0), 2: (5, 5)}, 4: {9: (0, 0)}}, CoreTimes(10.0, 1.0))
    after = CpuCounters(
        {3: {1: (second, second), 2: (second + 5, 5), 7: (50 * second, 9)}, 4: {9: (1000, 0)}},
        CoreTimes(14.0, 2.0),
    )
    answer = between(before, after, 2.0)
    assert answer.got == {3: pytest.approx(2 / 3)}, "rank 4 wanted too little to say"
    assert answer.unstolen == pytest.approx(0.8)
    assert answer.others_s == pytest.approx(2.0, abs=1e-3)


def test_threads_are_bounded_in_all_and_those_that_are_left_out_are_no_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends a check that reads more than it has CPU time for."""
    monkeypatch.setattr(wanted, "_MOST_THREADS", 6)
    for rank in range(3):
        for thread in range(4):
            task = tmp_path / f"proc/{rank + 1}/task/{thread}"
            task.mkdir(parents=True)
            (task / "schedstat").write_text("5 5 1")
    reading = RankThreads({rank: rank + 1 for rank in range(3)}, tmp_path).read()
    assert [len(threads) for threads in reading.ranks.values()] == [2, 2, 2] and not reading.complete
    later = CpuCounters(reading.ranks, CoreTimes(9.0, 0.0))
    reading.cores = CoreTimes(1.0, 0.0)
    assert between(reading, later, 2.0).others_s is None


def test_what_is_not_known_is_none() -> None:
    answer = between(CpuCounters({0: {}}), CpuCounters({0: {}}), 2.0)
    assert (answer.got, answer.unstolen, answer.others_s) == ({}, None, None)


def test_threads_of_ranks_and_their_children_are_read(tmp_path: Path) -> None:
    def process(pid: int, parent: int, threads: dict[int, str]) -> None:
        folder = tmp_path / "proc" / str(pid)
        (folder / "task").mkdir(parents=True)
        (folder / "stat").write_text(f"{pid} (a ) b) S {parent} 1 1")
        for thread, counted in threads.items():
            (folder / "task" / str(thread)).mkdir()
            (folder / "task" / str(thread) / "schedstat").write_text(counted)

    process(10, 1, {10: "100 20 3", 11: "5 0 1"})
    process(20, 10, {20: "7 8 1"})
    process(30, 20, {30: "1 1 1"})
    process(40, 1, {40: "9 9 9"})
    (tmp_path / "proc" / "stat").write_text("cpu  9\ncpu0 100 0 50 800 0 0 0 50 0 0\ncpu1 1 2 3\n")
    ranks = RankThreads({0: 10, 1: 99}, tmp_path)
    ranks.cores = [0]
    ranks.look_for_children()
    reading = ranks.read()
    assert reading.ranks == {0: {10: (100, 20), 11: (5, 0), 20: (7, 8), 30: (1, 1)}, 1: {}}
    assert reading.cores == CoreTimes(1.5, 0.5)
    assert core_times([1], tmp_path) is None


def test_threads_of_this_process_are_read() -> None:
    reading = RankThreads({0: os.getpid()}).read()
    assert reading.ranks[0].keys() >= {threading.get_native_id()} or not reading.ranks[0]


# -- from the verdict to the answer ----------------------------------------------------------------


def test_straggler_that_lasts_is_confirmed_by_what_the_relays_of_the_nodes_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(straggler_watch, "LASTS_S", 4.0)
    job = Played(tmp_path, late=5, stage=FORWARD, onset=10, gpus=0)
    job.aggregator._stragglers.settings = Settings(confirm=DURING)
    for _ in range(16):
        job.play()
    orders = {}
    for node, relay in enumerate(job.relays):
        reply = codec.decode(job.aggregator.ingest(relay.message()), wire.RelayReply)
        (orders[node],) = [command for command in reply.commands if command.name == COMMAND]
        ranks = {
            int(rank): name for rank, _, name in map(_split, str(orders[node].args["processes"]).split())
        }
        assert ranks == {rank: job.ranks[rank].process_id for rank in range(4 * node, 4 * node + 4)}
        got, others = (
            (0.99, 0.6 if node else 0.98, 0.99, 0.97),
            MachineState(cores=8, others_cores=4.0 * node),
        )
        record = checked(node, *got, t_ns=job.clock.now, about=5, state=others)
        answer = {ranks[4 * node]: {"check": [encode_part(record)]}}
        job.aggregator.ingest(relay.message(of_ranks=answer))
    assert orders[0].args["begin_ns"] == orders[1].args["begin_ns"]
    for _ in range(4):
        job.play()
    live = query.ask_one(job.aggregator.query, query.GetVerdict())
    assert live is not None and live.ranks == [5] and live.confirmed
    assert "Confirmed by a check during training: Rank 5 of host-1 gets 39 % less" in live.why
    job.aggregator.commit()
    with SessionFile(tmp_path / "session.sqlite") as file:
        summary = summarize(file, LIMITS)
    assert summary.verdict is not None and summary.verdict.confirmed
    assert not job.aggregator.errors


def _split(word: str) -> tuple[str, str, str]:
    return word.partition(":")
