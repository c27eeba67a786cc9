"""Prints the table of what was survived."""

from typing import Any

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
