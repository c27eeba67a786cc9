"""The baseline: what a step takes in healthy windows, learned once from the run's own, then fixed."""

from __future__ import annotations

import msgspec
import numpy as np

from traceml_ray.analysis.evidence import Evidence
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import Float, Int64


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
    """Size of the job. Exposed time depends on it. None: the baseline was given, and is used for any size."""
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

    A step of several rows (segments) is their sum; one of which the window holds only a part is left out.
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
