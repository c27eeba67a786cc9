"""
Profiles of a live session: which ranks record which steps, what arrives, and when a profile is over.

One capture is made at a time; others wait. All ranks record the same steps. The first step lies far enough
ahead that every rank receives the command before it. If a rank was already past that step, all ranks begin
anew, further ahead.

This module selects the ranks of a profile and tracks the progress of each.

It also profiles jobs on torch.distributed.rpc, in which some ranks have no steps of their own and serve other
ranks. Such a rank records from before the first step of the others until it hears that they are done; only
the time of their steps is analysed in its trace. If no rank has steps, all ranks record for the same number
of seconds.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from traceml_ray import __version__, text
from traceml_ray.errors import Errors
from traceml_ray.identity import RankFilterError, rank_filter
from traceml_ray.monitor.live_steps import RunNow
from traceml_ray.monitor.profile_files import ProfileFiles
from traceml_ray.reports.run_facts import moment
from traceml_ray.store import profiles
from traceml_ray.store.profiles import OVER, Profile, ProfileStep, RankProfile
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.messages import LATE, OPTIONS, TracePart, TraceReply

STEP_S = 1.0
"""Time to record in place of each step if no rank has steps, in s."""
HEAR_S = 10.0
"""Longest time until a rank learns that the others are done, in s."""

Edges = dict[int, tuple[int, int]]
"""Begin and end of steps by step number, in ns on the aggregator's clock."""


def is_over(profile: Profile, since_s: Mapping[int, float]) -> bool:
    """
    Return whether ranks without steps have recorded what they should.

    Args:
        profile: the profile in its present state.
        since_s: for how long each rank has been in its present state.
    """
    going = [rank for rank in profile.ranks if rank.state not in OVER]
    serving = [rank for rank in going if rank.serves and rank.state == "recording"]
    if not serving or any(rank.state in ("asked", "armed") or _records(rank) for rank in going):
        return False
    if any(rank.steps for rank in profile.ranks if not rank.serves):
        return True
    return all(since_s[rank.rank] >= profile.n_steps * STEP_S for rank in serving)


def was_late(profile: Profile, rank: RankProfile) -> bool:
    """
    Return whether a rank without steps began to record only after the other ranks had begun their
    steps.
    """
    training = [rank for rank in profile.ranks if not rank.serves and rank.steps]
    edges = _steps_of(training)
    if not (rank.serves and rank.steps and edges):
        return False
    ((_, began_ns, _),) = _edges(rank)
    return began_ns > min(begin_ns for begin_ns, _ in edges.values())


def share_steps(profile: Profile) -> None:
    """Give ranks without steps the steps of the others, or else the time that all have recorded."""
    serving = [rank for rank in profile.captured if rank.serves]
    training = [rank for rank in profile.captured if not rank.serves and rank.steps]
    edges = _steps_of(training) if training else _together(serving)
    if serving and not training:
        profile.first_step = None
    for rank in serving:
        offset_ns = rank.clock_offset_ns or 0
        rank.steps = [
            ProfileStep(step, begin_ns - offset_ns, end_ns - offset_ns, None)
            for step, (begin_ns, end_ns) in edges.items()
        ]


def _records(rank: RankProfile) -> bool:
    return rank.state == "recording" and not rank.serves


def _steps_of(ranks: list[RankProfile]) -> Edges:
    edges_of_step: Edges = {}
    for rank in ranks:
        for step, begin_ns, end_ns in _edges(rank):
            first_ns, last_ns = edges_of_step.get(step, (begin_ns, end_ns))
            edges_of_step[step] = min(first_ns, begin_ns), max(last_ns, end_ns)
    return edges_of_step


def _together(ranks: list[RankProfile]) -> Edges:
    """Return the time in which all ranks have recorded, as step 0; empty if there is none."""
    edges = [edge for rank in ranks for edge in _edges(rank)]
    begin_ns = max((begin for _, begin, _ in edges), default=0)
    end_ns = min((end for _, _, end in edges), default=0)
    return {0: (begin_ns, end_ns)} if begin_ns < end_ns else {}


