"""Verdicts over a run: those of its windows merged into changes, and one over all of it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import msgspec
import numpy as np

from traceml_ray.analysis import notes
from traceml_ray.analysis.baseline import Baseline, Learner
from traceml_ray.analysis.costs import with_cost, with_suspects
from traceml_ray.analysis.episodes import MAX_ALSO, Episodes, findings_of
from traceml_ray.analysis.labels import LABELS
from traceml_ray.analysis.over_run import Sample, findings_of_run, is_of, recurring, same
from traceml_ray.analysis.past_steps import PastSteps
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.verdict import DEFAULTS, Verdict, judge_window, too_few_steps
from traceml_ray.analysis.watching import without_window
from traceml_ray.analysis.window import Window, joined

_MAX_PERIODS = 1000
_MAX_WINDOWS = 2000
_ENOUGH = 3


class RunJudge:
    """
    Judges one attempt of a run window by window, live or afterwards, in bounded memory.

    `update` takes the last `window_steps` complete steps, in order and at any interval: the aggregator calls
    it once a second, `Replay` every `stride_steps`. Steps before `first_step + warmup_steps` are left out
    (`first_step`: the run's, else the first one seen).

    `periods` are the changes of verdict so far, oldest first (the last 1000). `run_verdict` judges a sample:
    every window that shares no step with the one before it is kept until there are `run_steps` steps
    (or `run_rows` rows); then every second is dropped and from there on only every second taken,
    and so on, so that the sample is spread evenly over the run however long it gets.

    `baseline` is what drift is measured from: the one given, else learned from the first healthy windows
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
        self._judged_to: int | None = None
        self._same_ranks_from = self._same_ranks_ns = 0
        """Step from which on the set of ranks is the present one; `_same_ranks_ns` is its time."""
        self._past = PastSteps()
        self._recent: deque[Verdict] = deque(maxlen=thresholds.chronic_windows)
        self._totals: Counter[tuple[str, str | None, int | None]] = Counter()
        """Number of windows by label, stage and rank. Which rank is the worst may be chance."""
        self._counted = 0
        self.periods: deque[Verdict] = deque(maxlen=_MAX_PERIODS)
        self.episodes = Episodes(thresholds)

    def state(self) -> tuple[int | None, int | None, Episodes]:
        """Return the state that another judge of the same attempt can `resume` from."""
        return self._first_step, self._judged_to, self.episodes

    def resume(self, state: tuple[int | None, int | None, Episodes]) -> None:
        """
        Continue from the `state` of another judge: its episodes and their cost. `periods` and
        `run_verdict` are of the windows since then.
        """
        self._first_step, self._judged_to, self.episodes = state
        self._same_ranks_ns = self.episodes.clock.now_ns

    def update(self, window: Window) -> Verdict:
        """
        Judge `window`; return the verdict in effect, see `Episodes`.

        In one longer than `window_steps`, every window of that length that ends at a new step,
        `stride_steps` apart, is judged. `chronic` is by the share of the last `chronic_windows` windows.
        """
        window = self._warm(window)
        size, stride = self._thresholds.window_steps, self._thresholds.stride_steps
        edges = [*window.starts.tolist(), len(window.keys)]
        judged = (
            0 if self._judged_to is None else int(np.searchsorted(window.steps, self._judged_to, "right"))
        )
        for end in range(max(judged + stride, size), len(edges) - 1, stride):
            self._judge(window.select(slice(edges[max(0, end - size)], edges[end])))
        return self._judge(window.last(size))

    def _judge(self, window: Window) -> Verdict:
        if self._window is not None and not np.array_equal(self._window.ranks, window.ranks):
            # Ranks came or went: rows of different sets of ranks cannot be judged together.
            self._sample.clear()
            self._same_ranks_from = window.first_step or 0
            self._same_ranks_ns = self.episodes.clock.now_ns
        self._window = window
        if self._short(window):
            return too_few_steps(window, self._thresholds.first_window_steps)
        self._judged_to = window.last_step if len(window.keys) else self._judged_to
        if self.baseline is not None and not self.baseline.fits(window.expected):
            self.baseline, self._learner = None, Learner(self._thresholds)
        # A drift stays found until it is half of `min_drift`: near the threshold noise decides.
        limits = self._staying if self.episodes.follows_all else self._thresholds
        window_verdict, evidence, maybe = judge_window(
            window, limits, baseline=self.baseline, followed=self.episodes.followed, past=self._past
        )
        if evidence is not None and len(evidence.window.ranks) == len(window.ranks):
            self._past = self._past.then(evidence)
        if self.baseline is None and evidence and self._is_usual(window_verdict):
            self.baseline = self._learner.add(evidence)
        counts = self._count(window, window_verdict)
        verdict = self.episodes.update(
            window, window_verdict, evidence, counts=counts, maybe=maybe, past=self._past
        )
        self._collect(window)
        self._merge(verdict)
        return self._with_chronic(verdict, sum(same(verdict, v) for v in self._recent), len(self._recent))

    def _is_usual(self, verdict: Verdict) -> bool:
        """Whether the window shows the run without a fault. Unequal work of the ranks is not a fault."""
        if verdict.meaning.kind == "healthy":
            return verdict.confidence == "high"
        full = verdict.window_steps >= self._thresholds.window_steps and verdict.coverage == 1.0
        return (
            verdict.meaning.kind == "finding"
            and verdict.meaning.names == "none"
            and not verdict.also
            and full
        )

    def run_verdict(self) -> Verdict:
        """
        Judge the whole run so far, after warm-up, with `chronic` from its share of all windows.

        After a change in the set of ranks, the run since then.
        """
        window = self.sample()
        if window is None or self._short(window):
            return too_few_steps(window, self._thresholds.first_window_steps)
        verdict, evidence, _ = judge_window(window, self._thresholds, whole_run=True, baseline=self.baseline)
        sampled, clock = findings_of(verdict), self.episodes.clock
        often = recurring(self.episodes.recurring, clock, self._thresholds)
        candidates = [*self.episodes.episodes, *self.episodes.passed, *often]
        candidates = [one for one in candidates if one.to_step >= self._same_ranks_from]
        spread_to = self._sample[-1].last_step if self._sample else window.last_step
        sample = Sample(window, spread_to or 0, clock.now_ns - self._same_ranks_ns)
        if sampled and clock.now_ns < self._thresholds.hold_s * 1e9:  # too short for a name
            findings = [
                with_cost(
                    msgspec.structs.replace(one, about="run"),
                    (one.cost_pct or 0.0) / 100 * clock.now_ns / 1e9, clock.now_ns / 1e9, window.expected,
                )
                for one in sampled
            ]  # fmt: skip
        elif sampled or verdict.label == "healthy":
            findings = findings_of_run(candidates, sampled, evidence, sample, clock, self._thresholds)
        else:
            findings = []
        return self._of_run(window, verdict, findings)

    def _of_run(self, window: Window, sample: Verdict, findings: Sequence[Verdict]) -> Verdict:
        """Return the verdict on the run from `findings`. `sample` is the verdict on its sampled `window`."""
        named = self.episodes.episodes
        elapsed_s, lost_s = self.episodes.clock.now_ns / 1e9, self.episodes.lost_s
        for one in findings:  # what was not named has cost, too
            lost_s += (one.cost_s or 0.0) - sum(episode.cost_s for episode in named if is_of(one, episode))
        total = {"lost_s": lost_s, "elapsed_s": elapsed_s}
        last = [(one.verdict, one.last - one.began + 1, one.cost_s) for one in self.episodes.at_end]
        note = notes.last_steps(last, elapsed_s)
        if not findings:
            verdict = sample
            if sample.meaning.kind == "finding":
                verdict = Verdict(
                    label="healthy", confidence="medium", from_step=window.first_step,
                    why=notes.passing(sample.why), next=LABELS["healthy"].next,
                    **sample.of_window,
                )  # fmt: skip
            was = ""
            if named:
                worst = named[0]
                about = Verdict(label=worst.label, stages=worst.stages, ranks=worst.ranks)
                was = notes.was_named(len(named), lost_s, about, worst.from_step, worst.to_step)
            note = "; ".join(filter(None, (was, note)))
            return msgspec.structs.replace(verdict, about="run", also=(), note=note, **total)
        headline, *others = (self._with_chronic(one, self._often(one), self._counted) for one in findings)
        facts = sample.of_window
        if not headline.window_steps:  # of episodes
            facts["to_step"] = headline.to_step
        verdict = msgspec.structs.replace(
            headline,
            **facts,
            also=tuple(without_window(one) for one in others[:MAX_ALSO]),
            note="; ".join(filter(None, (notes.more(len(others) - MAX_ALSO), note))),
            **total,
        )
        return with_suspects(verdict)

    def _often(self, verdict: Verdict) -> int:
        """Return the number of windows that have shown what `verdict` names."""
        return self._totals[verdict.label, verdict.stage, verdict.rank]

    def sample(self) -> Window | None:
        """Return the steps that `run_verdict` judges. None before there are any."""
        if self._window is None or not self._sample:
            return self._window
        tail = self._window.select(self._window.keys > self._sample[-1].keys[-1])
        return joined([*self._sample, tail])

    def _warm(self, window: Window) -> Window:
        if self._first_step is None:
            self._first_step = window.first_step
        return window.since((self._first_step or 0) + self._thresholds.warmup_steps)

    def _short(self, window: Window) -> bool:
        """Whether `window` has too few steps to be judged, although enough ranks report."""
        limits = self._thresholds
        return len(window.starts) < limits.first_window_steps and window.coverage >= limits.coverage_limited

    def _count(self, window: Window, verdict: Verdict) -> bool:
        """Count a window for `chronic`, once per stride, so that more frequent calls change nothing."""
        new = window.steps > (-1 if self._counted_to is None else self._counted_to)
        if np.count_nonzero(new) < self._thresholds.stride_steps:
            return False
        self._counted_to = window.last_step
        self._counted += 1
        self._recent.append(verdict)
        for one in findings_of(verdict) or [verdict]:
            self._totals.update((one.label, one.stage, rank) for rank in one.ranks or (None,))
        return True

    def _with_chronic(self, verdict: Verdict, same: int, counted: int) -> Verdict:
        names = verdict.rank is not None or verdict.meaning.names == "all"
        if not names or verdict.meaning.kind != "finding" or counted < _ENOUGH:
            return verdict
        return msgspec.structs.replace(verdict, chronic=same >= self._thresholds.chronic_share * counted)

    def _collect(self, window: Window) -> None:
        """Add a window to the sample for the whole-run verdict, see `run_verdict`."""
        thresholds = self._thresholds
        if len(window.starts) < thresholds.window_steps or window.keys[0] <= self._sampled_to:
            return
        self._sampled_to = int(window.keys[-1])
        self._offered += 1
        if (self._offered - 1) % self._spacing:
            return
        self._sample.append(window.copied())
        most = min(thresholds.run_steps, thresholds.run_rows // max(len(window.ranks), 1))
        while len(self._sample) > max(2, most // thresholds.window_steps):
            del self._sample[1::2]
            self._spacing *= 2

    def _merge(self, verdict: Verdict) -> None:
        """Extend the last period, or end it where `verdict` begins."""
        verdict = msgspec.structs.replace(verdict, note="")  # a note is of the moment
        to_step, since = verdict.to_step or 0, self.episodes.since
        finding = verdict.meaning.kind == "finding"
        while finding and self.periods and (self.periods[-1].from_step or 0) >= (since or 0):
            if same(self.periods[-1], verdict):
                break
            self.periods.pop()  # only now is it known when this one began
        if not self.periods:
            self.periods.append(verdict)
            return
        period = self.periods[-1]
        if same(period, verdict):
            strongest = verdict if (verdict.cost_pct or 0.0) >= (period.cost_pct or 0.0) else period
            costs = {name: getattr(verdict, name) for name in _COSTS}
            self.periods[-1] = msgspec.structs.replace(
                strongest, **costs, from_step=period.from_step, to_step=verdict.to_step
            )
            return
        begins = min(max(since or 0, (period.from_step or 0) + 1), to_step)
        self.periods[-1] = msgspec.structs.replace(period, to_step=begins - 1)
        self.periods.append(msgspec.structs.replace(verdict, from_step=begins))


_COSTS = (
    *("cost_pct", "cost_s", "cost_range_pct", "rank_hours_per_hour", "lost_s", "elapsed_s", "gain_pct"),
    "also",
)


class Replay:
    """
    Judges a recorded run of about `steps` steps the way it is judged live, from pieces of any size.

    Windows of `window_steps` slide by `stride_steps` (more in runs of over 20,000 steps, so that
    there are at most 2000 windows); the first is judged from `first_window_steps` on. Of a run that goes on
    `steps` is None: they slide by more from 20,000 steps on.
    """

    def __init__(
        self, steps: int | None, thresholds: Thresholds = DEFAULTS, baseline: Baseline | None = None
    ) -> None:
        self._limits = thresholds
        self._run = RunJudge(thresholds, baseline=baseline)
        self._steps = 0
        self._due = thresholds.warmup_steps + thresholds.first_window_steps
        self._seen = self._judged = 0
        self._tail: Window | None = None
        if steps is not None:
            self.expect(steps)

    def expect(self, steps: int) -> None:
        """
        Set the expected total number of steps. It comes from rows that are not checked, so it may be any
        number.
        """
        self._steps = max(1, steps)
        self._due = self._due if self._judged else min(self._steps, self._due)

    def add(self, piece: Window) -> None:
        """Take the steps that follow."""
        window = piece if self._tail is None else joined([self._tail, piece])
        edges = [*window.starts.tolist(), len(window.keys)]
        self._seen += len(piece.starts)
        before = self._seen - len(window.starts)
        while self._due <= self._seen:
            end = self._due - before
            self._run.update(window.select(slice(edges[max(0, end - self._limits.window_steps)], edges[end])))
            self._judged = self._due
            self._due += max(1, self._limits.stride_steps, -(-max(self._steps, self._due) // _MAX_WINDOWS))
        self._tail = window.last(self._limits.window_steps)

    def done(self) -> RunJudge:
        """Judge the last steps; read `periods`, `run_verdict()` and `baseline` of the result."""
        if self._tail is not None and self._judged != self._seen:
            self._run.update(self._tail)
        self._run.episodes.close()
        return self._run
