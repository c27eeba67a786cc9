"""The findings of a whole run: what its episodes, and what its sampled steps, have cost of its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from traceml_ray.analysis import notes
from traceml_ray.analysis.costs import with_cost
from traceml_ray.analysis.evidence import Evidence
from traceml_ray.analysis.labels import LABELS
from traceml_ray.analysis.onset import late_steps
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.track import Clock, Episode, Recurring, alike, same_ranks, waited_ns
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.window import Float, Int64, Window


@dataclass(frozen=True)
class Sample:
    """
    The sampled steps of a run that are judged together: spread evenly over it up to `spread_to`, then every
    one.

    `elapsed_ns` is the time of the run that they are a sample of.
    """

    window: Window
    spread_to: int
    elapsed_ns: int

    def weights(self, steps: Int64, stride: int) -> Float:
        """
        Return the number of steps of the run that each of `steps` (S,) stands for. One step in `stride` has
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
    Return what the run has lost most of its time to, the costliest first.

    A cause counts with what its `episodes` cost. What only the sample shows, and unequal work, which goes on
    between its episodes, counts with what the steps of the sample, and those that they stand for, lost to it.
    Each must be `min_drift` of the run's time, or as much as the rules ask for where they find it in the
    whole sample.

    Args:
        episodes: that were named.
        sampled: what the rules find in the sample.
        evidence: in the sample.
        sample: of the run's steps.
        clock: of the run.
        limits: of the verdict.
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
    Return, as one episode each, findings that recurred without being named: those that cost at least
    `transient_excess` of the run, and `transient_share` of what all ranks lost in that way in the stage.
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
    Return the episodes of each cause, the costliest first. What was named in two stages for a while, and in
    one of them before, is one cause, as it is one episode where the one follows the other.
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
    Return the finding that the episodes of one cause add up to, worded as in the sample if the sample shows
    it.
    """
    worst = group[0]
    known = next((one for one in sampled if same(one, worst)), None)
    if known is not None:
        return with_cost(msgspec.structs.replace(known, about="run"), cost_s, elapsed_s, ranks)
    taken = min(1.0, sum(episode.seconds for episode in group) / elapsed_s)
    cost = min(1.0, cost_s / elapsed_s)
    seen, saving = notes.over_the_run(worst.ranks, worst.stages, _is_all(worst), taken, cost)
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
