"""The example of torch.distributed.rpc: remote operations in one table, callers and callees on one clock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from trace_format import check, processes
from watched_job import Job

from traceml_ray.launchers.cluster import free_port
from traceml_ray.monitor import captures
from traceml_ray.traces.key_averages import key_averages
from traceml_ray.traces.merged_trace import merge
from traceml_ray.traces.sources import sources_of_files, sources_of_profile

EXAMPLE = Path(__file__).parents[2] / "examples" / "rpc_pipeline.py"


@pytest.mark.long
def test_pipeline_is_recorded_on_all_workers(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--steps", "3", "--recorded", "2", "--profile", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "step 3: loss" in done.stdout, done.stderr
    sources = sources_of_files([tmp_path])
    calls = {(operation.rank, operation.name): operation.calls for operation in key_averages(sources)}
    assert calls[0, "rpc_async#run_stage(trainer0 -> stage1)"] == 2 * 4
    assert calls[0, "rpc_async#run_stage(trainer0 -> stage2)"] == 2 * 4
    assert calls[1, "run_stage"] == calls[2, "run_stage"] == 2 * 4
    assert calls[1, "aten::addmm"] == 3 * 2 * 4 and calls[2, "aten::addmm"] == 2 * 4
    assert (0, "aten::addmm") not in calls
    merged = merge(sources, tmp_path / "m.json.gz")
    document = check(tmp_path / "m.json.gz")
    assert merged.calls == 2 * 8
    arrows = [event for event in document["traceEvents"] if event.get("cat") == "rpc"]
    names = processes(document)
    assert {names[event["pid"]][-1] for event in arrows if event["ph"] == "s"} == {"0"}
    assert {names[event["pid"]][-1] for event in arrows if event["ph"] == "f"} == {"1", "2"}


def test_all_workers_of_a_job_that_is_watched_are_profiled_without_a_line_about_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "AHEAD_S", 1.2)
    step = "        with dist_autograd.context() as context:\n"
    script = EXAMPLE.read_text()
    assert step in script
    script = script.replace(step, f"        threading.Event().wait(0.05)  # for the cores' sake\n{step}")
    job = Job(tmp_path, script, ["--steps", 10**6], {"MASTER_PORT": str(free_port())}, auto_profile=0)
    try:
        job.wait_for_steps(20, ranks=1)
        stored = job.profile(steps=2)
        ranks = stored.profile.captured
        assert [rank.rank for rank in ranks] == [0, 1, 2], (stored.profile.ranks, job.errors())
        assert [rank.serves for rank in ranks] == [False, True, True]
        first = stored.profile.first_step
        assert first is not None and all(
            [step.step for step in rank.steps] == [first, first + 1] for rank in ranks
        )
        sources = sources_of_profile(stored)
        calls = {(operation.rank, operation.name): operation.calls for operation in key_averages(sources)}
        for stage, layers in ((1, 3), (2, 1)):
            assert calls[0, f"rpc_async#run_stage(trainer0 -> stage{stage})"] == 2 * 4
            assert calls[stage, "run_stage"] == 2 * 4 and calls[stage, "aten::addmm"] == layers * 2 * 4
        assert {operation.node_id for operation in key_averages(sources)} == {"node-0"}
        merged = merge(sources, tmp_path / "m.json.gz", stored.profile)
        assert merged.calls == 2 * 8
        check(tmp_path / "m.json.gz")
        assert all(rank.poll() is None for rank in job.ranks)
    finally:
        job.close()
