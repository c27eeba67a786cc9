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
    share of the mean step. `new`: the newest steps alone show it;
    `hosts`: late at the same time as the hosts of the other ranks. `group_wide` has only `drift`.
    """

    label: Label
    reason: str = ""
    causes: tuple[Cause, ...] = ()
    excess: float | None = None
    pattern: Pattern = "lasting"
    new: bool = False
    hosts: bool = False
    drift: Drift | None = None
