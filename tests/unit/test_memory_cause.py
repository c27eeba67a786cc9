"""Which rank grew first, and when nobody is to be named."""

from __future__ import annotations

import numpy as np
import pytest
from memory_series import GIB, MIB, at, flat, jumps, leaks, on_device, on_host

from traceml_ray.signals.memory.judge import judge
from traceml_ray.signals.memory.shapes import FirstCause, Memory, Series

N = 300


def _quiet(memory: Memory) -> None:
    assert (memory.first_cause, memory.collective_onset, memory.findings) == (None, None, [])


def _named(memory: Memory) -> FirstCause:
    assert memory.first_cause is not None
    return memory.first_cause


def test_earliest_rank_is_the_first_cause_by_its_lead() -> None:
    late = [on_device(rank, jumps(N, 180, 4 * GIB, rank)) for rank in range(7)]
    cause = _named(judge([*late, on_device(7, jumps(N, 120, 4 * GIB, 7))], expected=8))
    assert (cause.rank, cause.node, cause.device, cause.confidence) == (7, "node-7", 0, "high")
    assert at(cause.at_ns) == pytest.approx(120, abs=1)
    assert cause.lead_ns == pytest.approx(60e9, abs=1e9)
    assert cause.delta_bytes == pytest.approx(4 * GIB, rel=0.01)
    assert "grew first: allocated memory grew by 4.29 GB" in cause.why
    assert "60 s before any other rank (error of clocks and samples: 1 s)" in cause.why


def test_lone_leaking_rank_is_named_most_surely() -> None:
    ranks = [on_device(rank, flat(N, rank)) for rank in range(7)]
    memory = judge([*ranks, on_device(7, leaks(N, 100, 30 * MIB, 7))], expected=8)
    cause = _named(memory)
    assert (cause.rank, cause.lead_ns, cause.confidence, cause.coverage) == (7, None, "high", 1.0)
    assert at(cause.at_ns) == pytest.approx(100, abs=3)
    assert cause.why.startswith("Rank 7 (node-7, device 0) grew alone")
    assert "no other rank grew." in cause.why
    assert memory.collective_onset is None


def test_late_joiner_is_not_blamed_for_loading_its_model() -> None:
    loading = np.concatenate([np.linspace(0, 10 * GIB, 30), flat(90)])
    joined = on_device(3, loading, start_s=180, first_step_s=32)
    _quiet(judge([*[on_device(rank, flat(N, rank)) for rank in range(3)], joined], expected=4))


def test_late_joiner_does_not_hide_who_grew_first() -> None:
    ranks = [on_device(rank, jumps(N, 150, 4 * GIB, rank)) for rank in range(2)]
    loading = np.concatenate([np.linspace(0, 10 * GIB, 30), leaks(90, 0, 60 * MIB)])
    joined = on_device(3, loading, start_s=180, first_step_s=32)
    cause = _named(judge([*ranks, on_device(2, jumps(N, 100, 4 * GIB)), joined], expected=4))
    assert (cause.rank, cause.confidence, cause.coverage) == (2, "medium", 0.75)
    assert "(1 rank not observed then)" in cause.why


def test_short_history_says_nothing() -> None:
    _quiet(judge([on_device(rank, jumps(4, 2, 8 * GIB)) for rank in range(4)], expected=4))


def test_phase_of_sampling_is_no_lead() -> None:
    """All ranks grow at 150 s; each has its samples at other moments of the second."""
    ranks = []
    for rank in range(8):
        times = rank / 8 + np.arange(N)
        ranks.append(on_device(rank, flat(N, rank) + 4 * GIB * (times >= 150), start_s=rank / 8))
    memory = judge(ranks, expected=8)
    assert memory.first_cause is None
    assert memory.collective_onset is not None
    assert memory.collective_onset.ranks == list(range(8))
    assert at(memory.collective_onset.at_ns) == pytest.approx(150, abs=1)
    assert memory.collective_onset.why.startswith("Allocated memory of all ranks grew at the same")


def test_model_load_at_start_is_no_growth() -> None:
    load = np.concatenate([np.linspace(0, 12 * GIB, 40), flat(10, level=12 * GIB), flat(200, level=15 * GIB)])
    _quiet(judge([on_device(rank, load, first_step_s=50) for rank in range(4)], expected=4))


