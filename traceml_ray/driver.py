"""
What a driver says: `ray.init(); traceml_ray.start()`, and what it gets: a `Session`.

The session's actors are detached: they outlive the driver, and end themselves when nothing has come
for `idle_ttl` seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil

from traceml_ray import __version__, wire
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.floors import FLOORS, too_old
from traceml_ray.identity import RankIdentity
from traceml_ray.launchers.dashboard import DashboardProcess
from traceml_ray.launchers.ray_train import leave_trainers, watch_trainers
from traceml_ray.monitor.finish import ANSWER_S, EXIT_S, KILL_S, LEAVE_S
from traceml_ray.monitor.private_folders import is_private
from traceml_ray.ray.config import ActorConfig, configure, current_config, forget, remember
from traceml_ray.ray.discovery import (
    DEFAULT_SESSION,
    answers,
    cluster_nodes,
    find_aggregator,
    find_relay,
    find_relays,
    relay_folder,
    relay_nodes,
)
from traceml_ray.results import LiveVerdict, NodeInfo, RankInfo, RunInfo, Status
from traceml_ray.session import DATABASE, holder
from traceml_ray.settings import Settings, given, known_keywords
from traceml_ray.summary_shape import Summary

QUESTION_S = 20.0
"""How long a question may take to be answered."""
_CHUNK = 4 << 20


class StartError(RuntimeError):
    """A session that cannot be started, reached or stopped; the message says which, why, and what to do."""


@known_keywords
def start(
    session: str | None = None,
    *,
    runtime_env: dict[str, Any] | None = None,
    ship: bool = False,
    out: str | os.PathLike[str] | None = None,
    interval: float | None = None,
    ring_rows: int | None = None,
    agent_buffer_bytes: int | None = None,
    relay_buffer_bytes: int | None = None,
    session_bytes: int | None = None,
    idle_ttl: float | None = None,
    debug: bool | None = None,
    baseline: str | os.PathLike[str] | None = None,
    thresholds: Thresholds | Mapping[str, float] | None = None,
) -> Session:
    """
    Start the monitor on every node of the cluster this driver is connected to, or find the one that runs.

    From here on every TorchTrainer of this driver is watched. Nothing of the cluster's CPUs or GPUs
    is held. Returns when the aggregator answers; the relays follow (`Session.wait_ready`). Call it from one
    thread at a time. A session that runs already keeps its settings; a warning names those given here.

    What is not given is as in the environment (`TRACEML_` + the name in capitals), else as by default.

    Args:
        session: name, 1 to 64 letters, digits, `.`, `_`, `-`; sessions of different names on one cluster do
            not meet. Default: `default`.
        runtime_env: of the session's actors, for nodes that need one; local paths are not for these.
        ship: send this package to nodes that lack it (its dependencies must be there).
        out: folder that holds session folders, on this node; of a driver outside of the cluster on the head,
            under its home. Default: `traceml-sessions`.
        interval: seconds between two reports of a rank, 0.05 to 60; twice that in jobs of over 256 ranks.
            Default: 0.5.
        ring_rows: rows (one a step) that the training thread may be ahead of the thread that sends them,
            64 to 1048576; what is more is dropped and counted. Default: 4096.
        agent_buffer_bytes: what a rank keeps unconfirmed, 64 KiB to 1 GiB. Default: 1 MiB.
        relay_buffer_bytes: the same of a node, 1 MiB to 64 GiB. Default: 64 MiB.
        session_bytes: beyond this size of the session file its oldest rows become statistics, 1 MiB to
            16 TiB. Default: 1 GiB.
        idle_ttl: seconds without any message after which the session ends itself, 1 to 2592000 (30 days).
            Default: 600.
        debug: raise what is swallowed and counted otherwise, or print it where a thread has to go on.
            Default: False.
        baseline: name or path of a stored session that was good: what steps are expected to cost.
        thresholds: limits of the verdict, by name, see `analysis/thresholds.py`.

    Raises:
        StartError: Ray is not initialised or too old, the session of that name is of another version,
            or its folder cannot be written.
        SettingError: a keyword, name or value that cannot be used.
    """
    chosen = given(locals())
    loaded = Settings.load(**chosen)
    name = loaded.session or DEFAULT_SESSION
    _check_ray()
    found = find_aggregator(name)
    if found is not None:
        kept = sorted(chosen.keys() - {"session"})
        if kept:
            warnings.warn(
                f"session {name!r} runs already; {', '.join(kept)} are as they were when it started",
                stacklevel=3,
            )
        made = Session(name, found)
    else:
        made = _make(configure(loaded, _runtime_env(runtime_env, ship)))
        if _cluster_is_ours():
            atexit.register(_stop_quietly, made)
    remember(made.config)
    watch_trainers()
    return made


class Session:
    """
    A running session, from outside. Use it as a context manager to have it stopped at the end.

    Every question takes a Ray call (milliseconds; `summary` up to seconds in a long run), may be asked by any
    thread, and raises StartError when the session does not answer within 20 s. What is returned are plain
    dicts; `traceml_ray.results` and `traceml_ray.summary_shape` have their fields, with units.

    `id` is its name, `folder` where its files are, on the node `node_id` (Ray's id).
    """

    def __init__(self, name: str, aggregator: Any) -> None:
        self.id = name
        self._aggregator = aggregator
        about = self._ask("about")
        if about["version"] != __version__:
            raise StartError(
                f"session {name!r} is run by traceml-ray {about['version']}, this is {__version__}: "
                "choose another name, or stop that one first"
            )
        self.folder = Path(about["folder"])
        """Where its files are, on the aggregator's node."""
        self.node_id: str = about["node_id"]
        """The aggregator's node."""
        self.config = msgspec.json.decode(about["config"], type=ActorConfig)
        """How its actors are made."""
        self._dashboard: DashboardProcess | None = None

    def nodes(self) -> list[NodeInfo]:
        """Return the nodes of the cluster, those that are gone too, with the ranks on each."""
        nodes: list[NodeInfo] = self._ask("nodes")
        return nodes

    def ranks(self, run: str | None = None) -> list[RankInfo]:
        """Return which process is which rank in the newest run, or in that one, and its rows so far."""
        streams: dict[int, dict[str, Any]] = self._ask("ranks", run=run)
        names = RankIdentity.__struct_fields__
        found: Any = [
            {**dict(zip(names, stream["identity"], strict=True)), "stored": stream["stored"]}
            for stream in streams.values()
        ]
        ranks: list[RankInfo] = found
        return ranks

    def runs(self) -> list[RunInfo]:
        """Return the runs of this session, one for each `fit()` or launch, the oldest first."""
        runs: list[RunInfo] = self._ask("runs")
        return runs

    def summary(self, run: str | None = None) -> Summary:
        """
        Return the summary (`traceml_ray/summary/1`) of the newest run, or of that one (`RunInfo` has its id).

        Of a run that is too long to be read in a moment it is of the newest steps (`steps.covers` says of
        which); `summary.json`, written at the end, is of all.
        """
        summary: Summary = self._ask("summary", run=run)
        return summary

    def verdict(self, run: str | None = None) -> LiveVerdict | None:
        """Return the verdict of now; None while there is none."""
        verdict: LiveVerdict | None = self._ask("verdict", run=run)
        return verdict

    def status(self) -> Status:
        """Return how the session itself is doing: where each row is, exceptions swallowed, by place."""
        status: Status = self._ask("status")
        return status

    def wait_ready(self, timeout: float = 30.0) -> Session:
        """Wait until each living node is in `nodes` and its relay answers; StartError after `timeout` s."""
        deadline = time.monotonic() + timeout
        waiting = {node["NodeID"]: node["NodeManagerHostname"] for node in cluster_nodes() if node["Alive"]}
        without_relay = set(waiting)
        while waiting and time.monotonic() < deadline:
            without_relay -= self._with_relay(without_relay, deadline)
            listed = {node["node_id"] for node in self.nodes() if node["alive"]}
            waiting = {at: name for at, name in waiting.items() if at in without_relay or at not in listed}
            time.sleep(0.05 if waiting else 0)
        if waiting:
            names = ", ".join(sorted(waiting.values())[:5])
            raise StartError(f"no relay of session {self.id!r} within {timeout:g} s on {names}")
        return self

    def _with_relay(self, nodes: set[str], deadline: float) -> set[str]:
        """Return those of `nodes` whose relay answers."""
        import ray

        relays = {node_id: find_relay(self.id, node_id) for node_id in nodes}
        asked = {relay.ready.remote(): node_id for node_id, relay in relays.items() if relay is not None}
        left = max(0.0, deadline - time.monotonic())
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=left) if asked else ([], [])
        found = set()
        for ref in answered:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(ref)
                found.add(asked[ref])
        return found

    def download(self, path: str | os.PathLike[str]) -> Path:
        """
        Bring the session's files here, into the folder `path`/`id`; return that folder.

        As much as is stored now, in pieces of 4 MiB. Raises OSError, StartError.
        """
        folder = Path(path) / self.id
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        copy = self._ask("snapshot")
        try:
            for name, target in ((copy["name"], "session.sqlite"), *((n, n) for n in _REPORTS)):
                self._fetch(name, folder / target)
        finally:
            self._ask("unsnapshot", name=copy["name"])
        return folder

    def dashboard(self, port: int | None = None) -> str:
        """
        Serve the web app of this session from here, and return its URL; asked again, that of the first time.

        It is a process of its own, on 127.0.0.1, and ends with `stop()` or with this process.

        Args:
            port: 0: a free one; None: 8050, or a free one where that is taken.

        Raises StartError when it does not come up.
        """
        import ray

        if self._dashboard is not None and (url := self._dashboard.wait(0)):
            return url
        self._dashboard = DashboardProcess(
            self.id,
            os.environ,
            out=str(self.folder.parent),
            ray_address=ray.get_runtime_context().gcs_address,
            port="" if port is None else str(port),
        )
        url = self._dashboard.wait(QUESTION_S)
        if not url:
            self._dashboard.kill()
            raise StartError(f"no dashboard of session {self.id!r}: {self._dashboard.words}")
        return url

    def stop(self, timeout: float = 5.0) -> None:
        """
        End the session: its files are written, its actors are gone and its name is free when this returns.

        Training that goes on is not touched. Raises StartError when something is still there after
        `timeout` seconds; stopping a session that has ended already does nothing.
        """
        import ray

        deadline = time.monotonic() + timeout
        if self._dashboard is not None:
            self._dashboard.kill()
        _forget(self.id)
        relays = find_relays(self.id).values()
        try:
            hangs = not answers(self._aggregator, min(ANSWER_S, timeout / 2))
            if not hangs:
                ray.get(self._aggregator.stop.remote(), timeout=max(0.1, timeout - 1))
        except (ray.exceptions.RayError, ValueError):
            hangs = True
        if hangs:
            ray.kill(self._aggregator, no_restart=True)
            ending = [relay.end.remote(0.0) for relay in relays]
            if ending:
                ray.wait(ending, num_returns=len(ending), timeout=min(LEAVE_S, timeout / 4))
            for relay in relays:
                ray.kill(relay, no_restart=True)
        while find_aggregator(self.id) is not None or relay_nodes(self.id):
            if time.monotonic() > deadline:
                raise StartError(f"session {self.id!r} is still there {timeout:g} s after it was stopped")
            time.sleep(0.05)
        if hangs:
            self._finish_from_file()

    def _finish_from_file(self) -> None:
        """Write the reports that the aggregator did not, of what it had stored, where its files are here."""
        import ray

        from traceml_ray.monitor.offline import finish_offline

        if not (self.folder / DATABASE).is_file():
            return
        over = wire.Finish(wire.VERSION, 0)
        try:
            _end_hung(holder(self.folder))
            left = relay_folder(self.id, ray.get_runtime_context().get_node_id())
            finish_offline(self.folder, self.config.settings, over, left if is_private(left) else None)
        except Exception as error:
            warnings.warn(f"no report of session {self.id!r}: {_cause(error)}", stacklevel=3)

    def __enter__(self) -> Session:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the session; what was done in the block does not fail when that does."""
        try:
            self.stop()
        except StartError as error:
            warnings.warn(str(error), stacklevel=2)

    def __repr__(self) -> str:
        """Say what this is and where to look."""
        return f"<traceml_ray session {self.id!r}: files in {self.folder}; try .verdict(), .nodes(), .stop()>"

    def _fetch(self, name: str, target: Path) -> None:
        with target.open("wb") as file:
            while chunk := self._ask("file", name=name, offset=file.tell(), n=_CHUNK):
                file.write(chunk)

    def _ask(self, what: str, **more: object) -> Any:
        return ask(self._aggregator, self.id, what, **more)


def ask(aggregator: Any, session: str, what: str, **more: object) -> Any:
    """Ask a session's aggregator (`AggregatorCore.query`). Raises StartError."""
    import ray

    request = msgspec.msgpack.encode({"what": what, **more})
    try:
        reply = ray.get(aggregator.query.remote(request), timeout=QUESTION_S)
    except ray.exceptions.RayActorError as error:
        raise StartError(f"session {session!r} cannot be reached: {_cause(error)}") from error
    except ray.exceptions.GetTimeoutError as error:
        raise StartError(f"session {session!r} did not answer within {QUESTION_S:g} s") from error
    answer = msgspec.msgpack.decode(reply)
    if "error" in answer:
        raise StartError(f"session {session!r}, {what}: {answer['error']}")
    return answer["result"]


