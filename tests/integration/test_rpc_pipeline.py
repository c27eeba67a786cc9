"""The example of torch.distributed.rpc: remote operations in one table, callers and callees on one clock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from trace_format import check, processes

from traceml_ray.traces.key_averages import key_averages
from traceml_ray.traces.merged_trace import merge
from traceml_ray.traces.sources import of_files

EXAMPLE = Path(__file__).parents[2] / "examples" / "rpc_pipeline.py"


def test_pipeline_is_recorded_on_all_workers(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--steps", "3", "--recorded", "2", "--profile", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0 and "step 3: loss" in done.stdout, done.stderr
    sources = of_files([tmp_path])
    calls = {(each.rank, each.name): each.calls for each in key_averages(sources)}
    assert calls[0, "rpc_async#run_stage(trainer0 -> stage1)"] == 2 * 4
    assert calls[0, "rpc_async#run_stage(trainer0 -> stage2)"] == 2 * 4
    assert calls[1, "run_stage"] == calls[2, "run_stage"] == 2 * 4
    assert calls[1, "aten::addmm"] == 3 * 2 * 4 and calls[2, "aten::addmm"] == 2 * 4
    assert (0, "aten::addmm") not in calls
    merged = merge(sources, tmp_path / "m.json.gz")
    found = check(tmp_path / "m.json.gz")
    assert merged.calls == 2 * 8
    arrows = [event for event in found["traceEvents"] if event.get("cat") == "rpc"]
    names = processes(found)
    assert {names[event["pid"]][-1] for event in arrows if event["ph"] == "s"} == {"0"}
    assert {names[event["pid"]][-1] for event in arrows if event["ph"] == "f"} == {"1", "2"}