def _edges(rank: RankProfile) -> list[tuple[int, int, int]]:
    offset_ns = rank.clock_offset_ns or 0
    return [(step.step, step.begin_ns + offset_ns, step.end_ns + offset_ns) for step in rank.steps]


@dataclass(eq=False)
class AskedRank:
    """State of one rank in the capture."""

    about: RankProfile
    process_id: str = ""
    heard: bool = False
    """Whether the rank has answered the command with this number."""
    moved_s: float = 0.0
    """Time of its last progress, in monotonic seconds."""

    def end(self, state: Literal["refused", "failed"], reason: str) -> None:
        """Stop expecting a trace of this rank."""
        self.about.state, self.about.reason = state, reason


def asked_ranks(profile: Profile, asked: wire.ProfileRequest, run: RunNow) -> dict[int, AskedRank]:
    """Return the ranks to profile. A rank that cannot be profiled has the reason."""
    try:
        wanted = rank_filter(asked.ranks)
    except RankFilterError as error:
        profile.error = str(error)
        return {}
    numbers = [rank for rank in sorted(run.ranks) if rank in wanted]
    named = () if wanted.ranges is None else itertools.chain.from_iterable(wanted.ranges)
    unknown = [rank for rank in itertools.islice(named, profiles.MAX_RANKS) if rank not in run.ranks]
    profiles_of_rank = {rank: _rank(rank, run) for rank in numbers[: 4 * profiles.MAX_RANKS]}
    going = [rank for rank in profiles_of_rank.values() if rank.about.state == "asked"]
    for rank in going[profiles.MAX_RANKS :]:
        rank.process_id = ""
        rank.end("refused", f"a profile has {profiles.MAX_RANKS} ranks at most")
    unknown += to_come(asked, run)
    absent = {rank: AskedRank(RankProfile(rank, "refused", _absence(rank, run))) for rank in unknown}
    return dict(sorted((profiles_of_rank | absent).items()))


def to_come(asked: wire.ProfileRequest, run: RunNow) -> list[int]:
    """Return the requested ranks that can still be profiled but have not reported yet."""
    try:
        wanted = rank_filter(asked.ranks)
    except RankFilterError:
        return []
    first = range(min(run.world, profiles.MAX_RANKS))
    return [rank for rank in first if rank in wanted and rank not in run.ranks]


def _absence(rank: int, run: RunNow) -> str:
    return "it has not reported so far" if rank < run.world else "no such rank"


def _rank(rank: int, run: RunNow) -> AskedRank:
    process = run.ranks[rank]
    identity, about = process.identity, RankProfile(rank, "asked", process=process.id)
    about.node = run.labels.get(process.id)
    if identity is not None:
        about.node_id, about.hostname, about.pid = identity.node_id, identity.hostname, identity.pid
    clock = run.clocks.get(about.node_id or "")
    if clock is not None:
        about.clock_offset_ns, about.clock_bound_ns = clock
    if process.ended:
        about.state, about.reason = "refused", f"it has ended ({text.plain(process.end)})"
        return AskedRank(about)
    return AskedRank(about, process.process_id)


AHEAD_S = 3.0
"""Least time between a command and its first step, in s. Ranks receive the command within about 2 s."""
AHEAD_STEPS = 2
"""Least number of steps between a command and its first step."""
MAX_NUMBER = 3
"""
Largest number of attempts. Each is four times as far ahead, because the length of a step may be
unknown.
"""
ANSWER_S = 15.0
"""Time after which a rank that has not answered is given up, in s."""
STEPS_S = 120.0
"""Time for which a rank waits for its steps, in addition to the time they take, in s."""
RECORD_S = 5.0
"""Time by which the steps may exceed four times their usual time, in s."""
SEND_S = 120.0
"""Longest time without progress of a trace, in s."""
ENDED_S = 15.0
"""The same for a rank or run that has ended, in s. Its relay may still have the file."""
SLOW_S = 0.5
"""Time after which a relay asks again if its last part waits for the disk, in s."""
BYTES_PER_S = 32 << 20
"""Largest rate of all traces together, in bytes per second: they are received and written beside the rows."""
KNOWN_S = 15.0
"""Time to wait for ranks of a run that have not reported yet, in s."""
MAX_WAITING = 8
"""Largest number of captures that wait for the present one to end."""


