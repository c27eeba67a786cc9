"""
The interface between an agent and its relay: `Channel`.

No method blocks or raises. Data that cannot be sent now is refused; the agent then drops it and counts it.
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
    """The connection to the relay of this node."""

    errors: Errors
    """Errors of this connection, counted by kind."""

    @property
    def generation(self) -> int:
        """
        Number that grows whenever data offered earlier may be lost. It grows before any new data is accepted.

        The agent then offers everything unconfirmed again, the oldest first. 0 until there is a relay.
        """

    def offer(self, data: bytes) -> bool:
        """Send `data` without waiting. Returns False if it cannot be accepted now."""

    def replies(self) -> list[bytes]:
        """Return the replies that the relay has sent since the last call."""

    def close(self) -> None:
        """Close the connection. It is safe to call twice."""

    def forked(self) -> None:
        """
        In a child made by `os.fork`: drop the parent's connection without touching anything that may be
        locked.
        """


class SocketChannel:
    """
    A non-blocking Unix SEQPACKET socket to the relay. Each packet is one message.

    The relay may start later than the rank, disappear and come back. The agent keeps offering its data.
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
        """Send one packet. Returns False if there is no relay or its queue is full."""
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
        """Return every packet that has arrived. A closed connection is detected here."""
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
        """Close the child's copy of the socket; the parent's stays open."""
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
