"""
Two runs: better, worse, or no difference; by how much, and which stage and ranks moved.

An interval is of the steps of both runs (`resampling`): it covers how steps scatter, and that a run which
drifts within itself differs by as much from the next. What is the same in all steps of a run and differs in
the next (where it ran, what else ran there) is in no interval; for that there is `CompareLimits.least`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from traceml_ray.analysis import resampling
from traceml_ray.analysis.resampling import PARTS
from traceml_ray.analysis.step_sample import MEDIAN, NAMES, P95, SKEW, STEP, error_of
from traceml_ray.analysis.thresholds import COMPARE, CompareLimits
from traceml_ray.analysis.window import Float
from traceml_ray.stages import (
    FLAG_DEVICE_CLOCK,
    FLAG_INSEPARABLE,
    FLAG_NO_DATA,
    FLAG_NO_FORWARD,
    FLAG_NO_SPLIT,
    STAGES,
)

StepSample = Mapping[str, Any]
"""The shape that `step_sample.sampled` returns."""
Word = Literal["better", "worse", "no difference"]
_OPPOSITE = {"better": "worse", "worse": "better"}
_PAIRED = 7
"""Seed that orders the replicates of two runs: their steps may have spikes at the same positions."""
_FIFTHS = 2 * PARTS - 1
"""Number of blocks with the degrees of freedom that the fifths of two runs have together."""
_MERGED = {
    FLAG_NO_DATA: ("post_sync", "data"),
    FLAG_NO_FORWARD: ("prepare", "forward"),
    FLAG_NO_SPLIT: ("backward", "sync_wait"),
    FLAG_INSEPARABLE: ("forward", "backward", "sync_wait"),
}
"""For each flag: the stages that rows with this flag do not tell apart."""


class NumberChange(msgspec.Struct, frozen=True, kw_only=True):
    """One number of session `a` and of session `b`. None means not known."""

    what: str
    unit: str
    """Unit of the number: ms, steps/s, %, GB, …"""
    a: float | None = None
    b: float | None = None
    change: float | None = None
    """`b` minus `a`, in `unit`."""
    low: float | None = None
    """
    Lower end of the interval that `change` lies in, in `unit`, from the steps of both sessions; `high` is the
    upper end. None: there is no interval.
    """
    high: float | None = None
    change_pct: float | None = None
    """`change` in % of `a`; `low_pct` and `high_pct` are the ends of its interval."""
    low_pct: float | None = None
    high_pct: float | None = None
    word: Word | None = None
    """The judgement. None: the number is not judged, or cannot be; then `why` says so."""
    rank_a: int | None = None
    """For memory: the rank of `a` that has most; `rank_b` is that of `b`."""
    rank_b: int | None = None
    why: str = ""


class RankChange(msgspec.Struct, frozen=True, kw_only=True):
    """
    A rank in the stage that moved, in ms per step. `change` is what `b` took beyond what the change of all
    other work explains.
    """

    rank: int
    node: str
    a: float
    b: float
    change: float
    low: float
    high: float


class ComparisonVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of comparing two runs. `word` is None if their steps cannot be compared."""

    word: Word | None
    by: NumberChange | None
    """
    The number that decided: a stage, else the mean step, or the median step if the mean is no different.
    """
    stage: str | None = None
    """
    The stage that took longer, or less, than all other work did. None: no stage did, or there is no
    difference.
    """
    ranks: tuple[RankChange, ...] = ()
    """
    The ranks that moved in that stage, largest change first. Empty if ranks cannot be compared one by one.
    """
    of_ranks: int = 0
    """Number of ranks that were compared."""
    rest: float | None = None
    """Ratio of all other work of the ranks in `b` to that in `a`. None: not known."""


class MemorySeries(msgspec.Struct, frozen=True, kw_only=True):
    """Memory samples (n,) of one rank on one device, in bytes, in order of time, after the warm-up."""

    rank: int
    samples: Float


