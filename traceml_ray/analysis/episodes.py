"""
Which findings are named: one that lasts is an episode, with its beginning, its end and its whole cost.

A finding of a single window may be over within a second; a named one has lasted. Time is the job's own,
counted from its rows, so that a run is judged in the same way live and afterwards.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

from traceml_ray.analysis import notes
from traceml_ray.analysis.evidence import Evidence
from traceml_ray.analysis.labels import PATTERNS
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.track import (
    MAX_LEVELS,
    Clock,
    Episode,
    Track,
    late_from,
    level_of,
    overlap,
)
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.window import Float, Window

_MAX_EPISODES = 1000


class Brief(msgspec.Struct, frozen=True, kw_only=True):
    """How many findings were over before they were named, and their cost."""

    count: int = 0
    cost_s: float = 0.0


class Episodes:
    """
    Turns the findings of single windows into the verdict in effect.

    A finding is **named** once it has lasted `hold_s` (`group_wide`: `hold_group_s`) and `hold_steps`, has
    made the job wait for `hold_cost_s`, and (of ranks) is above the run's usual fluctuation (`usual_quantile`
    of the windows before in which no rank was named). The name is taken back when no step has been late for
    as long. In between the verdict stays as it was, with a note. Labels without a name change after the same
    time, except those that are shown `at_once`.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        self.brief = Brief()
        self.since: int | None = None
        """The first step of the verdict in effect."""
        self.clock = Clock(thresholds)
        self._limits = thresholds
        self._over: list[Episode] = []
        self._named: Track | None = None
        self._candidates: list[Track] = []
        self._usual: deque[Float] = deque(maxlen=thresholds.usual_windows)
        """`level_of` the newest windows in which no rank was named."""
        self._unnamed: Verdict | None = None
        """The verdict in effect while nothing is named."""
        self._turning: tuple[int, int] | None = None
        """Step and time since which windows have another label without a name."""
        self._judged_to: int | None = None
        self._before: int | None = None
        """The last step of the window judged last, and of the one before that."""
        self._counted: list[tuple[Verdict, int]] = []
        """Findings that are over, named or not, and their last late step: later windows contain it, too."""
        self._interrupted = False
        """Too few rows came to know whether the named finding continues."""

    @property
    def episodes(self) -> list[Episode]:
        """All episodes so far, the costliest first."""
        now = [self._named.episode(goes_on=True)] if self._named else []
        return sorted([*self._over, *now], key=lambda episode: -episode.cost_s)

    @property
    def lost_s(self) -> float:
        """Cost of all episodes so far."""
        return sum(episode.cost_s for episode in self.episodes)

    @property
    def named(self) -> tuple[int, int, int | None]:
        """How many episodes are over, how many findings were brief, and where the named one began."""
        return len(self._over), self.brief.count, self._named.began if self._named else None

    @property
    def named_for_ns(self) -> int | None:
        """How long ago what is named began, in the job's own time; None while nothing is named."""
        return self.clock.now_ns - self._named.began_ns if self._named else None

    @property
    def followed(self) -> tuple[int, ...]:
        """The ranks that are named, else those found first of the ones being followed."""
        return next((track.verdict.ranks for track in self._tracks()), ())

    @property
    def follows_all(self) -> bool:
        """Whether a slow-down of all ranks is named, or about to be."""
        return any(track.verdict.meaning.names == "all" for track in self._tracks())

    def update(self, window: Window, verdict: Verdict, evidence: Evidence | None, *, counts: bool) -> Verdict:
        """
        Return the verdict in effect after the `verdict` of the rules over `window`; `counts` once a stride.

        The same window again changes nothing.
        """
        if len(window.ranks) and self.clock.advance(window):
            if evidence is not None and not verdict.meaning.at_once:
                self._follow(verdict, evidence, counts=counts)
                self._name(verdict)
            self._before, self._judged_to = self._judged_to, window.last_step
        return self._in_effect(window, verdict)

    def _tracks(self) -> list[Track]:
        return [*([self._named] if self._named else []), *self._candidates]

    def _follow(self, verdict: Verdict, evidence: Evidence, *, counts: bool) -> None:
        """Continue the findings that the window shows, begin a new one, and drop those that are gone."""
        found = verdict if verdict.meaning.kind == "finding" else None
        full = counts and len(evidence.window.starts) >= len(self.clock.steps)
        level, usual = level_of(evidence), True
        shown = [(PATTERNS.index(verdict.pattern or "lasting"), level)] * full
        for track in self._tracks():
            exact = found is not None and track.is_found(found)
            if exact or (found is not None and track.supports(found)):
                usual = False
                track.seen += counts
                track.exact += counts and exact
                track.levels += shown
                del track.levels[:-MAX_LEVELS]
                track.extend(evidence, self.clock, found if exact else None)
            elif track is self._named and track.lingers(evidence, self._limits):
                track.extend(evidence, self.clock, None)
            elif counts:
                track.missed += 1
        if found is not None and not any(track.is_found(found) for track in self._tracks()):
            begun = self._begin(found, evidence)
            if begun is not None:
                usual = False
                begun.seen = begun.exact = 1
                begun.levels += shown
                self._candidates.append(begun)
        if full and usual and self._named is None:
            self._usual.append(level)
        self._forget()

    def _begin(self, found: Verdict, evidence: Evidence) -> Track | None:
        """
        Return a track of what has not been found before, from its first late step on.

        None where the window shows it only by steps that are counted already.
        """
        first, last = int(self.clock.steps[0]), int(self.clock.steps[-1])
        self._counted = [each for each in self._counted if each[1] >= first]
        counted_to = max((to for other, to in self._counted if overlap(other, found)), default=-1)
        least = max(found.from_step or 0, first, counted_to + 1)
        if self._judged_to is not None and least == first:
            least = max(least, self._judged_to + 1)
        late = late_from(least, found, evidence, self._limits if counted_to >= first else None)
        if late is None:
            return None
        track = Track(found, late, self.clock.begin_ns(late))
        track.found, track.found_ns = last, self.clock.now_ns
        track.extend(evidence, self.clock, found)
        return track

    def _forget(self) -> None:
        if self._named is not None and self._named.gone(self.clock, self._limits):
            self._end(self._named)
        most = 1 / self._limits.hold_share - 1
        for track in list(self._candidates):
            if track.gone(self.clock, self._limits) or track.missed > most * track.seen:
                self._drop(track)

    def _drop(self, track: Track) -> None:
        """Drop what was not named; of several that overlap only the costliest counts as brief."""
        self._candidates.remove(track)
        self._counted.append((track.verdict, track.last))
        self._usual.extend(level for _, level in track.levels)
        cost_ns = max(track.cost_ns, track.outlived_ns)
        alike = [other for other in self._tracks() if overlap(other.verdict, track.verdict)]
        for other in alike:
            other.outlived_ns = max(other.outlived_ns, cost_ns)
        if not alike:
            self._add_brief(cost_ns / 1e9)

    def close(self) -> None:
        """End the run: what has not been named will not be."""
        for track in list(self._candidates):
            self._drop(track)

    def _name(self, verdict: Verdict) -> None:
        """Name the first candidate that has lasted and cost enough, if `verdict` shows it."""
        for track in self._candidates:
            if track.is_found(verdict) and 2 * track.exact >= track.seen and self._worth(track):
                if not self._replaces(track):
                    continue
                named = self._named
                if named is not None and _alike(named, track):  # the same episode under another label
                    named.verdict, track = track.verdict, named
                elif named is not None:
                    self._give_way(named, track)
                self._candidates = [each for each in self._candidates if not each.supports(track.verdict)]
                self._named, self.since = track, track.began
                track.found, track.found_ns = int(self.clock.steps[-1]), self.clock.now_ns
                return

    def _give_way(self, named: Track, track: Track) -> None:
        """End what is named for `track`, which counts the steps that it explains better."""
        if overlap(named.verdict, track.verdict):
            named.cut(track.began)
        if named.cost_ns:
            self._end(named)

    def _replaces(self, track: Track) -> bool:
        """
        Whether `track` may be named. In place of one that names nearly the same only if it was found for as
        long, and in two of three windows.
        """
        named = self._named
        if named is None or not _alike(named, track):
            return True
        if 3 * track.exact < 2 * track.seen:
            return False
        step, now_ns = int(self.clock.steps[-1]), self.clock.now_ns
        since, since_ns = max(named.found, track.found), max(named.found_ns, track.found_ns)
        steps = self.clock.timed(step - since)
        return self._limits.lasted(track.verdict.label, now_ns - since_ns, steps)

    def _worth(self, track: Track) -> bool:
        if not track.held(self.clock, self._limits):
            return False
        if len(self._usual) < self._limits.usual_least or not track.levels:
            return True
        if track.verdict.meaning.names == "all":
            return True  # measured from a baseline, which has no such windows
        usual = np.quantile(list(self._usual), self._limits.usual_quantile, axis=0)
        above = sum(bool(level[at] > usual[at]) for at, level in track.levels)
        return 2 * above > len(track.levels)

    def _end(self, track: Track) -> None:
        self._over.append(track.episode(goes_on=False))
        self._counted.append((track.verdict, track.last))
        self._candidates = [each for each in self._candidates if not overlap(each.verdict, track.verdict)]
        self.since = track.last + 1
        self._named = None
        if len(self._over) > _MAX_EPISODES:
            least = min(self._over, key=lambda episode: episode.cost_s)
            self._over.remove(least)
            self._add_brief(least.cost_s)

    def _add_brief(self, cost_s: float) -> None:
        self.brief = Brief(count=self.brief.count + 1, cost_s=self.brief.cost_s + cost_s)

    def _in_effect(self, window: Window, verdict: Verdict) -> Verdict:
        at_once = verdict.meaning.at_once
        if at_once or self._named is None:
            effective = self._without_name(window, verdict)
        else:
            if self._interrupted:
                self.since = (self._before or -1) + 1
            effective = self._with_name(self._named, verdict)
        self._interrupted = at_once and self._named is not None
        return msgspec.structs.replace(effective, lost_s=self.lost_s, elapsed_s=self.clock.now_ns / 1e9)

    def _with_name(self, named: Track, verdict: Verdict) -> Verdict:
        """Return the verdict that names `named`, with the cost of the whole episode."""
        episode = named.episode(goes_on=True)
        now_s = self.clock.now_ns / 1e9
        silent_s = now_s - named.last_ns / 1e9
        silent = notes.not_now(silent_s) if verdict.meaning.kind != "finding" and silent_s > 0 else ""
        each = notes.so_far(episode.seconds, episode.cost_s), silent, self._pending()
        share = (episode.cost_pct or 0.0) / 100
        return msgspec.structs.replace(
            named.verdict,
            **verdict.of_window,
            from_step=named.began,
            cost_pct=episode.cost_pct,
            cost_range_pct=episode.cost_range_pct,
            rank_hours_per_hour=share * named.ranks,
            note="; ".join(filter(None, each)),
        )

    def _pending(self) -> str:
        """Return a note on what is found, but has not lasted long enough to be named."""
        longest: dict[tuple[int | None, str | None], tuple[float, Verdict]] = {}
        drifts = [track for track in self._candidates if track.verdict.meaning.names == "all"]
        drifts.sort(key=lambda track: -track.exact)
        for track in self._candidates:
            if track in drifts[1:]:
                continue  # of one slow-down one window may show the stage, and another the whole step
            which, lasted_s = (
                (track.verdict.rank, track.verdict.stage),
                (track.last_ns - track.began_ns) / 1e9,
            )
            if lasted_s > longest.get(which, (0.0,))[0]:
                longest[which] = lasted_s, track.verdict
        return notes.pending([*longest.values()])

    def _without_name(self, window: Window, verdict: Verdict) -> Verdict:
        """Return the verdict that names no rank."""
        unnamed, note = self._settled(window, verdict), self._pending()
        if verdict.label == unnamed.label:
            return msgspec.structs.replace(verdict, note=note)
        why, confidence = unnamed.why, unnamed.confidence
        if unnamed.label == "healthy":
            why, confidence = notes.too_brief(self._limits.hold_of(verdict.label)), "medium"
        return msgspec.structs.replace(
            unnamed,
            **verdict.of_window,
            from_step=window.first_step,
            why=why,
            confidence=confidence,
            note=note,
        )

    def _settled(self, window: Window, verdict: Verdict) -> Verdict:
        """Return the verdict without a name; another label replaces it once it has lasted, or at once."""
        before, finding = self._unnamed, verdict.meaning.kind == "finding"
        if before is not None and not (verdict.meaning.at_once or before.meaning.at_once):
            if finding:
                self._turning = None
            if finding or not self._turned(window, verdict, before):
                return before
        after = verdict
        if finding:
            why = notes.too_early(verdict, self._limits.hold_of(verdict.label))
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


def _alike(one: Track, other: Track) -> bool:
    """Whether one of them names what the other does, and maybe more."""
    return one.supports(other.verdict) or other.supports(one.verdict)
