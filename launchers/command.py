"""
`traceml-ray run -- COMMAND …`: any command, with a monitor.

For launchers that are not torchrun (accelerate, deepspeed, mpirun, srun), and for scripts that start
their ranks themselves. The command is a child of this process and has its stdin, terminal and process
group (`signals`); what it starts is watched where it turns out to be a rank (`bootstrap.COMMAND`).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from traceml_ray.agent.bootstrap import COMMAND, clear_rank_environment
from traceml_ray.printing import say
from traceml_ray.ray.connection import join

from .arguments import RAY_PORT, check_floors, command_text, dashboard_of, settings_of, unmarked
from .guard import at_the_end
from .monitor import Monitor, monitor_of
from .nodes import Nodes, UsageError, head_host
from .signals import Forwarder

_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
_SIGNALS = "signals may not do what they did before"
_Started = TypeVar("_Started")


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code, 126 or 127 where it cannot be started, 2 for bad input."""
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
        monitor = _monitor(args, words)
    except UsageError as error:
        return _refuse(str(error), 2)
    if monitor is None:
        return _exec(words)
    code = _run(words, monitor)
    return code if code >= 0 else _end_by(-code)


def _refuse(why: str, code: int) -> int:
    say(why)
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
    """Run the command to its end, and the monitor with it; return its exit code, or the negative signal."""
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
    why = "the interpreter that it names is not there" if no_file else error.strerror
    return _refuse(f"{words[0]} cannot be executed: {why}", _NOT_EXECUTABLE)


def _as_a_shell(start: Callable[[Sequence[str]], _Started], words: Sequence[str]) -> _Started:
    """Return what `start` does with the command; a text without `#!` is for /bin/sh. Raises OSError."""
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
    End as the command did, which a signal has ended.

    Where that has no effect (the first process of a container ignores what it sends itself), return the exit
    code that shells give such an end.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # that is dumped already
    with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number
