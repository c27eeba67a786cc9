"""The command `traceml-ray dashboard`: the web app, see `dash_app.process`."""

from __future__ import annotations

import argparse
import os

from traceml_ray.commands import which
from traceml_ray.text import log


def add_arguments(command: argparse.ArgumentParser) -> None:
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


def run(arguments: argparse.Namespace) -> int:
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


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text} is not a port")
    return int(text)
