"""The collectives that ranks have reported, from a session file or a bundle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from traceml_ray.analysis.hang import hangs
from traceml_ray.signals.collectives.calls import CallTable, RankCollectives
from traceml_ray.signals.collectives.examined import Examined, examine
from traceml_ray.signals.collectives.records import AT_END, LAST_CALLS
from traceml_ray.signals.collectives.reported import collectives_of
from traceml_ray.store.session_file import SessionFile


def examine_session(path: Path, *, hang: bool | None) -> Examined | None:
    """
    Return what the ranks of the newest run have reported about their collectives. None: they have reported
    nothing.

    Args:
        path: the session file, also of a bundle.
        hang: whether the run hung. None: if the session has a verdict that says so.

    Raises `SessionFileError` if the file cannot be read.
    """
    table = CallTable()
    with SessionFile(path) as file:
        for rank in _reported(file):
            table.add(rank)
        if hang is None and any(verdict.label == "hang" for verdict in hangs(file.verdicts()[0])):
            hang = True
    return examine(table, hang=hang) if table.ranks else None


def _reported(file: SessionFile) -> Iterator[RankCollectives]:
    """Yield the newest report of each rank, and the ranks that had ended by then."""
    processes = file.ranks()
    reports = {
        process: newest[-1]
        for process, newest in file.records_of(LAST_CALLS, {one.id for one in processes.values()}).items()
    }
    if not reports:
        return
    reported_ns = max(report.t_ns for report in reports.values())
    for rank, process in processes.items():
        report = reports.get(process.id)
        ended = process.ended and process.last_seen_ns <= reported_ns
        if report is not None or ended:
            failed = report is not None and report.asked == AT_END
            ending = "an exception" if failed else ""
            ending = ending if process.exit_code is None else f"exit code {process.exit_code}"
            ending = ending if ended or failed else ""
            yield replace(collectives_of(report, rank, ended=ended), ending=ending)
