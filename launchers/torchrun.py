"""
torchrun, with a monitor.

torchrun itself runs in this process, so flags, exit code, signal handling and the table of failures are
torchrun's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import run as torch_run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

from traceml_ray.agent.bootstrap import clear_rank_environment
from traceml_ray.settings import SettingError
from traceml_ray.store.session import SessionError
from traceml_ray.text import log, masked_text
from traceml_ray.wire import messages as wire

from .arguments import (
    Nodes,
    NotGiven,
    UsageError,
    add_flags,
    check_floors,
    command_text,
    dashboard_of,
    marked,
    settings_of,
    unmarked,
)
from .arguments import read as read_nodes
from .check import NAMED, check_nodes, is_wanted, must_stop
from .cluster import free_port
from .confirm import confirming
from .guard import at_the_end
from .monitor import Monitor, monitor_of
from .rounds import numbering

_PROGRAM = "python -m traceml_ray.launch"
_MESSAGE_CHARS = 2000
_ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LAUNCHERS = ("accelerate", "deepspeed", "torchrun", "mpirun", "mpiexec", "srun", "horovodrun", "composer")
"""Commands that start ranks."""


def main(argv: Sequence[str] | None = None) -> int:
    """
    Launch as torchrun does. `argv`: the arguments of torchrun (None: those of this process).

    Returns 0, 2 with one line on stderr for bad input, before anything was started, or 3 if the job was not
    started because the check of its nodes named something. A failed run raises what torchrun raises, which
    makes the interpreter exit with torchrun's exit code.
    """
    clear_rank_environment()
    try:
        args = _parse(argv)
        check_floors(args)
        monitor = None if args.no_monitor else _monitor(args)
        to_check = read_nodes(args, settings_of(args).ray_address) if is_wanted(args) else None
    except (UsageError, SettingError, SessionError) as error:
        log(error)
        return 2
    return _train(args, monitor, to_check) or 0


@record
def _train(args: argparse.Namespace, monitor: Monitor | None, to_check: Nodes | None = None) -> int:
    code, failures, begun, environ = 1, list[wire.RankFailure](), False, dict(os.environ)
    try:
        if monitor is not None or to_check is not None:
            _catch_signals(args)
        checked = check_nodes(args, to_check, environ) if to_check is not None else None
        if must_stop(args, checked):
            return NAMED
        begun = True
        if monitor is not None:
            monitor.start()
            monitor.store(checked)
            os.environ.update(monitor.rank_environment())
        numbered = numbering() if monitor is not None else contextlib.nullcontext()
        with numbered, confirming(args, monitor, environ):
            torch_run.run(args)  # type: ignore[no-untyped-call]
        code = 0
    except _EndedEarly as error:
        code = -error.number
        raise SignalException(f"got signal {error.number}", signal.Signals(error.number)) from None
    except ChildFailedError as error:
        with at_the_end("the failures of ranks are not in the session"):
            failures = _failures(error)
        raise
    except SignalException as error:
        code = -int(error.sigval)
        raise
    except KeyboardInterrupt:
        code = -2
        raise
    finally:
        if monitor is not None and begun:
            monitor.finish(code, failures)
        elif monitor is not None:
            with at_the_end("the session could not be removed"):
                monitor.discard()
    return code


class _EndedEarly(BaseException):
    """A signal arrived before torchrun had installed its handlers."""

    def __init__(self, number: int) -> None:
        self.number = number


def _catch_signals(args: argparse.Namespace) -> None:
    """
    Make signals that end the job end it in an orderly way even before torchrun handles them. If SIGHUP is
    ignored (nohup), it stays ignored; torchrun would handle it nevertheless.
    """
    for number in _ENDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end_early)
    handled: str | None = getattr(args, "signals_to_handle", None)  # an older torchrun has no such flag
    if handled is not None and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        args.signals_to_handle = ",".join(name for name in handled.split(",") if name.strip() != "SIGHUP")


def _end_early(number: int, _frame: object) -> NoReturn:
    raise _EndedEarly(number)


def _monitor(args: argparse.Namespace) -> Monitor | None:
    settings = settings_of(args)
    nodes = read_nodes(args, settings.ray_address)
    _check(args, nodes)
    return monitor_of(settings, _info(args, nodes), os.environ, nodes, dashboard_of(args), args.live)


def _failures(error: ChildFailedError) -> list[wire.RankFailure]:
    return [
        wire.RankFailure(
            rank=rank,
            local_rank=failure.local_rank,
            pid=failure.pid,
            exit_code=failure.exitcode,
            t_ns=int(failure.timestamp) * 1_000_000_000,
            message=masked_text(_message(failure.message)[:_MESSAGE_CHARS]),
        )
        for rank, failure in error.failures.items()
    ]


def _message(message: Any) -> str:
    """Return the message of a rank's error file without its traceback; "" if torchrun has only a hint."""
    if isinstance(message, dict):
        return str(message.get("message", ""))
    return "" if "elastic/errors.html" in message else str(message)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = torch_run.get_args_parser()
    parser.prog = _PROGRAM
    parser.error = _usage_error  # type: ignore[method-assign]
    theirs, complete = set(parser._option_string_actions), parser._get_option_tuples
    # An abbreviation that torchrun understands is not ambiguous because of our flags.
    parser._get_option_tuples = lambda option_string: (  # type: ignore[method-assign]
        [option for option in complete(option_string) if option[1] in theirs] or complete(option_string)
    )
    ours = parser.add_argument_group(
        "traceml-ray", "Also in the environment as TRACEML_SESSION, TRACEML_OUT, ..."
    )

    def add(*names: str, **how: Any) -> None:
        # A newer torchrun may have a flag of the same name: it is torchrun's then.
        if free := [name for name in names if name not in theirs]:
            ours.add_argument(*free, **how)

    add_flags(add, "the master's port + 1")
    ours.add_argument("--no-monitor", action="store_true", help="Run plain torchrun, without the monitor.")
    if "PET_NODE_RANK" not in os.environ:
        parser.set_defaults(node_rank=NotGiven(0))
    given = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(marked(given))
    args.training_script_args = unmarked(args.training_script_args)
    return args


