"""The memory analysis over families of series with a known truth: nothing wrong, and most of it said."""

from __future__ import annotations

import pytest
from memory_families import FAMILIES, outcomes

SEEDS = 12
_OFTEN_UNKNOWN = {
    "growth_along_a_logarithm": 0.05,
    "followers_that_count_less": 0.6,
    "lone_leak": 0.8,
    "cache_that_still_fills": 0.8,
}
"""Where abstaining is right for many: the share that has to be right all the same."""


@pytest.mark.parametrize("name", FAMILIES)
def test_family_has_no_wrong_answer(name: str) -> None:
    counts = outcomes(FAMILIES[name], range(SEEDS))
    assert counts["wrong"] == 0, counts
    assert counts["right"] >= _OFTEN_UNKNOWN.get(name, 0.9) * SEEDS, counts
