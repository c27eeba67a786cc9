# PYTHON_ARGCOMPLETE_OK
"""
The command `traceml-ray`. Its subcommands are in `commands/`, one file for each subject.

Exit codes: 0: done, 1: failed, 2: bad input, 3: a finding that was asked for. Torch, Ray and numpy are
imported only if a subcommand needs them. The standard streams accept any output, in any encoding, and also if
a stream is missing.
"""

from __future__ import annotations

import argparse
import codecs
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from traceml_ray import __version__
from traceml_ray.commands import (
    alerts,
    check,
    collectives,
    completion,
    mcp,
    profiles,
    reports,
    running,
    sessions,
)
from traceml_ray.commands.help import EXIT_CODES, STARTING, Formatter, examples
from traceml_ray.launchers.arguments import marked
from traceml_ray.settings import SettingError
from traceml_ray.store import session
from traceml_ray.text import in_ascii, log, one_line

_HANDLER = "traceml_ray.in_ascii"


def set_up_streams() -> None:
    """
    Make the standard streams accept any output: characters that the encoding lacks are written as ASCII, and
    output to a closed stream is discarded.
    """
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


class Subcommand(NamedTuple):
    """A subcommand of `traceml-ray`."""

    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Function that runs the subcommand and returns the exit code. Its docstring is the help."""


COMMANDS = {
    "run": Subcommand(running.run_options, running.run),
    "report": Subcommand(reports.report_options, reports.report),
    "status": Subcommand(running.status_options, running.status),
    "top": Subcommand(running.top_options, running.top),
    "dashboard": Subcommand(running.dashboard_options, running.dashboard),
    "bundles": Subcommand(sessions.bundles_options, sessions.bundles),
    "dump": Subcommand(running.dump_options, running.dump),
    "profile": Subcommand(profiles.profile_options, profiles.profile),
    "stop": Subcommand(running.stop_options, running.stop),
    "analyze": Subcommand(reports.analyze_options, reports.analyze),
    "collectives": Subcommand(collectives.collectives_options, collectives.collectives),
    "check": Subcommand(check.check_options, check.check),
    "compare": Subcommand(reports.compare_options, reports.compare),
    "sessions": Subcommand(sessions.sessions_options, sessions.sessions),
    "layers": Subcommand(profiles.layers_options, profiles.layers),
    "export": Subcommand(sessions.export_options, sessions.export),
    "alerts": Subcommand(alerts.alerts_options, alerts.alerts),
    "mcp": Subcommand(mcp.mcp_options, mcp.mcp),
    "completion": Subcommand(completion.completion_options, completion.completion),
}
"""By name, in the order of the help."""


def _bad_input() -> tuple[type[Exception], ...]:
    """Return the exceptions that mean bad input. Imports numpy, so call it only after an error."""
    from traceml_ray.store.query import QueryError
    from traceml_ray.store.schema import SessionFileError

    return session.SessionError, SessionFileError, QueryError, SettingError


class _Parser(argparse.ArgumentParser):
    """Argument parser that reports an error in one line."""

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
    except _bad_input() as error:
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
        command.add_options(options)
        options.set_defaults(command=command.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
