"""
Sentences about findings that are not named yet: since when they exist, their cost, and the condition that is
not met.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from traceml_ray.analysis.evidence import Evidence
from traceml_ray.analysis.lasting import PastSteps, doubt
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.track import Clock, Episode, FindingTrack, alike
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.window import Float
from traceml_ray.stages import STAGES
from traceml_ray.text import count, duration, listed, ranks, share, unit

_NODES = 2
"""Largest number of nodes listed beside their ranks."""


def over_the_run(
    late: Sequence[int], stages: Sequence[str], all_ranks: bool, taken: float, cost: float
) -> tuple[str, str]:
    """
    Describe the share of the run (0..1) in which the `late` ranks are late in `stages`, and what fixing it
    saves.
    """
    what, verb = _listed(stages) or "the whole step", "is" if len(late) == 1 else "are"
    who = f"{ranks(late)} {verb} late" if late else "ranks are late in turn"
    seen = f"{what} is slower than the baseline" if all_ranks else f"{who} out of {what}"
    return f"In {share(taken)} of the run {seen}.", f"Fixing that saves {share(cost)} of the run."


def last_steps(findings: Sequence[tuple[Verdict, int, float]], elapsed_s: float) -> str:
    """
    Return the findings of the last steps of a run that were too brief to be named: each with its number of
    steps, and its cost (s).
    """
    parts = [
        f"{_what(verdict)} in the last {count(steps, 'step')}: {duration(cost_s)}, "
        f"{share(cost_s / max(elapsed_s, 1e-9))} of the run"
        for verdict, steps, cost_s in findings[:2]
    ]
    return "; ".join(parts)


def passing(strongest: str) -> str:
    """Explain that the finding over the whole run ended too early for a rank to be named."""
    return f"No rank is late for long. Once: {strongest}"


def was_named(times: int, cost_s: float, worst: Verdict, first: int, last: int) -> str:
    """
    Explain that causes were named in a run that is healthy as a whole. `worst` was named in
    these steps.
    """
    often = "once" if times == 1 else f"{times:,} times"
    which = f"{_what(worst)} in steps {first:,}–{last:,}"
    return f"a cause was named {often}, which cost {duration(cost_s)} in all ({which})"


def pending_sentence(findings: Sequence[tuple[float, Verdict]]) -> str:
    """
    Describe the findings that are not named yet. `findings` are pairs of the time for which a finding was
    seen (s), and its verdict.
    """
    return "; ".join(f"{_what(verdict)} for {duration(lasted_s)}" for lasted_s, verdict in findings[:2])


def _what(verdict: Verdict) -> str:
    """Describe a finding in a few words: "rank 1 late in `data`", "whole step slower"."""
    stages = _listed(verdict.stages)
    what = f"{ranks(verdict.ranks)} late" if verdict.ranks else "ranks late in turn"
    if verdict.meaning.names == "all":
        what = "slower" if stages else "whole step slower"
    return what + (f" in {stages}" if stages else "")


def _listed(stages: Sequence[str]) -> str:
    return listed([f"`{stage}`" for stage in stages])


def not_now(silent_s: float) -> str:
    """Say for how long the named finding has not been seen."""
    return f"not seen for {duration(silent_s)}"


def watched(verdict: Verdict, began: int, lasted_s: float, cost_s: float, cost: float, lacking: str) -> str:
    """
    Describe a watched finding: since when it exists, its cost (in s, and as a share of that time), and which
    condition for a name it does not meet.
    """
    since = f"for {duration(lasted_s)}, since step {began:,}"
    spent = f"It has cost {duration(cost_s)}, {share(cost)} of that time. It is not named yet: {lacking}."
    return f"{_seen(verdict, 'has been', 'have been')} {since}. {spent}"


def too_brief(hold_s: float) -> str:
    """Explain why nothing is named or watched although the window shows something."""
    return f"A finding of this window has lasted less than {duration(hold_s)}, or is over."


def too_early(verdict: Verdict, hold_s: float) -> str:
    """Explain why a run without a verdict so far names nobody although something is late or slower."""
    return f"{_seen(verdict, 'is', 'are')}. It is not named yet: it must last {duration(hold_s)}."


def _seen(verdict: Verdict, one: str, several: str) -> str:
    """Describe who is late, or what is slower. `one` and `several` are the verb in singular and plural."""
    stages = _listed(verdict.stages)
    if verdict.meaning.names == "all":
        return f"{stages or 'The whole step'} {one} slower than the baseline"
    if not verdict.ranks:
        return f"Ranks {several} late in turn" + (f" in {stages}" if stages else "")
    who = f"{ranks(verdict.ranks)}{f' ({listed(verdict.nodes)})' if 0 < len(verdict.nodes) <= _NODES else ''}"
    verb = one if len(verdict.ranks) == 1 else several
    return f"{who[:1].upper()}{who[1:]} {verb} late" + (f" in {stages}" if stages else "")


def so_far(lasted_s: float, cost_s: float) -> str:
    """Say what an episode that is still open has cost."""
    return f"lasted {duration(lasted_s)} so far, cost {duration(cost_s)}"


def more(count: int) -> str:
    """Say how many further findings are named beyond those that are listed."""
    return f"{count:,} more {'is' if count == 1 else 'are'} named" if count > 0 else ""


_FEW_PEERS = 2
_WINDOWS = 0.5
"""Share of the windows required for a name from which on a cause is watched."""


class Watch:
    """
    One cause that is not named, from its first late step on.

    It continues while tracks of it come and go: a track is dropped as soon as too few windows show it.
    """

    def __init__(self, track: FindingTrack) -> None:
        self.verdict = track.verdict
        """The newest verdict that shows the cause."""
        self.began, self.began_ns = track.began, track.began_ns
        self.last, self.last_ns = track.last, track.last_ns
        """The last late step; `last_ns` is when it ended, in ns."""
        self.seen, self.missed = 1, 0
        """Number of windows that show it; `missed` is the number of those that do not."""
        self.long = False
        """Whether it has been watched for as long as any verdict must last."""
        self.shown = True
        """Whether the newest window shows the cause."""
        self.doubt = ""
        """Why the newest window may show it by chance."""
        self.cost_ns = 0
        """Cost so far in ns, of dropped tracks and the present one."""
        self._dropped_ns = 0

    def is_of(self, verdict: Verdict) -> bool:
        """Whether `verdict` names this cause."""
        return alike(self.verdict, verdict)

    def observe(
        self,
        findings: Sequence[Verdict],
        evidence: Evidence,
        past: PastSteps | None,
        limits: Thresholds,
        *,
        counts: bool,
    ) -> None:
        """Note whether the `findings` of a window show the cause. `counts` is True once per stride."""
        self.shown = any(self.is_of(finding) for finding in findings)
        self.doubt = "" if self.shown else self._doubt(evidence, past, limits)
        self.seen += counts and self.shown
        self.missed += counts and not self.shown

    def _doubt(self, evidence: Evidence, past: PastSteps | None, limits: Thresholds) -> str:
        """Return why a window may show the cause by chance, see `lasting`."""
        if self.verdict.pattern != "lasting" or self.verdict.stage not in STAGES:
            return ""
        ranks = evidence.window.ranks.tolist()
        places = [ranks.index(rank) for rank in self.verdict.ranks if rank in ranks]
        stage = evidence.compared_in(STAGES.index(self.verdict.stage), places)
        return doubt(evidence, places, stage, past, limits)

    def follow(self, tracks: Sequence[FindingTrack]) -> None:
        """Update the cause from its tracks among `tracks`."""
        mine = [track for track in tracks if self.is_of(track.verdict)]
        costs = [max(track.cost_ns, track.outlived_ns) for track in mine]
        self.cost_ns = self._dropped_ns + max(costs, default=0)
        if mine:
            latest = max(mine, key=lambda track: track.last)
            self.verdict = max(mine, key=lambda track: track.exact).verdict
            if latest.last > self.last:
                self.last, self.last_ns = latest.last, latest.last_ns

    def drop(self, cost_ns: int) -> None:
        """Add the cost of a dropped track."""
        self._dropped_ns += cost_ns

    def lasts(self, clock: Clock, limits: Thresholds) -> bool:
        """Whether the cause has lasted as long as any verdict must, in a third of the windows."""
        ns, steps = self.last_ns - self.began_ns, clock.timed(self.last - self.began) + 1
        return limits.lasted("watching", ns, steps) and not self.rare(limits)

    def rare(self, limits: Thresholds) -> bool:
        """Whether too few windows show the cause for it to be watched."""
        return self.seen < _WINDOWS * limits.hold_share * (self.seen + self.missed)

    def gone(self, clock: Clock, limits: Thresholds) -> bool:
        """
        Whether no step has been late for as long as any verdict must last. A recurring cause is
        not gone.
        """
        steps = clock.timed(int(clock.steps[-1]) - self.last)
        silent = clock.now_ns - self.last_ns > limits.hold_s * 1e9 and steps > limits.hold_steps
        return silent and not (self.shown and self.verdict.pattern == "transient")

    def passed(self, ranks: int, *, named: bool) -> Episode:
        """
        Return the cost of this cause as an episode that was not named. If the cause is finally `named`,
        return the cost before that.
        """
        mine, cost_s = self.verdict, (self._dropped_ns if named else self.cost_ns) / 1e9
        seconds = max(self.last_ns - self.began_ns, 1) / 1e9
        about = {name: getattr(mine, name) for name in ("label", *_NAMES[:-2], "why", "next")}
        return Episode(
            **about,
            confidence="low",
            from_step=self.began,
            to_step=self.last,
            seconds=seconds,
            cost_s=cost_s,
            rank_hours=cost_s * ranks / 3600,
            cost_pct=min(100.0, 100 * cost_s / seconds),
            cost_range_pct=None,
            goes_on=False,
        )

    def in_effect(self, window: Verdict, lacking: str, clock: Clock, ranks: int) -> Verdict:
        """
        Return the verdict while this cause is watched. `window` has the facts about the newest window,
        `lacking` says why it is not named, `ranks` is the number of ranks that wait for it.
        """
        mine, for_ns = self.verdict, max(self.last_ns - self.began_ns, 1)
        cost = min(1.0, self.cost_ns / for_ns)
        advice = f"If it stays: {mine.next[:1].lower()}{mine.next[1:]}" if mine.next else "Wait."
        named = {name: getattr(mine, name) for name in _NAMES}
        return Verdict(
            label="watching",
            **{**window.of_window, **named},
            confidence="low",
            gain_pct=100 * cost,
            cost_pct=100 * cost,
            cost_s=self.cost_ns / 1e9,
            rank_hours_per_hour=cost * ranks,
            from_step=self.began,
            why=watched(mine, self.began, for_ns / 1e9, self.cost_ns / 1e9, cost, lacking),
            next=advice,
        )


_NAMES = ("stage", "stages", "rank", "ranks", "node", "nodes", "pattern", "excess_pct", "host_bound")


def lacking(
    watch: Watch,
    tracks: Sequence[FindingTrack],
    usual: Float | None,
    clock: Clock,
    limits: Thresholds,
    *,
    few_steps: int | None = None,
) -> str:
    """
    Return the first unmet condition for a name, in numbers.

    Args:
        watch: the watched cause.
        tracks: all candidates for a name.
        usual: the run's usual fluctuation for each of PATTERNS (3,); None: not known yet.
        clock: clock of the run.
        limits: limits of the verdict.
        few_steps: number of known steps of the run, if these are too few, see `few_peers`; None: there are
            enough.
    """
    mine = [track for track in tracks if watch.is_of(track.verdict)]
    track = max(mine, key=lambda track: (track.exact, track.seen), default=None)
    windows = watch.seen + watch.missed
    if watch.doubt:
        return watch.doubt
    if track is None or (track.began > watch.began and watch.seen < limits.hold_share * windows):
        return f"it is in {watch.seen:,} of {windows:,} windows, {share(limits.hold_share)} are needed"
    hold_s, lasted_s = limits.hold_of(track.verdict.label), (track.last_ns - track.began_ns) / 1e9
    if lasted_s < hold_s:
        return f"it has lasted {duration(lasted_s)} of the {duration(hold_s)} that are needed"
    if (steps := clock.timed(track.last - track.began) + 1) < limits.hold_steps:
        return f"it has lasted {steps:,} of the {limits.hold_steps:,} steps that are needed"
    if few_steps is not None:
        return (
            f"{few_steps:,} steps of the run are known; with so few ranks {limits.window_steps:,} are needed"
        )
    if not track.recurs:
        return "it was late twice, with more than ten steps in between: three times are needed"
    if track.cost_ns < limits.hold_cost_s * 1e9:
        cost, least = unit(track.cost_ns / 1e9, "s"), unit(limits.hold_cost_s, "s")
        return f"it has cost {cost} of the {least} that are needed"
    if 2 * track.exact < track.seen:
        return f"it is the only finding in just {track.exact:,} of the {track.seen:,} windows that show it"
    if usual is not None and track.levels:
        place, level = track.typical_level()
        if level <= usual[place]:
            above = share(float(usual[place]))
            return f"its excess of {share(level)} is not above the run's usual fluctuation of {above}"
    return "it is named with the next window that shows it"


def few_peers(verdict: Verdict, ranks: int, steps: int, limits: Thresholds) -> bool:
    """
    Return whether too few other ranks and steps show what is usual. The work of one or two ranks may stay
    alike for some steps; one of them is then late in all of these steps.

    Args:
        verdict: verdict that names the late ranks.
        ranks: number of ranks of the run.
        steps: number of known steps of the run.
        limits: limits of the verdict.
    """
    lasts = verdict.meaning.names == "ranks" and verdict.pattern == "lasting"
    return lasts and ranks - len(verdict.ranks) <= _FEW_PEERS and steps < limits.window_steps


def pending(tracks: Sequence[FindingTrack], watch: Watch | None) -> str:
    """Return a note on the candidates for a name, except those that belong to `watch`."""
    longest: dict[tuple[int | None, str | None], tuple[float, Verdict]] = {}
    drifts = [track for track in tracks if track.verdict.meaning.names == "all"]
    drifts.sort(key=lambda track: -track.exact)
    for track in tracks:
        if track in drifts[1:] or (watch is not None and watch.is_of(track.verdict)):
            continue  # of one slow-down one window may show the stage, and another the whole step
        which = track.verdict.rank, track.verdict.stage
        lasted_s = (track.last_ns - track.began_ns) / 1e9
        if lasted_s > longest.get(which, (0.0,))[0]:
            longest[which] = lasted_s, track.verdict
    return pending_sentence([*longest.values()])


def without_window(verdict: Verdict) -> Verdict:
    """Return `verdict` without the facts about its window, for a finding that is not the headline."""
    return msgspec.structs.replace(
        verdict, suspects=(), exposed_ms=None, mean_step_ms=None, roles=(), stacks=(), also=(), note="",
        coverage=None, window_steps=0, excess_pct=None, lost_s=None, elapsed_s=None,
    )  # fmt: skip
