"""Ranks that exchange gradients in several groups: each group is judged by itself, the costliest is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sessions import Rank, Relay, aggregation
from snapshot import Snapshot
from unit.sample_windows import align, judge, judge_run, of_ms, processes, window
from unit.test_rank_agent import Pipe, make
from unit.test_recorder import Loop

from traceml_ray.analysis import abstention
from traceml_ray.analysis.history import RunJudge
from traceml_ray.analysis.reasons import SpanRate, SpanRates, with_span
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.track import with_saving
from traceml_ray.analysis.verdict import DEFAULTS, Verdict, judge_window
from traceml_ray.analysis.window import Group, Window, missing_of
from traceml_ray.stages import DATA, FLAG_INSEPARABLE, FLAG_NO_PEERS, N_STAGES, SYNC_WAIT
from traceml_ray.store.session_file import SessionFile

MS = 1_000_000
BALANCED = [[1, 2, 0, 3, 4, 1]] * 2
LATE = [[1, 2, 0, 3, 4, 5], [1, 6, 0, 3, 4, 1]]
LATER = [[1, 2, 0, 3, 4, 11], [1, 2, 0, 13, 4, 1]]
LONG = [[1, 2, 0, 30, 40, 1]] * 2
"""Rows in ms of two ranks; in LATE rank 1 of the two is late by 4 ms, in LATER by 10."""
PAIRS: list[Group | None] = [(0, 2), (0, 2), (2, 2), (2, 2)]


def grouped(
    rows: Sequence[Sequence[float]],
    groups: Sequence[Group | None] = PAIRS,
    missing: Sequence[int] = (),
    steps: int = 50,
    strategy: str | None = None,
    flags: int = 0,
) -> Window:
    ranks_rows = processes(of_ms(rows, steps), flags=flags)
    ranks = [
        replace(one, group=group, strategy=strategy) for one, group in zip(ranks_rows, groups, strict=True)
    ]
    return align(ranks, len(rows), missing)


def named(verdict: Verdict) -> tuple[str, str | None, tuple[int, ...]]:
    return verdict.label, verdict.stage, verdict.ranks


# -- the verdict over several groups ---------------------------------------------------------------


def test_straggler_is_named_in_its_group_and_costs_its_group(snapshot: Snapshot) -> None:
    verdict, evidence, _ = judge_window(grouped([*BALANCED, *LATE]), DEFAULTS)
    alone = judge(window(of_ms(LATE, 50)))
    assert named(verdict) == ("straggler", "data", (3,))
    assert verdict.rank_hours_per_hour == alone.rank_hours_per_hour == pytest.approx(2 * 4 / 15)
    assert (verdict.mean_step_ms, verdict.coverage, verdict.confidence) == (15, 1.0, "high")
    snapshot("verdict", with_saving(verdict).why)
    assert {suspect.rank for suspect in verdict.suspects} == {3}
    assert evidence is not None and evidence.window.ranks.tolist() == [2, 3]


def test_groups_need_not_take_equally_long() -> None:
    """As one group they would not be compared at all: their totals differ."""
    verdict = judge(grouped([*LONG, *LATE]))
    assert named(verdict) == ("straggler", "data", (3,))
    unknown = judge(grouped([*LONG, *LATE], groups=[None] * 4))
    assert unknown.label == "accounting_only"


def test_costlier_of_two_late_ranks_is_named() -> None:
    assert named(judge(grouped([*LATE, *LATER]))) == ("straggler", "forward", (3,))
    assert named(judge(grouped([*LATER, *LATE]))) == ("straggler", "forward", (1,))
    # A smaller share of more ranks may cost more.
    many: list[Group | None] = [(0, 2)] * 2 + [(2, 6)] * 6
    verdict = judge(grouped([*LATE, *[LATE[0]] * 5, LATE[1]], many))
    assert named(verdict) == ("straggler", "data", (7,))
    assert verdict.rank_hours_per_hour == pytest.approx(6 * 4 / 15)


def test_healthy_groups_leave_no_baseline(snapshot: Snapshot) -> None:
    rows = grouped([*BALANCED, *LONG], steps=400)
    verdict, evidence, _ = judge_window(rows, DEFAULTS)
    assert (verdict.label, verdict.confidence, evidence) == ("healthy", "high", None)
    snapshot("verdict", verdict.why)
    run = judge_run([replace(one, group=(0, 2)) for one in processes(of_ms(BALANCED, 400))], 2)
    assert run.baseline is not None
    several = RunJudge()
    for end in range(50, 400, 10):
        several.update(rows.select(slice(end - 50, end)))
    assert several.baseline is None and several.run_verdict().label == "healthy"


def test_missing_rank_of_one_group_hides_no_straggler_in_another(snapshot: Snapshot) -> None:
    three: list[Group | None] = [*PAIRS[:2], (2, 3), (2, 3), (2, 3)]
    late = judge(grouped([*LATE, *BALANCED, BALANCED[0]], three, missing=[4]))
    assert named(late) == ("straggler", "data", (1,))
    healthy = judge(grouped([*BALANCED, *BALANCED, BALANCED[0]], three, missing=[4]))
    assert healthy.label == "telemetry_limited"
    snapshot("verdict", healthy.why)


def test_missing_ranks_that_are_not_all_listed_are_in_no_group() -> None:
    rows = grouped(BALANCED, [(0, 65), (1, 65)])
    window = replace(rows, expected=130, missing=tuple(missing_of(130, [0, 1])))
    assert window.by_group()[0].missing == ()


def test_ranks_of_unknown_group_are_one_group(snapshot: Snapshot) -> None:
    silent = judge(grouped([*BALANCED, *BALANCED], missing=[2, 3]))
    assert silent.label == "telemetry_limited"
    snapshot("verdict", silent.why)
    assert named(judge(grouped([*BALANCED, *LATE], [*PAIRS[:2], None, None])))[2] == (3,)
    # One that says nothing is of the group that says it is all of the job.
    whole: list[Group | None] = [(0, 4), (0, 4), None, (0, 4)]
    rows = grouped([*[LATE[0]] * 3, LATE[1]], whole)
    assert rows.by_group() == [rows] and named(judge(rows)) == ("straggler", "data", (3,))


def test_ranks_in_groups_of_one_do_not_exchange_gradients(snapshot: Snapshot) -> None:
    groups_of_one: list[Group | None] = [(rank, 1) for rank in range(4)]
    verdict = judge(grouped([*BALANCED, *LATE], groups_of_one, flags=FLAG_NO_PEERS))
    assert (verdict.label, verdict.why) == ("accounting_only", abstention.NO_SYNC)
    snapshot("verdict", verdict.why)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.floats(0, 20)), min_size=2, max_size=2),
    st.lists(st.floats(1, 5), min_size=2, max_size=2),
    st.integers(2, 4),
)
def test_verdict_of_two_groups_is_that_of_the_costlier_one(
    faults: list[tuple[int, float]], scale: list[float], size: int
) -> None:
    alone, parts = [], []
    for (stage, late_ms), times in zip(faults, scale, strict=True):
        rows = np.tile(np.array([1, 2, 1, 3, 4, 1]) * times, (size, 1))
        rows[:, SYNC_WAIT] += late_ms
        rows[-1, stage] += late_ms
        rows[-1, SYNC_WAIT] -= late_ms
        parts.append(rows)
        alone.append(judge(window(of_ms(rows, 50))))
    groups: list[Group | None] = [(0, size)] * size + [(size, size)] * size
    verdict = judge(grouped(np.concatenate(parts).tolist(), groups))
    costs = [part.rank_hours_per_hour or 0.0 for part in alone]
    assert (verdict.rank_hours_per_hour or 0.0) == max(costs)
    worst = int(np.argmax(costs))
    expected = named(alone[worst])
    assert named(verdict) == (*expected[:2], tuple(rank + worst * size for rank in expected[2]))


@given(st.integers(1, 5), st.integers(1, 5), st.booleans(), st.data())
def test_ranks_are_each_in_one_group_and_missing_ones_counted_once(
    groups: int, size: int, strided: bool, data: st.DataObject
) -> None:
    world = groups * size
    groups_of = [(rank % groups, size) if strided else (rank // size * size, size) for rank in range(world)]
    missing = sorted(data.draw(st.sets(st.integers(0, world - 1), max_size=world - 1)))
    parts = grouped([BALANCED[0]] * world, groups_of, missing, steps=2).by_group()
    live = [rank for part in parts for rank in part.ranks.tolist()]
    assert sorted(live) == sorted(set(range(world)) - set(missing))
    assert sum(part.expected - len(part.ranks) for part in parts) == len(missing)
    for part in parts:
        assert len({groups_of[rank] for rank in part.ranks.tolist()}) <= 1 or len(parts) == 1
        assert part.d.shape == (2, len(part.ranks), N_STAGES) == (*part.flags.shape, N_STAGES)
        assert part.missing == () or len(part.missing) == part.expected - len(part.ranks)
        if not strided and len(parts) > 1 and len(part.ranks):
            ours = groups_of[int(part.ranks[0])]
            assert part.missing == tuple(rank for rank in missing if groups_of[rank] == ours)


def test_span_is_compared_within_the_group_of_the_rank() -> None:
    """The others spend as long in it, but nobody waits for them there."""
    rows = grouped([*LONG, *LATE])
    asked: list[int] = []

    def find(ranks: Sequence[int], *_: int) -> Mapping[int, SpanRates]:
        asked.extend(ranks)
        return {rank: {("fetch", DATA): SpanRate((1 if rank == 2 else 6) * MS, 1.0)} for rank in ranks}

    assert with_span(judge(rows), rows, find, Thresholds()).span == "fetch"
    assert asked == [3, 2]


# -- other couplings -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("fsdp2", abstention.COUPLED),
        ("fsdp2+tp", "Tensor-parallel collectives run inside forward"),
        ("tp", "Tensor-parallel collectives run inside forward"),
        ("fsdp2+pp", "pipeline stages do different work"),
        ("ddp+pp+tp", "pipeline stages do different work"),
    ],
)
def test_reason_of_a_coupling_is_in_the_verdict(strategy: str, why: str) -> None:
    for groups in (PAIRS, [None] * 4):
        verdict = judge(grouped([*BALANCED, *LATE], groups, strategy=strategy, flags=FLAG_INSEPARABLE))
        assert verdict.label == "accounting_only" and why in verdict.why


def test_imbalance_hidden_by_waits_inside_a_step_is_not_called_healthy() -> None:
    """Slow in forward and fast in backward: nothing for DDP, but under FSDP the others wait twice."""
    turns = [[1, 2, 0, 2, 9, 6], [1, 2, 0, 2, 9, 6], [1, 2, 0, 9, 2, 6]]
    everyone: list[Group | None] = [(0, 3)] * 3
    assert judge(grouped(turns, everyone, strategy="ddp")).label == "healthy"
    verdict = judge(grouped(turns, everyone, strategy="fsdp2"))
    assert (verdict.label, verdict.why) == ("accounting_only", abstention.HIDDEN)
    both = [[1, 2, 0, 9, 2, 10], [1, 2, 0, 2, 9, 10], [1, 2, 0, 2, 2, 17]]
    verdict = judge(grouped(both, everyone, strategy="fsdp2"))
    assert verdict.label == "co_critical" and "each may save more" in verdict.why


# -- what blocks inside a stage --------------------------------------------------------------------


def test_wait_inside_a_stage_is_sync_wait_wherever_it_is() -> None:
    loop = Loop()
    loop.step()
    loop.data(2)
    loop.sync(10)  # in prepare
    loop.forward(4)
    loop.sync(20)
    loop.recorder.backward_begin()
    loop.clock.wait(3)
    loop.sync(30)
    loop.clock.wait(2)
    loop.recorder.gradients_done()
    loop.sync(40)
    loop.recorder.backward_end(True)
    outer = loop.recorder.sync_begin()
    loop.sync(50)  # inside another wait
    loop.clock.wait(5)
    loop.recorder.sync_end(outer)
    loop.clock.wait(6)
    loop.data(1)
    loop.forward(1)
    loop.backward(1, 1)
    loop.optimizer(1)
    (_, _, row), (_, _, following) = loop.rows()[1:]
    assert row == [1, 2, 0, 4, 5, 100]
    assert following == [6, 1, 0, 1, 1, 56]


def test_wait_of_another_thread_is_ignored() -> None:
    loop = Loop()
    loop.step()
    loop.recorder.owner = -1
    assert not loop.recorder.sync_begin()


# -- from the batch to the verdict -----------------------------------------------------------------


def test_group_of_a_rank_reaches_the_session_file(tmp_path: Path) -> None:
    aggregator, relay = aggregation(tmp_path), Relay()
    ranks = [Rank(number, 4) for number in range(4)]
    for rank, row in zip(ranks, [*LONG, *LATE], strict=True):
        pair = (rank.identity.global_rank // 2 * 2, 2)
        aggregator.ingest(relay.message(rank.batch(120, row, group=pair, strategy="ddp")))
        aggregator.ingest(relay.message(rank.batch(1, row)))  # one that does not say changes nothing
    aggregator.commit()
    aggregator.judge()
    live = aggregator._judge.verdict()
    assert live is not None and named(live) == ("straggler", "data", (3,))
    aggregator.close()
    path = tmp_path / "session.sqlite"
    with SessionFile(path) as session:
        rows, _ = session.rows()
        assert [one.group for one in rows] == PAIRS and {one.strategy for one in rows} == {"ddp"}
        assert named(judge_run(rows, 4).run_verdict()) == ("straggler", "data", (3,))


def test_agent_sends_the_group_once_it_knows_it() -> None:
    pipe = Pipe()
    agent = make(pipe)
    agent.tick()
    agent.instrumentation.data_parallel.group = (4, 8)
    agent.tick()
    assert [batch.group for batch in pipe.batches()] == [None, (4, 8)]


@pytest.mark.parametrize("more", [1.0, 1.1])
def test_label_does_not_switch_between_two_equally_late_groups(more: float) -> None:
    random = np.random.default_rng(0)
    local = (
        60e6 * np.array([0.1, 0.1, 0.05, 0.25, 0.5]) * np.clip(random.normal(1, 0.1, (2000, 8, 5)), 0.5, 2)
    )
    local[:, 1, DATA] += 30e6
    local[:, 5, DATA] += 30e6
    local[1000:, 5, DATA] *= more
    waits = local.sum(axis=2).reshape(2000, 2, 4)
    waits = (waits.max(axis=2, keepdims=True) - waits).reshape(2000, 8, 1) + 1e6
    rows = processes(np.concatenate([local, waits], axis=2).astype(np.int64))
    run = judge_run([replace(one, group=(rank // 4 * 4, 4)) for rank, one in enumerate(rows)], 8)
    assert [span.ranks for span in run.periods if span.ranks] in ([(1,)], [(5,)])
    (episode,) = run.episodes.episodes
    assert episode.cost_s == pytest.approx(2000 * 0.03, rel=0.15)


def test_group_that_costs_clearly_more_takes_the_name() -> None:
    rows = processes(np.concatenate([of_ms([*LATE, *BALANCED], 600), of_ms([*LATE, *LATER], 600)]))
    run = judge_run([replace(one, group=PAIRS[rank]) for rank, one in enumerate(rows)], 4)
    assert [span.ranks for span in run.periods if span.ranks] == [(1,), (3,)]
