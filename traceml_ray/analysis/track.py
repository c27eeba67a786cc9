"""A finding that is followed from window to window in the job's own time: how long it lasts, and its cost."""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

from traceml_ray.analysis import wording
from traceml_ray.analysis.evidence import Cause, Evidence, late_steps
from traceml_ray.analysis.labels import PATTERNS, Label, Pattern
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.window import Float, Int64, Window
from traceml_ray.stages import STAGES


def with_cost(
    verdict: Verdict,
    cost_s: float,
    of_s: float,
    ranks: int,
    cost_range: tuple[float, float] | None = None,
) -> Verdict:
    """
    Return the `verdict` of a window with the cost over a longer time, and a sentence in its `why` on what
    fixing it saves.

    Args:
        verdict: verdict of the window, without a cost.
        cost_s: time that ranks waited for the named cause, in s.
        of_s: time that the cost is a share of, in s: that of the episode, or of the run.
        ranks: number of ranks that waited.
        cost_range: range of the cost over the windows, in %.
    """
    cost = min(100.0, 100 * cost_s / max(of_s, 1e-9))
    alone, together = verdict.gain_pct, verdict.cost_pct
    gain = cost if not alone or not together else min(cost, cost * alone / together)
    costed = msgspec.structs.replace(
        verdict,
        cost_pct=cost,
        cost_s=cost_s,
        gain_pct=gain,
        cost_range_pct=cost_range,
        rank_hours_per_hour=cost / 100 * ranks,
    )
    return with_saving(costed)


def with_saving(verdict: Verdict) -> Verdict:
    """Return the finding with a sentence on what fixing it saves, from the cost it has."""
    if verdict.cost_pct is None or verdict.meaning.kind != "finding":
        return verdict
    saving = wording.saving(
        verdict.label,
        len(verdict.ranks),
        len(verdict.stages),
        verdict.gain_pct or 0.0,
        verdict.cost_pct,
        at_most=verdict.at_most,
        whole_time="the run" if verdict.about == "run" else "the step",
    )
    return msgspec.structs.replace(verdict, why=f"{verdict.why} {saving}", saving=saving)


def with_suspects(verdict: Verdict) -> Verdict:
    """Return `verdict` with its cost repeated in its suspect, if it names exactly one."""
    known = {
        (one.rank, one.stage): one.cost_pct or 0.0
        for one in (*reversed(verdict.also), verdict)
        if len(one.ranks) == len(one.stages) == 1
    }
    step_ms = verdict.mean_step_ms or 0.0
    suspects = [
        msgspec.structs.replace(one, cost_pct=cost, gain_ms=cost / 100 * step_ms)
        if (cost := known.get((one.rank, one.stage))) is not None
        else one
        for one in verdict.suspects
    ]
    return msgspec.structs.replace(verdict, suspects=tuple(suspects))


MAX_LEVELS = 1000
_APART, _RECURS = 10, 3
"""
A finding that is late at intervals of at least the first number of steps must be late as many times as the
second number before it is named: two stalls recur by chance.
"""
_MISSES = 1.5
"""A recurring finding is gone after this multiple of its longest gap without a late step."""
TURNS = 10
"""Number of windows in a row after which another stage, or rank, of a finding becomes its first."""


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """
    A named finding from its first late step to its last, and its cost.

    `cost_s` is the time by which it made the job longer. `rank_hours` is this time on all ranks that exchange
    gradients with the late ones. `cost_pct` is the cost as a share of the episode, `cost_range_pct` the range
    of that share over the windows (p10, p90).
    """

    label: Label
    """Label of the finding, see docs/concepts/verdicts.md."""
    stage: str | None
    """First of `stages`; None: no stage is named."""
    stages: tuple[str, ...]
    """Stages in which the ranks are late."""
    rank: int | None
    """Worst of `ranks`; None: no rank is named."""
    ranks: tuple[int, ...]
    """Global ranks that are named."""
    node: str | None
    """Label of the node of `rank`; None: no rank is named."""
    nodes: tuple[str, ...]
    """Labels of the nodes of `ranks`."""
    pattern: Pattern
    """
    How the ranks are late: in most steps (`lasting`), now and then (`transient`), or in turn
    (`rotating`).
    """
    confidence: str | None
    """low, medium or high."""
    from_step: int
    """First late step."""
    to_step: int
    """Last late step."""
    seconds: float
    """Time from the first late step to the end of the last one (s)."""
    cost_s: float
    """Time by which the finding made the job longer (s)."""
    rank_hours: float
    """`cost_s` on all ranks that exchange gradients with the late ones, in rank-hours."""
    cost_pct: float | None
    """Cost as a share of the time of the episode (%)."""
    cost_range_pct: tuple[float, float] | None
    """Range of that share over the windows: its 10th and 90th percentile (%)."""
    goes_on: bool
    """Whether it was still going on when the run was last judged."""
    why: str
    """Reason for the finding, in sentences."""
    next: str
    """What to do next."""


