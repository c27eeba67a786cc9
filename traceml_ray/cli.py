# PYTHON_ARGCOMPLETE_OK
"""
The command `traceml-ray`: one function per subcommand, or a file in `commands/`.

Each returns the exit code: 0 done, 1 failed, 2 bad input, 3 a finding that was asked for. Neither torch nor
Ray is imported unless a subcommand needs it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from traceml_ray import __version__, progress, session
from traceml_ray.commands import compare, completion, export, layers, sessions, streams
from traceml_ray.commands.help import EXIT_CODES, Formatter, ending
from traceml_ray.files import write_file
from traceml_ray.launchers.arguments import add_command, marked
from traceml_ray.settings import SettingError, Settings
from traceml_ray.store import query
from traceml_ray.store.schema import SessionFileError, legible
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
    except (session.SessionError, SessionFileError, query.QueryError, SettingError) as error:
        print(f"traceml-ray: {one_line(error)}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        named = error.filename is not None and error.filename2 is None
        reason = f"{error.filename}: {error.strerror}" if named else str(error)
        print(f"traceml-ray: {one_line(reason)}", file=sys.stderr)
        return 1


def run(arguments: argparse.Namespace) -> int:
    """Run any command, as `traceml-ray run -- accelerate launch train.py`, and watch the ranks it starts."""
    from traceml_ray.launchers import command

    return command.run(arguments)


def report(arguments: argparse.Namespace) -> int:
    """Print the report of a session, built anew from its file."""
    from traceml_ray.reports.text import render

    if arguments.html is not None:
        return _report_page(arguments)
    folder, send = _stored(arguments)
    with legible(folder), progress.shown(f"report of {folder.name}"):
        summary: Any = query.ask_one(send, query.Summary(arguments.run, whole=True))
        text = json.dumps(summary, indent=2) + "\n" if arguments.json else render(summary, folder)
    print(text, end="")
    return 0


def _report_page(arguments: argparse.Namespace) -> int:
    """Write `report.html`, into the session's folder unless a path was given."""
    page = Path(arguments.html)
    if arguments.html and page.suffix.lower() not in (".html", ".htm"):
        if arguments.session is not None:
            wrong = f"--html {page}: the name of the page has to end in .html"
            print(f"traceml-ray: {one_line(wrong)}", file=sys.stderr)
            return 2
        arguments.session, arguments.html = arguments.html, ""  # `report --html SESSION`
    folder, send = _stored(arguments)
    page = page if arguments.html else folder / session.PAGE
    with legible(folder), progress.shown(f"page of {folder.name}"):
        write_file(page, query.ask_one(send, query.ReportPage(arguments.run)))
    print(page)
    return 0


def _stored(arguments: argparse.Namespace) -> tuple[Path, Callable[[bytes], bytes]]:
    """Return the folder of the session that is meant, and what answers questions about it from its file."""
    from traceml_ray.reports.answers import Answers

    settings = Settings.load(out=arguments.out)
    folder = session.find(arguments.session, settings.out)
    return folder, Answers(folder, settings.thresholds).reply


def _live(arguments: argparse.Namespace) -> Path:
    """Return the folder of the live session that is meant; its monitor may be starting."""
    return session.find(arguments.session, Settings.load(out=arguments.out).out, starting=True)


def status(arguments: argparse.Namespace) -> int:
    """Print the state of a session."""
    from traceml_ray.reports.status import render_start, render_status

    folder = _live(arguments)
    if not (folder / session.DATABASE).exists() and (live := session.live_state(folder)) is not None:
        print(render_start(folder, live), end="")
        return 0
    folder, send = _stored(arguments)
    with progress.shown(f"status of {folder.name}"):
        shown = render_status(send, folder, session.holder(folder), time.time_ns())
    print(shown, end="")
    return 0


def analyze(arguments: argparse.Namespace) -> int:
    """Say whose memory grew first, and what is left, from files: sessions, bundles, exports of Stormlog."""
    from traceml_ray.rank_filter import RankFilterError
    from traceml_ray.reports import analyze as over_files
    from traceml_ray.reports.analyze_text import render_analysis

    try:
        with progress.shown("analyze"):
            found = over_files.analyze(
                arguments.paths, ranks=arguments.ranks, sensitivity=arguments.sensitivity
            )
    except RankFilterError as error:
        print(f"traceml-ray: {one_line(error)}", file=sys.stderr)
        return 2
    except over_files.AnalyzeError as error:
        _say_refused(error.refused or [error])
        return 2
    _say_refused(found.refused)
    print(over_files.to_json(found) if arguments.json else render_analysis(found), end="")
    if arguments.fail_on is not None and over_files.reaches(found, arguments.fail_on):
        return 3
    return 2 if found.refused else 0


def _say_refused(refused: Sequence[Any]) -> None:
    """Say on stderr which files are not used, in one line each."""
    for each in refused:
        print(f"traceml-ray: {one_line(each)}", file=sys.stderr)


def bundles(arguments: argparse.Namespace) -> int:
    """List what was kept of a session's incidents: the last minutes of every rank."""
    from traceml_ray.reports.manifest import render_bundles

    folder, send = _stored(arguments)
    print(render_bundles(query.ask_one(send, query.Bundles()), folder), end="")
    return 0


def dump(arguments: argparse.Namespace) -> int:
    """Keep the last minutes of every rank of a live session, with the stacks of all ranks, as a bundle."""
    import traceml_ray.launchers.control as control

    folder = _live(arguments)
    try:
        print(control.dump(folder))
    except control.ControlError as error:
        print(f"traceml-ray: {one_line(error)}", file=sys.stderr)
        return 1
    return 0


