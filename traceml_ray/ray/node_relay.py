"""
The relay as a Ray actor, and its way to the aggregator.

Ray imports this module in every process that calls the actor, so in every rank that calls it. Imports that
only the actor needs are therefore inside the actor.
"""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import ray

from traceml_ray.monitor.finish import HAND_OVER_S
from traceml_ray.ray.actor_calls import ActorCalls
from traceml_ray.ray.actors import ActorConfig, end_myself, find_aggregator, is_restarted, relay_folder
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import ready


class NodeRelay:
    """
    The relay of one node and session, pinned to its node. In a launched session: one per launch
    on that node.
    """

    def __init__(self, config: bytes) -> None:
        from traceml_ray.monitor import private_folders as folders
        from traceml_ray.monitor.relay import RelayCore
        from traceml_ray.signals.nodes.sampler import NodeSampler, SamplerThread

        made = msgspec.json.decode(config, type=ready(ActorConfig))
        node_id = ray.get_runtime_context().get_node_id()
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        folder = relay_folder(made.session, node_id)
        if not made.socket:
            if not is_restarted():  # else what is in the folder is of this session
                folders.remove_stale()
            self._lock = folders.lock_private(folder)
        self._sampler = SamplerThread(NodeSampler())
        self._relay = RelayCore(
            Path(made.socket or folder / "relay.sock"),
            wire.NodeIdentity(node_id + made.launch, socket.gethostname(), address),
            ActorTransport(made.session),
            self._sampler,
            made.settings,
            spool=Path(made.spool or folder),
            on_stop=end_myself,
        )
        self._relay.start()

    @ray.method(concurrency_group="ingest")
    def ingest(self, data: bytes, fresh: bool = True) -> bytes:
        """Accept a RankBatch; return a RankReply. See `RelayCore.accept`."""
        return self._relay.accept(data, fresh)

    @ray.method(concurrency_group="query")
    def ready(self) -> str:
        """Return the relay's incarnation. The answer shows that it is listening."""
        return self._relay.incarnation

    @ray.method(concurrency_group="query")
    def flush(self, timeout_s: float) -> bool:
        """Return whether the aggregator has confirmed everything this relay holds, within `timeout_s`."""
        return self._relay.flush(timeout_s)

    @ray.method(concurrency_group="query")
    def end(self, timeout_s: float = HAND_OVER_S) -> None:
        """Hand over all held data, or leave it in the folder. The actor itself is ended from outside."""
        self._relay.end(timeout_s)
        self._sampler.close()


class ActorTransport(ActorCalls):
    """Calls to the aggregator; implements `outbox.Transport`."""

    def __init__(self, session: str) -> None:
        super().__init__(lambda: find_aggregator(session))
        self._bulk = ActorCalls(lambda: find_aggregator(session))
        """Calls that another thread makes."""

    def ingest(self, data: bytes, commit: bool) -> bool:
        """Send a RelayBatch. Return False if there is no aggregator or it has enough to do."""
        return self.call("ingest", data, commit)

    def finish(self, data: bytes) -> bool:
        """Send a Finish. Return False as `ingest` does."""
        return self.call("finish", data)

    def send_part(self, data: bytes) -> bool:
        """Send a TracePart. Return False as `ingest` does."""
        return self._bulk.call("bulk", data)

    def part_replies(self, timeout_s: float) -> list[bytes | Exception]:
        """Return the replies to `send_part`, see `BulkTransport`."""
        return self._bulk.poll(timeout_s)
