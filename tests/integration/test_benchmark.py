"""The benchmarks run and print every figure; what the figures are is hardly asserted: machines differ."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "overhead.py"
PARTS = {"step": 4, "marks": 11, "agent": 6}
TINY = {
    "scale.py --seconds 4 --device 8": "| 8 |",
    "nodes.py 2 1": "stop() returned after",
    "dashboard.py --ranks 16 --steps 100 --ticks 5": "one tick: p50",
    "memory.py --ranks 100 --samples 300 --live 100 --seconds 20": "first cause rank 77, creep rank 77",
    "startup.py --quick --only full": "added to it, median of 1 pairs",
}
"""The other benchmarks, in a form that takes seconds, and what each prints last."""


@pytest.mark.long
@pytest.mark.parametrize("command", list(TINY))
def test_benchmark_runs_and_names_its_commit(command: str) -> None:
    name, *arguments = command.split()
    ran = subprocess.run(
        [sys.executable, str(BENCHMARK.with_name(name)), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert TINY[command] in ran.stdout
    assert re.match(r"commit ([0-9a-f]{7,}\+?|unknown), \d{4}-\d\d-\d\d: .* cores", ran.stdout)


def test_gpu_benchmark_says_that_there_is_no_device() -> None:
    ran = gpu()
    assert ran.returncode == 2 and not ran.stdout
    assert ran.stderr.startswith("gpu.py needs a CUDA device: ") and "Nothing was measured." in ran.stderr


@pytest.mark.long
def test_gpu_benchmark_goes_through_a_played_device() -> None:
    sections = "stages", "peer", "cost", "nvml"
    ran = gpu("--played", "--markdown", *(f"--only={section}" for section in sections))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.startswith("### a played device: nothing here is about a real one\n\ncommit ")
    assert "| stages | 10 ms in backward | 2.00 0.00 0.00 4.00 18.00 0.00 ms | as planted |" in ran.stdout
    assert "| nvml | calls that failed | none | none |" in ran.stdout
    assert ran.stdout.endswith("a played device confirms nothing.\n")


@pytest.mark.long
def test_gpu_benchmark_goes_through_all_that_can_be_played() -> None:
    ran = gpu("--played")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for section in ("overhead", "fsdp2", "judge", "load", "demo", "ray_train", "driver", "visible", "mig"):
        assert f"\n{section} " in ran.stdout, section


@pytest.mark.long
def test_gpu_section_that_fails_does_so_by_itself() -> None:
    """Without a device a section that only CUDA can go through ends with an error; the next one goes on."""
    ran = gpu("--played", "--only=memory", "--only=offset")
    assert ran.returncode == 1
    assert "memory  the section" in ran.stdout and "FAILED (1): " in ran.stdout
    assert "offset  p90" in ran.stdout and "NOT green: 1 FAILED (memory)." in ran.stdout


def gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARK.with_name("gpu.py")), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.long
def test_quick_run_prints_every_figure() -> None:
    ran = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick", "--markdown", *(f"--only={part}" for part in PARTS)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    machine, table = ran.stdout.split("\n\n")
    for word in ("cores", "Linux", "Python", "torch", "ray"):
        assert word in machine
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert {part: [row[0] for row in rows].count(part) for part in PARTS} == PARTS
    assert all(any(character.isdigit() for character in row[2]) for row in rows)


@pytest.mark.long
def test_short_soak_loses_nothing_and_passes_every_check() -> None:
    ran = subprocess.run(
        [sys.executable, str(BENCHMARK.with_name("soak.py")), "--seconds", "20", "--ranks", "2"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("\nok  ") >= 17 and "kill relay 1" in ran.stdout


@pytest.mark.long
def test_planted_fault_is_scored_and_can_be_scored_again(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK.with_name("faults.py")), "--out", str(tmp_path / "out.json")]
    small = ["--worlds", "2", "--seeds", "0", "--stages", "forward", "--severities", "15", "60"]
    short = ["--specials", "--step-ms", "20", "--opening", "60", "--steps", "150", "--balanced", "150"]
    texts, runs = [], []
    for arguments in ([*small, *short, "--keep", str(tmp_path)], ["--rescore", str(tmp_path)]):
        ran = subprocess.run(
            [*command, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        texts.append(ran.stdout.partition("\n\n")[2])
        [run] = json.loads((tmp_path / "out.json").read_text())["runs"]
        runs.append(run)
    assert texts[0] == texts[1]
    assert runs[0] == runs[1]
    planted = runs[0]["planted"]
    assert runs[0]["quiet"]
    assert sorted(fault["row"] for fault in planted) == [60, 360]
    # 15 % and 60 % of a step are seen on any machine, and in the rows that the plan says.
    assert [fault["right"] for fault in planted] == [True, True]
    assert all(fault["said"].startswith("straggler forward of ") for fault in planted)
