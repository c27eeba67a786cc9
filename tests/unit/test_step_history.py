"""The step history: whatever the order in which rows come, it is what all of them at once come to."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import LIMITS
from unit.sample_windows import Exact, align, exact, held_bytes, processes, synced

from traceml_ray.analysis.row_table import RankMeta, RowTable
from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.analysis.step_stats import MAX_BINS, Bins, StepSums
from traceml_ray.analysis.step_store import ALL
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.stages import (
    FLAG_EXCLUDED,
    FLAG_INSEPARABLE,
    FLAG_NO_DATA,
    FLAG_NO_PEERS,
    FLAG_NO_SPLIT,
    FORWARD,
    SEGMENT_BITS,
)


def rows(steps: int, ranks: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return synced(rng.integers(1, 20, (steps, ranks, 5)) * 1_000_000, np.full(steps, 1_000_000))


def fed(
    d: np.ndarray,
    cuts: list[list[int]],
    flags: int | np.ndarray = 0,
    exchanges: int = 1,
    limits: Thresholds = LIMITS,
) -> StepHistory:
    """StepHistory that get each rank's rows in pieces that end where `cuts` (one list a delivery) say."""
    steps, every = StepHistory(limits), processes(d, flags=flags, exchanges=exchanges)
    sent = [0] * len(every)
    for ends in [*cuts, [len(d)] * len(every)]:
        pieces = []
        for rank, end in enumerate(ends):
            end = max(end, sent[rank])
            whole = every[rank]
            part = slice(sent[rank], end)
            pieces.append(
                type(whole)(rank, whole.node, whole.keys[part], whole.flags[part], whole.rows[part])
            )
            sent[rank] = end
        steps.add_rows([piece for piece in pieces if len(piece.keys)])
        steps.advance(set(range(len(every))), sent.count(0), len(every))
    return steps


def check_stats(history: StepHistory, all_: Exact, rel: float = 1e-6) -> None:
    """Check that the statistics of a history are those of all rows at once, quantiles to within `rel`."""
    stats = history.stats()
    assert stats is not None and (stats.steps, stats.rows) == (all_.steps, all_.rows)
    assert stats.exposed == pytest.approx(all_.exposed, rel=1e-6)
    assert stats.step(0.5, 0.95) == pytest.approx([all_.median, all_.p95], rel=rel)
    assert stats.busy() == pytest.approx(all_.busy, rel=rel)
    assert stats.busy_of_all(0.95) == pytest.approx(all_.busy_p95, rel=rel)
    assert stats.stages() == pytest.approx(all_.stages, rel=rel, abs=1e-3)


@settings(max_examples=60)
@given(st.data())
def test_history_does_not_depend_on_how_rows_arrive(data: st.DataObject) -> None:
    """In whatever pieces they come, statistics are those of all of them at once."""
    count, exchanges = data.draw(st.integers(31, 90)), data.draw(st.integers(1, 3))
    d = rows(count * exchanges, ranks := data.draw(st.integers(1, 5)), data.draw(st.integers(0, 99)))
    ends = st.lists(st.integers(0, len(d)), min_size=ranks, max_size=ranks)
    marks = st.sampled_from([0, FLAG_NO_SPLIT, FLAG_NO_DATA, FLAG_NO_PEERS, FLAG_INSEPARABLE])
    some = np.array(data.draw(st.lists(marks, min_size=3, max_size=3)), np.uint8)
    flags = some[np.random.default_rng(0).integers(0, 3, d.shape[:2])]
    steps = fed(d, data.draw(st.lists(ends, max_size=6)), flags, exchanges)
    window = align(processes(d, flags=flags, exchanges=exchanges), ranks)
    check_stats(steps, exact(window.since(LIMITS.warmup_steps)))
    assert steps.columns().first.tolist() == list(range(count))


