"""
Why ranks are uneven: the share of the variance of their work that the sizes of their batches explain, and the
stages that have the rest; also how evenly routers use their experts. Pure functions of arrays; S steps, R
ranks.

The explained quantity is a rank's local work in a step, minus the mean of all ranks in that step, minus the
mean of that rank over all steps. A rank that is late in every step is another finding, and a step that is
long for all ranks makes no rank wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from traceml_ray import text
from traceml_ray.analysis.labels import ReasonKind
from traceml_ray.analysis.window import Bool, Float, Int64
from traceml_ray.signals.experts.records import RouterTokens
from traceml_ray.signals.throughput.records import StepSizes
from traceml_ray.stages import BACKWARD, DATA, FORWARD, POST_SYNC, PREPARE
from traceml_ray.wire.codec import ready

NAMES = ("samples", "tokens")


def unpacked(piece: StepSizes) -> Int64:
    """
    Return samples and tokens of each step (n, 2), -1 if not known.

    Raises ValueError if `piece` is damaged.
    """
    return np.frombuffer(piece.values(), "<i8").reshape(2, piece.steps).T


def amounts(
    pieces: Mapping[int, Iterable[StepSizes]], ranks: Iterable[int], steps: Int64
) -> dict[str, Float]:
    """
    Return the batch sizes of `ranks` in `steps` (S,), ascending: name → (S, R), NaN if not known. `pieces`
    are by rank. Raises ValueError, see `unpacked`.
    """
    ranks = [*ranks]
    sizes = np.full((2, len(steps), len(ranks)), np.nan)
    for place, rank in enumerate(ranks):
        for piece in pieces.get(rank, ()):
            first, end = np.searchsorted(steps, (piece.first_step, piece.last_step + 1))
            if first == end:
                continue
            values = unpacked(piece)[steps[first:end] - piece.first_step].astype(np.float64)
            sizes[:, first:end, place] = np.where(values < 0, np.nan, values).T
    return dict(zip(NAMES, sizes, strict=True))


class ExpertLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the experts of one router, over all ranks together."""

    router: str
    """Name of the router."""
    experts: int
    """Number of experts of the router."""
    tokens: int
    """Tokens of all experts together."""
    most: int
    """Index of the expert with the most tokens."""
    times_mean: float
    """Tokens of that expert as a multiple of the mean over all experts."""
    idle: int
    """Number of experts without a token."""


def loads(of_ranks: Iterable[Iterable[RouterTokens]]) -> list[ExpertLoad]:
    """Return the load of each router, by the tokens of its experts on each rank, the least even one first."""
    sums: dict[str, list[int]] = {}
    for rank in of_ranks:
        for router in rank:
            known = sums.setdefault(router.name, [0] * len(router.tokens))
            if len(known) == len(router.tokens):
                known[:] = [a + b for a, b in zip(known, router.tokens, strict=True)]
    loads = [_load(router, counts) for router, counts in sums.items() if sum(counts)]
    return sorted(loads, key=lambda load: -load.times_mean)


def sentence(load: ExpertLoad | Mapping[str, object]) -> str:
    """Describe a load: "router: expert 5 of 8 has 2.4 times the mean; 1 has no token"."""
    known = load if isinstance(load, ExpertLoad) else msgspec.convert(load, ready(ExpertLoad))
    idle = f"; {known.idle:,} had no token" if known.idle else ""
    return (
        f"{known.router}: expert {known.most} of {known.experts} has {text.number(known.times_mean)} times "
        f"the mean{idle}"
    )


def _load(router: str, counts: Sequence[int]) -> ExpertLoad:
    largest = max(range(len(counts)), key=counts.__getitem__)
    return ExpertLoad(
        router=router,
        experts=len(counts),
        tokens=sum(counts),
        most=largest,
        times_mean=counts[largest] * len(counts) / sum(counts),
        idle=sum(not count for count in counts),
    )