_REPORTS = ("summary.json", "report.txt")


def _check_ray() -> None:
    import ray

    if not ray.is_initialized():
        raise StartError("Ray is not initialised in this process: call ray.init() before traceml_ray.start()")
    for package in FLOORS:
        if lack := too_old(package):
            raise StartError(lack)


def _make(config: ActorConfig) -> Session:
    """Make the aggregator here and a relay on every node, side by side; return when the former answers."""
    import ray

    from traceml_ray.ray.actor_factory import ensure_relay
    from traceml_ray.ray.aggregator import ensure_aggregator

    aggregator = ensure_aggregator(config, ray.get_runtime_context().get_node_id())
    relays = [ensure_relay(config, node["NodeID"]) for node in cluster_nodes() if node["Alive"]]
    try:
        return Session(config.session, aggregator)
    except StartError:
        for actor in (aggregator, *relays):
            ray.kill(actor, no_restart=True)
        raise


def _cluster_is_ours() -> bool:
    """Whether this process has started the cluster, which then ends with it."""
    import ray

    node: Any = ray._private.worker._global_node
    return node is not None and bool(node.is_head())


def _stop_quietly(session: Session) -> None:
    """End of a driver that takes its cluster along: let the session be whole before that."""
    import ray

    try:
        if ray.is_initialized():
            session.stop(EXIT_S)
    except Exception as error:
        sys.stderr.write(f"traceml-ray: session {session.id!r} may be incomplete: {_cause(error)}\n")


def _end_hung(pid: int | None) -> None:
    """End an aggregator of this node that Ray has told to go, and that hears nothing."""
    if pid is not None:
        process = psutil.Process(pid)
        if "".join(process.cmdline()[:1]).startswith("ray::Aggregator"):
            process.kill()
            with contextlib.suppress(psutil.TimeoutExpired):
                process.wait(KILL_S)


def _cause(error: Exception) -> str:
    """Return what an actor that could not be made says of why, without its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (told or lines or [type(error).__name__])[-1]


def _runtime_env(given: dict[str, Any] | None, ship: bool) -> str:
    """Return the runtime_env of the actors as JSON; with `ship`, this package is in it."""
    env = dict(given or {})
    if ship:
        from traceml_ray.ray.package_upload import upload

        env["py_modules"] = [*env.get("py_modules", []), upload()]
    return json.dumps(env) if env else ""


def _forget(session: str) -> None:
    forget(session)
    if current_config() is None:
        leave_trainers()
