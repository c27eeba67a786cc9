"""A check: what is named as slower than its peers, and what is not."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traceml_ray.signals.check.judge import LIMITS, CheckResult, Level, judged, logarithm
from traceml_ray.signals.check.peers import compare, trials_of
from traceml_ray.signals.check.records import Checked, MachineState, Measure
from traceml_ray.signals.nodes.records import GpuSample

TRIALS = 10
USUAL = {"FLOP/s": 200e9, "B/s": 30e9}


def measure(
    probe: str, subject: str, level: float = 1.0, *, noise: float = 0.01, seed: int = 0, **more: Any
) -> Measure:
    """Trials around a level, 1 is usual."""
    unit = "FLOP/s" if probe.endswith("matmul") else "B/s"
    rng = np.random.default_rng(zlib.crc32(f"{probe} {subject} {seed}".encode()))
    values = USUAL[unit] * level * np.exp(rng.normal(0, noise, TRIALS))
    return Measure(probe, subject, unit, values.tolist(), **{"like": "EPYC", **more})


def node(number: int, *measures: Measure, **more: Any) -> Checked:
    return Checked(0, f"node-{number}", measures=list(measures), seconds=20.0, **more)


def cpus(levels: Sequence[float], **more: Any) -> CheckResult:
    """A check of nodes whose CPUs have these levels."""
    return judged([node(n, measure("cpu_matmul", "CPU", x, seed=n, **more)) for n, x in enumerate(levels)])


def named(result: CheckResult) -> list[tuple[str, str]]:
    return [(slow.nodes[0], slow.part) for slow in result.slow]


@pytest.mark.parametrize("nodes", [2, 3, 4, 8, 1024])
@pytest.mark.parametrize("level", [0.6, 0.84])
def test_a_slow_node_is_named_among_any_number_of_peers(nodes: int, level: float) -> None:
    result = cpus([1.0] * (nodes - 1) + [level])
    assert named(result) == [(f"node-{nodes - 1}", "CPU")]
    slow = result.slow[0]
    assert slow.lower == pytest.approx(1 - level, abs=0.02)
    assert slow.peers == nodes - 1
    assert slow.confidence == ("medium" if nodes == 2 else "high")


def test_a_difference_that_nobody_fixes_is_not_named() -> None:
    result = cpus([1.0] * 7 + [0.94])
    assert result.slow == [] and result.unsure == []
    assert {row.state for row in result.levels} == {"alike"}


def test_healthy_disks_of_virtual_machines_may_differ_by_a_factor_of_two() -> None:
    def disks(*levels: float) -> CheckResult:
        return judged([node(n, measure("disk_read", "/data", x, seed=n)) for n, x in enumerate(levels)])

    assert disks(2.42, 2.42, 1.11, 1.11).slow == []  # four files of one healthy disk
    assert named(disks(2.42, 1.11, 1.2, 0.02)) == [("node-3", "/data")]


def test_one_machine_alone_says_that_it_has_no_peers() -> None:
    result = cpus([1.0])
    assert result.slow == []
    assert "nothing like it was measured elsewhere" in result.unsure[0]


def test_half_of_the_nodes_are_named_if_the_other_half_is_fast() -> None:
    assert {name for name, _ in named(cpus([1.0, 0.7, 1.0, 0.7]))} == {"node-1", "node-3"}


def test_several_slow_nodes_do_not_hide_each_other() -> None:
    assert {name for name, _ in named(cpus([1.0, 0.5, 1.0, 0.8, 1.0, 1.0]))} == {"node-1", "node-3"}


def test_one_fast_node_makes_no_slow_ones() -> None:
    result = cpus([1.0, 1.0, 1.0, 1.0, 1.0, 1.3])
    assert result.slow == []
    assert any("node-5 is faster than all others" in sentence for sentence in result.unsure)


def test_other_hardware_is_no_peer() -> None:
    checks = [
        node(n, measure("cpu_matmul", "CPU", 0.5 if n > 1 else 1.0, like="AB"[n > 1])) for n in range(4)
    ]
    assert judged(checks).slow == []


def test_what_is_slow_now_and_then_is_disturbed_and_not_named() -> None:
    values = measure("cpu_matmul", "CPU").values
    disturbed = Measure(
        "cpu_matmul", "CPU", "FLOP/s", [v * (0.5, 1)[k % 3 == 0] for k, v in enumerate(values)], "EPYC"
    )
    peers = [node(n, measure("cpu_matmul", "CPU", seed=n)) for n in range(3)]
    result = judged([*peers, node(3, disturbed)])
    assert result.slow == []
    assert any("node-3" in sentence and "disturbed" in sentence for sentence in result.unsure)


def test_cores_that_others_used_are_not_named() -> None:
    peers = [node(n, measure("cpu_matmul", "CPU", seed=n)) for n in range(3)]
    busy = node(3, measure("cpu_matmul", "CPU", 0.8, others=[0.4] * TRIALS))
    assert judged([*peers, busy]).slow == []
    swamped = node(3, measure("cpu_matmul", "CPU", 0.3, others=[0.7] * TRIALS))
    result = judged([*peers, swamped])
    assert result.slow == []
    assert "more than half" in result.unsure[0]


def test_if_all_vary_it_says_so_and_names_nothing() -> None:
    result = judged([node(n, measure("cpu_matmul", "CPU", 1 - n / 4, noise=0.8, seed=n)) for n in range(3)])
    assert result.slow == []
    assert any("vary" in sentence or "chance" in sentence for sentence in result.unsure)


def test_a_quota_is_the_cause_if_it_withheld_time() -> None:
    state = MachineState(cores=2, quota_cores=1.2, throttled_ns=4_000_000_000, throttled_periods=90)
    checks = [node(n, measure("cpu_matmul", "CPU", (1.0, 0.6)[n], seed=n)) for n in range(2)]
    result = judged([checks[0], node(1, *checks[1].measures, state=state)])
    assert "quota" in result.slow[0].cause and "limit" in result.slow[0].next
    assert "node-1: a CPU quota allows 1.2 of 2 cores; it withheld " in result.notes[0]


def test_a_hot_gpu_says_so() -> None:
    hot = GpuSample(
        index=2, name="H200", util_pct=100.0, mem_used_bytes=1, mem_total_bytes=2, temperature_c=91.0,
        sm_mhz=1200.0, sm_max_mhz=1980.0, throttle=["hw_thermal_slowdown"],
    )  # fmt: skip

    def gpus(number: int) -> Checked:
        levels = [1.0, 1.0, 0.8 if number else 1.0, 1.0]
        rows = [
            measure("gpu_matmul", f"GPU {device}", level, seed=number, device=device, like="H200")
            for device, level in enumerate(levels)
        ]
        return node(number, *rows, state=MachineState(gpus=[hot] if number else []))

    slow = judged([gpus(0), gpus(1)]).slow
    assert [(one.what, one.nodes, one.device) for one in slow] == [("device", ["node-1"], 2)]
    assert "too hot at 91 °C" in slow[0].cause


def test_probes_of_one_cpu_are_one_part() -> None:
    def checked(number: int) -> Checked:
        level = 0.6 if number == 1 else 1.0
        rows = [measure("core_matmul", f"cores {c}", level, seed=number) for c in range(2)]
        rows += [
            measure(*what, level, seed=number) for what in (("cpu_matmul", "CPU"), ("host_memory", "memory"))
        ]
        return node(number, *rows)

    slow = judged([checked(n) for n in range(3)]).slow
    assert [(one.nodes, one.part, one.what) for one in slow] == [(["node-1"], "CPU", "node")]
    assert {slow[0].probe, *slow[0].also} == {"cpu_matmul", "core_matmul", "host_memory"}


def test_a_slow_group_of_cores_is_named_alone() -> None:
    groups = [measure("core_matmul", f"cores {c}", 0.7 if c == 2 else 1.0) for c in range(4)]
    slow = judged([node(0, *groups)]).slow
    assert [(one.what, one.part) for one in slow] == [("cores", "cores 2")]


@given(
    nodes=st.integers(2, 12),
    seed=st.integers(0, 10_000),
    noise=st.sampled_from([0.002, 0.01, 0.03]),
    scale=st.floats(1e-3, 1e3),
)
def test_healthy_nodes_name_nothing_and_a_slow_one_is_alone(
    nodes: int, seed: int, noise: float, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    levels = scale * np.exp(rng.normal(0, 0.008, nodes))
    values = [level * np.exp(rng.normal(0, noise, TRIALS)) for level in levels]
    limit = LIMITS["cpu_matmul"]
    asked = logarithm(limit.least), limit.usual, 1e-4
    assert not compare([trials_of(one.tolist()) for one in values], *asked).beyond.any()
    slow = int(rng.integers(nodes))
    values[slow] = values[slow] * 0.6
    compared = compare([trials_of(one.tolist()) for one in values], *asked)
    assert np.flatnonzero(compared.beyond).tolist() == [slow]


def test_values_that_are_no_numbers_do_not_count() -> None:
    trials = trials_of([1.0, math.nan, 0.0, -1.0, 1.0, 1.0, 1.0, math.inf, 1.0])
    assert len(trials.values) == 5 and trials.level == 0.0
    assert math.isnan(trials_of([1.0, math.nan, 1.0, 1.0]).level)


def test_rows_of_the_table_say_what_could_be_seen() -> None:
    row: Level = cpus([1.0, 1.0, 1.0]).levels[0]
    assert row.state == "alike" and row.peers == 2
    assert row.sees is not None and 0.1 <= row.sees < 0.14


def test_probe_of_a_newer_version_is_left_out_and_said() -> None:
    newer = Checked(1, "node-0", measures=[Measure("of_tomorrow", "GPU 0", "B/s", [1.0, 2.0])])
    result = judged([newer])
    assert (result.levels, result.slow) == ([], [])
    assert result.unsure == ["of_tomorrow: this version does not know the probe"]