def test_slowest_of_several_groups_is_the_step() -> None:
    d = np.concatenate([rows(80, 2), 2 * rows(80, 2, 1)], axis=1)
    every = [replace(rank_rows, group=(rank_rows.rank // 2 * 2, 2)) for rank_rows in processes(d)]
    steps = StepHistory(LIMITS)
    for begin in range(0, 80, 16):
        part = slice(begin, begin + 16)
        steps.add_rows([replace(t, keys=t.keys[part], flags=t.flags[part], rows=t.rows[part]) for t in every])
        steps.advance({0, 1, 2, 3}, 0, 4)
    check_stats(steps, exact(align(every, 4).since(LIMITS.warmup_steps)))


@settings(max_examples=50)
@given(st.lists(st.integers(1, 700), min_size=1, max_size=12), st.integers(0, 99))
def test_bins_add_up(counts: list[int], seed: int) -> None:
    rng, bins, counted = np.random.default_rng(seed), Bins(2), 0
    busy = np.zeros(2)
    for count in counts:
        store = StepSums(2, count)
        store.end = count
        store.busy[:] = rng.integers(1, 9, (2, count))
        store.count[:] = store.busy > 1
        store.busy *= store.count
        store.steps[:] = 1
        store.exposed[:] = 2
        store.first[:] = store.last[:] = np.arange(counted, counted + count)
        bins.downsample(store, count)
        counted += count
        busy += store.busy.sum(axis=1)
    end = bins.end
    assert end <= MAX_BINS
    assert (bins.steps[: end - 1] == bins.width).all() and 1 <= bins.steps[end - 1] <= bins.width
    assert bins.steps.sum() == counted and bins.exposed.sum() == 12 * counted
    assert bins.busy.sum(axis=1).tolist() == busy.tolist()
    assert bins.first[0] == 0 and bins.last[end - 1] == counted - 1
    assert (bins.first[1:end] == bins.last[: end - 1] + 1).all()


@pytest.mark.parametrize("cuts", [[], [[4, 3], [20, 31]]])
def test_slowed_step_is_in_no_statistic_without_any_warm_up(
    cuts: list[list[int]],
) -> None:
    limits = msgspec.structs.replace(LIMITS, warmup_steps=0)
    d, flags = rows(60, 2), np.zeros((60, 2), np.uint8)
    aside = [0, 2, 3]  # the first, and those that FLOPs are counted in
    flags[aside], d[aside, :, FORWARD] = FLAG_EXCLUDED, 10**10
    steps = fed(d, cuts, flags, limits=limits)
    stats = steps.stats()
    assert stats is not None and stats.steps == 57 and stats.step(1.0)[0] < 1000
    assert stats.busy_of_all(1.0) < 1000 and steps.total_ms() < 57_000
    assert steps.columns(between=ALL).first.tolist() == steps.columns().first.tolist() == [1, *range(4, 60)]
    judged = steps.window([0, 1], 2, (), 60)
    assert judged.steps.tolist() == [1, *range(4, 60)] and not len(judged.lacking)
    line = steps.timeline(0)  # when something happened is still known
    assert line.first.tolist() == line.last.tolist() == [*range(60)]
    assert line.took == pytest.approx(d[:, 0].sum(axis=1), rel=1e-6)
    assert steps.counts() == {0: 60, 1: 60} and steps.ends()[0][0] == 0


def test_step_that_one_rank_is_slowed_in_is_left_out_and_not_lacking() -> None:
    """As in a profile of rank 1: the other rank has waited for it."""
    d, flags = rows(60, 2), np.zeros((60, 2), np.uint8)
    flags[0], flags[20:50, 1], d[20:50] = FLAG_EXCLUDED, FLAG_EXCLUDED, 10**9
    window = fed(d, [], flags).window([0, 1], 2, (), 60)
    assert window.steps.tolist() == [*range(1, 20), *range(50, 60)] and not window.gaps


def test_window_ends_with_a_whole_step() -> None:
    """Of a loop that has two rows a step: with an odd number of them the ranks are in the middle of one."""
    d = rows(60, 2)
    for count, last in ((60, 29), (59, 28)):
        window = fed(d[:count], [], exchanges=2).window([0, 1], 2, (), 20)
        assert window.steps.tolist() == [*range(last - 19, last + 1)] and len(window.keys) == 40


@pytest.mark.parametrize("again", [False, True])
def test_however_many_steps_are_set_aside_they_are_counted(again: bool) -> None:
    """As those of many profiles of rank 1: three runs of consecutive steps, then many single ones."""
    d, flags = rows(1000, 2), np.zeros((1000, 2), np.uint8)
    aside = [0, *range(20, 120), *range(130, 200), *range(300, 310), *range(400, 900, 5)]
    flags[0], flags[aside, 1], d[aside, 1] = FLAG_EXCLUDED, FLAG_EXCLUDED, 10**9
    steps = fed(d, [], flags)
    if again:
        steps.add_rows(processes(d, 0, flags=flags))
    line = steps.timeline(1)
    assert steps.counts() == {0: 1000, 1: 1000} and line.last.max() == 999
    assert line.took.sum() == pytest.approx(d[:, 1].sum(), rel=1e-4)


def test_memory_has_a_bound() -> None:
    steps, ranks, piece = StepHistory(LIMITS), 8192, 60
    d = np.tile(rows(piece, 64), (1, ranks // 64, 1))
    for begin in range(0, 6 * piece, piece):
        steps.add_rows(processes(d, begin))
        steps.advance(set(range(ranks)), 0, ranks)
    assert steps.single_steps == 300
    assert steps.last_step == 6 * piece - 1
    assert len(steps.columns().first) == 300 and steps.columns(between=ALL).first[0] == 0
    assert held_bytes(steps) < 260 << 20


def test_impossible_durations_are_left_out() -> None:
    d = rows(60, 3)
    d[40, 1, 2] = -5
    steps = fed(d, [[40] * 3, [41] * 3])
    assert steps.absurd == 1
    columns = steps.columns()
    assert columns.first.tolist() == list(range(60))
    assert np.isnan(columns.busy).nonzero()[0].tolist() == [1] and np.isnan(columns.busy[1, 40])
    assert np.isnan(columns.exposed).any(axis=1).nonzero()[0].tolist() == [40]


MARKS = st.sampled_from([0, FLAG_NO_SPLIT, FLAG_NO_DATA, FLAG_EXCLUDED])


def same(one: StepHistory, other: StepHistory) -> None:
    """Check that two histories hold the same."""
    for between in (None, ALL):
        for mine, theirs in zip(one.columns(between=between), other.columns(between=between), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    a, b = one.stats(), other.stats()
    assert (a is None) == (b is None)
    if a is not None and b is not None:
        assert a.step(0.1, 0.5, 0.9) == b.step(0.1, 0.5, 0.9) and a.busy().tolist() == b.busy().tolist()
    assert one.counts() == other.counts()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_history_does_not_depend_on_the_order_of_ranks_or_their_delay(data: st.DataObject) -> None:
    """Deliveries in any order between ranks; a rank may be given up, and deliver all that it has later."""
    ranks, count = data.draw(st.integers(2, 4)), 60
    every = processes(rows(count, ranks, data.draw(st.integers(0, 9))))
    sent, history = [0] * ranks, StepHistory(LIMITS)
    deliveries = st.lists(st.tuples(st.integers(0, ranks - 1), st.integers(1, 30)), max_size=12)
    for rank, n in data.draw(deliveries):
        if sent[rank] < count:
            history.add_rows([every[rank].select(slice(sent[rank], sent[rank] + n))])
            sent[rank] += n
            history.advance(set(data.draw(st.sets(st.integers(0, ranks - 1)))), 0, ranks)
    history.add_rows(
        [rank_rows.select(slice(n, None)) for rank_rows, n in zip(every, sent, strict=True) if n < count]
    )
    history.advance(set(range(ranks)), 0, ranks)
    at_once = StepHistory(LIMITS)
    at_once.add_rows(every)
    at_once.advance(set(range(ranks)), 0, ranks)
    same(history, at_once)
    assert history.left_out == 0 and history.taken == at_once.taken == count * ranks


def test_rows_that_come_a_second_time_change_nothing() -> None:
    every = processes(rows(60, 2))
    once, twice = StepHistory(LIMITS), StepHistory(LIMITS)
    for begin in range(0, 60, 10):
        part = [rank_rows.select(slice(begin, begin + 10)) for rank_rows in every]
        for history in (once, twice):
            history.add_rows(part)
            history.advance({0, 1}, 0, 2)
        twice.add_rows(part)
        twice.add_rows([rank_rows.select(slice(0, begin)) for rank_rows in every if begin])
    assert (twice.taken, twice.generation) == (once.taken, once.generation) == (120, once.generation)
    same(once, twice)


def test_rows_for_forgotten_steps_are_left_out_and_counted() -> None:
    every = processes(rows(9000, 2))
    history = StepHistory(LIMITS)
    history.add_rows([rank_rows.select(slice(0, 10)) for rank_rows in every])
    history.advance({0, 1}, 0, 2)
    for begin in range(10, 9000, 500):
        history.add_rows([every[0].select(slice(begin, begin + 500))])
        history.advance({0}, 0, 2)
    history.add_rows([every[1].select(slice(10, 20))])
    assert history.left_out == 10 and history.last_step == 8999
    history.add_rows([every[1].select(slice(8980, 9000))])
    history.advance({0, 1}, 0, 2)
    busy = history.columns().busy[1]
    assert np.isnan(busy[:-20]).all() and not np.isnan(busy[-20:]).any()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_window_of_a_table_equals_align_on_the_rows(data: st.DataObject) -> None:
    ranks, count = data.draw(st.integers(1, 4)), 40
    marks = np.array([[data.draw(MARKS) for _ in range(ranks)] for _ in range(count)], np.uint8)
    every = processes(rows(count, ranks), flags=marks, exchanges=data.draw(st.integers(1, 2)))
    some = st.sets(st.integers(0, count - 1), min_size=1)
    every = [rank_rows.select(np.array(sorted(data.draw(some)), np.int64)) for rank_rows in every]
    table = RowTable()
    table.add_ranks(range(ranks))
    pieces = [(rank_rows, cut) for rank_rows in every for cut in (slice(0, 7), slice(7, None))]
    for rank_rows, cut in data.draw(st.permutations(pieces)):
        if len(rank_rows.keys[cut]):
            places = table.places([rank_rows.rank])
            table.put(places, rank_rows.keys[cut], rank_rows.flags[cut][None], rank_rows.rows[cut][None])
    who = [RankMeta(rank_rows.node, rank_rows.group, rank_rows.strategy) for rank_rows in every]
    window_of_table = table.window(table.between(-1, 1 << 62), range(ranks), who, ranks)
    aligned = align(every, ranks)
    for name in ("keys", "ranks", "d", "flags", "lacking"):
        assert np.array_equal(getattr(window_of_table, name), getattr(aligned, name)), name
    for rank_rows in every:
        keys, flags, own_rows = table.line(rank_rows.rank, 1000)
        assert np.array_equal(keys, rank_rows.keys) and np.array_equal(own_rows, rank_rows.rows)
        assert np.array_equal(flags, rank_rows.flags)


def test_table_forgets_the_oldest_columns_and_keeps_the_rest() -> None:
    table, d = RowTable(), rows(20_000, 1)
    table.add_ranks([7])
    for begin in range(0, 20_000, 100):
        keys = np.arange(begin, begin + 100, dtype=np.int64) << SEGMENT_BITS
        table.put(table.places([7]), keys, np.zeros((1, 100), np.uint8), d[None, begin : begin + 100, 0])
        table.forget(1 << 62)
    keys, _, line_rows = table.line(7, 4000)
    assert np.array_equal(line_rows, d[-4000:, 0]) and keys[-1] >> SEGMENT_BITS == 19_999
    assert held_bytes(table) < 2 << 20
    assert len(table.line(8, 10)[0]) == 0
