"""Keeps a relay on every living node of the cluster, and says which nodes came and went."""

from __future__ import annotations

import threading
from collections.abc import Callable

from traceml_ray.actors.config import ActorConfig
from traceml_ray.actors.making import ensure_relay
from traceml_ray.actors.names import cluster_nodes, relay_nodes
from traceml_ray.errors import Errors

LOOK_S = 2.0
"""How often the cluster is looked at; a node that joins has its relay within twice that."""


class Membership:
    """
    A thread that makes the relays that are missing; one that was killed for good is made again.

    Args:
        config: of the session.
        tell: called with (node id, hostname, address, alive) when a node came or went, and once for each
            that was there, or gone, before.
        errors: where a look that failed is counted.
    """

    def __init__(
        self, config: ActorConfig, tell: Callable[[str, str, str, bool], None], errors: Errors
    ) -> None:
        self._errors = errors
        self._config = config
        self._tell = tell
        self._alive: dict[str, bool] = {}
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._looking = threading.Lock()

    def start(self) -> None:
        """Run until `end`."""
        threading.Thread(target=self._run, name="traceml-membership", daemon=True).start()

    def look(self) -> None:
        """Look at once: somebody found no relay."""
        self._wake.set()

    def end(self) -> None:
        """Make no more relays; returns when none is being made."""
        self._ended.set()
        self._wake.set()
        with self._looking:
            pass

    def _run(self) -> None:
        while not self._ended.is_set():
            self._wake.clear()
            try:
                with self._looking:
                    self._look()
            except Exception as error:  # the GCS does not answer: look again later
                self._errors.note("membership", error)
            self._wake.wait(LOOK_S)

    def _look(self) -> None:
        named = relay_nodes(self._config.session)
        for node in cluster_nodes():
            node_id, alive = node["NodeID"], node["Alive"]
            if alive != self._alive.get(node_id):
                self._alive[node_id] = alive
                self._tell(node_id, node["NodeManagerHostname"], node["NodeManagerAddress"], alive)
            if alive and node_id not in named and not self._ended.is_set():
                ensure_relay(self._config, node_id)
