"""What is said of the memory of single ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from memory_series import BEGAN, GIB, MIB, SECOND, at, flat, leaks, on_device, on_host

from traceml_ray.signals.memory.judge import judge
from traceml_ray.signals.memory.shapes import Collective, Memory, MemoryFinding, Series

N = 300
KIB = 1 << 10


def _one(memory: Memory, kind: str) -> MemoryFinding:
    [finding] = [finding for finding in memory.findings if finding.kind == kind]
    assert 1 <= len(finding.next) <= 3
    return finding


def _gap(n: int = N, seed: int = 0, noise: float = 2 * MIB) -> Any:
    return 600 * MIB + np.random.default_rng(seed).normal(0, noise, n)


# -- growth


def test_drift_of_the_gap_is_named_with_its_slope_and_forecast() -> None:
    gap = _gap(600) + 4 * MIB * np.maximum(np.arange(600) - 200, 0)
    memory = judge([on_device(3, flat(600), gap=gap, total=20 * GIB)])
    drift = _one(memory, "persistent_drift")
    assert (drift.rank, drift.device, drift.confidence, drift.severity) == (3, 0, "high", "critical")
    assert drift.evidence["bytes_per_s"] == pytest.approx(4 * MIB, rel=0.05)
    assert at(drift.from_ns) == pytest.approx(200, abs=40)
    left = 20 * GIB - 15 * GIB - 600 * MIB - 400 * 4 * MIB + 5 * GIB  # what torch holds unused is free, too
    assert drift.evidence["forecast_s"] == pytest.approx(left / (4 * MIB), rel=0.05)
    assert "memory outside torch's allocator grows by 1.05 MB a step" in drift.why
    assert memory.ranks[0].anomaly == "persistent_drift"
    assert memory.ranks[0].forecast_s == drift.evidence["forecast_s"]


def test_slow_drift_over_an_hour_is_below_the_effect_size() -> None:
    """10 KiB/s, 35 MiB in all, and 64 GiB left."""
    gap = _gap(3600, noise=MIB) + 10 * KIB * np.arange(3600)
    assert judge([on_device(0, flat(3600), gap=gap)]).findings == []


def test_slow_drift_is_named_where_memory_runs_out_within_a_day() -> None:
    gap = _gap(3600, noise=MIB) + 10 * KIB * np.arange(3600)
    series = on_device(0, np.full(3600, 15.0 * GIB), gap=gap, held=15 * GIB, total=16 * GIB)
    drift = _one(judge([series]), "persistent_drift")
    assert drift.severity == "warning"
    assert drift.evidence["forecast_s"] == pytest.approx((1024 - 600 - 35) * MIB / (10 * KIB), rel=0.1)


def test_creep_of_allocated_memory_is_of_its_floor() -> None:
    """What a step takes and gives back, 8 GiB, hides the leak from the mean."""
    rng = np.random.default_rng(1)
    allocated = leaks(900, 100, 8 * MIB) + rng.uniform(0, 8 * GIB, 900)
    creep = _one(judge([on_device(5, allocated)]), "creep")
    assert (creep.rank, creep.device) == (5, 0)
    assert creep.evidence["bytes_per_s"] == pytest.approx(8 * MIB, rel=0.2)
    assert creep.evidence["bytes_per_step"] == pytest.approx(2 * MIB, rel=0.2)
    assert creep.severity == "warning"  # some 2.5 h are left
    assert any("TRACEML_MEMORY_HISTORY" in line for line in creep.next)


def test_growth_within_a_step_is_no_creep() -> None:
    """Ten samples to a step, in which activations pile up: it is judged in the middle of one."""
    tooth = 10 * GIB * (np.arange(8) % 10) / 10
    ranks = [on_device(r, flat(8, r) + tooth, first_step_s=-5.0) for r in range(2)]
    long = [replace(series, step=np.full(8, 3)) for series in ranks]
    assert [f.kind for f in judge(ranks).findings] == ["creep", "creep"]
    assert judge(long).findings == []


def test_short_growth_is_not_extrapolated_to_a_critical_end() -> None:
    """20 s of growth that would fill the host in 45 min, and 90 s of it."""
    grown = [1 * GIB + 20 * MIB * np.arange(n) for n in (20, 90)]
    creeps = [_one(judge([on_host(0, level, total=62 * GIB)]), "creep") for level in grown]
    assert [creep.severity for creep in creeps] == ["warning", "critical"]


def test_growth_that_has_ended_is_no_creep() -> None:
    filling = flat(N) + 2 * GIB * (1 - np.exp(-np.arange(N) / 30))
    assert judge([on_device(0, filling)]).findings == []


@pytest.mark.parametrize("every_s", [0.25, 1.0])
@pytest.mark.parametrize("step_s", [0.025, 0.05, 0.1])
@pytest.mark.parametrize("seed", range(4))
def test_leak_of_two_megabytes_a_step_on_the_host_is_named_soon(
    every_s: float, step_s: float, seed: int
) -> None:
    """After 60 steps, or as soon as there are enough samples."""
    n = max(round(60 * step_s / every_s) + 1, 7)
    rng = np.random.default_rng(seed)
    steps = np.floor(np.arange(n) * every_s / step_s)
    leaking = 480e6 + 2e6 * steps + rng.normal(0, 300e3, n)
    ranks = [on_host(r, 480e6 + rng.normal(0, 300e3, n), every_s=every_s, step_s=step_s) for r in (0, 2)]
    memory = judge([*ranks, on_host(1, leaking, every_s=every_s, step_s=step_s, node="node-b")], expected=3)
    creep = _one(memory, "creep")
    assert (creep.rank, creep.node, creep.device) == (1, "node-b", None)
    assert creep.evidence["bytes_per_step"] == pytest.approx(2e6, rel=0.2)
    assert creep.evidence["forecast_steps"] == pytest.approx((56 * GIB - 600e6) / 2e6, rel=0.2)
    assert "Rank 1 (node-b): host memory grows by" in creep.why and "steps (" in creep.why
    assert [row.forecast_steps is None for row in memory.ranks] == [True, False, True]


@pytest.mark.parametrize("before", [60, 400, 1200])
def test_leak_that_begins_late_in_a_run_is_named_as_soon(before: int) -> None:
    """Two samples a second, ten steps a second, 2 MB a step: within 45 leaking steps."""
    n = before + 9
    rng = np.random.default_rng(before)
    rss = 480e6 + 10e6 * np.maximum(np.arange(n) - before + 1, 0) + rng.normal(0, 300e3, n)
    creep = _one(judge([on_host(1, rss, every_s=0.5, step_s=0.1)]), "creep")
    assert (creep.severity, creep.confidence) == ("warning", "medium")
    assert creep.evidence["bytes_per_step"] == pytest.approx(2e6, rel=0.1)
    assert at(creep.from_ns) == pytest.approx(before / 2, abs=1.5)


def _walk(seed: int, mean_s: float | None) -> Any:
    """RSS of a rank that takes and gives back in random steps; it returns to its mean within so long."""
    rng = np.random.default_rng(seed)
    steps = rng.normal(0, 10 ** rng.uniform(-0.7, 1.3) * MIB, N)
    kept = 1.0 if mean_s is None else np.exp(-1 / mean_s)
    level = np.zeros(N)
    for at_sample in range(1, N):
        level[at_sample] = kept * level[at_sample - 1] + steps[at_sample]
    return np.maximum(2 * GIB + level, 100 * MIB)


@pytest.mark.parametrize("mean_s", [None, 200.0, 20.0])
def test_random_walk_is_no_creep(mean_s: float | None) -> None:
    """In 200 runs, each judged at three times, at most one warning."""
    findings_by_length = []
    for seed in range(200):
        level = _walk(seed, mean_s)
        findings_by_length += [judge([on_host(0, level[:n])]).findings for n in (40, 120, N)]
    warned = [
        findings
        for findings in findings_by_length
        if any(f.kind == "creep" and f.severity != "info" for f in findings)
    ]
    assert len(warned) <= 1, warned


def test_tooth_of_a_saw_that_runs_now_is_no_late_leak() -> None:
    """Memory that fills for 40 s and is given back, for the sixth time."""
    rss = 2 * GIB + 20 * MIB * (np.arange(236) % 40)
    assert [f.kind for f in judge([on_host(0, rss)]).findings if f.kind == "creep"] == []


def test_forecast_of_a_host_counts_what_all_its_ranks_take() -> None:
    """Two ranks of a node grow alike: each alone would have twice the time."""
    rss = 1 * GIB + 8 * MIB * np.arange(N)
    used = 8 * GIB + 2 * rss
    ranks = [on_host(r, rss, node="a", total=40 * GIB, limit_used_bytes=used) for r in (0, 1)]
    for creep in judge(ranks, expected=2).findings:
        left = 40 * GIB - used[-1]
        assert creep.evidence["forecast_s"] == pytest.approx(left / (16 * MIB), rel=0.02)


def test_ranks_of_a_host_that_leak_fill_it_together() -> None:
    """Four ranks at 8 MiB/s each; each sees of the host only that something is used of it."""
    rss = 1 * GIB + 8 * MIB * np.arange(N)
    used = np.full(N, 12.0 * GIB) + 4 * (rss - rss[0])
    noisy = used + np.random.default_rng(0).normal(0, 2 * GIB, N)
    left_s = (40 * GIB - float(np.median(noisy[-3:]))) / (32 * MIB)
    for seen in (noisy, np.where(np.arange(N) == N - 1, noisy[-3:].mean(), np.nan)):
        ranks = [on_host(r, rss, node="a", total=40 * GIB, limit_used_bytes=seen) for r in range(4)]
        memory = judge([*ranks, on_host(4, rss, node="b", total=40 * GIB)], expected=5)
        creeps = {finding.rank: finding for finding in memory.findings if finding.kind == "creep"}
        assert all(creeps[r].evidence["forecast_s"] == pytest.approx(left_s, rel=0.05) for r in range(4))
        assert all(creeps[r].evidence["host_ranks"] == 4 for r in range(4))
        assert "4 ranks of this host grow, by 33.6 MB/s together: at this rate" in creeps[0].why
        assert creeps[4].evidence["forecast_s"] > 3 * left_s and "host_ranks" not in creeps[4].evidence
        rows = {row.rank: row.forecast_s for row in memory.ranks}
        assert rows == {r: creeps[r].evidence["forecast_s"] for r in range(5)}


def test_process_that_has_ended_takes_no_more_of_its_host() -> None:
    """A first attempt leaked as fast as the second one does, and is gone."""
    rss = 1 * GIB + 8 * MIB * np.arange(N)
    used = np.full(N, 20.0 * GIB)
    first = on_host(0, rss, node="a", limit_used_bytes=used, process="a")
    second = on_host(0, rss, node="a", limit_used_bytes=used, process="b", start_s=N + 60.0)
    creeps = [finding for finding in judge([first, second]).findings if finding.kind == "creep"]
    forecasts = [creep.evidence["forecast_s"] for creep in creeps]
    assert forecasts == pytest.approx([44 * GIB / (8 * MIB)] * 2, rel=0.01)


def test_small_leaks_of_many_ranks_are_named_where_they_fill_the_host_together() -> None:
    """Each grows by 30 MiB, which by itself fills the host in 31 hours; eight of them do in four."""
    rss, used = 1 * GIB + 0.1 * MIB * np.arange(N), np.full(N, 20.0 * GIB)
    ranks = [on_host(r, rss, node="a", total=31 * GIB, limit_used_bytes=used) for r in range(8)]
    creeps = [finding for finding in judge(ranks).findings if finding.kind == "creep"]
    assert [creep.rank for creep in creeps] == list(range(8))
    assert creeps[0].evidence["forecast_s"] == pytest.approx(11 * GIB / (0.8 * MIB), rel=0.01)
    assert judge(ranks[:1]).findings == []


@pytest.mark.parametrize("shape", [np.sqrt, lambda unit: np.log1p(20 * unit) / np.log1p(20)])
def test_growth_that_slows_down_has_no_forecast_by_a_line(shape: Any) -> None:
    """By a line it is full in 20 min; a line of as much is a warning."""
    unit = np.arange(600) / 600
    rss = 2 * GIB + 2 * GIB * shape(unit) + np.random.default_rng(0).uniform(0, 2 * MIB, 600)
    memory = judge([on_host(0, rss, total=14 * GIB)])
    creep = _one(memory, "creep")
    assert (creep.evidence["bend"], creep.evidence["forecast_s"], creep.severity) == (
        "slows",
        None,
        "warning",
    )
    assert creep.evidence["earliest_s"] > 1.5 * 600
    assert "of late, more and more slowly" in creep.why and "at least" in creep.why
    assert memory.ranks[0].forecast_s is None
    even = judge([on_host(0, 2 * GIB + 2 * GIB * unit, total=14 * GIB)])
    assert (_one(even, "creep").evidence["bend"], _one(even, "creep").severity) == ("line", "critical")


def test_leak_after_a_cache_has_filled_is_a_line() -> None:
    """A forecast goes by what lasts, not by how fast it began."""
    time_s = np.arange(600)
    rss = 2 * GIB + 2 * GIB * (1 - np.exp(-time_s / 40)) + 4 * MIB * time_s
    creep = _one(judge([on_host(0, rss, total=30 * GIB)]), "creep")
    assert creep.evidence["bend"] == "line"
    assert creep.evidence["forecast_s"] == pytest.approx((22 * GIB - rss[-1]) / (4 * MIB), rel=0.1)


def test_growth_that_speeds_up_is_forecast_by_its_slope_of_late() -> None:
    unit = np.arange(600) / 600
    rss = 2 * GIB + 2 * GIB * unit**2
    creep = _one(judge([on_host(0, rss, total=30 * GIB)]), "creep")
    assert creep.evidence["bend"] == "quickens" and "faster and faster" in creep.why
    by_line = (22 * GIB - rss[-1]) / (2 * GIB / 600)
    assert creep.evidence["forecast_s"] < 0.7 * by_line


def test_allocated_memory_and_the_gap_fill_a_device_together() -> None:
    gap = _gap(600) + 4 * MIB * np.arange(600)
    memory = judge([on_device(3, leaks(600, 0, 8 * MIB), gap=gap, held=16 * GIB, total=24 * GIB)])
    forecasts = [f.evidence["forecast_s"] for f in memory.findings if f.kind in ("creep", "persistent_drift")]
    left_s = (24 * GIB - 10 * GIB - 599 * 8 * MIB - gap[-1]) / (12 * MIB)
    assert forecasts == pytest.approx([left_s] * 2, rel=0.1)


def test_forecast_of_a_host_does_not_go_by_what_others_take_for_a_moment() -> None:
    """Ten seconds in which another program starts, and takes ten times as much."""
    rss = 1 * GIB + 8 * MIB * np.arange(10)
    used = 8 * GIB + rss + 80 * MIB * np.arange(10)
    creep = _one(judge([on_host(0, rss, total=40 * GIB, limit_used_bytes=used)]), "creep")
    assert creep.evidence["forecast_s"] == pytest.approx((40 * GIB - used[-1]) / (8 * MIB), rel=0.05)


def test_growth_of_shared_pages_is_no_warning() -> None:
    uss = np.where(np.arange(N) % 30 == 0, 1.0 * GIB, np.nan)
    rss = 2 * GIB + 4 * MIB * np.arange(N)
    creep = _one(judge([on_host(0, rss, uss_bytes=uss)]), "creep")
    assert creep.severity == "info"
    assert creep.why.endswith("its own pages (USS) do not grow, so it is shared or file pages.")


def test_host_of_a_rank_with_a_device_is_judged_as_well() -> None:
    host = {"rss_bytes": 2 * GIB + 4 * MIB * np.arange(N), "limit_bytes": np.full(N, 64.0 * GIB)}
    memory = judge([on_device(2, flat(N), **host)])
    creep = _one(memory, "creep")
    assert (creep.rank, creep.device, creep.evidence["counter"]) == (2, None, "rss_bytes")
    assert creep.evidence["forecast_s"] is None and "how much is left is not known" in creep.why
    assert [(row.rank, row.device) for row in memory.ranks] == [(2, None), (2, 0)]


def test_host_of_a_rank_with_two_devices_is_judged_once() -> None:
    host = {"rss_bytes": 2 * GIB + 4 * MIB * np.arange(N)}
    memory = judge([on_device(2, flat(N), device=device, **host) for device in (0, 1)])
    assert len(memory.findings) == 1
    assert [row.device for row in memory.ranks] == [None, 0, 1]


# -- changes of level


def test_one_time_step_is_a_step_and_no_drift() -> None:
    memory = judge([on_device(0, flat(N), gap=_gap() + 512 * MIB * (np.arange(N) >= 140))])
    step = _one(memory, "step_change")
    assert len(memory.findings) == 1
    assert (step.severity, step.confidence) == ("info", "high")  # small, of 80 GiB
    assert at(step.from_ns) == 140
    assert step.evidence["delta_bytes"] == pytest.approx(512 * MIB, rel=0.02)
    assert "rose once by 535 MB at step 561, from 631 MB, and stayed there" in step.why


@pytest.mark.parametrize("after", [0, 60])
@pytest.mark.parametrize("before", [0, 120])
def test_clean_drift_of_thirty_samples_is_one_finding(before: int, after: int) -> None:
    """A drift where it goes on; where it has ended one rise, and not a step every five samples."""
    gap = 600 * MIB + 20 * MIB * np.clip(np.arange(before + 30 + after) - before, 0, 29.0)
    memory = judge([on_device(0, flat(len(gap)), gap=gap)])
    [finding] = memory.findings
    assert finding.kind == ("step_change" if after else "persistent_drift")
    if after:
        assert finding.evidence["delta_bytes"] == pytest.approx(29 * 20 * MIB, rel=0.15)
        assert finding.evidence["took_s"] == pytest.approx(29, abs=7)


def test_step_that_takes_much_of_the_device_is_a_warning() -> None:
    gap = _gap() + 2 * GIB * (np.arange(N) >= 140)
    assert _one(judge([on_device(0, flat(N), gap=gap)]), "step_change").severity == "warning"


def test_gaussian_noise_says_nothing() -> None:
    """Of 200 runs of four ranks at most one has a finding; noise of the gap and of what is allocated."""
    results = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        level = 10 ** rng.uniform(0, 3)
        ranks = [
            on_device(
                rank,
                10 * GIB + rng.normal(0, level * MIB, N // 2),
                gap=2 * GIB + rng.normal(0, level * MIB / 3, N // 2),
                held=16 * GIB,
                rss_bytes=4 * GIB + rng.normal(0, level * MIB, N // 2),
            )
            for rank in range(4)
        ]
        memory = judge(ranks, expected=4)
        results += memory.findings
        results += [result for result in (memory.first_cause, memory.collective_onset) if result]
    assert len(results) <= 1, results


def test_spikes_in_a_quarter_of_the_samples_are_found() -> None:
    gap = _gap() + 400 * MIB * (np.arange(N) % 4 == 1)
    memory = judge([on_device(0, flat(N), gap=gap)])
    spike = _one(memory, "transient_spike")
    assert len(memory.findings) == 1
    assert spike.evidence["count"] == pytest.approx(75, abs=2)
    assert spike.evidence["share"] == pytest.approx(0.25, abs=0.01)
    assert "rose for a short time 7" in spike.why and "in 25 % of the samples" in spike.why
    assert spike.severity == "info"


def test_spike_that_nearly_fills_the_device_is_a_warning() -> None:
    gap = _gap() + 4 * GIB * (np.arange(N) == 150)
    spike = _one(judge([on_device(0, flat(N), gap=gap, total=21 * GIB)]), "transient_spike")
    assert spike.severity == "warning" and "once" in spike.why


# -- how memory stands


@pytest.mark.parametrize(("share", "severity"), [(0.2, None), (0.4, "warning"), (0.6, "critical")])
def test_fragmentation_goes_by_inactive_split_blocks(share: float, severity: str | None) -> None:
    allocated = flat(N)
    inactive = 1.5 * np.maximum.accumulate(allocated) * share
    memory = judge([on_device(1, allocated, inactive_split_bytes=inactive)])
    assert [f.severity for f in memory.findings if f.kind == "fragmentation"] == [severity] * bool(severity)
    if severity:
        finding = _one(memory, "fragmentation")
        assert finding.evidence["inactive_share"] == pytest.approx(share)
        assert finding.evidence["unallocated_share"] == pytest.approx(1 / 3, abs=0.01)
        assert f"{100 * share:.0f} % of what torch's allocator holds" in finding.why


def test_fragmentation_of_a_small_allocator_is_no_matter() -> None:
    small = np.full(N, 200.0 * MIB)
    assert judge([on_device(1, small, inactive_split_bytes=0.6 * small)]).findings == []


@pytest.mark.parametrize(("total", "severity"), [(21, None), (19, "warning"), (17, "critical")])
def test_near_limit_goes_by_what_the_driver_says_is_used(total: float, severity: str | None) -> None:
    level = np.full(N, 15.0 * GIB)
    memory = judge([on_device(1, level, gap=0.6 * GIB, held=15 * GIB, total=total * GIB)])
    assert [f.severity for f in memory.findings if f.kind == "near_limit"] == [severity] * bool(severity)
    if severity:
        near = _one(memory, "near_limit")
        assert near.evidence["used_share"] == pytest.approx(15.6 / total, rel=0.01)
        assert near.evidence["full_s"] is None
        assert f"{1560 / total:.0f} % of the device's memory is used" in near.why


def test_near_limit_by_torchs_cache_is_less_severe() -> None:
    """15 GiB are held and 10 are used at most."""
    near = _one(judge([on_device(1, flat(N), total=17 * GIB)]), "near_limit")
    assert near.severity == "warning"
    assert "5.37 GB of that is free in torch's cache" in near.why


def test_near_limit_says_when_it_is_full() -> None:
    rss = 2 * GIB + 4 * MIB * np.arange(N)
    memory = judge([on_host(1, rss, total=13 * GIB)])
    near = _one(memory, "near_limit")
    left = 13 * GIB - 10 * GIB - 4 * MIB * N
    assert near.evidence["full_s"] == pytest.approx(left / (4 * MIB), rel=0.05)
    assert "of the host's limit is used" in near.why and "it is full in" in near.why


def test_near_limit_of_a_host_is_said_once_for_its_ranks() -> None:
    rss = [np.full(N, (2.0 + rank) * GIB) for rank in range(4)]
    used = {"limit_used_bytes": np.full(N, 30.0 * GIB)}
    ranks = [on_host(r, rss[r], node="a", total=32 * GIB, **used) for r in range(4)]
    near = _one(judge(ranks), "near_limit")
    assert (near.rank, near.severity) == (3, "critical")


def test_imbalance_is_of_one_rank_over_its_peers() -> None:
    ranks = [on_device(rank, flat(N, rank)) for rank in range(7)]
    memory = judge([*ranks, on_device(7, flat(N, level=14 * GIB))])
    finding = _one(memory, "imbalance")
    assert (finding.rank, finding.severity, finding.evidence["peers"]) == (7, "info", 7)
    assert finding.evidence["above_bytes"] == pytest.approx(4 * GIB, rel=0.01)
    assert "4.29 GB above the median of the ranks" in finding.why


def test_ranks_that_do_different_work_are_no_imbalance() -> None:
    """Stages of a pipeline: half of the ranks hold twice as much."""
    ranks = [on_device(rank, flat(N, rank, (10 if rank < 5 else 20) * GIB)) for rank in range(9)]
    assert judge(ranks).findings == []


# -- collectives


def _communicating(n_ranks: int = 4, first_s: float = 140.4, by: float = 300 * MIB) -> list[Series]:
    gap = [_gap(seed=rank) + by * (np.arange(N) >= first_s) for rank in range(n_ranks)]
    return [on_device(rank, flat(N, rank), gap=gap[rank]) for rank in range(n_ranks)]


def _used(rank: int, op: str, group: int, first_s: float, last_s: float = 300.0) -> Collective:
    first, last = (BEGAN + round(s * SECOND) for s in (first_s, last_s))
    return Collective(rank, op, str(group), first, last, 100, 1 << 30)


def test_persistent_communicator_buffers_are_explained() -> None:
    """The gap rises on all ranks with the first all_to_all of a group, and stays."""
    uses = [_used(rank, "all_reduce", 0, 0.1) for rank in range(4)]
    uses += [_used(rank, "all_to_all", 3, 140.3) for rank in range(4)]
    memory = judge(_communicating(), uses, expected=4)
    assert {f.kind for f in memory.findings} == {"step_change"} and len(memory.findings) == 4
    assert [attribution.kind for attribution in memory.collectives] == ["collective_confident"] * 4
    first = memory.collectives[0]
    assert (first.rank, first.op, first.group, first.finding) == (0, "all_to_all", "3", "step_change")
    assert first.bytes == pytest.approx(300 * MIB, rel=0.05)
    assert first.evidence["synchrony"] == 1.0
    finding = memory.findings[0]
    assert finding.severity == "info" and "which is normal" in finding.next[0]
    assert "rose by 31" in finding.why and "with the first all_to_all in group 3" in finding.why
    assert "3 of 3 other ranks saw the same then" in finding.why
    shown = [finding.evidence[name] for name in ("collective", "group", "collective_bytes")]
    assert shown == ["all_to_all", "3", 1 << 30]


def test_communicator_buffers_of_the_first_step_are_explained_and_libraries_are_not() -> None:
    """Both come before the first step is over; only the first stands with a collective."""
    gap = _gap() + 300 * MIB * (np.arange(N) >= 20) + 200 * MIB * (np.arange(N) >= 8)
    ranks = [on_device(rank, flat(N, rank), gap=gap, first_step_s=22) for rank in range(2)]
    memory = judge(ranks, [_used(rank, "all_reduce", 0, 19.8) for rank in range(2)], expected=2)
    assert [attribution.kind for attribution in memory.collectives] == ["collective_confident"] * 2
    assert [(f.kind, f.severity) for f in memory.findings] == [("step_change", "info")] * 2
    assert judge(ranks, expected=2).findings == []


def test_sensitivity_says_how_weak_the_evidence_may_be() -> None:
    ranks = _communicating()
    only_one = [_used(0, "all_reduce", 2, 140.2)]
    others = [on_device(rank, flat(N, rank), gap=_gap(seed=rank)) for rank in (1, 2, 3)]
    steady = [_used(rank, "all_reduce", 0, 0.1) for rank in range(4)]
    shown = {
        (name, sensitivity): [
            attribution.kind for attribution in judge(series, uses, 4, sensitivity).collectives
        ]
        for name, series, uses in (
            ("alone", [ranks[0], *others], only_one),
            ("active", ranks, steady),
        )
        for sensitivity in ("low", "medium", "high")  # type: ignore[attr-defined]
    }
    assert shown == {
        ("alone", "low"): [],
        ("alone", "medium"): ["collective_likely"],
        ("alone", "high"): ["collective_likely"],
        ("active", "low"): [],
        ("active", "medium"): ["collective_suspect"] * 4,
        ("active", "high"): ["collective_suspect"] * 4,
    }


def test_collectives_that_are_marked_all_the_time_explain_nothing() -> None:
    """With a mark every second one is near every change; one of two marks near the change counts."""
    often, once = ([_used(0, "all_reduce", 0, s, s) for s in times] for times in (range(N), (20, 140.3)))
    one = _communicating()[0]
    assert [attribution.kind for attribution in judge([one], often).collectives] == []
    assert [attribution.kind for attribution in judge([one], once).collectives] == ["collective_likely"]


def test_spikes_stand_with_marks_where_most_of_them_do() -> None:
    gap = _gap() + 400 * MIB * (np.arange(N) % 50 == 10)
    ranks = [on_device(r, flat(N, r), gap=gap) for r in range(2)]
    marks = [_used(r, "all_gather", 0, s - 0.3, s + 0.2) for r in range(2) for s in range(10, N, 50)]
    for used, kind in ((marks, "collective_confident"), (marks[:1], "collective_suspect")):
        memory = judge(ranks, used, expected=2)
        assert memory.collectives[0].kind == kind, used


def test_step_without_collectives_is_not_put_down_to_them() -> None:
    memory = judge([_communicating()[0]], [_used(0, "all_reduce", 0, 0.1, 100.0)])
    assert memory.collectives == []
    assert _one(memory, "step_change").evidence["counter"] == "gap_bytes"


def test_drift_while_process_groups_are_made_stands_with_them() -> None:
    gap = _gap(600) + 4 * MIB * np.arange(600)
    uses = [_used(0, "all_reduce", group, 10 * group, 10 * group + 5.0) for group in range(1, 50)]
    memory = judge([on_device(0, flat(600), gap=gap)], uses)
    [attribution] = memory.collectives
    assert (attribution.kind, attribution.finding) == ("collective_likely", "persistent_drift")
    assert "while 4" in attribution.why and "process groups were first used" in attribution.why
    assert _one(memory, "persistent_drift").severity != "info"  # it is a leak whatever makes it


# -- the whole


def test_findings_are_the_most_severe_first() -> None:
    leaking = on_device(0, leaks(600, 100, 60 * MIB), total=64 * GIB)
    memory = judge([leaking, *_communicating(2)[1:]], expected=2)
    order = [("critical", "warning", "info").index(finding.severity) for finding in memory.findings]
    assert order == sorted(order) and len(set(order)) > 1


def test_answer_survives_json() -> None:
    memory = judge([on_device(0, leaks(N, 100, 60 * MIB)), on_device(1, flat(N))], expected=3)
    assert memory.first_cause and memory.findings
    assert msgspec.json.decode(msgspec.json.encode(memory), type=Memory) == memory
    assert memory.missing_ranks == [2]
