"""Which session a command is about: the arguments that name it, and the function that resolves them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from traceml_ray.commands.completion import names_of_sessions
from traceml_ray.settings import Settings
from traceml_ray.store.session import NoSessionError, SessionStartingError, await_session
from traceml_ray.text import log

if TYPE_CHECKING:
    from traceml_ray.reports.answers import Answers

NAMED = "name, session folder or session.sqlite"
DEFAULT = "default: the running session, else the newest in --sessions"
_WAIT_S = 60.0
_WAITS = (
    f"seconds to wait for a session that is starting (default: {_WAIT_S:g}); if given, also for one that "
    "does not exist yet"
)


def add_session(
    command: argparse.ArgumentParser, *, writes: bool = False, waits: str | None = _WAITS
) -> None:
    """
    Add the arguments that name a session.

    Args:
        command: its parser.
        writes: it has `-o/--output`, too.
        waits: what `--wait` does; None: the command does not wait.
    """
    named: Any = command.add_argument("session", nargs="?", metavar="SESSION", help=f"{NAMED} ({DEFAULT})")
    named.completer = names_of_sessions
    add_folder(command, writes=writes)
    if waits is not None:
        add_wait(command, waits)


def add_folder(command: argparse.ArgumentParser, *, writes: bool = False) -> None:
    """
    Add `--sessions`. `--out` is another name for it, except where the command `writes` a file: there it
    could be taken for `--output`, so it is refused.
    """
    about = "folder of sessions (default: TRACEML_OUT, else traceml-sessions)"
    names = ["--sessions"] if writes else ["--sessions", "--out"]
    command.add_argument(*names, dest="out", metavar="DIR", help=about)
    if writes:
        command.add_argument("--out", action=_Ambiguous, help=argparse.SUPPRESS)


def add_wait(command: argparse.ArgumentParser, about: str = _WAITS) -> None:
    """Add `--wait`."""
    command.add_argument("--wait", type=_patience, metavar="S", help=about)


def add_run(command: argparse.ArgumentParser) -> None:
    """Add `--run` and `--ray-address`: for commands that follow a session until they are ended."""
    command.add_argument("--run", help="a run's id or name (default: the newest)")
    command.add_argument(
        "--ray-address", metavar="HOST:PORT", help="Ray cluster of a running session (default: RAY_ADDRESS)"
    )


def add_output(command: argparse.ArgumentParser, about: str) -> None:
    """Add `-o/--output PATH`."""
    command.add_argument("-o", "--output", type=Path, metavar="PATH", help=about)


class _Ambiguous(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parser.error("--out: the folder of sessions is --sessions DIR, the file to write -o PATH")


def folder_of(arguments: argparse.Namespace) -> Path:
    """
    Return the folder of the session that the arguments name; waits for one that is starting, and with
    `--wait` also for one that is not there yet. Raises SessionError, SettingError.
    """
    return wait_for_folder(arguments.session, arguments)


def wait_for_folder(session: str | None, arguments: argparse.Namespace) -> Path:
    """Return the folder of that session, see `folder_of`; the arguments say where, and how long to wait."""
    waits_for = (SessionStartingError,) if arguments.wait is None else (SessionStartingError, NoSessionError)
    wait_s = _WAIT_S if arguments.wait is None else arguments.wait
    return await_session(session, Settings.load(out=arguments.out).out, wait_s, waits_for, log)


def stored(arguments: argparse.Namespace) -> tuple[Path, Answers]:
    """Return the folder of the named session, and what answers questions from its file. Raises as above."""
    from traceml_ray.reports.answers import Answers

    folder = folder_of(arguments)
    return folder, Answers(folder, Settings.load(out=arguments.out).thresholds)


def seconds(given: str, least: float, most: float) -> float:
    """Return a time in s. Raises ArgumentTypeError."""
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{given} is not a time: {least:g} to {most:g} seconds")
    return value


def _patience(given: str) -> float:
    return seconds(given, 0.0, 86_400.0)
