"""Each block of shell of the pages Start and Launchers, run as a reader would, beside a `train.py`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs/start").glob("*.md"), *(ROOT / "docs/launchers").glob("*.md")])
SHOWN_ELSEWHERE = {
    "pip install": ".ci/install-check",
    "--nnodes 2": "tests/integration/test_multihost.py",
    "srun ": "tests/unit/test_recipes.py, and `traceml-ray run` on several nodes in test_multihost.py",
    "traceml-ray top\n": "a terminal: tests/integration/test_top.py",
}
"""What one machine, or a test, cannot run → where it is shown instead."""
TRAIN = """
import torch
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(4000, 64))
for (batch,) in torch.utils.data.DataLoader(data, batch_size=8):
    optimizer.zero_grad()
    model(batch).mean().backward()
    optimizer.step()
torch.distributed.destroy_process_group()
"""
ACCELERATE = '#!/bin/sh\nshift\nexec python -m torch.distributed.run --standalone --nproc-per-node 2 "$@"\n'
"""A stand-in: `make frameworks` has the real one."""


def blocks() -> list[object]:
    """Return each block of shell, named by its page and its place."""
    return [
        pytest.param(block, id=f"{page.parent.name}/{page.stem}-{number}")
        for page in PAGES
        for number, block in enumerate(re.findall(r"```bash\n(.*?)```", page.read_text(), re.S), 1)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's folder: blocks of a page find what earlier ones have left."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "train.py").write_text(TRAIN)
    shutil.copytree(ROOT / "examples", folder / "examples")
    programs = folder / "bin"
    programs.mkdir()
    (programs / "accelerate").write_text(ACCELERATE)
    (programs / "accelerate").chmod(0o755)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("block", blocks())
def test_block_of_shell_runs(block: str, folder: Path) -> None:
    where = [place for beginning, place in SHOWN_ELSEWHERE.items() if beginning in block]
    if where:
        pytest.skip(f"shown by {where[0]}")
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=folder,
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "TRACEML_NICE": "0"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "launch" in block:
        assert "traceml-ray: files: " in done.stderr
    if "--slow data:1:40" in block:
        assert "straggler: rank 1" in done.stdout + done.stderr
