"""
The channel to the relay by actor calls from a process that Ray did not start: a rank under torchrun with
`--channel actor`.

Attaching lets Ray into the training process. So it is done late, in a separate thread and only when the relay
of this node is known to exist. It leaves no hook behind and ends within a deadline. Until then, and whenever
Ray is unavailable, offers are refused and the agent buffers.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import logging
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

from traceml_ray.agent.bootstrap import end_as_interrupted
from traceml_ray.errors import Errors
from traceml_ray.ray.actors import FILE, Attachment
from traceml_ray.ray.connection import attach, raylet_answers, set_environ
from traceml_ray.store.session import read_json

ATTACH_S = 2.0
"""Time for which the process waits at its end for an attach in progress, in s."""
SHUTDOWN_S = 1.0
TURN_S = 0.0005
_LOOK_S = 0.2
_REACH_S = 2.0
_PEERCRED = struct.Struct("3i")
_SIGACTION_BYTES = 256  # of struct sigaction, and to spare
_FATAL = (
    *(signal.SIGSEGV, signal.SIGILL, signal.SIGFPE, signal.SIGABRT),
    *(signal.SIGTERM, signal.SIGBUS, signal.SIGTRAP),
)
"""Signals that Ray installs handlers for."""


class AttachedChannel:
    """
    Attaches to Ray in the background and is an `ActorChannel` from then on.

    Args:
        path: path of the relay's socket. While no relay listens there, Ray is not used.
        session: name of the session.
    """

    def __init__(self, path: str, session: str) -> None:
        self.errors = Errors()
        self._path = path
        self._session = session
        self._channel: Any = None
        self._ending = threading.Event()
        self._attached = False
        self._thread = threading.Thread(target=self._run, name="traceml-attach", daemon=True)
        atexit.register(self._leave)  # before the agent's own: so it runs after the last batch is sent
        self._thread.start()

    @property
    def generation(self) -> int:
        """Number of times a relay was found so far."""
        return 0 if self._channel is None else int(self._channel.generation)

    def offer(self, data: bytes) -> bool:
        """Call the relay. Return False until this process is attached, and as `ActorChannel.offer` does."""
        return self._channel is not None and bool(self._channel.offer(data))

    def replies(self) -> list[bytes]:
        """Return what the relay has answered since the last call."""
        return [] if self._channel is None else list(self._channel.replies())

    def close(self) -> None:
        """Make no more calls; Ray is left when the process ends."""
        self._ending.set()
        if self._channel is not None:
            self._channel.close()

    def forked(self) -> None:
        """Leave Ray's objects as they are: freeing one takes locks that may never be released."""
        atexit.unregister(self._leave)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def _run(self) -> None:
        while not self._ending.wait(_LOOK_S):
            if not _listener(self._path):
                continue
            try:
                self._attach()
            except Exception as error:
                self.errors.note("attach", error)
            return

    def _attach(self) -> None:
        attachment = read_json(Path(self._path).parent / FILE, Attachment)
        with _environment_kept(), _hooks_kept(), _short_turns(), contextlib.ExitStack() as while_attaching:
            attach(attachment, _REACH_S, lambda ray: self._about_to_attach(ray, while_attaching))
            import ray

            worker: Any = ray._private.worker.global_worker
            worker.get_serialization_context()  # imports, and else does at the first call
            _end_with_the_interpreter(ray)  # again: before what was registered meanwhile
            os.register_at_fork(after_in_child=lambda: self._quietly(_keep_for_good, ray))
            self._quietly(_stop_printing_errors, ray)
        from traceml_ray.ray.actor_calls import ActorChannel

        channel = ActorChannel(self._session)
        channel.errors = self.errors
        self._channel = channel

    def _about_to_attach(self, ray: Any, while_attaching: contextlib.ExitStack) -> None:
        # `ray.init` holds the GIL while a raylet does not answer, and then ends the process.
        if not raylet_answers(_listener(self._path)):
            raise ConnectionError("the raylet does not answer")
        if ray.is_initialized():
            raise RuntimeError("the script has attached to Ray itself")
        while_attaching.enter_context(_silenced(logging.getLogger("ray")))  # its import has set it up
        self._attached = True
        _end_with_the_interpreter(ray)

    def _leave(self) -> None:
        """Leave Ray at the end of the process, and wait for that only a moment."""
        self.close()
        self._thread.join(ATTACH_S if self._attached else 0)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        if self._channel is None:
            return
        import ray

        self._quietly(_keep_for_good, ray)
        self._quietly(self._shut_down, ray)
        end_as_interrupted()

    def _shut_down(self, ray: Any) -> None:
        leaving = threading.Thread(target=self._quietly, args=(ray.shutdown,), daemon=True)
        leaving.start()  # Python 3.12 refuses that at its end: then there is no goodbye
        leaving.join(SHUTDOWN_S)

    def _quietly(self, call: Any, *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:
            self.errors.note("leave", error)


def _listener(path: str) -> int:
    """Return the pid of the relay that listens at `path`; 0 when no relay does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except OSError:
            return 0
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    pid: int = _PEERCRED.unpack(credentials)[0]
    return pid


def _end_with_the_interpreter(ray: Any) -> None:
    """
    Make this process, and each child that it forks, exit when Python is done, with the exit code it has then.

    Ray's own exit handler has no deadline. The C++ code that runs after Python hangs or crashes if Ray's
    threads still wait for a head or a raylet that does not answer, and in every forked child.
    """
    atexit.unregister(ray.shutdown)
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # called as _exit(status, None), before the handlers of Ray's library
    libc.on_exit(libc.fcloseall, None)  # before that one: what C code has buffered is written


def _keep_for_good(ray: Any) -> None:
    """Never free Ray's C++ objects: Python would free them at exit, where that can hang or crash."""
    worker = ray._private.worker
    state, kv = map(importlib.import_module, ("ray._private.state", "ray.experimental.internal_kv"))
    for holder in (worker.global_worker, worker._global_node, state.state, kv):
        for held in list(vars(holder).values()):
            if type(held).__module__ == "ray._raylet":
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


def _stop_printing_errors(ray: Any) -> None:
    """End the thread with which Ray prints errors of the cluster into the script's output."""
    worker = ray._private.worker.global_worker
    worker.threads_stopped.set()
    worker.gcs_error_subscriber.close()
    worker.listener_thread.join(SHUTDOWN_S)


@contextlib.contextmanager
def _short_turns() -> Generator[None]:
    """While this thread imports, let the training thread have the GIL back after 0.5 ms instead of 5 ms."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(min(usual, TURN_S))
    short = sys.getswitchinterval()
    try:
        yield
    finally:
        if sys.getswitchinterval() == short:  # the script has not set it meanwhile
            sys.setswitchinterval(usual)


@contextlib.contextmanager
def _environment_kept() -> Generator[None]:
    """Undo Ray's changes of the environment: neither the script nor its children may have them."""
    before = _ray_environ()
    try:
        yield
    finally:
        set_environ({**dict.fromkeys(_ray_environ()), **before})


def _ray_environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}


@contextlib.contextmanager
def _silenced(logger: logging.Logger) -> Generator[None]:
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _hooks_kept() -> Generator[None]:
    """Restore what Ray replaces in this process: `sys.excepthook`, and signal handlers below Python's."""
    hook = sys.excepthook
    libc = ctypes.CDLL(None)
    before = {number: signal.getsignal(number) for number in _FATAL}
    handlers = {number: ctypes.create_string_buffer(_SIGACTION_BYTES) for number in _FATAL}
    hooked = [number for number in _FATAL if libc.sigaction(number, None, handlers[number]) == 0]
    try:
        yield
    finally:
        for number in hooked:
            if signal.getsignal(number) == before[number]:  # the script has not set one of its own meanwhile
                libc.sigaction(number, handlers[number], None)
        if getattr(sys.excepthook, "__module__", "").startswith("ray."):
            sys.excepthook = hook