def compare_steps(
    a: StepSample, b: StepSample, limits: CompareLimits = COMPARE
) -> tuple[ComparisonVerdict, list[NumberChange]]:
    """Return the verdict over the steps of two runs, and the numbers it is based on."""
    few = [name for name, sample in (("A", a), ("B", b)) if not sample["numbers"]]
    if few:
        why = _too_few(a, b, limits)
        names = (STEP, MEDIAN, P95, SKEW, *STAGES)
        return ComparisonVerdict(word=None, by=None), [
            NumberChange(what=name, unit="%" if name == SKEW else "ms", why=why) for name in names
        ]
    changes = {name: _step_change(name, a, b, limits) for name in a["numbers"]}
    return _verdict(a, b, changes, limits), [changes[name] for name in (STEP, MEDIAN, P95, SKEW, *STAGES)]


def compare_memory(
    what: str, a: Sequence[MemorySeries], b: Sequence[MemorySeries], limits: CompareLimits = COMPARE
) -> NumberChange:
    """Compare the memory of two runs: for each, the mean over the samples of the rank that has most."""
    lacks = [name for name, samples in (("A", a), ("B", b)) if not samples]
    if lacks:
        return NumberChange(what=what, unit="B", why=f"not measured in {' and '.join(lacks)}")
    one, other = (max(devices, key=lambda device: float(device.samples.mean())) for devices in (a, b))
    mean_a, mean_b = (float(device.samples.mean()) for device in (one, other))
    few = min(len(device.samples) for device in (one, other))
    if few < limits.samples:
        why = f"only {few} samples; {limits.samples} are needed"
        return NumberChange(
            what=what, unit="B", a=mean_a, b=mean_b, rank_a=one.rank, rank_b=other.rank, why=why
        )
    (error_a, blocks_a), (error_b, blocks_b) = _error(one.samples), _error(other.samples)
    half = resampling.student(min(blocks_a, blocks_b, _FIFTHS), _upper(limits)) * float(
        np.hypot(error_a, error_b)
    )
    change = _change(what, "B", mean_a, mean_b, mean_b - mean_a - half, mean_b - mean_a + half)
    change = msgspec.structs.replace(change, rank_a=one.rank, rank_b=other.rank)
    return _judged(change, limits.least_memory * mean_a)


def fact(what: str, unit: str, a: float | None, b: float | None) -> NumberChange:
    """Return a number that is only shown, not judged: it is not known how far chance moves it."""
    a, b = (None if number is None or not np.isfinite(number) else float(number) for number in (a, b))
    known = a is not None and b is not None
    return NumberChange(
        what=what,
        unit=unit,
        a=a,
        b=b,
        change=b - a if a is not None and b is not None else None,
        change_pct=100 * (b - a) / a if known and a and b is not None else None,
    )


def _too_few(a: StepSample, b: StepSample, limits: CompareLimits) -> str:
    counts = [
        f"{name} has {sample['columns']}" for name, sample in (("A", a), ("B", b)) if not sample["numbers"]
    ]
    return f"too few steps beyond the warm-up: {' and '.join(counts)}, {limits.steps} are needed"


def _step_change(name: str, a: StepSample, b: StepSample, limits: CompareLimits) -> NumberChange:
    """Return the change of one number of both samples, judged if possible."""
    one, two = a["numbers"][name], b["numbers"][name]
    unit = "%" if name == SKEW else "ms"
    why = _incomparable(name, a, b)
    if why or one != one or two != two:
        return msgspec.structs.replace(fact(name, unit, one, two), why=why or "it takes two ranks")
    low, high = _interval(NAMES.index(name), a, b, two - one, _upper(limits))
    least = limits.least_skew if name == SKEW else limits.least * a["numbers"][STEP]
    return _judged(_change(name, unit, one, two, low, high), least)


def _interval(index: int, a: StepSample, b: StepSample, apart: float, upper: float) -> tuple[float, float]:
    """Return the interval of the difference of a number; `apart` is its difference in the two samples."""
    blocks = min(sample["columns"] / sample["block"] for sample in (a, b))
    one, two = (sample["replicates"][:, index] for sample in (a, b))
    drawn = np.random.default_rng(_PAIRED).permutation(two) - one - apart
    few = resampling.few_blocks(blocks) * resampling.student(blocks, upper) / resampling.student(1e9, upper)
    drift = resampling.student(_FIFTHS, upper) * float(np.hypot(a["drift"][index], b["drift"][index]))
    below, above = few * np.quantile(drawn, (1 - upper, upper))
    return apart + min(-float(np.hypot(below, drift)), 0.0), apart + float(np.hypot(above, drift))


