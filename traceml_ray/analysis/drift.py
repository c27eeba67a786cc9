"""Rule 7: a stage that takes longer than it did when all was well, whoever of the ranks it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from traceml_ray.analysis.baseline import Baseline, per_step, without_largest
from traceml_ray.analysis.evidence import Evidence
from traceml_ray.analysis.onset import Timing, late_steps, onset
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import Bool, Float

_BLOCK = 5
_GOES_ON = 1 / 3
_LASTS = 3 / 4


@dataclass(frozen=True)
class Drift:
    """
    `stage` takes `extra_ns` a step longer than in `baseline`, `share` of the step as it is now (0..1).

    `timing` is over the whole steps of the window, `from_step` where it began, `slow` (places of
    ranks) whose own time in the stage is nearer to the new level than to the old one.
    """

    stage: int
    extra_ns: float
    share: float
    baseline: Baseline
    timing: Timing
    from_step: int
    slow: tuple[int, ...]


def drift(evidence: Evidence, baseline: Baseline, thresholds: Thresholds) -> Drift | None:
    """
    Return the stage that stands out most from `baseline`, or `None`.

    The window's newest 10, 20, … steps are looked at, and all of it. Asked of a full window is a drift of
    `min_drift` of the step and `drift_mads` MADs; of n of its K steps √(K ÷ n) times as much. And
    always: that it stands out of the noise of single steps by `drift_errors` standard errors,
    lasts (the lower median over blocks of 5 steps shows three quarters of it), goes on (the newest 10 steps
    show a third of it), and that the step as a whole has become longer. Of the newest steps alone also that
    most ranks are slow: one that has become late, or each in turn, is for the other rules to see.
    """
    first = evidence.window.first_step
    if baseline.to_step is not None and (first is None or first <= baseline.to_step):
        return None
    steps, exposed = per_step(evidence)
    best: tuple[float, int, int, float, float] | None = None
    for count in _tails(len(steps), thresholds):
        extra, passes, step_ns = _look(exposed, count, baseline, thresholds)
        weight = np.where(passes, extra * np.sqrt(count), -np.inf)
        stage = int(np.argmax(weight))
        if passes[stage] and (best is None or weight[stage] > best[0]):
            best = float(weight[stage]), stage, count, float(extra[stage]), step_ns
    if best is None:
        return None
    _, stage, count, extra_ns, step_ns = best
    looked = count
    late = late_steps(exposed[:, stage] - baseline.level_ns[stage])
    began = onset(late)
    if began is None and count < len(steps):
        began = len(steps) - count
    elif began is not None:  # it costs what it costs since then
        since, now_ns = _extra(exposed[began:], baseline)
        if since[stage] > 0:
            count, extra_ns, step_ns = len(steps) - began, float(since[stage]), now_ns
    level = baseline.level_ns[stage] + extra_ns / 2
    rows = max(1, round(len(evidence.window.keys) / len(steps)))
    own = rows * evidence.rows.d[-count * rows :, :, stage].mean(axis=0)
    slow = np.flatnonzero(own >= level)
    if looked < len(steps) and 2 * len(slow) <= len(own):
        return None
    return Drift(
        stage=stage,
        extra_ns=extra_ns,
        share=extra_ns / step_ns,
        baseline=baseline,
        timing=Timing(late, began, goes_on=True),
        from_step=int(steps[began or 0]),
        slow=tuple(slow.tolist()),
    )


def _tails(steps: int, thresholds: Thresholds) -> Iterator[int]:
    if steps >= max(thresholds.first_window_steps, _BLOCK):
        stride = max(thresholds.stride_steps, _BLOCK)
        yield from (*range(stride, steps, stride), steps)


def _extra(tail: Float, baseline: Baseline) -> tuple[Float, float]:
    """Return how much longer each stage takes than in the baseline, ns (6,), and the mean step."""
    extra: Float = without_largest(tail).mean(axis=0) - np.array(baseline.level_ns)
    return extra, float(tail.sum(axis=1).mean())


def _look(
    exposed: Float, count: int, baseline: Baseline, thresholds: Thresholds
) -> tuple[Float, Bool, float]:
    """Return the drift of each stage in the newest `count` steps, ns (6,), where it counts, and the step."""
    tail = exposed[-count:]
    extra, step_ns = _extra(tail, baseline)
    short = np.sqrt(max(1.0, thresholds.window_steps / count))
    noise = np.array(baseline.sd_ns) * np.sqrt(1 / count + 1 / baseline.steps)
    blocks = tail[count % _BLOCK :].reshape(-1, _BLOCK, tail.shape[1]).mean(axis=1)
    lasting = np.sort(blocks, axis=0)[(len(blocks) - 1) // 2] - np.array(baseline.level_ns)
    newest, _ = _extra(tail[-max(thresholds.stride_steps, _BLOCK) :], baseline)
    longer = float(without_largest(tail).sum(axis=1).mean()) - baseline.step_ns
    passes = (
        (extra >= short * thresholds.min_drift * step_ns)
        & (extra > short * thresholds.drift_mads * np.array(baseline.mad_ns))
        & (extra > thresholds.drift_errors * noise)
        & (lasting >= _LASTS * extra)
        & (newest >= _GOES_ON * extra)
        & (longer >= thresholds.min_gain * extra)
    )
    return extra, passes, step_ns
