"""Which ranks `all`, `0,2` and `0,4-7` mean, and what is said of anything else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traceml_ray import text
from traceml_ray.identity import RankFilterError, rank_filter


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ("all", range(9)),
        (" ALL ", range(9)),
        ("0", [0]),
        ("0,2", [0, 2]),
        ("0, 4-7", [0, 4, 5, 6, 7]),
        ("4 - 7,0,5", [0, 4, 5, 6, 7]),
    ],
)
def test_filter_holds_the_ranks_that_are_meant(given: str, ranks: list[int]) -> None:
    chosen = rank_filter(given)
    assert [rank for rank in range(9) if rank in chosen] == [*ranks]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("", "a rank is missing"),
        ("0,,2", "a rank is missing"),
        ("x", "'x' is not a rank"),
        ("-1", "'-1' is not a rank"),
        ("1.5", "'1.5' is not a rank"),
        ("all,2", "'all' is not a rank"),
        ("1-2-3", "'1-2-3' is not a rank"),
        ("٣", "'٣' is not a rank"),
        ("7-4", "7-4 ends before it begins; write 4-7"),
        ("0-99999999", "99999999 is too large"),
        ("9" * 5000, "is not a rank"),
    ],
)
def test_malformed_filter_is_refused_with_the_part_that_is_wrong(given: str, reason: str) -> None:
    with pytest.raises(RankFilterError) as error:
        rank_filter(given)
    assert reason in str(error.value)
    assert len(str(error.value)) < 300


@given(st.sets(st.integers(0, 200), min_size=1))
def test_filter_reads_what_a_table_of_ranks_shows(ranks: set[int]) -> None:
    chosen = rank_filter(text.ranges(ranks))
    assert {rank for rank in range(202) if rank in chosen} == ranks
