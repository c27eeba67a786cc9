"""One change point in a series of excess."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traceml_ray.analysis.evidence import late_steps, onset


def late(pattern):
    return np.array([mark == "x" for mark in pattern])


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("......xxxx", 6),
        ("......xxx", 6),
        (".........x", None),  # one step is no change
        ("........xx", None),
        ("xxxxxxxxxx", None),  # began before
        ("..........", None),
        ("xxxxx.....", None),  # ended
        ("x.x.x.x.x.x.", None),
        ("....x....x", None),
        ("...x...xxxxx.xxx", 7),
        ("", None),
        ("x", None),
    ],
)
def test_onset_is_the_first_late_step(pattern, expected):
    assert onset(late(pattern)) == expected


@given(st.integers(10, 60), st.integers(10, 60), st.integers(0, 2**32 - 1))
def test_onset_in_noise_is_found_within_a_few_steps(before, after, seed):
    random = np.random.default_rng(seed)
    series = random.normal(0, 1e6, before + after)
    series[before:] += 10e6
    assert abs(onset(late_steps(series)) - before) <= 1


def test_single_huge_step_does_not_move_the_onset():
    series = np.full(50, 1e6)
    series[:20] = 0
    series[5] = 1e7
    assert onset(late_steps(series)) == 20


def test_late_steps_of_an_intermittent_fault_are_found():
    series = np.where(np.arange(50) % 10 == 3, 30e6, 0.5e6)
    assert np.flatnonzero(late_steps(series)).tolist() == [3, 13, 23, 33, 43]
