"""The finding of a rule, before it is put into numbers and words."""

from __future__ import annotations

from dataclasses import dataclass

from traceml_ray.analysis.drift import Drift
from traceml_ray.analysis.evidence import Cause
from traceml_ray.analysis.labels import Label, Pattern


@dataclass(frozen=True)
class Finding:
    """
    The rule that applied: a label, and either a `reason` to abstain or the `causes`, best first.

    `excess` is the excess of the worst rank of the first cause (`rotating`: of all ranks together), as a
    share of the mean step. `cost` is what fixing all of it saves, as a share of the time; `at_most`: it may
    be less. `z` is by how many standard errors the worst rank is late more often than by chance, over `steps`
    steps. `new`: the newest steps alone show it. `hosts`: late at the same time as the hosts of the other
    ranks. `hidden`: steps end no later for it. Not `sure`: that it
    is this rank may be chance. `group_wide` has only `drift`.
    """

    label: Label
    reason: str = ""
    causes: tuple[Cause, ...] = ()
    excess: float | None = None
    pattern: Pattern = "lasting"
    cost: float | None = None
    z: float | None = None
    steps: int | None = None
    hidden: bool = False
    at_most: bool = False
    sure: bool = True
    new: bool = False
    hosts: bool = False
    drift: Drift | None = None
