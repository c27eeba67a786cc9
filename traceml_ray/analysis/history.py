"""
Verdicts over a run: the verdicts of its windows merged into changes, and one verdict over the whole run, with
the share of its time that its episodes and its sampled steps have cost.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from traceml_ray.analysis import watching
from traceml_ray.analysis.baseline import Baseline, Learner
from traceml_ray.analysis.episodes import MAX_ALSO, Episodes, findings_of
from traceml_ray.analysis.evidence import Evidence, late_steps
from traceml_ray.analysis.labels import LABELS
from traceml_ray.analysis.lasting import PastSteps
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.track import (
    Clock,
    Episode,
    Recurring,
    alike,
    same_ranks,
    waited_ns,
    with_cost,
    with_suspects,
)
from traceml_ray.analysis.verdict import DEFAULTS, Verdict, judge_window, too_few_steps
from traceml_ray.analysis.watching import without_window
from traceml_ray.analysis.window import Float, Int64, Window, joined


@dataclass(frozen=True)
class Sample:
    """
    Sampled steps of a run that are judged together. They are spread evenly over the run up to `spread_to`;
    after that, every step is sampled.

    `elapsed_ns` is the time of the run that the sample represents.
    """

    window: Window
    spread_to: int
    elapsed_ns: int

    def weights(self, steps: Int64, stride: int) -> Float:
        """
        Return the number of steps of the run that each of `steps` (S,) represents. One step in `stride` has
        times.
        """
        window = self.window
        mean_ns = window.d.sum(axis=2, dtype=np.float64).mean(axis=1)
        step_ns, spread = window.by_step(mean_ns), window.steps <= self.spread_to
        alone_ns = stride * float(step_ns[~spread].sum())
        factor = max(self.elapsed_ns - alone_ns, 0.0) / max(float(step_ns[spread].sum()), 1.0)
        weights: Float = np.where(steps <= self.spread_to, factor, float(stride))
        return weights


def same(one: Verdict | Episode, other: Verdict | Episode) -> bool:
    """Whether two findings name the same cause; for a set of ranks, at least one rank in common."""
    if LABELS[one.label].names == "none":
        return one.label == other.label
    return (one.label, one.stage) == (other.label, other.stage) and same_ranks(one, other)


def findings_of_run(
    episodes: Sequence[Episode],
    sampled: Sequence[Verdict],
    evidence: Evidence | None,
    sample: Sample,
    clock: Clock,
    limits: Thresholds,
) -> list[Verdict]:
    """
    Return the findings to which the run has lost most of its time, the costliest first.

    A cause counts with the cost of its `episodes`. For a finding that only the sample shows, and for unequal
    work, which continues between its episodes, the cost is estimated from the steps of the sample and the
    steps that they represent. Each finding must cost `min_drift` of the run's time, or as much as the rules
    require if they find it in the whole sample.

    Args:
        episodes: named episodes of the run.
        sampled: findings of the rules in the sample.
        evidence: evidence in the sample.
        sample: sample of the run's steps.
        clock: clock of the run.
        limits: limits of the verdict.
    """
    elapsed_s, ranks = max(clock.now_ns / 1e9, 1e-9), sample.window.expected
    causes = []
    for group in _grouped(episodes):
        cost_s = _cost_s(group)
        if evidence is not None and group[0].label == "imbalance":  # it goes on between its episodes
            cost_s = _lost_s(_named(group[0]), evidence, sample, clock)
        causes.append(_of_episodes(group, sampled, cost_s, elapsed_s, ranks))
    late = any(cause.meaning.names == "ranks" for cause in causes)
    for finding in sampled:
        explained = late and finding.meaning.names == "all"  # a slow-down of all ranks, by a late one
        if evidence is None or explained or any(same(cause, finding) for cause in causes):
            continue
        cost_s = _lost_s(finding, evidence, sample, clock)
        part = [cause for cause in causes if alike(cause, finding)]
        if not _lasts(finding, evidence, cost_s, clock, limits):
            continue
        if cost_s > sum(cause.cost_s or 0.0 for cause in part):
            causes = [cause for cause in causes if cause not in part]
            about_run = msgspec.structs.replace(finding, about="run")
            causes.append(with_cost(about_run, cost_s, elapsed_s, ranks))
    least = 100 * limits.min_drift
    found_from = min(least, 100 * limits.min_gain * limits.min_excess)
    kept = [
        cause
        for cause in causes
        if (cause.cost_pct or 0.0) >= (found_from if any(same(cause, one) for one in sampled) else least)
    ]
    return sorted(kept, key=lambda cause: -(cause.cost_pct or 0.0))


def recurring(brief: Sequence[Recurring], clock: Clock, limits: Thresholds) -> list[Episode]:
    """
    Return findings that recurred without being named, as one episode each. They cost at least
    `transient_excess` of the run, and `transient_share` of the time that all ranks lost in the same way in
    the stage.
    """
    episodes = []
    for one in brief:
        in_stage = sum(other.cost_ns for other in brief if other.verdict.stage == one.verdict.stage)
        costs = one.cost_ns >= limits.transient_excess * clock.now_ns
        steps = clock.timed(one.last - one.began) + 1
        lasts = limits.lasted(one.verdict.label, one.last_ns - one.began_ns, steps)
        if one.count > 1 and costs and lasts and one.cost_ns >= limits.transient_share * in_stage:
            episodes.append(one.episode())
    return episodes


def _lost_s(finding: Verdict, evidence: Evidence, sample: Sample, clock: Clock) -> float:
    """Return the time in s that the run lost to `finding`, estimated from the steps of the sample."""
    waited = sample.weights(evidence.window.steps, clock.every) * waited_ns(finding, evidence)
    return float(waited.sum()) / 1e9


def _grouped(episodes: Sequence[Episode]) -> list[list[Episode]]:
    """
    Return the episodes of each cause, the costliest first. If a cause was named in two stages for a while,
    and earlier in only one of these, it is one cause, just as it is one episode if one directly follows the
    other.
    """
    groups: list[list[Episode]] = []
    for episode in episodes:
        group = next((group for group in groups if same(group[0], episode)), None)
        if group is None:
            groups.append(group := [])
        group.append(episode)
    causes: list[list[Episode]] = []
    for group in sorted(groups, key=_cost_s, reverse=True):
        cause = next((cause for cause in causes if alike(_named(cause[0]), _named(group[0]))), None)
        if cause is None:
            causes.append(group)
        else:
            cause += group
    return causes


def is_of(cause: Verdict, episode: Episode) -> bool:
    """Whether `cause` includes the cost of `episode`."""
    return same(cause, episode) or alike(cause, _named(episode))


def _cost_s(group: Sequence[Episode]) -> float:
    return sum(episode.cost_s for episode in group)


def _named(episode: Episode) -> Verdict:
    names = ("label", "stage", "stages", "rank", "ranks")
    return Verdict(**{name: getattr(episode, name) for name in names})


def _of_episodes(
    group: Sequence[Episode], sampled: Sequence[Verdict], cost_s: float, elapsed_s: float, ranks: int
) -> Verdict:
    """
    Return the finding that the episodes of one cause add up to. Its words are those of the sample, if the
    sample shows it.
    """
    worst = group[0]
    known = next((one for one in sampled if same(one, worst)), None)
    if known is not None:
        return with_cost(msgspec.structs.replace(known, about="run"), cost_s, elapsed_s, ranks)
    taken = min(1.0, sum(episode.seconds for episode in group) / elapsed_s)
    cost = min(1.0, cost_s / elapsed_s)
    seen, saving = watching.over_the_run(worst.ranks, worst.stages, _is_all(worst), taken, cost)
    about = {name: getattr(worst, name) for name in _SHARED}
    return Verdict(
        **about,
        about="run",
        gain_pct=100 * cost,
        cost_pct=100 * cost,
        cost_s=cost_s,
        rank_hours_per_hour=cost * ranks,
        from_step=min(episode.from_step for episode in group),
        to_step=max(episode.to_step for episode in group),
        why=f"{seen} {saving} Where it cost most: {worst.why}",
        saving=saving,
    )


_SHARED = ("label", "stage", "stages", "rank", "ranks", "node", "nodes", "pattern", "confidence", "next")


def _is_all(episode: Episode) -> bool:
    return LABELS[episode.label].names == "all"


def _lasts(finding: Verdict, evidence: Evidence, cost_s: float, clock: Clock, limits: Thresholds) -> bool:
    """Whether a finding that only the sample shows costs enough, and fills most of the run or recurs."""
    if cost_s < limits.hold_cost_s:
        return False
    if finding.pattern == "lasting":
        return True
    late = np.flatnonzero(late_steps(waited_ns(finding, evidence).astype(np.float64)))
    if len(late) < 2:
        return False
    first, last = evidence.window.steps[late[[0, -1]]].tolist()
    between_ns = (last - first + 1) * evidence.step_ns[late[0] : late[-1] + 1].mean()
    return limits.lasted(finding.label, between_ns, clock.timed(last - first))


_MAX_PERIODS = 1000
_MAX_WINDOWS = 2000
_ENOUGH = 3


class RunJudge:
    """
    Judges one attempt of a run window by window, live or afterwards, in bounded memory.

    `update` receives the last `window_steps` complete steps, in order and at any interval: the aggregator
    calls it once a second, `Replay` every `stride_steps`. Steps before `first_step + warmup_steps` are left
    out (`first_step`: the run's, else the first one seen).

    `periods` are the changes of verdict so far, oldest first (the last 1000). `run_verdict` judges a sample.
    Every window that shares no step with the previous one is kept until there are `run_steps` steps (or
    `run_rows` rows). Then every second one is dropped, and from then on only every second one is kept, and so
    on. The sample is therefore spread evenly over a run of any length.

    Drift is measured from `baseline`: the given one, else one learned from the first healthy windows
    (healthy, high confidence). If the size of the job changes, a learned baseline is discarded.
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
        """
        Step since which the set of ranks has been the present one. `_same_ranks_ns` is
        the time of that step.
        """
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
        Continue from the `state` of another judge, with its episodes and their cost. `periods` and
        `run_verdict` cover only the windows since then.
        """
        self._first_step, self._judged_to, self.episodes = state
        self._same_ranks_ns = self.episodes.clock.now_ns

    def update(self, window: Window) -> Verdict:
        """
        Judge `window` and return the verdict in effect, see `Episodes`.

        In a window longer than `window_steps`, every window of that length that ends at a new step is judged,
        `stride_steps` apart. `chronic` depends on the share of the last `chronic_windows` windows.
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

    def run_verdict(self, *, ended: bool = False) -> Verdict:
        """
        Judge the whole run so far, after warm-up. `chronic` depends on its share of all windows.

        After a change in the set of ranks, only the run since then is judged. `ended`: no more steps follow.
        """
        window = self.sample()
        if window is None or self._short(window):
            return too_few_steps(window, self._thresholds.first_window_steps, ended=ended)
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
        note = watching.last_steps(last, elapsed_s)
        if not findings:
            verdict = sample
            if sample.meaning.kind == "finding":
                verdict = Verdict(
                    label="healthy", confidence="medium", from_step=window.first_step,
                    why=watching.passing(sample.why), next=LABELS["healthy"].next,
                    **sample.of_window,
                )  # fmt: skip
            was = ""
            if named:
                worst = named[0]
                about = Verdict(label=worst.label, stages=worst.stages, ranks=worst.ranks)
                was = watching.was_named(len(named), lost_s, about, worst.from_step, worst.to_step)
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
            note="; ".join(filter(None, (watching.more(len(others) - MAX_ALSO), note))),
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
    Judges a recorded run of about `steps` steps as it is judged live, from pieces of any size.

    Windows of `window_steps` slide by `stride_steps` (more in runs of over 20,000 steps, so that there are at
    most 2000 windows). The first window is judged from `first_window_steps` on. For a run that continues,
    `steps` is None, and windows slide by more from 20,000 steps on.
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
        """Add the next steps."""
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
