"""The command `traceml-ray analyze`: whose memory grew first, from files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from traceml_ray import text
from traceml_ray.commands import which
from traceml_ray.commands.completion import names_of_sessions
from traceml_ray.settings import Settings
from traceml_ray.store import session
from traceml_ray.text import log, show


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray analyze`."""
    paths: Any = command.add_argument(
        "paths",
        nargs="+",
        metavar="SESSION|PATH",
        help="name of a session, file or folder; each rank may have its own file",
    )
    paths.completer = names_of_sessions
    which.add_folder(command)
    command.add_argument(
        "--ranks",
        default="all",
        metavar="0,4-7",
        help="ranks to analyze, also as peers (default: all)",
    )
    command.add_argument("--json", action="store_true", help="print data instead of text")
    command.add_argument(
        "--sensitivity",
        choices=("low", "medium", "high"),
        default="medium",
        help="evidence needed to attribute hidden memory to a collective: high needs least (default: medium)",
    )
    command.add_argument(
        "--fail-on",
        choices=("warning", "critical"),
        help="exit with 3 if a finding has at least this severity",
    )


def run(arguments: argparse.Namespace) -> int:
    """Show which rank's memory grew first, and what is left: of sessions, bundles, Stormlog exports."""
    from traceml_ray.identity import RankFilterError
    from traceml_ray.reports import analyze as over_files
    from traceml_ray.reports.analyze import render_analysis

    paths, unknown = _resolved(arguments.paths, Settings.load(out=arguments.out).out)
    _print_refused(unknown)
    if not paths:
        return 2
    try:
        with text.progress_bar("analyze"):
            analysis = over_files.analyze(paths, ranks=arguments.ranks, sensitivity=arguments.sensitivity)
    except RankFilterError as error:
        log(error)
        return 2
    except over_files.AnalyzeError as error:
        _print_refused(error.refused or [error])
        return 2
    _print_refused(analysis.refused)
    show(over_files.to_json(analysis) if arguments.json else render_analysis(analysis), end="")
    if arguments.fail_on is not None and over_files.reaches(analysis, arguments.fail_on):
        return 3
    return 2 if analysis.refused or unknown else 0


def _resolved(given: Sequence[str], out: str) -> tuple[list[Path], list[str]]:
    """Return the folders of the sessions, and the other paths, that are named; and why a name has none."""
    paths, unknown = list[Path](), list[str]()
    for one in given:
        try:
            paths.append(session.find(one, out))
        except session.SessionStartingError as error:
            unknown.append(str(error))
        except session.SessionError as error:
            if _is_missing(path := Path(one)):
                no_session = "" if os.sep in one else f", and {error}"
                unknown.append(f"{one}: no such file or folder{no_session}")
            else:
                paths.append(path)  # files of ranks, of any recorder
    return paths, unknown


def _is_missing(path: Path) -> bool:
    """Return whether nothing is there. What cannot be looked at is refused by its reader, with the reason."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        pass
    return False


def _print_refused(refused: Sequence[Any]) -> None:
    """Print on stderr which files are not used, in one line each."""
    for refused_file in refused:
        log(refused_file)
