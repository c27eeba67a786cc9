"""Writes the files a session leaves for people and programs: `summary.json` and `report.txt`."""

from __future__ import annotations

import json
from typing import Any

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.files import write_file
from traceml_ray.reports.summary import summaries
from traceml_ray.reports.text import render
from traceml_ray.session import SessionFolder
from traceml_ray.store.session_file import SessionFile


def write_reports(
    folder: SessionFolder, session: SessionFile, thresholds: Thresholds, *, quick: bool = False
) -> dict[str, Any]:
    """
    Write the reports of `session` into `folder`, each whole or not at all; return the summary.

    Of a very long run those of its newest steps are written first: the job's end does not wait for ever.
    `quick` leaves it at that, while the run goes on. Raises OSError.
    """
    summary: dict[str, Any] = {}
    for summary in summaries(session, thresholds):
        write_file(folder.summary_json, (json.dumps(summary, indent=2, allow_nan=False) + "\n").encode())
        write_file(folder.report_txt, render(summary, folder.path).encode())
        if quick:
            break
    return summary
