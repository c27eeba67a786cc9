"""Work that varies from step to step: no healthy rank is named, and a late one is, with what it costs."""

import numpy as np
import pytest
from judged_work import COSTLY, FREE, POINTS, UNEVEN, claims_of, errors_of, naming, outcome, replayed
from varying_work import COMPUTE, Played, Work, late, play, uniform
from work_families import FAMILIES, run_of

from traceml_ray.analysis.evidence import chain
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.stages import BACKWARD, DATA, FORWARD, SYNC_WAIT

Judged = tuple[Played, list[tuple[int, Verdict]], Verdict]


def judged(name: str, seed: int) -> Judged:
    run = run_of(name, seed)
    return run, *replayed(run.window)


def named_of(verdict: Verdict) -> set[int]:
    return {rank for claim in claims_of(verdict) for rank in claim.ranks}


def cost_of(verdict: Verdict, label: str) -> float:
    return next(claim.cost or 0.0 for claim in claims_of(verdict) if claim.label == label)


# -- the played rows ---------------------------------------------------------------------------------


def test_elapsed_time_is_that_of_the_frontier_and_a_cost_is_exact():
    even = Work(4, 50, noise=0.0, spread=0.0)
    calm = play(even, (), 0)
    slow = play(even, (late(2, DATA, ms=30.0),), 0)
    elapsed = [chain(run.window.d).total_ns / 50 / 1e6 for run in (calm, slow)]
    assert elapsed == pytest.approx([even.step_ms, even.step_ms + 30], abs=0.1)
    assert slow.costs[0] == pytest.approx(30 / (even.step_ms + 30), rel=1e-3)
    assert slow.sure == (True,) and slow.imbalance == pytest.approx(0, abs=1e-3)
    assert (slow.window.d >= 0).all()


def test_exchange_that_is_longer_than_backward_hides_lateness():
    work = Work(4, 50, exchange_ms=220.0, buckets=25)
    backward, forward = (play(work, (late(2, stage, ms=40.0),), 0) for stage in (BACKWARD, FORWARD))
    assert backward.costs[0] < 0.01 < 0.1 < forward.costs[0]
    assert backward.window.d[:, 2, SYNC_WAIT].min() > 0


def test_same_draws_with_and_without_a_cause():
    work = Work(4, 50, sizes=uniform(0.5, 1.5))
    calm, slow = play(work, (), 3).window.d, play(work, (late(1, DATA, ms=10.0, spread=0.5),), 3).window.d
    others = [0, 2, 3]
    assert np.array_equal(calm[:, others, :SYNC_WAIT], slow[:, others, :SYNC_WAIT])
    assert np.array_equal(calm[:, 1, FORWARD : BACKWARD + 1], slow[:, 1, FORWARD : BACKWARD + 1])


def test_family_and_seed_are_one_run():
    name = "lengths ±60 %, 8 ranks, data 15 %"
    one, same, other = (run_of(name, seed) for seed in (1, 1, 2))
    assert np.array_equal(one.window.d, same.window.d) and one.costs == same.costs
    assert not np.array_equal(one.window.d, other.window.d)
    assert len({family.group for family in FAMILIES.values()}) > 15 and len(FAMILIES) >= 40


# -- nobody is late ----------------------------------------------------------------------------------

UNEVEN_WORK = [
    ("forward 5-60 ms, 2 ranks", 3),
    ("forward 5-60 ms, 8 ranks", 2),
    ("lengths ±40 %, 16 ranks", 2),
    ("a fifth micro-batch in turn, 16 ranks", 1),
    ("loading lognormal, 8 ranks", 2),
    ("lengths stay for 20 steps, 2 ranks", 2),
    ("lengths stay for 5 steps, 8 ranks", 1),
]


@pytest.mark.parametrize(("name", "seeds"), UNEVEN_WORK)
def test_uneven_work_names_nobody_and_is_imbalance_with_its_cost(name, seeds):
    for seed in range(seeds):
        run, live, whole = judged(name, seed)
        # Before sizes have changed a few times, a rank with a large one looks like a late one.
        first = 100 if "stay" in name else 0
        assert not [(step, verdict.ranks) for step, verdict in live if step >= first and named_of(verdict)]
        assert not named_of(whole)
        assert run.imbalance is not None and run.imbalance >= UNEVEN
        assert whole.label == "imbalance"
        assert cost_of(whole, "imbalance") == pytest.approx(100 * run.imbalance, abs=POINTS)


