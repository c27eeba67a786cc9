"""
Creates the actors of a session; only this module knows their options. It also watches which nodes join and
leave the cluster, and keeps a relay on each node if the session is on every node.

Ray is imported when it is needed: the launcher and the ranks use this package without it.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from traceml_ray.errors import Errors
from traceml_ray.ray.actors import NAMESPACE, ActorConfig, cluster_nodes, relay_name, relay_nodes

_GROUPS: dict[str, Any] = {"concurrency_groups": {"ingest": 1, "query": 2, "bulk": 1}}


def ensure_relay(config: ActorConfig, node_id: str, *, fresh: bool = False) -> Any:
    """Find or create the session's relay of that node (and launch); return its handle. Raises as `make`."""
    from traceml_ray.ray.node_relay import NodeRelay

    name = relay_name(config.session, node_id + config.launch)
    return make(NodeRelay, name, node_id, msgspec.structs.replace(config, environ={}), fresh)


def make(cls: type, name: str, node_id: str, config: ActorConfig, fresh: bool) -> Any:
    """
    Find or create the actor called `name` on node `node_id`; return its handle.

    Raises ValueError when the actor must be `fresh` but exists already.
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


CHECK_S = 2.0
"""Interval at which the cluster is checked, in s. A joining node has its relay within twice that."""
MOST_S = 300.0
"""Longest delay before a relay that keeps ending is created again, in s. Delays double from 2 s."""
STAYS_S = 60.0
"""A relay that lives this long, in s, counts as started. It has its name earlier."""
AT_ONCE = 5
"""Number of times in a row that a relay is created immediately when an agent has found none."""
_REPORTED = 3
"""Number of failed creations in a row that is reported as an error. A single relay may have been killed."""


@dataclass(eq=False)
class Membership:
    """
    A thread that creates missing relays, including relays that were killed permanently.

    Args:
        config: configuration of the session.
        on_change: called with (node id, hostname, address, alive) when a node joined or left, and once for
            each node that was present, or gone, before.
        errors: counts checks that failed, and nodes on which no relay stays.
        clock: monotonic seconds.
    """

    config: ActorConfig
    on_change: Callable[[str, str, str, bool], None]
    errors: Errors
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._alive: dict[str, bool] = {}
        self._made: dict[str, tuple[int, float]] = {}
        """
        How many times in a row the relay of a node was created, and when it may be created again;
        by node id.
        """
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._checking = threading.Lock()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="traceml-membership", daemon=True).start()

    def check_now(self) -> None:
        """Check immediately, because an agent found no relay."""
        self._wake.set()

    def end(self) -> None:
        """Stop creating relays. Returns once none is being created."""
        self._ended.set()
        self._wake.set()
        with self._checking:
            pass

    def _run(self) -> None:
        asked = False
        while not self._ended.is_set():
            self._wake.clear()
            try:
                with self._checking:
                    self._check(asked)
            except Exception as error:  # the GCS does not answer: check again later
                self.errors.note("membership", error)
            asked = self._wake.wait(CHECK_S)

    def _check(self, asked: bool) -> None:
        named = relay_nodes(self.config.session)
        for node in cluster_nodes():
            node_id, alive = node["NodeID"], node["Alive"]
            if alive != self._alive.get(node_id):
                self._alive[node_id] = alive
                self.on_change(node_id, node["NodeManagerHostname"], node["NodeManagerAddress"], alive)
            if node_id in named:
                if self.clock() > self._made.get(node_id, (0, math.inf))[1] + STAYS_S:
                    del self._made[node_id]
            elif alive and self.config.everywhere and not self._ended.is_set() and self._is_due(node, asked):
                ensure_relay(self.config, node_id)

    def _is_due(self, node: dict[str, Any], asked: bool) -> bool:
        """Return whether to create a relay on a node now; if so, note the attempt."""
        now = self.clock()
        times, due = self._made.get(node["NodeID"], (0, now))
        if now < due and not (asked and times < AT_ONCE):
            return False
        if times == _REPORTED:
            error = RuntimeError(f"it has ended {times} times in a row, soon after it was made")
            self.errors.note("no relay stays", error, node["NodeManagerHostname"])
        self._made[node["NodeID"]] = times + 1, now + min(CHECK_S * 2.0 ** min(times, 9), MOST_S)
        return True
