"""`benchmarks/results.py` runs what RESULTS.md names, and nothing that is not there."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("all_benchmarks", ROOT / "benchmarks" / "results.py")
assert _SPEC is not None and _SPEC.loader is not None
results = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(results)
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text()


@pytest.mark.parametrize("one", results.BENCHMARKS, ids=lambda one: one.command)
def test_benchmark_exists_and_has_a_section(one: Any) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert (ROOT / "benchmarks" / one.name).is_file() or one.name in targets
    assert f"\n## {one.section}\n" in RESULTS


@pytest.mark.parametrize(
    "command",
    [one.command for one in results.BENCHMARKS if one.name.endswith(".py")] + ["gpu.py --played"],
)
def test_script_takes_these_arguments(command: str) -> None:
    """What stands before `--help` is parsed first, and everything that the script imports is there."""
    asked = [*results.Benchmark("", command).arguments(), "--help"]
    ran = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"usage: {command.split()[0]}")


def test_every_benchmark_of_the_page_is_run() -> None:
    on_a_gpu = {"gpu.py"}
    named = {*re.findall(r"(\w+\.py)\b", RESULTS), *re.findall(r"`make (\w+)`", RESULTS)}
    ours = {name for name in named if (ROOT / "benchmarks" / name).is_file() or not name.endswith(".py")}
    assert ours - on_a_gpu - {"results"} == {one.name for one in results.BENCHMARKS}


def test_a_failure_is_counted_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def arguments(one: Any) -> list[str]:
        return [sys.executable, "-c", f"print({one.command!r}); raise SystemExit({one.section!r} == 'bad')"]

    monkeypatch.setattr(results.Benchmark, "arguments", arguments)
    benchmarks = [results.Benchmark("bad", "a.py --quick"), results.Benchmark("good", "b.py")]
    assert results.run_all(tmp_path, benchmarks) == 1
    assert (tmp_path / "01-a.py.md").read_text() == "a.py --quick\n"
    rows = (tmp_path / "index.md").read_text().splitlines()[2:]
    assert [row.split(" | ")[-1] for row in rows] == ["1 |", "0 |"]


def test_unknown_name_is_refused() -> None:
    assert {one.name for one in results.chosen(["scale.py"])} == {"scale.py"}
    with pytest.raises(ValueError, match=r"no benchmark is called nope\.py"):
        results.chosen(["nope.py"])
