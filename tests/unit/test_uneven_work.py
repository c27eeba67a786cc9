"""Why ranks are uneven: shares of the variance that were planted are found, and nothing is said of chance."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from varying_work import window_of

from traceml_ray.analysis.evidence import Cause, gather
from traceml_ray.analysis.rules import is_hidden
from traceml_ray.analysis.uneven_work import (
    MIN_STEPS,
    Reason,
    explained,
    fit,
    pauses,
    reason_of,
    reason_of_more,
    stage_shares,
    unevenness,
)
from traceml_ray.stages import BACKWARD, DATA, FORWARD, N_STAGES, POST_SYNC, SYNC_WAIT

seeds = st.integers(0, 2**32 - 1)
ranks_of = st.sampled_from([2, 3, 8, 16])


def lengths(rng: np.random.Generator, steps: int, ranks: int, stay: int = 1) -> np.ndarray:
    """Tokens of a batch (S, R), drawn anew every `stay` steps."""
    drawn = rng.uniform(200, 1000, (steps // stay + 1, ranks))
    return np.repeat(drawn, stay, axis=0)[:steps].round()


def noise(rng: np.random.Generator, like: np.ndarray, share: float) -> np.ndarray:
    """White noise (S, R) beside which `like` has exactly `share` of the variance of the unevenness."""
    x = unevenness(like)
    y = unevenness(rng.normal(size=like.shape))
    y -= (y * x).sum() / (x * x).sum() * x  # nothing of it is explained by chance
    return y * np.sqrt((1 - share) / share * (x * x).sum() / (y * y).sum())


def stages(compute: np.ndarray, data: Any = 1.0, between: Any = 1.0) -> np.ndarray:
    """Local stages, ns (S, R, 6), from ms: a third of `compute` is forward, the rest backward."""
    work = np.zeros((*compute.shape, N_STAGES))
    work[..., FORWARD], work[..., BACKWARD] = compute / 3, 2 * compute / 3
    work[..., DATA], work[..., POST_SYNC] = data, between
    return (work * 1e6).astype(np.int64)


def of_ranks(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int64)


@given(seeds, ranks_of, st.floats(0.3, 0.99), st.sampled_from([200, 400]))
def test_planted_share_is_found(seed: int, ranks: int, share: float, steps: int) -> None:
    """Whatever is common to all ranks of a step, and whatever a rank has in every step, changes nothing."""
    rng = np.random.default_rng(seed)
    tokens = lengths(rng, steps, ranks)
    common, lasting = rng.exponential(200, (steps, 1)), rng.exponential(200, (1, ranks))
    explanation = explained(5000 + 0.1 * tokens + 0.1 * noise(rng, tokens, share) + common + lasting, tokens)
    assert explanation is not None
    assert explanation.share == pytest.approx(share, abs=0.02)
    assert explanation.slope == pytest.approx(0.1, rel=1e-3)


@given(seeds, st.sampled_from([2, 8]), st.sampled_from([1, 5, 20]), st.sampled_from([50, 200, 400]))
def test_nothing_is_said_of_sizes_that_have_nothing_to_do_with_work(
    seed: int, ranks: int, stay: int, steps: int
) -> None:
    """Also where both stay for some steps: a window has few independent pieces then."""
    rng = np.random.default_rng(seed)
    work = 100 + lengths(rng, steps, ranks, stay)
    assert explained(work, lengths(rng, steps, ranks, stay)) is None


def test_lengths_that_stay_are_told_from_chance_once_there_are_enough_of_them() -> None:
    rng = np.random.default_rng(0)
    tokens = lengths(rng, 1000, 2, stay=20)
    work = 0.1 * tokens + 0.1 * noise(rng, tokens, 0.9)
    assert explained(work[:50], tokens[:50]) is None
    few = reason_of(stages(work[:50]), {"tokens": tokens[:50]}, of_ranks(2))
    assert (few.what, few.sizes_known, few.tokens) == ("unknown", True, None)
    explanation = explained(work, tokens)
    assert explanation is not None and explanation.share == pytest.approx(0.9, abs=0.02)


def test_more_of_an_amount_that_comes_with_less_work_explains_nothing() -> None:
    tokens = lengths(np.random.default_rng(0), 200, 4)
    assert explained(2000 - tokens, tokens) is None
    assert fit(2000 - tokens, tokens) is not None


@pytest.mark.parametrize("amount", [0.0, 4096.0, 1e12])
def test_amount_that_is_alike_everywhere_explains_nothing(amount: float) -> None:
    work = lengths(np.random.default_rng(0), 100, 4)
    assert fit(work, np.full(work.shape, amount)) is None
    assert fit(np.full(work.shape, 5.0), work) is None


@given(seeds, ranks_of, st.floats(0.55, 0.99))
def test_tokens_are_the_reason_where_they_explain_most(seed: int, ranks: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    tokens = lengths(rng, 200, ranks)
    samples = rng.integers(3, 6, tokens.shape).astype(float)
    work = stages(20 + 0.1 * (tokens + noise(rng, tokens, share)))
    reason = reason_of(work, {"samples": samples, "tokens": tokens}, of_ranks(ranks))
    assert (reason.what, reason.sizes_known, reason.steps) == ("tokens", True, 200)
    assert reason.share == reason.tokens == pytest.approx(share, abs=0.03)
    assert reason.compute == pytest.approx(share, abs=0.03)
    assert reason.in_compute == pytest.approx(1, abs=0.01)
    assert reason.unknown_ranks == ()


def test_share_in_compute_is_of_forward_and_backward_alone() -> None:
    rng = np.random.default_rng(0)
    tokens = lengths(rng, 400, 8)
    x = unevenness(tokens)
    loading = noise(rng, tokens, 0.5) * 0.1 + 100
    work = stages(20 + 0.1 * tokens, data=loading)
    reason = reason_of(work, {"samples": np.full(x.shape, 4.0), "tokens": tokens}, of_ranks(8))
    assert reason.share == pytest.approx(0.5, abs=0.03)
    assert reason.compute == pytest.approx(1, abs=0.01)
    assert reason.in_compute == pytest.approx(0.5, abs=0.05)


def test_samples_are_the_reason_where_all_have_the_same_length() -> None:
    """Tokens explain as much, and nothing beyond."""
    rng = np.random.default_rng(0)
    samples = rng.integers(8, 33, (200, 4)).astype(float)
    work = stages(5 + samples + 0.2 * rng.normal(size=samples.shape))
    reason = reason_of(work, {"samples": samples, "tokens": 512 * samples}, of_ranks(4))
    assert reason.what == "samples" and (reason.share or 0) > 0.95
    assert reason.tokens == pytest.approx(reason.samples)
    alone = reason_of(work, {"samples": samples, "tokens": np.full(samples.shape, np.nan)}, of_ranks(4))
    assert (alone.what, alone.share, alone.tokens) == ("samples", reason.share, None)


@pytest.mark.parametrize(
    ("part", "what"), [("data", "data"), ("between", "between_steps"), ("compute", "other")]
)
def test_where_sizes_explain_nothing_the_stages_that_vary_are_named(part: str, what: str) -> None:
    rng = np.random.default_rng(0)
    varies = {"compute": np.full((200, 4), 30.0), part: rng.uniform(5, 60, (200, 4))}
    sizes = {"samples": np.full((200, 4), 8.0), "tokens": lengths(rng, 200, 4)}
    reason = reason_of(stages(**varies), sizes, of_ranks(4))
    assert (reason.what, reason.tokens, reason.samples) == (what, None, None)
    assert reason.share is None if what == "other" else reason.share == pytest.approx(1, abs=0.02)
    assert reason_of(stages(**varies), sizes, of_ranks(4), uneven_experts=True).what == (
        "experts" if what == "other" else what
    )


def test_pauses_now_and_then_are_told_from_what_varies_all_the_time() -> None:
    rng = np.random.default_rng(0)
    steady = 30 + rng.normal(size=(200, 4))
    paused = steady + 300 * (rng.random((200, 4)) < 0.03)
    sizes = {"samples": np.full((200, 4), 8.0)}
    assert reason_of(stages(paused), sizes, of_ranks(4)).what == "pauses"
    assert reason_of(stages(steady), sizes, of_ranks(4)).what == "other"
    assert (pauses(paused) or 0) > 0.9 and pauses(steady) is None


def test_sizes_that_some_ranks_lack_are_of_the_others_and_say_so() -> None:
    rng = np.random.default_rng(0)
    tokens = lengths(rng, 200, 4)
    work = stages(20 + 0.1 * tokens)
    tokens[:, 2] = np.nan
    tokens[::10, 1] = np.nan
    none = np.full(tokens.shape, np.nan)
    reason = reason_of(work, {"samples": none, "tokens": tokens}, of_ranks(4))
    assert (reason.what, reason.unknown_ranks, reason.steps) == ("tokens", (2,), 180)
    tokens[:, 3] = tokens[:, 1] = np.nan
    reason = reason_of(work, {"samples": none, "tokens": tokens}, of_ranks(4))
    assert (reason.what, reason.sizes_known, reason.unknown_ranks) == ("unknown", False, (1, 2, 3))
    assert reason_of(work, {}, of_ranks(4)).what == "unknown"


@pytest.mark.parametrize(
    ("times", "slower", "what", "share"),
    [
        *((1.3, 1.0, "tokens", 1.0), (1.3, 1.3, "tokens", 0.3 / 0.69), (1.0, 1.3, None, 0)),
        *((1.5, 0.5, None, 0), (1.03, 1.5, None, 0)),
    ],
)
def test_larger_batches_of_a_late_rank_are_told_from_a_slow_one(
    times: float, slower: float, what: str | None, share: float
) -> None:
    rng = np.random.default_rng(0)
    tokens = 5000 + lengths(rng, 400, 4)
    tokens[:, 2] *= times
    work = 0.1 * tokens * np.where(np.arange(4) == 2, slower, 1.0)
    named = np.arange(4) == 2
    sizes = {"tokens": tokens}
    reason = reason_of_more(work * 1e6, sizes, named)
    if what is None:
        assert reason is None
        return
    assert reason is not None and (reason.what, reason.sizes_known, reason.samples) == (what, True, None)
    assert reason.times == pytest.approx(times, rel=0.01)
    assert reason.share == reason.tokens == pytest.approx(share, rel=0.1)


@given(seeds, st.sampled_from([1, 5, 20]), st.sampled_from([50, 400]))
def test_batches_that_are_larger_by_chance_are_not_mentioned(seed: int, stay: int, steps: int) -> None:
    """Of a rank that is slow by itself."""
    tokens = lengths(np.random.default_rng(seed), steps, 4, stay)
    named = np.arange(4) == 2
    assert reason_of_more(np.where(named, 1.2, 1) * tokens, {"tokens": tokens}, named) is None


def test_larger_batches_are_not_said_of_sizes_that_are_not_known() -> None:
    tokens = lengths(np.random.default_rng(0), 60, 4)
    tokens[:, 2] *= 2
    named = np.arange(4) == 2
    assert reason_of_more(tokens, {"tokens": tokens}, named) is not None
    for rank, known in ((2, 15), (2, 29), (0, 0)):
        sizes = tokens.copy()
        sizes[known:, rank] = np.nan
        reason = reason_of_more(tokens, {"tokens": sizes}, named)
        assert (reason is None) == (rank == 2), (rank, known)
    assert reason_of_more(tokens, {"tokens": np.full(tokens.shape, np.nan)}, named) is None
    assert reason_of_more(tokens, {}, named) is None


def test_sizes_of_a_part_of_the_steps_are_enough() -> None:
    """Old ones were folded away, the newest have not come yet."""
    rng = np.random.default_rng(0)
    tokens = lengths(rng, 1000, 4)
    tokens[:, 1] += 2000
    work = stages(20 + 0.1 * tokens)
    known = np.full(tokens.shape, np.nan)
    known[800:990] = tokens[800:990]
    reason = reason_of(work, {"samples": known * np.nan, "tokens": known}, of_ranks(4))
    assert (reason.what, reason.steps, reason.unknown_ranks) == ("tokens", 190, ())
    compute = work[..., [FORWARD, BACKWARD]].sum(axis=2)
    more = reason_of_more(compute, {"tokens": known}, np.arange(4) == 1)
    assert more is not None and (more.what, more.steps) == ("tokens", 190)


@pytest.mark.filterwarnings("error")
def test_ranks_that_are_never_known_give_no_warning() -> None:
    tokens = lengths(np.random.default_rng(0), 60, 4)
    tokens[:, 0] = tokens[30:, 1] = np.nan
    for named in (0, 1, 2):
        reason_of_more(np.full((60, 4), 10**6), {"tokens": tokens}, np.arange(4) == named)
    reason_of(stages(np.nan_to_num(tokens)), {"tokens": tokens}, of_ranks(4))


def test_little_data_says_nothing() -> None:
    work = stages(lengths(np.random.default_rng(0), MIN_STEPS - 1, 4))
    assert reason_of(work, {}, of_ranks(4)) == Reason(what="unknown", steps=MIN_STEPS - 1)
    assert reason_of(np.zeros((50, 1, N_STAGES), np.int64), {}, of_ranks(1)).what == "unknown"
    assert reason_of(np.zeros((50, 3, N_STAGES), np.int64), {}, of_ranks(3)).what == "unknown"


@given(seeds, ranks_of)
def test_shares_of_stages_add_up_and_order_of_ranks_is_nothing(seed: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    work = rng.integers(0, 10**9, (60, ranks, N_STAGES))
    work[..., SYNC_WAIT] = 0
    assert sum(stage_shares(work).values()) == pytest.approx(1)
    order = rng.permutation(ranks)
    tokens = lengths(rng, 60, ranks)
    one = reason_of(work, {"tokens": tokens}, of_ranks(ranks))
    other = reason_of(work[:, order], {"tokens": tokens[:, order]}, of_ranks(ranks)[order])
    for name, value in msgspec.structs.asdict(one).items():
        same = getattr(other, name)
        assert same == (pytest.approx(value) if isinstance(value, float) else value), name


def test_few_steps_of_an_unsteady_exchange_do_not_hide_a_late_rank() -> None:
    rng = np.random.default_rng(0)

    def hidden() -> bool | None:
        """Judge 21 steps in which rank 2 is late by 16 ms in backward, before an exchange of any length."""
        d = np.zeros((21, 4, 6))
        d[:, :, 0] = 0.3
        d[:, :, BACKWARD] = 0.6 + 0.1 * rng.standard_normal((21, 4))
        d[:, 2, BACKWARD] += 16 + 1.9 * rng.standard_normal(21)
        ends = d.sum(axis=2).max(axis=1) + 5 + np.abs(4 * rng.standard_t(3, 21))
        d[:, :, SYNC_WAIT] = ends[:, None] - d.sum(axis=2)
        return is_hidden(gather(window_of((d * 1e6).astype(np.int64))), (Cause(BACKWARD, (2,)),))

    assert [hidden() for _ in range(1000)].count(True) <= 2
