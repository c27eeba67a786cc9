"""The sentences people read."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from snapshot import Snapshot
from unit.sample_windows import judge, of_ms, synced, window

from traceml_ray.analysis.reasons import SpanRate, with_span
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import Window
from traceml_ray.stages import BACKWARD, DATA, FLAG_NO_DATA, FORWARD, SEGMENT_BITS

LIMITS = Thresholds()
WAITS = [1, 2, 0, 3, 4, 5]


def test_verdict_text_for_two_ranks(snapshot: Snapshot) -> None:
    verdict = judge(window(of_ms([WAITS, [1, 6, 0, 3, 4, 1]], 50)))
    assert (verdict.label, verdict.stage, verdict.ranks) == ("straggler", "data", (1,))
    snapshot("verdict", verdict.why, verdict.next)


def test_verdict_text_for_what_may_be_chance(snapshot: Snapshot) -> None:
    local = 20e6 * np.array([0.1, 0.3, 0.05, 0.2, 0.35]) * np.ones((20, 4, 1))
    local[:, :, DATA] *= np.random.default_rng(0).lognormal(0, 0.25, (20, 4))
    local[:, 1, DATA] += 1.5e6
    verdict = judge(window(synced(local.astype(np.int64), np.full(20, 1_000_000))))
    assert verdict.label == "healthy"
    snapshot("verdict", verdict.why)


def test_verdict_text_for_one_step(snapshot: Snapshot) -> None:
    snapshot("verdict", judge(window(of_ms([WAITS, [1, 6, 0, 3, 4, 1]]))).why)


def test_verdict_text_for_a_fault_that_just_began(snapshot: Snapshot) -> None:
    d = np.concatenate([of_ms([[1, 2, 0, 3, 4, 1]] * 2, 30), of_ms([WAITS, [1, 6, 0, 3, 4, 1]], 20)])
    verdict = judge(window(d, first_step=100))
    assert (verdict.from_step, verdict.pattern) == (130, "lasting")
    snapshot("verdict", verdict.why)


def test_verdict_text_for_two_stages_of_one_rank(snapshot: Snapshot) -> None:
    d = of_ms([[1, 2, 0, 3, 4, 7], [1, 2, 0, 3, 4, 7], [1, 5, 0, 6, 4, 1]], 50)
    verdict = judge(window(d))
    assert (verdict.label, verdict.ranks, verdict.stages) == ("ambiguous", (2,), ("data", "forward"))
    snapshot("verdict", verdict.why)


def test_verdict_text_for_two_causes(snapshot: Snapshot) -> None:
    d = of_ms([[1, 6, 0, 3, 4, 1], [1, 2, 0, 7, 4, 1], WAITS], 50)
    verdict = judge(window(d))
    assert verdict.label == "co_critical"
    snapshot("verdict", verdict.why, verdict.next)


def test_verdict_text_counts_many_ranks_instead_of_listing_them(snapshot: Snapshot) -> None:
    rows = [[1, 6, 0, 3, 4, 1] if rank % 3 == 0 else WAITS for rank in range(60)]
    verdict = judge(window(of_ms(rows, 50)))
    assert len(verdict.ranks) == len(verdict.nodes) == 20
    snapshot("verdict", verdict.why)


def test_verdict_text_for_a_healthy_run(snapshot: Snapshot) -> None:
    verdict = judge(window(of_ms([[1, 2, 0, 3, 4, 1]] * 3, 50)))
    assert (verdict.label, verdict.rank) == ("healthy", None)
    snapshot("verdict", verdict.why)


def test_advice_exists_for_every_stage():
    for stage in range(5):
        row, wait = [1, 2, 1, 3, 4, 1], [1, 2, 1, 3, 4, 5]
        row[stage] += 4
        verdict = judge(window(of_ms([wait, row, wait], 50)))
        assert verdict.rank == 1
        assert verdict.next.startswith("Look at ")
        assert "{" not in verdict.next


def repeated(advice: str) -> list[str]:
    topics = "DataLoader worker", "disk", "the device", "what else uses", "the ranks of", "optimizer"
    return [topic for topic in topics if advice.count(topic) > 1]


def late(extra: Sequence[Sequence[float]], ranks: int = 4, late_ranks: Sequence[int] = (2,)) -> Window:
    """50 steps of `ranks` (two a node) in which `late_ranks` take `extra` ms longer in each stage."""
    local = np.tile([1.0, 2.0, 1.0, 3.0, 4.0], (50, ranks, 1))
    for rank, sizes in zip(late_ranks, extra, strict=True):
        local[:, rank] += sizes
    return window(np.rint(synced(local, np.full(50, 1.0)) * 1e6).astype(np.int64))


@pytest.mark.parametrize("part", ["workers", "fetch", "collate", "optimizer"])
@pytest.mark.parametrize("stage", range(5))
@pytest.mark.parametrize("late_ranks", [(2,), (2, 3)], ids=["rank", "node"])
def test_next_step_of_a_known_span_replaces_that_of_its_stage(
    part: str, stage: int, late_ranks: tuple[int, ...]
) -> None:
    extra = [[4.0 * (index == stage) for index in range(5)]] * len(late_ranks)
    rows = late(extra, late_ranks=late_ranks)
    of_late = {(part, stage): SpanRate(4e6, 1.0)}
    verdict = judge(rows)
    advice = with_span(
        verdict, rows, lambda ranks, *_: {r: of_late if r in late_ranks else {} for r in ranks}, LIMITS
    )
    assert (verdict.label, advice.span) == ("straggler", part)
    assert repeated(advice.next) == []
    assert "rank 2" in advice.next
    generic = verdict.next.removeprefix("Look at ").rpartition("then at ")[2]
    assert generic not in advice.next


@pytest.mark.parametrize("stages", list(itertools.combinations(range(5), 2)), ids=str)
@pytest.mark.parametrize("late_ranks", [(2,), (2, 3)], ids=["rank", "node"])
def test_next_step_of_two_stages_repeats_nothing(
    stages: tuple[int, int], late_ranks: tuple[int, ...]
) -> None:
    verdict = judge(
        late([[4.0 * (index in stages) for index in range(5)]] * len(late_ranks), late_ranks=late_ranks)
    )
    label = "straggler" if stages == (FORWARD, BACKWARD) else "ambiguous"  # of a slow device
    assert (verdict.label, verdict.ranks) == (label, late_ranks)
    assert repeated(verdict.next) == []


@pytest.mark.parametrize("stage", range(5))
def test_next_step_of_ranks_late_by_different_times_repeats_nothing(stage: int) -> None:
    rows = late([[size * (index == stage) for index in range(5)] for size in (8.0, 3.9)], late_ranks=(1, 2))
    verdict = judge(rows)
    assert verdict.ranks == (1, 2) or verdict.label == "straggler"
    assert repeated(verdict.next) == []


def test_step_of_several_rows_lacks_a_mark_only_where_none_of_its_rows_has_it() -> None:
    """A GAN whose optimizers step three times on a batch: the wait for it is in the first row of three."""
    late_ms, waiting = [5, 2, 0, 3, 4, 1], [1, 2, 0, 3, 4, 5]
    d = np.repeat(of_ms([late_ms, waiting, waiting], 50), 3, axis=0)
    d[np.arange(150) % 3 > 0, :, DATA] = 0
    keys = np.array([step << SEGMENT_BITS | row for step in range(50) for row in range(3)])
    flags = np.zeros((150, 3), np.uint8)
    flags[np.arange(150) % 3 > 0] = FLAG_NO_DATA
    rows = dataclasses.replace(window(d), keys=keys, flags=flags)
    verdict = judge(rows)
    assert (verdict.label, verdict.rank, verdict.stage, verdict.window_steps) == (
        "straggler", 0, "post_sync", 50
    )  # fmt: skip
    assert "data wait" not in verdict.why
    flags[:] = FLAG_NO_DATA
    assert "No data wait was seen" in judge(dataclasses.replace(rows, flags=flags)).why
