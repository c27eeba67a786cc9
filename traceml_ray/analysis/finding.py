"""The finding of a rule, before it is put into numbers and words."""

from __future__ import annotations

from dataclasses import dataclass

from traceml_ray.analysis.drift import Drift
from traceml_ray.analysis.evidence import Cause
from traceml_ray.analysis.labels import Label


@dataclass(frozen=True)
class Finding:
    """
    The rule that applied: a label, and either a `reason` to abstain or the `causes`, best first.

    `excess` is the excess of the worst rank of the first cause, as a share of the mean step. `transient`: it
    was found by the transient rule; `rotating`: no single rank is meant; `new`: the newest steps alone show
    it. `group_wide` has only `drift`.
    """

    label: Label
    reason: str = ""
    causes: tuple[Cause, ...] = ()
    excess: float | None = None
    transient: bool = False
    rotating: bool = False
    new: bool = False
    drift: Drift | None = None
