"""
Compares two runs: better, worse, or no difference; by how much, and which stage and ranks moved.

Replicates of each run are drawn by a circular block bootstrap over its steps. Steps are correlated (a busy
neighbour slows many of them), so whole blocks of consecutive steps are drawn. Circular blocks: Politis and
Romano, "A circular block-resampling procedure for stationary data" (1992). Block length: Politis and White,
"Automatic block-length selection for the dependent bootstrap" (2004), with the correction by Patton, Politis
and White (2009).

An interval comes from the steps of both runs. It covers the scatter of steps, and the assumption that a run
which drifts differs by as much from the next run. An effect that is constant within a run and differs in the
next (the node, other load on it) is in no interval; `CompareLimits.least` covers it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from traceml_ray.analysis.shapes import StepSample
from traceml_ray.analysis.spread import Values, over_pct, quantiles
from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.analysis.step_stats import Array
from traceml_ray.analysis.step_store import ALL
from traceml_ray.analysis.thresholds import COMPARE, CompareLimits
from traceml_ray.analysis.window import Float, Int64
from traceml_ray.stages import (
    FLAG_DEVICE_CLOCK,
    FLAG_INSEPARABLE,
    FLAG_NO_DATA,
    FLAG_NO_FORWARD,
    FLAG_NO_SPLIT,
    N_STAGES,
    STAGES,
)

_SEED = 20_040_101
_CELLS = 1 << 21
"""Largest number of values drawn at a time."""
_OUTLIER_MADS = 5.0
PARTS = 5
"""Number of parts of a run. The differences between them show how much the next run may differ."""


class Drawn(NamedTuple):
    """Numbers of a run, `values` (Q,), and their `replicates` (B, Q)."""

    values: Float
    replicates: Float


def block_length(series: Float) -> int:
    """
    Return the block length, 1 to n ÷ 3, for drawing blocks of a series (n,).

    A single slow step says nothing about the correlation of steps, so outliers are clipped first.
    """
    n = len(series)
    longest = max(1, int(min(3 * np.sqrt(n), n / 3)))
    middle = np.median(series)
    mad = np.median(np.abs(series - middle))
    centred = np.clip(series - middle, -_OUTLIER_MADS * mad, _OUTLIER_MADS * mad) if mad else series - middle
    centred = centred - centred.mean()
    if n < 4 or not np.any(centred):
        return 1
    quiet = max(5, int(np.sqrt(np.log10(n))))
    lags = min(n - 1, int(np.ceil(np.sqrt(n))) + quiet)
    covariance = np.array([centred[: n - lag] @ centred[lag:] / n for lag in range(lags + 1)])
    window = _window(covariance / covariance[0], n, quiet)
    lag = np.arange(-window, window + 1)
    weight = np.clip(2 * (1 - np.abs(lag) / max(1, window)), 0, 1)
    known = weight * covariance[np.minimum(np.abs(lag), lags)]
    spectrum = float(known.sum())
    if spectrum <= 0:
        return 1
    ratio = 2 * float((np.abs(lag) * known).sum()) ** 2 / (4 / 3 * spectrum**2)
    return int(np.clip(np.ceil((ratio * n) ** (1 / 3)), 1, longest))


def _window(correlation: Float, n: int, quiet: int) -> int:
    """Return twice the lag after which `quiet` correlations in a row are as small as those of noise."""
    small = np.abs(correlation[1:]) < 2 * np.sqrt(np.log10(n) / n)
    for lag in range(len(small) - quiet + 1):
        if small[lag : lag + quiet].all():
            return min(2 * max(1, lag), len(small))
    return len(small)


def starts_of_blocks(n: int, block: int, replicates: int) -> Int64:
    """
    Return the start of each block of each replicate (B, n ÷ block rounded up). The result is the same at each
    call.
    """
    drawn = np.random.default_rng(_SEED).integers(0, n, (replicates, -(-n // block)))
    return drawn.astype(np.int64)


def means(columns: Values, block: int, starts: Int64) -> Drawn:
    """Return the means of `columns` (n, Q) and their replicates. A replicate is cut to n values."""
    n, replicates = len(columns), len(starts)
    last = n - (starts.shape[1] - 1) * block
    sums, rest = (_sums_of_blocks(columns, length) for length in (block, last))
    replicated = np.empty((replicates, columns.shape[1]))
    for chunk in _some(replicates, n):
        drawn = starts[chunk]
        times = np.zeros((len(drawn), n))
        np.add.at(times, (np.arange(len(drawn))[:, None], drawn[:, :-1]), 1)
        replicated[chunk] = (times @ sums + rest[drawn[:, -1]]) / n
    return Drawn(columns.mean(axis=0, dtype=float), replicated)


def quantiles_of(series: Values, shares: tuple[float, ...], block: int, starts: Int64) -> Drawn:
    """Return quantiles (0..1) of a series (n,), and replicates."""
    n, replicates = len(series), len(starts)
    replicated = np.empty((replicates, len(shares)))
    for chunk in _some(replicates, n):
        blocks = starts[chunk][:, :, None] + np.arange(block)
        indices = blocks.reshape(-1, starts.shape[1] * block)[:, :n] % n
        replicated[chunk] = np.quantile(series[indices], shares, axis=1).T
    return Drawn(np.quantile(series, shares), replicated)


def error_of_means(columns: Values, block: int) -> Float:
    """Return the standard error of the means of `columns` (n, …), over all possible replicates."""
    sums = _sums_of_blocks(columns, block) / block
    error: Float = np.sqrt(sums.var(axis=0) * block / len(columns)) * few_blocks(len(columns) / block)
    return error


def parts_of(n: int) -> list[slice]:
    """Return the fifths of n values, in order."""
    edges = np.linspace(0, n, PARTS + 1).astype(int).tolist()
    return [slice(*ends) for ends in itertools.pairwise(edges)]


def drift(of_parts: Values) -> Float:
    """
    Return by how much the next run may differ, as a standard deviation (…). It is estimated from the
    differences between the fifths of this run (5, …). Outside influences on a run have no length over which
    they average out.
    """
    deviation: Float = of_parts.std(axis=0, ddof=1)
    return deviation


def few_blocks(blocks: float) -> float:
    """Return the factor by which replicates of `blocks` blocks scatter too little: √(m ÷ (m − 1))."""
    return float(np.sqrt(max(blocks, 2.0) / (max(blocks, 2.0) - 1)))


def student(blocks: float, share: float) -> float:
    """
    Return the quantile `share` of Student's t with `blocks` − 1 degrees of freedom, in standard errors. Uses
    the expansion of Cornish and Fisher, which is within 2 % from four blocks on.
    """
    z, free = NormalDist().inv_cdf(share), max(blocks, 2.0) - 1
    return float(z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2))


def _sums_of_blocks(columns: Values, length: int) -> Float:
    """Return the sum of the `length` values that begin at each index (n, …), wrapping around at the end."""
    n = len(columns)
    around = np.concatenate([columns, columns[:length]], dtype=float)
    ends = np.concatenate([np.zeros((1, *columns.shape[1:])), np.cumsum(around, axis=0)])
    sums: Float = ends[length : length + n] - ends[:n]
    return sums


def _some(replicates: int, n: int) -> Iterator[slice]:
    per_chunk = max(1, _CELLS // n)
    yield from (slice(first, first + per_chunk) for first in range(0, replicates, per_chunk))


STEP, MEDIAN, P95, SKEW = "step", "median step", "p95 step", "skew"
NAMES = (STEP, *STAGES, MEDIAN, P95, SKEW)
"""Names of the numbers that two runs are compared by."""
_TAILS = (0.5, 0.95)
_FLAG_ROWS, _FLAG_BITS = 200, 8


def sampled(history: StepHistory, world: int, limits: CompareLimits = COMPARE) -> StepSample:
    """
    Return the sample of a run: all steps beyond the warm-up, in at most `limits.columns` columns.

    It takes at most about 0.2 s and 100 MB.
    """
    complete = history.complete_columns(limits.columns)
    steps = history.columns(between=ALL, most=limits.columns)
    _, _, d = history.stage_columns(ALL, limits.columns)
    first, last, exposed = steps.first[complete], steps.last[complete], steps.exposed[complete]
    none = np.full((len(history.ranks), N_STAGES), np.nan)
    undrawn = StepSample(
        world=world,
        ranks=history.ranks,
        nodes=[*history.nodes],
        columns=len(first),
        per=int(last[0] - first[0]) + 1 if len(first) else 1,
        first=int(first[0]) if len(first) else None,
        last=int(last[-1]) if len(first) else None,
        block=1,
        numbers={},
        replicates=np.empty((0, 0)),
        drift=np.empty(0),
        stages=none,
        errors=none,
        flags=_usual_flags(history),
    )
    if len(first) < limits.steps:
        return undrawn
    return _drawn(undrawn, exposed, steps.busy[:, complete], d[:, complete], limits)


def _drawn(sample: StepSample, exposed: Array, busy: Array, d: Array, limits: CompareLimits) -> StepSample:
    """
    Return `sample` with the numbers and replicates of `exposed` (C, 6), `busy` (R, C) and the ranks' stages
    `d` (R, C, 6), in ms.
    """
    total = exposed.sum(axis=1)
    block = max(map(block_length, (total, *exposed.T)))
    starts = starts_of_blocks(len(total), block, limits.replicates)
    columns = np.column_stack([total, exposed, _filled(busy).T])
    of_means = means(columns, block, starts)
    tails = quantiles_of(total, _TAILS, block, starts)
    replicates = _numbers(of_means.replicates, tails.replicates)
    parts = [_of(columns[part], total[part]) for part in parts_of(len(total))]
    by_step = _filled(d).swapaxes(0, 1)
    return msgspec.structs.replace(
        sample,
        block=block,
        numbers=dict(zip(NAMES, _of(columns, total).tolist(), strict=True)),
        replicates=replicates,
        drift=drift(np.array(parts)),
        stages=by_step.mean(axis=0, dtype=float),
        errors=error_of(by_step, block),
    )


def error_of(columns: Values, block: int) -> Float:
    """
    Return the standard error of the means of `columns` (n, …) that also covers the
    difference between runs.
    """
    parts = [columns[part].mean(axis=0, dtype=float) for part in parts_of(len(columns))]
    return np.hypot(error_of_means(columns, block), drift(np.array(parts)))


def _of(columns: Values, total: Values) -> Float:
    """Return the numbers (Q,) of some columns."""
    return _numbers(columns.mean(axis=0, dtype=float), np.quantile(total, _TAILS))


def _numbers(means: Float, tails: Float) -> Float:
    """Return the numbers (…, Q) of the means of step, stages and ranks (…, 7 + R), and the tails (…, 2)."""
    most = 1 + N_STAGES
    return np.concatenate([means[..., :most], tails, _skew(means[..., most:])], axis=-1)


def _skew(busy: Float) -> Float:
    """Return by how many % the busiest rank (…, R) is above the median one (…, 1); NaN for one rank."""
    if busy.shape[-1] < 2:
        return np.full((*busy.shape[:-1], 1), np.nan)
    middle = quantiles(np.moveaxis(busy, -1, 0), (0.5,))[0]
    return over_pct(np.nanmax(busy, axis=-1), middle)[..., None]


def _filled(values: Values) -> Values:
    """
    Return values (R, C, …) with unknown ones replaced by the mean of the rank; NaN for a rank without any
    known value.
    """
    known = ~np.isnan(values)
    count = known.sum(axis=1, keepdims=True)
    mean = np.where(known, values, 0).sum(axis=1, keepdims=True) / np.maximum(count, 1)
    return np.where(known, values, np.where(count > 0, mean, np.nan))


def _usual_flags(history: StepHistory) -> int:
    """Return the flags set in most of the newest rows of all ranks."""
    newest = [history.table.line(rank, _FLAG_ROWS)[1] for rank in history.ranks]
    flags = np.concatenate([np.empty(0, np.uint8), *newest])
    bits = np.unpackbits(flags[:, None], axis=1, count=_FLAG_BITS, bitorder="little")
    return int((1 << np.flatnonzero(2 * bits.sum(axis=0) > len(flags))).sum())


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
    """Name of the number."""
    unit: str
    """Unit of the number: ms, steps/s, %, GB, …"""
    a: float | None = None
    """Its value in `a`, in `unit`."""
    b: float | None = None
    """Its value in `b`, in `unit`."""
    change: float | None = None
    """`b` minus `a`, in `unit`."""
    low: float | None = None
    """
    Lower end of the interval that `change` lies in, in `unit`, from the steps of both sessions. None: no
    interval is known.
    """
    high: float | None = None
    """Upper end of the interval that `change` lies in, in `unit`."""
    change_pct: float | None = None
    """`change` in % of `a`."""
    low_pct: float | None = None
    """Lower end of the interval of `change_pct`, in %."""
    high_pct: float | None = None
    """Upper end of the interval of `change_pct`, in %."""
    word: Word | None = None
    """The judgement. None: the number is not judged, or cannot be; then `why` says so."""
    rank_a: int | None = None
    """For memory: the rank of `a` with the most memory."""
    rank_b: int | None = None
    """For memory: the rank of `b` with the most memory."""
    why: str = ""
    """Why the number cannot be judged; otherwise ""."""


class RankChange(msgspec.Struct, frozen=True, kw_only=True):
    """
    A rank in the stage that moved, in ms per step. `change` is the additional time in `b` beyond what the
    change of all other work explains.
    """

    rank: int
    """Global rank."""
    node: str
    """Label of its node in `b`."""
    a: float
    """Time in the stage in `a`, in ms per step."""
    b: float
    """Time in the stage in `b`, in ms per step."""
    change: float
    """Additional time in `b` beyond what the change of all other work explains, in ms per step."""
    low: float
    """Lower end of the interval of `change`, in ms per step."""
    high: float
    """Upper end of the interval of `change`, in ms per step."""


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
    few = [name for name, sample in (("A", a), ("B", b)) if not sample.numbers]
    if few:
        why = _too_few(a, b, limits)
        names = (STEP, MEDIAN, P95, SKEW, *STAGES)
        return ComparisonVerdict(word=None, by=None), [
            NumberChange(what=name, unit="%" if name == SKEW else "ms", why=why) for name in names
        ]
    changes = {name: _step_change(name, a, b, limits) for name in a.numbers}
    return _verdict(a, b, changes, limits), [changes[name] for name in (STEP, MEDIAN, P95, SKEW, *STAGES)]


def compare_memory(
    what: str, a: Sequence[MemorySeries], b: Sequence[MemorySeries], limits: CompareLimits = COMPARE
) -> NumberChange:
    """
    Compare the memory of two runs. For each run, the mean over the samples of the rank with the most memory
    is used.
    """
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
    half = student(min(blocks_a, blocks_b, _FIFTHS), _upper(limits)) * float(np.hypot(error_a, error_b))
    change = _change(what, "B", mean_a, mean_b, mean_b - mean_a - half, mean_b - mean_a + half)
    change = msgspec.structs.replace(change, rank_a=one.rank, rank_b=other.rank)
    return _judged(change, limits.least_memory * mean_a)


def fact(what: str, unit: str, a: float | None, b: float | None) -> NumberChange:
    """Return a number that is only shown, not judged, because its variation by chance is not known."""
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
    counts = [f"{name} has {sample.columns}" for name, sample in (("A", a), ("B", b)) if not sample.numbers]
    return f"too few steps beyond the warm-up: {' and '.join(counts)}, {limits.steps} are needed"


def _step_change(name: str, a: StepSample, b: StepSample, limits: CompareLimits) -> NumberChange:
    """Return the change of one number of both samples, judged if possible."""
    one, two = a.numbers[name], b.numbers[name]
    unit = "%" if name == SKEW else "ms"
    why = _incomparable(name, a, b)
    if why or one != one or two != two:
        return msgspec.structs.replace(fact(name, unit, one, two), why=why or "it takes two ranks")
    low, high = _interval(NAMES.index(name), a, b, two - one, _upper(limits))
    least = limits.least_skew if name == SKEW else limits.least * a.numbers[STEP]
    return _judged(_change(name, unit, one, two, low, high), least)


def _interval(index: int, a: StepSample, b: StepSample, apart: float, upper: float) -> tuple[float, float]:
    """
    Return the interval of the difference of a number. `apart` is the difference between
    the two samples.
    """
    blocks = min(sample.columns / sample.block for sample in (a, b))
    one, two = (sample.replicates[:, index] for sample in (a, b))
    drawn = np.random.default_rng(_PAIRED).permutation(two) - one - apart
    few = few_blocks(blocks) * student(blocks, upper) / student(1e9, upper)
    drift = student(_FIFTHS, upper) * float(np.hypot(a.drift[index], b.drift[index]))
    below, above = few * np.quantile(drawn, (1 - upper, upper))
    return apart + min(-float(np.hypot(below, drift)), 0.0), apart + float(np.hypot(above, drift))


def _incomparable(name: str, a: StepSample, b: StepSample) -> str:
    """Return why a number of two runs cannot be compared; "" if it can be."""
    if name not in STAGES:
        return ""
    if (a.flags ^ b.flags) & FLAG_DEVICE_CLOCK:
        device, host = ("A", "B") if a.flags & FLAG_DEVICE_CLOCK else ("B", "A")
        return f"{device} has its stages by the device's clock, {host} by the CPU's"
    for flag, merged in _MERGED.items():
        if name in merged and (a.flags ^ b.flags) & flag:
            lacks = "A" if a.flags & flag else "B"
            return f"in {lacks} {' and '.join(merged)} cannot be separated"
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
    alike = a.ranks == b.ranks
    of_ranks = len(a.ranks) if alike else 0
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
    Return `sync_wait` if it explains a difference that no rank's own work has: the
    exchange itself is slower.
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
    Return the stage that moved; None if there is nothing to compare it with.

    Beside other load, or on another machine, all work of a rank takes longer by about the same factor. For
    each stage that factor is estimated from the other stages. The stage without which the others agree best
    is the one that moved. Waiting is left out: all other ranks wait longer for a rank that has become late.
    """
    flags = a.flags | b.flags
    waits = {name for flag in (FLAG_NO_SPLIT, FLAG_INSEPARABLE) if flags & flag for name in _MERGED[flag]}
    names = [s for s in STAGES if s not in waits | {"sync_wait"} and not _incomparable(s, a, b)]
    columns = [STAGES.index(name) for name in names]
    stages_of = [np.nan_to_num(_of_ranks(sample.stages, alike)[:, columns]) for sample in (a, b)]
    errors = [np.nan_to_num(_of_ranks(sample.errors, alike)[:, columns]) for sample in (a, b)]
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
    half = student(_FIFTHS, _upper(limits)) * error
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
    most, step = int(np.argmax(np.abs(more))), a.numbers[STEP]
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
    if len(more) != len(b.nodes):
        return ()
    most = more[int(np.argmax(np.abs(more)))]
    sign = 1 if most > 0 else -1
    which = np.flatnonzero((sign * more >= limits.moved * abs(most)) & (sign * more > half))
    return tuple(
        RankChange(
            rank=a.ranks[index],
            node=b.nodes[index],
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
    block = block_length(samples)
    return float(error_of(samples[:, None], block)[0]), len(samples) / block
