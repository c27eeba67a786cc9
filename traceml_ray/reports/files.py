"""Writes the files a session leaves for people and programs: `summary.json` and `report.txt`."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.reports.summary import summarize
from traceml_ray.reports.text import render
from traceml_ray.session import SessionFolder
from traceml_ray.store.session_file import SessionFile


def write_reports(folder: SessionFolder, session: SessionFile, thresholds: Thresholds) -> dict[str, Any]:
    """
    Write the reports of `session` into `folder`, each whole or not at all; return the summary.

    Raises OSError.
    """
    summary = summarize(session, thresholds)
    _write(folder.summary_json, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    _write(folder.report_txt, render(summary, folder.path))
    return summary


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
