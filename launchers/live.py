"""The live view beneath a job's output (`--live`), as a process of its own: it never takes this one along."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from traceml_ray.monitor.finish import KILL_S
from traceml_ray.terminal.codes import LEAVE

_END_S = 0.3
"""How long the child may take to restore the terminal, in s; then it is restored for it."""


def terminal() -> int | None:
    """Return the descriptor that the job's output goes to a terminal by; None where it goes to none."""
    if os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return None
    return next((fd for fd in (1, 2) if _is_terminal(fd)), None)


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False


class LiveView:
    """
    Args:
        folder: of the session.
        fd: the terminal.
        environ: what the process has in its environment.

    Raises OSError when there can be no process.
    """

    def __init__(self, folder: Path, fd: int, environ: Mapping[str, str]) -> None:
        self._fd = fd
        self._process = subprocess.Popen(
            [sys.executable, "-m", "traceml_ray.terminal.live", str(folder)],
            cwd="/",  # the user's folder may hold files named like modules
            env={**environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,  # the process ends when this is closed, as it is when we are gone
            stdout=fd,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def end(self) -> None:
        """Have it give the terminal back; returns when it has."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            clean = self._process.wait(_END_S) == 0
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the disk of the session may hang
                self._process.wait(KILL_S)
            clean = False
        if not clean:
            with contextlib.suppress(OSError):
                os.write(self._fd, LEAVE.encode())
