"""
Run every benchmark of RESULTS.md in full, one after the other: python benchmarks/results.py OUT [NAME…]

The output of each goes to `OUT/<number>-<name>.md`, its messages to stderr, the tables that it publishes
(`figures.publish`) to `OUT/<number>-<name>.json`. They replace the older ones in `results.json`, and
RESULTS.md is written anew after each benchmark (`page.py`). `index.md` lists the commands, the minutes that
each took, and its exit status. NAME chooses benchmarks by the first word of their command (`scale.py`,
`frameworks`). This takes hours, on a machine on which nothing else runs.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import page
from figures import FILE

HERE = Path(__file__).parent


class Benchmark(NamedTuple):
    """A section of RESULTS.md, and the command that measures it: a file here, or a make target."""

    section: str
    command: str

    @property
    def name(self) -> str:
        """Return the file's or the target's name."""
        return shlex.split(self.command)[0]

    def arguments(self) -> list[str]:
        """Return the command as it is run in the root of the repository."""
        first, *others = shlex.split(self.command)
        if first.endswith(".py"):
            return [sys.executable, str(HERE / first), *others]
        return ["make", "--no-print-directory", first, *others]


BENCHMARKS = (
    Benchmark("Overhead", "overhead.py --markdown"),
    Benchmark("Overhead", "startup.py --markdown"),
    Benchmark("Overhead", "layers.py --markdown"),
    Benchmark("Overhead", "captures.py --rounds 120 --markdown"),
    Benchmark("Verdicts", "faults.py"),
    Benchmark("Verdicts", "faults.py --busy"),
    Benchmark("Verdicts", "verdicts.py"),
    Benchmark("Verdicts", "verdicts.py --random 60"),
    Benchmark("Verdicts", "role_tables.py"),
    Benchmark("Verdicts", "device_tables.py"),
    Benchmark("Verdicts", "device_tables.py --held-out"),
    Benchmark("Verdicts", "traces.py"),
    Benchmark("Verdicts", "compare.py --markdown"),
    Benchmark("Verdicts", "frameworks"),
    Benchmark("Verdicts", "compat"),
    Benchmark("Scale", "scale.py"),
    Benchmark("Scale", "scale.py 8192 --device"),
    Benchmark("Scale", "nodes.py 24"),
    Benchmark("Reliability", "chaos"),
    Benchmark("Reliability", "soak.py"),
    Benchmark("Memory", "memory.py"),
    Benchmark("Memory", "memory.py --families 200"),
    Benchmark("Web and terminal", "dashboard.py --browser"),
    Benchmark("Web and terminal", "dashboard.py --steps 20000 --episodes 10"),
    Benchmark("Web and terminal", "terminal.py"),
)


def chosen(names: Sequence[str]) -> list[Benchmark]:
    """Return the benchmarks of these names; all without any. Raises ValueError for a name that none has."""
    unknown = set(names) - {one.name for one in BENCHMARKS}
    if unknown:
        raise ValueError(f"no benchmark is called {', '.join(sorted(unknown))}")
    return [one for one in BENCHMARKS if not names or one.name in names]


def of_tests(output: str) -> list[str]:
    """
    Return what `make compat` has measured as lines of JSON: the last line of each run of pytest, and the
    versions that it ran with, which stand behind it (`figures.py`).
    """
    lines: list[str] = []
    counts = dict.fromkeys(("passed", "failed"), 0)
    for line in output.splitlines():
        if re.match(r"commit \S+, .*: ", line):
            versions = line.rpartition("; ")[2]
            row = [versions, f"{counts['passed']:,}", f"{counts['failed']:,}"]
            columns = ["versions", "tests passed", "failed"]
            entry = {"table": "compat", "machine": line, "columns": columns, "rows": [row], "notes": []}
            lines.append(json.dumps(entry, ensure_ascii=False))
            counts = dict.fromkeys(counts, 0)
        elif re.search(r"\bin \d+(\.\d+)?s\b", line):
            for what in counts:
                counts[what] += sum(map(int, re.findall(rf"(\d+) {what}", line)))
    return lines


def run_all(
    out: Path, benchmarks: Sequence[Benchmark], stored: Path = page.STORED, written: Path = page.PAGE
) -> int:
    """
    Run them, and write what they print; return the number of those that failed.

    Args:
        out: folder of the outputs.
        benchmarks: in order.
        stored: the tables of the page, in which those that are measured replace the older ones.
        written: the page.
    """
    out.mkdir(parents=True, exist_ok=True)
    lines = ["| section | command | minutes | exit status |", "|---|---|---|---|"]
    failed = 0
    for number, one in enumerate(benchmarks, 1):
        print(f"== {number} of {len(benchmarks)}: {one.command}", file=sys.stderr, flush=True)
        begin = time.monotonic()
        name = f"{number:02d}-{one.name}"
        published = (out / f"{name}.json").absolute()
        published.unlink(missing_ok=True)
        with (out / f"{name}.md").open("w") as file:
            env = {**os.environ, FILE: str(published)}
            ran = subprocess.run(one.arguments(), cwd=HERE.parent, stdout=file, env=env, check=False)
            status = ran.returncode
        tables = published.read_text().splitlines() if published.exists() else []
        if one.name == "compat":
            tables = of_tests((out / f"{name}.md").read_text())
        _write(one.command, tables, status, stored, written)
        minutes = (time.monotonic() - begin) / 60
        lines.append(f"| {one.section} | `{one.command}` | {minutes:.1f} | {status} |")
        failed += status != 0
        (out / "index.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return failed


def _write(command: str, lines: Sequence[str], status: int, stored: Path, written: Path) -> None:
    """Put published tables into those that are stored, and write the page."""
    tables = page.stored(stored)
    page.update(tables, command, lines, status)
    page.write(tables, stored)
    written.write_text(page.rendered(tables))


if __name__ == "__main__":
    sys.exit(1 if run_all(Path(sys.argv[1]), chosen(sys.argv[2:])) else 0)