def profile(arguments: argparse.Namespace) -> int:
    """
    Profile some steps of a live session with torch's profiler: all named ranks, the same steps; or show what
    was profiled.
    """
    from traceml_ray.launchers import profile_command

    return profile_command.run(lambda: _live(arguments), arguments)


def stop(arguments: argparse.Namespace) -> int:
    """End the relay and aggregator of a live session."""
    import traceml_ray.launchers.control as control

    folder = _live(arguments)
    try:
        control.stop(folder)
    except control.ControlError as error:
        print(f"traceml-ray: {one_line(error)}", file=sys.stderr)
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
        print(f"traceml-ray: {missing}", file=sys.stderr)
        return 1
    token = os.environ.pop("TRACEML_DASHBOARD_TOKEN", None) or None
    if arguments.token is None:
        arguments.token = token
    try:
        return run.run(arguments)
    except SourceError as error:
        print(f"traceml-ray: {one_line(error)}", file=sys.stderr)
        return 1


def top(arguments: argparse.Namespace) -> int:
    """Watch a session, live or stored, in the terminal; line by line where stdout is none."""
    from traceml_ray.terminal import top as terminal

    return terminal.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="traceml-ray",
        description="Names the rank, node and stage that makes a distributed training step slow.",
        epilog=EXIT_CODES,
        formatter_class=Formatter,
    )
    parser.add_argument("--version", action="version", version=f"traceml-ray {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_command(_command(commands, "run", run, usage="%(prog)s [options] -- COMMAND …").add_argument)
    for subcommand in (report, status, top, dashboard, bundles, dump, profile, stop):
        command = _command(commands, subcommand.__name__, subcommand)
        _session(command)
        if subcommand is report:
            command.add_argument("--json", action="store_true", help="print summary.json instead of text")
            command.add_argument(
                "--html",
                nargs="?",
                const="",
                metavar="PATH",
                help="write it as one page that needs nothing else (default: report.html of the session)",
            )
        if subcommand in (report, top, dashboard):
            command.add_argument("--run", help="id or name of one run of the session (default: the newest)")
        if subcommand in (top, dashboard):
            _attaching(command)
        if subcommand is top:
            command.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="s (default: 1)")
            waits = "how long to wait for a session to begin, s (default: 30)"
            command.add_argument("--wait", type=_patience, default=30.0, metavar="S", help=waits)
        if subcommand is dashboard:
            _serving(command)
        if subcommand is profile:
            from traceml_ray.launchers.profile_command import add_arguments

            add_arguments(command)
    _analyzing(_command(commands, "analyze", analyze))
    _add_more(commands)
    return parser


def _add_more(commands: Any) -> None:
    """Add the subcommands that have a file of their own."""
    about = "Say whether session B is better or worse than A, by how much, and which stage and ranks moved."
    command = _command(commands, "compare", compare.run, about)
    compare.add_arguments(command)
    _folder(command)
    command = _command(
        commands, "sessions", sessions.run, "List the sessions of a folder, or remove old ones."
    )
    sessions.add_arguments(command)
    _folder(command)
    about = "Say where the time of a step goes inside the model, layer by layer, and on which rank."
    command = _command(commands, "layers", layers.run, about)
    _session(command)
    layers.add_arguments(command)
    about = "Write a session as parquet or CSV, or as one trace for Perfetto."
    command = _command(commands, "export", export.run, about)
    _session(command)
    export.add_arguments(command)
    about = "Print what makes a shell complete subcommands, options and sessions."
    completion.add_arguments(_command(commands, "completion", completion.run, about))


def _command(
    commands: Any, name: str, call: Callable[[argparse.Namespace], int], about: str = "", **given: Any
) -> argparse.ArgumentParser:
    """Return the parser of a subcommand; what it does is what `call` says of itself, or `about`."""
    about = about or " ".join((call.__doc__ or "").split())
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=about, epilog=ending(name), formatter_class=Formatter, **given
    )
    command.set_defaults(command=call)
    return command


def _session(command: argparse.ArgumentParser) -> None:
    """Add the arguments that say which session is meant."""
    named: Any = command.add_argument(
        "session",
        nargs="?",
        metavar="SESSION",
        help="name, session folder or session.sqlite (default: the newest under --out)",
    )
    named.completer = completion.names_of_sessions
    _folder(command)


def _folder(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--out", metavar="DIR", help="folder of sessions (default: TRACEML_OUT, else traceml-sessions)"
    )


def _analyzing(command: argparse.ArgumentParser) -> None:
    command.add_argument("paths", nargs="+", metavar="PATH", help="file or folder; rank files may be apart")
    command.add_argument(
        "--ranks",
        default="all",
        metavar="0,4-7",
        help="what it is about (default: all); others are not looked at",
    )
    command.add_argument("--json", action="store_true", help="print data instead of text")
    command.add_argument(
        "--sensitivity",
        choices=("low", "medium", "high"),
        default="medium",
        help="how weak evidence may be that hidden memory is a collective's (default: medium)",
    )
    command.add_argument(
        "--fail-on",
        choices=("warning", "critical"),
        help="exit with 3 where a finding is that severe, or more",
    )


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


def _seconds(text: str, least: float = 0.2, most: float = 3600.0) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not least <= seconds <= most:
        raise argparse.ArgumentTypeError(f"{text} is no time: {least:g} to {most:g} seconds")
    return seconds


def _patience(text: str) -> float:
    return _seconds(text, 0.0, 86_400.0)


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text} is not a port")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
