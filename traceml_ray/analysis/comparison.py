"""
Two runs: better, worse, or no difference; by how much, and which stage and ranks moved.

An interval is of the steps of both runs (`resampling`): it covers how steps scatter, and that a run which
drifts within itself differs by as much from the next. What is the same in all steps of a run and differs in
the next (where it ran, what else ran there) is in no interval; for that there is `CompareLimits.least`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from traceml_ray.analysis import resampling
from traceml_ray.analysis.step_sample import MEDIAN, NAMES, P95, SKEW, STEP, error_of
from traceml_ray.analysis.thresholds import COMPARE, CompareLimits
from traceml_ray.analysis.window import Float
from traceml_ray.stages import (
    FLAG_COUPLED,
    FLAG_DEVICE_CLOCK,
    FLAG_NO_DATA,
    FLAG_NO_FORWARD,
    FLAG_NO_SPLIT,
    STAGES,
)

StepSample = Mapping[str, Any]
"""What `step_sample` returns."""
Word = Literal["better", "worse", "no difference"]
_PAIRED = 7
"""Seed of the order in which replicates of two runs meet: their steps may have spikes at the same places."""
_MERGED = {
    FLAG_NO_DATA: ("post_sync", "data"),
    FLAG_NO_FORWARD: ("prepare", "forward"),
    FLAG_NO_SPLIT: ("backward", "sync_wait"),
    FLAG_COUPLED: ("forward", "backward", "sync_wait"),
}
"""The stages that are not told apart in rows with a flag."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One number of session `a` and of session `b`; None is not known."""

    what: str
    unit: str
    """ms, steps/s, %, GB, …"""
    a: float | None = None
    b: float | None = None
    change: float | None = None
    """`b` less `a`, in `unit`,"""
    low: float | None = None
    """and the interval that this is in, of the steps of both; None: there is none."""
    high: float | None = None
    change_pct: float | None = None
    """The same three in % of `a`."""
    low_pct: float | None = None
    high_pct: float | None = None
    word: Word | None = None
    """None: it is not judged, or cannot be; then `why` says so."""
    rank_a: int | None = None
    """Of memory: the rank that has most,"""
    rank_b: int | None = None
    why: str = ""


class RankChange(msgspec.Struct, frozen=True, kw_only=True):
    """By how much longer a rank was in the stage that moved, ms a step."""

    rank: int
    node: str
    a: float
    b: float
    change: float
    low: float
    high: float


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What two runs come to; `word` is None where their steps cannot be compared."""

    word: Word | None
    by: Change | None
    """What says so: the mean step, or where that is no different the median one."""
    stage: str | None = None
    """The stage that carries the difference; None: none does, or there is no difference."""
    exposed: Change | None = None
    """By how much its exposed time changed."""
    ranks: tuple[RankChange, ...] = ()
    """Those that moved in that stage, the most first; empty where ranks cannot be compared one by one."""
    of_ranks: int = 0
    """How many ranks were compared."""


class MemorySeries(msgspec.Struct, frozen=True, kw_only=True):
    """The samples (n,) of a rank's memory on one device, bytes, in order of time, beyond the warm-up."""

    rank: int
    samples: Float


def compare_steps(
    a: StepSample, b: StepSample, limits: CompareLimits = COMPARE
) -> tuple[Verdict, list[Change]]:
    """Return the verdict over the steps of two runs, and the numbers that it is made of."""
    few = [name for name, own in (("A", a), ("B", b)) if not own["numbers"]]
    if few:
        why = _too_few(a, b, limits)
        names = (STEP, MEDIAN, P95, SKEW, *STAGES)
        return Verdict(word=None, by=None), [
            Change(what=name, unit="%" if name == SKEW else "ms", why=why) for name in names
        ]
    changes = {name: _step_change(name, a, b, limits) for name in a["numbers"]}
    return _verdict(a, b, changes, limits), [changes[name] for name in (STEP, MEDIAN, P95, SKEW, *STAGES)]


