"""The command `traceml-ray stop`: ends a live session."""

from __future__ import annotations

import argparse

from traceml_ray.commands import which
from traceml_ray.text import log


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray stop`."""
    which.add_session(command)


def run(arguments: argparse.Namespace) -> int:
    """Stop the monitor of a running session; training continues."""
    from traceml_ray.launchers import control

    folder = which.folder_of(arguments)
    try:
        control.stop(folder)
    except control.ControlError as error:
        log(error)
        return 1
    return 0
