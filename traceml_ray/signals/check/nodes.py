"""How a check reaches its nodes: the interface, and the process of this node."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Protocol

import msgspec

from traceml_ray.signals.check.child import LineReader
from traceml_ray.signals.check.tasks import Task, TaskReply
from traceml_ray.wire.codec import ready

_END_S = 2.0


class NoAnswerError(Exception):
    """A node did not answer. The message is the reason."""


class CheckNode(Protocol):
    """A node of a check. Only one thread at a time asks it."""

    @property
    def name(self) -> str:
        """Return the label of the node: its host name, or what distinguishes it from others on its host."""

    @property
    def address(self) -> str:
        """Return the address at which other nodes reach it."""

    @property
    def reserved(self) -> str:
        """Return in words what jobs have reserved on it; "": nothing that is known."""

    def ask(self, task: Task, limit_s: float) -> TaskReply:
        """Have a task done. Raises `NoAnswerError` after `limit_s` seconds, or when the node is gone."""


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a measuring process: without the monitor, which would take it for a rank."""
    return {name: value for name, value in environ.items() if not name.startswith("TRACEML_")}


class TaskProcess:
    """
    A process on this node that does tasks. It is started with the first task, and again after it had to be
    killed.

    Args:
        environ: its environment.
        nice: how much its priority is lowered.
    """

    def __init__(self, environ: Mapping[str, str], nice: int = 0) -> None:
        self._environ, self._nice = environment(environ), nice
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, task: Task, limit_s: float) -> TaskReply:
        """Have a task done. Raises NoAnswerError."""
        try:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(msgspec.json.encode(task) + b"\n")
            process.stdin.flush()
            line = LineReader(process.stdout.fileno()).line(limit_s)
            return msgspec.json.decode(line, type=ready(TaskReply))
        except TimeoutError as error:
            self.end()
            raise NoAnswerError(str(error)) from None
        except EOFError:
            raise NoAnswerError(f"its measuring process ended ({self.end()})") from None
        except (OSError, msgspec.MsgspecError) as error:
            self.end()
            raise NoAnswerError(f"its measuring process failed: {error}") from None

    def end(self) -> int | None:
        """
        Kill the process, and return its exit code. One that cannot be killed, as a hanging disk holds it, is
        left. None: its exit code is not known, or there is no process.
        """
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:
                    pass
        try:
            return process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "traceml_ray.signals.check.process", str(self._nice)],
                cwd="/",  # the user's folder may hold files named like modules
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self._process


def reply_of(process: TaskProcess, task: Task, limit_s: float) -> TaskReply:
    """Return the reply of a process to a task; if it does not answer, one that says so."""
    try:
        return process.ask(task, limit_s)
    except NoAnswerError as error:
        return TaskReply(error=str(error), ended=True)


class LocalNode:
    """
    A node of a check that is this machine.

    Args:
        name: its label.
        address: address at which other nodes reach it.
    """

    reserved = ""

    def __init__(self, name: str, address: str = "127.0.0.1") -> None:
        self.name, self.address = name, address
        self._process = TaskProcess(os.environ)

    def ask(self, task: Task, limit_s: float) -> TaskReply:
        """Have a task done."""
        return reply_of(self._process, task, limit_s)

    def end(self) -> None:
        """End its process."""
        self._process.end()
