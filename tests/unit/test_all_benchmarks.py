"""`benchmarks/results.py` runs what RESULTS.md names, and RESULTS.md is made of what benchmarks publish."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

figures, page = importlib.import_module("figures"), importlib.import_module("page")
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


COMMANDS = [one.command for one in results.BENCHMARKS if one.name.endswith(".py")] + ["gpu.py --played"]
FORKS = """
import importlib, json, os, runpy, sys
for name in ("ray", "torch", "traceml_ray.monitor.aggregator", "traceml_ray.dash_app.session_pages"):
    importlib.import_module(name)  # once, instead of once for each script
for arguments in json.load(sys.stdin):
    ours, theirs = os.pipe()
    if os.fork() == 0:
        os.dup2(theirs, 1), os.dup2(theirs, 2)
        sys.argv, sys.path[0] = arguments, os.path.dirname(arguments[0])
        try:
            runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        except BaseException as error:
            print(repr(error))
            code = 1
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else 1)
    os.close(theirs)
    with open(ours) as printed:
        text = printed.read()
    print(json.dumps([os.waitstatus_to_exitcode(os.wait()[1]), text]))
"""
"""
Runs scripts, of which stdin has the arguments as JSON, each in a process of its own. Prints the exit status
and output of each.
"""


@pytest.fixture(scope="module")
def printed() -> dict[str, tuple[int, str]]:
    """Exit status and output of each command with `--help`."""
    asked = [[*results.Benchmark("", command).arguments()[1:], "--help"] for command in COMMANDS]
    ran = subprocess.run(
        [sys.executable, "-c", FORKS],
        input=json.dumps(asked), cwd=ROOT, capture_output=True, text=True, check=True, timeout=240,
    )  # fmt: skip
    return dict(zip(COMMANDS, map(json.loads, ran.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("command", COMMANDS)
def test_script_takes_these_arguments(command: str, printed: dict[str, tuple[int, str]]) -> None:
    """What stands before `--help` is parsed first, and everything that the script imports is there."""
    status, text = printed[command]
    assert status == 0, text
    assert text.startswith(f"usage: {command.split()[0]}")


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
    (tmp_path / "stored.json").write_text("{}")
    assert results.run_all(tmp_path, benchmarks, tmp_path / "stored.json", tmp_path / "page.md") == 1
    assert (tmp_path / "01-a.py.md").read_text() == "a.py --quick\n"
    rows = (tmp_path / "index.md").read_text().splitlines()[2:]
    assert [row.split(" | ")[-1] for row in rows] == ["1 |", "0 |"]


def test_page_is_made_of_the_stored_tables() -> None:
    assert page.rendered(page.stored()) == RESULTS, "run `python benchmarks/page.py`"
    whole = "commit 1a2b3c, 2026-11-27: AMD EPYC, 2 cores, load 8.0; Linux 6.18, Python 3.11.7"
    entry = {"command": "scale.py", "machine": whole, "columns": ["a"], "rows": [["1"]], "notes": []}
    assert "`scale.py`. commit 1a2b3c, AMD EPYC, load 8.0.\n" in page.rendered({"scale": entry})


def test_published_table_replaces_the_older_one_and_is_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import figures; figures.publish('scale', ('ranks', 'cores'), [(8, 0.5)], 'No row was lost.')"

    def arguments(one: Any) -> list[str]:
        path = f"import sys; sys.path.append({str(ROOT / 'benchmarks')!r}); "
        return [sys.executable, "-c", path + script + f"; sys.exit({one.section!r} == 'bad')"]

    monkeypatch.setattr(results.Benchmark, "arguments", arguments)
    stored, written = tmp_path / "stored.json", tmp_path / "page.md"
    old = {"command": "old.py", "machine": "", "columns": ["ranks"], "rows": [["7"]], "notes": []}
    page.write({"scale": old, "nodes": old}, stored)
    assert results.run_all(tmp_path, [results.Benchmark("Scale", "scale.py")], stored, written) == 0
    assert page.stored(stored)["scale"]["rows"] == [["8", "0.5"]] and page.stored(stored)["nodes"] == old
    text = written.read_text()
    assert "from the middle on. `scale.py`. commit " in text
    assert "\nranks | cores\n---|---\n8 | 0.5\n\nNo row was" in text
    assert "exit status" not in text
    assert results.run_all(tmp_path, [results.Benchmark("bad", "scale.py")], stored, written) == 1
    assert "The benchmark ended with exit status 1." in written.read_text()


def test_table_without_a_place_on_the_page_is_an_error() -> None:
    entry = {"command": "", "machine": "", "columns": ["a"], "rows": [], "notes": []}
    with pytest.raises(KeyError, match=r"no section of page\.py shows nowhere"):
        page.rendered({"nowhere": entry})


def test_every_published_table_has_a_place_on_the_page() -> None:
    sources = [*(ROOT / "benchmarks").glob("*.py"), ROOT / "tests/chaos/conftest.py"]
    sources.append(ROOT / "tests/frameworks/run.py")
    calls = (
        call
        for source in sources
        for call in re.findall(r"publish(?:_figures)?\(\s*([^,]+),", source.read_text())
    )
    published = {name for call in calls for name in re.findall(r'"(\w+)"', call)}
    shown = {one.name for section in page.SECTIONS.values() for one in section}
    assert published - shown == set() and {"overhead", "chaos", "soak", "web", "families"} <= published


def test_without_the_variable_nothing_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(figures.FILE, raising=False)
    figures.publish("scale", ["a"], [["1"]])
    monkeypatch.setenv(figures.FILE, str(tmp_path / "out.json"))
    both = [figures.Figure("part", "a step", "5 µs", "≤ 10 µs"), figures.Figure("part", "its size", "3 MB")]
    figures.publish_figures("scale", both, budgeted=True)
    [line] = (tmp_path / "out.json").read_text().splitlines()
    assert json.loads(line)["rows"] == [["a step", "5 µs", "≤ 10 µs"]]


def test_output_of_compat_is_read() -> None:
    versions = "commit 1a2b3c, 2026-11-27: EPYC, 2 cores, load 1; Linux 6.18, Python 3.12.3, torch {}, ray {}"
    lines = [
        "=== 2 failed, 1200 passed, 3 skipped in 300.12s (0:05:00) ===",
        "== 30 passed in 61.00s ==",
        versions.format("2.4.0", "2.51.0"),
        "1300 passed, 1 warning in 290.5s (0:04:50)",
        versions.format("2.15.0", "2.60.0"),
    ]
    tables: dict[str, Any] = {}
    page.update(tables, "compat", results.of_tests("\n".join(lines)))
    rows = tables["compat"]["rows"]
    assert rows[0] == ["Linux 6.18, Python 3.12.3, torch 2.4.0, ray 2.51.0", "1,230", "2"]
    assert rows[1][1:] == ["1,300", "0"]


@pytest.mark.parametrize(
    ("command", "table"),
    [
        ("role_tables.py 1", "roles"),
        ("verdicts.py --only quiet --seeds 1 --whole", "families_of_work"),
        ("memory.py --ranks 100 --samples 200 --live 0", "memory"),
        ("memory.py --families 1", "families"),
    ],
)
def test_short_run_publishes_its_table(command: str, table: str, tmp_path: Path) -> None:
    """Those that start no processes; the others publish by the same calls."""
    out = tmp_path / "out.json"
    asked = results.Benchmark("", command).arguments()
    subprocess.run(asked, cwd=ROOT, env={**os.environ, figures.FILE: str(out)}, check=True, timeout=240)
    tables: dict[str, Any] = {}
    page.update(tables, command, out.read_text().splitlines())
    assert [*tables] == [table] and tables[table]["rows"] and table in page.stored()
    assert all(len(row) == len(tables[table]["columns"]) for row in tables[table]["rows"])
    assert page.rendered(tables)


def test_unknown_name_is_refused() -> None:
    assert {one.name for one in results.chosen(["scale.py"])} == {"scale.py"}
    with pytest.raises(ValueError, match=r"no benchmark is called nope\.py"):
        results.chosen(["nope.py"])
