"""
Finds and makes the actors of a session. The one place that knows their names and options.

Ray is imported when it is needed: the launcher and the ranks use this package without it.
"""

from __future__ import annotations

from typing import Any

NAMESPACE = "traceml"
_GROUPS: dict[str, Any] = {"concurrency_groups": {"ingest": 1, "query": 2}}


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


def ensure(session: str, config: bytes, *, fresh: bool = False) -> tuple[Any, Any]:
    """
    Find or make the aggregator and this node's relay; return both handles.

    Args:
        session: name of the session.
        config: an encoded `ActorConfig`.
        fresh: they must not exist yet.

    Raises ValueError when `fresh` and there is such a session on the cluster.

    """
    import ray

    from traceml_ray.actors.aggregator import Aggregator
    from traceml_ray.actors.node_relay import NodeRelay

    node_id = ray.get_runtime_context().get_node_id()
    aggregator = _make(Aggregator, aggregator_name(session), node_id, config, fresh)
    return aggregator, _make(NodeRelay, relay_name(session, node_id), node_id, config, fresh)


def _find(name: str) -> Any | None:
    import ray

    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _make(cls: type, name: str, node_id: str, config: bytes, fresh: bool) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor: Any = ray.remote(**_GROUPS)(cls)
    return actor.options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=not fresh,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=0,
        enable_task_events=False,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    ).remote(config)
