# PYTHON_ARGCOMPLETE_OK
"""
The command `traceml-ray`: each subcommand is a file in `commands/`.

Its `run` says what it does in its docstring, and returns the exit code: 0 done, 1 failed, 2 bad input, 3 a
finding that was asked for. Neither torch nor Ray is imported unless a subcommand needs it. The standard
streams take whatever a command prints: of any encoding, and also where there is none.
"""

from __future__ import annotations

import argparse
import codecs
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from traceml_ray import __version__
from traceml_ray.commands import (
    analyze,
    bundles,
    compare,
    completion,
    dashboard,
    dump,
    export,
    layers,
    profile,
    report,
    run,
    sessions,
    status,
    stop,
    top,
)
from traceml_ray.commands.help import EXIT_CODES, STARTING, Formatter, examples
from traceml_ray.launchers.arguments import marked
from traceml_ray.settings import SettingError
from traceml_ray.store import query, session
from traceml_ray.store.schema import SessionFileError
from traceml_ray.text import in_ascii, log, one_line

_HANDLER = "traceml_ray.in_ascii"


def set_up_streams() -> None:
    """Write what an encoding lacks as ASCII; let what is written to a closed stream go nowhere."""
    codecs.register_error(_HANDLER, _replaced)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)


def _replaced(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return in_ascii(error.object[error.start : error.end]), error.end


COMMANDS: dict[str, Any] = {
    "run": run,
    "report": report,
    "status": status,
    "top": top,
    "dashboard": dashboard,
    "bundles": bundles,
    "dump": dump,
    "profile": profile,
    "stop": stop,
    "analyze": analyze,
    "compare": compare,
    "sessions": sessions,
    "layers": layers,
    "export": export,
    "completion": completion,
}
"""Modules of `commands/` by the name of their subcommand, in the order of the help."""


class _Parser(argparse.ArgumentParser):
    """Reports what is wrong with the arguments in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {one_line(message)} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return its exit code."""
    set_up_streams()
    parser = _parser()
    completion.complete(parser)
    arguments = parser.parse_args(marked(sys.argv[1:] if argv is None else argv))
    try:
        code: int = arguments.command(arguments)
        sys.stdout.flush()
        return code
    except session.SessionStartingError as error:
        log(error)
        return 1
    except (session.SessionError, SessionFileError, query.QueryError, SettingError) as error:
        log(error)
        return 2
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        named = error.filename is not None and error.filename2 is None
        reason = f"{error.filename}: {error.strerror}" if named else str(error)
        log(reason)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="traceml-ray",
        description="Names the rank, node and stage that makes a distributed training step slow.",
        epilog=f"{STARTING}\n\n{EXIT_CODES}",
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"traceml-ray {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        about = " ".join((command.run.__doc__ or "").split())
        options = commands.add_parser(
            name,
            help=about,
            description=about,
            epilog=examples(name),
            formatter_class=Formatter,
            allow_abbrev=False,  # `--session demo` is no short form of `--sessions`
        )
        command.add_arguments(options)
        options.set_defaults(command=command.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
