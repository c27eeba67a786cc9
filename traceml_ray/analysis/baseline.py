"""
The baseline: the cost of a step in healthy windows. It is learned once from the run's own windows, then
fixed. `group_wide` means that a stage, or the whole step, takes longer than in the baseline on most ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from traceml_ray.analysis.evidence import Evidence, Timing, late_steps, onset
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import Bool, Float, Int64
from traceml_ray.stages import SYNC_WAIT


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """
    Exposed time per step of each of STAGES, in ns: `level_ns` the median over windows, `mad_ns` its
    median absolute deviation over them, `sd_ns` the standard deviation of single steps.
    """

    level_ns: tuple[float, ...]
    mad_ns: tuple[float, ...]
    sd_ns: tuple[float, ...]
    step_ns: float
    """Exposed time of the whole step, in ns."""
    steps: int
    """Number of steps that the baseline was learned from."""
    ranks: int | None
    """
    Number of ranks in the job, on which exposed time depends. None: the baseline was given, and is used for
    any size.
    """
    from_step: int | None = None
    to_step: int | None = None
    """
    Last step of this run that the baseline was learned from. No earlier window is judged by it. None: it was
    learned in another run.
    """
    source: str = ""
    """Session or earlier attempt that the baseline comes from."""

    def elsewhere(self, source: str) -> Baseline:
        """
        Return the baseline for steps of another attempt or session. `source` names the run it
        comes from.
        """
        return msgspec.structs.replace(self, from_step=None, to_step=None, source=self.source or source)

    def fits(self, ranks: int) -> bool:
        """Whether this baseline can judge a job of `ranks` ranks."""
        return self.ranks is None or self.ranks == ranks


class Learner:
    """
    Learns a baseline from the first `baseline_windows` healthy windows that share no step, from
    `baseline_after_steps` after the first one on.

    The result is never changed: a baseline that follows a slow drift cannot show it.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        self._limits = thresholds
        self._after: int | None = None
        self._first: int | None = None
        self._levels: list[Float] = []
        self._squares: list[Float] = []
        self._steps = 0

    def add(self, evidence: Evidence) -> Baseline | None:
        """
        Learn from a healthy window, unless it shares a step with the previous one. Return the baseline once
        complete.
        """
        window = evidence.window
        first, last = window.first_step or 0, window.last_step or 0
        if self._after is None:
            self._after = first + self._limits.baseline_after_steps
        if first < self._after:
            return None
        self._after = last + 1
        self._first = first if self._first is None else self._first
        _, exposed = per_step(evidence)
        cut = without_largest(exposed)
        self._levels.append(cut.mean(axis=0))
        self._squares.append(cut.var(axis=0))
        self._steps += len(cut)
        if len(self._levels) < self._limits.baseline_windows:
            return None
        levels = np.array(self._levels)
        middle = np.median(levels, axis=0)
        return Baseline(
            level_ns=tuple(middle.tolist()),
            mad_ns=tuple(np.median(np.abs(levels - middle), axis=0).tolist()),
            sd_ns=tuple(np.sqrt(np.mean(self._squares, axis=0)).tolist()),
            step_ns=float(np.median(levels.sum(axis=1))),
            steps=self._steps,
            ranks=window.expected,
            from_step=self._first,
            to_step=last,
        )


def per_step(evidence: Evidence) -> tuple[Int64, Float]:
    """
    Return the steps (N,) and their exposed time, ns (N, 6).

    A step of several rows (segments) is their sum. A step of which the window has only a part is left out.
    """
    window = evidence.window
    rows = np.diff(window.starts, append=len(window.keys))
    whole = rows == np.bincount(rows).argmax()
    return window.steps[whole], window.by_step(evidence.frontier.exposed)[whole].astype(np.float64)


def without_largest(exposed: Float) -> Float:
    """
    Return the series (N, 6) with each stage's largest value reduced to its second largest, so that a single
    checkpoint does not count.
    """
    if len(exposed) < 2:
        return exposed
    cut: Float = np.minimum(exposed, np.partition(exposed, -2, axis=0)[-2])
    return cut


_BLOCK = 5
_GOES_ON = 1 / 3
_LASTS = 3 / 4
_WHOLE = -1
"""Column of the whole step, after the columns of its stages."""


@dataclass(frozen=True)
class Drift:
    """
    A stage that takes `extra_ns` per step longer than in `baseline`, `share` of the current step (0..1).
    `stage` None: no single stage explains the drift; the whole step takes longer. `stages_ns` (6,) is each
    stage's part of it.

    `timing` covers the whole steps of the window. `from_step` is the step at which the drift began. `slow`
    has the indices of the ranks whose own time, in the stage or at work, is nearer to the new level than to
    the old one.
    """

    stage: int | None
    extra_ns: float
    stages_ns: tuple[float, ...]
    share: float
    baseline: Baseline
    timing: Timing
    from_step: int
    slow: tuple[int, ...]


