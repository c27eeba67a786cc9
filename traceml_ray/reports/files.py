"""Writes the files a session leaves for people and programs: `summary.json` and `report.txt`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.files import write_files
from traceml_ray.reports.summary import summaries
from traceml_ray.reports.text import render
from traceml_ray.session import SessionFolder
from traceml_ray.store.session_file import SessionFile


def write_reports(
    folder: SessionFolder,
    session: SessionFile,
    thresholds: Thresholds,
    *,
    quick: bool = False,
    put: Callable[[Mapping[Path, bytes]], None] = write_files,
) -> dict[str, Any]:
    """
    Write the reports of `session` into `folder`, each whole or not at all; return the summary.

    Of a very long run those of its newest steps are written first: the job's end does not wait for ever.
    `quick` leaves it at that, while the run goes on. `put` writes the files: a `SessionWriter`'s own does not
    where another process has the session. Raises what `put` raises, OSError for one.
    """
    summary: dict[str, Any] = {}
    for summary in summaries(session, thresholds):
        text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
        report = render(summary, folder.path)
        put({folder.summary_json: text.encode(), folder.report_txt: report.encode()})
        if quick:
            break
    return summary
