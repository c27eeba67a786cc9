"""
The dashboard of a session, and the live view beneath a job's output (`--live`), each as a separate process
whose failure does not affect this one. The dashboard ends with this process, or stays with the stored session
while a browser watches.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from traceml_ray.monitor.finish import KILL_S
from traceml_ray.text import LEAVE_PANEL

_PREFIX = "Dashboard: "
LINGERS = "Stays while a browser watches."
"""Line printed by a dashboard that stays when its parent closes stdin."""
_DASHBOARD_END_S = 1.0
_DECIDE_S = 1.0
"""How long the dashboard process may take to print that, in s."""


class DashboardProcess:
    """
    `traceml-ray dashboard`, on a loopback address.

    Args:
        session: name.
        environ: environment of the process.
        on_text: called on another thread with the URL, or with the reason why there is none, or none any
            more.
        options: options of the command, by name; an empty value means not given.

    Raises OSError when the process cannot be started.
    """

    def __init__(
        self,
        session: str,
        environ: Mapping[str, str],
        on_text: Callable[[str], None] = lambda _text: None,
        **options: str,
    ) -> None:
        self.url = ""
        self.last_line = ""
        """The last line of its output."""
        self._on_text = on_text
        self._known = threading.Event()
        self._decided = threading.Event()
        self._decide_by = 0.0
        self.lingers = False
        """Whether the process stays alive after `end`."""
        self._ending = False
        given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "traceml_ray.cli", "dashboard", session, "--child", *given],
            cwd="/",  # the user's folder may hold files named like modules
            env={**environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,  # the process ends when this is closed, as it is when we are gone
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        threading.Thread(target=self._listen, name="traceml-dashboard", daemon=True).start()

    def wait(self, timeout: float) -> str:
        """Wait for the dashboard. Return its URL; "" if it ended or does not serve in `timeout` s."""
        self._known.wait(timeout)
        return self.url if self._process.poll() is None else ""

    def end(self) -> None:
        """Have it end, or stay while a browser watches (option `linger`, s at most); does not wait."""
        self._ending = True
        self._decide_by = time.monotonic() + _DECIDE_S
        if self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill the process, unless it stays after `end`, and wait until it has ended."""
        self._ending = True
        self._decided.wait(max(0.0, self._decide_by - time.monotonic()))
        if self.lingers:
            return
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_DASHBOARD_END_S)

    def _listen(self) -> None:
        """Read the output of the process until it ends, so that it never waits for a reader."""
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                if line.startswith(_PREFIX):
                    self.url = line.removeprefix(_PREFIX).strip()
                    self._known.set()
                    self._on_text(f"dashboard: {self.url}")
                elif line.strip() == LINGERS:
                    self.lingers = True
                    self._decided.set()
                else:
                    self.last_line = line.strip().removeprefix("traceml-ray: ") or self.last_line
        self._decided.set()
        if not self.lingers:
            self.last_line = self.last_line or f"it ended with exit code {self._process.wait()}"
        self._known.set()
        if not self._ending:
            self._on_text(f"no dashboard: {self.last_line}")


_LIVE_END_S = 0.3
"""Time that the child may take to restore the terminal, in s. After that, the terminal is restored for it."""


def terminal() -> int | None:
    """
    Return the descriptor through which the job's output goes to a terminal. None: it goes to no
    terminal.
    """
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
        environ: environment of the process.

    Raises OSError when the process cannot be started.
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
        """Ask the live view to restore the terminal, and wait until it has."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            clean = self._process.wait(_LIVE_END_S) == 0
        except subprocess.TimeoutExpired:
            self._process.kill()
            # No longer wait: the disk of the session may hang.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_S)
            clean = False
        if not clean:
            with contextlib.suppress(OSError):
                os.write(self._fd, LEAVE_PANEL.encode())