class Clock:
    """
    Time of the job since its first row, ns, from the rows alone.

    Steps in no window count as long as the steps after them. If only some steps have times, the steps between
    those of windows count as long as these.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        self.now_ns = 0
        self.skipped_ns = 0
        """Time of the steps between the window of the last `advance` and the one before it, in ns."""
        self.steps: Int64 = np.empty(0, dtype=np.int64)
        """Step numbers (S,) of the last window."""
        self.every = 1
        """Stride of the steps that have times: one step in every `every` has times."""
        self._step_ns: Int64 = self.steps
        self._longest = thresholds.max_step_ns

    def advance(self, window: Window) -> bool:
        """Add the steps of `window` that are new. Return whether there are any."""
        mean_ns = window.d.sum(axis=1, dtype=np.float64).sum(axis=1) / len(window.ranks)
        rows_ns = np.clip(mean_ns, 0, self._longest).astype(np.int64)
        steps = window.steps
        self.every = int(np.median(np.diff(steps))) if len(steps) > 1 else self.every
        step_ns = self.every * window.by_step(rows_ns)
        last, before_ns = (self.steps[-1], self._step_ns[-1]) if len(self.steps) else (-1, 0)
        new = steps > last
        if not new.any():
            return False
        skipped = int(steps[new][0]) - int(last) - self.every if len(self.steps) else 0
        self.skipped_ns = max(0, skipped) * int(step_ns[new].mean() / self.every)
        again_ns = step_ns[steps == last].sum() - before_ns if (steps == last).any() else 0
        self.now_ns += self.skipped_ns + int(again_ns + step_ns[new].sum())
        self.steps, self._step_ns = steps, step_ns
        return True

    def timed(self, steps: int) -> int:
        """Return how many of `steps` steps have times."""
        return steps // self.every

    def begin_ns(self, step: int) -> int:
        """Return when `step` of the last window began, ns."""
        return self.now_ns - int(self._step_ns[np.searchsorted(self.steps, step) :].sum())


class FindingTrack:
    """One finding, followed from window to window."""

    def __init__(self, verdict: Verdict, began: int, began_ns: int) -> None:
        self.verdict = verdict
        """The newest verdict that shows the finding."""
        self.began, self.began_ns = began, began_ns
        self.last, self.last_ns = began, began_ns
        """The last late step; `last_ns` is when it ended, in ns."""
        self.detected, self.detected_ns = began, began_ns
        """
        Step at which a window first showed the finding, or at which it was named; `detected_ns` is the time,
        in ns.
        """
        self.cost_ns = 0
        """
        Cost of all steps up to the last late one, in ns. Later steps may be the first of
        another finding.
        """
        self.outlived_ns = 0
        """Largest cost of an overlapping finding that was dropped, in ns."""
        self.seen = self.exact = self.missed = 0
        """
        Number of windows that show the finding. `exact` counts the windows with the same label and stages,
        `missed` those that do not show it.
        """
        self.levels: list[tuple[int, Float]] = []
        """
        For each full window that shows it: the index of the pattern it was found by, and `level_of` the
        window.
        """
        self.ranks = 1
        self.events = 1
        """Number of times that the finding was late, separated by more than ten steps that were not late."""
        self.gap = 0
        """Largest number of steps from one late step to the next."""
        self.shown = True
        """Whether the newest window shows the finding."""
        self._counted_to = -1
        self._after_ns = 0
        """Cost of the steps after the last late one, in ns. It is added when the finding continues."""
        self._turned = 0
        """Number of windows in a row in which another of its stages, or ranks, costs most."""
        self._pieces: deque[tuple[int, int, int]] = deque(maxlen=256)
        """Triples (step, time, cost) so far, to take back steps that another finding explains better."""
        self._shares: deque[float] = deque(maxlen=MAX_LEVELS)

    def supports(self, current: Verdict) -> bool:
        """Whether `current` names everything that this finding names, and maybe more."""
        return contains(current, self.verdict)

    def matches(self, current: Verdict) -> bool:
        """Whether `current` names this finding. For a set of ranks, at least one must be common."""
        if self.verdict.meaning.names == "none":
            return self.supports(current)
        same = (self.verdict.label, set(self.verdict.stages)) == (current.label, set(current.stages))
        return same and self.supports(current)

    def lingers(self, evidence: Evidence, thresholds: Thresholds) -> bool:
        """Whether at least half of the excess by which the finding was found is still there."""
        if self.verdict.meaning.names == "all" or self.verdict.stage not in STAGES:
            return False
        places = _places(self.verdict, evidence.window)
        stage = evidence.compared_in(STAGES.index(self.verdict.stage), places)
        pattern = self.verdict.pattern or "lasting"
        excess = evidence.by_pattern[pattern][places, stage].max(initial=0)
        return bool(excess >= thresholds.least(pattern) / 2)

    def extend(self, evidence: Evidence, clock: Clock, current: Verdict | None) -> None:
        """
        Add the new steps of a window that shows the finding. `current` is the verdict if it
        names just this.
        """
        if current is not None:
            self._reword(current)
        window, waited = evidence.window, clock.every * waited_ns(self.verdict, evidence)
        steps = window.steps
        since = steps >= self.began
        if len(steps) < len(window.keys):
            since[-1] = False  # its other rows may not have come yet
        new = since & (steps > self._counted_to)
        if not new.any():
            return
        if not self._pieces:
            self._pieces.append((self.last, self.last_ns, self.cost_ns))
        late = steps[since & late_steps(np.where(since, waited, 0).astype(np.float64))]
        cost_ns = self.cost_ns + self._after_ns + int(waited[new].sum())
        if self._counted_to >= 0 and clock.skipped_ns:
            cost_ns += int(clock.skipped_ns * waited.sum() / max(clock.every * evidence.total_ns, 1))
        if len(late):
            gaps = np.diff(np.concatenate([[self.last], late[late > self.last]]))
            self.events += int(np.count_nonzero(gaps > clock.every * _APART))
            self.gap = max(self.gap, int(gaps.max(initial=0)))
            self.last, self.last_ns = int(late[-1]), clock.begin_ns(int(late[-1]) + 1)
            self._after_ns = int(waited[steps > self.last].sum())
        else:
            self._after_ns += int(waited[new].sum())
        self._after_ns = min(self._after_ns, cost_ns)
        self.cost_ns = cost_ns - self._after_ns
        self._counted_to = int(steps[new][-1])
        self._pieces.append((self.last, self.last_ns, self.cost_ns))
        step_ns = clock.every * float(evidence.step_ns[since].sum())
        self._shares.append(100 * float(waited[since].sum()) / max(step_ns, 1.0))
        self.ranks = window.expected

    def _reword(self, current: Verdict) -> None:
        """Take the newest verdict; of two stages or ranks of about equal cost the same one stays first."""
        mine = self.verdict
        self._turned = 0 if (current.stage, current.rank) == (mine.stage, mine.rank) else self._turned + 1
        if self._turned in (0, TURNS):
            self.verdict, self._turned = current, 0

    @property
    def recurs(self) -> bool:
        """Whether the finding is more than passing: late in a stretch of steps, or again and again."""
        return self.verdict.pattern != "transient" or self.events not in range(2, _RECURS)

    def held(self, clock: Clock, thresholds: Thresholds) -> bool:
        """Whether the finding has lasted long enough, and cost enough, to be named."""
        ns, steps = self.last_ns - self.began_ns, clock.timed(self.last - self.began) + 1
        lasted = thresholds.lasted(self.verdict.label, ns, steps) and self.recurs
        return lasted and self.cost_ns >= thresholds.hold_cost_s * 1e9

    def gone(self, clock: Clock, thresholds: Thresholds, *, named: bool) -> bool:
        """
        Whether no step has been late for as long as it takes to be named. A recurring finding (a checkpoint
        every 20 steps) is not gone while windows show it and, once it is `named`, while its late steps come
        at the same intervals.
        """
        hold_ns = thresholds.hold_of(self.verdict.label) * 1e9
        silent = int(clock.steps[-1]) - self.last
        if clock.now_ns - self.last_ns <= hold_ns or clock.timed(silent) <= thresholds.hold_steps:
            return False
        recurs = self.verdict.pattern == "transient" and self.shown
        return not recurs or (named and silent > _MISSES * self.gap)

    def cut(self, step: int) -> None:
        """End the finding before `step`."""
        while len(self._pieces) > 1 and self._pieces[-1][0] >= step:
            self._pieces.pop()
            self.last, self.last_ns, self.cost_ns = self._pieces[-1]
            self._after_ns = 0
        self.last = max(self.began, min(self.last, step - 1))

    def episode(self, *, goes_on: bool) -> Episode:
        mine, seconds = self.verdict, self.seconds
        return Episode(
            **{name: getattr(mine, name) for name in _SHARED},
            from_step=self.began,
            to_step=self.last,
            seconds=seconds,
            cost_s=self.cost_ns / 1e9,
            rank_hours=self.cost_ns * self.ranks / 3.6e12,
            cost_pct=100 * self.share,
            cost_range_pct=self.cost_range(),
            goes_on=goes_on,
        )

    @property
    def seconds(self) -> float:
        """Time from the first late step to the last, in s."""
        return max(self.last_ns - self.began_ns, 1) / 1e9

    def costed(self) -> Verdict:
        """Return the verdict with the cost of the whole episode, as a share of the episode's time."""
        range_pct = self.cost_range()
        mine = with_cost(self.verdict, self.cost_ns / 1e9, self.seconds, self.ranks, range_pct)
        return msgspec.structs.replace(mine, from_step=self.began, to_step=self.last)

    @property
    def share(self) -> float:
        """Cost as a share of the time of the finding, 0..1."""
        return min(1.0, self.cost_ns / max(self.last_ns - self.began_ns, 1))

    def typical_level(self) -> tuple[int, float]:
        """
        Return the pattern that it was found by (an index in PATTERNS), and its median excess over the
        windows.
        """
        places = [place for place, _ in self.levels]
        place = max(set(places), key=places.count)
        return place, float(np.median([level[index] for index, level in self.levels]))

    def cost_range(self) -> tuple[float, float] | None:
        if not self._shares:
            return None
        low, high = np.quantile(self._shares, (0.1, 0.9)).tolist()
        return low, high


