"""
A running session, from outside. `SessionCalls` sends questions to its aggregator while it runs. After the
end, it reads the session's file if the file is on this node. This module also ends sessions: reports that the
aggregator did not write are written from the file.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import psutil

from traceml_ray import __version__, text
from traceml_ray.errors import cause_of
from traceml_ray.interactive.questions import SessionQuestions
from traceml_ray.launchers.ray_train import unwatch_trainers
from traceml_ray.launchers.view_processes import DashboardProcess
from traceml_ray.monitor.finish import ANSWER_S, KILL_S, LEAVE_S
from traceml_ray.monitor.private_folders import is_private
from traceml_ray.ray.actors import (
    About,
    ActorConfig,
    answers,
    cluster_nodes,
    current_config,
    find_aggregator,
    find_relay,
    find_relays,
    forget,
    is_same_actor,
    relay_folder,
    relay_nodes,
)
from traceml_ray.reports.answers import Answers
from traceml_ray.signals.layers.judge import Layers
from traceml_ray.store import query
from traceml_ray.store.profiles import Profile
from traceml_ray.store.rank_processes import why_over
from traceml_ray.store.results import (
    BundleInfo,
    Status,
)
from traceml_ray.store.session import DATABASE, PAGE, REPORTS, SessionFolder, holder
from traceml_ray.views.layer_call import ask_layers
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import ready

_END_POLL_S = 0.05


def stop_session(calls: SessionCalls, timeout: float) -> None:
    """Stop a session, see `Session.stop`. Raises StartError."""
    import ray

    deadline, name = time.monotonic() + timeout, calls.name
    if not ray.is_initialized():
        _stop_without_ray(calls, deadline)
        return
    if calls.is_gone() and find_aggregator(name) is not None:
        return  # what has its name by now is another session
    forget(name)
    if current_config() is None:
        unwatch_trainers()
    finished = _end_actors(calls, timeout)
    while find_aggregator(name) is not None or relay_nodes(name):
        if time.monotonic() > deadline:
            raise StartError(f"session {name!r} is still there {timeout:g} s after it was stopped")
        time.sleep(_END_POLL_S)
    calls.has_ended = True
    if finished is None:
        _finish_from_file(calls)
    elif not finished.ok:
        raise StartError(f"session {name!r} has ended, but its files could not be written: {finished.detail}")


def _end_actors(calls: SessionCalls, timeout: float) -> wire.Finished | None:
    """Make all actors of the session end. Return the aggregator's answer; None if there is none."""
    import ray

    relays = find_relays(calls.name).values()
    try:
        if answers(calls.aggregator, min(ANSWER_S, timeout / 2)):
            reply = ray.get(calls.aggregator.stop.remote(), timeout=max(0.1, timeout - 1))
            return codec.decode(reply, wire.Finished)
    except (ray.exceptions.RayError, ValueError):
        pass
    ray.kill(calls.aggregator, no_restart=True)
    ending = [relay.end.remote(0.0) for relay in relays]
    if ending:
        ray.wait(ending, num_returns=len(ending), timeout=min(LEAVE_S, timeout / 4))
    for relay in relays:
        ray.kill(relay, no_restart=True)
    return None


def _stop_without_ray(calls: SessionCalls, deadline: float) -> None:
    """Stop a session whose cluster has ended with `ray.shutdown()`, if its files are on this node."""
    if calls.has_ended:
        return
    calls.check_file()
    while holder(calls.folder) is not None:
        if time.monotonic() > deadline:
            raise StartError(
                f"session {calls.name!r} runs, and Ray was shut down in this process: "
                f"traceml-ray stop {calls.folder}"
            )
        time.sleep(_END_POLL_S)
    forget(calls.name)
    calls.has_ended = True
    _finish_from_file(calls)


