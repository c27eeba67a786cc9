"""Why a late rank is not named: chance may explain it. Says how much more often it would have to be late."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from traceml_ray import text
from traceml_ray.analysis.chance import least_z, z_late
from traceml_ray.analysis.evidence import Evidence
from traceml_ray.analysis.lasting import compared
from traceml_ray.analysis.levels import LOUD_STEPS, least_lateness, usually_alike
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
    steps = (PastSteps() if past is None else past).then(evidence)
    columns = compared(len(steps.ranks), np.asarray(places))
    lateness = evidence.by_step[:, columns, stage].astype(np.float64)
    late, work = np.isin(columns, places), steps.work(stage, columns)
    late_ns = evidence.persistent[columns[late], stage] * evidence.mean_step_ns
    alike = bool(usually_alike(work, late, late_ns).all())
    z = float(z_late(lateness, np.flatnonzero(late).tolist(), 1.0 if alike else steps.stay(stage)).max())
    least = least_z(len(steps.ranks), len(lateness))
    if z < least:
        return in_words(z, least)
    beyond_ns = float(late_ns.min())
    least_ns = 0.0 if alike else least_lateness(work, late, beyond_ns, len(lateness))
    return "" if beyond_ns >= least_ns else _of_levels(beyond_ns, least_ns, len(work))


def _of_levels(late_ns: float, least_ns: float, steps: int) -> str:
    """
    Return why ranks that are late by `late_ns` may just have work that stays at a higher level
    for a while.
    """
    stays = "the work of the ranks stays at different levels for some steps"
    if math.isinf(least_ns):
        return f"{stays}: {steps:,} steps are known, {LOUD_STEPS} are needed to tell a late rank from these"
    late, least = text.unit(late_ns / 1e6, "ms"), text.unit(least_ns / 1e6, "ms")
    return f"{stays}: it is late by {late}, {least} would be beyond these"


def in_words(z: float, least: float) -> str:
    """Describe by how many standard errors a rank is late beyond chance, and how many are required."""
    needed = f"{text.number(least, 1)} are needed"
    errors = f"{text.number(max(math.floor(10 * z) / 10, 0.0), 1)} standard errors"  # never as many as needed
    return f"it was late more often than chance would have it by {errors}, {needed}"
