"""
The one seam between an agent and its relay: `Channel`.

Neither method ever blocks or raises; what cannot go now is refused, and the agent drops and counts.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Protocol

from traceml_ray.errors import Errors

RECONNECT_S = 0.2
RECEIVE_BYTES = 64 * 1024


class Channel(Protocol):
    """The way to the relay of this node."""

    errors: Errors
    """What went wrong on it, by kind."""

    @property
    def generation(self) -> int:
        """
        Grows whenever what was offered before may be lost, before anything else is taken: everything
        unconfirmed is offered again, the oldest first. 0 until there is a relay.
        """

    def offer(self, data: bytes) -> bool:
        """Hand `data` over without waiting; False when it cannot be taken now."""

    def replies(self) -> list[bytes]:
        """Return the replies of the relay since the last call."""

    def close(self) -> None:
        """Close the connection. It is safe to call twice."""

    def forked(self) -> None:
        """In a child made by `os.fork`: let go of the parent's, touching nothing that may be locked."""


class SocketChannel:
    """
    A non-blocking Unix SEQPACKET socket to the relay: one packet, one message.

    The relay may come later than the rank, go away and come back: the agent just keeps offering.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.errors = Errors()
        self._path = path
        self._clock = clock
        self._socket: socket.socket | None = None
        self._next_try = 0.0
        self._generation = 0

    @property
    def generation(self) -> int:
        """Number of connections made and lost so far."""
        return self._generation

    def offer(self, data: bytes) -> bool:
        """Send one packet; False when there is no relay or its queue is full."""
        if self._socket is None and not self._connect():
            return False
        assert self._socket is not None
        try:
            self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self.errors[type(error).__name__] += 1
            self.close()
            return False
        return True

    def replies(self) -> list[bytes]:
        """Every packet that has arrived; a closed connection is noticed here."""
        answers: list[bytes] = []
        while self._socket is not None:
            try:
                data = self._socket.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            if not data:
                self.close()
                break
            answers.append(data)
        return answers

    def close(self) -> None:
        """Close the socket; the next offer opens a new one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._generation += 1

    def forked(self) -> None:
        """Close this child's end; the parent's stays open."""
        self.close()

    def _connect(self) -> bool:
        now = self._clock()
        if now < self._next_try:
            return False
        self._next_try = now + RECONNECT_S
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        except OSError as error:  # too many open files
            self.errors[type(error).__name__] += 1
            return False
        sock.setblocking(False)
        try:
            sock.connect(self._path)
        except OSError:
            sock.close()
            return False
        self._socket = sock
        self._generation += 1
        return True
