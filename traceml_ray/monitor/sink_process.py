"""The process of a session's sinks (`sinks.process`, started by `sinks.apart`), as its aggregator has it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from traceml_ray.errors import Errors
from traceml_ray.settings import Settings

STARTS = 5
"""How often the process is started; one that ends each time has nothing to say."""
PAUSE_S = 5.0
"""Seconds before it is started again."""
END_S = 20.0
"""How long it may take to end, in s."""
LOOK_S = 0.5
"""Seconds between two looks at whether the process is to end."""


class SinkProcess:
    """
    Starts the process and answers what it asks, in a thread of its own. The process ends when this one does.

    Args:
        folder: of the session.
        settings: of the session.
        answer: answers a question of `store.query`.
        errors: where it is counted that the process has ended by itself.
        ended: called each time the process has ended.
        environ: variables that the process gets besides those of this process.
    """

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        answer: Callable[[bytes], bytes],
        errors: Errors,
        ended: Callable[[], object] = lambda: None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._folder, self._settings, self._answer, self._errors = folder, settings, answer, errors
        self._on_end = ended
        self._environ = {**os.environ, **(environ or {})}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traceml-sinks", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Have the process report the end and end itself; does not wait for it."""
        self._ended.set()

    def join(self, timeout: float) -> None:
        """Wait for its end, for so many seconds at most."""
        self._thread.join(timeout)

    def _run(self) -> None:
        for _ in range(STARTS):
            try:
                try:
                    self._serve()
                finally:
                    self._on_end()
            except Exception as error:
                self._errors.note("sinks", error)
            if self._ended.wait(PAUSE_S):
                return
            self._errors.note("sinks", RuntimeError("the process of the sinks has ended"))

    def _serve(self) -> None:
        """Start the process and answer it until it ends."""
        ours, theirs = Pipe()
        with ours:
            with theirs:
                process = self._start(theirs)
            with process:
                assert process.stdin is not None
                process.stdin.write(msgspec.json.encode(self._settings))
                process.stdin.close()
                with contextlib.suppress(OSError, EOFError):
                    while not self._ended.is_set():
                        if ours.poll(LOOK_S):
                            ours.send_bytes(self._answer(ours.recv_bytes()))
                ours.close()  # then it reports the end
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
                with contextlib.suppress(ProcessLookupError):  # also its child, which may hang
                    os.killpg(process.pid, signal.SIGKILL)

    def _start(self, pipe: Connection) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "traceml_ray.sinks.apart", str(pipe.fileno()), str(self._folder)],
            env=self._environ,
            cwd="/",  # the user's folder may hold files named like modules
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[pipe.fileno()],
            start_new_session=True,
        )
