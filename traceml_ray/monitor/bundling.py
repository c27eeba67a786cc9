"""
Collects what happens to ranks and writes the bundles of incidents. Errors are counted.

`Incidents` decides what belongs to one incident and when its bundle must be written. It does no I/O.

When one rank fails, its peers fail after it, and their last batches arrive a moment later. So a bundle is
written after a short settling time. What happens later, within `SAME_S`, belongs to the same incident: the
bundle is written anew once, when that time is over or the session ends.

A person who requests a bundle always gets one. Requests that follow each other quickly share the next one.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from traceml_ray.analysis.verdict import Verdict
from traceml_ray.errors import Errors, error_text
from traceml_ray.files import remove, write_file
from traceml_ray.monitor.hang_watch import STACKS_S
from traceml_ray.reports.deaths import Death
from traceml_ray.reports.manifest import manifest_of, reason_of, stacks_of
from traceml_ray.reports.run_facts import RunFacts
from traceml_ray.settings import Settings
from traceml_ray.signals.memory.records import SNAPSHOT, SNAPSHOT_NAME, SNAPSHOTS
from traceml_ray.signals.views import VIEWS
from traceml_ray.stages import STAGES
from traceml_ray.store.bundles import FOLDER, MANIFEST, BundleCause, bundles_of, making, new_name, prune
from traceml_ray.store.excerpt import cut
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.results import EventRow
from traceml_ray.store.session import DATABASE
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.writer import SessionWriter
from traceml_ray.wire import messages as wire

SETTLE_S = 2.0
"""Time after a cause in which other ranks may still send, and their stacks arrive, in s."""
SAME_S = 60.0
"""Time after the first cause of an incident in which further causes belong to it, in s."""
REQUEST_S = 5.0
"""
Shortest time between two requested bundles, in s. A request that comes earlier waits until it has
passed.
"""
MAX_PAUSE_S = 3600.0
"""
Longest pause between bundles for errors that a script catches, in s. Such errors may occur in every step. The
first one makes a bundle, the next bundle may be made after a minute, and each further pause is twice as long.
"""
MAX_CAUSES = 64
"""Largest number of causes, and of requests, that are kept per incident."""
MAX_FAILED = 64
"""Largest number of requests whose failure is remembered."""
ASK_S = 10.0
"""Time for which ranks are asked for their stacks, in s."""
ASKED = "bundle-"
"""Prefix of the ids of commands that ask for stacks for a bundle."""


def asked_for_bundle(event: EventRow) -> bool:
    """Return whether `event` answers a command that was sent for a bundle."""
    return str(event.data.get("dump")).startswith(ASKED)


@dataclass(eq=False)
class OpenIncident:
    """What happened within one incident; times are in seconds of `Incidents.clock`."""

    began: float
    due: float
    causes: list[BundleCause] = field(default_factory=list)
    name: str | None = None
    """Name of the incident's bundle. None: it is not written yet."""
    changed: bool = True
    """Whether something has happened since the bundle was written, or it is not written yet."""
    stacks_for: BundleCause | None = None
    """The cause for which ranks are asked for their stacks."""
    stacks_until: float = 0.0
    """Time until which ranks are asked for their stacks, in s."""
    written: int = 0
    """Number of the incident's causes that are in the bundle."""

    @property
    def until(self) -> float:
        """Time until which further causes belong to the incident."""
        return self.began + SAME_S

    @property
    def requested(self) -> bool:
        """Whether a request waits for its bundle to be written."""
        return self.changed and any(cause.request is not None for cause in self.causes[self.written :])