_SHARED = (
    *("label", "stage", "stages", "rank", "ranks", "node", "nodes", "pattern", "confidence", "why", "next"),
)


class Recurring:
    """Findings of one kind that ended before they were named, added up over the run."""

    def __init__(self, track: FindingTrack) -> None:
        self.verdict = track.verdict
        self.began, self.began_ns = track.began, track.began_ns
        self.last, self.last_ns = track.last, track.last_ns
        self.ranks = track.ranks
        self.cost_ns = self.count = 0

    def add(self, track: FindingTrack, cost_ns: int) -> None:
        """Add one more occurrence."""
        self.last, self.last_ns = max(self.last, track.last), max(self.last_ns, track.last_ns)
        self.cost_ns, self.count = self.cost_ns + cost_ns, self.count + 1

    def episode(self) -> Episode:
        """Return the sum as an episode that was not named."""
        track = FindingTrack(self.verdict, self.began, self.began_ns)
        track.last, track.last_ns, track.ranks = self.last, self.last_ns, self.ranks
        track.cost_ns = self.cost_ns
        return msgspec.structs.replace(track.episode(goes_on=False), confidence="low", pattern="transient")


def _places(verdict: Verdict, window: Window) -> list[int]:
    """
    Return the indices in `window` of the named ranks. If no rank is named, return the
    indices of all ranks.
    """
    places = [place for place, rank in enumerate(window.ranks.tolist()) if rank in verdict.ranks]
    return places if verdict.ranks else list(range(len(window.ranks)))


