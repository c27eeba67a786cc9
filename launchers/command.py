"""
Runs any command with a monitor: `traceml-ray run -- COMMAND …`.

This is for launchers other than torchrun (accelerate, deepspeed, mpirun, srun), and for scripts that start
their ranks themselves. The command is a child of this process and has its stdin, terminal and process
group; what it starts is watched where it turns out to be a rank (`bootstrap.COMMAND`).

A signal reaches the command once. The kernel delivers a signal for the group (`timeout`, `kill %1`, Ctrl-C)
to both, and one for the launcher alone to the launcher only, which forwards it. The kernel does not show
which of the two it was. So there is a witness: a process in the same group that blocks
these signals and reports which of them are pending.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from traceml_ray.agent.bootstrap import COMMAND, clear_rank_environment
from traceml_ray.ray.connection import join
from traceml_ray.text import log

from .arguments import (
    RAY_PORT,
    Nodes,
    UsageError,
    check_floors,
    command_text,
    dashboard_of,
    head_host,
    settings_of,
    unmarked,
)
from .check import NAMED, check_nodes, is_wanted, must_stop
from .guard import at_the_end
from .monitor import Monitor, monitor_of

_FORWARDED = frozenset(
    (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
)
_END = 0
_MOST = 256
_SETTLE_S = 0.1
"""
Delay in s between a signal and the question to the witness: `timeout` signals the launcher before
its group.
"""
_ANSWER_S = 2.0
# Not a fork of the launcher: `pkill -f` of a name in the launcher's command line must not find it.
_WITNESS = """
import os, signal
while number := os.read(0, 1):
    pending = number[0] in signal.sigpending()
    if pending:
        signal.sigwait(number)
    os.write(1, bytes([pending]))
"""


class Forwarder:
    """
    Receives this process's signals from now on until `close`, and forwards them. Create it on the main
    thread.

    Signals arrive through a pipe, to which Python writes immediately. A Python handler could run too late: if
    the signal comes just before the main thread waits for the command, its handler runs only after the
    command has ended.
    """

    def __init__(self) -> None:
        self._before = {number: signal.getsignal(number) for number in _FORWARDED}
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._fd_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread: threading.Thread | None = None
        self._witness: subprocess.Popen[bytes] | None = None
        for number, handler in self._before.items():
            if handler != signal.SIG_IGN:  # as under nohup: it is the command's, too
                signal.signal(number, _do_nothing)

    def to(self, command: subprocess.Popen[bytes]) -> None:
        """
        Send `command` the signals that came before it started, and from now on those for this
        process alone.
        """
        self._witness = _witness()
        thread = threading.Thread(target=self._forward, args=(command,), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there is no thread to be had
            self.close()
        else:
            self._thread = thread

    def command_is_over(self) -> None:
        """
        Stop forwarding. Until `close`, signals have no effect: a second one (a shell reports that its
        terminal is gone, a scheduler repeats a signal) would end this process before its work is done. But
        Ctrl-C raises KeyboardInterrupt, because a person does not want to wait.
        """
        signal.signal(signal.SIGINT, self._before[signal.SIGINT])
        self._put(_END)
        self._dismiss()

    def close(self) -> None:
        """Restore the signal handlers that were installed before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        self._put(_END)
        self._dismiss()
        if self._thread is not None:
            self._thread.join(_SETTLE_S + _ANSWER_S)
        if self._thread is None or not self._thread.is_alive():
            os.close(self._read)
            os.close(self._write)

    def _put(self, number: int) -> None:
        with contextlib.suppress(BlockingIOError):  # full of signals that nobody takes any more
            os.write(self._write, bytes([number]))

    def _forward(self, command: subprocess.Popen[bytes]) -> None:
        while _END not in (came := self._received() | self._received_soon()):
            of_group = {number for number in came if self._whole_group_has(number)}
            for number in came - of_group:
                with contextlib.suppress(OSError):  # as to a command of another user
                    command.send_signal(number)
            if of_group:  # this process may have had one before, and be told of the group's only now
                for number in self._received_soon() - of_group:
                    self._put(number)

    def _received(self) -> set[int]:
        """Wait for signals and return those received."""
        return {number for number in os.read(self._read, _MOST) if number in _FORWARDED or number == _END}

    def _received_soon(self) -> set[int]:
        """Return the signals received within `_SETTLE_S`."""
        time.sleep(_SETTLE_S)
        came: set[int] = set()
        while select.select([self._read], [], [], 0)[0]:
            came |= self._received()
        return came

    def _whole_group_has(self, number: int) -> bool:
        """Return whether the whole group received the signal. False if the witness does not answer."""
        witness = self._witness
        if witness is None or witness.stdin is None or witness.stdout is None:
            return False
        with contextlib.suppress(OSError):
            witness.stdin.write(bytes([number]))
            if select.select([witness.stdout], [], [], _ANSWER_S)[0]:
                return witness.stdout.read(1) == b"\x01"
        self._dismiss()  # a late answer would be taken for that to the next question
        return False

    def _dismiss(self) -> None:
        witness, self._witness = self._witness, None
        if witness is not None:
            witness.kill()
            witness.wait()


