"""The only formatter: what numbers, shares, bytes, times and lists of ranks look like."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traceml_ray import text

ROOT = Path(__file__).parents[2]
DRAWN = {
    *(f"dash_app/{name}.py" for name in ("axis", "elements", "heatmap")),
    *(f"traceml_ray/document/{name}.py" for name in ("drawing", "svg")),
}
"""Coordinates and widths, which nobody reads."""


def test_text_is_the_only_formatter_of_numbers_and_plurals() -> None:
    formatted = re.compile(r""":[+,]*\.\d?[fg]\}(?!<extra>| ms)|\{'s' \* \(|\bs\{'""")
    files = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for name in ("traceml_ray", "launchers", "dash_app")
        for path in (ROOT / name).rglob("*.py")
    }
    assert len(files) > 100
    assert {name for name, code in files.items() if formatted.search(code)} - DRAWN == {"traceml_ray/text.py"}


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, "n/a"),
        (float("nan"), "n/a"),
        (0, "0"),
        (4.0, "4"),
        (0.254, "0.25"),
        (0.999, "1"),
        (3.9, "3.9"),
        (9.995, "9.99"),
        (41.26, "41.3"),
        (99.96, "100"),
        (1234.5, "1,234"),
        (-3.21, "−3.21"),
    ],
)
def test_number_has_three_figures_and_two_decimals_at_most(value: float | None, written: str) -> None:
    assert text.number(value) == written


def test_number_of_a_column_keeps_its_zeros() -> None:
    assert [text.number(v, aligned=True) for v in (0, 4.0, 34.5, 1204.0)] == ["0.00", "4.00", "34.5", "1,204"]


def test_number_that_is_rounded_to_nothing_has_no_sign():
    assert [text.number(v, sign=True) for v in (-0.004, 0.004, 0, -0.006)] == ["0", "0", "0", "−0.01"]
    assert [text.number(v, 1) for v in (-0.04, -0.06)] == ["0.0", "−0.1"]


def test_number_with_digits_has_so_many() -> None:
    assert [text.number(v, 0) for v in (0.4, 1204.4)] == ["0", "1,204"]
    assert text.unit(650.4, "W", 0) == "650 W"


def test_times_have_fitting_units() -> None:
    assert [text.ms(41.26), text.ms(None), text.ns(3_900_000)] == ["41.3 ms", "n/a", "3.9 ms"]
    seconds = (0.4, 41, 119.4, 960, 11520, 4 * 86400)
    assert [text.duration(s) for s in seconds] == ["0.4 s", "41 s", "119 s", "16 min", "3.2 h", "4 d"]
    assert [text.age(s) for s in (None, 1.6, 41.2)] == ["n/a", "2 s", "41 s"]


def test_percent_and_share_have_two_figures() -> None:
    shares = (0, 0.0606, 0.28, 1, 0.002)
    assert [text.share(share) for share in shares] == ["0 %", "6.1 %", "28 %", "100 %", "0.2 %"]
    assert [text.percent(v, sign=True) for v in (None, 40, -5, 0)] == ["n/a", "+40 %", "−5 %", "0 %"]


def test_size_is_decimal() -> None:
    assert [text.size(v) for v in (None, 12, 999_600, 3.2e9)] == ["n/a", "12 B", "1 MB", "3.2 GB"]
    assert text.size(41_260_000, "/s") == "41.3 MB/s"


def test_ranks_are_written_as_ranges_and_the_rest_is_counted() -> None:
    assert text.ranks([]) == ""
    assert text.ranks([5]) == "rank 5"
    assert text.ranks([3, 2]) == "ranks 2 and 3"
    assert text.ranks([0, 4, 5, 6, 7, 9]) == "ranks 0, 4-7 and 9"
    assert text.ranks(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"
    assert text.ranks(range(2, 10), 1_048_574) == "ranks 2-9 and 1,048,566 more"


@given(st.sets(st.integers(0, 200)))
def test_ranges_hold_every_number_once(numbers: set[int]) -> None:
    parts = text.ranges(numbers).split(", ") if numbers else []
    bounds = [tuple(map(int, part.split("-"))) for part in parts]
    assert [n for bound in bounds for n in range(bound[0], bound[-1] + 1)] == sorted(numbers)


def test_lists_are_joined_in_english_and_cut_short() -> None:
    assert [text.listed(list("abc")[:n]) for n in (0, 1, 2, 3)] == ["", "a", "a and b", "a, b and c"]
    assert text.listed(list("abcdefghijk")) == "a, b, c, d, e, f, g, h and 3 more"


def test_words_counts_and_plain_values_are_readable() -> None:
    assert (text.words("co_critical"), text.count(1, "rank"), text.count(1024, "rank")) == (
        "co critical",
        "1 rank",
        "1,024 ranks",
    )
    assert [text.plain(v) for v in (None, "", 1204, 0, "data")] == ["n/a", "n/a", "1,204", "0", "data"]


def test_moments_are_shown_as_clock_and_date() -> None:
    moment = "2023-11-14T22:13:25.250+00:00"
    assert (text.clock(moment), text.date(moment)) == ("22:13:25", "2023-11-14 22:13:25")
    assert (text.clock(None), text.date(None)) == ("n/a", "n/a")


def test_one_line_escapes_terminal_control_characters() -> None:
    assert text.one_line("a\nb\x1b[31m\udcff") == "a\\nb\\u001b[31m\\udcff"
