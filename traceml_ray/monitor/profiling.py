"""
What a session measures in addition to steps. Profiles are made on request, or automatically if a verdict
lasts; layers are measured on request. Errors are counted.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from traceml_ray import text
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.errors import Errors
from traceml_ray.monitor.captures import CaptureCoordinator, Wanted
from traceml_ray.monitor.live_steps import RunNow
from traceml_ray.monitor.profile_files import ProfileFiles
from traceml_ray.settings import Settings
from traceml_ray.stages import N_STAGES, SEGMENT_BITS
from traceml_ray.store import profiles
from traceml_ray.store.profiles import Profile, ProfileStep
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.session_file import SessionFile, columns_of
from traceml_ray.store.writer import SessionWriter
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.messages import TracePart, TraceReply

SEND_S = 30.0
"""Time for which a command is part of all replies, in s. By then every relay has asked."""
WAIT_S = 120.0
"""Time for which a request that came before its run waits for it, in s."""
MAX_WAITING = 8


class LayerRequests:
    """
    Requests to measure layers in one session. Any thread may call it.

    Args:
        errors: the aggregator's error counts, by place.
        runs: the runs that go on.
        ticks: monotonic seconds.
    """

    def __init__(self, errors: Errors, runs: Callable[[], list[RunNow]], ticks: Callable[[], float]) -> None:
        self._errors, self._runs, self._ticks = errors, runs, ticks
        self._lock = threading.Lock()
        self._waiting: list[tuple[wire.LayersRequest, str, float]] = []
        self._sent: list[tuple[wire.Command, float]] = []
        self.commands: list[wire.Command] = []
        """Commands for the ranks, sent with every reply to a relay."""

    def ask(self, request: wire.LayersRequest, asked: str) -> str | None:
        """Accept a person's request by its id `asked`. Return why nothing will be measured, else None."""
        with self._lock:
            if len(self._waiting) + len(self._sent) >= MAX_WAITING:
                self._errors.count("layers: too many requests wait")
                return f"{MAX_WAITING} requests wait already; ask again in {SEND_S:g} s"
            self._waiting.append((request, asked, self._ticks()))
            return None

    def tick(self) -> None:
        """
        Send new commands to the ranks of a run, and stop sending those that all ranks have received. Called
        once a second. An error is counted.
        """
        try:
            if self._waiting or self._sent:
                runs = self._runs()  # takes another lock
                with self._lock:
                    self._tick(runs)
        except Exception as error:
            self._errors.swallow("layers", error)

    def _tick(self, runs: list[RunNow]) -> None:
        now, waiting = self._ticks(), []
        for request, asked, since in self._waiting:
            run = next((run for run in reversed(runs) if request.run in (None, run.run, run.name)), None)
            if run is not None:
                command = wire.LayersCommand(id=asked, run=run.run, steps=request.steps)
                self._sent.append((wire.Command("layers", msgspec.structs.asdict(command)), now))
            elif now - since > WAIT_S:
                self._errors.count("layers: no such run is active")
            else:
                waiting.append((request, asked, since))
        self._waiting = waiting
        self._sent = [(command, since) for command, since in self._sent if now - since < SEND_S]
        self.commands = [command for command, _ in self._sent]


STEPS = 3
"""Number of steps of each automatic profile."""
MOST_S = 10.0
"""
Longest time to record, in s: recorded data takes memory. If the steps take longer, fewer are recorded; if one
step is longer, none is recorded.
"""

Peer = Callable[[Verdict], int | None]
"""A function that returns the rank with which the ranks of a verdict are compared."""


class AutoProfile:
    """
    Decides which profiles of one session are made automatically.

    Args:
        settings: of the session.
        ticks: monotonic seconds.
    """

    def __init__(self, settings: Settings, ticks: Callable[[], float]) -> None:
        self._most, self._pause_s = settings.auto_profile, 60 * settings.auto_profile_minutes
        self._ticks = ticks
        self._times: Counter[str] = Counter()
        self._last: dict[str, float] = {}
        self._done: set[tuple[object, ...]] = set()

    @property
    def is_on(self) -> bool:
        """Whether any profile may be made without a request."""
        return self._most > 0

    def check(self, run: str, verdict: Verdict | None, peer: Peer) -> Wanted | None:
        """Return the profile to make because of the current verdict on `run`. None: no profile."""
        if verdict is None or not _lasts(verdict) or self._times[run] >= self._most:
            return None
        now, what = self._ticks(), (run, verdict.label, verdict.stage, verdict.ranks, verdict.from_step)
        if what in self._done or now - self._last.get(run, -self._pause_s) < self._pause_s:
            return None
        median = peer(verdict)
        ranks = sorted({rank for rank in (verdict.rank, median) if rank is not None})
        steps = min(STEPS, int(1e3 * MOST_S / verdict.mean_step_ms)) if verdict.mean_step_ms else 0
        if not ranks or not steps:
            return None
        self._times[run] += 1
        self._last[run] = now
        self._done.add(what)
        request = wire.ProfileRequest(",".join(map(str, ranks)), steps, run=run)
        return Wanted(
            request,
            _why(verdict, median),
            by_itself=True,
            suspect=verdict.rank,
            stage=verdict.stage,
            median=median,
        )