def compare_memory(
    what: str, a: Sequence[MemorySeries], b: Sequence[MemorySeries], limits: CompareLimits = COMPARE
) -> Change:
    """Return the memory of two runs: of each the rank that has most, the mean over its samples."""
    lacks = [name for name, own in (("A", a), ("B", b)) if not own]
    if lacks:
        return Change(what=what, unit="B", why=f"not measured in {' and '.join(lacks)}")
    one, other = (max(own, key=lambda each: float(each.samples.mean())) for own in (a, b))
    mean_a, mean_b = (float(each.samples.mean()) for each in (one, other))
    few = min(len(each.samples) for each in (one, other))
    if few < limits.samples:
        why = f"only {few} samples; {limits.samples} are needed"
        return Change(what=what, unit="B", a=mean_a, b=mean_b, rank_a=one.rank, rank_b=other.rank, why=why)
    (error_a, blocks_a), (error_b, blocks_b) = _error(one.samples), _error(other.samples)
    half = resampling.student(min(blocks_a, blocks_b), _upper(limits)) * float(np.hypot(error_a, error_b))
    change = _change(what, "B", mean_a, mean_b, mean_b - mean_a - half, mean_b - mean_a + half)
    change = msgspec.structs.replace(change, rank_a=one.rank, rank_b=other.rank)
    return _judged(change, limits.least_memory * mean_a)


def fact(what: str, unit: str, a: float | None, b: float | None) -> Change:
    """Return a number that is only shown: nothing is known of how far chance moves it."""
    a, b = (None if each is None or not np.isfinite(each) else float(each) for each in (a, b))
    known = a is not None and b is not None
    return Change(
        what=what,
        unit=unit,
        a=a,
        b=b,
        change=b - a if a is not None and b is not None else None,
        change_pct=100 * (b - a) / a if known and a and b is not None else None,
    )


def _too_few(a: StepSample, b: StepSample, limits: CompareLimits) -> str:
    counts = [f"{name} has {own['columns']}" for name, own in (("A", a), ("B", b)) if not own["numbers"]]
    return f"too few steps beyond the warm-up: {' and '.join(counts)}, {limits.steps} are needed"


def _step_change(name: str, a: StepSample, b: StepSample, limits: CompareLimits) -> Change:
    """Return one of the numbers of both samples, judged where that can be."""
    one, two = a["numbers"][name], b["numbers"][name]
    unit = "%" if name == SKEW else "ms"
    why = _incomparable(name, a, b)
    if why or one != one or two != two:
        return msgspec.structs.replace(fact(name, unit, one, two), why=why or "it takes two ranks")
    low, high = _interval(NAMES.index(name), a, b, two - one, _upper(limits))
    least = limits.least_skew if name == SKEW else limits.least * a["numbers"][STEP]
    return _judged(_change(name, unit, one, two, low, high), least)


def _interval(at: int, a: StepSample, b: StepSample, apart: float, upper: float) -> tuple[float, float]:
    """Return between what the difference of a number lies, which is `apart` in the two samples."""
    blocks = min(own["columns"] / own["block"] for own in (a, b))
    one, two = (own["replicates"][:, at] for own in (a, b))
    drawn = np.random.default_rng(_PAIRED).permutation(two) - one - apart
    few = resampling.few_blocks(blocks) * resampling.student(blocks, upper) / resampling.student(1e9, upper)
    drift = resampling.student(1e9, upper) * float(np.hypot(a["drift"][at], b["drift"][at]))
    below, above = few * np.quantile(drawn, (1 - upper, upper))
    return apart + min(-float(np.hypot(below, drift)), 0.0), apart + float(np.hypot(above, drift))


def _incomparable(name: str, a: StepSample, b: StepSample) -> str:
    """Return why a number of two runs cannot be compared; "" where it can be."""
    if name not in STAGES:
        return ""
    if (a["flags"] ^ b["flags"]) & FLAG_DEVICE_CLOCK:
        device, host = ("A", "B") if a["flags"] & FLAG_DEVICE_CLOCK else ("B", "A")
        return f"{device} has its stages by the device's clock, {host} by the CPU's"
    for flag, merged in _MERGED.items():
        if name in merged and (a["flags"] ^ b["flags"]) & flag:
            lacks = "A" if a["flags"] & flag else "B"
            return f"in {lacks} {' and '.join(merged)} are not told apart"
    return ""


def _upper(limits: CompareLimits) -> float:
    return (1 + limits.confidence) / 2