def waited_ns(verdict: Verdict, evidence: Evidence) -> Int64:
    """Return by how much the cause that `verdict` names makes each step longer, ns (S,)."""
    window = evidence.window
    if verdict.meaning.names == "all":
        since = window.steps >= (verdict.from_step or 0)
        return np.where(since, (verdict.excess_pct or 0.0) / 100 * evidence.step_ns, 0).astype(np.int64)
    if verdict.label == "imbalance":
        return window.by_step(evidence.uneven_ns(*evidence.beside))
    places = tuple(_places(verdict, window))
    stages = dict.fromkeys(evidence.compared_in(STAGES.index(stage), places) for stage in verdict.stages)
    causes = [Cause(stage, places) for stage in stages]
    return window.by_step(evidence.waited_ns(*causes))


def contains(whole: Verdict, part: Verdict) -> bool:
    """Whether `whole` names what `part` names, and maybe more."""
    if not (part.meaning.names == whole.meaning.names == "ranks"):
        return part.label == whole.label  # which stage carries most of it differs between windows
    return same_ranks(part, whole) and part.stage in whole.stages


def alike(one: Verdict, other: Verdict) -> bool:
    """Whether one of the verdicts names what the other does, and maybe more."""
    return contains(one, other) or contains(other, one)


def overlap(one: Verdict, other: Verdict) -> bool:
    """Whether both verdicts may count the same late step. Only one of them may then count it."""
    if not (one.meaning.names == other.meaning.names == "ranks"):
        return one.label == other.label
    alike = not one.ranks or not other.ranks or same_ranks(one, other)
    return alike and not set(one.stages).isdisjoint(other.stages)


