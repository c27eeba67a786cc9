"""The command `traceml-ray dump`: has a live session keep a bundle."""

from __future__ import annotations

import argparse

from traceml_ray.commands import which
from traceml_ray.text import log, show


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray dump`."""
    which.add_session(command)


def run(arguments: argparse.Namespace) -> int:
    """Write a bundle of a running session now: the last minutes and the stacks of every rank."""
    from traceml_ray.launchers import control

    folder = which.folder_of(arguments)
    try:
        show(control.dump(folder))
    except control.ControlError as error:
        log(error)
        return 1
    return 0
