"""Takes what happens to ranks, and writes the bundles of incidents; whatever goes wrong is counted."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from traceml_ray import wire
from traceml_ray.agent.memory_history import KIND as SNAPSHOT
from traceml_ray.agent.memory_history import NAME as SNAPSHOT_NAME
from traceml_ray.agent.memory_history import SNAPSHOTS
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.errors import Errors, error_text
from traceml_ray.files import remove, write_file
from traceml_ray.monitor.incidents import Incident, Incidents
from traceml_ray.reports.deaths import Death
from traceml_ray.reports.manifest import manifest_of, reason_of, stacks_of
from traceml_ray.reports.run_facts import RunFacts
from traceml_ray.settings import Settings
from traceml_ray.stages import STAGES
from traceml_ray.store.bundles import FOLDER, MANIFEST, Cause, bundles_of, making, new_name, prune
from traceml_ray.store.excerpt import cut
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.session import DATABASE
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.writer import SessionWriter

STACKS = "stacks.txt"
_SNAPSHOT_NS = 60_000_000_000
"""A record of the allocator that is so much older than the first cause is of the same incident."""
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
    One per session. What is taken is taken with the writer's lock held.

    Args:
        settings: of the session.
        writer: of the session file; its lock is held briefly.
        errors: the aggregator's, by place.
        clock: wall clock in ns.
        ticks: monotonic ns.
        commit: writes what is pending; False where it cannot.
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
            self.incidents.know(bundle.manifest.causes)

    def died(self, run: str | None, found: Sequence[Death]) -> None:
        """Take the deaths that are known of a run so far."""
        for death in found:
            if death.message.startswith("KeyboardInterrupt"):  # a person has ended the run
                continue
            cause = Cause(
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
        """Take the verdict on a hang, each time that it is given."""
        began_ns, named = verdict.began_ns or self.clock(), [*verdict.ranks, None]
        cause = Cause(
            *("hang", began_ns, verdict.why, run),
            *(verdict.rank if verdict.rank is not None else named[0], verdict.last_step, verdict.stage),
        )
        self.incidents.note(cause)

    def take(self, event: wire.Event, process: RankProcess | None) -> None:
        """Take any event of a rank process, or of a node, if it is about a bundle."""
        if event.kind == "oom":
            self._caught(event, process)
        elif event.kind == "bundle_request":
            self.requested(str(event.data.get("request")))

    def _caught(self, event: wire.Event, process: RankProcess | None) -> None:
        """Take that memory ran out inside `capture_oom`."""
        data, rank = event.data, process.rank if process else None
        where, traceback = data.get("where"), data.get("traceback")
        who = "a process of unknown rank" if rank is None else f"rank {rank}"
        at = f" in {where}" if where else ""
        cause = Cause(
            "oom",
            event.t_ns,
            f"memory ran out on {who}{at}: {event.message.rstrip('.: ')}.",
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
        Take the request of a person, by its id; return why it gets no bundle, None while that is not so. May
        be repeated: then it is still the same request.
        """
        incidents = self.incidents
        if not self.settings.bundles and incidents.failure(request) is None:
            self.errors.count("no bundle: bundles=0")
            incidents.fail(request, "this session keeps none (bundles=0)")
        if incidents.failure(request) is None:
            incidents.note(Cause("request", self.clock(), "it was requested.", request=request))
        return incidents.failure(request)

    def stopped(self, exit_code: int) -> None:
        """Take that the job ended with the launcher's exit code: a signal from outside is an incident."""
        number = _FROM_OUTSIDE.get(exit_code)
        if number is not None and self.writer.processes:
            self.incidents.note(Cause("terminated", self.clock(), f"the job was ended by {number.name}."))

    def write_due(self, at_end: bool = False) -> None:
        """Write the bundle that is due; `at_end`, whatever has happened. An error is counted."""
        with self._writing:
            with self.writer.lock:
                due, found = self.incidents.is_due(), self.incidents.open
                if found is None or not (due or (at_end and found.changed)):
                    return
                causes = list(found.causes)
            name, why = None, ""
            try:
                if self.settings.bundles:
                    name = self._write(found, causes)
            except BundleError as error:
                why = str(error)
                self.errors.count(f"no bundle: {why}")
            except Exception as error:
                why = error_text(error)
                self.errors.note("bundle", error)
            with self.writer.lock:
                self.incidents.written(causes, name, why)

    def _write(self, incident: Incident, causes: list[Cause]) -> str:
        if not self.commit():
            raise BundleError("rows cannot be written to the session file")
        run = next((cause.run for cause in causes if cause.run is not None), None)
        with SessionFile(self.writer.path, run=run) as file, file.at_one_moment():
            facts = RunFacts(file, self.settings.thresholds)
            manifest = manifest_of(facts, causes, self.folder.name, self.settings.changed())
        name, seconds = incident.name, 60 * self.settings.bundle_minutes
        if name is None or manifest.reason not in name:
            name = new_name(self.folder, manifest.t_ns, manifest.reason)
        with making(self.folder, name, incident.name) as here:
            cut(self.writer.path, here / DATABASE, seconds, int(seconds / self.settings.interval) + 1)
            taken, manifest.left_out = self._add_snapshots(facts, incident, manifest.t_ns, here)
            if stacks := stacks_of(facts, manifest.t_ns):
                write_file(here / STACKS, stacks.encode())
            manifest.files = {path.name: path.stat().st_size for path in sorted(here.iterdir())}
            write_file(here / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2))
        remove(taken)
        if name in prune(self.folder, self.settings.bundles, self.settings.bundle_bytes):
            raise BundleError("it is larger than bundle_bytes, and was removed")
        return name

    def _add_snapshots(
        self, facts: RunFacts, incident: Incident, t_ns: int, here: Path
    ) -> tuple[list[Path], dict[str, str]]:
        """
        Put what torch's allocators have written since shortly before `t_ns` into `here`; return the files
        that can go, and what is not there, with the reason.
        """
        room, taken, left_out = self.settings.bundle_bytes // 2, [], {}
        before = None if incident.name is None else self.folder / FOLDER / incident.name
        for event in facts.events:
            if event["kind"] != SNAPSHOT or event["t_ns"] < t_ns - _SNAPSHOT_NS:
                continue
            path = Path(str(event["data"].get("path")))
            places = [self.folder / SNAPSHOTS / path.name, *([before / path.name] if before else [])]
            found = next((each for each in places if each.is_file() and not each.is_symlink()), None)
            if found is None or not path.name.startswith(SNAPSHOT_NAME):
                left_out[path.name] = f"it is on {event['data'].get('host')}: {path}"
            elif found.stat().st_size > room:
                left_out[path.name] = f"it has {found.stat().st_size} bytes, which is too large for a bundle"
            elif not (here / path.name).exists():
                os.link(found, here / path.name, follow_symlinks=False)
                room -= found.stat().st_size
                taken.append(places[0])
        return taken, left_out
