"""Verdicts on played work: what they name, and whether it is right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from varying_work import Cause, Played

from traceml_ray.analysis.history import Replay
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.window import Window

COSTLY, FREE = 0.08, 0.02
"""A cause that costs so much must be named; one that costs less need not be."""
UNEVEN, EVEN = 0.12, 0.08
"""From so much on the ranks' uneven work is `imbalance`, up to so much it is `healthy`."""
WATCHING = "watching"
POINTS = 2.0
"""A cost that is off by no more is right; percentage points of the run."""


class Claim(NamedTuple):
    """One thing that a verdict names."""

    label: str
    ranks: frozenset[int]
    stages: tuple[str, ...]
    cost: float | None


def claims_of(verdict: Verdict) -> list[Claim]:
    """Return the headline of a verdict and what it names beside it; `watching` names nobody as yet."""
    findings: list[Any] = [verdict, *getattr(verdict, "also", ())]
    if str(verdict.label) == WATCHING:
        return [Claim(WATCHING, frozenset(), (), None)]
    return [
        Claim(
            str(finding.label),
            frozenset(finding.ranks or (() if finding.rank is None else (finding.rank,))),
            tuple(finding.stages or filter(None, (finding.stage,))),
            finding.cost_pct,
        )
        for finding in findings
    ]


def naming(claims: Sequence[Claim], cause: Cause) -> list[Claim]:
    """
    Return the claims that name all ranks of the cause, in its stages, by a right label.

    Ranks that are late together may be named by one claim or by several.
    """
    right = [claim for claim in claims if claim.ranks and claim.ranks <= cause.ranks]
    right = [claim for claim in right if claim.stages and set(claim.stages) <= cause.stages]
    right = [claim for claim in right if claim.label in cause.labels]
    whole = [claim for claim in right if claim.ranks == cause.ranks]
    if whole or "co_critical" not in cause.labels:
        return whole
    return right if frozenset().union(*(claim.ranks for claim in right)) == cause.ranks else []


def outcome(verdict: Verdict, run: Played) -> str:
    """Return which of OUTCOMES the verdict on a whole run is."""
    claims = claims_of(verdict)
    if any(claim.ranks - run.ranks for claim in claims):
        return "wrong"
    place = run.costliest
    if place is None:
        return _without_cause(verdict, run)
    cause, cost = run.causes[place], run.costs[place]
    about = [claim for claim in claims if claim.ranks & cause.ranks]
    if cost < FREE:
        if not about:
            return _without_cause(verdict, run)
        return "small" if all(abs(error) <= POINTS for error in errors_of(about, run)) else "overpriced"
    if naming(claims, cause):
        return "right"
    if about:
        return "partly"
    if abstains(verdict):
        return "abstained"
    return "not needed" if cost < COSTLY or not run.sure[place] else "missed"


def abstains(verdict: Verdict) -> bool:
    """Whether the verdict neither names anything nor calls the run healthy."""
    return str(verdict.label) == WATCHING or verdict.meaning.kind == "abstention"


def _without_cause(verdict: Verdict, run: Played) -> str:
    """Return the outcome where nothing needs a name; no healthy rank has one."""
    if verdict.ranks:
        return "right"  # a cause that costs even less
    uneven = run.imbalance
    if abstains(verdict):
        return "abstained" if uneven is not None else "right"
    allowed = {"imbalance", "healthy"}
    if uneven is not None and not EVEN <= uneven < UNEVEN:
        allowed = {"imbalance"} if uneven >= UNEVEN else {"healthy"}
    if verdict.label in allowed:
        return "right"
    if verdict.label == "ambiguous" and "imbalance" in allowed:
        return "seen"
    return "missed" if verdict.label == "healthy" else "label"


def errors_of(claims: Iterable[Claim], run: Played) -> list[float]:
    """Return by how many points each claimed cost is off, of the claims that name a cause."""
    errors = []
    for claim in claims:
        costs = [
            100 * cost
            for cause, cost in zip(run.causes, run.costs, strict=True)
            if claim.ranks & cause.ranks and set(claim.stages) & cause.stages
        ]
        if claim.label == "imbalance" and run.imbalance is not None:
            costs = [100 * run.imbalance]
        if claim.cost is not None and costs:
            errors.append(min((claim.cost - cost for cost in costs), key=abs))
    return errors


def replayed(window: Window) -> tuple[list[tuple[int, Verdict]], Verdict]:
    """Return the verdicts in effect, each with the last step it has seen, and that on the whole run."""
    live: list[tuple[int, Verdict]] = []
    replay = Replay(len(window.starts))
    judge = replay._run
    update = judge.update

    def recorded(piece: Window) -> Verdict:
        verdict = update(piece)
        live.append((piece.last_step or 0, verdict))
        return verdict

    judge.update = recorded  # type: ignore[method-assign]
    replay.add(window)
    return live, replay.done().run_verdict()
