"""The files that a session leaves: `summary.json`, `report.txt` and `report.html`, as bytes and on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.document.json import as_json
from traceml_ray.document.text import blocks_of
from traceml_ray.document.text import page as text_page
from traceml_ray.errors import Errors
from traceml_ray.files import write_files
from traceml_ray.reports import page
from traceml_ray.reports.document import SECTIONS, files, of_summary, read_chart_data, title
from traceml_ray.reports.summary import RunReport, reports
from traceml_ray.store.session import SessionFolder
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.summary_shape import Summary, plain

_ORDER = (
    *("verdict", "operation", "also", "model", "steps", "stages", "spans", "tables", "nodes"),
    *("roles", "ranks", "of ranks", "suspects", "history", "output", "stacks", "events", "runs", "monitor"),
)
"""A terminal shows the end of a long text: what is read of a failure is there."""


def write_reports(
    folder: SessionFolder,
    session: SessionFile,
    thresholds: Thresholds,
    *,
    quick: bool = False,
    put: Callable[[Mapping[Path, bytes]], None] = write_files,
    errors: Errors | None = None,
) -> Summary:
    """
    Write the reports of `session` into `folder`, each completely or not at all. Return the summary.

    For a very long run, reports of the newest steps are written first, so that the job's end does not wait
    too long. With `quick`, and while the run continues, only these are written. `put` writes the files: that
    of a `SessionWriter` writes nothing if another process has the session. A page that cannot be made is
    counted in `errors`; the other files are written before it. Raises whatever `put` raises, such as OSError.
    """
    summary: Summary | None = None
    errors = Errors() if errors is None else errors
    for report in reports(session, thresholds):
        summary = report.summary
        put(
            {
                folder.summary_json: as_json(plain(summary)).encode(),
                folder.report_txt: text_of(summary, folder.path).encode(),
            }
        )
        try:
            put({folder.report_html: page_of(report, folder.path)})
        except Exception as error:
            errors.note("report.html", error)
        if quick:
            break
    assert summary is not None  # there is always a report
    return summary


def text_of(summary: Summary, folder: Path) -> str:
    """Return the text report of `summary`, a result of `summarize`, for the session in `folder`."""
    chart_data = of_summary(summary)
    sections = [section for name in _ORDER for section in SECTIONS[name](chart_data)]
    blocks = [block for section in sections for block in blocks_of(section)]
    return text_page([title(summary, folder), *blocks, files(folder)])


def page_of(report: RunReport, folder: Path) -> bytes:
    """Return `report.html` of the session in `folder`."""
    return page.render(read_chart_data(report), folder)
