"""
`traceml-ray run -- COMMAND …`: any command, with a monitor beside it.

For launchers that are not torchrun (accelerate, deepspeed, mpirun, srun), and for scripts that start
their ranks themselves. The command is a child of this process and has its stdin, terminal and process
group; what it starts is watched where it turns out to be a rank (`bootstrap.COMMAND`).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from traceml_ray.agent.bootstrap import COMMAND, leave_rank
from traceml_ray.plain import one_line
from traceml_ray.reach import join

from .arguments import RAY_PORT, check_floors, command_text, settings_of, unmarked
from .monitor import Monitor
from .nodes import Nodes, UsageError, head_host

_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
_FORWARDED = (*_FROM_TERMINAL, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code, 126 or 127 where it cannot be started, 2 for bad input."""
    leave_rank()
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
        os.execvp(words[0], words)
    try:
        monitor = _monitor(args, words)
    except UsageError as error:
        return _refuse(str(error), 2)
    code = _Child(words).run(monitor)
    if code < 0:
        _end_by(-code)
    return code


def _refuse(why: str, code: int) -> int:
    print(f"traceml-ray: {one_line(why)}", file=sys.stderr)
    return code


def _monitor(args: argparse.Namespace, words: Sequence[str]) -> Monitor:
    from traceml_ray.reports.baseline import checked

    settings, nodes = settings_of(args), _nodes(args)
    info: dict[str, str | int | float | None] = {
        "launcher": Path(words[0]).name[:64],
        "command": command_text(words),
        "nnodes": nodes.count,
    }
    return Monitor(checked(settings) if nodes.first else settings, info, os.environ, nodes, args.dashboard)


def _nodes(args: argparse.Namespace) -> Nodes:
    if args.nnodes == 1:
        return Nodes()
    if not (0 <= args.node_rank < args.nnodes and args.master_addr):
        raise UsageError(
            f"--nnodes={args.nnodes} needs --master-addr HOST and a --node-rank below it on each node"
        )
    head = join(head_host(args.master_addr), args.traceml_port or RAY_PORT)
    place = hashlib.sha256(head.encode()).hexdigest()[:8]
    first = args.node_rank == 0
    return Nodes(
        args.nnodes, rank=args.node_rank, first=first, host=args.master_addr, head=head, job=f"job-{place}"
    )


class _Child:
    """The command: what this process is sent goes on to it."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []

    def run(self, monitor: Monitor) -> int:
        """Run it to its end, and the monitor with it; return its exit code, or the negative signal."""
        before = {number: signal.getsignal(number) for number in _FORWARDED}
        for number, handler in before.items():
            if handler != signal.SIG_IGN:  # as under nohup: it is the command's, too
                signal.signal(number, self._forward)
        code = 1
        try:
            environ = {**os.environ, **monitor.rank_environment(), COMMAND: "1"}
            self._process = subprocess.Popen(self._words, env=environ)
            for early in self._early:
                self._process.send_signal(early)
            monitor.start()
            code = self._process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            monitor.finish(code, [])
        return code

    def _forward(self, number: int, _frame: object) -> None:
        if self._process is None:
            self._early.append(number)
        elif not (number in _FROM_TERMINAL and _in_foreground()):  # then the terminal has sent it to both
            self._process.send_signal(number)


def _in_foreground() -> bool:
    """Return whether what is typed at the terminal reaches this process and its children."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)


def _end_by(number: int) -> None:
    """End as the command did, which a signal has ended."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # that is dumped already
    with contextlib.suppress(OSError, ValueError):  # nobody changes how SIGKILL ends
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
