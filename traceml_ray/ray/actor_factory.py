"""
Makes an actor of a session. The one place that knows their options.

Ray is imported when it is needed: the launcher and the ranks use this package without it.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from traceml_ray.ray.config import ActorConfig
from traceml_ray.ray.discovery import NAMESPACE, relay_name

_GROUPS: dict[str, Any] = {"concurrency_groups": {"ingest": 1, "query": 2}}


def ensure_relay(config: ActorConfig, node_id: str, *, fresh: bool = False) -> Any:
    """Find or make the session's relay of that node (and launch); return its handle. Raises as `make`."""
    from traceml_ray.ray.node_relay import NodeRelay

    return make(NodeRelay, relay_name(config.session, node_id + config.launch), node_id, config, fresh)


def make(cls: type, name: str, node_id: str, config: ActorConfig, fresh: bool) -> Any:
    """
    Find or make the actor of that name on that node; return its handle.

    Raises ValueError when it must be `fresh` and there is one already.
    """
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
        runtime_env=json.loads(config.runtime_env) if config.runtime_env else None,
    ).remote(msgspec.json.encode(config))
