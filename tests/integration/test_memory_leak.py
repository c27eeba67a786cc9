"""`examples/memory_leak.py` under the launcher, and what its session says about memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.test_faults import launch

import traceml_ray

EXAMPLE = Path(__file__).parents[2] / "examples" / "memory_leak.py"


@pytest.mark.long
def test_leaking_rank_of_the_example_is_named_from_its_session(tmp_path: Path) -> None:
    arguments = ("--step-ms", "50", "--leak-from", "20", "--leak-mb", "10", "--device", "cpu")
    done = launch(tmp_path, "leak", 2, 90, *arguments, script=(str(EXAMPLE),))
    assert done.returncode == 0, done.stderr[-4000:]
    assert "step   50  loss" in done.stdout
    analysis = traceml_ray.analyze(tmp_path / "leak")
    assert [source.ranks for source in analysis.sources] == [[0, 1]]
    assert (analysis.missing_ranks, analysis.refused, analysis.world_size) == ([], [], 2)
    cause = analysis.first_cause
    assert cause is not None
    assert (cause.rank, cause.device, cause.lead_ns) == (1, None, None)
    assert 300e6 < cause.delta_bytes < 900e6
    assert "creep" in {finding.kind for finding in analysis.findings if finding.rank == 1}
