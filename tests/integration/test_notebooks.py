"""The notebooks in `examples/` run from their first cell to their last."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytest.importorskip("pandas")
pytest.importorskip("plotly")

EXAMPLES = Path(__file__).parents[2] / "examples"


def executed(name: str, folder: Path, timeout: int) -> Any:
    """The notebook as it is after it has run in `folder`. Raises what a cell raises."""
    for path in (*EXAMPLES.glob("*.py"), EXAMPLES / name):
        shutil.copy(path, folder)
    notebook = nbformat.read(folder / name, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    nbformat.write(notebook, folder / f"executed-{name}")
    return notebook


def outputs(notebook: Any) -> str:
    """All that its cells have shown, as text and as HTML."""
    shown = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            shown += [output.get("text", ""), data.get("text/html", ""), data.get("text/plain", "")]
    return "\n".join("".join(part) for part in shown)


@pytest.mark.long
def test_notebook_of_torchrun_names_the_slow_rank(tmp_path: Path) -> None:
    shown = outputs(executed("torchrun.ipynb", tmp_path, 120))
    assert "straggler:1:data" in shown
    assert 'class="traceml-ray"' in shown


@pytest.mark.long
def test_notebook_of_ray_runs(tmp_path: Path) -> None:
    shown = outputs(executed("ray.ipynb", tmp_path, 240))
    assert "120 rows" in shown


def test_notebooks_are_kept_without_outputs() -> None:
    for path in EXAMPLES.glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert all(not cell.outputs and cell.execution_count is None for cell in cells), path.name
