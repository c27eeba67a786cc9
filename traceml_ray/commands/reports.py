"""Commands that report: `report` on a session, `compare` on several, `analyze` on the memory in any files."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceml_ray import text
from traceml_ray.commands import which
from traceml_ray.commands.completion import names_of_sessions
from traceml_ray.files import write_file
from traceml_ray.settings import Settings
from traceml_ray.store import session
from traceml_ray.text import log, one_line, show

if TYPE_CHECKING:
    from traceml_ray.reports.overlay import RunTable


def report_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray report`."""
    which.add_session(command, writes=True)
    kind = command.add_mutually_exclusive_group()
    kind.add_argument("--json", action="store_true", help="print the data of summary.json instead of text")
    kind.add_argument("--html", action="store_true", help="write one self-contained HTML page to a file")
    which.add_output(command, "file to write (default: stdout; of --html, report.html of the session)")
    command.add_argument("--run", help="a run's id or name (default: the newest)")


def report(arguments: argparse.Namespace) -> int:
    """Print the report of a session, computed from its file, or write it to a file."""
    from traceml_ray.document.json import as_json
    from traceml_ray.store import query
    from traceml_ray.store.schema import legible
    from traceml_ray.store.summary_shape import plain

    folder, answers = which.stored(arguments)
    output = folder / session.PAGE if arguments.html and arguments.output is None else arguments.output
    with legible(folder), text.progress_bar(f"report of {folder.name}"):
        if arguments.html:
            made: str | bytes = query.ask_one(answers.reply, query.GetReportPage(arguments.run))
        else:
            asked = query.GetSummary(arguments.run, whole=True)
            if arguments.json:
                made = as_json(plain(query.ask_one(answers.reply, asked)))
            else:
                made = answers.report_text(arguments.run)
        if output is not None:
            data = made if isinstance(made, bytes) else made.encode(errors="backslashreplace")
            write_file(output, data)
    show(made if output is None else output, end="" if output is None else "\n")
    return 0


def compare_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray compare`."""
    about = (
        f"{which.NAMED} of each: A, which others are compared with, and at most seven others "
        f"(without any: {which.DEFAULT})"
    )
    sessions: Any = command.add_argument("sessions", nargs="+", metavar="SESSION", help=about)
    sessions.completer = names_of_sessions
    which.add_folder(command)
    which.add_wait(command)
    for letter in "abcdefgh":
        shown = f"run of {letter.upper()} (default: the newest)"
        also = "; the same for --run-c to --run-h" if letter == "b" else ""
        about = shown + also if letter in "ab" else argparse.SUPPRESS
        command.add_argument(f"--run-{letter}", metavar="RUN", help=about)
    kind = command.add_mutually_exclusive_group()
    kind.add_argument("--json", action="store_true", help="print data instead of text")
    kind.add_argument(
        "--html", type=Path, metavar="FILE", help="write one self-contained page with charts of all sessions"
    )
    command.add_argument(
        "--fail-on-regression",
        type=_percent,
        metavar="5%",
        help="exit with 3 if a step is slower than A's by at least this share, with 1 if undecidable",
    )


def _percent(given: str) -> float:
    """Return "5%" or "5" as 5.0. Raises ArgumentTypeError."""
    try:
        value = float(given.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 < value <= 1000:
        raise argparse.ArgumentTypeError(f"{one_line(given)} is not a percentage above 0, such as 5%")
    return value


def compare(arguments: argparse.Namespace) -> int:
    """
    Show whether session B is faster or slower than A, by how much, in which stage and on which ranks; of up
    to eight sessions a table, and with --html their lines in common charts.
    """
    from traceml_ray.reports import comparison as two_sessions
    from traceml_ray.reports import overlay

    gate = arguments.fail_on_regression
    names = arguments.sessions if len(arguments.sessions) > 1 else [*arguments.sessions, None]
    overlay.refuse_too_many(len(names))
    folders = [which.wait_for_folder(name, arguments) for name in names]
    chosen = [getattr(arguments, f"run_{letter}") for letter in overlay.NAMES.lower()][: len(folders)]
    with text.progress_bar("compare"):
        asked = folders, chosen, Settings.load(out=arguments.out)
        runs = [] if arguments.html is None else overlay.stored_runs(overlay.ask_run, *asked)
        sides = [run.known for run in runs] or overlay.stored_runs(two_sessions.ask_side, *asked)
        limits = two_sessions.limits_of(None if gate is None else min(gate, two_sessions.DEFAULT_PCT))
        table = overlay.table_of(sides, limits)
    two = table.comparisons[0] if len(sides) == 2 else None
    if arguments.html is not None:
        write_file(arguments.html, overlay.as_page(runs, table))
        show(arguments.html)
    elif arguments.json:
        show(two_sessions.to_json(two) if two else overlay.to_json(table), end="")
    else:
        show(two_sessions.render_comparison(two) if two else overlay.render(table), end="")
    return 0 if gate is None else _gate(table, gate)


def _gate(table: RunTable, percent: float) -> int:
    """
    Return the exit code of a comparison in which no session may be slower than the first by `percent` of a
    step.
    """
    from traceml_ray.reports import overlay

    worse = overlay.any_worse(table, percent)
    if worse is None:
        for comparison in table.comparisons:
            if comparison.word is None:
                log(comparison.headline)
        return 1
    return 3 if worse else 0


def analyze_options(command: argparse.ArgumentParser) -> None:
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


def analyze(arguments: argparse.Namespace) -> int:
    """Show which rank's memory grew first, and how much is left, from sessions, bundles, Stormlog exports."""
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
    """Return the folders of the named sessions, the other paths, and why a name has neither."""
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
    """
    Return whether nothing exists at `path`. If `path` cannot be examined, its reader refuses it with the
    reason.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        pass
    return False


def _print_refused(refused: Sequence[Any]) -> None:
    """Print on stderr, in one line each, which files are not used."""
    for refused_file in refused:
        log(refused_file)
