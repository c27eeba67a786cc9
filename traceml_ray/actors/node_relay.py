"""The relay as a Ray actor, and its way to the aggregator."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import ray

from traceml_ray import wire
from traceml_ray.actors.aggregator import end_myself
from traceml_ray.actors.config import ActorConfig
from traceml_ray.actors.names import find_aggregator
from traceml_ray.actors.node_sampler import NodeSampler, SamplerThread
from traceml_ray.actors.relay import Relay

MAX_IN_FLIGHT = 4
LOOK_UP_S = 1.0


class NodeRelay:
    """One per node and session, pinned to its node."""

    def __init__(self, config: bytes) -> None:
        made = ActorConfig.from_json(config)
        node_id = ray.get_runtime_context().get_node_id()
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._relay = Relay(
            Path(made.socket),
            wire.NodeIdentity(node_id, socket.gethostname(), address),
            ActorTransport(made.session),
            SamplerThread(NodeSampler()),
            made.settings,
            spool=Path(made.spool),
            on_stop=end_myself,
        )
        self._relay.start()

    @ray.method(concurrency_group="ingest")
    def ingest(self, data: bytes) -> bytes:
        """Take a RankBatch and return RankReply. Raises `wire.WireError`."""
        return self._relay.take(data)

    @ray.method(concurrency_group="query")
    def ready(self) -> str:
        """Return the relay's incarnation: it is listening."""
        return self._relay.incarnation


class ActorTransport:
    """
    Calls to the aggregator that never block: at most `MAX_IN_FLIGHT` are unanswered.

    After an error the handle is dropped, and the name looked up again at most once a second, in a
    thread, because a lookup waits for the GCS.
    """

    def __init__(self, session: str) -> None:
        self._session = session
        self._actor: Any | None = None
        self._refs: list[Any] = []
        self._failed: list[Exception] = []
        self._looking = False
        self._look_at = 0.0

    def ingest(self, data: bytes, commit: bool) -> bool:
        """Hand over a RelayBatch; False while there is no aggregator or it has enough to do."""
        return self._call("ingest", data, commit)

    def finish(self, data: bytes) -> bool:
        """Hand over Finish; False as for `ingest`."""
        return self._call("finish", data)

    def poll(self) -> list[bytes | Exception]:
        """Return the replies that have come, in order; an exception ends all calls before it."""
        replies: list[bytes | Exception] = list(self._failed)
        self._failed.clear()
        if not self._refs:
            return replies
        done, self._refs = ray.wait(self._refs, num_returns=len(self._refs), timeout=0)
        for ref in done:
            try:
                replies.append(ray.get(ref))
            except Exception as error:
                self._actor, self._refs = None, []
                return [*replies, error]
        return replies

    def stop(self) -> None:
        """End the aggregator."""
        if self._actor is not None:
            ray.kill(self._actor, no_restart=True)

    def _call(self, method: str, *args: object) -> bool:
        actor = self._actor
        if actor is None:
            self._look_up()
            return False
        if len(self._refs) >= MAX_IN_FLIGHT:
            return False
        try:
            self._refs.append(getattr(actor, method).remote(*args))
        except Exception as error:
            self._failed.append(error)
            self._actor, self._refs = None, []
            return False
        return True

    def _look_up(self) -> None:
        now = time.monotonic()
        if not self._looking and now >= self._look_at:
            self._looking, self._look_at = True, now + LOOK_UP_S
            threading.Thread(target=self._find, name="traceml-look-up", daemon=True).start()

    def _find(self) -> None:
        try:
            self._actor = find_aggregator(self._session)
        except Exception as error:  # the GCS does not answer; the next lookup tries again
            self._failed.append(error)
        finally:
            self._looking = False