@dataclass(frozen=True)
class Wanted:
    """What to profile, and why."""

    request: wire.ProfileRequest
    why: str
    requests: tuple[str, ...] = ()
    """Ids of the requests."""
    by_itself: bool = False
    suspect: int | None = None
    stage: str | None = None
    median: int | None = None


@dataclass(eq=False)
class _Capture:
    """The present capture."""

    wanted: Wanted
    profile: Profile
    ranks: dict[str, AskedRank]
    """The ranks that were asked, by process id."""
    began_s: float
    step_s: float
    number: int = 1
    newest: int = 0
    """Step that was running when the command was made."""
    over: bool = False
    """Whether all ranks have recorded their steps. Ranks without steps then stop."""
    commands: list[wire.Command] = field(default_factory=list)

    @property
    def joins(self) -> bool:
        """
        Whether another request for the same profile joins this one: all ranks of a script may
        request it.
        """
        return all(rank.about.state in ("asked", "armed") for rank in self.ranks.values())


class TracePace:
    """
    Limits how fast traces arrive.

    Args:
        ticks: monotonic seconds.
    """

    def __init__(self, ticks: Callable[[], float]) -> None:
        self._ticks, self._free_s = ticks, 0.0

    def pause_s(self, n_bytes: int) -> float:
        """Return how long to wait after a part of `n_bytes` bytes, in seconds. All relays share one rate."""
        now = self._ticks()
        self._free_s = max(self._free_s, now) + n_bytes / BYTES_PER_S
        return self._free_s - now


