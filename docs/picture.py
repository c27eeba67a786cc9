"""Draw text as a terminal has it; the head of a report: python docs/picture.py SESSION/report.txt OUT.svg"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

CHARACTER_WIDTH = 12.2
HEADINGS = r"^(Verdict|Why|Also|Next|Steps|Steps are|Restarts)\b"
LABELS = r"^(Verdict|Why|Next|Steps|Skew|Where the time.*|Nodes|Ranks)"


def draw(report: Path, out: Path) -> None:
    """Write the report down to its table of ranks as an SVG terminal."""
    head = report.read_text().partition("\nSuspects")[0].rstrip()
    text = Text(head)
    text.highlight_regex(re.compile(LABELS, re.MULTILINE), "bold cyan")
    text.highlight_regex(r"straggler: rank \d+ \(\S+\) in \w+", "bold red")
    text.highlight_regex(r"█+", "yellow")
    save(text, out, "traceml-ray report", 100)


def draw_head(report: Path, out: Path) -> None:
    """Write what stands before the first table of the report: title, verdict, why and next."""
    lines = report.read_text().splitlines()
    end = next((n for n, line in enumerate(lines) if line.startswith("Skew")), len(lines))
    text = Text("\n".join(lines[:end]).rstrip())
    text.highlight_regex(re.compile(HEADINGS, re.MULTILINE), "bold cyan")
    text.highlight_regex(re.compile(r"(?<=^Verdict) .*$", re.MULTILINE), "bold red")
    save(text, out, "traceml-ray report", 100)


def draw_part(report: Path, out: Path, begin: str, end: str) -> None:
    """Write the lines of the report from the one that starts with `begin` to the one before `end`."""
    lines = report.read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith(begin))
    last = next(n for n, line in enumerate(lines) if n > first and line.startswith(end))
    text = Text("\n".join(lines[first:last]).rstrip())
    text.highlight_regex(re.compile(f"^(?:{begin}|Attempts)", re.MULTILINE), "bold cyan")
    save(text, out, "traceml-ray report", 100)


def save(text: Text, out: Path, title: str, width: int) -> None:
    """Write lines of `width` cells as an SVG terminal."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(text, highlight=False)
    svg = console.export_svg(title=title)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # no fonts from elsewhere
    pattern = r'x="([\d.]+)"( y="[\d.]+") textLength="([\d.]+)"([^>]*>)((?:&#160;)+)'
    out.write_text(re.sub(pattern, _shift, svg))


def _shift(match: re.Match[str]) -> str:
    """Move a text that begins with spaces to where its first letter stands: not every viewer keeps them."""
    x, y, length, rest, spaces = match.groups()
    by = CHARACTER_WIDTH * spaces.count("&")
    return f'x="{float(x) + by:g}"{y} textLength="{float(length) - by:g}"{rest}'


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
