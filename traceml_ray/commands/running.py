"""
Commands about a session that runs: `run` starts a job, `status`, `top` and `dashboard` watch a session, and
`dump` and `stop` ask its monitor for something.
"""

from __future__ import annotations

import argparse
import os
import time

from traceml_ray import text
from traceml_ray.commands import which
from traceml_ray.launchers.arguments import add_command
from traceml_ray.settings import Settings
from traceml_ray.store import session
from traceml_ray.text import log, show


def run_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray run`."""
    command.usage = "%(prog)s [options] -- COMMAND …"
    add_command(command.add_argument)


def run(arguments: argparse.Namespace) -> int:
    """
    Run any command, as `traceml-ray run -- accelerate launch train.py`, and watch the ranks it starts. In
    place of torchrun: `python -m traceml_ray.launch`.
    """
    from traceml_ray.launchers.command import run as run_command

    return run_command(arguments)


def status_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray status`."""
    which.add_session(command, waits=None)  # it says of one that is starting that it is
    command.add_argument("--json", action="store_true", help="print data instead of text")


def status(arguments: argparse.Namespace) -> int:
    """Print which ranks report, what was lost, and what could not be measured."""
    from traceml_ray.reports.answers import Answers
    from traceml_ray.reports.status import render_start, render_status, start_json, status_json

    settings = Settings.load(out=arguments.out)
    folder = session.find(arguments.session, settings.out, starting=True)
    live = session.live_state(folder)
    if live is not None and not (folder / session.DATABASE).exists():
        show(start_json(folder, live) if arguments.json else render_start(folder, live), end="")
        return 0
    render = status_json if arguments.json else render_status
    send = Answers(folder, settings.thresholds).reply
    with text.progress_bar(f"status of {folder.name}"):
        shown = render(send, folder, session.holder(folder), time.time_ns())
    show(shown, end="")
    return 0


def top_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray top`."""
    which.add_session(command, waits="how long to wait for a session to begin, s (default: 30)")
    which.add_run(command)
    command.add_argument("--once", action="store_true", help="print the overview once and exit")
    command.add_argument(
        "--interval", type=_interval, default=1.0, metavar="S", help="seconds between updates (default: 1)"
    )


def top(arguments: argparse.Namespace) -> int:
    """Watch a running or stored session; prints plain lines when stdout is not a terminal."""
    from traceml_ray.terminal.top import run as show_top

    return show_top(arguments)


def _interval(given: str) -> float:
    return which.seconds(given, 0.2, 3600.0)


def dashboard_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray dashboard`."""
    which.add_session(command, waits=None)  # the web app has a page that waits
    which.add_run(command)
    command.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1); any other address needs a token",
    )
    command.add_argument("--port", type=_port, help="port to listen on; 0: a free one (default: 8050)")
    command.add_argument(
        "--token",
        help="token that browsers must send (default: generated if needed); better in "
        "TRACEML_DASHBOARD_TOKEN: every user of this machine can read arguments",
    )
    command.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="another host name of this server, for example behind a proxy; can be repeated",
    )
    for hidden in ("--linger", "--listening"):  # of a launcher's dashboard: see dash_app/process.py
        command.add_argument(hidden, type=int, default=0, help=argparse.SUPPRESS)
    command.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


def dashboard(arguments: argparse.Namespace) -> int:
    """Serve the web app of a running or stored session until interrupted."""
    if arguments.child:
        os.nice(5)  # training comes first
    try:
        from traceml_ray.dash_app.process import run as serve
        from traceml_ray.views.source import SourceError
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("traceml_ray"):
            raise
        missing = f"the dashboard needs {error.name}: pip install 'traceml-ray[dash]'"
        log(missing)
        return 1
    token = os.environ.pop("TRACEML_DASHBOARD_TOKEN", None) or None
    if arguments.token is None:
        arguments.token = token
    try:
        return serve(arguments)
    except SourceError as error:
        log(error)
        return 1


def _port(given: str) -> int:
    if not (given.isdecimal() and int(given) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{given} is not a port")
    return int(given)


def dump_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray dump`."""
    which.add_session(command)


def dump(arguments: argparse.Namespace) -> int:
    """Write a bundle of a running session now: the last minutes and the stacks of every rank."""
    from traceml_ray.launchers import control

    folder = which.folder_of(arguments)
    try:
        show(control.dump(folder))
    except control.ControlError as error:
        log(error)
        return 1
    return 0


def stop_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray stop`."""
    which.add_session(command)


def stop(arguments: argparse.Namespace) -> int:
    """Stop the monitor of a running session; training continues."""
    from traceml_ray.launchers import control

    folder = which.folder_of(arguments)
    try:
        control.stop(folder)
    except control.ControlError as error:
        log(error)
        return 1
    return 0
