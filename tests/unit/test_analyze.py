"""`traceml_ray.analyze` and the command `analyze`: what a person is told of memory, from files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from stormlog_example import MIB, events, write

from traceml_ray import cli
from traceml_ray.reports.analyze import AnalyzeError, analyze


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """The exit code of the command line, its output and what it says on stderr."""
    try:
        code = cli.main(["analyze", *map(str, argv)])
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, *capsys.readouterr()


def test_nothing_to_analyze_is_an_error_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(AnalyzeError, match="there are no samples of memory in"):
        analyze(tmp_path)
    with pytest.raises(AnalyzeError, match="gone: No such file or directory"):
        analyze(str(tmp_path / "gone"))
    with pytest.raises(AnalyzeError, match="no file at all"):
        analyze([])
    with pytest.raises(AnalyzeError, match="sensitivity 'most': it is low, medium or high"):
        analyze(tmp_path, sensitivity="most")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nowhere"], "nowhere: No such file or directory"),
        ([".", "--ranks", "a"], "'a' is not a rank; write all, or 0,2, or 0,4-7"),
        ([".", "--sensitivity", "most"], "invalid choice: 'most'"),
        ([".", "--fail-on", "info"], "invalid choice: 'info'"),
        ([], "the following arguments are required: PATH"),
    ],
)
def test_mistake_gives_one_line_and_exit_code_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert reason in err and len(err.splitlines()) == 1


def test_command_needs_neither_torch_nor_ray(tmp_path: Path) -> None:
    code = (
        "import sys; from traceml_ray.cli import main; main(['analyze', sys.argv[1]]); "
        "sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    )
    write(tmp_path / "x.json", events([MIB] * 3))
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
