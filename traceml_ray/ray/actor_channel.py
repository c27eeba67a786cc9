"""The way to the relay from a process that is Ray's own: asynchronous calls of the node's relay actor."""

from __future__ import annotations

import ctypes
from typing import Any

import ray

from traceml_ray.errors import Errors
from traceml_ray.ray.actor_calls import ActorCalls
from traceml_ray.ray.discovery import find_aggregator, find_relay


class ActorChannel:
    """
    Finds the relay of this node by name and calls it, see `ActorCalls`.

    The relay may come later, be restarted or replaced: the agent just keeps offering. Where there
    is none on this node, the session's aggregator is asked for one.
    """

    def __init__(self, session: str, node_id: str | None = None) -> None:
        self.errors = Errors()
        """Failed calls, by the kind of failure."""
        self._session = session
        self._node_id = node_id
        self._calls = ActorCalls(self._find)
        self._began = 0

    @property
    def generation(self) -> int:
        """Number of relays found so far."""
        return self._calls.handles_found

    def offer(self, data: bytes) -> bool:
        """Call the relay; False when there is none or enough calls are unanswered."""
        fresh = self._calls.handles_found != self._began
        taken = self._calls.call("ingest", data, fresh)
        self._began = self._calls.handles_found if taken else self._began
        return taken

    def replies(self) -> list[bytes]:
        """Return whatever the relay has answered since the last call."""
        answers = []
        for reply in self._calls.poll():
            if isinstance(reply, bytes):
                answers.append(reply)
            else:
                self.errors[type(reply).__name__] += 1
        return answers

    def close(self) -> None:
        """Make no more calls."""
        self._calls.close()

    def forked(self) -> None:
        """Leave Ray's objects as they are: to free one takes locks that may never be released."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def _find(self) -> Any | None:
        if not ray.is_initialized():
            return None
        if self._node_id is None:
            self._node_id = ray.get_runtime_context().get_node_id()
        relay = find_relay(self._session, self._node_id)
        if relay is None and (aggregator := find_aggregator(self._session)) is not None:
            aggregator.relay_wanted.remote()
        return relay
