"""
The actors of a session: what they are made from, their names, how to find them, and calls to them that
never block; the sessions that this process uses. Ray is imported when it is needed.

How to attach to this node of the cluster stands in a file, as the launcher leaves it beside the relay's
socket. A process that is Ray's own reaches its node's relay by asynchronous calls.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import ray

from traceml_ray.errors import Errors
from traceml_ray.settings import Settings

NAMESPACE = "traceml"
DEFAULT_SESSION = "default"


def aggregator_name(session: str) -> str:
    """Return the actor name of a session's aggregator."""
    return f"{session}/aggregator"


def relay_name(session: str, node_id: str) -> str:
    """Return the actor name of a session's relay on a node."""
    return f"{session}/relay/{node_id}"


def find_aggregator(session: str) -> Any | None:
    """Return the handle of a session's aggregator, or None when there is none."""
    return _find(aggregator_name(session))


def is_same_actor(one: Any, other: Any) -> bool:
    """Return whether two handles are of the same actor, which Ray may have restarted."""
    return bool(one._actor_id == other._actor_id)


def find_relay(session: str, node_id: str) -> Any | None:
    """Return the handle of a session's relay on a node, or None when there is none."""
    return _find(relay_name(session, node_id))


def relay_folder(session: str, node_id: str) -> Path:
    """Return the private folder of a relay that was given none: its socket and spool are in there."""
    named = hashlib.sha256(relay_name(session, node_id).encode()).hexdigest()[:12]
    return Path(f"/tmp/traceml-{os.getuid()}-{named}")  # not TMPDIR: paths of sockets may not be long


def is_restarted() -> bool:
    """Return whether Ray has restarted the actor that this process is."""
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own way to ask this is deprecated by Ray
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def end_myself() -> None:
    """End the actor this process is, for good. Works from any thread of it; does not wait."""
    import ray

    kill: Callable[..., None] = ray.kill
    kill(ray.get_runtime_context().current_actor, no_restart=True)


def answers(aggregator: Any, timeout: float) -> bool:
    """Return whether an aggregator answers within `timeout` seconds; a dead one does not."""
    import ray

    try:
        return bool(ray.get(aggregator.about.remote(), timeout=timeout))
    except ray.exceptions.RayError:
        return False


def find_relays(session: str) -> dict[str, Any]:
    """Return the handles of a session's relays by node id."""
    relays = {node_id: find_relay(session, node_id) for node_id in relay_nodes(session)}
    return {node_id: relay for node_id, relay in relays.items() if relay is not None}


def relay_nodes(session: str) -> set[str]:
    """Return the ids of the nodes for which there is a relay of that session; asks the cluster once."""
    from ray.util import list_named_actors

    prefix = relay_name(session, "")
    listed: list[dict[str, str]] = bare(list_named_actors)(all_namespaces=True)
    names = [actor["name"] for actor in listed if actor["namespace"] == NAMESPACE]
    return {name[len(prefix) :] for name in names if name.startswith(prefix)}


def cluster_nodes() -> list[dict[str, Any]]:
    """Return every node that is or was in the cluster, as `ray.nodes` does."""
    import ray

    nodes: list[dict[str, Any]] = bare(ray.nodes)()
    return nodes


def bare(api: Any) -> Any:
    """Return Ray's API without its habit of starting a cluster if there is none."""
    return getattr(api, "__wrapped__", api)


def _find(name: str) -> Any | None:
    import ray

    try:
        return bare(ray.get_actor)(name, namespace=NAMESPACE)
    except ValueError:
        return None


_used: list[ActorConfig] = []
"""Sessions that this process has started or found and not stopped, the last one last."""


class ActorConfig(msgspec.Struct, frozen=True):
    """
    One session's actors; paths are absolute, on the node where they run. Travels as JSON: nothing of ours
    is pickled.
    """

    session: str
    settings: Settings
    folder: str = ""
    """Folder of the session's files."""
    socket: str = ""
    """Path of the relay's socket; "" is one in `relay_folder`, which every node has for itself."""
    spool: str = ""
    """Folder for what agents could not deliver; "" is one in `relay_folder`."""
    info: dict[str, str | int | float | None] = {}
    """Facts about the run that the launcher knows."""
    everywhere: bool = False
    """Whether the aggregator keeps a relay on every node of the cluster, also on those that join later."""
    runtime_env: str = ""
    """Runtime environment of the relays that the aggregator creates, as JSON."""
    launch: str = ""
    """
    Which launch of the job the relay is of, where its node has a relay of another one: "." and hex digits.
    Appended to the node's id: to the session they are two nodes, as to torchrun.
    """


class About(msgspec.Struct, frozen=True):
    """Identity of a session's aggregator. Read by any version: fields are never removed."""

    version: str
    session: str
    folder: str
    """Where the session's files are,"""
    node_id: str
    """Id of the node that `folder` is on."""
    config: msgspec.Raw
    """`ActorConfig` as JSON, as that version writes it."""
    started_at: int | None = None
    """When the session began, ns since the epoch: another one may take its name and folder later."""


def configure(settings: Settings, runtime_env: str = "") -> ActorConfig:
    """Return how the actors of a session are made that has a relay on every node; `runtime_env` as JSON."""
    name = settings.session or DEFAULT_SESSION
    out = settings.out if settings.out.startswith("~") else str(_here() / settings.out)
    settings = msgspec.structs.replace(settings, session=name, out=out)
    if settings.baseline is not None:
        from traceml_ray.reports.baseline import checked  # it imports numpy

        settings = checked(settings)
    return ActorConfig(name, settings, info={"launcher": "ray"}, everywhere=True, runtime_env=runtime_env)


