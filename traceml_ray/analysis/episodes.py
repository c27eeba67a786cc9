"""
What is worth naming: a finding that lasts is an episode, with its begin, its end and its whole cost.

Windows come and go in a second; what a person is told has to hold. Time here is the job's own, counted
from its rows, so that a run is told of in the same way live and afterwards.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import numpy as np

from traceml_ray.analysis import notes
from traceml_ray.analysis.evidence import Evidence
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.track import (
    MAX_LEVELS,
    Clock,
    Episode,
    Track,
    kind_of,
    late_from,
    level_of,
    overlap,
)
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.window import Float, Window

FINDINGS = ("straggler", "ambiguous", "co_critical", "group_wide")
"""Labels that say what makes steps slow, and so have a cost."""
_MAX_EPISODES = 1000
_FACTS = ("to_step", "coverage", "window_steps", "suspects", "exposed_ms", "mean_step_ms")
"""What a verdict says of the window, whatever it names."""


class Brief(msgspec.Struct, frozen=True, kw_only=True):
    """What came and went without being named: how many findings, and what they cost together."""

    count: int = 0
    cost_s: float = 0.0


_KEPT: dict[str, Any] = {
    "brief": Brief,
    "since": int | None,
    "_over": list[Episode],
    "_calm": Verdict | None,
    "_judged_to": int | None,
    "_counted": list[tuple[Verdict, int]],
}


class Episodes:
    """
    Turns the findings of single windows into what stands: the verdict that a person is told.

    What is found is **named** once it has held for `hold_s` (`group_wide`: `hold_group_s`) and `hold_steps`,
    has made the job wait for `hold_cost_s`, and (of ranks) is above the run's own weather (`weather_quantile`
    of the windows before in which nobody was named). The name is taken back when no step has been late for as
    long. In between the verdict is what it was, with a note. `telemetry_limited` holds at once, other labels
    that name nobody after the same time.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        self.brief = Brief()
        self.since: int | None = None
        """The step from which on what stands has been true."""
        self.clock = Clock(thresholds)
        self._limits = thresholds
        self._over: list[Episode] = []
        self._named: Track | None = None
        self._candidates: list[Track] = []
        self._weather: deque[Float] = deque(maxlen=thresholds.weather_windows)
        self._calm: Verdict | None = None
        self._turning: tuple[int, int] | None = None
        """Step and time since which another label that names nobody is found."""
        self._judged_to: int | None = None
        self._before: int | None = None
        """The last step of the window judged last, and of the one before that."""
        self._counted: list[tuple[Verdict, int]] = []
        """What is over, named or not, and its last late step: windows go on showing these steps."""
        self._interrupted = False
        """Too little is seen to say whether what is named goes on."""

    @property
    def episodes(self) -> list[Episode]:
        """All so far, the costliest first."""
        now = [self._named.episode(goes_on=True)] if self._named else []
        return sorted([*self._over, *now], key=lambda episode: -episode.cost_s)

    @property
    def lost_s(self) -> float:
        """What all of them cost."""
        return sum(episode.cost_s for episode in self.episodes)

    @property
    def named(self) -> tuple[int, int, int | None]:
        """How many are over, how many were brief, and where the one that goes on began."""
        return len(self._over), self.brief.count, self._named.began if self._named else None

    @property
    def followed(self) -> tuple[int, ...]:
        """The ranks that are named, else those that have been found for longest."""
        return next((track.verdict.ranks for track in self._tracks()), ())

    def follows(self, label: str) -> bool:
        """Whether something of that label is named, or about to be."""
        return any(track.verdict.label == label for track in self._tracks())

    def state(self) -> dict[str, Any]:
        """Return what `restore` goes on from, in types that JSON has. The weather is not kept."""
        return {
            **{name: msgspec.to_builtins(getattr(self, name)) for name in _KEPT},
            "clock": self.clock.state(),
            "named": self._named and self._named.state(),
            "candidates": [track.state() for track in self._candidates],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where another left off. Raises what there is to raise where `state` is no state."""
        for name, kind in _KEPT.items():
            setattr(self, name, msgspec.convert(state[name], kind))
        self.clock.restore(state["clock"])
        self._named = Track.restored(state["named"]) if state["named"] else None
        self._candidates = [Track.restored(track) for track in state["candidates"]]

    def update(self, window: Window, verdict: Verdict, evidence: Evidence | None, *, counts: bool) -> Verdict:
        """
        Return what stands after the rules said `verdict` about `window`; `counts` once in a stride.

        The same window again changes nothing.
        """
        if len(window.ranks) and self.clock.advance(window):
            if evidence is not None and verdict.label != "telemetry_limited":
                self._sight(verdict, evidence, counts=counts)
                self._name(verdict)
            self._before, self._judged_to = self._judged_to, window.last_step
        return self._stands(window, verdict)

    def _tracks(self) -> list[Track]:
        return [*([self._named] if self._named else []), *self._candidates]

    def _sight(self, verdict: Verdict, evidence: Evidence, *, counts: bool) -> None:
        """Follow what is found, and forget what is gone."""
        found = verdict if verdict.label in FINDINGS else None
        full = counts and len(evidence.window.starts) >= len(self.clock.steps)
        shown = False
        for track in self._tracks():
            exact = found is not None and track.is_found(found)
            if exact or (found is not None and track.supports(found)):
                shown = True
                track.seen += counts
                track.exact += counts and exact
                track.levels += [(kind_of(verdict), level_of(evidence))] * full
                del track.levels[:-MAX_LEVELS]
                track.extend(evidence, self.clock, found if exact else None)
            elif track is self._named and track.lingers(evidence, self._limits):
                track.extend(evidence, self.clock, None)
            elif counts:
                track.missed += 1
        if found is not None and not any(track.is_found(found) for track in self._tracks()):
            begun = self._begin(found, evidence)
            if begun is not None:
                shown = True
                begun.seen = begun.exact = 1
                begun.levels += [(kind_of(verdict), level_of(evidence))] * full
                self._candidates.append(begun)
        if full and not shown and self._named is None:
            self._weather.append(level_of(evidence))
        self._forget()

    def _begin(self, found: Verdict, evidence: Evidence) -> Track | None:
        """
        Follow what has not been found before, from its first late step on.

        None where a window shows it only by steps that are counted already.
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
        now, step = self.clock.now_ns, int(self.clock.steps[-1])
        if self._named is not None and self._named.gone(step, now, self._limits):
            self._end(self._named)
        most = 1 / self._limits.hold_share - 1
        for track in list(self._candidates):
            if track.gone(step, now, self._limits) or track.missed > most * track.seen:
                self._drop(track)

    def _drop(self, track: Track) -> None:
        """Forget what was not named; of several that say nearly the same the costliest counts."""
        self._candidates.remove(track)
        self._counted.append((track.verdict, track.last))
        self._weather.extend(level for _, level in track.levels)
        cost_ns = max(track.cost_ns, track.outlived_ns)
        alike = [other for other in self._tracks() if overlap(other.verdict, track.verdict)]
        for other in alike:
            other.outlived_ns = max(other.outlived_ns, cost_ns)
        if not alike:
            self._add_brief(cost_ns / 1e9)

    def close(self) -> None:
        """Take the run as over: what has not been named will not be."""
        for track in list(self._candidates):
            self._drop(track)

    def _name(self, verdict: Verdict) -> None:
        """Name what has come to be worth it."""
        for track in self._candidates:
            if track.is_found(verdict) and 2 * track.exact >= track.seen and self._worth(track):
                if not self._replaces(track):
                    continue
                named = self._named
                if named is not None and _alike(named, track):  # the same episode, in other words
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
        Whether `track` may be named: for what says nearly the same only when found for as long, and in two of
        three windows.
        """
        named = self._named
        if named is None or not _alike(named, track):
            return True
        if 3 * track.exact < 2 * track.seen:
            return False
        step, now_ns = int(self.clock.steps[-1]), self.clock.now_ns
        since, since_ns = max(named.found, track.found), max(named.found_ns, track.found_ns)
        hold_ns = self._limits.hold_of(track.verdict.label) * 1e9
        return now_ns - since_ns >= hold_ns and step - since >= self._limits.hold_steps

    def _worth(self, track: Track) -> bool:
        if not track.held(self._limits):
            return False
        if len(self._weather) < self._limits.weather_least or not track.levels:
            return True
        if track.verdict.label == "group_wide":
            return True  # it is measured from a baseline, which has no such windows
        usual = np.quantile(list(self._weather), self._limits.weather_quantile, axis=0)
        above = sum(bool(level[kind] > usual[kind]) for kind, level in track.levels)
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

    def _stands(self, window: Window, verdict: Verdict) -> Verdict:
        """Return the verdict that a person is told."""
        blind = verdict.label == "telemetry_limited"
        if blind or self._named is None:
            stands = self._calm_verdict(window, verdict)
        else:
            if self._interrupted:
                self.since = (self._before or -1) + 1
            stands = self._naming(self._named, verdict)
        self._interrupted = blind and self._named is not None
        return msgspec.structs.replace(stands, lost_s=self.lost_s, elapsed_s=self.clock.now_ns / 1e9)

    def _naming(self, named: Track, verdict: Verdict) -> Verdict:
        """Return the verdict that names what is named, with what it has cost over all of its time."""
        episode = named.episode(goes_on=True)
        now_s = self.clock.now_ns / 1e9
        silent_s = now_s - named.last_ns / 1e9
        silent = notes.not_now(silent_s) if verdict.label not in FINDINGS and silent_s > 0 else ""
        each = notes.so_far(episode.seconds, episode.cost_s), silent, self._pending()
        share = (episode.cost_pct or 0.0) / 100
        return msgspec.structs.replace(
            named.verdict,
            **{name: getattr(verdict, name) for name in _FACTS},
            from_step=named.began,
            cost_pct=episode.cost_pct,
            cost_range_pct=episode.cost_range_pct,
            gpu_hours_per_hour=share * named.ranks,
            note="; ".join(filter(None, each)),
        )

    def _pending(self) -> str:
        """Say what is found, but not for long enough to be named."""
        longest: dict[tuple[int | None, str, bool], float] = {}
        drifts = [track for track in self._candidates if track.verdict.label == "group_wide"]
        drifts.sort(key=lambda track: -track.exact)
        for track in self._candidates:
            if track in drifts[1:]:
                continue  # of one slow-down a window may say the stage, and another the whole step
            which = track.verdict.rank, track.verdict.stage or "", track.verdict.rotating
            longest[which] = max(longest.get(which, 0.0), (track.last_ns - track.began_ns) / 1e9)
        return notes.pending([(*which, lasted_s) for which, lasted_s in longest.items() if lasted_s > 0])

    def _calm_verdict(self, window: Window, verdict: Verdict) -> Verdict:
        """Return the verdict that names nobody."""
        self._settle(window, verdict)
        assert self._calm is not None
        note = self._pending()
        if verdict.label == self._calm.label:
            return msgspec.structs.replace(verdict, note=note)
        facts = {name: getattr(verdict, name) for name in _FACTS}
        calm = msgspec.structs.replace(self._calm, **facts, from_step=window.first_step, note=note)
        if calm.label != "healthy":
            return calm
        why = notes.too_brief(self._limits.hold_of(verdict.label))
        return msgspec.structs.replace(calm, confidence="medium", why=why)

    def _settle(self, window: Window, verdict: Verdict) -> None:
        """Let another label that names nobody stand: `telemetry_limited` at once, others later."""
        known = self._calm is not None and "telemetry_limited" not in (verdict.label, self._calm.label)
        if known and verdict.label in FINDINGS:
            self._turning = None
        elif not known or self._turned(window, verdict):
            calm = verdict
            if verdict.label in FINDINGS:
                why = notes.too_early(verdict.label, self._limits.hold_of(verdict.label))
                facts = {name: getattr(verdict, name) for name in _FACTS}
                calm = Verdict(label="telemetry_limited", why=why, next="Wait.", **facts)
            if self._calm is not None and self._calm.label != calm.label:
                self.since = self._turning[0] if self._turning else (self._before or -1) + 1
            self._calm, self._turning = calm, None

    def _turned(self, window: Window, verdict: Verdict) -> bool:
        """Whether `verdict` has the label that stands, or has had its own for long enough."""
        assert self._calm is not None
        if verdict.label == self._calm.label:
            self._turning = None
            return True
        now, step = self.clock.now_ns, window.last_step or 0
        began, began_ns = self._turning = self._turning or (step, now)
        return now - began_ns >= self._limits.hold_s * 1e9 and step - began >= self._limits.hold_steps


def _alike(one: Track, other: Track) -> bool:
    """Whether one of them names what the other does, and maybe more."""
    return one.supports(other.verdict) or other.supports(one.verdict)
