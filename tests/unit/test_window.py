"""The window of the steps that all ranks have, from what each of them reports."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.sample_windows import window as window_of

from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import MAX_MISSING, RankRows, joined, missing_of
from traceml_ray.stages import FLAG_EXCLUDED, LEAD_BYTES, LEAD_UNKNOWN, N_STAGES, SEGMENT_BITS


def rank_rows(rank, keys, flags=None):
    """Every row says whose it is and of which key, so that a mix-up shows."""
    keys = np.array(keys, dtype=np.int64)
    rows = np.repeat(keys * 1000 + rank, N_STAGES).reshape(-1, N_STAGES)
    marks = np.zeros(len(keys), np.uint8) if flags is None else np.array(flags, np.uint8)
    return RankRows(rank, f"n{rank}", keys, marks, rows)


def together(ranks, expected, missing=()):
    history = StepHistory(Thresholds())
    history.add_rows(ranks)
    live = sorted({rank_rows.rank for rank_rows in ranks} - {*missing})
    return history.between(-1, 1 << 62, live, expected)


def assert_rows_belong(window):
    for place, rank in enumerate(window.ranks):
        assert (window.d[:, place] == (window.keys * 1000 + rank)[:, None]).all()
        assert window.nodes[place] == f"n{rank}"


def test_identical_keys_align_completely():
    window = together([rank_rows(1, [1, 2, 3]), rank_rows(0, [1, 2, 3])], expected=2)
    assert window.keys.tolist() == [1, 2, 3]
    assert window.ranks.tolist() == [0, 1]
    assert window.d.shape == (3, 2, N_STAGES)
    assert window.coverage == 1.0
    assert window.gaps == 0
    assert_rows_belong(window)


def test_common_keys_are_kept_and_of_them_the_newest():
    step = 1 << SEGMENT_BITS
    ranks = [
        rank_rows(0, [step * number for number in (1, 2, 4, 5, 6, 7)]),
        rank_rows(1, [step * number for number in (2, 3, 4, 5, 6)]),
        rank_rows(2, [step * number for number in (1, 2, 4, 5, 6, 8)]),
    ]
    assert together(ranks, 3).steps.tolist() == [2, 4, 5, 6]
    assert together(ranks, 3).gaps == 1  # 3 lies inside; 1, 7 and 8 do not
    last = together(ranks, 3).last(2)
    assert last.steps.tolist() == [5, 6]
    assert last.gaps == 0
    assert_rows_belong(last)


def test_newest_steps_are_whole_steps():
    keys = [step << SEGMENT_BITS | exchange for step in range(5) for exchange in range(3)]
    window = together([rank_rows(0, keys), rank_rows(1, keys)], 2).last(2)
    assert window.keys.tolist() == keys[-6:]
    assert window.steps.tolist() == [3, 4]
    assert window.last(1).keys.tolist() == keys[-3:]
    assert (window.by_step(window.d)[1] == window.d[3:].sum(axis=0)).all()
    assert_rows_belong(window)


def test_missing_ranks_do_not_hold_the_others_up():
    window = together(
        [rank_rows(0, [1, 2]), rank_rows(1, [1]), rank_rows(2, [1, 2])], expected=4, missing=[3, 1]
    )
    assert window.keys.tolist() == [1, 2]
    assert window.missing == (1, 3)
    assert window.coverage == 0.5


def test_missing_ranks_listed_are_the_lowest():
    assert missing_of(6, [4, 0, 1, 7]) == [2, 3, 5]
    assert missing_of(1 << 20, range(3)) == list(range(3, 3 + MAX_MISSING))


def test_first_rows_never_count():
    window = together([rank_rows(0, [1, 2, 3], [FLAG_EXCLUDED, 0, 0]), rank_rows(1, [1, 2, 3])], expected=2)
    assert window.keys.tolist() == [2, 3]
    assert_rows_belong(window)


def test_repeated_and_unordered_keys_are_sorted_and_counted_once():
    window = together([rank_rows(0, [3, 1, 2, 2]), rank_rows(1, [1, 2, 3])], expected=2)
    assert window.keys.tolist() == [1, 2, 3]
    assert_rows_belong(window)


def test_unordered_keys_of_every_rank_are_sorted():
    window = together([rank_rows(0, [3, 1]), rank_rows(1, [3, 1])], expected=2)
    assert window.keys.tolist() == [1, 3]
    assert_rows_belong(window)


@pytest.mark.parametrize("ranks", [[], [rank_rows(0, [])], [rank_rows(0, [1]), rank_rows(1, [])]])
def test_ranks_without_common_keys_give_an_empty_window(ranks):
    window = together(ranks, expected=2)
    assert window.d.shape == (0, len(ranks), N_STAGES)
    assert window.first_step is None
    assert window.last_step is None


@given(
    st.lists(st.lists(st.integers(0, 30), max_size=30), min_size=1, max_size=5),
    st.none() | st.integers(1, 10),
)
def test_window_agrees_with_sets(keys, last):
    keys = [[key // 2 << SEGMENT_BITS | key % 2 for key in of_rank] for of_rank in keys]  # two rows a step
    window = together([rank_rows(rank, of_rank) for rank, of_rank in enumerate(keys)], len(keys))
    window = window if last is None else window.last(last)
    common = sorted(set.intersection(*map(set, keys)))
    if last is not None:
        steps = sorted({key >> SEGMENT_BITS for key in common})
        common = [key for key in common if key >> SEGMENT_BITS in steps[len(steps) - min(last, len(steps)) :]]
    assert window.keys.tolist() == common
    assert_rows_belong(window)
    inside = {key for of_rank in keys for key in of_rank if common and common[0] <= key <= common[-1]}
    if common:
        assert window.gaps == len(inside) - len(common)


def test_take_keeps_keys_rows_and_flags_together():
    d = np.arange(5 * 2 * 6).reshape(5, 2, 6)
    window = window_of(d, first_step=7).select(slice(2, 4))
    assert (window.first_step, window.last_step) == (9, 10)
    assert (window.d == d[2:4]).all()
    assert window.flags.shape == (2, 2)


def test_pieces_of_which_only_some_have_host_rows_are_joined_with_what_is_known():
    """Of a piece without, the rows are those of the host, and how far that was ahead is not known."""
    d = np.arange(3 * 2 * N_STAGES).reshape(3, 2, N_STAGES)
    before = window_of(d)
    leads = np.ones((3, 2, LEAD_BYTES), np.uint8)
    after = replace(window_of(d, 3), host=d + 1, leads=leads)
    for pieces in ([before, after], [after, before]):
        whole = joined(pieces)
        for place, piece in enumerate(pieces):
            part = whole.select(slice(3 * place, 3 * place + 3))
            assert (part.host == (piece.d if piece.host is None else piece.host)).all()
            assert (part.leads == (LEAD_UNKNOWN if piece.leads is None else piece.leads)).all()
    assert joined([before, before]).host is joined([before, before]).leads is None