def test_model_load_is_no_growth_where_no_step_is_known() -> None:
    load = np.concatenate([np.linspace(0, 12 * GIB, 20), flat(300, level=12 * GIB)])
    _quiet(judge([on_device(rank, load, first_step_s=None) for rank in range(4)], expected=4))


def test_leak_that_began_with_the_first_step_on_all_ranks_has_no_culprit() -> None:
    ranks = [on_device(rank, leaks(N, 0, 30 * MIB, rank), start_s=7.0 * rank) for rank in range(4)]
    memory = judge(ranks, expected=4)
    assert memory.first_cause is None
    assert memory.collective_onset is not None and memory.collective_onset.ranks == [0, 1, 2, 3]


def test_elastic_restart_is_judged_by_its_own_baseline() -> None:
    """The second attempt loads more than the first one had; it starts late, on all ranks."""
    before = [on_device(rank, flat(120, rank), process=f"a{rank}") for rank in range(4)]
    load = np.concatenate([np.linspace(0, 20 * GIB, 20), flat(100, level=20 * GIB)])
    after = [
        on_device(rank, load, start_s=130 + rank, first_step_s=22, process=f"b{rank}") for rank in range(4)
    ]
    memory = judge([*before, *after], expected=4)
    _quiet(memory)
    assert [(row.rank, row.process) for row in memory.ranks[:2]] == [(0, "a0"), (0, "b0")]


def test_two_devices_of_one_rank_are_one_rank() -> None:
    both = [on_device(1, leaks(N, 100, 40 * MIB, n), device=n) for n in (0, 1)]
    memory = judge([on_device(0, flat(N)), *both, on_device(2, flat(N, 2))], expected=3)
    assert memory.collective_onset is None
    assert _named(memory).rank == 1
    assert {(f.kind, f.rank, f.device) for f in memory.findings} >= {("creep", 1, 0), ("creep", 1, 1)}


