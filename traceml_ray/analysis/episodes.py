"""
Decides which findings are named. A finding that lasts is an episode, with its beginning, its end and its
whole cost.

A finding of a single window may be over within a second; a named one has lasted. Time is the job's own time,
counted from its rows, so a run is judged in the same way live and afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from traceml_ray.analysis.evidence import Evidence
from traceml_ray.analysis.labels import PATTERNS
from traceml_ray.analysis.lasting import PastSteps
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.track import (
    MAX_LEVELS,
    Clock,
    Episode,
    FindingTrack,
    Recurring,
    alike,
    late_from,
    level_of,
    may_share_steps,
    overlap,
    with_suspects,
)
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.watching import (
    Watch,
    few_peers,
    lacking,
    more,
    not_now,
    pending,
    so_far,
    too_brief,
    too_early,
    without_window,
)
from traceml_ray.analysis.window import Float, Window

_MAX_EPISODES = 1000
_MAX_PASSED = 100
_MAX_CANDIDATES = 16
"""Largest number of findings that are followed at a time. If there are more, the costliest are kept."""
MAX_ALSO = 8
"""Largest number of findings listed beside the headline. Further ones are only counted."""
_KEEPS = 0.9
"""The headline stays while it costs at least this share of the costliest finding."""


class Brief(msgspec.Struct, frozen=True, kw_only=True):
    """Findings that ended before they were named."""

    count: int = 0
    """Number of these findings."""
    cost_s: float = 0.0
    """Cost of these findings together (s)."""


class AtEnd(NamedTuple):
    """A finding of the last steps of a run that was not named."""

    verdict: Verdict
    began: int
    last: int
    cost_s: float


def findings_of(verdict: Verdict) -> list[Verdict]:
    """Return all findings of a window, the headline first."""
    alone = msgspec.structs.replace(verdict, also=()) if verdict.also else verdict
    return [one for one in (alone, *verdict.also) if one.meaning.kind == "finding"]


class Episodes:
    """
    Derives the verdict in effect from the findings of single windows.

    A finding is **named** once it has lasted `hold_s` (`group_wide`: `hold_group_s`) and `hold_steps`, has
    made the job wait for `hold_cost_s`, and (if it names ranks) is above the run's usual fluctuation
    (`usual_quantile` of the earlier windows in which no rank was named). The name is withdrawn when no step
    has been late for the same time. Findings that differ in rank or stage are named together: the headline is
    the one that costs the largest share of its time, the others are its `also`. Until then the verdict stays
    as it was, with a note. A label without a name changes after `hold_s`, except for labels that are shown
    `at_once`. `watching` too is shown after `hold_s`: for a finding that has lasted that long without meeting
    the other conditions of a name.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        self.brief = Brief()
        self.since: int | None = None
        """The first step of the verdict in effect."""
        self.clock = Clock(thresholds)
        self.passed: list[Episode] = []
        """Episodes that were watched for long, but not named."""
        self.recurring: list[Recurring] = []
        """Findings that ended before they were named, by cause."""
        self.at_end: list[AtEnd] = []
        """Findings that were being followed when the run ended, see `close`."""
        self._limits = thresholds
        self._over: list[Episode] = []
        self._named: list[FindingTrack] = []
        """Tracks of the named findings, the headline first."""
        self._candidates: list[FindingTrack] = []
        self._watches: list[Watch] = []
        self._watched: Watch | None = None
        """Track of the watched finding that is in effect."""
        self._usual: deque[Float] = deque(maxlen=thresholds.usual_windows)
        """`level_of` each of the newest windows in which no rank was named."""
        self._unnamed: Verdict | None = None
        """The verdict in effect while nothing is named or watched."""
        self._turning: tuple[int, int] | None = None
        """Step and time since which windows have another label that names nothing."""
        self._judged_to: int | None = None
        self._before: int | None = None
        """Last step of the window judged last, and of the window before it."""
        self._counted: list[tuple[Verdict, int]] = []
        """
        Findings that ended, named or not, each with its last late step. Later windows still contain these
        steps.
        """
        self._interrupted = False
        """Whether too few rows came to know if the named finding continues."""
        self._ranks = 1
        self._steps = 0
        """Number of steps of the run by which chance is measured."""

    @property
    def episodes(self) -> list[Episode]:
        """All episodes so far, the costliest first."""
        now = [track.episode(goes_on=True) for track in self._named]
        return sorted([*self._over, *now], key=lambda episode: -episode.cost_s)

    @property
    def lost_s(self) -> float:
        """Cost of all episodes so far."""
        return sum(episode.cost_s for episode in self.episodes)

    @property
    def named(self) -> tuple[int, int, list[int]]:
        """Return how many episodes ended, how many findings were brief, and where the named ones began."""
        return len(self._over), self.brief.count, [track.began for track in self._named]

    def named_for_ns(self, step: int) -> int | None:
        """
        Return how long ago the finding that is named since `step` began, in ns of the job's time. None if
        there is no such finding.
        """
        began = [track.began_ns for track in self._named if track.began == step]
        return self.clock.now_ns - min(began) if began else None

    @property
    def followed(self) -> tuple[int, ...]:
        """Named ranks. If no rank is named, the ranks of the oldest candidate."""
        tracks = self._named or self._candidates[:1]
        return tuple(sorted({rank for track in tracks for rank in track.verdict.ranks}))

    @property
    def follows_all(self) -> bool:
        """Whether a slow-down of all ranks is named, or about to be."""
        return any(track.verdict.meaning.names == "all" for track in self._tracks())

    def update(
        self,
        window: Window,
        verdict: Verdict,
        evidence: Evidence | None,
        *,
        counts: bool,
        maybe: Verdict | None = None,
        past: PastSteps | None = None,
    ) -> Verdict:
        """
        Return the verdict in effect after the `verdict` of the rules over `window`. `counts` is True once per
        stride.

        `maybe` is a finding of the window that is followed, but not named. `past` has the steps by which
        chance is measured. Calling it again with the same window changes nothing.
        """
        if len(window.ranks) and self.clock.advance(window):
            if evidence is not None and not verdict.meaning.at_once:
                findings = self._beside_named(findings_of(verdict))
                self._ranks = window.expected
                self._steps = len((past or PastSteps()).then(evidence))
                self._follow([*findings, *([maybe] if maybe else [])], evidence, counts=counts)
                self._name(findings)
                self._order()
                self._watch(findings, evidence, past, counts=counts)
            self._before, self._judged_to = self._judged_to, window.last_step
        return self._in_effect(window, verdict)

    def _beside_named(self, findings: Sequence[Verdict]) -> list[Verdict]:
        """Return the findings; without a slow-down of all ranks while a late rank explains it."""
        if not any(track.verdict.meaning.names == "ranks" for track in self._named):
            return [*findings]
        return [finding for finding in findings if finding.meaning.names != "all"]

    def _tracks(self) -> list[FindingTrack]:
        return [*self._named, *self._candidates]

    def _follow(self, findings: Sequence[Verdict], evidence: Evidence, *, counts: bool) -> None:
        """Continue the findings that the window shows, begin new ones, and drop those that ended."""
        full = counts and len(evidence.window.starts) >= len(self.clock.steps)
        level, usual = level_of(evidence), True
        for track in self._tracks():
            exact = next((finding for finding in findings if track.matches(finding)), None)
            shown = exact or next((finding for finding in findings if track.supports(finding)), None)
            track.shown = shown is not None
            if shown is not None:
                usual = False
                track.seen += counts
                track.exact += counts and exact is not None
                track.levels += [(PATTERNS.index(shown.pattern or "lasting"), level)] * full
                del track.levels[:-MAX_LEVELS]
                track.extend(evidence, self.clock, exact)
            elif track in self._named and track.lingers(evidence, self._limits):
                track.shown = True
                track.extend(evidence, self.clock, None)
            elif counts:
                track.missed += 1
        for finding in findings:
            if any(track.matches(finding) for track in self._tracks()):
                continue
            begun = self._begin(finding, evidence)
            if begun is not None:
                usual = False
                begun.seen = begun.exact = 1
                begun.levels += [(PATTERNS.index(finding.pattern or "lasting"), level)] * full
                self._candidates.append(begun)
        if full and usual and not self._named:
            self._usual.append(level)
        self._forget()

    def _begin(self, verdict: Verdict, evidence: Evidence) -> FindingTrack | None:
        """
        Return a new track for a finding, from its first late step on.

        None if the window shows it only by steps that are already counted.
        """
        first, last = int(self.clock.steps[0]), int(self.clock.steps[-1])
        self._counted = [pair for pair in self._counted if pair[1] >= first]
        counted_to = max((to for other, to in self._counted if may_share_steps(other, verdict)), default=-1)
        least = max(verdict.from_step or 0, first, counted_to + 1)
        if self._judged_to is not None and least == first:
            least = max(least, self._judged_to + 1)
        late = late_from(least, verdict, evidence, self._limits if counted_to >= first else None)
        if late is None:
            return None
        track = FindingTrack(verdict, late, self.clock.begin_ns(late))
        track.detected, track.detected_ns = last, self.clock.now_ns
        track.extend(evidence, self.clock, verdict)
        return track

    def _forget(self) -> None:
        for track in [one for one in self._named if one.gone(self.clock, self._limits, named=True)]:
            self._end(track)
        most = 1 / self._limits.hold_share - 1
        for track in list(self._candidates):
            if track.gone(self.clock, self._limits, named=False) or track.missed > most * track.seen:
                self._drop(track)
        while len(self._candidates) > _MAX_CANDIDATES:
            self._drop(min(self._candidates, key=lambda track: track.cost_ns))

    def _drop(self, track: FindingTrack) -> None:
        """Drop candidates that were not named. Of several that overlap only the costliest counts as brief."""
        self._candidates.remove(track)
        self._counted.append((track.verdict, track.last))
        self._usual.extend(level for _, level in track.levels)
        cost_ns = max(track.cost_ns, track.outlived_ns)
        others = [other for other in self._tracks() if may_share_steps(other.verdict, track.verdict)]
        for other in others:
            other.outlived_ns = max(other.outlived_ns, cost_ns)
        if not others:
            self._add_brief(cost_ns / 1e9)
            if not any(watch.is_of(track.verdict) for watch in self._watches if watch.long):
                self._recur(track, cost_ns)
            for watch in self._watches:
                if watch.is_of(track.verdict):
                    watch.drop(cost_ns)

    def _recur(self, track: FindingTrack, cost_ns: int) -> None:
        """Add a finding that was not named to the earlier ones of the same kind."""
        mine = track.verdict
        if mine.meaning.names != "ranks" or not mine.ranks:
            return
        known = next(
            (
                one
                for one in self.recurring
                if (one.verdict.stage, one.verdict.ranks) == (mine.stage, mine.ranks)
            ),
            None,
        )
        if known is None:
            self.recurring.append(known := Recurring(track))
        known.add(track, cost_ns)
        if len(self.recurring) > _MAX_PASSED:
            self.recurring.remove(min(self.recurring, key=lambda one: one.cost_ns))

    def close(self) -> None:
        """End the run: findings that have not been named stay unnamed."""
        self.at_end = [
            AtEnd(track.verdict, track.began, track.last, track.cost_ns / 1e9)
            for track in sorted(self._candidates, key=lambda track: -track.cost_ns)
        ]
        for watch in self._watches:
            self._pass(watch, named=False)
        for track in list(self._candidates):
            self._drop(track)
        self._watches = []

    def _name(self, findings: Sequence[Verdict]) -> None:
        """Name the candidates that have lasted and cost enough, if one of `findings` shows them."""
        for track in sorted(self._candidates, key=lambda track: -track.cost_ns):
            exact = any(track.matches(finding) for finding in findings) and 2 * track.exact >= track.seen
            if track in self._candidates and exact and self._worth(track) and self._replaces(track):
                self._take_name(track)

    def _take_name(self, track: FindingTrack) -> None:
        """Give `track` the name: replace the track that names nearly the same, or stand beside the others."""
        same = [named for named in self._named if alike(named.verdict, track.verdict)]
        explained = "all" if track.verdict.meaning.names == "ranks" else None
        for named in list(self._named):
            shared = overlap(named.verdict, track.verdict) or named.verdict.meaning.names == explained
            if named not in same[:1] and shared:
                self._give_way(named, track)
        self._candidates = [
            one
            for one in self._candidates
            if one is not track and not one.supports(track.verdict) and one.verdict.meaning.names != explained
        ]
        if same:  # the same episode under another label
            same[0].verdict, track = track.verdict, same[0]
        else:
            self._named.append(track)
        track.detected, track.detected_ns = int(self.clock.steps[-1]), self.clock.now_ns
        if track is self._named[0]:
            self.since = track.began

    def _give_way(self, named: FindingTrack, track: FindingTrack) -> None:
        """End the named tracks that overlap `track`, which explains their steps better."""
        named.cut(track.began)
        if named.cost_ns:
            self._end(named)
        else:
            self._named.remove(named)

    def _replaces(self, track: FindingTrack) -> bool:
        """
        Whether `track` may be named. If it replaces a track that names nearly the same, it must have been
        found for as long, and in two of three windows.
        """
        same = [named for named in self._named if alike(named.verdict, track.verdict)]
        if not same:
            return True
        if 3 * track.exact < 2 * track.seen:
            return False
        step, now_ns = int(self.clock.steps[-1]), self.clock.now_ns
        since = max(track.detected, *(named.detected for named in same))
        since_ns = max(track.detected_ns, *(named.detected_ns for named in same))
        steps = self.clock.timed(step - since)
        return self._limits.lasted(track.verdict.label, now_ns - since_ns, steps)

    def _worth(self, track: FindingTrack) -> bool:
        if not track.held(self.clock, self._limits) or self._few_peers(track.verdict):
            return False
        usual = self._usual_level(track.verdict)
        if usual is None or not track.levels:
            return True
        above = sum(bool(level[index] > usual[index]) for index, level in track.levels)
        return 2 * above > len(track.levels)

    def _few_peers(self, verdict: Verdict) -> bool:
        """Whether there are too few other ranks and too few steps of the run to tell what is usual."""
        return few_peers(verdict, self._ranks, self._steps, self._limits)

    def _usual_level(self, verdict: Verdict) -> Float | None:
        """
        Return the run's usual fluctuation for each of PATTERNS (3,). None if it is not
        known, or not used.
        """
        if len(self._usual) < self._limits.usual_least or verdict.meaning.names == "all":
            return None  # what is measured from a baseline has no such windows
        level: Float = np.quantile(list(self._usual), self._limits.usual_quantile, axis=0)
        return level

    def _order(self) -> None:
        """
        Put the headline first: the finding that costs most of its time, among those that the newest windows
        show if any.
        """
        if not self._named:
            return
        before = self._named[0]
        self._named.sort(key=lambda track: (track.shown, track.share), reverse=True)
        first = self._named[0]
        if first is not before and before.shown and before.share >= _KEEPS * first.share:
            self._named.remove(before)
            self._named.insert(0, before)
        elif first is not before:
            self.since = first.began if first.detected_ns == self.clock.now_ns else int(self.clock.steps[-1])

    def _end(self, track: FindingTrack) -> None:
        self._over.append(track.episode(goes_on=False))
        self._counted.append((track.verdict, track.last))
        self._candidates = [one for one in self._candidates if not overlap(one.verdict, track.verdict)]
        if track is self._named[0]:
            self.since = track.last + 1
        self._named.remove(track)
        if len(self._over) > _MAX_EPISODES:
            least = min(self._over, key=lambda episode: episode.cost_s)
            self._over.remove(least)
            self._add_brief(least.cost_s)

    def _add_brief(self, cost_s: float) -> None:
        self.brief = Brief(count=self.brief.count + 1, cost_s=self.brief.cost_s + cost_s)

    def _watch(
        self, findings: Sequence[Verdict], evidence: Evidence, past: PastSteps | None, *, counts: bool
    ) -> None:
        """Follow the causes that are not named, and choose the watched one that is in effect."""
        named = [track.verdict for track in self._named]
        for watch in self._watches:
            watch.observe(findings, evidence, past, self._limits, counts=counts)
            watch.follow(self._candidates)
        for watch in list(self._watches):
            is_named = any(map(watch.is_of, named))
            followed = any(watch.is_of(track.verdict) for track in self._candidates)
            over = watch.gone(self.clock, self._limits) or watch.rare(self._limits)
            if is_named or (over and not followed):  # else its cost is not known yet
                self._watches.remove(watch)
                self._pass(watch, named=is_named)
        for track in self._candidates:
            known = [*named, *(watch.verdict for watch in self._watches)]
            shown = any(alike(track.verdict, finding) for finding in findings)
            if shown and not any(alike(track.verdict, one) for one in known):
                self._watches.append(Watch(track))
                self._watches[-1].follow(self._candidates)
        before = self._watched
        long = [watch for watch in self._watches if watch.lasts(self.clock, self._limits)]
        for watch in long:
            watch.long = True
        long = [watch for watch in long if not watch.gone(self.clock, self._limits)]
        if named:
            self._watched = None
        elif long:
            self._watched = max(long, key=lambda watch: watch.cost_ns)
            if before is None:
                self.since = max(self._watched.began, self.since or 0)
        elif before is not None and before.gone(self.clock, self._limits):
            self._watched = None
            self.since = (self._judged_to or -1) + 1

    def _pass(self, watch: Watch, *, named: bool) -> None:
        """
        Record a track that was watched for long and has ended, or is `named` now: the run has lost time to
        it.
        """
        episode = watch.passed(self._ranks, named=named)
        ns, steps = episode.seconds * 1e9, self.clock.timed(watch.last - watch.began) + 1
        if (
            watch.long
            and self._limits.lasted(episode.label, ns, steps)
            and episode.cost_s >= self._limits.hold_cost_s
        ):
            self.passed.append(episode)
            if len(self.passed) > _MAX_PASSED:
                self.passed.remove(min(self.passed, key=lambda one: one.cost_s))

    def _in_effect(self, window: Window, verdict: Verdict) -> Verdict:
        at_once = verdict.meaning.at_once
        if at_once or not self._named:
            effective = self._without_name(window, verdict)
        else:
            if self._interrupted:
                self.since = (self._before or -1) + 1
            effective = self._with_name(verdict)
        self._interrupted = at_once and bool(self._named)
        return msgspec.structs.replace(effective, lost_s=self.lost_s, elapsed_s=self.clock.now_ns / 1e9)

    def _with_name(self, verdict: Verdict) -> Verdict:
        """Return the headline with the cost of its whole episode, and the other named findings beside it."""
        first, *others = self._named
        others.sort(key=lambda track: -track.share)
        silent_s = (self.clock.now_ns - first.last_ns) / 1e9
        parts = (
            so_far(first.seconds, first.cost_ns / 1e9),
            not_now(silent_s) if silent_s > 0 and not first.shown else "",
            more(len(others) - MAX_ALSO),
            pending(self._candidates, None),
        )
        beside = (without_window(track.costed()) for track in others[:MAX_ALSO])
        headline = msgspec.structs.replace(first.costed(), **verdict.of_window, from_step=first.began)
        note = "; ".join(filter(None, parts))
        return with_suspects(msgspec.structs.replace(headline, also=tuple(beside), note=note))

    def _without_name(self, window: Window, verdict: Verdict) -> Verdict:
        """Return the verdict that names no rank."""
        young = self._unnamed is None or self._unnamed.meaning.at_once
        unnamed = self._unnamed_in_effect(window, verdict)
        watch = self._watched
        if watch is None and young:  # nothing was said of the run that could stay as it was
            watch = max(self._watches, key=lambda one: one.cost_ns, default=None)
        if watch is not None and not verdict.meaning.at_once:
            few = self._steps if self._few_peers(watch.verdict) else None
            usual = self._usual_level(watch.verdict)
            lacks = lacking(watch, self._candidates, usual, self.clock, self._limits, few_steps=few)
            early = watch.in_effect(verdict, lacks, self.clock, self._ranks)
            silent = "" if watch.shown else not_now((self.clock.now_ns - watch.last_ns) / 1e9)
            note = "; ".join(filter(None, (silent, pending(self._candidates, watch))))
            return msgspec.structs.replace(early, note=note)
        note = pending(self._candidates, None)
        if verdict.label == unnamed.label:
            return msgspec.structs.replace(verdict, note=note)
        why, confidence = unnamed.why, unnamed.confidence
        if unnamed.label == "healthy":
            why, confidence = too_brief(self._limits.hold_s), "medium"
        return msgspec.structs.replace(
            unnamed,
            **verdict.of_window,
            from_step=window.first_step,
            why=why,
            confidence=confidence,
            note=note,
        )

    def _unnamed_in_effect(self, window: Window, verdict: Verdict) -> Verdict:
        """Return the verdict without a name; another label replaces it once it has lasted, or at once."""
        before, finding = self._unnamed, verdict.meaning.kind == "finding"
        if before is not None and not (verdict.meaning.at_once or before.meaning.at_once):
            if finding:
                self._turning = None
            if finding or not self._turned(window, verdict, before):
                return before
        after = verdict
        if finding:
            why = too_early(verdict, self._limits.hold_of(verdict.label))
            after = Verdict(label="telemetry_limited", why=why, next="Wait.", **verdict.of_window)
        if before is not None and before.label != after.label:
            self.since = self._turning[0] if self._turning else (self._before or -1) + 1
        self._unnamed, self._turning = after, None
        return after

    def _turned(self, window: Window, verdict: Verdict, before: Verdict) -> bool:
        """Whether `verdict` has the label of `before`, or has had its own for long enough."""
        if verdict.label == before.label:
            self._turning = None
            return True
        now, step = self.clock.now_ns, window.last_step or 0
        began, began_ns = self._turning = self._turning or (step, now)
        return self._limits.lasted(verdict.label, now - began_ns, self.clock.timed(step - began))