def _finish_from_file(calls: SessionCalls) -> None:
    """
    Write the reports that the aggregator did not write, from the data it had stored, if its files are on this
    node.
    """
    from traceml_ray.monitor.offline import finish_offline

    try:
        if calls.is_finished():
            return
        over = wire.Finish(codec.VERSION, 0)
        end_hung(holder(calls.folder))
        left = relay_folder(calls.name, calls.node_id)
        finish_offline(calls.folder, calls.config.settings, over, left if is_private(left) else None)
    except EndedError:  # its files are on another node
        return
    except Exception as error:
        warnings.warn(f"no report of session {calls.name!r}: {cause_of(error)}", stacklevel=4)


def end_hung(pid: int | None) -> None:
    """End an aggregator of this node that Ray has told to exit, and that does not react."""
    if pid is None:
        return
    with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):  # it has ended by itself
        process = psutil.Process(pid)
        if re.match(r"ray::(.*:)?Aggregator", "".join(process.cmdline()[:1])):  # `NAME:` while it is made
            process.kill()
            process.wait(KILL_S)


QUESTION_S = 20.0
"""Longest time for the answer to a question, in s."""
_AGAIN_S = 0.2
"""Time between two tries while Ray restarts the aggregator, in s."""


class StartError(RuntimeError):
    """
    A session that cannot be started, reached or stopped. The message says which session,
    why, and what to do.
    """


class EndedError(StartError):
    """A session that has ended, or cannot be asked any more. Its files may still exist."""


class SessionCalls:
    """
    Sends calls to one session; any thread may use it. It always calls the same session: another session that
    takes its name is never called.

    Args:
        name: name of the session.
        aggregator: handle of the session's aggregator actor.
        wait_s: longest time for the first answer, in s. The constructor waits for it. Raises StartError.
    """

    def __init__(self, name: str, aggregator: Any, wait_s: float | None = None) -> None:
        import ray

        self.name, self.aggregator = name, aggregator
        about = msgspec.json.decode(self._once("about", wait_s=wait_s), type=ready(About))
        if about.version != __version__:
            raise StartError(
                f"session {name!r} is run by traceml-ray {about.version}, this is {__version__}: "
                "choose another name, or stop that one first"
            )
        self.folder, self.node_id = Path(about.folder), about.node_id
        self.config = msgspec.json.decode(about.config, type=ready(ActorConfig))
        self.has_ended = False
        """Whether a call has found that the session has ended."""
        self.is_here = about.node_id == ray.get_runtime_context().get_node_id()
        """Whether the session's files are on this node."""
        self._started_at = about.started_at
        self._stored = Answers(self.folder, self.config.settings.thresholds)

    def ask(self, message: bytes) -> bytes:
        """Return the answer to an encoded question, see `store.query`. Raises StartError."""
        try:
            return self.call("query", message)
        except EndedError as error:
            return self._file(error).reply(message)

    def call(self, method: str, *args: bytes, wait_s: float | None = None) -> bytes:
        """
        Return the result of a method of the aggregator. If Ray restarts the aggregator meanwhile, the call is
        repeated. Raises StartError, EndedError.
        """
        import ray

        deadline = time.monotonic() + (QUESTION_S if wait_s is None else wait_s)
        while True:
            try:
                return self._once(method, *args, wait_s=wait_s)
            except StartError as error:
                if not isinstance(error.__cause__, ray.exceptions.RayActorError):
                    raise
                if self.is_gone():
                    self.has_ended = True
                    raise EndedError(f"session {self.name!r} has ended{self._files()}") from error
                if time.monotonic() > deadline:
                    raise
            time.sleep(_AGAIN_S)

    def is_gone(self) -> bool:
        """Return whether the session has ended. Another session may have its name by now."""
        now = find_aggregator(self.name)
        return now is None or not is_same_actor(now, self.aggregator)

    def _once(self, method: str, *args: bytes, wait_s: float | None) -> bytes:
        import ray

        if not ray.is_initialized():  # a call would start a cluster
            raise EndedError(
                f"session {self.name!r} cannot be asked: Ray was shut down in this process{self._files()}"
            )
        seconds = QUESTION_S if wait_s is None else wait_s
        try:
            answer: bytes = ray.get(getattr(self.aggregator, method).remote(*args), timeout=seconds)
        except ray.exceptions.RayActorError as error:
            raise StartError(f"session {self.name!r} cannot be reached: {cause_of(error)}") from error
        except ray.exceptions.GetTimeoutError as error:
            raise StartError(f"session {self.name!r} did not answer within {seconds:g} s") from error
        return answer

    def _files(self) -> str:
        """Return where the session's files are, and that they can be read there."""
        there = "" if self.is_here else f" on node {self.node_id}"
        return f"; its files are in {self.folder}{there}: traceml-ray report {self.folder}"

    def check_file(self) -> None:
        """Raise EndedError if the file of this session is not, or no longer, on this node."""
        self._file(EndedError(f"session {self.name!r} cannot be asked{self._files()}"))

    def is_finished(self) -> bool:
        """Return whether the session's files are complete. Raises EndedError if they are not on this node."""
        self.check_file()
        return self._status().status != "running" and SessionFolder(self.folder).summary_json.is_file()

    def _file(self, ended: EndedError) -> Answers:
        """
        Return the answers from the session's file. Raises `ended`, or another EndedError, if the file is not
        on this node.
        """
        if not self.is_here:
            raise ended
        if not (self.folder / DATABASE).is_file():
            raise EndedError(f"session {self.name!r} has ended, and its folder {self.folder} is gone")
        try:
            started_at = self._status().started_at
        except query.QueryError as error:
            raise EndedError(f"session {self.name!r} has ended, and cannot be read: {error}") from None
        if started_at != self._started_at:
            raise EndedError(
                f"session {self.name!r} has ended, and {self.folder} now belongs to another session; this "
                f"one was moved aside: traceml-ray sessions --sessions {self.folder.parent}"
            )
        return self._stored

    def _status(self) -> Status:
        return query.ask_one(self._stored.reply, query.GetStatus())