@pytest.mark.parametrize("name", ["quiet, 8 ranks", "all ranks alike, lengths drawn anew"])
def test_even_work_is_healthy(name):
    run, live, whole = judged(name, 0)
    assert whole.label == "healthy" and run.imbalance is not None and run.imbalance < COSTLY
    assert not [verdict for _, verdict in live if named_of(verdict)]


# -- somebody is late --------------------------------------------------------------------------------

LATE = [
    "lengths ±60 %, 8 ranks, data 15 %",
    "lengths ±50 %, 2 ranks, forward 30 %",
    "lognormal lengths stay for 5 steps, 8 ranks, backward 15 %",
    "garbage collection, 8 ranks, forward 15 %",
    "data 15 %, 4 ranks",
    "backward 30 %, 32 ranks",
    "16 ranks, 25 % slower in both",
    "9 of 16 ranks 40 % slower",
    "rank 0 saves 0.6 s every 10 steps",
    "late from the middle on",
]


@pytest.mark.parametrize("name", LATE)
def test_costly_cause_is_named_with_its_cost_and_nobody_else(name):
    for seed in (0, 1):
        run, live, whole = judged(name, seed)
        [cause], [cost] = run.causes, run.costs
        assert cost >= COSTLY / 2 and run.sure == (True,)
        assert naming(claims_of(whole), cause)
        assert all(abs(error) <= POINTS for error in errors_of(claims_of(whole), run))
        assert any(naming(claims_of(verdict), cause) for _, verdict in live)
        assert not [(step, verdict.ranks) for step, verdict in live if named_of(verdict) - run.ranks]


def test_lasting_lateness_beside_uneven_work_is_named_as_well_as_the_imbalance():
    run, _, whole = judged("lengths ±60 %, 8 ranks, data 15 %", 0)
    assert run.imbalance is not None and run.imbalance >= UNEVEN
    claims = claims_of(whole)
    assert naming(claims, run.causes[0]) and "imbalance" in [claim.label for claim in claims]
    costs = [claim.cost or 0.0 for claim in claims]
    assert costs == sorted(costs, reverse=True)


def test_small_lasting_lateness_hides_no_large_one():
    run, _, whole = judged("rank 0 saves 0.6 s every 10 steps, another is late by 7 ms", 0)
    save, small = run.causes
    assert naming(claims_of(whole)[:1], save) and naming(claims_of(whole), small)
    assert claims_of(whole)[0].cost == pytest.approx(100 * run.costs[0], abs=POINTS)


def test_512th_part_of_a_job_that_is_slower_in_forward_and_backward_is_named():
    run, _, whole = judged("512 ranks, 10 % slower in both", 0)
    assert whole.label == "straggler" and frozenset(whole.ranks) == run.ranks
    assert whole.stage in ("forward", "backward", COMPUTE)
    assert whole.cost_pct == pytest.approx(100 * run.costs[0], abs=POINTS)


@pytest.mark.parametrize("name", ["late in the last 10 of 1,000 steps", "late in the last 20 of 1,000 steps"])
def test_late_at_the_end_alone_is_no_verdict_on_the_run(name):
    run, _, whole = judged(name, 0)
    assert run.costs[0] < FREE
    assert outcome(whole, run) in ("right", "small")
    lost_s = run.costs[0] * chain(run.window.d).total_ns / 1e9
    assert (whole.lost_s or 0.0) <= 2 * lost_s


@pytest.mark.parametrize("seed", range(2))
def test_lateness_that_the_exchange_hides_costs_nothing(seed):
    run, live, whole = judged("the same, by another size each step", seed)
    assert run.costs[0] < FREE
    assert outcome(whole, run) in ("right", "small")
    assert all((verdict.cost_pct or 0.0) < 100 * 2 * FREE for _, verdict in live if verdict.ranks)
