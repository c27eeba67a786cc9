"""Renders a summary as plain text: `report.txt` and `traceml-ray report`."""

from __future__ import annotations

from pathlib import Path

from traceml_ray.document.text import blocks_of, page
from traceml_ray.reports.document import SECTIONS, files, of_summary, title
from traceml_ray.store.summary_shape import Summary

_ORDER = (
    *("verdict", "operation", "also", "model", "steps", "stages", "spans", "tables", "nodes"),
    *("roles", "ranks", "of ranks", "suspects", "history", "output", "stacks", "events", "runs", "monitor"),
)
"""A terminal shows the end of a long text: what is read of a failure is there."""


def render(summary: Summary, folder: Path) -> str:
    """Return the report on `summary`, as `summarize` makes it, of the session in `folder`."""
    chart_data = of_summary(summary)
    sections = [section for name in _ORDER for section in SECTIONS[name](chart_data)]
    blocks = [block for section in sections for block in blocks_of(section)]
    return page([title(summary, folder), *blocks, files(folder)])
