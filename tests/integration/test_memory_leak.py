"""`examples/memory_leak.py` under the launcher, and what its session says about memory."""

from __future__ import annotations

from pathlib import Path

from integration.test_faults import launch

import traceml_ray

EXAMPLE = Path(__file__).parents[2] / "examples" / "memory_leak.py"


def test_example_runs_under_the_launcher_and_leaves_memory_of_every_rank(tmp_path: Path) -> None:
    arguments = ("--step-ms", "20", "--leak-from", "5", "--device", "cpu", "--log-every", "10")
    done = launch(tmp_path, "leak", 2, 40, *arguments, script=(str(EXAMPLE),))
    assert done.returncode == 0, done.stderr[-4000:]
    assert "step   40  loss" in done.stdout
    found = traceml_ray.analyze(tmp_path / "leak")
    assert [source.ranks for source in found.sources] == [[0, 1]]
    assert (found.missing_ranks, found.refused, found.world_size) == ([], [], 2)
