"""Why a rank that is late is not named: it may be chance; by how much it must be late more often."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from traceml_ray import text
from traceml_ray.analysis.chance import least_z, z_late
from traceml_ray.analysis.evidence import Evidence
from traceml_ray.analysis.past_steps import PastSteps
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.stages import SYNC_WAIT


def doubt(
    evidence: Evidence,
    places: Sequence[int],
    stage: int,
    past: PastSteps | None,
    limits: Thresholds,
) -> str:
    """
    Return why ranks that are late in the steps of a window may be late by chance, in numbers; "" where they
    are not late there by as much as a name asks for, or by more than chance.

    Args:
        evidence: of the window.
        places: of the ranks in it.
        stage: that they are late in, a local one.
        past: more steps, by which chance is measured; None: it is by the window alone.
        limits: of the verdict.
    """
    if stage >= SYNC_WAIT or not len(places):
        return ""
    if evidence.persistent[list(places), stage].max() < limits.min_excess:
        return ""
    lateness = evidence.by_step[:, :, stage].astype(np.float64)
    stay = None if past is None else past.then(evidence).stay(stage)
    z, least = float(z_late(lateness, places, stay).max()), least_z(lateness.shape[1], len(lateness))
    return in_words(z, least) if z < least else ""


def in_words(z: float, least: float) -> str:
    """Return by how many standard errors a rank is late beyond chance, and how many are needed."""
    needed = f"{text.number(least, 1)} are needed"
    errors = f"{text.number(max(math.floor(10 * z) / 10, 0.0), 1)} standard errors"  # never as many as needed
    return f"it was late more often than chance would have it by {errors}, {needed}"