def _change(what: str, unit: str, a: float, b: float, low: float, high: float) -> Change:
    pct = {"change_pct": b - a, "low_pct": low, "high_pct": high}
    shares: Mapping[str, Any] = {name: 100 * value / a if a else None for name, value in pct.items()}
    return Change(what=what, unit=unit, a=a, b=b, change=b - a, low=low, high=high, **shares)


def _judged(change: Change, least: float) -> Change:
    """Return a change with its word: of all that is judged, more is worse."""
    by, low, high = change.change or 0.0, change.low or 0.0, change.high or 0.0
    word: Word = "no difference"
    if by >= least and low > 0:
        word = "worse"
    elif by <= -least and high < 0:
        word = "better"
    return msgspec.structs.replace(change, word=word)


def _verdict(a: StepSample, b: StepSample, changes: Mapping[str, Change], limits: CompareLimits) -> Verdict:
    by = changes[STEP]
    if by.word == "no difference" and changes[MEDIAN].word != "no difference":
        by = changes[MEDIAN]
    alike = a["ranks"] == b["ranks"]
    of_ranks = len(a["ranks"]) if alike else 0
    if by.word == "no difference":
        return Verdict(word=by.word, by=by, of_ranks=of_ranks)
    sign = 1 if by.word == "worse" else -1
    least = limits.carries * max(abs(changes[STEP].change or 0.0), abs(by.change or 0.0))
    stage, ranks = (_moved_most(a, b, sign, least, limits) if alike else None) or (None, ())
    if stage is None:
        exposed = [changes[name] for name in _exposed_names(alike) if changes[name].word == by.word]
        most = max(exposed, key=lambda each: sign * (each.change or 0.0), default=None)
        stage = most.what if most is not None and sign * (most.change or 0.0) >= least else None
    exposed_change = None if stage is None else changes[stage]
    return Verdict(word=by.word, by=by, stage=stage, exposed=exposed_change, ranks=ranks, of_ranks=of_ranks)


def _exposed_names(alike: bool) -> tuple[str, ...]:
    """Return the stages that exposed time may name: what ranks do themselves is seen in their own times."""
    return ("sync_wait",) if alike else STAGES


def _moved_most(
    a: StepSample, b: StepSample, sign: int, least: float, limits: CompareLimits
) -> tuple[str, tuple[RankChange, ...]] | None:
    """
    Return the stage in which any rank's own time changed most with `sign`, `least` ms or more, and the ranks
    that did. Not waiting: the others wait longer for a rank that has become late.
    """
    flags = a["flags"] | b["flags"]
    waits = {name for flag in (FLAG_NO_SPLIT, FLAG_COUPLED) if flags & flag for name in _MERGED[flag]}
    found = {
        name: _moved(a, b, at, sign, limits)
        for at, name in enumerate(STAGES)
        if name not in waits | {"sync_wait"} and not _incomparable(name, a, b)
    }
    known = {name: own for name, own in found.items() if own and sign * own[0].change >= least}
    return max(known.items(), key=lambda each: sign * each[1][0].change, default=None)


def _moved(
    a: StepSample, b: StepSample, stage: int, sign: int, limits: CompareLimits
) -> tuple[RankChange, ...]:
    """Return the ranks that moved with `sign` in a stage, the most first."""
    blocks = min(own["columns"] / own["block"] for own in (a, b))
    half = resampling.student(blocks, _upper(limits)) * np.hypot(a["errors"][:, stage], b["errors"][:, stage])
    change = b["stages"][:, stage] - a["stages"][:, stage]
    most = np.nanmax(sign * change)
    which = np.flatnonzero((sign * change >= limits.moved * most) & (sign * change > half))
    return tuple(
        RankChange(
            rank=a["ranks"][at],
            node=b["nodes"][at],
            a=float(a["stages"][at, stage]),
            b=float(b["stages"][at, stage]),
            change=float(change[at]),
            low=float(change[at] - half[at]),
            high=float(change[at] + half[at]),
        )
        for at in sorted(which.tolist(), key=lambda at: -sign * change[at])
    )


def _error(samples: Float) -> tuple[float, float]:
    """Return the standard error of the mean of samples, and of how many blocks they are."""
    block = resampling.block_length(samples)
    return float(error_of(samples[:, None], block)[0]), len(samples) / block