def _lasts(verdict: Verdict) -> bool:
    """Whether the cause of the verdict is something that ranks do in most of their steps."""
    named = verdict.rank is not None or verdict.label == "group_wide"
    return named and verdict.meaning.kind == "finding" and bool(verdict.chronic)


def _why(verdict: Verdict, median: int | None) -> str:
    stage = f" in {verdict.stage}" if verdict.stage else ""
    if verdict.rank is None:
        return f"all ranks have become slower{stage}."
    beside = "" if median is None else f"; {text.ranks([median])} is the median of the others"
    return f"{text.ranks([verdict.rank])} is late{stage} in most steps{beside}."


REQUESTED = "it was requested."
"""`Profile.why` if a person has requested the profile."""
WAITING = "profiles_waiting"
"""Name of the session value (table `meta`) that holds the requests that have not begun."""
EVENT = "profile"
"""Kind of the event that reports a profile as over."""
EXPLAIN = "traceml_ray.traces.explain"
FILES_S, EXPLAIN_S = 1.0, 0.5
"""Times for which the end of a session waits for the files of a profile, and for its explanation, in s."""
_NAMED = 4
"""Number of ranks without a trace whose reasons the event contains."""


class Profiling:
    """
    Makes the profiles of one session.

    Args:
        settings: of the session.
        writer: writes the session file; its lock is held briefly.
        errors: the aggregator's error counts, by place.
        clock: wall clock in ns.
        ticks: monotonic ns.
        runs: the runs that go on.
        peer: returns the rank with which the ranks of a verdict on a run are compared.
        commit: writes pending rows.
    """

    def __init__(
        self,
        settings: Settings,
        writer: SessionWriter,
        errors: Errors,
        clock: Callable[[], int],
        ticks: Callable[[], int],
        runs: Callable[[], list[RunNow]],
        peer: Callable[[str, Verdict], int | None],
        commit: Callable[[], bool],
    ) -> None:
        self._writer, self._errors, self._clock = writer, errors, clock
        self._runs, self._peer, self._commit = runs, peer, commit
        self._folder, self._max_bytes = writer.path.parent, settings.profile_bytes
        self._files = ProfileFiles(self._folder, errors)
        self._captures = CaptureCoordinator(
            self._files, self._folder.name, errors, clock, lambda: ticks() / 1e9
        )
        if self._files.left is not None:
            numbers = {process.id: process.process_id for process in writer.processes.values()}
            self._captures.resume(self._files.left, numbers)
        self._ask_again(writer.meta.get(WAITING, []))
        self._auto = AutoProfile(settings, lambda: ticks() / 1e9)
        self._explaining: subprocess.Popen[bytes] | None = None
        self.commands: list[wire.Command] = self._captures.commands()
        """Commands for the ranks, sent with every reply to a relay."""

    def ask(self, request: wire.ProfileRequest, asked: str) -> str | None:
        """
        Accept a person's request by its id `asked`. Return why there will be no profile, or None if it has
        not failed.
        """
        return self._captures.ask(Wanted(request, REQUESTED, (asked,)))

    def waiting(self) -> list[dict[str, Any]]:
        """Return the requests by people that have not begun, in the form stored under `WAITING`."""
        return [
            {"requests": [*wanted.requests], **msgspec.structs.asdict(wanted.request)}
            for wanted in self._captures.waiting()
            if not wanted.by_itself
        ]

    def _ask_again(self, waiting: list[dict[str, Any]]) -> None:
        """
        Repeat the requests that waited when an earlier aggregator was killed, except those that have begun
        since.
        """
        begun = set() if self._files.left is None else set(self._files.left.requests)
        for entry in waiting:
            try:
                fields = dict(entry)
                requests = tuple(map(str, fields.pop("requests")))
                if begun.isdisjoint(requests):
                    self._captures.ask(Wanted(wire.ProfileRequest.of(fields), REQUESTED, requests))
            except (ValueError, LookupError, AttributeError, TypeError) as error:
                self._errors.note("profile that waited", error)

    def ingest(self, process: RankProcess, capture: wire.Capture) -> None:
        """Process what a rank reports about its capture. An error is counted."""
        try:
            self._captures.ingest(process.process_id, capture)
        except Exception as error:
            self._errors.note("trace", error)

    def accept_part(self, part: TracePart) -> TraceReply:
        """Accept a part of a trace. The reply tells its relay where to continue."""
        return self._captures.accept_part(part)

    def tick(self) -> None:
        """Advance the captures; called once a second. An error is counted."""
        try:
            runs = self._runs() if self._auto.is_on or self._captures.busy else []
            aimed = [self._auto.check(run.run, run.verdict, partial(self._peer, run.run)) for run in runs]
            for wanted in filter(None, aimed):
                self._captures.ask(wanted)
            over = self._captures.tick(runs)
            self.commands = self._captures.commands()
            if over is not None:
                self._files.do(partial(self._finish, over))
            self._reap()
        except Exception as error:
            self._errors.swallow("profile", error)

    def stop(self) -> None:
        """
        End the present captures because the session is over. Wait at most `FILES_S` for a disk
        that hangs.
        """
        try:
            over = self._captures.stop("the session ended before its trace had arrived")
            self.commands = []
            if over is not None:
                self._files.do(partial(self._finish, over))
            if not self._files.wait(FILES_S):
                self._errors.count("profile: not written before the end")
            if self._explaining is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._explaining.wait(EXPLAIN_S)
        except Exception as error:
            self._errors.swallow("profile", error)

    def _finish(self, profile: Profile) -> None:
        """
        Publish a profile in its folder and report it as an event, in the background. A failure is counted,
        and nothing is left behind.
        """
        there = False
        self._files.note_lost_traces(profile)
        try:
            if profile.captured:
                self._add_rows(profile)
            self._appear(profile)
            there = True
            profiles.prune(self._folder, self._max_bytes)
            if profile.suspect is not None and len(profile.captured) > 1:
                self._explain(self._folder / profiles.FOLDER / profile.id)
        except Exception as error:
            self._errors.note("profile", error)
            profiles.clear_unfinished(self._folder)
        with self._writer.lock:
            self._writer.add_event(_event(profile, there, self._clock()), run=profile.run)

    def _appear(self, profile: Profile) -> None:
        """Give a profile its final name. If its traces do not fit on the disk, publish it without them."""
        try:
            profiles.finish(self._folder, profile)
        except OSError as error:
            self._errors.note("profile", error)
            for rank in profile.captured:
                rank.state, rank.reason = "failed", f"its trace could not be kept: {error.strerror}"
            profiles.finish(self._folder, profile)

    def _explain(self, path: Path) -> None:
        """
        Start a process that explains what the suspect does more of and records that in the profile's
        manifest.
        """
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._explaining = subprocess.Popen(
            [sys.executable, "-m", EXPLAIN, str(path)],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _reap(self) -> None:
        """Count an explanation process that failed."""
        explaining = self._explaining
        if explaining is not None and explaining.poll() is not None:
            self._errors.count("profile: not explained", int(explaining.returncode != 0))
            self._explaining = None

    def _add_rows(self, profile: Profile) -> None:
        """Store the rows of the recorded steps next to the traces."""
        self._commit()
        with SessionFile(self._writer.path, run=profile.run) as file:
            wanted = {step.step for rank in profile.captured for step in rank.steps}
            processes = {rank.process for rank in profile.captured if rank.process is not None}
            rows = {step: _rows_of(file, processes, step) for step in wanted}
        for rank in profile.captured:
            rank.steps = [
                ProfileStep(
                    s.step, s.begin_ns, s.end_ns, s.sync_exit_ns, rows[s.step].get(rank.process or -1)
                )
                for s in rank.steps
            ]


def _event(profile: Profile, there: bool, now_ns: int) -> wire.Event:
    captured, lacking = profile.captured, [rank for rank in profile.ranks if rank.state != "captured"]
    message = f"profile {profile.id}: nothing was captured"
    if captured and there:
        who = text.ranks(rank.rank for rank in captured)
        message = f"profile {profile.id} of {who}: {profile.extent}"
    why = profile.error or "; ".join(f"rank {rank.rank}: {rank.reason}" for rank in lacking[:_NAMED])
    data: dict[str, codec.Value] = {
        "profile": profile.id,
        "ranks": len(captured),
        "asked": len(profile.ranks),
    }
    return wire.Event(
        EVENT, now_ns, profile.first_step, message=f"{message} ({why})" if why else message, data=data
    )


def _rows_of(file: SessionFile, processes: set[int], step: int) -> dict[int, list[int]]:
    """Return the time (ns) in each stage of one step, by rank process. Segments of a stage are added up."""
    sums = {}
    for process, chunks in file.step_chunks(processes, step).items():
        keys, _, rows = columns_of(chunks)
        rows_of_step = rows[keys >> SEGMENT_BITS == step, :N_STAGES]
        if len(rows_of_step):
            sums[process] = [int(ns) for ns in np.sum(rows_of_step, axis=0)]
    return sums
