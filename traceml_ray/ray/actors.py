"""
The actors of a session: their configuration, their names, and how to find them. Also keeps the sessions that
this process uses. Ray is imported when it is needed.

The launcher writes how to attach to this node of the cluster into a file next to the relay's socket.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from traceml_ray.settings import Settings
from traceml_ray.sinks.table import environment_of

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
    """Return whether two handles belong to the same actor. Ray may have restarted the actor in between."""
    return bool(one._actor_id == other._actor_id)


def find_relay(session: str, node_id: str) -> Any | None:
    """Return the handle of a session's relay on a node, or None when there is none."""
    return _find(relay_name(session, node_id))


def relay_folder(session: str, node_id: str) -> Path:
    """Return the private folder, with socket and spool, of a relay whose configuration names no paths."""
    named = hashlib.sha256(relay_name(session, node_id).encode()).hexdigest()[:12]
    return Path(f"/tmp/traceml-{os.getuid()}-{named}")  # not TMPDIR: paths of sockets may not be long


def is_restarted() -> bool:
    """Return whether this process is an actor that Ray has restarted."""
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own way to ask this is deprecated by Ray
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def end_myself() -> None:
    """End the actor that this process is, permanently. Works from any of its threads; does not wait."""
    import ray

    kill: Callable[..., None] = ray.kill
    kill(ray.get_runtime_context().current_actor, no_restart=True)


def answers(aggregator: Any, timeout: float) -> bool:
    """Return whether an aggregator answers within `timeout` seconds. A dead one does not."""
    import ray

    try:
        return bool(ray.get(aggregator.about.remote(), timeout=timeout))
    except ray.exceptions.RayError:
        return False


def find_relays(session: str) -> dict[str, Any]:
    """Return the handles of a session's relays, by node id."""
    relays = {node_id: find_relay(session, node_id) for node_id in relay_nodes(session)}
    return {node_id: relay for node_id, relay in relays.items() if relay is not None}


def relay_nodes(session: str) -> set[str]:
    """Return the ids of the nodes that have a relay of the session. Asks the cluster once."""
    from ray.util import list_named_actors

    prefix = relay_name(session, "")
    listed: list[dict[str, str]] = bare(list_named_actors)(all_namespaces=True)
    names = [actor["name"] for actor in listed if actor["namespace"] == NAMESPACE]
    return {name[len(prefix) :] for name in names if name.startswith(prefix)}


def cluster_nodes() -> list[dict[str, Any]]:
    """Return every node that is or was in the cluster, in the form of `ray.nodes`."""
    import ray

    nodes: list[dict[str, Any]] = bare(ray.nodes)()
    return nodes


def bare(api: Any) -> Any:
    """Return Ray's API without its default of starting a cluster if there is none."""
    return getattr(api, "__wrapped__", api)


def _find(name: str) -> Any | None:
    import ray

    try:
        return bare(ray.get_actor)(name, namespace=NAMESPACE)
    except ValueError:
        return None


_used: list[ActorConfig] = []
"""Sessions that this process has started or found and not stopped. The newest is last."""


class ActorConfig(msgspec.Struct, frozen=True):
    """
    Configuration of one session's actors. Paths are absolute, on the node where the actors run. It is sent as
    JSON: none of our objects are pickled.
    """

    session: str
    settings: Settings
    folder: str = ""
    """Folder of the session's files."""
    socket: str = ""
    """Path of the relay's socket. "": a socket in `relay_folder`, which is different on every node."""
    spool: str = ""
    """Folder for what agents could not deliver. "": a folder in `relay_folder`."""
    info: dict[str, str | int | float | None] = {}
    """Facts about the run that the launcher knows."""
    everywhere: bool = False
    """Whether the aggregator keeps a relay on every node of the cluster, including nodes that join later."""
    runtime_env: str = ""
    """Runtime environment of the relays that the aggregator creates, as JSON."""
    environ: dict[str, str] = {}
    """
    Variables of the user's environment that the sinks read (`sinks.table.environment_of`). They may be
    secrets: only the aggregator gets them, and it answers without them.
    """
    launch: str = ""
    """
    Id of the launch that the relay belongs to, if its node has a relay of another launch: "." and hex digits.
    It is appended to the node's id: for the session these are two nodes, as for torchrun.
    """


class About(msgspec.Struct, frozen=True):
    """Identity of a session's aggregator. Any version can read it: fields are never removed."""

    version: str
    session: str
    folder: str
    """Folder of the session's files."""
    node_id: str
    """Id of the node that `folder` is on."""
    config: msgspec.Raw
    """`ActorConfig` as JSON, in the form that the aggregator's version writes."""
    started_at: int | None = None
    """When the session began, in ns since the epoch. A later session may have the same name and folder."""


def configure(settings: Settings, runtime_env: str = "") -> ActorConfig:
    """Return the configuration of a session with a relay on every node. `runtime_env` is JSON."""
    name = settings.session or DEFAULT_SESSION
    out = settings.out if settings.out.startswith("~") else str(_here() / settings.out)
    settings = msgspec.structs.replace(settings, session=name, out=out)
    if settings.baseline is not None:
        from traceml_ray.reports.baseline import checked  # it imports numpy

        settings = checked(settings)
    from traceml_ray.sinks.alerts.config import read_alerts  # only who starts a session needs it

    settings = read_alerts(settings, os.environ)
    config = ActorConfig(name, settings, info={"launcher": "ray"}, everywhere=True, runtime_env=runtime_env)
    return with_environment(config)


def with_environment(config: ActorConfig) -> ActorConfig:
    """Return the configuration with those variables of this process that the sinks read."""
    return msgspec.structs.replace(config, environ=environment_of(config.settings, os.environ))


def current_config() -> ActorConfig | None:
    """
    Return the configuration of the session that this process started (or found) last and has not
    stopped.
    """
    return _used[-1] if _used else None


def remember(config: ActorConfig) -> None:
    """Make a session the current session of this process."""
    forget(config.session)
    _used.append(config)


def forget(session: str) -> None:
    """Remove a stopped session from the sessions of this process."""
    _used[:] = [config for config in _used if config.session != session]


def _here() -> Path:
    """
    Return the folder that relative paths refer to. For a driver outside the cluster: a home folder on the
    cluster.
    """
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
