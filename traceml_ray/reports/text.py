"""Renders a summary as plain text: `report.txt` and `traceml-ray report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from traceml_ray import text
from traceml_ray.reports import contents
from traceml_ray.reports.heading import files, title
from traceml_ray.reports.layout import WIDTH, laid_out, page
from traceml_ray.reports.profiles import profile_facts
from traceml_ray.signals.views import VIEWS

_MAX_STACKS = 4
_MAX_STACK_LINES = 100


def render(summary: dict[str, Any], folder: Path) -> str:
    """Return the report on `summary` (schema `traceml_ray/summary/1`) of the session in `folder`."""
    sections = [
        section for name, view in VIEWS.items() for section in view.sections(view.of_block(summary.get(name)))
    ]

    def signal_blocks(place: str) -> list[list[str]]:
        return [laid_out(block) for section in sections if section.place == place for block in section.blocks]

    parts = [
        title(summary, folder),
        laid_out(contents.verdict_facts(summary)),
        laid_out(profile_facts(summary)),
        laid_out(contents.findings_facts(summary)),
        *signal_blocks("model"),
        laid_out(contents.steps_facts(summary)),
        *signal_blocks("steps"),
        laid_out(contents.stages_table(summary["stages"])),
        laid_out(contents.spans_table(summary["spans"], summary["steps"]["median_ms"])),
        *signal_blocks("tables"),
        laid_out(contents.nodes_table(summary)),
        laid_out(contents.roles_table(summary)),
        laid_out(contents.ranks_table(summary)),
        *signal_blocks("ranks"),
        laid_out(contents.suspects_table(summary)),
        laid_out(contents.history_table(summary)),
        *signal_blocks("failure"),
        _stacks(contents.last_stacks(summary["verdicts"])),
        laid_out(contents.events_table(summary["events"])),
        laid_out(contents.runs_table(summary["runs"], summary["run"])),
        laid_out(contents.ledger_facts(summary["ledger"])),
        laid_out(contents.overhead_facts(summary["overhead"])),
        files(folder),
    ]
    return page(parts)


def _stacks(last: Sequence[dict[str, Any]]) -> list[str]:
    """Return where the ranks were when the job hung."""
    lines = ["Where the ranks were"] if last else []
    for stack in last[:_MAX_STACKS]:
        lines.append(f"  {text.ranks(stack['ranks'])}")
        for line in stack["text"].expandtabs(4).splitlines()[:_MAX_STACK_LINES]:
            # The end of a stack line is specific: a long one loses the beginning of its path.
            lines.append("    " + (line if len(line) <= WIDTH - 4 else f"  …{line[-(WIDTH - 7) :]}"))
    return lines
