"""Shared by the benchmarks: what was measured on which machine and commit, and its table."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

FILE = "TRACEML_FIGURES"
"""Environment variable with the file that `publish` appends to."""


class Figure(NamedTuple):
    """One line of the table."""

    part: str
    what: str
    value: str
    budget: str = ""


def answering(source: Any) -> list[float]:
    """
    Return a list with one number: CPU seconds that `source` takes to reply from now on. It can be
    reset.
    """
    spent, reply = [0.0], source.reply

    def timed(message: bytes) -> bytes:
        began = time.process_time()
        try:
            return reply(message)
        finally:
            spent[0] += time.process_time() - began

    source.reply = timed
    return spent


def machine() -> str:
    """Return the commit, day, machine and versions as one line for the head of a table."""
    with open("/proc/cpuinfo") as file:  # noqa: PTH123
        model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), "?")
    software = ["Linux " + platform.release(), "Python " + platform.python_version()]
    software += [f"{name} {_release(name)}" for name in ("torch", "ray")]
    return (
        f"commit {commit()}, {date.today()}: {model}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}; {', '.join(software)}"
    )


def commit() -> str:
    """Return the short name of the checked-out commit, with a + if files differ from it."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        name = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
        changed = subprocess.check_output([*git, "status", "--porcelain", "-uno"], text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + "+" * bool(changed)


def _release(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def publish(name: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *notes: str) -> None:
    """
    Append a table of RESULTS.md, as a line of JSON, to the file that `TRACEML_FIGURES` names; without one do
    nothing. `results.py` sets the variable and reads the file.

    Args:
        name: of the table in `page.py`.
        columns: their heads.
        rows: cells of each row; all are written as text.
        notes: sentences below the table.
    """
    path = os.environ.get(FILE)
    if not path:
        return
    cells = [[str(cell) for cell in row] for row in rows]
    entry = {"table": name, "machine": machine(), "columns": [*columns], "rows": cells, "notes": [*notes]}
    with open(path, "a", encoding="utf-8") as file:  # noqa: PTH123
        file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def publish_figures(name: str, figures: Iterable[Figure], *, budgeted: bool = False) -> None:
    """
    Publish figures as a table of what was measured, the value and its budget.

    Args:
        name: of the table.
        figures: its rows.
        budgeted: leave out figures without a budget, which explain the others where they are printed.
    """
    figures = [one for one in figures if one.budget or not budgeted]
    publish(name, ("what", "measured", "budget"), [(one.what, one.value, one.budget) for one in figures])


def table(figures: list[Figure], markdown: bool) -> str:
    """Lay `figures` out for people, or for RESULTS.md."""
    rows = [Figure("part", "what", "measured", "budget"), *figures]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        lines.insert(1, "|---|---|---|---|")
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    print(machine())
