"""
Run every benchmark of RESULTS.md in full, one after the other: python benchmarks/results.py OUT [NAME…]

The output of each goes to `OUT/<number>-<name>.md`, its messages to stderr. `index.md` lists the commands,
the minutes that each took, and its exit status. NAME chooses benchmarks by the first word of their command
(`scale.py`, `frameworks`). This takes hours, on a machine on which nothing else runs.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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
    Benchmark("Verdicts", "traces.py"),
    Benchmark("Verdicts", "compare.py --markdown"),
    Benchmark("Verdicts", "frameworks"),
    Benchmark("Verdicts", "compat"),
    Benchmark("Scale", "scale.py"),
    Benchmark("Scale", "nodes.py 24"),
    Benchmark("Reliability", "chaos"),
    Benchmark("Reliability", "soak.py"),
    Benchmark("Memory", "memory.py"),
    Benchmark("Memory", "memory.py --families 200"),
    Benchmark("Web and terminal", "dashboard.py --browser"),
    Benchmark("Web and terminal", "terminal.py"),
)


def chosen(names: Sequence[str]) -> list[Benchmark]:
    """Return the benchmarks of these names; all without any. Raises ValueError for a name that none has."""
    unknown = set(names) - {one.name for one in BENCHMARKS}
    if unknown:
        raise ValueError(f"no benchmark is called {', '.join(sorted(unknown))}")
    return [one for one in BENCHMARKS if not names or one.name in names]


def run_all(out: Path, benchmarks: Sequence[Benchmark]) -> int:
    """Run them, and write what they print; return the number of those that failed."""
    out.mkdir(parents=True, exist_ok=True)
    lines = ["| section | command | minutes | exit status |", "|---|---|---|---|"]
    failed = 0
    for number, one in enumerate(benchmarks, 1):
        print(f"== {number} of {len(benchmarks)}: {one.command}", file=sys.stderr, flush=True)
        begin = time.monotonic()
        with (out / f"{number:02d}-{one.name}.md").open("w") as file:
            status = subprocess.run(one.arguments(), cwd=HERE.parent, stdout=file, check=False).returncode
        minutes = (time.monotonic() - begin) / 60
        lines.append(f"| {one.section} | `{one.command}` | {minutes:.1f} | {status} |")
        failed += status != 0
        (out / "index.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return failed


if __name__ == "__main__":
    sys.exit(1 if run_all(Path(sys.argv[1]), chosen(sys.argv[2:])) else 0)