def drift(evidence: Evidence, baseline: Baseline, thresholds: Thresholds) -> Drift | None:
    """
    Return the stage that exceeds `baseline` most, or the whole step if no stage explains the excess; else
    None.

    The window's newest 10, 20, … steps are tested, and the whole window. A full window requires a drift of
    `min_drift` of the step and `drift_mads` MADs; n of its K steps require √(K ÷ n) times as much. The drift
    must always exceed the noise of single steps by `drift_errors` standard errors, last (the lower median
    over blocks of 5 steps has three quarters of it), continue (the newest 10 steps have a third of it), and
    make the whole step longer. If only the newest steps show it, most ranks must be slow too: other rules
    find a rank that has just become late, or ranks that are late in turn.
    """
    first = evidence.window.first_step
    if baseline.to_step is not None and (first is None or first <= baseline.to_step):
        return None
    steps, exposed = per_step(evidence)
    if len(steps) < max(thresholds.first_window_steps, _BLOCK):
        return None
    series, usual = np.column_stack([exposed, exposed.sum(axis=1)]), _Usual(baseline)
    best: tuple[float, int, int, Float, float] | None = None
    stride = max(thresholds.stride_steps, _BLOCK)
    tails = [*range(stride, len(steps), stride), len(steps)]
    newest, _ = _extra(series[-stride:], usual)
    for count in tails:
        extra, passes, step_ns = _measured(series, count, newest, usual, thresholds)
        column = _column(extra, passes, usual, thresholds)
        weight = 0.0 if column is None else float(extra[column] * np.sqrt(count))
        if column is not None and (best is None or weight > best[0]):
            best = weight, column, count, extra, step_ns
    if best is None:
        return None
    _, column, count, extra, step_ns = best
    tested = count
    late = late_steps(series[:, column] - usual.level[column])
    began = onset(late)
    if began is None and count < len(steps):
        began = len(steps) - count
    elif began is not None:  # its cost is that since then
        since, now_ns = _extra(series[began:], usual)
        if since[column] > 0:
            count, extra, step_ns = len(steps) - began, since, now_ns
    slow = _slow(evidence, column, count, extra, usual)
    if tested < len(steps) and 2 * len(slow) <= len(evidence.window.ranks):
        return None
    return Drift(
        stage=None if column == _WHOLE else column,
        extra_ns=float(extra[column]),
        stages_ns=tuple(extra[:_WHOLE].tolist()),
        share=float(extra[column]) / step_ns,
        baseline=baseline,
        timing=Timing(late, began, goes_on=True),
        from_step=int(steps[began or 0]),
        slow=tuple(slow.tolist()),
    )


class _Usual:
    """A baseline as columns (7,). The whole step varies at most as much as its stages together."""

    def __init__(self, baseline: Baseline) -> None:
        self.level = np.array([*baseline.level_ns, baseline.step_ns])
        self.mad = np.array([*baseline.mad_ns, sum(baseline.mad_ns)])
        self.sd = np.array([*baseline.sd_ns, sum(baseline.sd_ns)])
        self.steps = baseline.steps


def _column(extra: Float, passes: Bool, usual: _Usual, thresholds: Thresholds) -> int | None:
    """Return the stage that has drifted most; the whole step if no stage carries its drift."""
    stage, carries = int(np.argmax(extra[:_WHOLE])), thresholds.stage_carries
    rest_ns, rest_level = extra[_WHOLE] - extra[stage], usual.level[_WHOLE] - usual.level[stage]
    # On a slower machine all stages are slower, and the largest of them has the largest part of it.
    alone = (
        extra[stage] >= carries * extra[_WHOLE]
        and rest_ns * usual.level[stage] <= carries * extra[stage] * rest_level
    )
    if passes[_WHOLE] and not alone:
        return _WHOLE
    stage = int(np.argmax(np.where(passes[:_WHOLE], extra[:_WHOLE], -np.inf)))
    return stage if passes[stage] else None


def _slow(evidence: Evidence, column: int, count: int, extra: Float, usual: _Usual) -> Int64:
    """Return the indices of the ranks whose own time is nearer to the new level than to the old one."""
    stages = slice(column, column + 1) if column != _WHOLE else slice(0, SYNC_WAIT)
    window = evidence.window
    rows = max(1, round(len(window.keys) / len(window.starts)))
    own_ns = rows * evidence.rows.d[-count * rows :, :, stages].sum(axis=2).mean(axis=0)
    return np.flatnonzero(own_ns >= (usual.level[stages] + extra[stages] / 2).sum())


def _extra(tail: Float, usual: _Usual) -> tuple[Float, float]:
    """Return how much longer each column takes than in the baseline, ns (7,), and the mean step."""
    extra: Float = without_largest(tail).mean(axis=0) - usual.level
    return extra, float(tail[:, _WHOLE].mean())


def _measured(
    series: Float, count: int, newest: Float, usual: _Usual, thresholds: Thresholds
) -> tuple[Float, Bool, float]:
    """
    Return the drift of each column in the newest `count` steps (ns, (7,)), whether each passes, and the time
    of a step.

    `newest` is the drift in the newest stride, ns (7,).
    """
    tail = series[-count:]
    extra, step_ns = _extra(tail, usual)
    short = np.sqrt(max(1.0, thresholds.window_steps / count))
    noise = usual.sd * np.sqrt(1 / count + 1 / usual.steps)
    blocks = tail[count % _BLOCK :].reshape(-1, _BLOCK, tail.shape[1]).mean(axis=1)
    lasting = np.sort(blocks, axis=0)[(len(blocks) - 1) // 2] - usual.level
    passes = (
        (extra >= short * thresholds.min_drift * step_ns)
        & (extra > short * thresholds.drift_mads * usual.mad)
        & (extra > thresholds.drift_errors * noise)
        & (lasting >= _LASTS * extra)
        & (newest >= _GOES_ON * extra)
        & (extra[_WHOLE] >= thresholds.min_gain * extra)
    )
    return extra, passes, step_ns
