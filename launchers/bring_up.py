"""Starts Ray and the actors of a launch in a separate thread, so that training does not wait for them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from traceml_ray.errors import error_text
from traceml_ray.monitor.finish import DISK_S, HELPER_S, KILL_S
from traceml_ray.store.session import MonitorState
from traceml_ray.text import log
from traceml_ray.wire.codec import ready

from .cluster import PrivateRay, wait_for_idle_core
from .guard import guarded
from .helper import HelperReply, HelperRequest

START_WAIT_S = 30.0
"""
Time for which the start, which takes about 2.5 core-seconds, waits for an idle core. A short job ends before
it. After that time the start competes with training once: at low priority it would take minutes on busy
cores, and Ray's own time-outs would end it.
"""
_LOOK_S = 0.2
_WHY = "training goes on without a live monitor"


@dataclass(eq=False)
class BringUp:
    """
    Waits for an idle core, starts Ray and the helper at normal priority, and lowers it when both are done.

    Args:
        ray: private Ray of this launch; None for a cluster that is already running.
        request: request to the helper.
        environ: environment of the helper.
        folder: working directory of the helper; a user's folder may hold files named like modules that Ray
            imports.
        nice: how much the priority is lowered, 0 … 19; with 0 nothing waits for an idle core.
        show: called with the state of the monitor, and why it has failed.
    """

    ray: PrivateRay | None
    request: HelperRequest
    environ: Mapping[str, str]
    folder: Path
    nice: int
    show: Callable[[MonitorState, str], None]

    def __post_init__(self) -> None:
        self._helper: subprocess.Popen[bytes] | None = None
        self._ending = threading.Event()
        self._over = threading.Event()
        self._starting = threading.RLock()

    def begin(self) -> None:
        """Start the thread. The processes that it starts end with it."""
        threading.Thread(target=self._run, name="traceml-start", daemon=True).start()

    def end(self) -> None:
        """
        Start nothing more, and end the helper. On a cluster that stays, the helper is ended only after a
        while, because half-created actors would stay too.
        """
        self._ending.set()
        at_rest = self._starting.acquire(timeout=DISK_S)  # it may be writing to a disk that hangs
        helper = self._helper
        if at_rest:
            self._starting.release()
        if helper is None:
            return
        if self.ray is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                helper.wait(HELPER_S)
        helper.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            helper.wait(KILL_S)

    def close(self) -> None:
        """End the thread. The rest of Ray ends with it."""
        self._ending.set()
        self._over.set()

    def _run(self) -> None:
        with guarded(_WHY):
            try:
                self._bring_up()
            except Exception as error:
                self._failed(error_text(error))
        self._over.wait()  # the kernel ends what this thread has started when the thread ends

    def _bring_up(self) -> None:
        if self.nice:
            cores = psutil.cpu_count() or 1
            self._show("waiting_for_cpu")
            with contextlib.suppress(OSError):  # where it cannot be seen how busy they are
                wait_for_idle_core(START_WAIT_S, psutil.cpu_percent, cores, self._ending.is_set)
        with self._starting:
            if not self._show("starting"):
                return
            if self.ray is not None:
                self.ray.start()
            self._helper = helper = self._start_helper()
        reply = self._reply(helper)
        if not reply.ok:
            self._failed(reply.detail)
            return
        self._show("running")
        if self.ray is not None:
            with guarded("the priority of the monitor's Ray is not lowered"):
                self.ray.yield_cores(self.nice)

    def _failed(self, why: str) -> None:
        if self._show("failed", why):
            log(f"{_WHY}: {why}")
            if self.ray is not None:
                self.ray.stop()

    def _show(self, state: MonitorState, detail: str = "") -> bool:
        """Show the state of the monitor. Return False at its end, or when another process has the session."""
        with self._starting:
            if self._ending.is_set():
                return False
            with contextlib.suppress(OSError):  # a full disk
                self.show(state, detail)
            return not self._ending.is_set()

    def _start_helper(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "traceml_ray.launchers.helper"],
            cwd=self.folder,
            env=dict(self.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _reply(self, helper: subprocess.Popen[bytes]) -> HelperReply:
        """Wait for the reply of the helper. The helper ends in time by itself, or together with Ray."""
        to_send: bytes | None = msgspec.json.encode(self.request)
        while True:
            try:
                answer, _ = helper.communicate(to_send, timeout=_LOOK_S)
                break
            except subprocess.TimeoutExpired:
                to_send = None
            if self.ray is not None and self.ray.exited():
                helper.kill()
        try:
            return msgspec.json.decode(answer, type=ready(HelperReply))
        except msgspec.MsgspecError:
            ended = self.ray.last_line() if self.ray is not None and self.ray.exited() else ""
            return HelperReply(False, ended or f"the helper ended with exit code {helper.returncode}")