def _incomparable(name: str, a: StepSample, b: StepSample) -> str:
    """Return why a number of two runs cannot be compared; "" if it can be."""
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


def _change(what: str, unit: str, a: float, b: float, low: float, high: float) -> NumberChange:
    pct = {"change_pct": b - a, "low_pct": low, "high_pct": high}
    shares: Mapping[str, Any] = {name: 100 * value / a if a else None for name, value in pct.items()}
    return NumberChange(what=what, unit=unit, a=a, b=b, change=b - a, low=low, high=high, **shares)


def _judged(change: NumberChange, least: float) -> NumberChange:
    """Return `change` with its word. For every number that is judged, more is worse."""
    by, low, high = change.change or 0.0, change.low or 0.0, change.high or 0.0
    word: Word = "no difference"
    if by >= least and low > 0:
        word = "worse"
    elif by <= -least and high < 0:
        word = "better"
    return msgspec.structs.replace(change, word=word)


def _verdict(
    a: StepSample, b: StepSample, changes: Mapping[str, NumberChange], limits: CompareLimits
) -> ComparisonVerdict:
    whole = changes[STEP]
    if whole.word == "no difference" and changes[MEDIAN].word != "no difference":
        whole = changes[MEDIAN]
    alike = a["ranks"] == b["ranks"]
    of_ranks = len(a["ranks"]) if alike else 0
    moved = _moved(a, b, alike, limits)
    if moved is None:
        return ComparisonVerdict(word=whole.word, by=whole, of_ranks=of_ranks)
    if moved.change.word in ("no difference", _OPPOSITE.get(whole.word or "")):
        stage = _waited(changes, whole, limits)
        return ComparisonVerdict(
            word=whole.word, by=whole, stage=stage, of_ranks=of_ranks, rest=moved.all_else
        )
    ranks = moved.ranks if alike else ()
    stage = moved.change.what
    return ComparisonVerdict(
        word=moved.change.word, by=moved.change, stage=stage, ranks=ranks, of_ranks=of_ranks, rest=moved.rest
    )


def _waited(changes: Mapping[str, NumberChange], whole: NumberChange, limits: CompareLimits) -> str | None:
    """
    Return `sync_wait` if it carries a difference that no rank's own work has: the exchange
    itself is slower.
    """
    waited, sign = changes["sync_wait"], 1 if whole.word == "worse" else -1
    least = limits.carries * abs(whole.change or 0.0)
    carries = waited.word == whole.word != "no difference" and sign * (waited.change or 0.0) >= least
    return "sync_wait" if carries else None


class _Moved(NamedTuple):
    """The stage that deviates most from all other stages."""

    change: NumberChange
    """
    Excess of the stage over what the other stages predict, on the rank where it is largest, as shares of a
    step.
    """
    ranks: tuple[RankChange, ...]
    rest: float
    """Ratio of the other stages' time in `b` to that in `a`."""
    all_else: float
    """Ratio of the time of all stages, this one included, in `b` to that in `a`."""