MIN_STEPS = 20
"""Number of steps below which no reason is given."""
_SIGMAS, _INDEPENDENT = 5.0, 10.0
"""Smallest number of standard errors, and of independent pairs, for which a correlation counts."""
_LAGS = 256
"""Number of steps over which the persistence of work and sizes is measured."""
_ALMOST_1 = 1 - 1e-9
_HOLDS = 0.5
"""Share of the variance from which on one thing is named as the reason."""
_BEYOND = 0.03
"""
Smallest difference by which tokens must explain more than samples: with samples of one length both explain
the same.
"""
FEW, _IN_FEW = 0.05, 0.7
"""
Pauses are the reason if the first share of all cells (steps × ranks) has at least the second share of the
variance.
"""
_KNOWN_STEPS, _KNOWN_RANKS = 0.5, 0.5
"""Smallest share of the steps in which a rank's sizes must be known, and smallest share of such ranks."""
_MORE, _IN_PART = 0.02, 0.1
"""
Smallest share by which a rank's batches must be larger to be mentioned, and smallest share that they must
explain.
"""
_OF_STAGES: tuple[ReasonKind, ...] = ("data", "between_steps")
_GROUPS: Mapping[str, tuple[int, ...]] = {
    "data": (DATA, PREPARE),
    "compute": (FORWARD, BACKWARD),
    "between_steps": (POST_SYNC,),
}


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why ranks are uneven. Shares (0..1) are of the variance that is explained. None: not known."""

    what: ReasonKind
    """
    `tokens`, `samples`: of the ranks' batches. `data`: loading and preparing. `between_steps`: `post_sync`.
    `experts`: their load. `pauses`: few steps hold most of it. `other`: nothing that is measured explains it.
    `unknown`: too little is known to say.
    """
    share: float | None = None
    """Share of the variance that `what` explains, or that is in these stages."""
    tokens: float | None = None
    """Share that tokens explain. None: not known, or no more than chance explains."""
    samples: float | None = None
    """Share that samples explain. None: not known, or no more than chance explains."""
    compute: float | None = None
    """
    Share of the variance of `forward` and `backward` alone that tokens explain, or samples if tokens are not
    known.
    """
    in_compute: float | None = None
    """Share of the variance that is in `forward` and `backward`."""
    sizes_known: bool = False
    """Whether the sizes of enough batches are known."""
    times: float | None = None
    """
    For named ranks: ratio of the tokens, or else the samples, in their batches to those of the others. The
    shares are then of the additional time they work, in proportion to it.
    """
    steps: int = 0
    """Number of steps that the reason is based on."""
    unknown_ranks: tuple[int, ...] = ()
    """Ranks whose batch sizes are not known."""


class Fit(NamedTuple):
    """How well an amount explains work."""

    share: float
    """Adjusted R², 0..1."""
    slope: float
    """Slope of work over the amount, in ns per sample or token."""
    sigmas: float
    """Fisher transform of the correlation, in standard errors of one that is only chance."""
    independent: float
    """Number of pairs that are effectively independent."""

    @property
    def counts(self) -> bool:
        """Whether more work comes with more of the amount, beyond chance."""
        return self.slope > 0 and self.sigmas >= _SIGMAS and self.independent >= _INDEPENDENT


class Amounts(NamedTuple):
    """Batch sizes of the ranks, for the steps and ranks in which enough of them are known."""

    values: Mapping[str, Float]
    """Amounts by name (`samples`, `tokens`): (S', R')."""
    steps: Bool
    """Whether the amounts of each step are known (S,)."""
    ranks: Bool
    """Whether the amounts of each rank are known (R,)."""


def unevenness(work: Int64 | Float) -> Float:
    """Return work (S, R) less the mean of each step and the mean of each rank (S, R)."""
    values = np.asarray(work, np.float64)
    values = values - values.mean(axis=1, keepdims=True)
    centred: Float = values - values.mean(axis=0, keepdims=True)
    return centred


def fit(work: Int64 | Float, amount: Float) -> Fit | None:
    """
    Return how well `amount` (S, R) explains the unevenness of `work` (S, R), with one slope for all ranks.
    None if either does not vary, or there are fewer than `MIN_STEPS` steps or 2 ranks.

    For a correlation r by chance, atanh(r) varies by 1 / √(n − 3) (Fisher), with n = (S / τ − 1)(R − 1) and τ
    = 1 + 2 Σ ρ_work(k) ρ_amount(k), the autocorrelations over steps (Bartlett). If lengths stay for 20 steps,
    50 steps count for hardly three.
    """
    steps, ranks = work.shape
    if steps < MIN_STEPS or ranks < 2:
        return None
    y, x = unevenness(work), unevenness(amount)
    sum_y, sum_x = float((y * y).sum()), float((x * x).sum())
    scale = float(np.abs(amount).max()) or 1.0
    if sum_y <= 0 or sum_x <= (1e-9 * scale) ** 2 * x.size:
        return None
    both = float((x * y).sum())
    cells = (steps - 1) * (ranks - 1)
    square = min(1.0, both * both / (sum_x * sum_y))
    lags = range(1, min(steps // 2, _LAGS))
    persists = sum(max(0.0, _lagged(y, k, sum_y) * _lagged(x, k, sum_x)) for k in lags)
    independent = (steps / (1 + 2 * persists) - 1) * (ranks - 1)
    sigmas = float(np.arctanh(min(np.sqrt(square), _ALMOST_1)) * np.sqrt(max(0.0, independent - 3)))
    adjusted = max(0.0, 1 - (1 - square) * cells / max(cells - 1, 1))
    return Fit(adjusted, both / sum_x, sigmas, independent)


def _lagged(values: Float, lag: int, sum_of_squares: float) -> float:
    """Return the autocorrelation over steps of centred values (S, R)."""
    return float((values[lag:] * values[:-lag]).sum()) / sum_of_squares


def explained(work: Int64 | Float, amount: Float) -> Fit | None:
    """Return the fit if it counts; else None."""
    fitted = fit(work, amount)
    return fitted if fitted is not None and fitted.counts else None


def known_amounts(amounts: Mapping[str, Float]) -> Amounts | None:
    """
    Return the amounts (S, R; NaN: not known) for the ranks and steps in which enough are known; None if too
    few are. A rank that lacks most steps is left out, then each step that some other rank lacks.
    """
    known = {name: ~np.isnan(values) for name, values in amounts.items()}
    usable = {name: seen.mean(axis=0) >= _KNOWN_STEPS for name, seen in known.items() if seen.size}
    best = max((int(ranks.sum()) for ranks in usable.values()), default=0)
    names = [name for name, ranks in usable.items() if int(ranks.sum()) == best]
    if not names or best < 2:
        return None
    ranks = np.logical_and.reduce([usable[name] for name in names])
    if ranks.sum() < max(2.0, _KNOWN_RANKS * len(ranks)):
        return None
    steps: Bool = np.logical_and.reduce([known[name][:, ranks].all(axis=1) for name in names])
    if steps.sum() < MIN_STEPS:
        return None
    return Amounts({name: amounts[name][steps][:, ranks] for name in names}, steps, ranks)


def stage_shares(work: Int64 | Float) -> dict[str, float]:
    """
    Return the share of the variance of the ranks' work (S, R, 6) in each group of local stages: its
    covariance with the sum. The shares add up to 1. A group that evens out another one has a negative share.
    """
    whole = unevenness(work.sum(axis=2))
    total = float((whole * whole).sum())
    if total <= 0:
        return {}
    parts = {name: unevenness(work[..., list(stages)].sum(axis=2)) for name, stages in _GROUPS.items()}
    return {name: float((part * whole).sum()) / total for name, part in parts.items()}


def pauses(work: Int64 | Float) -> float | None:
    """
    Return the share of the squared excess that is in the `FEW` largest cells (S, R); None if it is not most
    of it. The excess is a rank's work beyond the lower median of its step. Compared with a mean, the ranks
    without a pause would seem to differ as well.
    """
    values = np.asarray(work, np.float64)
    middle = np.sort(values, axis=1)[:, (values.shape[1] - 1) // 2]
    squares = np.sort(((values - middle[:, None]) ** 2).ravel())[::-1]
    total = float(squares.sum())
    held = float(squares[: max(1, int(FEW * squares.size))].sum())
    return held / total if held >= _IN_FEW * total > 0 else None


def reason_of(
    work: Int64, amounts: Mapping[str, Float], ranks: Int64, *, uneven_experts: bool = False
) -> Reason:
    """
    Return why ranks are uneven.

    Args:
        work: time of each rank's local stages in each step, ns (S, R, 6); 0 in a waiting stage.
        amounts: batch sizes by name (`samples`, `tokens`), (S, R), NaN if not known.
        ranks: numbers of the ranks (R,).
        uneven_experts: whether watched routers give some experts far more tokens than others.
    """
    if len(work) < MIN_STEPS or work.shape[1] < 2:
        return Reason(what="unknown", steps=len(work))
    shares, (sized, amounts) = stage_shares(work), _where_seen(work, amounts)
    sizes = known_amounts(amounts)
    facts: dict[str, Any] = {"in_compute": shares.get("compute"), "steps": len(work)}
    facts["unknown_ranks"] = _unknown(amounts, ranks)
    if sizes is not None:
        sized_work = sized[sizes.steps][:, sizes.ranks]
        facts |= {"sizes_known": True, "steps": len(sized_work), **_by_sizes(sized_work, sizes.values)}
    named, may_explain = facts.pop("named", None), facts.pop("may_explain", False)
    if named is not None and facts[named] >= _HOLDS:
        return Reason(what=named, share=facts[named], **facts)
    if may_explain:
        return Reason(what="unknown", **facts)
    what, share = _elsewhere(work, shares, uneven_experts, sizes is not None)
    return Reason(what=what, share=share, **facts)


def reason_of_more(work: Int64, amounts: Mapping[str, Float], named: Bool) -> Reason | None:
    """
    Return how much of the longer work of some ranks, in every step, their larger batches explain. None if
    their batches are not larger, are larger only by chance, explain at most a tenth, or are not known in most
    steps.

    Args:
        work: forward and backward of each rank in each step, ns (S, R).
        amounts: as for `reason_of`.
        named: whether each rank works longer (R,).
    """
    work, amounts = _where_seen(work, amounts)
    longer = _times(work.astype(np.float64), named) - 1
    by_name: dict[str, float] = {}
    for name, values in amounts.items():
        known = ~np.isnan(values)
        enough = (known.sum(axis=0) >= MIN_STEPS) & (known.mean(axis=0) >= _KNOWN_STEPS)
        if enough[named].all() and enough[~named].mean() >= _KNOWN_RANKS and _is_larger(values, named):
            by_name[name] = _times(values[:, enough], named[enough])
    if not by_name or not longer > 0:
        return None
    what: ReasonKind = "samples" if by_name.get("samples", 0.0) >= by_name.get("tokens", 0.0) else "tokens"
    times = by_name[what]
    share = min(1.0, (times - 1) / longer)
    if times - 1 < _MORE or share < _IN_PART:
        return None
    shares = {name: min(1.0, max(0.0, (ratio - 1) / longer)) for name, ratio in by_name.items()}
    return Reason(
        what=what,
        share=share,
        times=times,
        tokens=shares.get("tokens"),
        samples=shares.get("samples"),
        sizes_known=True,
        steps=len(work),
    )


def _is_larger(values: Float, named: Bool) -> bool:
    """Whether the named ranks have more per step (S, R) than the others, beyond chance."""
    values = values[~np.isnan(values[:, named]).any(axis=1) & ~np.isnan(values[:, ~named]).all(axis=1)]
    apart = values[:, named].mean(axis=1) - np.nanmean(values[:, ~named], axis=1)
    if len(apart) < MIN_STEPS or apart.mean() <= 0:
        return False
    around = apart - apart.mean()
    squares = float((around * around).sum())
    if squares <= 0:
        return True
    lags = range(1, min(len(apart) // 2, _LAGS))
    persists = sum(max(0.0, _lagged(around[:, None], lag, squares)) for lag in lags)
    independent = len(apart) / (1 + 2 * persists)
    return bool(apart.mean() >= _SIGMAS * np.sqrt(squares / len(apart) / max(independent, 1.0)))


def _times(values: Float, named: Bool) -> float:
    """Return the ratio of the named ranks' amounts per step to the median of the others."""
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.nanmean(values, axis=0)
        return float(mean[named].mean() / np.median(mean[~named]))


