"""The names of a session's actors, and how to find them. Ray is imported when it is needed."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
