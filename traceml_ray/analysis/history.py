"""Verdicts over a run: window by window merged into changes, and one over all of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from traceml_ray.analysis import wording
from traceml_ray.analysis.baseline import Baseline, Learner
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.verdict import DEFAULTS, Verdict, assess, judge, too_few_steps
from traceml_ray.analysis.window import RankRows, Window, align
from traceml_ray.wire import SEGMENT_BITS

_MAX_SPANS = 1000
_MAX_WINDOWS = 2000
_ENOUGH = 3


class RunJudge:
    """
    Judges one attempt of a run window by window, live or afterwards, in bounded memory.

    Give `update` the last `window_steps` complete steps as often as you like, in order; the
    aggregator does so once a second, `judge_run` every `stride_steps`. Steps before
    `first_step + warmup_steps` are left out (`first_step`: the run's, else the first one seen).

    `spans` are the changes of verdict so far, oldest first (the last 1000). `whole` judges a sample: every
    window that shares no step with the one before it is kept until there are `run_steps` steps
    (or `run_rows` rows); then every second is dropped and from there on only every second taken,
    and so on, so that the sample is spread evenly over the run however long it gets.

    `baseline` is what drift is measured from: the one given, else learned from the first quiet windows
    (healthy, high confidence); another size of the job makes a learned one void.
    """

    def __init__(
        self,
        thresholds: Thresholds = DEFAULTS,
        first_step: int | None = None,
        baseline: Baseline | None = None,
    ) -> None:
        self.baseline = baseline
        self._learner = Learner(thresholds)
        self._thresholds = thresholds
        self._staying = msgspec.structs.replace(thresholds, min_drift=thresholds.min_drift / 2)
        self._first_step = first_step
        self._window: Window | None = None
        self._sample: list[Window] = []
        self._spacing = 1
        self._offered = 0
        self._sampled_to = -1
        self._counted_to: int | None = None
        self._recent: deque[Verdict] = deque(maxlen=thresholds.chronic_windows)
        self._totals: dict[tuple[str, str | None, int | None], int] = {}
        self._costs: dict[tuple[str, str | None, int | None], float] = {}
        self._counted = 0
        self.spans: deque[Verdict] = deque(maxlen=_MAX_SPANS)

    def update(self, window: Window) -> Verdict:
        """Judge `window`, with `chronic` from its share of the last `chronic_windows` windows."""
        window = self._warm(window)
        if self._window is not None and not np.array_equal(self._window.ranks, window.ranks):
            # Ranks came or went: rows of different sets of ranks cannot be judged together.
            self._sample.clear()
        self._window = window
        if self._short(window):
            return too_few_steps(window, self._thresholds.first_window_steps)
        if self.baseline is not None and not self.baseline.fits(window.expected):
            self.baseline, self._learner = None, Learner(self._thresholds)
        # What has been found stays until it is half of what finds it: near the threshold noise decides.
        stands = bool(self.spans) and self.spans[-1].label == "group_wide"
        verdict, evidence = assess(
            window, self._staying if stands else self._thresholds, baseline=self.baseline
        )
        if self.baseline is None and evidence and (verdict.label, verdict.confidence) == ("healthy", "high"):
            self.baseline = self._learner.add(evidence)
        self._count(verdict)
        self._collect(window)
        self._merge(verdict, window)
        return self._with_chronic(verdict, sum(_same(verdict, v) for v in self._recent), len(self._recent))

    def whole(self) -> Verdict:
        """
        Judge the whole run so far, after warm-up, with `chronic` from its share of all windows.

        After a change in the set of ranks, the run since then.
        """
        window = self._window
        if window is None:
            return too_few_steps(align([], 0), self._thresholds.first_window_steps)
        if self._sample:
            tail = window.take(window.keys > self._sample[-1].keys[-1])
            pieces = [*self._sample, tail]
            window = replace(
                window,
                keys=np.concatenate([piece.keys for piece in pieces]),
                d=np.concatenate([piece.d for piece in pieces]),
                flags=np.concatenate([piece.flags for piece in pieces]),
                lacking=np.concatenate([piece.lacking for piece in pieces]),
            )
        if self._short(window):
            return too_few_steps(window, self._thresholds.first_window_steps)
        verdict = judge(window, self._thresholds, whole_run=True)
        if verdict.label == "healthy":
            verdict = self._drifted(verdict)
        return self._with_chronic(verdict, self._totals.get(_identity(verdict), 0), self._counted)

    def _drifted(self, whole: Verdict) -> Verdict:
        """Return the drift that costs most over the run, where that is at least `min_drift`; else `whole`."""
        costs = {which: cost / self._counted for which, cost in self._costs.items()}
        which = max(costs, key=lambda which: costs[which], default=None)
        spans = [span for span in self.spans if which is not None and _identity(span) == which]
        if which is None or not spans or costs[which] < 100 * self._thresholds.min_drift:
            return whole
        worst = max(spans, key=lambda span: span.cost_pct or 0.0)
        cost, stage = costs[which], worst.stage or ""
        share = self._totals[which] / self._counted
        return msgspec.structs.replace(
            whole,
            label=worst.label,
            stage=stage,
            stages=worst.stages,
            confidence=worst.confidence,
            excess_pct=worst.excess_pct,
            gain_pct=cost,
            cost_pct=cost,
            gpu_hours_per_hour=cost / 100 * (self._window.expected if self._window else 0),
            from_step=spans[0].from_step,
            to_step=spans[-1].to_step,
            why=wording.over_the_run(stage, share, cost / 100, worst.why),
            next=worst.next,
        )

    def _warm(self, window: Window) -> Window:
        if self._first_step is None:
            self._first_step = window.first_step
        if self._first_step is None:
            return window
        return window.take(window.keys >> SEGMENT_BITS >= self._first_step + self._thresholds.warmup_steps)

    def _short(self, window: Window) -> bool:
        """Tell whether there is nothing to say about `window` but that it is short."""
        limits = self._thresholds
        return len(window.starts) < limits.first_window_steps and window.coverage >= limits.coverage_limited

    def _count(self, verdict: Verdict) -> None:
        """Count a window for `chronic`, once per stride, so that asking more often changes nothing."""
        step = verdict.to_step or 0
        if self._counted_to is not None and step < self._counted_to + self._thresholds.stride_steps:
            return
        self._counted_to = step
        self._counted += 1
        self._recent.append(verdict)
        which = _identity(verdict)
        self._totals[which] = self._totals.get(which, 0) + 1
        if verdict.label == "group_wide":
            self._costs[which] = self._costs.get(which, 0.0) + (verdict.cost_pct or 0.0)

    def _with_chronic(self, verdict: Verdict, same: int, counted: int) -> Verdict:
        if (verdict.rank is None and verdict.label != "group_wide") or counted < _ENOUGH:
            return verdict
        return msgspec.structs.replace(verdict, chronic=same >= self._thresholds.chronic_share * counted)

    def _collect(self, window: Window) -> None:
        """Keep a window for the whole-run verdict if its turn has come."""
        thresholds = self._thresholds
        if len(window.starts) < thresholds.window_steps or window.keys[0] <= self._sampled_to:
            return
        self._sampled_to = int(window.keys[-1])
        self._offered += 1
        if (self._offered - 1) % self._spacing:
            return
        self._sample.append(replace(window, d=window.d.copy(order="K"), flags=window.flags.copy(order="K")))
        most = min(thresholds.run_steps, thresholds.run_rows // max(len(window.ranks), 1))
        while len(self._sample) > max(2, most // thresholds.window_steps):
            del self._sample[1::2]
            self._spacing *= 2

    def _merge(self, verdict: Verdict, window: Window) -> None:
        """Extend the last span, or end it where `verdict` begins."""
        if not self.spans:
            self.spans.append(verdict)
            return
        span = self.spans[-1]
        if _same(span, verdict):
            strongest = verdict if (verdict.cost_pct or 0.0) >= (span.cost_pct or 0.0) else span
            self.spans[-1] = msgspec.structs.replace(
                strongest, from_step=span.from_step, to_step=verdict.to_step
            )
            return
        begins, to_step = verdict.from_step or 0, verdict.to_step or 0
        if verdict.from_step == window.first_step:
            begins = max(begins, min((span.to_step or 0) + 1, to_step))
        begins = min(max(begins, (span.from_step or 0) + 1), to_step)
        self.spans[-1] = msgspec.structs.replace(span, to_step=begins - 1)
        self.spans.append(msgspec.structs.replace(verdict, from_step=begins))


def _same(one: Verdict, other: Verdict) -> bool:
    """Tell whether two verdicts name the same thing; of a set of ranks, at least one in common."""
    if (one.label, one.stage, one.rotating) != (other.label, other.stage, other.rotating):
        return False
    return not set(one.ranks).isdisjoint(other.ranks) if one.ranks else not other.ranks


def _identity(verdict: Verdict) -> tuple[str, str | None, int | None]:
    return verdict.label, verdict.stage, verdict.rank


def judge_run(
    streams: Sequence[RankRows],
    expected: int,
    missing: Sequence[int] = (),
    thresholds: Thresholds = DEFAULTS,
    baseline: Baseline | None = None,
) -> RunJudge:
    """
    Judge a recorded run the way it is judged live; read `spans`, `whole()` and `baseline` of the result.

    Windows of `window_steps` slide by `stride_steps` (more in runs of over 20,000 steps, so that
    there are at most 2000 windows); the first is judged from `first_window_steps` on.
    """
    window = align(streams, expected, missing)
    run = RunJudge(thresholds, window.first_step, baseline)
    edges = [*window.starts.tolist(), len(window.keys)]
    steps = len(window.starts)
    stride = max(thresholds.stride_steps, -(-steps // _MAX_WINDOWS))
    first = min(steps, thresholds.warmup_steps + thresholds.first_window_steps)
    for end in dict.fromkeys([*range(first, steps, stride), steps]):
        run.update(window.take(slice(edges[max(0, end - thresholds.window_steps)], edges[end])))
    return run
