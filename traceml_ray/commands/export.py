"""The command `traceml-ray export`: a session as parquet, CSV, or one trace for Perfetto."""

from __future__ import annotations

import argparse
from pathlib import Path

from traceml_ray import text
from traceml_ray.commands import which
from traceml_ray.settings import Settings
from traceml_ray.text import log, one_line, show

FORMATS = ("parquet", "csv", "perfetto")


def add_arguments(command: argparse.ArgumentParser) -> None:
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
        "--steps", type=steps, default=(0, 1 << 62), metavar="100-200", help="steps to write (default: all)"
    )
    command.add_argument(
        "--run", help="a run's id or name, for the trace and the findings (default: the newest)"
    )


def steps(given: str) -> tuple[int, int]:
    """Return "100-200" as both ends. Raises ArgumentTypeError."""
    first, dash, last = given.partition("-")
    ends = first, last if dash else first
    if not all(end.isdecimal() and len(end) < 16 for end in ends) or int(ends[0]) > int(ends[1]):
        raise argparse.ArgumentTypeError(f"{one_line(given)} is no range of steps, as 100-200")
    return int(ends[0]), int(ends[1])


def run(arguments: argparse.Namespace) -> int:
    """Write a session as parquet or CSV tables, or as one trace for Perfetto."""
    from traceml_ray.exports.files import TRACE_SUFFIX, ExportError, export
    from traceml_ray.exports.tables import Chosen
    from traceml_ray.identity import RankFilterError, rank_filter

    folder = which.folder_of(arguments)
    kind, name = arguments.format, folder.absolute().name
    out = arguments.output or Path(f"{name}{TRACE_SUFFIX}" if kind == "perfetto" else f"{name}-{kind}")
    try:
        limits = Settings.load(out=arguments.out).thresholds
        first, last = arguments.steps
        chosen = Chosen(rank_filter(arguments.ranks), first, last, limits)
        with text.progress_bar(f"export of {name}"):
            files = export(folder, kind, out, chosen, arguments.run)
    except RankFilterError as error:
        log(error)
        return 2
    except ExportError as error:
        log(error)
        return 1
    size = text.size(sum(path.stat().st_size for path in files))
    what = "open it at https://ui.perfetto.dev" if kind == "perfetto" else text.count(len(files), "file")
    show(f"{out}: {size}, {what}")
    return 0