@dataclass(eq=False)
class Incidents:
    """
    The incidents of one session. The caller holds the writer's lock.

    Args:
        clock: returns monotonic seconds.
        count: counts, by name, causes and requests that make no bundle.
    """

    clock: Callable[[], float]
    count: Callable[[str], object]
    open: OpenIncident | None = None

    def __post_init__(self) -> None:
        self._known: set[object] = set()
        self._pause_s = SAME_S
        self._caught_from = -MAX_PAUSE_S
        """Time from which a caught error makes a new bundle, in monotonic seconds."""
        self._request_from = -MAX_PAUSE_S
        """Time from which a request makes a new bundle, in monotonic seconds."""
        self._failed: dict[str, str] = {}
        """Why the bundle of a request could not be made, by request id."""

    def restore(self, causes: Iterable[BundleCause]) -> None:
        """Restore the causes that are already in bundles, after a restart."""
        self._known.update(cause.key for cause in causes)

    def note(self, cause: BundleCause) -> None:
        """Add a cause if it is new."""
        if cause.key in self._known:
            return
        now, incident = self.clock(), self.open
        if incident is None and not self._may_begin(cause, now):
            self.count(f"no bundle, too soon after the last: {cause.reason}")
            return
        if incident is None:
            incident = self.open = OpenIncident(now, now)
        requested = incident.requested
        kept = sum((other.request is None) == (cause.request is None) for other in incident.causes)
        if kept < MAX_CAUSES:
            incident.causes.append(cause)
        elif cause.request is not None:
            self.fail(cause.request, f"{MAX_CAUSES} others are in the same bundle; ask again in a minute")
            return
        self._known.add(cause.key)
        if cause.request is None:
            self._happened(incident, cause, now)
        elif not requested:  # else it shares the bundle that is under way
            self._requested(incident, cause, now)
        incident.changed = True

    def _happened(self, incident: OpenIncident, cause: BundleCause, now: float) -> None:
        if incident.name is None:
            incident.due = now + (STACKS_S if cause.reason == "hang" else SETTLE_S)
        if incident.stacks_for is None and cause.reason not in (
            "hang",
            "terminated",
        ):  # there they come anyway
            incident.stacks_for, incident.stacks_until = cause, now + ASK_S

    def _requested(self, incident: OpenIncident, cause: BundleCause, now: float) -> None:
        incident.due = now + SETTLE_S
        if len(incident.causes) == 1:  # only this request needs the bundle
            incident.due = max(incident.due, self._request_from)
        incident.stacks_for, incident.stacks_until = cause, now + ASK_S

    def _may_begin(self, cause: BundleCause, now: float) -> bool:
        if cause.reason != "oom" or cause.fatal:
            return True
        if now < self._caught_from:
            return False
        self._caught_from = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        return True

    def fail(self, request: str, why: str) -> None:
        """Record why a request gets no bundle."""
        self._failed[request] = why
        while len(self._failed) > MAX_FAILED:
            del self._failed[next(iter(self._failed))]

    def failure(self, request: str) -> str | None:
        """Return why a request gets no bundle. None if it has not failed."""
        return self._failed.get(request)

    def is_due(self) -> bool:
        """Whether the bundle of the open incident must be written now. Closes an incident that is over."""
        incident, now = self.open, self.clock()
        if incident is not None and not incident.changed and now >= incident.until:
            self.open = None
        return incident is not None and incident.changed and now >= min(incident.due, incident.until)

    def written(self, causes: Sequence[BundleCause], name: str | None, why: str = "") -> None:
        """
        Record that the bundle of the open incident was written with `causes`. If `name` is None, writing
        failed because of `why`, and it is not tried again for these causes.
        """
        incident = self.open
        if incident is None:
            return
        incident.name, incident.written = name or incident.name, len(causes)
        incident.changed = len(incident.causes) > len(causes)  # more came while it was written
        incident.due = self.clock() + SETTLE_S if incident.changed else incident.until
        requests = [cause.request for cause in causes if cause.request is not None]
        if requests:
            self._request_from = self.clock() + REQUEST_S
        if name is None:
            for request in requests:
                self.fail(request, why)
        if len(requests) == len(incident.causes):
            self.open = None  # the next request is for a bundle of its own
        self.is_due()

    def commands(self) -> list[wire.Command]:
        """
        Return the commands that ask ranks for their stacks. A hang needs none: its ranks are
        asked anyway.
        """
        incident = self.open
        if incident is None or incident.stacks_for is None or self.clock() >= incident.stacks_until:
            return []
        return [wire.Command("dump", {"id": f"{ASKED}{incident.stacks_for.t_ns:x}"})]


