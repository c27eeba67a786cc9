"""The command `traceml-ray report`: a session as text, as data, or as a page."""

from __future__ import annotations

import argparse

from traceml_ray import text
from traceml_ray.commands import which
from traceml_ray.files import write_file
from traceml_ray.store import query, session
from traceml_ray.store.schema import legible
from traceml_ray.text import show


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray report`."""
    which.add_session(command, writes=True)
    kind = command.add_mutually_exclusive_group()
    kind.add_argument("--json", action="store_true", help="print the data of summary.json instead of text")
    kind.add_argument("--html", action="store_true", help="write one self-contained HTML page to a file")
    which.add_output(command, "file to write (default: stdout; of --html, report.html of the session)")
    command.add_argument("--run", help="a run's id or name (default: the newest)")


def run(arguments: argparse.Namespace) -> int:
    """Print the report of a session, computed from its file, or write it to a file."""
    from traceml_ray.document.json import as_json
    from traceml_ray.store.summary_shape import plain

    folder, answers = which.stored(arguments)
    output = folder / session.PAGE if arguments.html and arguments.output is None else arguments.output
    with legible(folder), text.progress_bar(f"report of {folder.name}"):
        if arguments.html:
            report: str | bytes = query.ask_one(answers.reply, query.GetReportPage(arguments.run))
        else:
            asked = query.GetSummary(arguments.run, whole=True)
            if arguments.json:
                report = as_json(plain(query.ask_one(answers.reply, asked)))
            else:
                report = answers.report_text(arguments.run)
        if output is not None:
            data = report if isinstance(report, bytes) else report.encode(errors="backslashreplace")
            write_file(output, data)
    show(report if output is None else output, end="" if output is None else "\n")
    return 0