def _where_seen(work: Int64, amounts: Mapping[str, Float]) -> tuple[Int64, Mapping[str, Float]]:
    """
    Return work (S, R, …) and amounts of the steps in which the batch size of some rank is known, if these are
    enough. The newest sizes have not arrived yet, and old ones are no longer stored.
    """
    seen = np.zeros(len(work), bool)
    for values in amounts.values():
        seen |= ~np.isnan(values).all(axis=1)
    if seen.sum() < MIN_STEPS or seen.all():
        return work, amounts
    return work[seen], {name: values[seen] for name, values in amounts.items()}


def _unknown(amounts: Mapping[str, Float], ranks: Int64) -> tuple[int, ...]:
    """Return the ranks for which most sizes are not known, by any name."""
    lacking = np.ones(len(ranks), bool)
    for values in amounts.values():
        lacking &= np.isnan(values).mean(axis=0) > 1 - _KNOWN_STEPS
    return tuple(ranks[lacking].tolist())


def _by_sizes(work: Int64, amounts: Mapping[str, Float]) -> dict[str, Any]:
    """
    Return the shares of work (S, R, 6) that batch sizes explain, and the size that is `named`; or else
    whether one `may_explain` most of it, but has too few different values to be distinguished from chance.
    """
    whole = work.sum(axis=2)
    fits = {name: fit(whole, amount) for name, amount in amounts.items()}
    shares = {name: fitted.share for name, fitted in fits.items() if fitted is not None and fitted.counts}
    if not shares:
        known = [fitted for fitted in fits.values() if fitted is not None]
        return {"may_explain": any(fitted.slope > 0 and fitted.share >= _HOLDS for fitted in known)}
    named = "tokens" if shares.get("tokens", 0.0) > shares.get("samples", 0.0) + _BEYOND else "samples"
    named = named if named in shares else next(iter(shares))
    compute = explained(work[..., [FORWARD, BACKWARD]].sum(axis=2), amounts[named])
    return {**shares, "named": named, "compute": None if compute is None else compute.share}


def _elsewhere(
    work: Int64, shares: Mapping[str, float], uneven_experts: bool, sizes_known: bool
) -> tuple[ReasonKind, float | None]:
    """Return the reason other than batch sizes, and its share."""
    for what in _OF_STAGES:
        if shares.get(what, 0.0) >= _HOLDS:
            return what, shares[what]
    if uneven_experts and shares.get("compute", 0.0) >= _HOLDS:
        return "experts", None
    if (few := pauses(work.sum(axis=2))) is not None:
        return "pauses", few
    return ("other" if sizes_known and shares else "unknown"), None
