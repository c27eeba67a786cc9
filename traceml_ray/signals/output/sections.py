"""What is shown of last lines."""

from __future__ import annotations

from traceml_ray import text
from traceml_ray.document.model import Lines
from traceml_ray.signals.output.lines import LastOutput


def output_lines(output: LastOutput) -> Lines:
    """Return what a rank printed last, each line with its stream."""
    lines = list[tuple[str, str]]()
    for line in output.lines:
        lines += [("", f"… {text.count(line.skipped, 'more line')}")] * (line.skipped > 0)
        lines.append((line.stream, line.text))
    return Lines(f"Last output of rank {output.rank}", lines)
