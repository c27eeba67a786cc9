"""A run in pieces comes to what it comes to in one."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.sample_windows import RECORDED, of_ms, synced, window

from traceml_ray.analysis.busy import summarise
from traceml_ray.analysis.history import Replay
from traceml_ray.analysis.tally import Histograms, Tally
from traceml_ray.analysis.thresholds import Thresholds

LIMITS = Thresholds()
SECOND = 1_000_000_000


def run(steps=600, ranks=3):
    """Steps of three exchanges each, a rank late for a while, and noise."""
    rng = np.random.default_rng(1)
    local = rng.gamma(20, 1e5, (3 * steps, ranks, 5)).astype(np.int64)
    local[600:1200, 1, 1] += 8_000_000
    return window(synced(local, np.full(3 * steps, 100_000)), exchanges=3)


RUN = run()


def pieces(whole, cuts):
    edges = [0, *sorted(cuts), len(whole.starts)]
    rows = [*whole.starts.tolist(), len(whole.keys)]
    return [whole.take(slice(rows[a], rows[b])) for a, b in pairwise(edges)]


def tallied(parts):
    tally = Tally(LIMITS)
    for part in parts:
        tally.add(part)
    return tally


CUTS = st.lists(st.integers(0, 600), max_size=12)


@settings(max_examples=20, deadline=None)
@given(CUTS)
def test_statistics_are_the_same_in_any_pieces(cuts):
    one, several = tallied([RUN]), tallied(pieces(RUN, cuts))
    assert several.summary() == one.summary()
    assert (several.stage_ns() == one.stage_ns()).all()


@settings(max_examples=6, deadline=None)
@given(CUTS)
def test_verdicts_are_the_same_in_any_pieces(cuts):
    judged = []
    for parts in ([RUN], pieces(RUN, cuts)):
        replay = Replay(600)
        for part in parts:
            replay.add(part)
        judged.append(replay.done())
    one, several = judged
    assert list(several.spans) == list(one.spans)
    assert several.episodes.episodes == one.episodes.episodes
    assert several.whole() == one.whole()
    assert several.baseline == one.baseline


@pytest.mark.parametrize("whole", [RUN, *(window(d) for d in RECORDED.values())])
def test_statistics_are_those_of_all_rows_at_once(whole):
    exact, found = summarise(whole, LIMITS), tallied(pieces(whole, [20, 21, 150])).summary()
    assert (found.count, found.exchanges) == (exact.count, exact.exchanges)
    for one, other in zip(found.stages, exact.stages, strict=True):
        assert (one.exposed_ms, one.exposed_share) == (other.exposed_ms, other.exposed_share)
        assert one.median_ms == pytest.approx(other.median_ms, rel=0.02, abs=1e-3)
        assert one.max_ms == pytest.approx(other.max_ms, rel=0.02, abs=1e-3)
    assert found.p95_ms == pytest.approx(exact.p95_ms, rel=0.02)
    assert found.per_rank_median_ms == pytest.approx(exact.per_rank_median_ms, rel=0.02)


def test_absurd_row_leaves_no_statistics():
    bad = of_ms([[1, 2, 0, 3, 4, 5]], 20)
    bad[7, 0, 0] = -1
    assert tallied(pieces(window(bad), [10])).summary() is None
    assert tallied([]).summary() is None


@given(
    st.lists(st.just(0) | st.integers(1000, 86_400 * SECOND), min_size=1, max_size=60),
    st.sampled_from([0.0, 0.25, 0.5, 0.95, 1.0]),
    st.integers(0, 60),
)
def test_quantile_is_within_the_error_of_one_of_the_values(values, share, cut):
    histograms = Histograms(1, 0.01, 86_400 * SECOND)
    column = np.array(values, dtype=np.int64)[:, None]
    histograms.add(column[:cut])
    histograms.add(column[cut:])
    exact = np.sort(values)[int(share * (len(values) - 1))]
    assert histograms.quantile(share)[0] == pytest.approx(exact, rel=0.0101)
    assert histograms.quantile_of_all(share) == histograms.quantile(share)[0]
