"""Completion in a shell, by argcomplete: `eval "$(traceml-ray completion bash)"`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from traceml_ray.text import log

SHELLS = ("bash", "zsh", "fish")
_ASKED = "_ARGCOMPLETE"
"""This environment variable is set when a shell asks for completions."""


def completion_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray completion`."""
    command.add_argument("shell", choices=SHELLS, help="shell that will run the script")


def completion(arguments: argparse.Namespace) -> int:
    """Print a script that makes a shell complete subcommands, options and session names."""
    try:
        from argcomplete.shell_integration import shellcode
    except ImportError:
        missing = "completion needs argcomplete: pip install 'traceml-ray[completion]'"
        log(missing)
        return 1
    sys.stdout.write(shellcode(["traceml-ray"], shell=arguments.shell) + "\n")
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """If a shell asks for completions, answer and end the process."""
    if _ASKED not in os.environ:
        return
    from argcomplete import autocomplete

    autocomplete(parser)


def names_of_sessions(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Return the sessions whose names begin with `prefix`, for argcomplete."""
    from traceml_ray.reports.listing import names
    from traceml_ray.settings import Settings
    from traceml_ray.store.session import starting_sessions

    out = Settings.load(out=getattr(parsed_args, "out", None)).out
    every = {*names(out), *(folder.name for folder in starting_sessions(Path(out)))}
    return sorted(name for name in every if name.startswith(prefix))
