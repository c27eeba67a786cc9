"""The names of a session's actors, and how to find them. Ray is imported when it is needed."""

from __future__ import annotations

from typing import Any

NAMESPACE = "traceml"


def aggregator_name(session: str) -> str:
    """Return the actor name of a session's aggregator."""
    return f"{session}/aggregator"


def relay_name(session: str, node_id: str) -> str:
    """Return the actor name of a session's relay on a node."""
    return f"{session}/relay/{node_id}"


def find_aggregator(session: str) -> Any | None:
    """Return the handle of a session's aggregator, or None when there is none."""
    return _find(aggregator_name(session))


def find_relay(session: str, node_id: str) -> Any | None:
    """Return the handle of a session's relay on a node, or None when there is none."""
    return _find(relay_name(session, node_id))


def _find(name: str) -> Any | None:
    import ray

    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