def may_share_steps(one: Verdict, other: Verdict) -> bool:
    """Whether both verdicts may count the same late step while it is not known which verdict is right."""
    return "none" in (one.meaning.names, other.meaning.names) or overlap(one, other)


def late_from(step: int, current: Verdict, evidence: Evidence, rest: Thresholds | None) -> int | None:
    """
    Return the first step from `step` on that is late by `current`; None if there is none.

    With `rest` given, the steps from there on must show the finding by themselves: it must cost `min_excess`
    of their time.
    """
    window = evidence.window
    since = window.steps >= step
    waited = np.where(since, waited_ns(current, evidence), 0)
    if rest is not None and waited.sum() < rest.min_excess * evidence.step_ns[since].sum():
        return None
    late = window.steps[since & late_steps(waited.astype(np.float64))]
    return int(late[0]) if len(late) else None


def level_of(evidence: Evidence) -> Float:
    """Return the largest excess in a window for each of PATTERNS (3,)."""
    return np.array([evidence.by_pattern[pattern].max() for pattern in PATTERNS])


def same_ranks(one: Verdict | Episode, other: Verdict | Episode) -> bool:
    """Whether two verdicts name at least one rank in common, or both name none."""
    return not set(one.ranks).isdisjoint(other.ranks) if one.ranks else not other.ranks
