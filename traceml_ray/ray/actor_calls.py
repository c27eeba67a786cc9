"""
Calls to a named actor that never block: from an agent to its relay, and from a relay to the aggregator.

A process that Ray started reaches the relay in this way, by asynchronous calls of the node's relay actor.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import ray

from traceml_ray.errors import Errors
from traceml_ray.ray.actors import bare, find_aggregator, find_relay

LOOK_UP_S = 1.0
MAX_IN_FLIGHT = 4


_wait, _get = bare(ray.wait), bare(ray.get)


class ActorCalls:
    """
    Calls one named actor. At most `MAX_IN_FLIGHT` calls are unanswered; Ray itself would queue any number.

    After an error the handle is dropped and looked up again, at most once a second. The lookup runs in a
    thread, because it waits for the GCS.

    Args:
        find: returns the actor's handle, or None when there is none. It may raise, and may take long.
    """

    def __init__(self, find: Callable[[], Any | None]) -> None:
        self.handles_found = 0
        """
        Number of times a handle was found before the last `poll`. After it grows, messages sent before may be
        lost.
        """
        self._find = find
        self._actor: Any | None = None
        self._new: Any | None = None
        self._refs: list[Any] = []
        self._failed: list[Exception] = []
        self._looking_up = False
        self._next_look_up = 0.0
        self._closed = False

    def call(self, method: str, *args: object) -> bool:
        """Call the method without waiting. Return False if there is no such actor or it has enough to do."""
        if self._actor is None:
            self._look_up()
            return False
        if len(self._refs) >= MAX_IN_FLIGHT:
            return False
        try:
            self._refs.append(getattr(self._actor, method).remote(*args))
        except Exception as error:
            self._lost(error)
            return False
        return True

    def poll(self, timeout_s: float = 0.0) -> list[bytes | Exception]:
        """
        Return the replies that have arrived, in order. An exception ends all calls before it. If an actor was
        found meanwhile, later calls go to it. While calls are unanswered, wait at most `timeout_s` seconds
        for all replies.
        """
        if self._new is not None:
            self._actor, self._new = self._new, None
            self.handles_found += 1
        replies: list[bytes | Exception] = []
        if self._refs:
            try:
                done, self._refs = _wait(self._refs, num_returns=len(self._refs), timeout=timeout_s)
                for ref in done:
                    replies.append(_get(ref))
            except Exception as error:
                self._lost(error)
        replies += self._failed
        self._failed.clear()
        return replies

    def close(self) -> None:
        """Drop the actor handle. No call is made after this."""
        self._closed = True
        self._actor, self._new, self._refs = None, None, []

    def _lost(self, error: Exception) -> None:
        self._failed.append(error)
        self._actor, self._refs = None, []

    def _look_up(self) -> None:
        now = time.monotonic()
        if not (self._looking_up or self._closed or self._new) and now >= self._next_look_up:
            self._looking_up, self._next_look_up = True, now + LOOK_UP_S
            try:
                threading.Thread(target=self._find_actor, name="traceml-look-up", daemon=True).start()
            except RuntimeError as error:  # no more threads, or the interpreter is about to end
                self._looking_up = False
                self._failed.append(error)

    def _find_actor(self) -> None:
        try:
            actor = self._find()
            if actor is not None and not self._closed:
                self._new = actor
        except Exception as error:  # the GCS does not answer; the next lookup tries again
            self._failed.append(error)
        finally:
            self._looking_up = False


class ActorChannel:
    """
    A channel that finds the relay of this node by name and calls it, see `ActorCalls`.

    The relay may start later, or be restarted or replaced: the agent keeps offering. If this node has no
    relay, the session's aggregator is asked to create one.
    """

    def __init__(self, session: str, node_id: str | None = None) -> None:
        self.errors = Errors()
        """Number of failed calls, by kind of failure."""
        self._session = session
        self._node_id = node_id
        self._calls = ActorCalls(self._find)
        self._began = 0

    @property
    def generation(self) -> int:
        """Number of times a relay was found so far."""
        return self._calls.handles_found

    def offer(self, data: bytes) -> bool:
        """Call the relay. Return False when there is no relay or enough calls are unanswered."""
        fresh = self._calls.handles_found != self._began
        taken = self._calls.call("ingest", data, fresh)
        self._began = self._calls.handles_found if taken else self._began
        return taken

    def replies(self) -> list[bytes]:
        """Return what the relay has answered since the last call."""
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
        """Leave Ray's objects as they are: freeing one takes locks that may never be released."""
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
