# PYTHON_ARGCOMPLETE_OK
"""
The command `traceml-ray`: one function per subcommand, or a file in `commands/`.

Each returns the exit code: 0 done, 1 failed, 2 bad input, 3 a finding that was asked for. Neither torch nor
Ray is imported unless a subcommand needs it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from traceml_ray import __version__
from traceml_ray.commands import (
    analyze,
    compare,
    completion,
    export,
    layers,
    report,
    sessions,
    status,
    streams,
    which,
)
from traceml_ray.commands.help import EXIT_CODES, STARTING, Formatter, examples
from traceml_ray.launchers.arguments import add_command, marked
from traceml_ray.printing import say, show
from traceml_ray.settings import SettingError
from traceml_ray.store import query, session
from traceml_ray.store.schema import SessionFileError
from traceml_ray.text import one_line


class _Parser(argparse.ArgumentParser):
    """Reports what is wrong with the arguments in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {one_line(message)} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return its exit code."""
    streams.set_up()
    parser = _parser()
    completion.complete(parser)
    arguments = parser.parse_args(marked(sys.argv[1:] if argv is None else argv))
    try:
        code: int = arguments.command(arguments)
        sys.stdout.flush()
        return code
    except session.SessionStartingError as error:
        say(error)
        return 1
    except (session.SessionError, SessionFileError, query.QueryError, SettingError) as error:
        say(error)
        return 2
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        named = error.filename is not None and error.filename2 is None
        reason = f"{error.filename}: {error.strerror}" if named else str(error)
        say(reason)
        return 1


def run(arguments: argparse.Namespace) -> int:
    """
    Run any command, as `traceml-ray run -- accelerate launch train.py`, and watch the ranks it starts. In
    place of torchrun: `python -m traceml_ray.launch`.
    """
    from traceml_ray.launchers import command

    return command.run(arguments)


def bundles(arguments: argparse.Namespace) -> int:
    """List what was kept of a session's incidents: the last minutes of every rank."""
    from traceml_ray.reports.manifest import render_bundles

    folder, answers = which.stored(arguments)
    show(render_bundles(query.ask_one(answers.reply, query.Bundles()), folder), end="")
    return 0


def dump(arguments: argparse.Namespace) -> int:
    """Keep the last minutes of every rank of a live session, with the stacks of all ranks, as a bundle."""
    import traceml_ray.launchers.control as control

    folder = which.folder_of(arguments)
    try:
        show(control.dump(folder))
    except control.ControlError as error:
        say(error)
        return 1
    return 0


def profile(arguments: argparse.Namespace) -> int:
    """
    Profile some steps of a live session with torch's profiler: all named ranks, the same steps; or show what
    was profiled.
    """
    from traceml_ray.launchers import profile_command

    return profile_command.run(lambda: which.folder_of(arguments), arguments)


def stop(arguments: argparse.Namespace) -> int:
    """End the relay and aggregator of a live session."""
    import traceml_ray.launchers.control as control

    folder = which.folder_of(arguments)
    try:
        control.stop(folder)
    except control.ControlError as error:
        say(error)
        return 1
    return 0


def dashboard(arguments: argparse.Namespace) -> int:
    """Serve the web app of a session, live or stored, until it is ended."""
    if arguments.child:
        os.nice(5)  # training comes first
    try:
        from traceml_ray.dash_app import run
        from traceml_ray.views.source import SourceError
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("traceml_ray"):
            raise
        missing = f"the dashboard needs {error.name}: pip install 'traceml-ray[dash]'"
        say(missing)
        return 1
    token = os.environ.pop("TRACEML_DASHBOARD_TOKEN", None) or None
    if arguments.token is None:
        arguments.token = token
    try:
        return run.run(arguments)
    except SourceError as error:
        say(error)
        return 1


def top(arguments: argparse.Namespace) -> int:
    """Watch a session, live or stored, in the terminal; line by line where stdout is none."""
    from traceml_ray.terminal import top as terminal

    return terminal.run(arguments)


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
    add_command(_command(commands, "run", run, usage="%(prog)s [options] -- COMMAND …").add_argument)
    report.add_arguments(_command(commands, "report", report.run))
    status.add_arguments(_command(commands, "status", status.run))
    _watching(commands)
    for subcommand in (bundles, dump, profile, stop):
        command = _command(commands, subcommand.__name__, subcommand)
        which.add_session(command)
        if subcommand is profile:
            from traceml_ray.launchers.profile_command import add_arguments

            add_arguments(command)
    analyze.add_arguments(_command(commands, "analyze", analyze.run))
    _add_more(commands)
    return parser


def _watching(commands: Any) -> None:
    """Add the subcommands that follow a session until they are ended."""
    for subcommand in (top, dashboard):
        command = _command(commands, subcommand.__name__, subcommand)
        waits = "how long to wait for a session to begin, s (default: 30)" if subcommand is top else None
        which.add_session(command, waits=waits)  # the web app has a page that waits
        command.add_argument("--run", help="id or name of one run of the session (default: the newest)")
        _attaching(command)
        if subcommand is top:
            command.add_argument("--once", action="store_true", help="print the overview once, and end")
            command.add_argument(
                "--interval", type=_interval, default=1.0, metavar="S", help="s (default: 1)"
            )
        else:
            _serving(command)


def _add_more(commands: Any) -> None:
    """Add the subcommands that have a file of their own."""
    about = "Say whether session B is better or worse than A, by how much, and which stage and ranks moved."
    compare.add_arguments(_command(commands, "compare", compare.run, about))
    about = "List the sessions of a folder, or remove old ones."
    sessions.add_arguments(_command(commands, "sessions", sessions.run, about))
    about = "Say where the time of a step goes inside the model, layer by layer, and on which rank."
    layers.add_arguments(_command(commands, "layers", layers.run, about))
    about = "Write a session as parquet or CSV, or as one trace for Perfetto."
    export.add_arguments(_command(commands, "export", export.run, about))
    about = "Print what makes a shell complete subcommands, options and sessions."
    completion.add_arguments(_command(commands, "completion", completion.run, about))


def _command(
    commands: Any, name: str, call: Callable[[argparse.Namespace], int], about: str = "", **given: Any
) -> argparse.ArgumentParser:
    """Return the parser of a subcommand; what it does is what `call` says of itself, or `about`."""
    about = about or " ".join((call.__doc__ or "").split())
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        description=about,
        epilog=examples(name),
        formatter_class=Formatter,
        allow_abbrev=False,  # `--session demo` is no short form of `--sessions`
        **given,
    )
    command.set_defaults(command=call)
    return command


def _attaching(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--ray-address", metavar="HOST:PORT", help="of the cluster of a live session (default: RAY_ADDRESS)"
    )


def _serving(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1); others need a token"
    )
    command.add_argument("--port", type=_port, help="port to listen on; 0: a free one (default: 8050)")
    command.add_argument(
        "--token",
        help="that browsers have to give, generated where one is needed; better in TRACEML_DASHBOARD_TOKEN: "
        "every user of this machine can read arguments",
    )
    command.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="another host name of the server, as behind a proxy; may be given several times",
    )
    for hidden in ("--linger", "--listening"):  # of a launcher's dashboard: see dash_app/run.py
        command.add_argument(hidden, type=int, default=0, help=argparse.SUPPRESS)
    command.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


def _interval(text: str) -> float:
    return which.seconds(text, 0.2, 3600.0)


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text} is not a port")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
