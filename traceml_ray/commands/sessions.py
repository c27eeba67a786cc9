"""The command `traceml-ray sessions`: lists the sessions of a folder, and removes old ones."""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from traceml_ray import text
from traceml_ray.commands import which
from traceml_ray.store import session
from traceml_ray.text import log, one_line, show

if TYPE_CHECKING:
    from traceml_ray.reports.listing import Listed

_SECONDS = {"min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_AGE = re.compile(r"(\d{1,6})\s*(min|h|d|w)", re.ASCII)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray sessions`."""
    which.add_folder(command)
    command.add_argument("--json", action="store_true", help="print data instead of text")
    prune = command.add_argument_group(
        "removing old sessions", "Shown only, until --yes is given. A session that runs is never removed."
    )
    prune.add_argument(
        "--prune",
        action="store_true",
        help="show which sessions can be removed; needs --older-than or --keep",
    )
    prune.add_argument(
        "--older-than",
        type=age,
        metavar="30d",
        help="remove sessions that ended longer ago than this (min, h, d, w)",
    )
    prune.add_argument(
        "--keep", type=number, metavar="20", help="keep this many of the newest sessions, whatever their age"
    )
    prune.add_argument("--yes", action="store_true", help="remove them instead of listing them")


def age(given: str) -> float:
    """Return "30d" in seconds. Raises ArgumentTypeError."""
    match = _AGE.fullmatch(given.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{one_line(given)} is no age, as 45min, 12h, 30d or 4w")
    return float(int(match[1]) * _SECONDS[match[2]])


def number(given: str) -> int:
    """Return "20" as 20. Raises ArgumentTypeError."""
    if not (given.isdecimal() and len(given) < 10):
        raise argparse.ArgumentTypeError(f"{one_line(given)} is no number of sessions")
    return int(given)


def run(arguments: argparse.Namespace) -> int:
    """List the sessions of a folder, or remove old ones."""
    from traceml_ray.reports.listing import listed, render_sessions, to_json, total
    from traceml_ray.settings import Settings

    limits = arguments.older_than, arguments.keep
    if not arguments.prune and (arguments.yes or limits != (None, None)):
        return _refused("--older-than, --keep and --yes are of --prune")
    if arguments.prune and limits == (None, None):
        return _refused("--prune needs --older-than or --keep (or both)")
    out = Settings.load(out=arguments.out).out
    if session.why_unreadable(Path(out)):
        raise session.no_sessions(Path(out))
    with text.progress_bar("sessions"):
        sessions = listed(out, time.time_ns())
    if arguments.prune:
        return _prune(sessions, arguments, out)
    title = f"{total(sessions)} in {Path(out).absolute()}"
    show(to_json(sessions) if arguments.json else render_sessions(sessions, title), end="")
    return 0


def _prune(sessions: list[Listed], arguments: argparse.Namespace, out: str) -> int:
    from traceml_ray.reports.listing import render_sessions, to_go, to_json, total

    chosen = to_go(sessions, arguments.older_than, arguments.keep)
    what = "Removing" if arguments.yes else "To be removed:"
    stay = total([session for session in sessions if session not in chosen])
    title = f"{what} {total(chosen)}; {stay} stay in {Path(out).absolute()}"
    show(to_json(sessions, chosen) if arguments.json else render_sessions(chosen, title), end="")
    if not arguments.yes:
        if chosen and not arguments.json:
            show("\nNothing was removed; the same with --yes removes them.")
        return 0
    with text.progress_bar("removing sessions") as advance:
        return max([0, *(_remove(one, advance, number / len(chosen)) for number, one in enumerate(chosen))])


def _remove(one: Listed, advance: text.Progress, share: float) -> int:
    """Remove a session; return the exit code."""
    advance(f"removing {one.name}", share)
    try:
        left = session.remove(Path(one.path))
    except (session.SessionError, OSError) as error:
        log(error)
        return 1
    if left:
        names = ", ".join(left[:5])
        log(f"{one.path}: left there, as it is not of the monitor: {names}")
    return 0


def _refused(why: str) -> int:
    log(f"sessions: {why}")
    return 2
