"""`examples/train_gpt.py` as a user runs it: alone, under torchrun, with faults planted."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
TINY = ("--layers", "2", "--width", "32", "--context", "32", "--log-every", "1", "--device", "cpu")


def run(*args: str, ranks: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the example with plain python (`ranks` 0) or under torchrun on a free port."""
    torchrun = (
        ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)) if ranks else ()
    )
    return subprocess.run(
        [sys.executable, *torchrun, str(EXAMPLE), *args],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def losses(path: Path, kind: str) -> dict[int, float]:
    """Return the exact losses of one kind (train, val) by step."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {int(step): float.fromhex(loss) for step, which, loss in rows if which == kind}


@pytest.mark.long
def test_single_process_learns_and_is_reproducible_to_the_bit(tmp_path: Path) -> None:
    # The second run prepares its batches in the training process itself: workers change nothing.
    common = (*TINY, "--steps", "30", "--lr", "5e-3", "--checkpoint-every", "20")
    for name, extra in (
        ("a", ("--checkpoint-dir", "kept")),
        ("b", ("--workers", "0", "--slow", "prepare:0:1")),
    ):
        done = run(*common, "--loss-log", name, *extra, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    train = losses(tmp_path / "a", "train")
    assert list(train) == list(range(1, 31))
    assert train[30] < 0.75 * train[1]
    assert list(losses(tmp_path / "a", "val")) == [30]
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["step-20.pt"]


@pytest.mark.long
def test_slow_rank_changes_no_loss(tmp_path: Path) -> None:
    common = (*TINY, "--steps", "12", "--accumulate", "2", "--eval-every", "6")
    stages = ("data", "prepare", "forward", "backward", "optimizer", "log", "eval")
    slow = [word for stage in stages for word in ("--slow", f"{stage}:1:2@4")]
    for name, extra in (("even", []), ("uneven", slow)):
        done = run(*common, "--loss-log", name, *extra, ranks=2, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    for suffix in ("", ".rank1"):
        assert (tmp_path / f"even{suffix}").read_text() == (tmp_path / f"uneven{suffix}").read_text()
    first, second = losses(tmp_path / "even", "train"), losses(tmp_path / "even.rank1", "train")
    assert all(first[step] != second[step] for step in first)  # each rank has its own share of the text
    assert losses(tmp_path / "even", "val") == losses(tmp_path / "even.rank1", "val")


def test_planted_failure_ends_the_script_with_its_error(tmp_path: Path) -> None:
    done = run(*TINY, "--steps", "9", "--fail", "0:3", "--loss-log", "log", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "RuntimeError: planted by --fail at step 3"
    assert list(losses(tmp_path / "log", "train")) == [1, 2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--slow", "data:1"), "'data:1' is not STAGE:RANK:MS"),
        (("--slow", "data:0:fast"), "'data:0:fast' is not STAGE:RANK:MS"),
        (("--slow", "dream:0:5"), "'dream:0:5': the stages are data, prepare, forward"),
        (("--slow", "data:0:nan"), "'data:0:nan': MS is above 0"),
        (("--slow", "data:0:5@0"), "STEP 1 or more"),
        (("--slow", "data:1:5"), "a fault on rank 1: this run has ranks 0 to 0"),
        (("--fail", "0"), "'0' is not RANK:STEP"),
    ],
)
def test_fault_that_cannot_be_planted_is_refused_in_one_line(
    args: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name, *args])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    usage, error = capsys.readouterr().err.splitlines()
    assert re.match(r"usage: .* \[options\]$", usage)
    assert message in error
