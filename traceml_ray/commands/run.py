"""The command `traceml-ray run`: any command with a monitor, see `launchers.command`."""

from __future__ import annotations

import argparse

from traceml_ray.launchers.arguments import add_command


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray run`."""
    command.usage = "%(prog)s [options] -- COMMAND …"
    add_command(command.add_argument)


def run(arguments: argparse.Namespace) -> int:
    """
    Run any command, as `traceml-ray run -- accelerate launch train.py`, and watch the ranks it starts. In
    place of torchrun: `python -m traceml_ray.launch`.
    """
    from traceml_ray.launchers import command

    return command.run(arguments)