def _do_nothing(_number: int, _frame: object) -> None:
    """Do nothing. Forwarded signals need a handler, because without one Python writes nothing to the pipe."""


def _witness() -> subprocess.Popen[bytes] | None:
    """Start the witness with the signals blocked: the signal mask is kept when a program is started."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WITNESS],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
_SIGNALS = "signal handlers may differ from before"
_Started = TypeVar("_Started")


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code, 126 or 127 if it cannot be started, 2 for bad input."""
    clear_rank_environment()
    words = unmarked(args.words[1:] if args.words[:1] == ["--"] else args.words)
    if not words:
        return _refuse("which command? traceml-ray run -- accelerate launch train.py", 2)
    if shutil.which(words[0]) is None:
        there = Path(words[0]).is_file()
        return _refuse(
            f"{words[0]} {'cannot be executed' if there else 'is not a command here'}",
            _NOT_EXECUTABLE if there else _NOT_FOUND,
        )
    check_floors(args)
    if args.no_monitor:
        return _exec(words)
    try:
        checked = check_nodes(args, _nodes(args), os.environ) if is_wanted(args) else None
        if must_stop(args, checked):
            return NAMED
        monitor = _monitor(args, words)
    except UsageError as error:
        return _refuse(str(error), 2)
    if monitor is None:
        return _exec(words)
    monitor.store(checked)
    code = _run(words, monitor)
    return code if code >= 0 else _end_by(-code)


def _refuse(why: str, code: int) -> int:
    log(why)
    return code


def _monitor(args: argparse.Namespace, words: Sequence[str]) -> Monitor | None:
    settings, nodes = settings_of(args), _nodes(args)
    info: dict[str, str | int | float | None] = {
        "launcher": Path(words[0]).name[:64],
        "command": command_text(words),
        "nnodes": nodes.count,
    }
    return monitor_of(settings, info, os.environ, nodes, dashboard_of(args), args.live)


def _nodes(args: argparse.Namespace) -> Nodes:
    if args.nnodes == 1:
        return Nodes()
    if not (0 <= args.node_rank < args.nnodes and args.master_addr):
        raise UsageError(
            f"--nnodes={args.nnodes} needs --master-addr HOST and a --node-rank below it on each node"
        )
    head = join(head_host(args.master_addr), args.traceml_port or RAY_PORT)
    head_hash = hashlib.sha256(head.encode()).hexdigest()[:8]
    first = args.node_rank == 0
    return Nodes(
        args.nnodes,
        rank=args.node_rank,
        first=first,
        host=args.master_addr,
        head=head,
        job=f"job-{head_hash}",
    )


def _run(words: Sequence[str], monitor: Monitor) -> int:
    """Run the command and its monitor to the end. Return the command's exit code, or the negative signal."""
    code, signals = 1, Forwarder()
    environ = {**os.environ, **monitor.rank_environment(), COMMAND: "1"}
    try:
        process = _as_a_shell(lambda words: subprocess.Popen(words, env=environ), words)
    except OSError as error:
        signals.close()
        monitor.discard()
        return _cannot(words, error)
    try:
        signals.to(process)
        monitor.start()
        code = process.wait()
    finally:
        with at_the_end(_SIGNALS):
            signals.command_is_over()
        monitor.finish(code, [])
        with at_the_end(_SIGNALS):
            signals.close()
    return code


def _exec(words: Sequence[str]) -> int:
    try:
        _as_a_shell(lambda words: os.execvp(words[0], [*words]), words)
    except OSError as error:
        return _cannot(words, error)


def _cannot(words: Sequence[str], error: OSError) -> int:
    no_file = error.errno == errno.ENOENT  # `words[0]` itself was found
    why = "the interpreter that it names does not exist" if no_file else error.strerror
    return _refuse(f"{words[0]} cannot be executed: {why}", _NOT_EXECUTABLE)


def _as_a_shell(start: Callable[[Sequence[str]], _Started], words: Sequence[str]) -> _Started:
    """Return the result of `start` for the command. A text without `#!` is run by /bin/sh. Raises OSError."""
    try:
        return start(words)
    except OSError as error:
        path = shutil.which(words[0])
        if error.errno != errno.ENOEXEC or path is None or _is_binary(path):
            raise
        return start(["/bin/sh", path, *words[1:]])


def _is_binary(path: str) -> bool:
    with Path(path).open("rb") as file:
        return b"\0" in file.read(512)


def _end_by(number: int) -> int:
    """
    End this process by the signal that ended the command.

    If that has no effect (the first process of a container ignores signals from itself), return the exit code
    that shells use for this case.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # that is dumped already
    with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number
