"""Prints the table of what was survived, and publishes what it comes to."""

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from figures import publish

HEAD = ("case", "channel", "survived", "rows not stored", "longest hook, ms", "rank, MB", "end, s", "busy, s")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line a case, to be pasted into benchmarks/RESULTS.md."""
    rows = []
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            row = dict(getattr(report, "user_properties", ())).get("chaos")
            if row and report.when == "call":
                rows.append((*row[:2], "yes" if outcome == "passed" else "NO", *row[2:]))
    if not rows:
        return
    terminalreporter.section("chaos")
    for line in (HEAD, tuple("---" for _ in HEAD), *rows):
        terminalreporter.write_line(f"| {' | '.join(line)} |")
    survived = sum(row[2] == "yes" for row in rows)
    hooks, memory, ends = ([float(row[place]) for row in rows] for place in (4, 5, 6))
    publish(
        "chaos",
        ("what", "measured", "budget"),
        [
            (
                "cases with equal losses, weights and exit codes, and no row lost unseen",
                f"{survived} of {len(rows)}",
                "all",
            ),
            (
                "longest time in a hook of the training thread; median of the cases",
                f"{max(hooks):.1f} ms; {statistics.median(hooks):.1f} ms",
                "≤ 5 ms",
            ),
            (
                "memory added to a rank, largest",
                f"{max(memory):.0f} MB",
                "≤ 40 MB; `--channel actor`: 220",
            ),
            (
                "end of the job later by, median and largest",
                f"{statistics.median(ends):.1f} and {max(ends):.1f} s",
                "≤ 3 s",
            ),
        ],
    )