def _moved(a: StepSample, b: StepSample, alike: bool, limits: CompareLimits) -> _Moved | None:
    """
    Return the stage that moved; None where there is nothing to compare it with.

    Beside other work, or on another machine, all that a rank does takes longer, by about the same factor. For
    each stage that factor is taken from the others; the stage without which the others agree best is the one.
    Waiting is left out: all others wait longer for a rank that has become late.
    """
    flags = a["flags"] | b["flags"]
    waits = {name for flag in (FLAG_NO_SPLIT, FLAG_INSEPARABLE) if flags & flag for name in _MERGED[flag]}
    names = [s for s in STAGES if s not in waits | {"sync_wait"} and not _incomparable(s, a, b)]
    columns = [STAGES.index(name) for name in names]
    stages_of = [np.nan_to_num(_of_ranks(sample["stages"], alike)[:, columns]) for sample in (a, b)]
    errors = [np.nan_to_num(_of_ranks(sample["errors"], alike)[:, columns]) for sample in (a, b)]
    if len(names) < 2 or min(times.sum() for times in stages_of) <= 0:
        return None
    factors = [
        _factor(np.delete(stages_of[0], s, axis=1), np.delete(stages_of[1], s, axis=1))
        for s in range(len(names))
    ]
    left = [
        np.abs(np.delete(stages_of[1] - factor * stages_of[0], s, axis=1)).sum()
        for s, factor in enumerate(factors)
    ]
    stage = int(np.argmin(left))
    factor, others = factors[stage], [s for s in range(len(names)) if s != stage]
    unsure = factor * np.hypot(
        *(
            np.hypot.reduce(e[:, others], axis=None) / max(o[:, others].sum(), 1e-9)
            for e, o in zip(errors, stages_of, strict=True)
        )
    )
    more = stages_of[1][:, stage] - factor * stages_of[0][:, stage]
    error = np.sqrt(
        errors[1][:, stage] ** 2
        + (factor * errors[0][:, stage]) ** 2
        + (unsure * stages_of[0][:, stage]) ** 2
    )
    half = resampling.student(_FIFTHS, _upper(limits)) * error
    return _Moved(
        _of_step(names[stage], a, stages_of, stage, more, half, limits),
        _ranks(a, b, stages_of, stage, more, half, limits),
        factor,
        _factor(*stages_of),
    )


def _of_ranks(values: Float, alike: bool) -> Float:
    """
    Return the values of each rank (R, 6) or, if the ranks of the two runs differ, of the median
    rank (1, 6).
    """
    return values if alike else np.nanmedian(values, axis=0, keepdims=True)


def _factor(a: Float, b: Float) -> float:
    return float(b.sum() / max(a.sum(), 1e-9))


def _of_step(
    name: str,
    a: StepSample,
    stages_of: Sequence[Float],
    stage: int,
    more: Float,
    half: Float,
    limits: CompareLimits,
) -> NumberChange:
    """Return the judged excess of a stage on the rank where it is largest, as a change of the step."""
    most, step = int(np.argmax(np.abs(more))), a["numbers"][STEP]
    by, low, high = (float(ms) for ms in (more[most], more[most] - half[most], more[most] + half[most]))
    change = NumberChange(
        what=name,
        unit="ms",
        a=float(stages_of[0][most, stage]),
        b=float(stages_of[1][most, stage]),
        change=by,
        low=low,
        high=high,
        change_pct=100 * by / step,
        low_pct=100 * low / step,
        high_pct=100 * high / step,
    )
    return _judged(change, limits.least * step)


def _ranks(
    a: StepSample,
    b: StepSample,
    stages_of: Sequence[Float],
    stage: int,
    more: Float,
    half: Float,
    limits: CompareLimits,
) -> tuple[RankChange, ...]:
    """Return the ranks that moved like the one that moved most, largest change first."""
    if len(more) != len(b["nodes"]):
        return ()
    most = more[int(np.argmax(np.abs(more)))]
    sign = 1 if most > 0 else -1
    which = np.flatnonzero((sign * more >= limits.moved * abs(most)) & (sign * more > half))
    return tuple(
        RankChange(
            rank=a["ranks"][index],
            node=b["nodes"][index],
            a=float(stages_of[0][index, stage]),
            b=float(stages_of[1][index, stage]),
            change=float(more[index]),
            low=float(more[index] - half[index]),
            high=float(more[index] + half[index]),
        )
        for index in sorted(which.tolist(), key=lambda index: -sign * more[index])
    )


def _error(samples: Float) -> tuple[float, float]:
    """Return the standard error of the mean of `samples`, and the number of independent blocks."""
    block = resampling.block_length(samples)
    return float(error_of(samples[:, None], block)[0]), len(samples) / block
