"""The command `traceml-ray top`: a session in the terminal, see `terminal.top`."""

from __future__ import annotations

import argparse

from traceml_ray.commands import which


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray top`."""
    which.add_session(command, waits="how long to wait for a session to begin, s (default: 30)")
    which.add_run(command)
    command.add_argument("--once", action="store_true", help="print the overview once and exit")
    command.add_argument(
        "--interval", type=_interval, default=1.0, metavar="S", help="seconds between updates (default: 1)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Watch a running or stored session; prints plain lines when stdout is not a terminal."""
    from traceml_ray.terminal import top

    return top.run(arguments)


def _interval(text: str) -> float:
    return which.seconds(text, 0.2, 3600.0)
