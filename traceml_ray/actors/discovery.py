"""Finds the actors of a session, or makes them."""

from __future__ import annotations

from typing import Any

from traceml_ray.actors.config import ActorConfig
from traceml_ray.actors.making import ensure_relay, make
from traceml_ray.actors.names import aggregator_name

__all__ = ["ensure", "ensure_aggregator", "ensure_relay"]


def ensure(config: ActorConfig, *, fresh: bool = False) -> tuple[Any, Any]:
    """
    Find or make the aggregator and the relay of this node; return both handles.

    Raises ValueError when they must be `fresh` and there is such a session on the cluster.
    """
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    return ensure_aggregator(config, node_id, fresh=fresh), ensure_relay(config, node_id, fresh=fresh)


def ensure_aggregator(config: ActorConfig, node_id: str, *, fresh: bool = False) -> Any:
    """Find or make the session's aggregator, on that node; return its handle. Raises as `ensure`."""
    from traceml_ray.actors.aggregator import Aggregator

    return make(Aggregator, aggregator_name(config.session), node_id, config, fresh)
