"""Processes of a check: one that is given a request and returns a result, and lines that a process sends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from traceml_ray import text

_KILLED_S = 5.0
_MOST_LINE_BYTES = 1 << 22


class Child:
    """
    A process that runs a module of ours once, in a session of its own.

    Args:
        module: name of the module. It reads a request from stdin, and writes a result to stdout.
        environ: environment of the process.
        quiet: whether what it writes to stderr is dropped.

    Raises OSError if it cannot be started.
    """

    def __init__(self, module: str, environ: Mapping[str, str], *, quiet: bool = False) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd="/",  # the user's folder may hold files named like modules
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            start_new_session=True,
        )

    def result(self, request: bytes, limit_s: float) -> bytes:
        """
        Return what the process writes until it ends. It has ended then, and so has all that it has started.

        Raises `subprocess.TimeoutExpired` after `limit_s` seconds, `subprocess.CalledProcessError` if it
        fails, and OSError.
        """
        try:
            output, _ = self._process.communicate(request, timeout=limit_s)
        finally:
            self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that a hanging disk holds is left
                self._process.wait(_KILLED_S)
        if self._process.returncode:
            raise subprocess.CalledProcessError(self._process.returncode, "check")
        return output

    def kill(self) -> None:
        """Kill the process and what it has started. Any thread may do this."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)


class LineReader:
    """
    Reads lines from a pipe or a socket, each within a time limit and of a limited size.

    Args:
        file: its file descriptor.
    """

    def __init__(self, file: int) -> None:
        self._file, self._received = file, b""
        self._poll = select.poll()  # select() refuses descriptors from 1024 on
        self._poll.register(file, select.POLLIN)

    def line(self, limit_s: float) -> bytes:
        """
        Return the next line. Raises TimeoutError if it is not complete after `limit_s` seconds, EOFError if
        the other side has ended, and OSError (also for a line that is too long).
        """
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._received:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._poll.poll(1e3 * left_s):
                raise TimeoutError(f"it did not answer within {text.duration(limit_s)}")
            part = os.read(self._file, 1 << 16)
            if not part:
                raise EOFError("its process has ended")
            self._received += part
            if len(self._received) > _MOST_LINE_BYTES:
                raise ConnectionError("it sends too much")
        line, _, self._received = self._received.partition(b"\n")
        return line
