"""
Families of memory series with a known truth, and a check of the answers. Used by tests and the benchmark.

An outcome is `right`, `abstained` (the answer says nothing, or less than is true) or `wrong` (the answer says
something untrue).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from memory_series import BEGAN, GIB, MIB, SECOND, at, on_device, on_host

from traceml_ray.signals.memory.judge import judge
from traceml_ray.signals.memory.shapes import Collective, Float, Memory, MemoryFinding, Series

Outcome = Literal["right", "abstained", "wrong"]
Family = Callable[[int], Outcome]
"""Plays the case of a seed, judges it and returns the outcome."""
GROWTH = ("creep", "persistent_drift")
FORECAST_ERROR = 0.2
"""Largest relative error of a correct forecast, as a share of the time left."""


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng((seed, 77))


def _growths(memory: Memory) -> list[MemoryFinding]:
    return [finding for finding in memory.findings if finding.kind in GROWTH]


# -- who grew first


def _ranks(
    seed: int, begins_s: list[float], grow: Callable[[int, Float], Float], seconds: int = 240
) -> list[Series]:
    """
    Return the series of ranks, four per node. Each rank samples once a second, with its own phase. A step
    allocates and frees up to 400 MiB. The growth of rank r is `grow(r, time since begins_s[r])`.
    """
    rng = np.random.default_rng(seed)
    series, step = [], float(rng.choice([5, 5, 100, 400])) * MIB
    for rank, begin_s in enumerate(begins_s):
        phase = float(rng.uniform(0, 1))
        since = np.maximum(phase + np.arange(seconds) - begin_s, 0.0)
        noise = rng.uniform(0, step, seconds)
        allocated = 10 * GIB + noise + grow(rank, since)
        series.append(on_device(rank, allocated, start_s=phase, node=f"node-{rank // 4}"))
    return series


def followers_that_count_less(seed: int) -> Outcome:
    """
    One rank leaks. 10 to 20 s later all others leak too, but have not grown by a tenth of their
    memory yet.
    """
    rng = _rng(seed)
    world = int(rng.choice([2, 4, 8]))
    first, begin_s = int(rng.integers(world)), float(rng.uniform(60, 120))
    lag_s = rng.uniform(10, 20, world)
    begins_s = [begin_s if rank == first else begin_s + lag_s[rank] for rank in range(world)]
    rates = [float(rng.uniform(0.95, 1.05)) for _ in range(world)]
    last_s = 239 - begin_s
    mib_s = 1300 / last_s  # a tenth of about 11.3 GiB is significant
    memory = judge(
        _ranks(
            seed,
            begins_s,
            lambda rank, since: mib_s * MIB * since * (1 if rank == first else 0.85 * rates[rank]),
        ),
        expected=world,
    )
    return _first(memory, begins_s, first)


def followers_that_count(seed: int) -> Outcome:
    """One rank leaks; all others begin 8 to 30 s later."""
    rng = _rng(seed)
    world = int(rng.choice([2, 4, 8]))
    first, begin_s = int(rng.integers(world)), float(rng.uniform(60, 120))
    begins_s = [begin_s if rank == first else begin_s + float(rng.uniform(8, 30)) for rank in range(world)]
    mib_s = float(rng.uniform(15, 40))
    memory = judge(_ranks(seed, begins_s, lambda _, since: mib_s * MIB * since), expected=world)
    return _first(memory, begins_s, first)


def followers_after_a_step(seed: int) -> Outcome:
    """One rank rises by 2 to 4 GiB. 5 to 30 s later all others rise, by half as much or more."""
    rng = _rng(seed)
    world = int(rng.choice([2, 4, 8]))
    first, begin_s = int(rng.integers(world)), float(rng.uniform(60, 120))
    begins_s = [begin_s if rank == first else begin_s + float(rng.uniform(5, 30)) for rank in range(world)]
    sizes = rng.uniform(2, 4, world)
    memory = judge(
        _ranks(seed, begins_s, lambda rank, since: sizes[rank] * GIB * (since > 0)), expected=world
    )
    return _first(memory, begins_s, first)


def leaks_of_several_speeds_at_once(seed: int) -> Outcome:
    """All ranks begin to leak at the same time, some twice as fast as others. No rank is first."""
    rng = _rng(seed)
    world, begin_s = int(rng.choice([2, 4, 8])), float(rng.uniform(60, 120))
    speeds = rng.uniform(10, 20, world)
    memory = judge(
        _ranks(seed, [begin_s] * world, lambda rank, since: speeds[rank] * MIB * since), expected=world
    )
    return _nobody(memory)


def unlike_growth_at_once(seed: int) -> Outcome:
    """All ranks begin to grow at the same time: by a step, linearly or as a square root. No rank is first."""
    rng = _rng(seed)
    world, begin_s = int(rng.choice([2, 4, 8])), float(rng.uniform(60, 120))
    shapes = rng.permutation(np.arange(world) % 3)
    gib = rng.uniform(2, 4, world)

    def grow(rank: int, since: Float) -> Float:
        unit = since / 150
        grown = ((since > 0).astype(float), unit, np.sqrt(unit))[shapes[rank]]
        return np.asarray(gib[rank] * GIB * grown, np.float64)

    return _nobody(judge(_ranks(seed, [begin_s] * world, grow), expected=world))


def walks_and_saws(seed: int) -> Outcome:
    """The memory of each rank of a host is a random walk, returns to a mean, or is a sawtooth. None leaks."""
    rng = _rng(seed)
    world, seconds = int(rng.choice([2, 4, 8])), int(rng.choice([40, 120, 300]))
    series = []
    for rank in range(world):
        steps = rng.normal(0, 10 ** float(rng.uniform(-0.7, 1.3)) * MIB, seconds)
        kept = float(rng.choice([1.0, np.exp(-1 / 200), np.exp(-1 / 20)]))
        level = np.zeros(seconds)
        for sample in range(1, seconds):
            level[sample] = kept * level[sample - 1] + steps[sample]
        tooth = int(rng.integers(8, max(seconds // 3, 12)))  # nobody can predict the first tooth's end
        saw = float(rng.uniform(1, 30)) * MIB * (np.arange(seconds) % tooth)
        rss = 2 * GIB + (saw if rng.random() < 0.3 else level)
        series.append(on_host(rank, np.maximum(rss, 100 * MIB), node="a"))
    memory = judge(series, expected=world)
    warned = any(finding.severity != "info" for finding in _growths(memory))
    cause = memory.first_cause
    return "wrong" if warned or (cause is not None and cause.confidence == "high") else "right"


def _first(memory: Memory, begins_s: list[float], first: int) -> Outcome:
    """
    Return the outcome. "All grew at once" is wrong, unless all ranks began within the error of
    measurement.
    """
    if memory.first_cause is not None:
        return "right" if memory.first_cause.rank == first else "wrong"
    onset = memory.collective_onset
    if onset is None:
        return "abstained"
    began = [begins_s[rank] for rank in onset.ranks]
    bound_ns = getattr(onset, "bound_ns", None) or 0
    return "abstained" if bound_ns / SECOND >= max(began) - min(began) else "wrong"


def _nobody(memory: Memory) -> Outcome:
    if memory.first_cause is not None:
        return "wrong"
    return "abstained" if memory.collective_onset is None else "right"


def cache_that_fills_on_one_rank(seed: int) -> Outcome:
    """A cache of one rank fills up and then stays full, which is healthy."""
    rng = _rng(seed)
    world = int(rng.choice([2, 4, 8]))
    rank, begin_s = int(rng.integers(world)), float(rng.uniform(40, 80))
    fills_s, size = float(rng.uniform(10, 30)), float(rng.uniform(2, 6)) * GIB
    begins_s = [begin_s if other == rank else np.inf for other in range(world)]
    evenly = bool(rng.random() < 0.5)

    def grow(_: int, since: Float) -> Float:
        filled = np.minimum(since / fills_s, 1.0) if evenly else 1 - np.exp(-since / fills_s)
        return np.asarray(size * filled, np.float64)

    memory = judge(_ranks(seed, begins_s, grow), expected=world)
    cause = memory.first_cause
    if any(finding.severity != "info" for finding in _growths(memory)):
        return "wrong"
    return "wrong" if cause is not None and cause.confidence == "high" else "right"


# -- when memory is full


def host_whose_ranks_all_leak(seed: int) -> Outcome:
    """
    Some or all ranks of a host leak. The used memory of the host is noisy, because other programs come and
    go.
    """
    rng = _rng(seed)
    world = int(rng.choice([2, 4, 8]))
    leaking = rng.permutation(world)[: int(rng.integers(2, world + 1))]
    seconds, every_s = int(rng.choice([20, 60, 240])), 1.0
    mib_s = rng.uniform(4, 12, world) * np.isin(np.arange(world), leaking)
    time_s = np.arange(seconds) * every_s
    rss = [2 * GIB + mib_s[rank] * MIB * time_s + rng.normal(0, 2e5, seconds) for rank in range(world)]
    noisy = float(rng.choice([0, 200, 1000])) * MIB
    used = 20 * GIB + sum(rss) + rng.normal(0, 1, seconds) * noisy
    total = float(used[-3:].mean()) + float(mib_s.sum()) * MIB * float(rng.uniform(200, 3000))
    ranks = [
        on_host(rank, rss[rank], node="a", every_s=every_s, total=total, limit_used_bytes=used)
        for rank in range(world)
    ]
    true_s = (total - float(np.median(used[-3:]))) / (float(mib_s.sum()) * MIB)
    return _forecast(judge(ranks, expected=world), true_s)


def creep_and_drift_on_one_device(seed: int) -> Outcome:
    """The memory that a process has allocated creeps up, and its memory outside of torch drifts."""
    rng = _rng(seed)
    seconds = int(rng.choice([60, 240]))
    mib_s = rng.uniform(8, 16, 2)
    time_s = np.arange(seconds)
    allocated = 10 * GIB + mib_s[0] * MIB * time_s + rng.uniform(0, 5 * MIB, seconds)
    gap = 600 * MIB + mib_s[1] * MIB * time_s + rng.normal(0, MIB, seconds)
    series = on_device(0, allocated, gap=gap, held=16 * GIB, total=24 * GIB)
    left = 24 * GIB - float(gap[-1]) - float(allocated[-1])
    return _forecast(judge([series], expected=1), left / (float(mib_s.sum()) * MIB))


def two_processes_on_one_device(seed: int) -> Outcome:
    """Two ranks share a device. Both leak, each at a different speed."""
    rng = _rng(seed)
    seconds = int(rng.choice([60, 240]))
    mib_s, time_s = rng.uniform(6, 20, 2), np.arange(seconds)
    allocated = [
        8 * GIB + speed * MIB * time_s + rng.uniform(0, float(rng.choice([2, 50])) * MIB, seconds)
        for speed in mib_s
    ]
    reserved = [np.maximum.accumulate(series) + GIB for series in allocated]
    used = sum(reserved) + 1200 * MIB
    total = float(used[-1]) + float(rng.uniform(4, 30)) * GIB
    ranks = [
        on_device(rank, allocated[rank], held=reserved[rank], node="a", total=total, device_used_bytes=used)
        for rank in range(2)
    ]
    left = total - float(used[-1]) + GIB  # a rank first uses what is free of its own reserved memory
    return _forecast(judge(ranks, expected=2), left / (float(mib_s.sum()) * MIB))


def lone_leak(seed: int) -> Outcome:
    """One rank leaks linearly, with noise of up to a fifth of its growth."""
    rng = _rng(seed)
    seconds, mib_s = int(rng.choice([60, 120, 400])), float(rng.uniform(5, 30))
    grown = mib_s * MIB * np.arange(seconds)
    noise = rng.normal(0, float(rng.uniform(0.001, 0.2)) * float(grown[-1]), seconds)
    rss = 4 * GIB + grown + np.abs(noise)
    total = 8 * GIB + float(rss[-1]) + float(rng.uniform(5, 40)) * GIB
    left = total - 8 * GIB - float(np.median(rss[-3:]))
    return _forecast(judge([on_host(0, rss, total=total)], expected=1), left / (mib_s * MIB))


def _forecast(memory: Memory, true_s: float) -> Outcome:
    growths = _growths(memory)
    forecasts = [finding.evidence["forecast_s"] for finding in growths]
    known = [seconds for seconds in forecasts if isinstance(seconds, float)]
    if not known:
        return "abstained"
    right = all(abs(seconds - true_s) <= FORECAST_ERROR * true_s for seconds in known)
    return "right" if right else "wrong"


def growth_along_a_root(seed: int) -> Outcome:
    """Memory grows as the square root of time. The amount depends on the seed."""
    return _slowing(seed, np.sqrt)


def growth_along_a_logarithm(seed: int) -> Outcome:
    """Memory grows as the logarithm of time."""
    scale = float(_rng(seed).uniform(10, 200))
    return _slowing(seed, lambda unit: np.log1p(scale * unit) / np.log1p(scale))


def cache_that_still_fills(seed: int) -> Outcome:
    """A cache fills more and more slowly, and is not full yet."""
    share = float(_rng(seed).uniform(0.4, 1.0))
    return _slowing(seed, lambda unit: 1 - np.exp(-unit / share))


def _slowing(seed: int, shape: Callable[[Float], Float]) -> Outcome:
    """A linear forecast says too little time is left, and a severity based on it is too high."""
    rng = _rng(seed)
    seconds, grown = int(rng.choice([60, 200, 600])), float(rng.uniform(0.5, 4)) * GIB
    unit = np.arange(seconds) / seconds
    noise = rng.normal(0, float(rng.uniform(0.001, 0.02)) * grown, seconds)
    rss = 4 * GIB + grown * shape(unit) + np.abs(noise)
    total = 8 * GIB + float(rss[-1]) + grown
    creeps = _growths(judge([on_host(0, rss, total=total)], expected=1))
    if not creeps:
        return "abstained"
    by_line = any(finding.evidence["forecast_s"] is not None for finding in creeps)
    return "wrong" if by_line or any(finding.severity == "critical" for finding in creeps) else "right"


# -- changes of level


def drift_of_thirty_samples(seed: int) -> Outcome:
    """
    The gap drifts steadily for 30 samples: from the first sample or later, to the last one or to
    a level.
    """
    rng = _rng(seed)
    before, after = [(0, 0), (120, 0), (0, 60), (120, 60)][int(rng.integers(4))]
    mib_s, seconds = float(rng.uniform(15, 60)), before + 30 + after
    rising = np.clip(np.arange(seconds) - before, 0, 29)
    gap = 600 * MIB + mib_s * MIB * rising + rng.normal(0, float(rng.choice([0, 1])) * MIB, seconds)
    level = 10 * GIB + rng.uniform(0, 5 * MIB, seconds)
    kinds = [finding.kind for finding in judge([on_device(0, level, gap=gap)]).findings]
    if not kinds:
        return "abstained"
    return "right" if kinds in (["persistent_drift"], ["step_change"]) else "wrong"


def two_steps_of_the_gap(seed: int) -> Outcome:
    """The gap rises twice, at least 20 samples apart, and stays: two steps."""
    rng = _rng(seed)
    first = int(rng.integers(60, 100))
    second = first + int(rng.integers(20, 100))
    time_s = np.arange(300)
    sizes = rng.uniform(150, 800, 2) * MIB
    gap = 600 * MIB + sizes[0] * (time_s >= first) + sizes[1] * (time_s >= second)
    gap += rng.normal(0, 2 * MIB, 300)
    memory = judge([on_device(0, 10 * GIB + rng.uniform(0, 5 * MIB, 300), gap=gap)])
    steps = [round(at(f.from_ns)) for f in memory.findings if f.kind == "step_change"]
    right = sorted(steps) == [first, second] and len(memory.findings) == 2
    return "right" if right else "wrong" if memory.findings else "abstained"


# -- collectives


def _uses(world: int, times_s: list[float], op: str = "all_gather") -> list[Collective]:
    """Return collectives that every rank has marked at these times."""
    marks = [BEGAN + round(seconds * SECOND) for seconds in times_s]
    return [Collective(rank, op, None, t_ns, t_ns) for rank in range(world) for t_ns in marks]


def marked_spikes(seed: int) -> Outcome:
    """The gap of all ranks rises for one or two samples around marked collectives."""
    return _spikes(seed, marked=True, together=True)


def spikes_at_once_without_marks(seed: int) -> Outcome:
    """The gap of all ranks rises briefly at the same times. No collective is known."""
    return _spikes(seed, marked=False, together=True)


def spikes_of_one_rank_without_marks(seed: int) -> Outcome:
    """Only the gap of one rank rises. Nothing suggests a collective."""
    return _spikes(seed, marked=False, together=False)


def _spikes(seed: int, *, marked: bool, together: bool) -> Outcome:
    rng = _rng(seed)
    world, samples, every_s = int(rng.choice([2, 4, 8])), int(rng.choice([12, 40, 200])), 0.1
    count = 1 if samples == 12 else int(rng.integers(1, 4))
    times = sorted(rng.choice(np.arange(5, samples - 3, 4), count, replace=False).tolist())
    rise, series = float(rng.uniform(400, 1600)) * MIB, []
    for rank in range(world):
        gap = 40 * MIB + rng.uniform(0, MIB, samples)
        if together or rank == 0:
            gap[times] += rise
        level = np.full(samples, 2.0 * GIB)
        series.append(
            on_device(rank, level, gap=gap, held=2 * GIB, every_s=every_s, first_step_s=None, node="a")
        )
    uses = _uses(world, [time * every_s + 0.01 for time in times]) if marked else []
    kinds = {(one.kind, one.rank) for one in judge(series, uses, world, "medium").collectives}
    if not kinds:
        return "abstained" if together else "right"
    ranks = {rank for _, rank in kinds}
    allowed = {"collective_confident"} if marked else {"collective_suspect"}
    right = together and ranks == set(range(world)) and {kind for kind, _ in kinds} <= allowed
    return "right" if right else "wrong"


FAMILIES: dict[str, Family] = {
    family.__name__: family
    for family in (
        followers_that_count_less,
        followers_that_count,
        followers_after_a_step,
        leaks_of_several_speeds_at_once,
        unlike_growth_at_once,
        cache_that_fills_on_one_rank,
        walks_and_saws,
        host_whose_ranks_all_leak,
        creep_and_drift_on_one_device,
        two_processes_on_one_device,
        lone_leak,
        growth_along_a_root,
        growth_along_a_logarithm,
        cache_that_still_fills,
        drift_of_thirty_samples,
        two_steps_of_the_gap,
        marked_spikes,
        spikes_at_once_without_marks,
        spikes_of_one_rank_without_marks,
    )
}


def outcomes(family: Family, seeds: range) -> dict[Outcome, int]:
    """Return the number of each outcome over the seeds."""
    counts: dict[Outcome, int] = {"right": 0, "abstained": 0, "wrong": 0}
    for seed in seeds:
        counts[family(seed)] += 1
    return counts
