"""Named spans: what they take per step, and which of them explains why a rank is late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import MS, Rank, Relay, aggregation, ask
from snapshot import Snapshot
from unit.sample_windows import align, judge

from traceml_ray.analysis.reasons import SpanRate, SpanRates, span_rates, with_span
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.window import RankRows, Window
from traceml_ray.document.text import WIDTH
from traceml_ray.reports.files import text_of
from traceml_ray.reports.stored_totals import StoredSpans
from traceml_ray.stages import DATA, POST_SYNC, SEGMENT_BITS
from traceml_ray.store.rank_processes import current_ranks
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.summary_shape import summary_of
from traceml_ray.wire.messages import SpanSum

LIMITS = Thresholds()
ORDINARY = [10, 2, 0, 3, 4, 1]


def window(late_ms: float, ranks: int = 3, steps: int = 50, every: int = 1) -> Window:
    """Steps in which rank 1 is late out of `post_sync`, each or every so many of them."""
    keys = np.arange(10, 10 + steps, dtype=np.int64) << SEGMENT_BITS
    flags = np.zeros(steps, np.uint8)
    chunk = []
    for rank in range(ranks):
        rows = np.tile(np.array(ORDINARY, dtype=np.float64), (steps, 1))
        late = np.arange(steps) % every == 0
        rows[late, 0 if rank == 1 else 5] += late_ms
        chunk.append(RankRows(rank, "node-0", keys, flags, (rows * MS).astype(np.int64)))
    return align(chunk, ranks)


class Known:
    """Spans of every rank as `find` returns them; of rank 1, others."""

    def __init__(self, late: dict[str, SpanRate], others: dict[str, SpanRate]) -> None:
        self.late, self.others = late, others
        self.asked: list[tuple[list[int], int, int]] = []

    def __call__(self, ranks: Sequence[int], first: int, last: int) -> Mapping[int, SpanRates]:
        self.asked.append((list(ranks), first, last))
        return {
            rank: {
                (name, POST_SYNC): rate for name, rate in (self.late if rank == 1 else self.others).items()
            }
            for rank in ranks
        }


def named(rows: Window, known: Known) -> Verdict:
    verdict = judge(rows, LIMITS)
    assert (verdict.rank, verdict.stage) == (1, "post_sync")
    return with_span(verdict, rows, known, LIMITS)


@given(late_ms=st.floats(5, 100), share=st.floats(0, 1), ordinary=st.floats(0, 8))
def test_span_is_named_from_sixty_percent_of_the_excess(
    late_ms: float, share: float, ordinary: float
) -> None:
    common = {"optimizer": SpanRate(ordinary * MS, 1.0), "logging": SpanRate(9 * MS, 1.0)}
    more = {**common, "optimizer": SpanRate((ordinary + share * late_ms) * MS, 1.0)}
    known = Known(more, common)
    verdict = named(window(late_ms), known)
    if abs(share - LIMITS.span_share) > 1e-3:
        assert verdict.span == ("optimizer" if share > LIMITS.span_share else None)
    assert known.asked == [([1, 0, 2], 10, 59)]


def test_verdict_text_gives_the_share_of_the_span(snapshot: Snapshot) -> None:
    known = Known({"optimizer": SpanRate(36 * MS, 1.0)}, {"optimizer": SpanRate(5 * MS, 1.0)})
    verdict = named(window(40), known)
    assert verdict.span == "optimizer"
    snapshot("verdict", verdict.why, verdict.next)


def test_innermost_of_nested_spans_is_named() -> None:
    late = {
        "update": SpanRate(41 * MS, 1.0),
        "optimizer": SpanRate(30 * MS, 1.0),
        "clip": SpanRate(5 * MS, 1.0),
    }
    assert named(window(40), Known(late, {})).span == "optimizer"


def test_span_of_a_single_step_does_not_explain_lateness_in_every_step() -> None:
    """An evaluation of 10 s in 50 steps is 200 ms a step on average, but no step of the others has it."""
    late = {"evaluation": SpanRate(200 * MS, 0.02), "optimizer": SpanRate(40 * MS, 1.0)}
    assert named(window(40), Known(late, {})).span == "optimizer"


def test_intermittent_span_explains_intermittent_lateness() -> None:
    known = Known({"checkpoint": SpanRate(10 * MS, 0.1), "optimizer": SpanRate(1 * MS, 1.0)}, {})
    verdict = named(window(100, every=10, steps=300), known)
    assert (verdict.pattern, verdict.span) == ("transient", "checkpoint")


@pytest.mark.parametrize("nobody", [[1], [0, 2]], ids=["the others", "the late one"])
def test_span_is_not_named_without_data_of_both_sides(nobody: list[int]) -> None:
    def find(ranks: Sequence[int], *_: int) -> Mapping[int, SpanRates]:
        return {rank: {("optimizer", POST_SYNC): SpanRate(50 * MS, 1.0)} for rank in ranks if rank in nobody}

    rows = window(40)
    assert with_span(judge(rows, LIMITS), rows, find, LIMITS).span is None


def test_verdict_without_a_rank_or_with_a_span_stays_unchanged() -> None:
    for verdict in (Verdict(label="healthy"), Verdict(label="stalled", rank=1, stage="data", span="x")):
        assert with_span(verdict, window(40), Known({}, {}), LIMITS) is verdict


def test_span_comparison_among_thousands_of_ranks_uses_a_sample() -> None:
    known = Known({"optimizer": SpanRate(40 * MS, 1.0)}, {})
    assert named(window(40, ranks=3000, steps=25), known).span == "optimizer"
    ((asked, _, _),) = known.asked
    assert len(asked) <= 65 and asked[0] == 1


SUMS = st.lists(
    st.builds(
        lambda name, stage, count, ns, first, steps, size: SpanSum(
            name, stage, count, ns, None, first, first + steps, size
        ),
        st.sampled_from(["a", "b"]),
        st.sampled_from([POST_SYNC, DATA]),
        st.integers(0, 100),
        st.integers(0, 10**12),
        st.integers(0, 60),
        st.integers(0, 20),
        st.none() | st.integers(0, 10**9),
    ),
    max_size=12,
)


@given(SUMS, st.integers(0, 80))
def test_span_rates_of_two_ranges_add_up_to_the_whole(sums: list[SpanSum], cut: int) -> None:
    last = max((span_sum.last_step for span_sum in sums), default=0)
    whole, before, after = (
        span_rates(sums, 0, last),
        span_rates(sums, 0, cut),
        span_rates(sums, cut + 1, last),
    )
    for name in ("a", "b"):
        total = sum(d.total_ns for d in sums if (d.name, d.stage) == (name, DATA))
        none = SpanRate(0.0, 0.0)
        first, second = before.get((name, DATA), none), after.get((name, DATA), none)
        steps = min(cut, last) + 1
        assert whole.get((name, DATA), none).ns * (last + 1) == pytest.approx(total)
        assert first.ns * steps + second.ns * (last - cut) == pytest.approx(total)


@settings(max_examples=25)
@given(SUMS, st.integers(0, 80), st.integers(0, 80))
def test_stored_spans_give_the_same_rates_as_those_in_memory(
    tmp_path_factory: pytest.TempPathFactory, sums: list[SpanSum], one: int, other: int
) -> None:
    first, last = sorted((one, other))
    folder = tmp_path_factory.mktemp("s")
    aggregator = aggregation(folder)
    aggregator.ingest(Relay().message(Rank(0, 1).batch(spans=sums)))
    assert aggregator.commit()
    aggregator.close()
    with SessionFile(folder / "session.sqlite") as session:
        stored = StoredSpans(session, current_ranks(session.processes())).find([0], first, last)
    live = span_rates(sums, first, last)
    rates = stored.get(0, {})
    for key in rates.keys() | live.keys():
        for a, b in zip(rates.get(key, SpanRate(0, 0)), live.get(key, SpanRate(0, 0)), strict=True):
            assert a == pytest.approx(b, abs=1)


def test_summary_report_and_live_verdict_name_the_span(tmp_path: Path, snapshot: Snapshot) -> None:
    aggregator = aggregation(tmp_path / "s", world_size=2)
    relay, ranks = Relay(), [Rank(0), Rank(1)]
    for second in range(8):
        batches = []
        for rank, ms in zip(ranks, ([1, 2, 0, 3, 4, 31], [31, 2, 0, 3, 4, 1]), strict=True):
            took = ms[0] * 10 * MS
            steps = 10 * second, 10 * second + 9
            sums = [SpanSum("optimizer", POST_SYNC, 10, took, None, *steps)]
            sums += [SpanSum("all_reduce", POST_SYNC, 10, MS, None, *steps, 40_000)]
            batches.append(rank.batch(10, [float(value) for value in ms], spans=sums))
        aggregator.ingest(relay.message(*batches))
        aggregator._clock.tick()  # type: ignore[attr-defined]
    aggregator._judge.judge()
    live = ask(aggregator, "verdict")
    summary: dict[str, Any] = ask(aggregator, "summary")
    aggregator.close()
    for verdict in (live, summary["verdict"]):
        assert (verdict["rank"], verdict["stage"], verdict["span"]) == (1, "post_sync", "optimizer")
        snapshot("verdict", verdict["why"])
    optimizer, reduce = summary["spans"]
    assert optimizer == {
        "stage": "post_sync",
        "name": "optimizer",
        "median_ms": 16.0,
        "max_ms": 31.0,
        "worst_rank": 1,
        "share": 1.0,
        "times_per_step": 1.0,
        "bytes": None,
    }
    assert (reduce["name"], reduce["max_ms"], reduce["bytes"]) == ("all_reduce", 0.1, 4000.0)
    text = text_of(summary_of(summary), tmp_path)
    assert max(map(len, text.splitlines())) <= WIDTH
    (line,) = [line.split() for line in text.splitlines() if line.startswith("  optimizer ")]
    assert line == ["optimizer", "post_sync", "16.0", "31.0", "rank", "1", "100", "%"]
    assert "  all_reduce  " not in text  # too little of a step to be worth a line


def test_span_of_an_older_agent_has_no_size() -> None:
    packed = msgspec.msgpack.encode(["optimizer", 0, 1, 2, None, 3, 4])
    assert msgspec.msgpack.decode(packed, type=SpanSum).bytes is None
