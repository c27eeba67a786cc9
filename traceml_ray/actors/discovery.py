"""
Makes the actors of a session. The one place that knows their options.

Ray is imported when it is needed: the launcher and the ranks use this package without it.
"""

from __future__ import annotations

from typing import Any

from traceml_ray.actors.names import NAMESPACE, aggregator_name, relay_name

_GROUPS: dict[str, Any] = {"concurrency_groups": {"ingest": 1, "query": 2}}


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
