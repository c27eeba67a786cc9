"""The command line as a person meets it: a process, its output, its exit code."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from sessions import Rank, Relay, aggregation

from traceml_ray import __version__
from traceml_ray.cli import _parser, main
from traceml_ray.commands.help import EXAMPLES
from traceml_ray.launchers.arguments import marked
from traceml_ray.store.session import prepare


def _run(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "traceml_ray.cli", *arguments],
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder with one live session `s` of one rank."""
    folder = prepare(tmp_path / "out", "s")
    aggregator, relay, rank = aggregation(folder.path), Relay(), Rank(0, 1)
    for _ in range(5):
        aggregator.ingest(relay.message(rank.batch(10)))
    aggregator.commit()
    return folder.path.parent


def test_report_of_a_live_session_is_text_or_json(out: Path, tmp_path: Path) -> None:
    text = _run("report", "--sessions", str(out), cwd=tmp_path)
    assert (text.returncode, text.stderr) == (0, "")
    assert "session s" in text.stdout
    assert "Verdict    healthy" in text.stdout
    done = _run("report", "s", "--json", cwd=tmp_path, TRACEML_OUT=str(out))
    assert done.stdout.endswith("}\n")
    summary = json.loads(done.stdout)
    assert summary["session"]["status"] == "running"
    assert summary["steps"]["count"] == 50


def test_output_fits_an_encoding_without_our_signs_and_a_closed_stdout(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (["sessions"], ["report", "s"], ["compare", "s", "s"]):
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
        assert main([*command, "--sessions", str(out)]) == 0
        assert written.getvalue()
    assert b"s : running" in written.getvalue(), "a middle dot is a colon there"
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["report", "s", "--sessions", str(out)]) == 0


def test_status_of_a_live_session_shows_its_launcher_and_rows(out: Path, tmp_path: Path) -> None:
    done = _run("status", str(out / "s"), cwd=tmp_path)
    assert done.returncode == 0
    assert f"running (live, launcher pid {os.getpid()})" in done.stdout
    assert "50 rows produced = 50 stored" in done.stdout


def test_help_imports_neither_numpy_nor_torch_nor_ray() -> None:
    code = (
        "import sys\nfrom traceml_ray.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n"
        "    print({'numpy', 'torch', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.endswith("set()\n"), done.stdout[-200:]


def test_report_needs_neither_torch_nor_ray(out: Path) -> None:
    code = (
        "import sys; from traceml_ray.cli import main; main(['report', '--sessions', sys.argv[1]]); "
        "sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], capture_output=True, timeout=240, check=False
    )
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "required"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["report", "missing"], "no session 'missing' under"),
        (["report", "--sessions", "nowhere"], "no session under nowhere"),
        (["report", "broken"], "broken/session.sqlite: cannot use the session file"),
    ],
)
def test_mistake_gives_one_line_and_exit_code_2(tmp_path: Path, arguments: list[str], reason: str) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "session.sqlite").write_bytes(b"x" * 5000)
    done = _run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert reason in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_stop_of_a_session_whose_monitor_does_not_answer_yet_fails(out: Path, tmp_path: Path) -> None:
    done = _run("stop", "s", "--out", str(out), cwd=tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "session 's' is starting" in done.stderr


def test_help_and_version_are_printed(tmp_path: Path) -> None:
    assert _run("--version", cwd=tmp_path).stdout == f"traceml-ray {__version__}\n"
    done = _run("--help", cwd=tmp_path).stdout
    assert "2 bad input" in done
    assert all(name in done for name in ("report", "status", "dashboard", "stop"))


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_help_of_each_subcommand_has_an_example_that_is_one(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    shown = capsys.readouterr().out
    assert "Exit codes" not in shown, "they are in the help of traceml-ray itself"
    for example in EXAMPLES[name]:
        assert f"  {example}\n" in shown
        words = shlex.split(example.partition("|")[0].removeprefix('eval "$(').removesuffix(')"'))
        _parser().parse_args(marked(words[1:]))  # raises for what there is not


def test_each_subcommand_has_an_example() -> None:
    assert {*_parser()._subparsers._group_actions[0].choices} == {*EXAMPLES}


def test_shell_completes_subcommands_and_sessions(out: Path, tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    script = _run("completion", "bash", cwd=tmp_path)
    assert script.returncode == 0 and "traceml-ray" in script.stdout
    for line, expected in (("traceml-ray stat", "status"), (f"traceml-ray report --sessions {out} ", "s")):
        asked = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
        asked |= {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "found")}
        assert _run(cwd=tmp_path, **asked).returncode == 0
        assert expected in (tmp_path / "found").read_text().replace("\v", " ").split()


def test_completion_without_argcomplete_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete.shell_integration", None)
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert main(["completion", "zsh"]) == 1
    assert "pip install 'traceml-ray[completion]'" in capsys.readouterr().err


def test_closed_pipe_is_no_error(out: Path, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "traceml_ray.cli", "report", "--sessions", str(out)]
    done = subprocess.run(
        command, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, timeout=240, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")
