"""
Makes the page RESULTS.md from `results.json`: python benchmarks/page.py

`results.json` has each table as its benchmark last published it (`figures.publish`), with the command and the
machine. `results.py` puts new tables into it. This module adds the sections, titles and order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
STORED, PAGE = HERE / "results.json", HERE / "RESULTS.md"

HEAD = """# Results

`make results` runs all benchmarks (some hours) and writes this page. Earlier figures are in the history of
`benchmarks/results.json`.

| machine | is |
|---|---|
| A | AMD EPYC (virtual), 2 cores, 24 GiB, no GPU |
| X | Intel Xeon (virtual), 2 cores, no GPU |

Linux 6.18, Python 3.11.7, torch 2.13.0 (CPU), Ray 2.60.0, `OMP_NUM_THREADS=1`, unless stated. *Busy*: other
work ran on the cores. [On one H200](../docs/gpu.md#seen-on-a-gpu): `gpu.py`.
"""


class Shown(NamedTuple):
    """A table of the page: its name in `results.json`, and the sentence above it."""

    name: str
    title: str


_IN_FULL = "[in full](../docs/method.md#on-a-devices-clock)"
SECTIONS: dict[str, tuple[Shown, ...]] = {
    "Overhead": (
        Shown(
            "overhead", "A running job. Everything is measured in pairs next to each other, in random order."
        ),
        Shown("startup", "Start and end of a run."),
        Shown("layers", "Layers (`--deep`)."),
        Shown("captures", "Profiles of three steps."),
        Shown("device_clock", "The device's clock, on one H200."),
    ),
    "Verdicts": (
        Shown(
            "faults", "Planted faults in real gloo DDP, under the real launcher: one rank late in one stage."
        ),
        Shown("faults_busy", "The same on full cores."),
        Shown("families_of_work", "Jobs whose work varies, played."),
        Shown("random_jobs", "Random jobs, held out."),
        Shown("roles", "Pipelines with replicas, simulated."),
        Shown("device", f"On a device's clock, simulated ({_IN_FULL})."),
        Shown("device_held_out", "The same for random jobs, held out."),
        Shown("traces", "Rows against traces of torch's profiler."),
        Shown("comparison", "Comparison of two sessions."),
        Shown("frameworks", "Frameworks with a slow rank ([reports](../docs/frameworks.md))."),
        Shown("compat", "Tests on the oldest and newest versions."),
        Shown("more_verdicts", "More."),
    ),
    "Scale": (
        Shown(
            "scale",
            "One real aggregator; played nodes of 8 ranks, 5 steps/s, one rank late from the middle on.",
        ),
        Shown("scale_device", "The same with rows of a device's clock."),
        Shown("nodes", "Nodes of Ray."),
        Shown("long_sessions", "Long sessions."),
    ),
    "Reliability": (
        Shown(
            "chaos",
            "Two ranks of gloo DDP with faults of the monitor, beside the same run without one: processes "
            "killed, stopped or hanging; nodes lost; disks full, hanging or read-only; clocks moved; floods "
            "and forged messages; sinks that are dead or hang; scripts that raise, exit, fork or are killed.",
        ),
        Shown("soak", "Ten minutes of faults: 8 ranks × 200 steps/s."),
    ),
    "Memory": (
        Shown("memory", "Cost of the memory analysis."),
        Shown("families", "Series with a known truth ([families](../docs/method.md#memory))."),
    ),
    "Web and terminal": (
        Shown("web", "The server of the web app, 1,024 ranks."),
        Shown("browser", "A browser."),
        Shown("interactions", "What a person does, 20,000 steps."),
        Shown("terminal", "`traceml-ray top`."),
    ),
    "Compared with TraceML": (
        Shown("traceml", "TraceML 0.5.0 on the same work."),
        Shown("traceml_costs", "What both cost. TraceML was measured once, by hand."),
        Shown("simpler", "Simpler methods on the windows of `faults.py`."),
    ),
}

AFTER = {
    "Scale": "[What breaks first beyond](../docs/scaling.md).",
}
"""Below the tables of a section."""


def stored(path: Path = STORED) -> dict[str, Any]:
    """Return the tables by name: `command`, `machine`, `columns`, `rows`, `notes`."""
    tables: dict[str, Any] = json.loads(path.read_text())
    return tables


def update(tables: dict[str, Any], command: str, lines: Iterable[str], status: int = 0) -> None:
    """
    Put the tables that a benchmark has published in place of the older ones.

    Args:
        tables: by name, changed in place.
        command: the benchmark's.
        lines: of JSON, as `figures.publish` writes them. Tables of one name and columns are joined.
        status: exit status of the benchmark; another one than 0 is stated below the table.
    """
    new: dict[str, Any] = {}
    for line in lines:
        entry = json.loads(line)
        name = entry.pop("table")
        if name in new and new[name]["columns"] == entry["columns"]:
            new[name]["rows"] += entry["rows"]
        else:
            new[name] = {"command": command, **entry}
    if status:
        for entry in new.values():
            entry["notes"] = [*entry["notes"], f"The benchmark ended with exit status {status}."]
    tables.update(new)


def write(tables: Mapping[str, Any], path: Path = STORED) -> None:
    """Write the tables, one row a line, so that differences can be read."""
    path.write_text(json.dumps(tables, indent=1, ensure_ascii=False) + "\n")


def rendered(tables: Mapping[str, Any]) -> str:
    """Return the page. Raises KeyError for a table that no section shows."""
    shown = {one.name for section in SECTIONS.values() for one in section}
    if unknown := {*tables} - shown:
        raise KeyError(f"no section of page.py shows {', '.join(sorted(unknown))}")
    parts = [HEAD]
    for section, ones in SECTIONS.items():
        parts.append(f"## {section}\n")
        for one in ones:
            if one.name in tables:
                parts += _table(one.title, tables[one.name])
        if section in AFTER:
            parts.append(AFTER[section] + "\n")
    return "\n".join(parts)


def _table(title: str, entry: Mapping[str, Any]) -> Iterator[str]:
    machine = entry["machine"].partition("; ")[0]  # without the versions, which HEAD has
    machine = re.sub(r"^(commit \S+), [\d-]+: (.*), \d+ cores, (load .*)$", r"\1, \2, \3", machine)
    where = ". ".join(filter(None, [f"`{entry['command']}`" if entry["command"] else "", machine]))
    yield f"{title} {where}{'.' if where else ''}\n"
    yield " | ".join(entry["columns"])
    yield "|".join(["---"] * len(entry["columns"]))
    yield from (" | ".join(row).rstrip() for row in entry["rows"])
    yield ""
    yield from (f"{note}\n" for note in entry["notes"])


if __name__ == "__main__":
    PAGE.write_text(rendered(stored()))
