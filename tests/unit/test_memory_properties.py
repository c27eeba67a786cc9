"""What the memory analysis keeps to on any series: it never raises, and clocks and order do not matter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_series import GIB, MIB, SECOND, flat, jumps, leaks, on_device, on_host

from traceml_ray.signals.memory.judge import judge
from traceml_ray.signals.memory.shapes import Collective, Memory, Series

_NAMES = (
    "allocated_bytes", "reserved_bytes", "inactive_split_bytes", "peak_bytes", "retries", "process_bytes",
    "device_used_bytes", "device_total_bytes", "rss_bytes", "uss_bytes", "limit_bytes", "limit_used_bytes",
)  # fmt: skip
_EPOCH = 1_700_000_000 * SECOND
_VALUES = st.one_of(
    st.floats(0, 1e12), st.sampled_from([np.nan, np.inf, -np.inf, -1.0, 0.0, 1e300, 64.0 * MIB, 80.0 * GIB])
)


@st.composite
def _series(draw: st.DrawFn) -> Series:
    n = draw(st.sampled_from([0, 1, 2, 3, 5, 8, 13, 33, 70]))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    odd = np.array(draw(st.lists(_VALUES, min_size=1, max_size=4)))
    columns = {}
    for name in draw(st.lists(st.sampled_from(_NAMES), unique=True)):
        columns[name] = np.cumsum(rng.normal(0, 1, n)) * GIB + 4 * GIB
        columns[name][rng.random(n) < 0.2] = rng.choice(odd)
    between = rng.choice([0, 1, SECOND, 300 * SECOND], n)
    return Series(
        rank=draw(st.integers(0, 3)),
        node=draw(st.sampled_from(["", "a", "b"])),
        process=f"{seed:x}",
        device=draw(st.sampled_from([None, 0, 1])),
        t_ns=_EPOCH + np.cumsum(between).astype(np.int64),
        step=np.sort(rng.integers(-1, 50, n)),
        columns=columns,
        bound_ns=draw(st.sampled_from([0, 1_000_000, 5 * SECOND])),
        first_step_ns=draw(st.sampled_from([None, _EPOCH, _EPOCH + 20 * SECOND, _EPOCH + 10**15])),
    )


_USES = st.builds(
    Collective,
    rank=st.integers(0, 3),
    op=st.sampled_from(["all_reduce", "barrier"]),
    group=st.sampled_from([None, "world", "1"]),
    first_ns=st.integers(_EPOCH, _EPOCH + 300 * SECOND),
    last_ns=st.integers(_EPOCH, _EPOCH + 300 * SECOND),
)


@given(
    series=st.lists(_series(), max_size=5),
    uses=st.lists(_USES, max_size=4),
    expected=st.sampled_from([None, 0, 1, 6]),
    sensitivity=st.sampled_from(["low", "medium", "high"]),
)
@settings(max_examples=150, deadline=None)
def test_any_series_has_an_answer_that_can_be_sent(
    series: list[Series], uses: list[Collective], expected: int | None, sensitivity: Any
) -> None:
    memory = judge(series, uses, expected, sensitivity)
    text = msgspec.json.encode(memory)
    assert msgspec.json.decode(text, type=Memory) == memory
    for finding in memory.findings:
        assert finding.from_ns <= finding.to_ns
        assert finding.why.endswith(".") and "nan" not in finding.why and "inf " not in finding.why


def _run() -> list[Series]:
    """Return ranks of which one grows first, one has a leaking host and one a step in its gap."""
    gap = 600 * MIB + 700 * MIB * (np.arange(200) >= 90)
    return [
        on_device(0, jumps(200, 120, 4 * GIB, 0), node="a"),
        on_device(1, jumps(200, 80, 4 * GIB, 1), node="b", start_s=0.3),
        on_device(2, flat(200, 2), gap=gap, node="a"),
        on_host(3, leaks(200, 40, 12 * MIB, 3), node="b", total=20 * GIB),
    ]


@given(st.integers(-(10**18), 10**18))
@settings(max_examples=25, deadline=None)
def test_shift_of_all_clocks_changes_times_only(shift: int) -> None:
    uses = [Collective(rank, "all_gather", 1, _EPOCH + 89 * SECOND, _EPOCH + 300 * SECOND) for rank in (0, 2)]
    shifted = [
        replace(series, t_ns=series.t_ns + shift, first_step_ns=series.first_step_ns + shift)
        for series in _run()
        if series.first_step_ns is not None
    ]
    moved = [replace(use, first_ns=use.first_ns + shift, last_ns=use.last_ns + shift) for use in uses]
    before, after = judge(_run(), uses, 4), judge(shifted, moved, 4)
    assert before.findings and before.first_cause and before.collectives
    assert _without_times(msgspec.to_builtins(after), shift) == _without_times(msgspec.to_builtins(before), 0)


def _without_times(value: Any, shift: int) -> Any:
    """Return `value` with all times moved back by `shift`."""
    if isinstance(value, dict):
        return {
            key: part - shift if key in ("at_ns", "from_ns", "to_ns") else _without_times(part, shift)
            for key, part in value.items()
        }
    return [_without_times(part, shift) for part in value] if isinstance(value, list) else value


@given(st.permutations(range(4)))
@settings(max_examples=24, deadline=None)
def test_order_of_ranks_changes_nothing(order: list[int]) -> None:
    ranks = _run()
    assert judge([ranks[index] for index in order], expected=4) == judge(ranks, expected=4)


def test_judging_leaves_its_arrays_as_they_were() -> None:
    ranks = _run()
    before = [{name: column.copy() for name, column in series.columns.items()} for series in ranks]
    steps = [series.step.copy() for series in ranks]
    judge(ranks, expected=4)
    for series, columns, step in zip(ranks, before, steps, strict=True):
        assert all((series.columns[name] == column).all() for name, column in columns.items())
        assert (series.step == step).all()
