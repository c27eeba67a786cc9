"""
Starts and ends the monitor of one launch: its session folder, its Ray and its actors. Makes the folder in
which its ranks and their relay leave rows that are not known to be stored.

Nothing here may hurt the run. Before the ranks start, a session that cannot be made is an error. From then on
whatever goes wrong is one line on stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from traceml_ray import text
from traceml_ray.agent.bootstrap import rank_environment
from traceml_ray.errors import Errors, error_text
from traceml_ray.files import write_file
from traceml_ray.monitor import private_folders as folders
from traceml_ray.monitor.finish import LAUNCHER_S
from traceml_ray.monitor.offline import DiskHangsError, OfflineEnd, OfflineRequest
from traceml_ray.ray.actors import FILE as ATTACHMENT
from traceml_ray.ray.actors import ActorConfig, Attachment
from traceml_ray.reports.headlines import beside, line_of
from traceml_ray.settings import RelayPaths, Settings
from traceml_ray.signals.check.agent import FILE as CHECKS_FILE
from traceml_ray.signals.memory.records import SNAPSHOTS
from traceml_ray.sinks.alerts.config import read_alerts
from traceml_ray.sinks.table import environment_of, wanted
from traceml_ray.store.session import (
    Live,
    MonitorState,
    SessionError,
    SessionFolder,
    SessionHeldError,
    prepare,
    write_live,
)
from traceml_ray.store.summary_shape import summary_of
from traceml_ray.text import log
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.spool import SUFFIX

from .arguments import Nodes
from .bring_up import BringUp
from .check_process import CheckReply
from .cluster import JOIN_S, PrivateRay, yield_cores
from .control import ask_finish
from .guard import at_the_end, guarded, in_time
from .helper import HelperRequest
from .view_processes import DashboardProcess, LiveView, terminal


def make_spool(runtime: Path, session: SessionFolder | None) -> Path:
    """
    Make the spool folder inside the private folder of the launch. On the session's disk, a rank that ends
    would hang if that disk hangs. A link in the spool folder points to the place for large files. Raises
    OSError.
    """
    spool = runtime / "spool"
    spool.mkdir(mode=0o700)
    if session is not None:
        (session.path / SNAPSHOTS).mkdir(mode=0o700)
        (spool / SNAPSHOTS).symlink_to(session.path / SNAPSHOTS)
    return spool


def report_undelivered_rows(spool: Path, why: str = "") -> bool:
    """Print how many ranks have undelivered rows, and the path of `spool`; return whether any has."""
    left = len({path.name.partition(".")[0] for path in spool.glob(f"*{SUFFIX}")})
    if left:
        because = f" ({why})" if why else ""
        log(f"rows of {left} ranks could not be delivered{because}; they are in {spool}")
    return left > 0


_MAX_ALSO = 6
"""Number of findings that are printed in addition to the first one."""
ATTACH_S = 30.0
"""
Time that a running cluster may take to answer, in s. A Ray of our own may take longer, because it
must start.
"""
_RAY_ENDS = (
    ": later rows stay on their node, because Ray ends with this one; with --ray-address they would be "
    "delivered"
)
_SINKS_S = 1.0
"""How long a launcher waits until the process that reports the end of its session runs, in s."""
_NO_MONITOR = "no monitor for this run"
_RAY_IS_LEFT = "Ray of the monitor may still run"


def monitor_of(
    settings: Settings,
    info: dict[str, str | int | float | None],
    environ: Mapping[str, str],
    nodes: Nodes,
    dashboard: Mapping[str, str] | None = None,
    live: bool = False,
) -> Monitor | None:
    """
    Return the monitor of a launch. Returns None, after a line on stderr, if a name that the user has not
    chosen is taken: on a cluster that stays, another node may still be busy with the job before.

    Raises SessionError when there can be no such session, SettingError for a file that a setting names.
    """
    if nodes.first and settings.baseline is not None:
        from traceml_ray.reports.baseline import checked  # imported late: it imports numpy

        settings = checked(settings)
    if nodes.first:
        settings = read_alerts(settings, environ)
    try:
        return Monitor(settings, info, environ, nodes, dashboard, live)
    except SessionHeldError as error:
        if settings.session or not nodes.several:
            raise
        log(f"no monitor for this run: {error}")
        return None


@dataclass(eq=False)
class Monitor:
    """
    The monitor of one launch. Each node of a job makes a relay; only the first one also has the folder of the
    session and makes its aggregator.

    Args:
        settings: settings of the session. With `ray_address` None a private Ray is started.
        info: what the launcher knows of the run, by name.
        environ: the user's environment.
        nodes: the nodes of the job.
        dashboard: options of the dashboard: `port` ("0" for a free one, "" for the usual one) and `linger`.
            With None there is no dashboard.
        live: whether to show the session beneath the job's output.

    Raises SessionError if the session cannot be made.
    """

    settings: Settings
    info: dict[str, str | int | float | None]
    environ: Mapping[str, str]
    nodes: Nodes
    dashboard: Mapping[str, str] | None = None
    live: bool = False

    def __post_init__(self) -> None:
        name = self.settings.session or self.nodes.job or None
        self._session = prepare(self.settings.out, name) if self.nodes.first else None
        try:
            self._runtime, self._lock = _private_folder()
            self._spool = make_spool(self._runtime, self._session)
        except OSError as error:
            if self._session:
                self._session.release()
            raise SessionError(f"no room for the monitor's own files: {error}") from error
        self._name = self._session.name if self._session else str(name)
        self.settings = msgspec.structs.replace(self.settings, session=self._name)
        self._socket = self._runtime / "relay.sock"
        # The time of the launch: Ray may start long after it, or never.
        self.info = {"started_at": time.time_ns(), **self.info}
        self._address = ""
        self._ray: PrivateRay | None = None
        self._bring_up: BringUp | None = None
        self._dashboard: DashboardProcess | None = None
        self._disk_hangs = False
        """Whether the session's disk was found to hang at the end. Then nothing more is written to it."""
        self._view: LiveView | None = None

    @property
    def folder(self) -> str:
        """Return the path of the session's folder; "" on a node that has none."""
        return str(self._session.path) if self._session is not None else ""

    def rank_environment(self) -> dict[str, str]:
        """Return the variables that ranks get in addition to the user's environment."""
        paths = RelayPaths(str(self._socket), str(self._spool))
        return rank_environment(self.settings, paths, dict(self.environ))

    def store(self, checked: CheckReply | None) -> None:
        """Have the ranks of this node store what the check before the job has measured here."""
        if checked is not None and checked.checks:
            with guarded("the check is not in the session"):
                write_file(self._spool / CHECKS_FILE, msgspec.json.encode(checked.checks))

    def discard(self) -> None:
        """Undo what `__init__` did. This is called instead of `start`."""
        folders.remove(self._runtime)
        os.close(self._lock)
        if (session := self._session) is not None:
            shutil.rmtree(session.path, ignore_errors=True)
            session.release()
            if session.moved is not None:
                with contextlib.suppress(OSError):
                    session.moved.rename(session.path)

    def start(self) -> None:
        """Start everything in the background. When that fails, training goes on without a monitor."""
        try:
            self._start()
        except Exception as error:
            log(f"{_NO_MONITOR}: {error_text(error)}")
            with contextlib.suppress(OSError):  # a full disk may be the reason
                self._show_state("failed", error_text(error))
            return
        with guarded("no live view"):
            self._start_view()
        with guarded("no dashboard"):
            self._start_dashboard()

    def _start(self) -> None:
        if self._session and self._session.moved is not None:
            log(f"an older session {self._name!r} is now {self._session.moved}")
        environ, address = self.environ, self.settings.ray_address
        if address is None:
            self._ray = PrivateRay(self._runtime, self.environ, self.nodes.head, self.nodes.rank)
            environ, address = self._ray.environ, self._ray.address
            if self._ray.token is None:
                log("no RAY_AUTH_TOKEN and no token file: anyone who can reach this job's Ray can use it")
        self._address = address
        self._show_state("starting")
        self._let_others_attach(address)
        self._bring_up = BringUp(
            self._ray, self._request(address), environ, self._runtime, self.settings.nice, self._show_state
        )
        self._bring_up.begin()

    def finish(self, exit_code: int, failures: list[wire.RankFailure]) -> None:
        """End the session: write its files, print the verdict, leave nothing behind. Never raises."""
        with at_the_end(self._unfinished):
            self._finish(exit_code, failures)

    def _finish(self, exit_code: int, failures: list[wire.RankFailure]) -> None:
        """Do every part of the end, even if another part fails."""
        deadline, unfinished = time.monotonic() + LAUNCHER_S, self._unfinished
        finished, left_behind = None, True
        if self._view is not None:
            with at_the_end("the live view could not be ended"):
                self._view.end()
        if self._dashboard is not None:
            with at_the_end("the dashboard could not be ended"):
                self._dashboard.end()
        message = wire.Finish(
            codec.VERSION, exit_code, failures, stop=self.nodes.first, nodes=self.nodes.count
        )
        with at_the_end("the monitor could not be asked to finish"):
            self._end_helper()
            finished = ask_finish(self._socket, message, deadline - time.monotonic())
        offline = None
        with at_the_end(unfinished):
            if self._session is not None and (finished is None or not finished.ok):
                offline = self._offline_end(self._session, message)
        with at_the_end(_RAY_IS_LEFT):
            self._end_ray()
        with at_the_end(unfinished):
            if self._session is None:
                left_behind = self._report_elsewhere(finished)
            else:
                left_behind = self._finish_here(self._session, finished, offline)
        if self._dashboard is not None:
            with at_the_end("the dashboard could not be ended"):
                self._dashboard.kill()
                self._print_dashboard_command(self._dashboard)
        with at_the_end(f"{self._runtime} could not be removed"):
            self._clear(left_behind)
        with at_the_end(unfinished):
            if self._bring_up is not None:
                self._bring_up.close()
        with at_the_end(unfinished):
            os.close(self._lock)
        with at_the_end(unfinished):
            if self._session is not None and not self._disk_hangs:
                in_time(self._session.release, LAUNCHER_S)

    @property
    def _unfinished(self) -> str:
        return f"session {self._name!r} could not be finished"

    def _show_state(self, monitor: MonitorState, detail: str = "") -> None:
        """Write the state of the monitor into the session's folder. Raises OSError."""
        if self._session is None:
            return
        began_ns = int(self.info["started_at"] or 0)
        live = Live(os.getpid(), str(self._socket), self._address, monitor, began_ns, detail)
        write_live(self._session.path, live)

    def _finish_here(
        self, session: SessionFolder, finished: wire.Finished | None, offline: OfflineEnd | None
    ) -> bool:
        """Let the session's files be written, and print the verdict. Return whether rows are left here."""
        try:
            if offline is not None and not self._finish_offline(offline, finished):
                return report_undelivered_rows(self._spool)
            if finished is not None and finished.waiting:
                late, count = finished.waiting, self.nodes.count
                again = _RAY_ENDS if self._ray is not None else ": they are written again when all have"
                log(f"the files are written without {late} of {count} nodes ({finished.detail}){again}")
            in_time(lambda: _report(session), LAUNCHER_S)
            return False
        except (DiskHangsError, TimeoutError):
            self._disk_hangs = True
            log(
                f"{self._unfinished}: the disk of {session.path} does not answer. The reports are not "
                "written, and rows of the last seconds are not in it. Once it answers, "
                f"`traceml-ray report {shlex.quote(str(session.path))}` reports what is stored."
            )
            return report_undelivered_rows(self._spool)

    def _report_elsewhere(self, finished: wire.Finished | None) -> bool:
        """Print where the session is. Return whether rows of this node are left here."""
        left = report_undelivered_rows(self._spool, finished.detail if finished is not None else "")
        host = self.nodes.host or "the first node"
        log(f"session {self._name!r} is written by the launcher on {host}, into its folder of sessions")
        return left

    def _clear(self, left_behind: bool) -> None:
        """Remove the private folder, except for rows that could not be delivered."""
        if not left_behind:
            folders.remove(self._runtime)
            return
        for path in self._runtime.iterdir():
            if path.is_dir() and path != self._spool:
                folders.remove(path)
            elif path != self._spool:
                path.unlink(missing_ok=True)

    def _start_view(self) -> None:
        """Start the live view. The run does not wait for it."""
        fd = terminal() if self.live else None
        if fd is None:
            return
        if self._session is None:
            log(f"the live view is on {self.nodes.host or 'the first node'}")
            return
        environ = {name: value for name, value in self.environ.items() if name != "RAY_ADDRESS"}
        self._view = LiveView(self._session.path, fd, environ)
        yield_cores(self._view.pid, self.settings.nice)

    def _start_dashboard(self) -> None:
        """Start the dashboard. The run does not wait for it."""
        if self.dashboard is None:
            return
        if self._session is None:
            log(f"the dashboard is on {self.nodes.host or 'the first node'}")
            return
        environ = {name: value for name, value in self.environ.items() if name != "RAY_ADDRESS"}
        out = str(self._session.path.parent)
        self._dashboard = DashboardProcess(self._name, environ, log, sessions=out, **self.dashboard)

    def _print_dashboard_command(self, dashboard: DashboardProcess) -> None:
        """Print the command that opens the session in a browser, and whether its dashboard stays."""
        if dashboard.lingers:
            log(f"dashboard: {dashboard.url} stays while a browser watches")
        if dashboard.url and self._session is not None:
            log(f"to look at it again: traceml-ray dashboard {shlex.quote(str(self._session.path))}")

    def _let_others_attach(self, address: str) -> None:
        """Write what ranks and views need to attach to a file, so that the token is in no environment."""
        attachment = Attachment(address)
        if self._ray is not None:
            environ: dict[str, str | None] = {name: None for name in self.environ if name.startswith("RAY_")}
            environ["RAY_AUTH_MODE"] = self._ray.environ["RAY_AUTH_MODE"]
            if self._ray.token is not None:
                environ["RAY_AUTH_TOKEN_PATH"] = str(self._runtime / "token")
                write_file(self._runtime / "token", self._ray.token.encode())
            attachment = Attachment(address, str(self._ray.folder), environ)
        write_file(self._runtime / ATTACHMENT, msgspec.json.encode(attachment))

    def _request(self, address: str) -> HelperRequest:
        actors = ActorConfig(
            session=self._name,
            folder=str(self._session.path) if self._session else "",
            socket=str(self._socket),
            spool=str(self._spool),
            settings=self.settings,
            info=self.info,
            environ=environment_of(self.settings, self.environ),
        )
        return HelperRequest(
            os.getpid(),
            address,
            actors,
            ATTACH_S if self.nodes.first and self._ray is None else JOIN_S,
            temp_dir=str(self._ray.folder) if self._ray is not None else "",
            first=self.nodes.first,
        )

    def _end_helper(self) -> None:
        if self._bring_up is not None:
            self._bring_up.end()

    def _end_ray(self) -> None:
        if self._ray is not None:
            self._ray.stop()

    def _offline_end(self, session: SessionFolder, message: wire.Finish) -> OfflineEnd:
        request = OfflineRequest(str(session.path), self.settings, message, str(self._spool), self.info)
        return OfflineEnd(request, self.environ, self._runtime)

    def _finish_offline(self, offline: OfflineEnd, finished: wire.Finished | None) -> bool:
        """End the session without its aggregator. Return whether its files are written."""
        why = finished.detail if finished is not None else ""
        if why:
            log(f"finishing the session without its aggregator: {why}")
        reply = offline.finish(why)
        if reply.aside:
            log(f"the session file was damaged and is now {reply.aside}; some rows are lost with it")
        if reply.error:
            log(f"{self._unfinished}: {reply.error}")
        else:
            self._report_end()
        return not reply.error

    def _report_end(self) -> None:
        """Have the sinks report a session whose aggregator did not: it was not up yet, or has died."""
        if self._session is not None and wanted(self.settings):
            from traceml_ray.monitor.sink_process import SinkProcess  # rarely needed

            environ = environment_of(self.settings, self.environ)
            sinks = SinkProcess(self._session.path, self.settings, lambda _: b"", Errors(), environ=environ)
            sinks.end()
            sinks.join(_SINKS_S)


def _report(session: SessionFolder) -> None:
    """Print the most severe finding of the summary, the verdict on its steps, and where the files are."""
    # Snapshots that matter have been copied into a bundle.
    shutil.rmtree(session.path / SNAPSHOTS, ignore_errors=True)
    summary = summary_of(json.loads(session.summary_json.read_bytes()))
    first, verdict = summary.conclusion, summary.verdict
    log(f"{first.label}: {first.why}")
    if first.next:
        log(f"next: {first.next}")
    if first.subject != "steps":
        log(f"steps: {text.words(verdict.label)}: {verdict.why}")
    for one in beside(summary.findings, first.key)[:_MAX_ALSO]:
        log(f"also: {line_of(one)}")
    log(f"files: {session.path}")


def _private_folder() -> tuple[Path, int]:
    """Return a new folder for sockets and Ray's files, and the lock that marks it as in use."""
    folders.remove_stale()
    folder = Path(tempfile.mkdtemp(prefix="traceml-", dir=folders.PLACE))
    return folder, folders.lock_private(folder)
