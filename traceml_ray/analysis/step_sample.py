"""
One side of a comparison: the times of a run's steps, with replicates that show how far chance
moves them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from traceml_ray.analysis import resampling
from traceml_ray.analysis.spread import Values, over_pct, quantiles
from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.analysis.step_store import ALL
from traceml_ray.analysis.step_sums import Array
from traceml_ray.analysis.thresholds import COMPARE, CompareLimits
from traceml_ray.analysis.window import Float
from traceml_ray.stages import N_STAGES, STAGES

STEP, MEDIAN, P95, SKEW = "step", "median step", "p95 step", "skew"
NAMES = (STEP, *STAGES, MEDIAN, P95, SKEW)
"""Names of the numbers that two runs are compared by."""
_TAILS = (0.5, 0.95)
_FLAG_ROWS, _FLAG_BITS = 200, 8


def sampled(history: StepHistory, world: int, limits: CompareLimits = COMPARE) -> dict[str, Any]:
    """
    Return the `step_shapes.StepSample` of a run: all steps beyond the warm-up, in at most `limits.columns`
    columns.

    It takes at most about 0.2 s and 100 MB.
    """
    complete = history.complete_columns(limits.columns)
    steps = history.columns(between=ALL, most=limits.columns)
    _, _, d = history.stage_columns(ALL, limits.columns)
    first, last, exposed = steps.first[complete], steps.last[complete], steps.exposed[complete]
    sample = {
        "world": world,
        "ranks": history.ranks,
        "nodes": history.nodes,
        "columns": len(first),
        "per": int(last[0] - first[0]) + 1 if len(first) else 1,
        "first": int(first[0]) if len(first) else None,
        "last": int(last[-1]) if len(first) else None,
        "flags": _usual_flags(history),
    }
    if len(first) < limits.steps:
        none = np.full((len(history.ranks), N_STAGES), np.nan)
        return {
            **sample,
            "block": 1,
            "numbers": {},
            "replicates": np.empty((0, 0)),
            "drift": np.empty(0),
            "stages": none,
            "errors": none,
        }
    return sample | _drawn(exposed, steps.busy[:, complete], d[:, complete], limits)


def _drawn(exposed: Array, busy: Array, d: Array, limits: CompareLimits) -> dict[str, Any]:
    """Return what is drawn of `exposed` (C, 6), `busy` (R, C) and the ranks' stages `d` (R, C, 6), ms."""
    total = exposed.sum(axis=1)
    block = max(map(resampling.block_length, (total, *exposed.T)))
    starts = resampling.starts_of_blocks(len(total), block, limits.replicates)
    columns = np.column_stack([total, exposed, _filled(busy).T])
    means = resampling.means(columns, block, starts)
    tails = resampling.quantiles_of(total, _TAILS, block, starts)
    replicates = _numbers(means.replicates, tails.replicates)
    parts = [_of(columns[part], total[part]) for part in resampling.parts_of(len(total))]
    by_step = _filled(d).swapaxes(0, 1)
    return {
        "block": block,
        "numbers": dict(zip(NAMES, _of(columns, total).tolist(), strict=True)),
        "replicates": replicates,
        "drift": resampling.drift(np.array(parts)),
        "stages": by_step.mean(axis=0, dtype=float),
        "errors": error_of(by_step, block),
    }


def error_of(columns: Values, block: int) -> Float:
    """Return the standard error of the means of `columns` (n, …) as those of one run among others."""
    parts = [columns[part].mean(axis=0, dtype=float) for part in resampling.parts_of(len(columns))]
    return np.hypot(resampling.error_of_means(columns, block), resampling.drift(np.array(parts)))


def _of(columns: Values, total: Values) -> Float:
    """Return the numbers (Q,) of some columns."""
    return _numbers(columns.mean(axis=0, dtype=float), np.quantile(total, _TAILS))


def _numbers(means: Float, tails: Float) -> Float:
    """Return the numbers (…, Q) of the means of step, stages and ranks (…, 7 + R), and the tails (…, 2)."""
    most = 1 + N_STAGES
    return np.concatenate([means[..., :most], tails, _skew(means[..., most:])], axis=-1)


def _skew(busy: Float) -> Float:
    """Return by how many % the busiest rank (…, R) is above the median one (…, 1); NaN for one rank."""
    if busy.shape[-1] < 2:
        return np.full((*busy.shape[:-1], 1), np.nan)
    middle = quantiles(np.moveaxis(busy, -1, 0), (0.5,))[0]
    return over_pct(np.nanmax(busy, axis=-1), middle)[..., None]


def _filled(values: Values) -> Values:
    """
    Return values (R, C, …) in which unknown ones are replaced by the mean of the rank; NaN for a rank without
    any.
    """
    known = ~np.isnan(values)
    count = known.sum(axis=1, keepdims=True)
    mean = np.where(known, values, 0).sum(axis=1, keepdims=True) / np.maximum(count, 1)
    return np.where(known, values, np.where(count > 0, mean, np.nan))


def _usual_flags(history: StepHistory) -> int:
    """Return the flags set in most of the newest rows of all ranks."""
    newest = [history.table.line(rank, _FLAG_ROWS)[1] for rank in history.ranks]
    flags = np.concatenate([np.empty(0, np.uint8), *newest])
    bits = np.unpackbits(flags[:, None], axis=1, count=_FLAG_BITS, bitorder="little")
    return int((1 << np.flatnonzero(2 * bits.sum(axis=0) > len(flags))).sum())
