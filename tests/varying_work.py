"""
Simulated rows of data-parallel ranks whose work varies from step to step, and the cost of each cause of
delay.

A rank works through its local stages, then waits for the exchange. Gradients are exchanged bucket by bucket
while backward goes on, each bucket as soon as the last rank has it ready. So a long exchange hides lateness.
All ranks leave the exchange together, and their rows are cut there. The draws of a seed are played once with
all causes and once without each of them. So a cost is exact: the time saved without the cause, as a share of
the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from traceml_ray.analysis.window import Window
from traceml_ray.stages import BACKWARD, FORWARD, SEGMENT_BITS, STAGES

Float = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Sizes = Callable[[np.random.Generator, int, int], Float]
"""Draws the relative size of the work of each step and rank, shape (steps, ranks); about 1."""

COMPUTE = "compute"
"""Forward and backward together, as a verdict may call them."""
SEVERAL_STAGES = frozenset({"straggler", "ambiguous"})
"""Labels that are right for a rank that is late in several stages."""
SURE = 4.0
"""A rank's rows allow a name if its mean lateness is at least this many standard errors."""
_NS = 1e6
_LEAVES_MS = 0.05
_NO_STEP = 1 << 62
_MOST_STEPS, _HALVINGS = 30, 16


# -- how large the work is ---------------------------------------------------------------------------


