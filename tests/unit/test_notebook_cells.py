"""The cells of `examples/torchrun.ipynb`, all of them in turn, on a played session instead of a launch."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from played import Played

from traceml_ray.launchers import torchrun

pytest.importorskip("pandas")
plotly = pytest.importorskip("plotly.graph_objects")

EXAMPLES = Path(__file__).parents[2] / "examples"


def shown_by(cell: str, names: dict[str, Any]) -> tuple[Any, str]:
    """Run a cell; return the value of its last line, and the HTML that a notebook shows of it."""
    *lines, last = ast.parse(cell).body
    exec(compile(ast.Module(lines, []), "cell", "exec"), names)
    if not isinstance(last, ast.Expr):
        exec(compile(ast.Module([last], []), "cell", "exec"), names)
        return None, ""
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return value, value._repr_html_() if hasattr(value, "_repr_html_") else ""


def test_cells_show_the_slow_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = []

    def launch(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        played = Played(tmp_path / "traceml-sessions" / "notebook", 2, per_node=2, late=1, onset=0, gpus=0)
        for _ in range(20):
            played.play(5)
        played.end()
        played.aggregator.close()
        return subprocess.CompletedProcess(command, 0, "straggler:1:data")

    monkeypatch.setattr(subprocess, "run", launch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_gpt.py").touch()
    notebook = json.loads((EXAMPLES / "torchrun.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    shown = [shown_by(cell, names) for cell in cells]

    (command,) = commands
    assert command[1:3] == ["-m", "traceml_ray.launch"]
    args = torchrun._parse(command[3:])
    assert (args.setting_session, args.training_script) == ("notebook", "train_gpt.py")
    assert "straggler rank 1 in data" in capsys.readouterr().out
    assert 'class="traceml-ray"' in shown[1][1]
    assert len(names["frame"]) == 2 * 100
    figures = [value for value, _ in shown if isinstance(value, plotly.Figure)]
    assert len(figures) == 2 and all(figure.data for figure in figures)