STACKS = "stacks.txt"
_SNAPSHOT_NS = 60_000_000_000
"""An allocator record belongs to an incident if it is at most this much older than the first cause."""
_BEFORE_NS = 120_000_000_000
"""What signals reported at most this much before the first cause belongs to an incident, in ns."""
_FROM_OUTSIDE = {
    code: number
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    for code in (-number, 128 + number)
}
"""Signals that end a job, by its exit code: not Ctrl-C, which is of a person who looks on."""
"""Exit codes of a launcher that was ended by it."""


class BundleError(RuntimeError):
    """A bundle that cannot be made or kept; the message, fixed in the code, has the reason."""


@dataclass(eq=False)
class Bundling:
    """
    Writes the bundles of one session. The methods that add causes are called with the writer's lock held.

    Args:
        settings: of the session.
        writer: writes the session file; its lock is held briefly.
        errors: the aggregator's error counts, by place.
        clock: wall clock in ns.
        ticks: monotonic ns.
        commit: writes pending rows; returns False if that fails.
    """

    settings: Settings
    writer: SessionWriter
    errors: Errors
    clock: Callable[[], int]
    ticks: Callable[[], int]
    commit: Callable[[], bool]

    def __post_init__(self) -> None:
        self.incidents = Incidents(lambda: self.ticks() / 1e9, self.errors.count)
        self._writing = threading.Lock()
        self.folder = self.writer.path.parent
        for bundle in bundles_of(self.folder):  # of an aggregator that was restarted
            self.incidents.restore(bundle.manifest.causes)

    def died(self, run: str | None, all_deaths: Sequence[Death]) -> None:
        """Add the known deaths of a run."""
        for death in all_deaths:
            if death.message.startswith("KeyboardInterrupt"):  # a person has ended the run
                continue
            cause = BundleCause(
                reason_of(death),
                death.when.t_ns,
                f"rank {death.rank} died: {death.reason}.",
                run=run,
                rank=death.rank,
                step=death.last_step,
                stage=death.stage,
                error=death.message or None,
                traceback=death.traceback,
                fatal=True,
                process=death.process.id if death.process else None,
            )
            self.incidents.note(cause)

    def hung(self, run: str, verdict: Verdict) -> None:
        """Add the verdict on a hang, each time that it is given. A rank that is busy is no hang."""
        if verdict.label != "hang":
            return
        began_ns, named = verdict.began_ns or self.clock(), [*verdict.ranks, None]
        cause = BundleCause(
            *("hang", began_ns, verdict.why, run),
            *(verdict.rank if verdict.rank is not None else named[0], verdict.last_step, verdict.stage),
        )
        self.incidents.note(cause)

    def add_event(self, event: wire.Event, process: RankProcess | None) -> None:
        """Add an event of a rank process or a node, if a bundle needs it."""
        if event.kind == "oom":
            self._caught(event, process)
        elif event.kind == "bundle_request":
            self.requested(str(event.data.get("request")))

    def _caught(self, event: wire.Event, process: RankProcess | None) -> None:
        """Record that memory ran out inside `capture_oom`."""
        data, rank = event.data, process.rank if process else None
        where, traceback = data.get("where"), data.get("traceback")
        who = "a process of unknown rank" if rank is None else f"rank {rank}"
        where_text = f" in {where}" if where else ""
        cause = BundleCause(
            "oom",
            event.t_ns,
            f"memory ran out on {who}{where_text}: {event.message.rstrip('.: ')}.",
            run=process.identity.job_id if process and process.identity else None,
            rank=rank,
            step=event.step,
            stage=None if event.stage is None else STAGES[event.stage],
            where=None if where is None else str(where),
            error=event.message,
            traceback=traceback if isinstance(traceback, str) else None,
        )
        self.incidents.note(cause)

    def requested(self, request: str) -> str | None:
        """
        Accept a person's request by its id. Return why it gets no bundle, or None if it has not failed. A
        repeated id is the same request.
        """
        incidents = self.incidents
        if not self.settings.bundles and incidents.failure(request) is None:
            self.errors.count("no bundle: bundles=0")
            incidents.fail(request, "this session keeps no bundles (bundles=0)")
        if incidents.failure(request) is None:
            incidents.note(BundleCause("request", self.clock(), "it was requested.", request=request))
        return incidents.failure(request)

    def stopped(self, exit_code: int) -> None:
        """Record that the job ended with the launcher's `exit_code`. A signal from outside is an incident."""
        number = _FROM_OUTSIDE.get(exit_code)
        if number is not None and self.writer.processes:
            self.incidents.note(
                BundleCause("terminated", self.clock(), f"the job was ended by {number.name}.")
            )

    def write_due(self, at_end: bool = False) -> None:
        """Write the bundle if it is due; `at_end`: write whatever has happened. An error is counted."""
        with self._writing:
            with self.writer.lock:
                due, incident = self.incidents.is_due(), self.incidents.open
                if incident is None or not (due or (at_end and incident.changed)):
                    return
                causes = list(incident.causes)
            name, why = None, ""
            try:
                if self.settings.bundles:
                    name = self._write(incident, causes)
            except BundleError as error:
                why = str(error)
                self.errors.count(f"no bundle: {why}")
            except Exception as error:
                why = error_text(error)
                self.errors.note("bundle", error)
            with self.writer.lock:
                self.incidents.written(causes, name, why)

    def _write(self, incident: OpenIncident, causes: list[BundleCause]) -> str:
        if not self.commit():
            raise BundleError("rows cannot be written to the session file")
        run = next((cause.run for cause in causes if cause.run is not None), None)
        with SessionFile(self.writer.path, run=run) as file, file.at_one_moment():
            facts = RunFacts(file, self.settings.thresholds)
            manifest = manifest_of(facts, causes, self.folder.name, self.settings.changed())
            since_ns = manifest.t_ns - _BEFORE_NS
            of_signals = [made for view in VIEWS.values() for made in view.files(file, facts.ranks, since_ns)]
        name, seconds = incident.name, 60 * self.settings.bundle_minutes
        if name is None or manifest.reason not in name:
            name = new_name(self.folder, manifest.t_ns, manifest.reason)
        with making(self.folder, name, incident.name) as here:
            cut(self.writer.path, here / DATABASE, seconds, int(seconds / self.settings.interval) + 1)
            taken, manifest.left_out = self._add_snapshots(facts, incident, manifest.t_ns, here)
            if stacks := stacks_of(facts, manifest.t_ns):
                write_file(here / STACKS, stacks.encode())
            for file_name, contents in of_signals:
                write_file(here / file_name, contents)
            manifest.files = {path.name: path.stat().st_size for path in sorted(here.iterdir())}
            write_file(here / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2))
        remove(taken)
        if name in prune(self.folder, self.settings.bundles, self.settings.bundle_bytes):
            raise BundleError("it is larger than bundle_bytes, and was removed")
        return name

    def _add_snapshots(
        self, facts: RunFacts, incident: OpenIncident, t_ns: int, here: Path
    ) -> tuple[list[Path], dict[str, str]]:
        """
        Copy the allocator records that torch has written since shortly before `t_ns` into `here`. Return the
        files that can be removed, and the reasons for missing records.
        """
        room, taken, left_out = self.settings.bundle_bytes // 2, [], {}
        before = None if incident.name is None else self.folder / FOLDER / incident.name
        for event in facts.events:
            if event.kind != SNAPSHOT or event.t_ns < t_ns - _SNAPSHOT_NS:
                continue
            path = Path(str(event.data.get("path")))
            places = [self.folder / SNAPSHOTS / path.name, *([before / path.name] if before else [])]
            snapshot = next(
                (place_here for place_here in places if place_here.is_file() and not place_here.is_symlink()),
                None,
            )
            if snapshot is None or not path.name.startswith(SNAPSHOT_NAME):
                left_out[path.name] = f"it is on {event.data.get('host')}: {path}"
            elif snapshot.stat().st_size > room:
                left_out[path.name] = (
                    f"it has {snapshot.stat().st_size} bytes, which is too large for a bundle"
                )
            elif not (here / path.name).exists():
                os.link(snapshot, here / path.name, follow_symlinks=False)
                room -= snapshot.stat().st_size
                taken.append(places[0])
        return taken, left_out