def test_sawtooth_leak_is_growth() -> None:
    """Each 10 samples 300 MiB come and 270 MiB go."""
    tooth = np.tile(np.linspace(0, 300 * MIB, 10), N // 10)
    saw = flat(N) + tooth + 30 * MIB * (np.arange(N) // 10) * 2
    memory = judge([on_device(0, saw), *[on_device(r, flat(N, r) + tooth) for r in (1, 2, 3)]], expected=4)
    assert _named(memory).rank == 0
    [creep] = [f for f in memory.findings if f.kind == "creep"]
    assert creep.rank == 0
    assert creep.evidence["bytes_per_s"] == pytest.approx(6 * MIB, rel=0.15)


def test_sawtooth_without_a_leak_is_nothing() -> None:
    tooth = np.tile(np.linspace(0, 6 * GIB, 30), N // 30)[: N - 4]  # ends inside a tooth
    _quiet(judge([on_device(rank, flat(N - 4, rank) + tooth) for rank in range(4)], expected=4))


@pytest.mark.parametrize(("seen", "world", "confidence"), [(63, 64, "high"), (1, 4, "low")])
def test_confidence_goes_by_how_many_ranks_were_seen(seen: int, world: int, confidence: str) -> None:
    ranks = [on_device(rank, flat(N, rank)) for rank in range(seen - 1)]
    memory = judge([*ranks, on_device(seen - 1, leaks(N, 100, 40 * MIB))], expected=world)
    assert _named(memory).confidence == confidence
    assert memory.missing_ranks == list(range(seen, world))
    assert f"({world - seen} rank{'s' * (world - seen > 1)} not observed then)" in _named(memory).why


def _on_two_nodes(bound_s: float, second_s: int, shift_s: float) -> list[Series]:
    """Return four ranks of two nodes; the clock of the second differs by `shift_s`."""
    first = [on_device(rank, jumps(N, 100, 4 * GIB, rank), node="a", bound_s=bound_s) for rank in (0, 1)]
    second = [
        on_device(rank, jumps(N, second_s, 4 * GIB, rank), node="b", bound_s=bound_s, start_s=shift_s)
        for rank in (2, 3)
    ]
    return [*first, *second]


@pytest.mark.parametrize("shift_s", [-5.0, 5.0])
def test_clocks_that_may_be_wrong_by_five_seconds_name_nobody(shift_s: float) -> None:
    memory = judge(_on_two_nodes(5.0, 100, shift_s), expected=4)
    assert memory.first_cause is None
    assert memory.collective_onset is not None and memory.collective_onset.ranks == [0, 1, 2, 3]


@pytest.mark.parametrize("shift_s", [-5.0, 5.0])
def test_lead_beyond_the_error_of_the_clocks_is_a_first_cause(shift_s: float) -> None:
    ranks = _on_two_nodes(5.0, 160, shift_s)[1:]
    cause = _named(judge(ranks, expected=3))
    assert cause.rank == 1
    assert cause.lead_bound_ns == pytest.approx(11e9, abs=0.5e9)
    assert cause.confidence == "high"


def test_lead_just_beyond_the_error_is_not_named_with_confidence() -> None:
    cause = _named(judge(_on_two_nodes(5.0, 113, 0.0)[1:], expected=3))
    assert (cause.rank, cause.confidence) == (1, "low")


def test_idle_rank_is_no_matter() -> None:
    idle = on_host(3, np.full(N, 1.0 * GIB), first_step_s=None)
    ranks = [on_device(rank, flat(N, rank)) for rank in range(3)]
    memory = judge([*ranks, idle], expected=4)
    _quiet(memory)
    assert memory.ranks[-1].rank == 3 and memory.ranks[-1].rss_growth_bytes == 0
    memory = judge([*ranks[:2], on_device(2, leaks(N, 100, 40 * MIB)), idle], expected=4)
    assert (_named(memory).rank, _named(memory).confidence) == (2, "high")


def test_every_growth_of_a_rank_is_listed() -> None:
    twice = jumps(600, 120, 3 * GIB) + 4 * GIB * (np.arange(600) >= 400)
    memory = judge([on_device(0, twice), on_device(1, flat(600, 1))], expected=2)
    assert [(i.rank, round(at(i.at_ns)), round(i.delta_bytes / GIB)) for i in memory.incidents] == [
        (0, 120, 3),
        (0, 400, 4),
    ]


def test_memory_given_back_lowers_the_baseline() -> None:
    given = np.concatenate([flat(100, level=20 * GIB), flat(100), leaks(100, 0, 50 * MIB)])
    memory = judge([on_device(0, given), on_device(1, flat(N))], expected=2)
    assert _named(memory).rank == 0
    assert at(_named(memory).at_ns) == pytest.approx(200, abs=5)


def test_rank_that_only_reaches_the_threshold_first_is_not_alone() -> None:
    """All grow alike; one of them by a little more than counts, the others by a little less."""
    ranks = [on_host(rank, 2 * GIB + (1.1 if rank == 2 else 0.7) * MIB * np.arange(N)) for rank in range(4)]
    memory = judge(ranks, expected=4)
    assert [incident.rank for incident in memory.incidents] == [2]
    assert memory.first_cause is None
    assert memory.collective_onset is not None and memory.collective_onset.ranks == [0, 1, 2, 3]
    few = [on_host(rank, np.full(N, 2.0 * GIB)) for rank in range(4, 8)]
    cause = _named(judge([*ranks[1:3], *few], expected=6))
    assert (cause.rank, cause.confidence) == (2, "low")
    assert "grew most" in cause.why and "rank 1 grew by at least half as much" in cause.why


@pytest.mark.parametrize("lag_s", [6, 14, 30])
def test_ranks_that_grew_later_by_less_than_counts_did_not_grow_at_once(lag_s: int) -> None:
    """From 100 s on rank 2 grows by 1.2 GiB; the others begin later, and none has grown by a tenth yet."""
    ranks = [on_device(rank, leaks(N, 100 + lag_s, 5.0 * MIB, rank)) for rank in (0, 1, 3)]
    memory = judge([*ranks, on_device(2, leaks(N, 100, 6.2 * MIB, 2))], expected=4)
    assert {incident.rank for incident in memory.incidents} == {2}
    cause = _named(memory)
    assert cause.rank == 2 and cause.lead_ns == pytest.approx(lag_s * 1e9, abs=3e9)
    assert memory.collective_onset is None
    assert "before any other rank" in cause.why


def test_ranks_that_grew_by_less_at_once_grew_at_once() -> None:
    ranks = [on_device(rank, leaks(N, 100, 5.0 * MIB, rank)) for rank in (0, 1, 3)]
    memory = judge([*ranks, on_device(2, leaks(N, 100, 6.2 * MIB, 2))], expected=4)
    assert memory.first_cause is None
    onset = memory.collective_onset
    assert onset is not None and onset.ranks == [0, 1, 2, 3]
    assert onset.bound_ns is not None and onset.bound_ns < 6e9
    assert "at the same time (within the error of clocks and samples: " in onset.why


def test_ranks_that_are_clearly_later_are_not_of_those_that_grew_at_once() -> None:
    """Each begins 0.9 s after the one before it: the last one 6 s after the first, and that can be told."""
    ranks = [on_device(rank, jumps(N, 100, 4 * GIB, rank), start_s=0.9 * rank) for rank in range(8)]
    onset = judge(ranks, expected=8).collective_onset
    assert onset is not None and onset.ranks == [0, 1]


@pytest.mark.parametrize("seed", range(4))
def test_cache_that_has_filled_is_no_first_cause(seed: int) -> None:
    """It fills in 100 s or so, and is full: alone it is no cause, before others no sure one."""
    cache = flat(N, seed) + 3 * GIB * (1 - np.exp(-np.maximum(np.arange(N) - 60, 0) / 30))
    others = [on_device(rank, flat(N, rank)) for rank in range(3)]
    memory = judge([*others, on_device(3, cache)], expected=4)
    assert memory.first_cause is None and [incident.rank for incident in memory.incidents] == [3]
    followed = [on_device(rank, jumps(N, 180, 4 * GIB, rank)) for rank in range(3)]
    cause = _named(judge([*followed, on_device(3, cache)], expected=4))
    assert (cause.rank, cause.confidence) == (3, "medium")


@pytest.mark.parametrize("stair", [30, 60])
def test_leak_in_stairs_is_not_over_on_a_stair(stair: int) -> None:
    """Every minute 1.8 GiB more; the last stair is as flat as those before."""
    stairs = flat(N) + 30 * MIB * stair * (np.arange(N) // stair)
    memory = judge([*[on_device(r, flat(N, r)) for r in (1, 2, 3)], on_device(0, stairs)], expected=4)
    assert _named(memory).rank == 0


def test_jump_within_large_noise_has_no_first_rank() -> None:
    """Optimizer states come on all ranks at once, where a step takes and gives back gigabytes."""
    for seed in range(20):
        noise = [np.random.default_rng((seed, rank)).uniform(0, 2 * GIB, N) for rank in range(4)]
        jump = 10 * GIB + 20 * GIB * (np.arange(N) > 60)
        ranks = [on_device(rank, jump + noise[rank]) for rank in range(4)]
        memory = judge(ranks, expected=4)
        assert memory.first_cause is None
        assert memory.collective_onset is not None and memory.collective_onset.ranks == [0, 1, 2, 3]


def test_growth_of_hosts_does_not_hide_that_of_a_device() -> None:
    """Each rank's host memory creeps alike; one device leaks more."""
    host = {"rss_bytes": 2 * GIB + 2 * MIB * np.arange(N), "limit_bytes": np.full(N, 512.0 * GIB)}
    ranks = [on_device(rank, flat(N, rank), **host) for rank in range(7)]
    memory = judge([*ranks, on_device(7, leaks(N, 100, 60 * MIB), **host)], expected=8)
    cause, onset = _named(memory), memory.collective_onset
    assert (cause.rank, cause.device, cause.counter, cause.lead_ns) == (7, 0, "allocated_bytes", None)
    assert onset is not None
    assert (onset.ranks, onset.counter) == (list(range(8)), "rss_bytes")
    assert onset.delta_bytes < GIB
    assert onset.why.startswith("Host memory of all ranks grew at the same time")


def test_growth_that_all_hosts_share_is_less_severe_than_that_of_one() -> None:
    def creeping(rank: int, mib: float) -> Series:
        return on_host(rank, 2 * GIB + mib * MIB * np.arange(N), total=256 * GIB)

    alike = [
        f for f in judge([creeping(rank, 4) for rank in range(4)], expected=4).findings if f.kind == "creep"
    ]
    assert [f.severity for f in alike] == ["info"] * 4
    assert alike[0].evidence["alike"] == 4 and alike[0].why.endswith("; all 4 ranks grow alike.")
    findings = judge([*[creeping(rank, 0) for rank in range(3)], creeping(3, 4)], expected=4).findings
    assert [(f.rank, f.severity) for f in findings if f.kind == "creep"] == [(3, "warning")]


def test_growth_that_a_single_rank_run_has_is_no_question_of_ranks() -> None:
    memory = judge([on_device(0, leaks(N, 100, 40 * MIB))], expected=1)
    assert memory.first_cause is None
    assert [f.kind for f in memory.findings] == ["creep"]