def current_config() -> ActorConfig | None:
    """Return how that session is made which this process started (or found) last and has not stopped."""
    return _used[-1] if _used else None


def remember(config: ActorConfig) -> None:
    """Make a session the current one of this process."""
    forget(config.session)
    _used.append(config)


def forget(session: str) -> None:
    """Remove a stopped session from those of this process."""
    _used[:] = [config for config in _used if config.session != session]


def _here() -> Path:
    """Return what a relative folder is relative to; for a driver that is not on the cluster, a home there."""
    from ray.util.client import ray as client

    is_connected: Callable[[], bool] = client.is_connected
    return Path("~") if is_connected() else Path.cwd()


FILE = "attach.json"


class Attachment(msgspec.Struct, frozen=True):
    """Contents of `attach.json`."""

    address: str
    """host:port of the cluster's head."""
    temp_dir: str = ""
    """Folder of this node's raylet, if the launcher started it."""
    environ: dict[str, str | None] = {}
    """Environment variables to set while attaching; None: to remove."""


LOOK_UP_S = 1.0
MAX_IN_FLIGHT = 4


_wait, _get = bare(ray.wait), bare(ray.get)


class ActorCalls:
    """
    At most `MAX_IN_FLIGHT` calls are unanswered; Ray itself would queue them without end.

    After an error the handle is dropped, and looked up again at most once a second, in a thread,
    because a lookup waits for the GCS.

    Args:
        find: returns the actor's handle, None when there is none; may raise, may take its time.
    """

    def __init__(self, find: Callable[[], Any | None]) -> None:
        self.handles_found = 0
        """Number of times a handle was found, as of the last `poll`: messages sent before may be lost."""
        self._find = find
        self._actor: Any | None = None
        self._new: Any | None = None
        self._refs: list[Any] = []
        self._failed: list[Exception] = []
        self._looking_up = False
        self._next_look_up = 0.0
        self._closed = False

    def call(self, method: str, *args: object) -> bool:
        """Call, without waiting; False while there is no such actor or it has enough to do."""
        if self._actor is None:
            self._look_up()
            return False
        if len(self._refs) >= MAX_IN_FLIGHT:
            return False
        try:
            self._refs.append(getattr(self._actor, method).remote(*args))
        except Exception as error:
            self._lost(error)
            return False
        return True

    def poll(self, timeout_s: float = 0.0) -> list[bytes | Exception]:
        """
        Return the replies that have come, in order; an exception ends all calls before it. An actor that was
        found meanwhile is called from here on. Where calls are unanswered, wait for all of them at most
        `timeout_s` seconds.
        """
        if self._new is not None:
            self._actor, self._new = self._new, None
            self.handles_found += 1
        replies: list[bytes | Exception] = []
        if self._refs:
            try:
                done, self._refs = _wait(self._refs, num_returns=len(self._refs), timeout=timeout_s)
                for ref in done:
                    replies.append(_get(ref))
            except Exception as error:
                self._lost(error)
        replies += self._failed
        self._failed.clear()
        return replies

    def close(self) -> None:
        """Drop the actor; there is no call after this."""
        self._closed = True
        self._actor, self._new, self._refs = None, None, []

    def _lost(self, error: Exception) -> None:
        self._failed.append(error)
        self._actor, self._refs = None, []

    def _look_up(self) -> None:
        now = time.monotonic()
        if not (self._looking_up or self._closed or self._new) and now >= self._next_look_up:
            self._looking_up, self._next_look_up = True, now + LOOK_UP_S
            try:
                threading.Thread(target=self._find_actor, name="traceml-look-up", daemon=True).start()
            except RuntimeError as error:  # no more threads, or the interpreter is about to end
                self._looking_up = False
                self._failed.append(error)

    def _find_actor(self) -> None:
        try:
            actor = self._find()
            if actor is not None and not self._closed:
                self._new = actor
        except Exception as error:  # the GCS does not answer; the next lookup tries again
            self._failed.append(error)
        finally:
            self._looking_up = False


class ActorChannel:
    """
    Finds the relay of this node by name and calls it, see `ActorCalls`.

    The relay may come later, be restarted or replaced: the agent just keeps offering. Where there
    is none on this node, the session's aggregator is asked for one.
    """

    def __init__(self, session: str, node_id: str | None = None) -> None:
        self.errors = Errors()
        """Failed calls, by the kind of failure."""
        self._session = session
        self._node_id = node_id
        self._calls = ActorCalls(self._find)
        self._began = 0

    @property
    def generation(self) -> int:
        """Number of relays found so far."""
        return self._calls.handles_found

    def offer(self, data: bytes) -> bool:
        """Call the relay; False when there is none or enough calls are unanswered."""
        fresh = self._calls.handles_found != self._began
        taken = self._calls.call("ingest", data, fresh)
        self._began = self._calls.handles_found if taken else self._began
        return taken

    def replies(self) -> list[bytes]:
        """Return whatever the relay has answered since the last call."""
        answers = []
        for reply in self._calls.poll():
            if isinstance(reply, bytes):
                answers.append(reply)
            else:
                self.errors[type(reply).__name__] += 1
        return answers

    def close(self) -> None:
        """Make no more calls."""
        self._calls.close()

    def forked(self) -> None:
        """Leave Ray's objects as they are: to free one takes locks that may never be released."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def _find(self) -> Any | None:
        if not ray.is_initialized():
            return None
        if self._node_id is None:
            self._node_id = ray.get_runtime_context().get_node_id()
        relay = find_relay(self._session, self._node_id)
        if relay is None and (aggregator := find_aggregator(self._session)) is not None:
            aggregator.relay_wanted.remote()
        return relay
