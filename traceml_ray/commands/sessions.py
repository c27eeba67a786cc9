"""Commands about stored sessions: `sessions` lists and removes them, `bundles` and `export` read one."""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from traceml_ray import text
from traceml_ray.commands import which
from traceml_ray.settings import Settings
from traceml_ray.store import session
from traceml_ray.text import log, one_line, show

if TYPE_CHECKING:
    from traceml_ray.reports.listing import Listed

FORMATS = ("parquet", "csv", "perfetto")
_SECONDS = {"min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_AGE = re.compile(r"(\d{1,6})\s*(min|h|d|w)", re.ASCII)


def sessions_options(command: argparse.ArgumentParser) -> None:
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
        type=_age,
        metavar="30d",
        help="remove sessions that ended longer ago than this (min, h, d, w)",
    )
    prune.add_argument(
        "--keep", type=_number, metavar="20", help="keep this many of the newest sessions, whatever their age"
    )
    prune.add_argument("--yes", action="store_true", help="remove them instead of listing them")


def _age(given: str) -> float:
    """Return "30d" in seconds. Raises ArgumentTypeError."""
    match = _AGE.fullmatch(given.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{one_line(given)} is not an age such as 45min, 12h, 30d or 4w")
    return float(int(match[1]) * _SECONDS[match[2]])


def _number(given: str) -> int:
    """Return "20" as 20. Raises ArgumentTypeError."""
    if not (given.isdecimal() and len(given) < 10):
        raise argparse.ArgumentTypeError(f"{one_line(given)} is not a number of sessions")
    return int(given)


def sessions(arguments: argparse.Namespace) -> int:
    """List the sessions of a folder, or remove old ones."""
    from traceml_ray.reports.listing import listed, render_sessions, to_json, total

    limits = arguments.older_than, arguments.keep
    if not arguments.prune and (arguments.yes or limits != (None, None)):
        return _refused("--older-than, --keep and --yes need --prune")
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


def bundles_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray bundles`."""
    which.add_session(command)


def bundles(arguments: argparse.Namespace) -> int:
    """List the bundles of a session: the last minutes of every rank before a death or hang."""
    from traceml_ray.reports.manifest import render_bundles
    from traceml_ray.store import query

    folder, answers = which.stored(arguments)
    show(render_bundles(query.ask_one(answers.reply, query.GetBundles()), folder), end="")
    return 0


def export_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray export`."""
    which.add_session(command, writes=True)
    command.add_argument(
        "--format",
        choices=FORMATS,
        required=True,
        help="parquet (needs pyarrow) or csv: a folder with one file per table; perfetto: one trace with "
        "a track for each rank and stage, on one clock",
    )
    which.add_output(command, "folder or trace to write (default: SESSION-FORMAT here)")
    command.add_argument(
        "--ranks", default="all", metavar="0,4-7", help="ranks whose steps are written (default: all)"
    )
    command.add_argument(
        "--steps", type=_steps, default=(0, 1 << 62), metavar="100-200", help="steps to write (default: all)"
    )
    command.add_argument(
        "--run", help="a run's id or name, for the trace and the findings (default: the newest)"
    )


def _steps(given: str) -> tuple[int, int]:
    """Return "100-200" as both ends. Raises ArgumentTypeError."""
    first, dash, last = given.partition("-")
    ends = first, last if dash else first
    if not all(end.isdecimal() and len(end) < 16 for end in ends) or int(ends[0]) > int(ends[1]):
        raise argparse.ArgumentTypeError(f"{one_line(given)} is not a range of steps such as 100-200")
    return int(ends[0]), int(ends[1])


def export(arguments: argparse.Namespace) -> int:
    """Write a session as parquet or CSV tables, or as one trace for Perfetto."""
    from traceml_ray.exports import files
    from traceml_ray.exports.tables import Chosen
    from traceml_ray.identity import RankFilterError, rank_filter

    folder = which.folder_of(arguments)
    kind, name = arguments.format, folder.absolute().name
    out = arguments.output or Path(f"{name}{files.TRACE_SUFFIX}" if kind == "perfetto" else f"{name}-{kind}")
    try:
        limits = Settings.load(out=arguments.out).thresholds
        first, last = arguments.steps
        chosen = Chosen(rank_filter(arguments.ranks), first, last, limits)
        with text.progress_bar(f"export of {name}"):
            written = files.export(folder, kind, out, chosen, arguments.run)
    except RankFilterError as error:
        log(error)
        return 2
    except files.ExportError as error:
        log(error)
        return 1
    size = text.size(sum(path.stat().st_size for path in written))
    what = "open it at https://ui.perfetto.dev" if kind == "perfetto" else text.count(len(written), "file")
    show(f"{out}: {size}, {what}")
    return 0