def _usage_error(message: str) -> NoReturn:
    raise UsageError(f"{message} (see {_PROGRAM} --help)")


def _check(args: argparse.Namespace, nodes: Nodes) -> None:
    """Check what would fail only after the monitor is up. Raises UsageError."""
    script = Path(args.training_script)
    if not (args.module or args.no_python or _is_there(script)):
        raise UsageError(f"there is no script {script} (in {Path.cwd()})")
    if args.module and args.no_python:
        raise UsageError("--no-python and --module cannot be used together")
    if args.no_python and script.name in _LAUNCHERS:
        raise UsageError(
            f"{script.name} starts ranks itself: traceml-ray run -- {script.name} … (torchrun's --no-python "
            "would start one copy for each rank)"
        )
    _world_size(args)
    if nodes.several:
        return
    if args.master_port is not None and not _port_is_free(args.master_addr, args.master_port):
        taken, args.master_port = args.master_port, free_port()
        log(f"master port {taken} is in use, taking {args.master_port}")


def _is_there(script: Path) -> bool:
    try:
        return script.exists()
    except OSError:  # no file can have this name
        return False


def _info(args: argparse.Namespace, nodes: Nodes) -> dict[str, str | int | float | None]:
    return {
        "launcher": "torchrun",
        "command": command_text([args.training_script, *args.training_script_args]),
        "nnodes": nodes.count if nodes.fixed else None,
        "world_size": nodes.count * _world_size(args) if nodes.fixed else None,
    }


def _world_size(args: argparse.Namespace) -> int:
    try:
        size: int = torch_run.determine_local_world_size(args.nproc_per_node)
    except ValueError as error:
        raise UsageError(f"--nproc-per-node={args.nproc_per_node}: {error}") from None
    if size < 1:
        raise UsageError(f"--nproc-per-node={args.nproc_per_node} must be at least 1")
    return size


def _port_is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError, TypeError, ValueError):  # the text may be no host name
            return False
    return True
