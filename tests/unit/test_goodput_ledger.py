"""The ledger adds up exactly, whatever ranks report; what is not known stays unknown."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traceml_ray.signals.goodput.ledger import (
    Attempt,
    Balance,
    Progress,
    RankMoments,
    Repeated,
    balance,
    repeated,
    share_from,
    whole_step,
    without_intervals,
)
from traceml_ray.signals.goodput.pieces import (
    AFTER,
    BEFORE,
    CATEGORIES,
    DATA,
    EVALUATION,
    EXPLICIT,
    HANG,
    IDLE,
    INSIDE,
    OF_OTHERS,
    OTHER,
    PREPARATION,
    PRODUCTIVE,
    RECOVERY,
    RESTORE,
    SAVE,
    STARTUP,
    UNKNOWN,
    WAITING,
    WASTED,
    Piece,
    of_others,
    of_parts,
)

S = 1_000_000_000


def attempt(
    *marks: tuple[int, int, int, int],
    begin: int = 0,
    end: int = 100,
    world: int | None = None,
    rows: tuple[int, int, int] | None = (70, 7, 14),
    pieces: tuple[tuple[int, int, int], ...] = (),
    over: bool = True,
    wasted: float | None = 0.0,
    hung: tuple[int, int] = (0, 0),
    others: Any = None,
    before: int = 0,
    replaced: bool = False,
) -> Attempt:
    """An attempt of ranks with these moments (attached, first row, newest row, ended), in s."""
    moments = np.array(marks or ((10, 20, 90, 95),), np.int64).T
    count = moments.shape[1]
    explicit = np.stack(
        [
            of_parts(
                [Piece(what, a * S, b * S, (b - a) * S) for what, a, b in pieces],
                [int(m if m >= 0 else one[3]) * S for m in one],
            )
            for one in moments.T
        ]
    )
    sums = [np.full(count, UNKNOWN if rows is None else rows[place] * S, np.int64) for place in range(3)]
    known = np.where(moments < 0, UNKNOWN, moments * S)
    table = RankMoments(
        np.arange(count), known[0], np.full(count, before * S), np.full(count, replaced), *known[1:],
        over=np.full(count, over), took_ns=sums[0], data_ns=sums[1],
        waited_ns=sums[2], explicit=explicit,
        others=np.array(others or np.zeros((count, 3, 3)), np.int64) * S,
        hung_ns=np.full((count, 2), hung, np.int64) * S,
    )  # fmt: skip
    return Attempt(begin * S, end * S, world or count, table, wasted)


def seconds(sums: Balance) -> dict[int, float]:
    """What is not 0, in s."""
    assert sum(sums.total) == sums.rank_ns
    return {category: ns / S for category, ns in enumerate(sums.total) if ns}


def test_the_time_of_a_rank_is_divided_at_its_moments() -> None:
    assert seconds(balance(attempt())) == {
        STARTUP: 10, PREPARATION: 10, DATA: 7, WAITING: 14, PRODUCTIVE: 49, IDLE: 10,
    }  # fmt: skip


def test_intervals_are_taken_out_of_the_part_that_they_are_in() -> None:
    pieces = (RESTORE, 12, 15), (EVALUATION, 30, 40), (SAVE, 50, 52), (SAVE, 91, 94)
    sums = seconds(balance(attempt(pieces=pieces)))
    assert (sums[RESTORE], sums[PREPARATION]) == (3, 7)
    assert (sums[EVALUATION], sums[SAVE], sums[PRODUCTIVE], sums[IDLE]) == (10, 5, 37, 7)


@pytest.mark.parametrize(
    ("hung", "parts"),
    [((0, 0), (7, 14, 44)), ((5, 0), (7, 9, 49)), ((0, 5), (2, 14, 49)), ((9, 9), (7, 9, 49))],
)
def test_a_hang_is_taken_out_of_what_its_row_has_it_in(hung: tuple[int, int], parts: Any) -> None:
    sums = seconds(balance(attempt(pieces=((HANG, 60, 65),), hung=hung)))
    assert sums[HANG] == 5
    assert (sums[DATA], sums[WAITING], sums[PRODUCTIVE]) == parts


def test_a_hang_in_which_the_attempt_ended_lies_after_its_rows() -> None:
    sums = seconds(balance(attempt((10, 20, 90, 100), over=False, pieces=((HANG, 92, 100),))))
    assert (sums[HANG], sums[OTHER], sums[PRODUCTIVE]) == (8, 2, 49)


def test_time_in_which_rows_are_missing_is_not_known() -> None:
    sums = seconds(balance(attempt(rows=(60, 7, 14))))
    assert (sums[OTHER], sums[PRODUCTIVE]) == (10, 39)


def test_steps_that_are_not_known_are_not_invented() -> None:
    sums = balance(attempt(rows=None, pieces=((SAVE, 30, 40),)))
    assert seconds(sums) == {STARTUP: 10, PREPARATION: 10, SAVE: 10, OTHER: 60, IDLE: 10}
    assert sums.unknown_ns == 60 * S


def test_ranks_that_never_reported_are_not_known() -> None:
    assert seconds(balance(attempt(world=3)))[OTHER] == 200


def test_rows_that_are_longer_than_their_time_are_cut_and_counted() -> None:
    sums = balance(attempt((10, 20, 90, 92), rows=(80, 10, 10)))
    assert sums.twice_ns == 8 * S
    assert seconds(sums)[PRODUCTIVE] == 52


def test_the_time_until_the_next_attempt_is_recovery_of_its_ranks() -> None:
    sums = balance(attempt(world=4), until_ns=130 * S)
    assert (sums.total[RECOVERY], sums.rank_ns) == (120 * S, 4 * 130 * S)


def test_repeated_steps_are_wasted_with_their_waits() -> None:
    sums = seconds(balance(attempt(wasted=0.5)))
    assert (sums[WASTED], sums[PRODUCTIVE], sums[DATA], sums[WAITING]) == (35, 24.5, 3.5, 7)


def test_a_rank_without_a_step_was_preparing() -> None:
    sums = seconds(balance(attempt((10, UNKNOWN, UNKNOWN, 60), pieces=((RESTORE, 20, 30),))))
    assert sums == {STARTUP: 10, PREPARATION: 40, RESTORE: 10, IDLE: 40}


def test_the_sum_of_many_ranks_over_months_does_not_overflow() -> None:
    month = 30 * 86_400
    sums = balance(attempt(*[(0, 0, month, month)] * 8192, end=month, rows=(month, 0, 0)))
    assert sums.total[PRODUCTIVE] == sums.rank_ns == 8192 * month * S > 1 << 63


def test_where_intervals_overlap_the_first_kind_counts() -> None:
    pieces = [Piece(EVALUATION, 10, 30, 20), Piece(SAVE, 20, 25, 5)]
    parts = of_parts(pieces, [0, 5, 100, 100])
    assert parts[INSIDE].tolist() == [5, 0, 15, 0, 0, 0]


def test_intervals_that_were_joined_count_by_their_busy_time() -> None:
    pieces = [Piece(EVALUATION, 10, 110, 20, joined=True), Piece(SAVE, 20, 25, 5)]
    parts = of_parts(pieces, [0, 10, 60, 200])
    assert parts.tolist() == [[0, 0, 0, 0, 0, 0], [5, 0, 10, 0, 0, 0], [0, 0, 10, 0, 0, 0]]


def test_joined_interval_has_no_time_of_one_that_it_spans() -> None:
    pieces = [Piece(EVALUATION, 10, 22, 12, joined=True), Piece(SAVE, 12, 22, 10)]
    parts = of_parts(pieces, [0, 10, 60, 200])
    assert parts[INSIDE].tolist() == [10, 0, 2, 0, 0, 0]


_TIMES = st.integers(0, 1000)


@st.composite
def attempts(draw: st.DrawFn) -> Attempt:
    begin = draw(_TIMES)
    end = begin + draw(_TIMES)
    count = draw(st.integers(1, 4))
    times = st.lists(st.integers(UNKNOWN, 2500), min_size=count, max_size=count)

    def array(values: list[int]) -> Any:
        return np.array(values, np.int64)

    took = array(draw(times))
    data = np.minimum(array(draw(times)), took)
    waited = np.clip(array(draw(times)), UNKNOWN, np.maximum(took - np.maximum(data, 0), UNKNOWN))
    pieces = draw(
        st.lists(
            st.builds(
                lambda what, a, n, busy, joined: Piece(what, a, a + n, min(n, busy) if joined else n, joined),
                st.sampled_from(EXPLICIT), _TIMES, _TIMES, _TIMES, st.booleans(),
            ),
            max_size=4,
        )
    )  # fmt: skip
    edges = sorted(draw(st.lists(_TIMES, min_size=4, max_size=4)))
    ranks = RankMoments(
        np.arange(count), *(array(draw(times)) for _ in range(2)), array(draw(times)) > 50,
            *(array(draw(times)) for _ in range(3)),
        over=np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count))),
        took_ns=took, data_ns=np.where(took < 0, UNKNOWN, np.maximum(data, 0)),
        waited_ns=np.where(took < 0, UNKNOWN, np.maximum(waited, 0)),
        explicit=np.stack([of_parts(pieces, edges)] * count),
            others=np.array(draw(st.lists(_TIMES, min_size=9 * count, max_size=9 * count))).reshape(-1, 3, 3),
        hung_ns=np.array(draw(st.lists(st.tuples(_TIMES, _TIMES), min_size=count, max_size=count))),
    )  # fmt: skip
    wasted = draw(st.none() | st.floats(0, 1))
    return Attempt(begin, end, count + draw(st.integers(0, 2)), ranks, wasted)


@given(attempts(), st.none() | _TIMES)
def test_it_always_adds_up_and_nothing_is_negative(one: Attempt, gap: int | None) -> None:
    sums = balance(one, None if gap is None else one.end_ns + gap)
    assert (sums.by_rank >= 0).all()
    assert (sums.by_rank.sum(axis=1) == one.end_ns - one.begin_ns).all()
    assert sum(sums.total) == sums.rank_ns == one.world * (one.end_ns - one.begin_ns + (gap or 0))
    assert min(sums.total) >= 0
    assert sums.twice_ns >= 0
    assert len(sums.total) == len(CATEGORIES)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 100)), min_size=1, max_size=8), st.integers(-5, 60)
)
def test_the_share_of_repeated_steps(sizes: list[tuple[int, int]], step: int) -> None:
    first, rows = 0, []
    for steps, long in sizes:
        rows.append((first, first + steps - 1, steps * long))
        first += steps
    by_step = [long for steps, long in sizes for _ in range(steps)]
    expected = sum(by_step[max(0, step) :]) / sum(by_step) if sum(by_step) else 0
    assert abs(share_from(np.array(rows, np.int64), step) - expected) < 1e-9


def test_which_steps_were_repeated() -> None:
    unknown = repeated([Progress(0, 99, saved=True, saved_step=50), Progress(0, 9)])[0]
    assert unknown.step is None
    assert "no loading" in unknown.why

    def first(*later: Progress, **of_first: Any) -> Repeated:
        return repeated([Progress(0, 99, **of_first), *later])[0]

    assert first() == Repeated(None)  # nothing came after it
    assert first(Progress(80, 120)) == Repeated(80)  # the next one says where it began
    assert first(Progress(100, 120)) == Repeated(None)  # nothing was lost
    assert first(Progress(80, 90), Progress(50, 120)) == Repeated(50)
    assert first(Progress(None, None), Progress(80, 90)) == Repeated(80)  # one died before its first step
    assert first(Progress(0, 9)) == Repeated(0)  # nothing saved, nothing loaded
    restored = Progress(0, 9, restored=True)
    assert first(restored, saved=True, saved_step=60) == Repeated(60)
    assert first(restored, saved=True).why
    assert first(restored).why  # it has loaded something else
    assert first(restored, restored=True) == Repeated(0)


def test_parts_of_a_life() -> None:
    parts = of_parts([Piece(SAVE, 0, 100, 100)], [10, 20, 50, 90])
    assert parts[:, 0].tolist() == [10, 30, 40]
    assert (BEFORE, INSIDE, AFTER) == (0, 1, 2)


STEPS = np.array([[1, 1, 2 * S], [2, 2, 8 * S], [3, 4, 4 * S]], np.int64)
"""Columns of two ranks: steps of 1 s, of which step 2 also holds 3 s of something else."""


def test_the_time_of_intervals_is_not_time_of_the_steps_that_they_are_in() -> None:
    first = 100 * S  # step 2 lasts from 101 to 105
    of_rank = [Piece(SAVE, 102 * S, 105 * S, 3 * S)]
    left = without_intervals(STEPS, 2, [first, first], [of_rank, of_rank])
    assert left[:, 2].tolist() == [2 * S, 2 * S, 4 * S]
    assert share_from(STEPS, 2) == 12 / 14 and share_from(left, 2) == 6 / 8
    one_of_two = without_intervals(STEPS, 2, [first, first], [of_rank, []])
    assert one_of_two[:, 2].tolist() == [2 * S, 5 * S, 4 * S]
    joined = [Piece(EVALUATION, 100 * S, 107 * S, 7 * S // 2, joined=True)]
    half = without_intervals(STEPS, 2, [first], [joined])
    assert half[:, 2].tolist() == [S, 4 * S, 2 * S]


def test_a_hang_lasts_from_the_end_of_a_step_to_the_end_of_the_next() -> None:
    first = 100 * S
    late = Piece(HANG, 101 * S + S // 2, 105 * S - S // 4, 0)
    assert whole_step(STEPS, 2, first, late) == Piece(HANG, 101 * S, 105 * S, 4 * S)
    of_two_steps = Piece(HANG, 105 * S, 107 * S, 2 * S)
    assert whole_step(STEPS, 2, first, of_two_steps) == of_two_steps
    nowhere = Piece(HANG, 200 * S, 210 * S, 10 * S)
    assert whole_step(STEPS, 2, first, nowhere) == nowhere
    assert whole_step(STEPS[:0], 2, first, late) == late


def test_what_other_ranks_did_meanwhile() -> None:
    """Rank 0 saves from 30 to 40 s, both from 50 to 52 s, and rank 0 several times, in all 3 s."""
    both_ranks = Piece(SAVE, 50 * S, 52 * S, 2 * S)
    pieces = [
        [Piece(SAVE, 30 * S, 40 * S, 10 * S), both_ranks, Piece(SAVE, 60 * S, 80 * S, 3 * S, joined=True)],
        [both_ranks, Piece(EVALUATION, 35 * S, 36 * S, S)],
    ]
    edges = np.array([[0, 10, 90, 95]] * 2) * S
    explicit = np.array([of_parts(of_rank, edges[0].tolist()) for of_rank in pieces])
    others = of_others(pieces, edges, explicit)
    save = OF_OTHERS.index(SAVE)
    assert (others.ns[:, :, save] // S).tolist() == [[0, 0, 0], [0, 13, 0]]
    waited_for = [piece for piece in others.waited_for(1, pieces[1]) if piece.category == SAVE]
    assert [(piece.began_ns // S, piece.ended_ns // S) for piece in waited_for] == [(30, 35), (36, 40)]


def test_a_rank_waits_for_others_only_as_long_as_it_waits_at_all() -> None:
    sums = seconds(balance(attempt(rows=(70, 7, 14), others=[[[0, 9, 0], [20, 0, 5], [0, 0, 30]]])))
    assert (sums[SAVE], sums[RESTORE], sums[PREPARATION], WAITING in sums) == (14, 9, 1, False)
    assert sums[EVALUATION] == 5  # after its newest row


def test_what_a_checkpoint_says_counts_if_one_with_so_many_steps_was_saved() -> None:
    def first(restored_step: int, **of_first: Any) -> Repeated:
        saved = Progress(0, 99, saved=True, saved_step=80, **of_first)
        return repeated([saved, Progress(0, 9, restored=True, restored_step=restored_step)])[0]

    both_saved = frozenset((40, 80))
    assert first(40, saved_steps=both_saved).step == 40
    assert first(39, saved_steps=both_saved).step == 40  # it says the number of the newest step
    assert first(160, saved_steps=both_saved).step == 80  # it counts something else: what was saved last
    assert first(20, saved_steps=both_saved).step == 80
    assert first(20, saved_steps=frozenset((80,)), joined=True).step == 20


def test_a_process_that_replaced_another_did_not_start_for_as_long_as_that_lived() -> None:
    sums = seconds(balance(attempt((60, 65, 90, 95), rows=(20, 0, 0), before=57, replaced=True)))
    assert (sums[STARTUP], sums[OTHER], sums[PREPARATION]) == (3, 57 + 5, 5)


def test_a_rank_that_joins_late_is_idle_until_then() -> None:
    sums = seconds(balance(attempt((60, 65, 90, 95), rows=(20, 0, 0), before=57)))
    assert (sums[STARTUP], sums[IDLE]) == (3, 57 + 5 + 5)


def test_ranks_that_all_load_prepare_while_another_still_loads() -> None:
    """Ranks 0 and 1 load from 2 to 5 s, and from 3 to 6 s; rank 2 loads nothing and waits for them."""
    pieces = [[Piece(RESTORE, 2 * S, 5 * S, 3 * S)], [Piece(RESTORE, 3 * S, 6 * S, 3 * S)], []]
    edges = np.array([[0, 10, 90, 95]] * 3) * S
    explicit = np.array([of_parts(of_rank, edges[0].tolist()) for of_rank in pieces])
    others = of_others(pieces, edges, explicit)
    assert (others.ns[:, BEFORE, OF_OTHERS.index(RESTORE)] // S).tolist() == [0, 0, 4]
