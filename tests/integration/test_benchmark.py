"""The benchmark runs and prints every figure; what the figures are is not asserted: machines differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "overhead.py"
PARTS = {"step": 4, "marks": 4, "agent": 6}


def test_quick_run_prints_every_figure() -> None:
    ran = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick", "--markdown", *(f"--only={part}" for part in PARTS)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    machine, table = ran.stdout.split("\n\n")
    for word in ("cores", "Linux", "Python", "torch", "ray"):
        assert word in machine
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert {part: [row[0] for row in rows].count(part) for part in PARTS} == PARTS
    assert all(any(character.isdigit() for character in row[2]) for row in rows)