def drawn(draw: Callable[[np.random.Generator, tuple[int, int]], Float], stay: int = 1) -> Sizes:
    """Return sizes that each rank draws anew every `stay` steps, at its own time."""

    def sizes(rng: np.random.Generator, steps: int, ranks: int) -> Float:
        blocks = draw(rng, (steps // stay + 2, ranks))
        block = (np.arange(steps)[:, None] + rng.integers(stay, size=ranks)) // stay
        return np.take_along_axis(blocks, block, axis=0)

    return sizes


def uniform(low: float, high: float, stay: int = 1) -> Sizes:
    """Return sizes between `low` and `high`, uniformly distributed."""
    return drawn(lambda rng, shape: rng.uniform(low, high, shape), stay)


def lognormal(sigma: float, stay: int = 1) -> Sizes:
    """Return sizes of which most are below 1 and some far above. Their mean is 1."""
    return drawn(lambda rng, shape: rng.lognormal(-(sigma**2) / 2, sigma, shape), stay)


def heavy_tailed(alpha: float, stay: int = 1) -> Sizes:
    """Return sizes with a Pareto tail, cut at 12. The mean is about 1."""
    scale = 0.4 * (alpha - 1)
    return drawn(lambda rng, shape: np.minimum(0.6 + scale * rng.pareto(alpha, shape), 12.0), stay)


def documents(share: float, times: float, stay: int = 1) -> Sizes:
    """Return sizes in which a share of the batches is `times` times as large as the others."""
    return drawn(lambda rng, shape: np.where(rng.random(shape) < share, times, 1.0), stay)


def in_turn(more: float) -> Sizes:
    """Return sizes in which one rank after the other has `more` additional work (a share) for one step."""

    def sizes(rng: np.random.Generator, steps: int, ranks: int) -> Float:
        turn = (np.arange(steps) + rng.integers(ranks)) % ranks
        return 1.0 + more * (turn[:, None] == np.arange(ranks))

    return sizes


def any_one(more: float) -> Sizes:
    """Return sizes in which one random rank per step has `more` additional work (a share)."""

    def sizes(rng: np.random.Generator, steps: int, ranks: int) -> Float:
        return 1.0 + more * (rng.integers(ranks, size=steps)[:, None] == np.arange(ranks))

    return sizes


def experts(sigma: float, memory: float) -> Sizes:
    """
    Return the load of the experts on each rank: shares of all tokens that drift, with correlation `memory`
    per step.
    """

    def sizes(rng: np.random.Generator, steps: int, ranks: int) -> Float:
        fresh = np.sqrt(1 - memory**2) * rng.standard_normal((steps, ranks))
        wanders = np.empty((steps, ranks))
        before = rng.standard_normal(ranks)
        for step in range(steps):
            before = wanders[step] = memory * before + fresh[step]
        load = np.exp(sigma * wanders)
        return load / load.mean(axis=1, keepdims=True)

    return sizes


def on_all(sizes: Sizes) -> Sizes:
    """
    Return sizes that are equal on all ranks in a step: the job becomes slower and faster, but no
    rank waits.
    """

    def alike(rng: np.random.Generator, steps: int, ranks: int) -> Float:
        return np.repeat(sizes(rng, steps, 1), ranks, axis=1)

    return alike


# -- work and what delays it -------------------------------------------------------------------------


@dataclass(frozen=True)
class Stalls:
    """Stalls of random ranks: in a share of its steps, a rank stops for `low_ms` to `high_ms`, in `stage`."""

    often: float
    low_ms: float
    high_ms: float
    stage: int = FORWARD


@dataclass(frozen=True)
class Work:
    """
    The work of healthy ranks: `base_ms` has the ms of (post_sync, data, prepare, forward, backward).

    `noise` of each stage and `spread`, a small lasting difference between ranks, are shares. `sizes` multiply
    the stages that `varies` lists. A size stays for about `stay` steps.
    """

    ranks: int = 8
    steps: int = 400
    base_ms: tuple[float, ...] = (6.0, 4.0, 2.0, 40.0, 80.0)
    noise: float = 0.02
    spread: float = 0.003
    exchange_ms: float = 10.0
    buckets: int = 5
    sizes: Sizes | None = None
    varies: tuple[int, ...] = (FORWARD, BACKWARD)
    stay: float = 1.0
    stalls: Stalls | None = None

    @property
    def step_ms(self) -> float:
        """Length of a step in which all ranks take their mean times, in ms."""
        return sum(self.base_ms) + self.exchange_ms / self.buckets

    def costing(self, share: float) -> float:
        """Return the ms that lengthen a step by `share`, a share of the longer step."""
        return self.step_ms * share / (1 - share)

    def draw(self, rng: np.random.Generator) -> tuple[Float, Float, Float]:
        """
        Return local stages (steps, ranks, 5), the exchange (steps,), and how late a rank leaves the exchange,
        in ms.
        """
        shape = (self.steps, self.ranks)
        stages = len(self.base_ms)
        lasting = 1 + self.spread * rng.standard_normal((self.ranks, stages))
        local = np.array(self.base_ms) * lasting * np.exp(self.noise * rng.standard_normal((*shape, stages)))
        if self.sizes is not None:
            local[:, :, list(self.varies)] *= self.sizes(rng, *shape)[:, :, None]
        if self.stalls is not None:
            stalled = rng.random(shape) < self.stalls.often
            local[:, :, self.stalls.stage] += stalled * rng.uniform(
                self.stalls.low_ms, self.stalls.high_ms, shape
            )
        exchange = self.exchange_ms * np.exp(self.noise * rng.standard_normal(self.steps))
        return local, exchange, rng.uniform(0, _LEAVES_MS, shape)


@dataclass(frozen=True)
class Late:
    """
    A delay: `ranks` take `ms` longer in each of `stages`, and `times` as long.

    It applies from step `first` to before `end`, in the steps k with k % every == phase, in a share `often`
    of these. `spread`: sigma by which the size varies from step to step. `grows`: number of steps in which
    the delay grows to its full size.
    """

    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    ms: float = 0.0
    times: float = 1.0
    first: int = 0
    end: int = _NO_STEP
    every: int = 1
    phase: int = 0
    often: float = 1.0
    spread: float = 0.0
    grows: int = 0

    def add(self, local: Float, rng: np.random.Generator) -> None:
        """Make the stages (steps, ranks, 5) longer."""
        step = np.arange(len(local))
        size = rng.lognormal(-(self.spread**2) / 2, self.spread, len(local))
        size *= (rng.random(len(local)) < self.often) & (step % self.every == self.phase)
        size *= (step >= self.first) & (step < self.end)
        if self.grows:
            size *= np.clip((step - self.first) / self.grows, 0, 1)
        for rank in self.ranks:
            for stage in self.stages:
                local[:, rank, stage] *= 1 + (self.times - 1) * size
                local[:, rank, stage] += self.ms * size


@dataclass(frozen=True)
class Cause:
    """
    Delays that are fixed together; fixing them saves their cost. `labels`: the labels that an expert would
    give.
    """

    lates: tuple[Late, ...]
    labels: frozenset[str] = frozenset({"straggler"})

    @cached_property
    def ranks(self) -> frozenset[int]:
        return frozenset(rank for late in self.lates for rank in late.ranks)

    @cached_property
    def stages(self) -> frozenset[str]:
        """Stages that are right. For a rank that is slow in forward and backward, "compute" is also right."""
        numbers = {stage for late in self.lates for stage in late.stages}
        names = {STAGES[stage] for stage in numbers}
        return frozenset(names | ({COMPUTE} if {FORWARD, BACKWARD} <= numbers else set()))

    @property
    def first(self) -> int:
        return min(late.first for late in self.lates)

    @property
    def whole_from(self) -> int:
        """The step from which the cause has its full size."""
        return max(late.first + late.grows for late in self.lates)

    @property
    def end(self) -> int:
        return max(late.end for late in self.lates)


def late(rank: int | Sequence[int], stages: int | tuple[int, ...], **how: float) -> Cause:
    """Return one cause: a rank, or several ranks together, are late in the stage or stages."""
    ranks = (rank,) if isinstance(rank, int) else tuple(rank)
    stages = (stages,) if isinstance(stages, int) else stages
    lates = (Late(ranks, stages, **how),)  # type: ignore[arg-type]
    return Cause(lates, SEVERAL_STAGES) if len(stages) > 1 else Cause(lates)


@dataclass(frozen=True)
class Played:
    """
    The rows of one run, and the truth about it.

    `costs` are the costs of `causes`, and `imbalance` is the cost of the ranks' uneven work alone; both are
    shares of the run's time. `sure` says for each cause whether its rows allow a name at all.
    """

    window: Window
    causes: tuple[Cause, ...]
    costs: tuple[float, ...]
    imbalance: float | None
    """Cost of the uneven work. None: not known."""
    sure: tuple[bool, ...]

    @cached_property
    def ranks(self) -> frozenset[int]:
        """All ranks that are late for a reason; the others are healthy."""
        return frozenset(rank for cause in self.causes for rank in cause.ranks)

    @cached_property
    def costliest(self) -> int | None:
        """Index of the costliest cause."""
        return int(np.argmax(self.costs)) if self.costs else None


# -- playing it --------------------------------------------------------------------------------------


def play(work: Work, causes: Sequence[Cause] = (), seed: int = 0) -> Played:
    """Play the run of seed `seed`."""
    rng = np.random.default_rng(seed)
    local, exchange, leaves = work.draw(rng)
    kept = list(range(len(causes)))
    late_local = _with(local, causes, kept, seed)
    rows, total = exchanged(late_local, exchange, leaves, work.buckets)
    costs = []
    for cause in kept:
        without = _with(local, causes, [other for other in kept if other != cause], seed)
        costs.append(1 - exchanged(without, exchange, leaves, work.buckets)[1] / total)
    even = np.repeat(local.mean(axis=1, keepdims=True), work.ranks, axis=1)
    healthy, best = (exchanged(stages, exchange, leaves, work.buckets)[1] for stages in (local, even))
    return Played(
        window=window_of(rows),
        causes=tuple(causes),
        costs=tuple(costs),
        imbalance=(healthy - best) / total,
        sure=tuple(is_sure(late_local.sum(axis=2), cause, work.stay) for cause in causes),
    )


def costing(share: float, work: Work, cause: Cause, seed: int = 0) -> Cause:
    """Return `cause`, scaled so that it costs `share` of the run of that seed, if possible."""
    local, exchange, leaves = work.draw(np.random.default_rng(seed))
    without = exchanged(local, exchange, leaves, work.buckets)[1]
    low, high = 0.0, _MOST_STEPS * work.step_ms
    for _ in range(_HALVINGS):
        ms = (low + high) / 2
        sized = replace(cause, lates=tuple(replace(one, ms=ms) for one in cause.lates))
        total = exchanged(_with(local, [sized], [0], seed), exchange, leaves, work.buckets)[1]
        low, high = (low, ms) if 1 - without / total > share else (ms, high)
    return sized


def exchanged(local: Float, exchange: Float, leaves: Float, buckets: int) -> tuple[Int64, int]:
    """Return rows int64 ns (steps, ranks, 6) of local stages (steps, ranks, 5) in ms, and the elapsed ns."""
    stages, cost, leave = (np.rint(ms * _NS).astype(np.int64) for ms in (local, exchange, leaves))
    start = np.concatenate([np.zeros_like(leave[:1]), leave[:-1]])
    before = start + stages[:, :, :BACKWARD].sum(axis=2)
    end = np.zeros(len(stages), np.int64)
    for bucket in range(1, buckets + 1):
        ready = before + stages[:, :, BACKWARD] * bucket // buckets
        end = np.maximum(end, ready.max(axis=1)) + cost // buckets
    wait = end[:, None] + leave - before - stages[:, :, BACKWARD]
    return np.concatenate([stages, wait[:, :, None]], axis=2), int(end.sum())


def window_of(rows: Int64, first_step: int = 1) -> Window:
    """Return rows (steps, ranks, 6) as the window of a job of DDP, laid out by rank; a node has 8 ranks."""
    steps, ranks, _ = rows.shape
    return Window(
        keys=first_step + np.arange(steps, dtype=np.int64) << SEGMENT_BITS,
        ranks=np.arange(ranks, dtype=np.int64),
        nodes=tuple(f"node-{rank // 8}" for rank in range(ranks)),
        d=np.ascontiguousarray(rows.transpose(1, 0, 2)).transpose(1, 0, 2),
        flags=np.zeros((steps, ranks), np.uint8),
        expected=ranks,
        groups=((0, ranks),) * ranks,
        strategies=frozenset({"ddp"}),
        roles=(None,) * ranks,
    )


def _with(local: Float, causes: Sequence[Cause], kept: Sequence[int], seed: int) -> Float:
    """
    Return the local stages with the causes of these indices. Each cause draws the same numbers in any
    combination.
    """
    late_local = local.copy()
    for place in kept:
        for number, one in enumerate(causes[place].lates):
            one.add(late_local, np.random.default_rng((seed, place, number)))
    return late_local


def is_sure(arrivals: Float, cause: Cause, stay: float) -> bool:
    """
    Whether arrivals (steps, ranks) show that the ranks of `cause` are late more than by chance.

    Judged by their mean position among the ranks, or by their mean lateness, over the number of independent
    steps that remain when sizes stay for `stay` steps.
    """
    those = sorted(cause.ranks)
    others = [rank for rank in range(arrivals.shape[1]) if rank not in cause.ranks]
    if not others:
        return False
    steps, ranks = arrivals.shape
    independent = steps / max(stay, 1.0)
    less = (arrivals[:, those, None] > arrivals[:, None, :]).sum(axis=2)
    places = less.mean(axis=1) + 1
    # Of several ranks the mean place has a smaller error, but its middle is that of all ranks in any case.
    by_place = (places.mean() - (ranks + 1) / 2) / np.sqrt((ranks**2 - 1) / 12 / independent)
    behind = arrivals[:, those].mean(axis=1) - arrivals[:, others].mean(axis=1)
    by_time = behind.mean() / max(behind.std() / np.sqrt(independent), 1e-9)
    return bool(max(by_place, by_time) >= SURE)