START_S = 90.0
"""Longest time for the first answer, in s. On a busy node Ray's workers, of niceness 15, start late."""
_T = TypeVar("_T")
_CHUNK, _POLL_S = 4 << 20, 0.2


class Session(SessionQuestions):
    """
    A running session, from outside. Use it as a context manager to stop the session at the end of the block.

    Every question takes a Ray call (milliseconds; `summary` up to seconds in a long run), may be asked by any
    thread, and raises StartError if the session does not answer within 20 s. A session that has ended answers
    from its file, if the file is on this node. Calls that need a running session (`dump`, `profile`,
    `download`, …) then raise StartError at once.

    Answers are structs, with the fields and units of `traceml_ray.store.results` and
    `traceml_ray.store.summary_shape`: `session.verdict().label`, `print(session.status())`. Some values of
    `throughput` are arrays. `traceml_ray.to_builtins` converts any answer to plain dicts and lists:
    `json.dumps(traceml_ray.to_builtins(session.memory()))`.

    Arguments called `run` are a run's id or name (`RunInfo`); default: the newest run that has rows.

    `id` is the session's name. `folder` is the path of its files, on the node `node_id` (Ray's id).
    """

    def __init__(self, name: str, aggregator: Any, wait_s: float | None = None) -> None:
        self.id = name
        self._calls = calls = SessionCalls(name, aggregator, wait_s)
        self.folder = calls.folder
        """Path of the session's files, on the aggregator's node."""
        self.node_id = calls.node_id
        """Ray's id of the aggregator's node."""
        self.config = calls.config
        """Configuration with which the session's actors are created."""
        self._dashboard: DashboardProcess | None = None

    def dump(self, timeout: float = 15.0) -> BundleInfo:
        """
        Make a bundle of the last minutes of every rank, with their stacks, and return it. It takes some
        seconds. Requests within 5 s share one bundle.

        Raises StartError with the reason if the bundle cannot be made, and if there is none after `timeout`
        s.
        """
        asked = secrets.token_hex(8)

        def bundles() -> list[BundleInfo]:
            self._ask(query.Dump(asked))  # repeated: says why there will be none
            return self.bundles()

        return self._wait_for("bundle", bundles, lambda bundle: asked in bundle.requests, timeout)

    def profile(
        self,
        ranks: str = "all",
        steps: int = 3,
        *,
        memory: bool = False,
        stacks: bool = False,
        shapes: bool = False,
        run: str | None = None,
        timeout: float = 300.0,
    ) -> Profile:
        """
        Profile some steps of a run with torch's profiler, see `traceml_ray.profile`. Return the result of
        each rank. The traces are in the session's folder, `profiles/<id>/`, on the aggregator's node.

        Raises ValueError for invalid arguments, StartError if the run is over, or if there is no result after
        `timeout` s.
        """
        fields = {"ranks": ranks, "steps": steps, "memory": memory, "stacks": stacks, "shapes": shapes}
        asked, request = secrets.token_hex(8), wire.ProfileRequest.checked({**fields, "run": run})
        self._check_goes_on(run)
        self.request_profile(asked, request)
        return self.wait_for_profile(asked, timeout)

    def request_profile(self, asked: str, request: wire.ProfileRequest) -> None:
        """Request a profile with the id `asked`, without waiting for it."""
        self._ask(query.StartProfile(asked, request))

    def wait_for_profile(self, asked: str, timeout: float) -> Profile:
        """
        Return the profile that was requested with the id `asked`. Raises StartError if there is none after
        `timeout` s.
        """
        return self._wait_for(
            "profile", self.profiles, lambda info: asked in info.profile.requests, timeout
        ).profile

    def layers(self, steps: int | None = None, run: str | None = None, timeout: float = 300.0) -> Layers:
        """
        Return the time and memory of each layer of the model, as measured so far. With `steps`, first measure
        that many next steps, and return the result for the ranks that have reported by then. Raises
        ValueError, StartError.
        """
        return ask_layers(self._ask, steps, run, timeout)

    def wait_ready(self, timeout: float = 30.0) -> Session:
        """
        Wait until each living node is in `nodes` and its relay answers. Raises StartError after `timeout` s,
        and at once if the session has ended.
        """
        deadline = time.monotonic() + timeout
        self._check_running()
        waiting = {node["NodeID"]: node["NodeManagerHostname"] for node in cluster_nodes() if node["Alive"]}
        without_relay = set(waiting)
        while waiting and time.monotonic() < deadline:
            without_relay -= self._with_relay(without_relay, deadline)
            listed = {node.node_id for node in self.nodes() if node.alive}
            waiting = {
                process: name
                for process, name in waiting.items()
                if process in without_relay or process not in listed
            }
            time.sleep(0.05 if waiting else 0)
        if waiting:
            silent = sorted(name for process, name in waiting.items() if process in without_relay)
            names = ", ".join((silent or sorted(waiting.values()))[:5])
            what = "no relay of session" if silent else "aggregator does not list the nodes of session"
            raise StartError(f"{what} {self.id!r} within {timeout:g} s: {names}")
        return self

    def _with_relay(self, nodes: set[str], deadline: float) -> set[str]:
        """Return the nodes among `nodes` whose relay answers."""
        import ray

        relays = {node_id: find_relay(self.id, node_id) for node_id in nodes}
        asked = {relay.ready.remote(): node_id for node_id, relay in relays.items() if relay is not None}
        left = max(0.0, deadline - time.monotonic())
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=left) if asked else ([], [])
        with_relay = set()
        for ref in answered:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(ref)
                with_relay.add(asked[ref])
        return with_relay

    def download(self, path: str | os.PathLike[str]) -> Path:
        """
        Copy the session's files to the folder `path`/`id` on this machine. Return that folder.

        The copy has the data stored now. It is transferred in pieces of 4 MiB. Raises OSError, StartError.
        """
        folder = Path(path) / self.id
        with text.progress_bar(f"downloading {self.id}"):
            copy = self._ask(query.Snapshot())
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                for name, target in ((copy, DATABASE), *((n, n) for n in REPORTS if n != PAGE)):
                    self._fetch(name, folder / target)
                with contextlib.suppress(StartError):  # there is none where it could not be made
                    self._fetch(PAGE, folder / PAGE)
            finally:
                self._ask(query.Discard(copy))
        return folder

    def dashboard(self, port: int | None = None) -> str:
        """
        Serve the web app of this session from this machine, and return its URL. A second call returns the
        same URL.

        The web app is a separate process that listens on 127.0.0.1. It ends with `stop()` or with this
        process.

        Args:
            port: port of the web app. 0: a free one; None: 8050, or a free one if 8050 is in use.

        Raises StartError if the web app does not start.
        """
        if self._dashboard is not None and (url := self._dashboard.wait(0)):
            return url
        self._dashboard = DashboardProcess(
            self.id,
            os.environ,
            out=str(self.folder.parent),
            ray_address=self._address(),
            port="" if port is None else str(port),
        )
        url = self._dashboard.wait(QUESTION_S)
        if not url:
            self._dashboard.kill()
            raise StartError(f"no dashboard of session {self.id!r}: {self._dashboard.last_line}")
        return url

    def _address(self) -> str:
        """
        Return the address of the session's cluster; "" if the session has ended and its
        file is on this node.
        """
        import ray

        try:
            self._check_running()
        except EndedError:
            self.status()  # raises where its file does not answer
            return ""
        address: str = ray.get_runtime_context().gcs_address
        return address

    def _check_running(self) -> None:
        """Raise EndedError if the session has ended."""
        self._calls.call("about")

    def stop(self, timeout: float = 5.0) -> None:
        """
        Stop the session. When this returns, its files are written, its actors have ended, and its name is
        free.

        Running training is not affected. Raises StartError if something is still running after `timeout`
        seconds, or if the files cannot be written. Stopping a session that has already ended does nothing.
        """
        if self._dashboard is not None:
            self._dashboard.kill()
        stop_session(self._calls, timeout)

    def __enter__(self) -> Session:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the session. If that fails, the block does not fail."""
        try:
            self.stop()
        except StartError as error:
            warnings.warn(str(error), stacklevel=2)

    def __repr__(self) -> str:
        """Return what this object is, where its files are, and what to call on it."""
        about, what = f"traceml_ray session {self.id!r}", ".verdict(), .nodes(), .stop()"
        if self._calls.has_ended:
            about, what = f"{about}, ended", f"traceml-ray report {self.folder}"
            what = f".verdict(), .summary(), {what}" if self._calls.is_here else what
        return f"<{about}: files in {self.folder}; try {what}>"

    def _check_goes_on(self, run: str | None) -> None:
        """Raise StartError if no more steps of the run can be measured."""
        if why := why_over(self.runs(), run):
            raise StartError(f"session {self.id!r}: {why}")

    def _wait_for(
        self, what: str, listed: Callable[[], list[_T]], is_it: Callable[[_T], bool], timeout: float
    ) -> _T:
        """
        Return the newest listed item that `is_it` accepts. Raises StartError, which names `what`, if there is
        none after `timeout` s.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for entry in reversed(listed()):
                if is_it(entry):
                    return entry
            time.sleep(_POLL_S)
        raise StartError(f"session {self.id!r} has made no {what} within {timeout:g} s; see .status()")

    def _fetch(self, name: str, target: Path) -> None:
        chunk = self._ask(query.ReadFile(name, 0, _CHUNK))
        with target.open("wb") as file:
            while chunk:
                file.write(chunk)
                text.advance(f"downloading {target.name}: {text.size(file.tell())}", None)
                chunk = self._ask(query.ReadFile(name, file.tell(), _CHUNK))

    def _reply(self, message: bytes) -> bytes:
        return self._calls.ask(message)

    def _refuse(self, why: str) -> NoReturn:
        raise StartError(f"session {self.id!r}: {why}")
