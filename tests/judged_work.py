"""Verdicts on simulated work: what they name, and whether that is right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from varying_work import Cause, Played

from traceml_ray.analysis.history import Replay
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.window import Window

COSTLY, FREE = 0.08, 0.02
"""
A cause that costs at least COSTLY of the run must be named. One that costs less than FREE need
not be named.
"""
UNEVEN, EVEN = 0.12, 0.08
"""Uneven work of the ranks is `imbalance` from UNEVEN on, and `healthy` up to EVEN (shares of the run)."""
WATCHING = "watching"
POINTS = 2.0
"""Largest error of a correct cost, in percentage points of the run."""


class Claim(NamedTuple):
    """One thing that a verdict names."""

    label: str
    ranks: frozenset[int]
    stages: tuple[str, ...]
    cost: float | None


def claims_of(verdict: Verdict) -> list[Claim]:
    """Return the claims of a verdict: its headline and its further names. `watching` names nobody yet."""
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
    Return the claims that name all ranks of the cause, in its stages, with a correct label.

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
    """Return the outcome (one of OUTCOMES) of the verdict on a whole run."""
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
    """Return the outcome for a run in which nothing needs a name: it is wrong to name a healthy rank."""
    if verdict.ranks:
        return "right"  # the cause costs even less
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
    """Return the error of each claimed cost, in percentage points, for the claims that name a cause."""
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
    """
    Return the verdicts that took effect, each with the last step it had seen, and the verdict on the whole
    run.
    """
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