class CaptureCoordinator:
    """
    Runs the captures of one session. Any thread may call it. It never waits for a disk, and takes no lock
    except its own and the lock of `files`.

    Args:
        files: writes the profiles.
        session: name of the session.
        errors: the aggregator's, by place.
        clock: wall clock in ns.
        ticks: monotonic seconds.
    """

    def __init__(
        self,
        files: ProfileFiles,
        session: str,
        errors: Errors,
        clock: Callable[[], int],
        ticks: Callable[[], float],
    ) -> None:
        self._files, self._session, self._errors = files, session, errors
        self._clock, self._ticks, self._pace = clock, ticks, TracePace(ticks)
        self._lock = threading.RLock()  # held for moments only
        self._now: _Capture | None = None
        self._waiting: deque[Wanted] = deque()
        self._waits_s: float | None = None
        """Time since which the first waiting capture waits for its run, or for all ranks of the run."""

    @property
    def busy(self) -> bool:
        """Whether a capture is under way or waits."""
        return self._now is not None or bool(self._waiting)

    def waiting(self) -> list[Wanted]:
        """Return the profiles that wait for the present capture to end, or for their run."""
        with self._lock:
            return [*self._waiting]

    def ask(self, wanted: Wanted) -> str | None:
        """
        Request a profile of steps, made after those already requested. Return why it will not be made, else
        None. Requests beyond the limit are counted.
        """
        with self._lock:
            return self._ask(wanted)

    def _ask(self, wanted: Wanted) -> str | None:
        now = self._now
        if now is not None and now.joins and now.wanted.request == wanted.request:
            now.profile.requests.extend(wanted.requests)
            return None
        for index, other in enumerate(self._waiting):
            if other.request == wanted.request:
                self._waiting[index] = replace(other, requests=other.requests + wanted.requests)
                return None
        if len(self._waiting) >= MAX_WAITING:
            self._errors.count("profile: too many wait")
            return f"{MAX_WAITING} profiles wait already; ask again when one is done"
        self._waiting.append(wanted)
        return None

    def commands(self) -> list[wire.Command]:
        """Return the commands for the ranks."""
        now = self._now
        return [] if now is None else now.commands

    def ingest(self, process_id: str, status: wire.Capture) -> None:
        """Update the capture with the status that a rank process reports."""
        with self._lock:
            now, rank = self._asked(process_id, status.id, status.number)
            if now is not None and rank is not None:
                self._note(now, rank, status)

    def accept_part(self, part: TracePart) -> TraceReply:
        """Accept a part of a trace from the rank's relay. The reply says where to continue, and when."""
        with self._lock:
            now, rank = self._asked(part.process_id, part.profile, part.number)
            if now is None or rank is None:
                return TraceReply(codec.VERSION)
            if part.failure:
                rank.end("failed", f"its trace could not be read on its node: {part.failure}")
                return TraceReply(codec.VERSION)
            about = rank.about
            about.file, about.total_bytes = profiles.trace_name(about.rank), part.total_bytes
            added = self._files.add_part(about.file, part)
            self._check_trace(now, rank)
            if about.state in OVER:
                return TraceReply(codec.VERSION)
            written, waiting, _ = self._files.there(now.profile.id, now.number, about.file)
            asks = not part.data and written < part.total_bytes and not waiting
            pause_s = self._pace.pause_s(len(part.data)) if added or asks else SLOW_S
            return TraceReply(codec.VERSION, written + waiting, min(pause_s, SEND_S / 4))

    def _asked(
        self, process_id: str, profile: str, number: int
    ) -> tuple[_Capture, AskedRank] | tuple[None, None]:
        """Return the present capture and its rank, if something is expected of that rank."""
        now = self._now
        if now is None or (profile, number) != (now.profile.id, now.number):
            return None, None
        rank = now.ranks.get(process_id)
        return (None, None) if rank is None or rank.about.state in OVER else (now, rank)

    def _note(self, now: _Capture, rank: AskedRank, status: wire.Capture) -> None:
        about = rank.about
        if status.state != about.state:
            rank.moved_s = self._ticks()
        rank.heard, about.state, about.reason = True, status.state, status.reason or None
        about.serves = status.serves
        about.total_bytes = status.total_bytes
        about.steps = [profiles.ProfileStep(*step) for step in status.steps]
        costs = status.start_ns, status.stop_ns, status.export_ns
        about.start_ms, about.stop_ms, about.export_ms = map(_ms, costs)
        if was_late(now.profile, about):
            rank.end("refused", f"step {now.profile.first_step} {LATE}")
        self._check_trace(now, rank)

    def _check_trace(self, now: _Capture, rank: AskedRank, waiting_counts: bool = False) -> None:
        """
        Check how much of a trace is written, and whether it is complete. Parts that still wait for the disk
        are included if `waiting_counts` (`ProfileFiles.note_lost_traces` later says whether they were
        written).
        """
        about = rank.about
        if about.file is None or about.state in OVER:
            return
        written, waiting, failure = self._files.there(now.profile.id, now.number, about.file)
        written += waiting * waiting_counts
        if failure:
            rank.end("failed", failure)
            return
        if written > about.bytes:
            about.bytes, rank.moved_s = written, self._ticks()
        if about.state == "sending" and about.total_bytes is not None and about.bytes >= about.total_bytes:
            about.state = "captured"

    # -- once a second ---------------------------------------------------------------------------------

    def tick(self, runs: Sequence[RunNow]) -> Profile | None:
        """
        Begin waiting captures and give up on what does not arrive. Return the profile that has
        ended, if any.
        """
        with self._lock:
            return self._advance(runs)

    def _advance(self, runs: Sequence[RunNow]) -> Profile | None:
        if self._now is None and self._waiting and self._may_begin(self._waiting[0], runs):
            self._waits_s = None
            self._begin(self._waiting.popleft(), runs)
        now = self._now
        if now is None:
            return None
        run = next((run for run in runs if run.run == now.profile.run), None)
        if run is None:
            self._end_with_run(now)
        elif any(_was_late(rank.about) for rank in now.ranks.values()) and now.number < MAX_NUMBER:
            self._begin_anew(now, run)
        else:
            self._check(now, run)
            self._end_serving(now)
        if not all(rank.about.state in OVER for rank in now.ranks.values()):
            self._files.show(now.profile)
            return None
        self._now = None
        share_steps(now.profile)
        return now.profile

    def _may_begin(self, wanted: Wanted, runs: Sequence[RunNow]) -> bool:
        """Whether a profile can begin. It may be requested before its run, or some of its ranks, exist."""
        run = _run_of(wanted.request, runs)
        limit_s = (
            STEPS_S if not runs else KNOWN_S if run is not None and to_come(wanted.request, run) else 0.0
        )
        self._waits_s = self._ticks() if self._waits_s is None else self._waits_s
        return self._ticks() - self._waits_s >= limit_s

    def stop(self, why: str) -> Profile | None:
        """End all captures because the session is over. Return the present profile in its present state."""
        with self._lock:
            self._waiting.clear()
            now, self._now = self._now, None
            if now is not None:
                for rank in now.ranks.values():
                    self._check_trace(now, rank, waiting_counts=True)
                self._give_up(now, why)
            return None if now is None else now.profile

    def resume(self, profile: Profile, process_ids: Mapping[int, str]) -> None:
        """
        Continue a profile that an earlier aggregator was making, with the trace parts that are already
        stored. Called before all other methods.

        Args:
            profile: read from its manifest.
            process_ids: of the session's rank processes, by number.
        """
        going = [rank for rank in profile.ranks if rank.state not in OVER and rank.process in process_ids]
        request = wire.ProfileRequest(
            ",".join(str(rank.rank) for rank in going) or "all",
            profile.n_steps,
            run=profile.run,
            **{name: getattr(profile, name) for name in OPTIONS},
        )
        wanted = Wanted(
            request,
            profile.why,
            tuple(profile.requests),
            profile.by_itself,
            profile.suspect,
            profile.stage,
            profile.median,
        )
        asked = [AskedRank(rank, process_ids[rank.process or 0]) for rank in going]
        ranks = {rank.process_id: rank for rank in asked}
        now = _Capture(wanted, profile, ranks, self._ticks(), 1.0, profile.number)
        for rank in ranks.values():
            rank.heard, rank.moved_s = rank.about.state != "asked", now.began_s
            rank.about.file = profiles.trace_name(rank.about.rank)
            rank.about.bytes = self._files.go_on(profile.id, profile.number, rank.about.file)
        for about in profile.ranks:
            if about.state not in OVER and about.process not in process_ids:
                about.state, about.reason = (
                    "failed",
                    "it is not known any more",
                )
        if profile.first_step is not None:
            now.newest = max(0, profile.first_step - AHEAD_STEPS)
            now.commands = self._commands(now, profile.first_step)
        self._now = now

    def _begin(self, wanted: Wanted, runs: Sequence[RunNow]) -> None:
        asked, t_ns = wanted.request, self._clock()
        run = _run_of(asked, runs)
        profile = Profile(
            id=self._files.new_id(t_ns),
            session=self._session,
            run=None if run is None else run.run,
            time=moment(t_ns) or "",
            t_ns=t_ns,
            why=wanted.why,
            requests=list(wanted.requests),
            by_itself=wanted.by_itself,
            suspect=wanted.suspect,
            stage=wanted.stage,
            median=wanted.median,
            first_step=None,
            n_steps=asked.steps,
            **{name: getattr(asked, name) for name in OPTIONS},
            ranks=[],
            traceml_ray=__version__,
        )
        if run is None:
            profile.error = "no run is active" if asked.run is None else f"run {asked.run!r} is not active"
        ranks = {} if run is None else asked_ranks(profile, asked, run)
        profile.ranks = [rank.about for rank in ranks.values()]
        process_ids = {rank.process_id: rank for rank in ranks.values() if rank.process_id}
        step_s = (run.step_s if run is not None else None) or 1.0
        self._now = _Capture(wanted, profile, process_ids, self._ticks(), step_s)
        if run is not None:
            self._command(self._now, run)

    def _command(self, now: _Capture, run: RunNow) -> None:
        """Make the next command. Its first step lies ahead of all ranks."""
        profile = now.profile
        ahead = max(AHEAD_STEPS, math.ceil(AHEAD_S * 4 ** (now.number - 1) / now.step_s))
        now.newest = _newest(now, run)
        profile.first_step, profile.number = now.newest + ahead if now.ranks else None, now.number
        now.commands = self._commands(now, now.newest + ahead) if now.ranks else []
        now.began_s = self._ticks()
        for rank in now.ranks.values():
            rank.moved_s = now.began_s

    def _commands(self, now: _Capture, first_step: int) -> list[wire.Command]:
        asked, profile, ahead = now.wanted.request, now.profile, first_step - now.newest
        limit_s = STEPS_S + 4 * (ahead + asked.steps) * now.step_s
        record_s = RECORD_S + 4 * asked.steps * now.step_s
        command = wire.ProfileCommand(
            id=profile.id,
            number=now.number,
            run=profile.run,
            ranks=",".join(str(rank.about.rank) for rank in now.ranks.values()),
            first_step=first_step,
            steps=asked.steps,
            limit_s=limit_s,
            record_s=record_s,
            serve_s=record_s + ahead * now.step_s + HEAR_S,
            **{name: int(getattr(asked, name)) for name in OPTIONS},
        )
        return [wire.Command("profile", msgspec.structs.asdict(command))]

    def _begin_anew(self, now: _Capture, run: RunNow) -> None:
        now.number, now.over = now.number + 1, False
        if done := _newest(now, run) - now.newest:  # at the start of a run it is not known what a step takes
            now.step_s = (self._ticks() - now.began_s) / done
        for rank in now.ranks.values():
            if rank.about.state != "refused" or _was_late(rank.about):
                rank.heard = False
                about = rank.about
                about.state, about.reason, about.steps = "asked", None, []
                about.file, about.bytes, about.total_bytes = None, 0, None
        self._files.clear()
        self._command(now, run)

    def _check(self, now: _Capture, run: RunNow) -> None:
        """Give up ranks that have ended, or that send nothing."""
        limit_s = float(now.commands[0].args["limit_s"] or 0.0) if now.commands else 0.0
        for rank in now.ranks.values():
            self._check_trace(now, rank)
            about, quiet_s = rank.about, self._ticks() - rank.moved_s
            if about.state in OVER:
                continue
            process = run.ranks.get(about.rank)
            if process is None or process.process_id != rank.process_id or process.ended:
                self._end_unless_it_comes(rank, "it ended before its trace was written")
            elif not rank.heard and quiet_s > ANSWER_S:
                rank.end("refused", f"it has not answered within {ANSWER_S:g} s")
            elif about.state in ("armed", "recording") and quiet_s > limit_s + ANSWER_S:
                rank.end("failed", f"it has not ended its steps within {text.duration(quiet_s)}")
            elif about.state == "sending" and quiet_s > SEND_S:
                _, waiting, _ = self._files.there(now.profile.id, now.number, about.file or "")
                slow = "its trace could not be kept: the disk takes too long"
                rank.end("failed", slow if waiting else "the rest of its trace has not arrived")

    def _end_with_run(self, now: _Capture) -> None:
        """Give up the ranks of a run that is over, except for traces that still arrive."""
        for rank in now.ranks.values():
            self._check_trace(now, rank)
            if rank.about.state not in OVER:
                self._end_unless_it_comes(rank, "the run is over")

    def _end_unless_it_comes(self, rank: AskedRank, why: str) -> None:
        if rank.about.state != "sending" or self._ticks() - rank.moved_s > ENDED_S:
            rank.end("failed", why)

    def _end_serving(self, now: _Capture) -> None:
        """Tell ranks without steps to stop when the others have recorded theirs."""
        since = {rank.about.rank: self._ticks() - rank.moved_s for rank in now.ranks.values()}
        if not now.over and is_over(now.profile, since):
            now.over = True
            now.commands = [
                wire.Command(command.name, {**command.args, "over": 1}) for command in now.commands
            ]

    def _give_up(self, now: _Capture, why: str) -> None:
        for rank in now.ranks.values():
            if rank.about.state not in OVER:
                rank.end("failed", why)


def _run_of(asked: wire.ProfileRequest, runs: Sequence[RunNow]) -> RunNow | None:
    """Return the run to profile: the newest if several match."""
    return next((run for run in reversed(runs) if asked.run in (None, run.run, run.name)), None)


def _newest(now: _Capture, run: RunNow) -> int:
    """Return the step that is running."""
    going = [run.ranks[rank.about.rank] for rank in now.ranks.values() if rank.about.rank in run.ranks]
    # The last row received is of a completed step, so the next step is running.
    return max((process.last_step or 0 for process in going), default=0) + 1


def _was_late(about: RankProfile) -> bool:
    return about.state == "refused" and LATE in (about.reason or "")


def _ms(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e6
