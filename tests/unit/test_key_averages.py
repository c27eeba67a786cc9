"""The table of operations over ranks, beside torch's own of the same capture."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from recorded import WALL_NS, operation, profiled, training, written

from traceml_ray.identity import rank_filter
from traceml_ray.reports.profiles import render_operations
from traceml_ray.traces.chrome import TraceError
from traceml_ray.traces.key_averages import (
    ColumnError,
    FormatError,
    Operation,
    key_averages,
    select,
    sort,
    to_csv,
    to_json,
    to_parquet,
)
from traceml_ray.traces.sources import Source, sources_of_files
from traceml_ray.traces.trace import read_trace

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("with_stack", [False, True])
def test_calls_and_times_are_those_of_torch(tmp_path: Path, with_stack: bool) -> None:
    path, run = tmp_path / "rank0.json", training()
    run()
    profiler = profiled(path, run, with_stack=with_stack, profile_memory=True, record_shapes=True)
    expected = {
        operation.key: (operation.count, operation.self_cpu_time_total, operation.cpu_time_total)
        for operation in profiler.key_averages()
        if operation.key != "[memory]"
    }
    ours = {
        operation.name: (operation.calls, operation.self_cpu_ms * 1e3, operation.cpu_ms * 1e3)
        for operation in key_averages(sources_of_files([path]))
        if operation.kind != "memory"
    }
    assert ours.keys() == expected.keys() and "Optimizer.step#AdamW.step" in ours
    assert {"ProfilerStep*", "forward", "aten::mm"} <= ours.keys()
    for name, values in ours.items():
        assert values == pytest.approx(expected[name], abs=0.01), name


def test_memory_is_that_of_torch_on_one_thread(tmp_path: Path) -> None:
    path, run = tmp_path / "rank0.json", training()
    run()
    profiler = profiled(path, run, profile_memory=True)
    expected = {
        operation.key: (operation.self_cpu_memory_usage, operation.cpu_memory_usage)
        for operation in profiler.key_averages()
    }
    ours = {
        operation.name: (operation.self_cpu_bytes, operation.cpu_bytes)
        for operation in key_averages([Source(path)])
    }
    assert ours == expected and ours["aten::mm"] != (0, 0)


def test_shapes_divide_the_calls(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    profiled(path, lambda: [torch.ones(2, n) @ torch.ones(n, 3) for n in (4, 4, 5)], record_shapes=True)
    calls = {
        operation.input_shapes: operation.calls
        for operation in key_averages([Source(path)], True)
        if "mm" in operation.name
    }
    assert calls == {"[[2,4],[4,3]]": 2, "[[2,5],[5,3]]": 1}


KERNELS = [
    operation("aten::linear", 0, 100, args={"External_id": 1}),
    operation("aten::addmm", 10, 80, args={"External_id": 2}),
    operation("cudaLaunchKernel", 20, 5, cat="cuda_runtime", args={"External_id": 2, "correlation": 9}),
    operation("aten::linear", 200, 50, args={"External_id": 3}),
    operation("aten::linear", 205, 40, args={"External_id": 4}),
    operation("gemm", 40, 70, cat="kernel", pid=0, tid=20, args={"External_id": 2, "correlation": 9}),
    operation("gemm", 210, 30, cat="kernel", pid=0, tid=20, args={"External_id": 4, "correlation": 10}),
    operation("lost", 300, 10, cat="kernel", pid=0, tid=20, args={"External_id": 77}),
    operation("epoch", 30, 400, cat="gpu_user_annotation", pid=0, tid=20, args={"External_id": 3}),
]


def test_work_of_a_device_belongs_to_the_operation_that_launched_it(tmp_path: Path) -> None:
    path = written(tmp_path / "t.json.gz", KERNELS)
    operations = {(operation.name, operation.kind): operation for operation in key_averages([Source(path)])}
    linear, addmm = operations["aten::linear", "operation"], operations["aten::addmm", "operation"]
    assert linear.calls == 2  # one in another, and nothing else in it, is one
    assert (linear.self_cpu_ms, linear.cpu_ms) == pytest.approx((0.02 + 0.05, 0.15))
    assert (linear.self_device_ms, linear.device_ms) == pytest.approx((0.03, 0.1))
    assert (addmm.self_cpu_ms, addmm.self_device_ms, addmm.device_ms) == pytest.approx((0.075, 0.07, 0.07))
    gemm = operations["gemm", "device"]
    assert (gemm.calls, gemm.cpu_ms, gemm.self_device_ms) == (2, 0.0, pytest.approx(0.1))
    assert operations["cudaLaunchKernel", "runtime"].self_cpu_ms == pytest.approx(0.005)
    assert linear.self_cpu_bytes is None and linear.device_bytes is None


def test_times_are_of_the_wall_clock_to_the_nanosecond(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "t.json", [operation("a", 4571055572619.861, 1.002)]))
    assert trace.begin_ns.tolist() == [WALL_NS + 4571055572619861] and trace.wall_clock
    assert (trace.end_ns - trace.begin_ns).tolist() == [1002]
    assert not read_trace(
        written(tmp_path / "u.json", [operation("a", 5, 1)], baseTimeNanoseconds=0)
    ).wall_clock


def test_begins_and_ends_are_operations_as_well(tmp_path: Path) -> None:
    lane = {"pid": "p", "tid": 1}
    events = [
        {"ph": "B", "name": "outer", "ts": 0, **lane},
        {"ph": "B", "name": "inner", "ts": 10, **lane},
        {"ph": "E", "ts": 30, **lane},
        {"ph": "E", "ts": 100, **lane},
        {"ph": "E", "ts": 100, **lane},
        {"ph": "B", "name": "never ended", "ts": 10, **lane},
    ]
    self_ms = {
        operation.name: operation.self_cpu_ms
        for operation in key_averages([Source(written(tmp_path / "t.json", events))])
    }
    assert self_ms == {"outer": pytest.approx(0.08), "inner": pytest.approx(0.02)}


def test_ranks_of_foreign_traces_come_from_the_trace_then_from_its_name(tmp_path: Path) -> None:
    info = {"rank": 4, "world_size": 8}
    written(tmp_path / "rank1.json", EVENTS, distributedInfo=info, host_name="gpu-a")
    written(tmp_path / "job.rank-2.json.gz", EVENTS)
    written(tmp_path / "x.json", EVENTS, distributedInfo={"rank": "three"})
    (tmp_path / "readme.txt").write_text("x")
    sources = sources_of_files([tmp_path, tmp_path / "x.json"])
    assert [(source.rank, source.label) for source in sources] == [
        (2, "rank 2"),
        (4, "gpu-a / rank 4"),
        (None, "x.json"),
    ]
    written(tmp_path / "again.json", EVENTS, distributedInfo=info)
    with pytest.raises(TraceError, match="both of rank 4"):
        sources_of_files([tmp_path])


EVENTS = [operation("aten::mm", 0, 30), operation("aten::add", 100, 10), operation("a,b\n", 200, 20)]


def _table(tmp_path: Path) -> list[Operation]:
    longer = [event | {"dur": event["dur"] * 2} for event in EVENTS]
    ranks = [
        Source(written(tmp_path / f"{rank}.json", events), rank, "ab12", f"node-{rank}")
        for rank, events in enumerate((EVENTS, longer))
    ]
    return key_averages(ranks)


def test_table_is_sorted_and_filtered(tmp_path: Path) -> None:
    operations = _table(tmp_path)
    assert [(operation.rank, operation.name) for operation in operations[:2]] == [
        (1, "aten::mm"),
        (1, "a,b\n"),
    ]
    assert {operation.rank for operation in select(operations, ranks=rank_filter("0"))} == {0}
    assert [operation.name for operation in select(operations, "aten::*", top=3)] == [
        "aten::mm",
        "aten::mm",
        "aten::add",
    ]
    assert (
        select(operations, "mm") == sort(select(operations, "mm"), "calls")
        and len(select(operations, "mm")) == 2
    )
    assert sort(operations, "device_ms") == operations  # nothing is known
    with pytest.raises(ColumnError, match="no column 'nme'"):
        sort(operations, "nme")
    text = render_operations("Operations", select(operations, top=1))
    assert [line.split() for line in text.splitlines()[1:]] == [
        ["node", "rank", "operation", "kind", "self", "CPU", "ms", "CPU", "ms", "calls"],
        ["node-1", "1", "aten::mm", "operation", "0.060", "0.060", "1"],
    ]
    assert render_operations("Operations", []) == "Operations: none\n"


def test_files_hold_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operations = _table(tmp_path)
    rows: list[dict[str, Any]] = json.loads(to_json(operations))
    assert rows[0]["self_cpu_ms"] == 0.06 and rows[0]["device_ms"] is None and rows[0]["node_id"] == "ab12"
    as_csv = [*csv.DictReader(io.StringIO(to_csv(operations).decode(), newline=""))]
    assert [row["name"] for row in as_csv] == [row.name for row in operations]
    assert as_csv[0]["device_ms"] == "" and float(as_csv[0]["cpu_ms"]) == 0.06
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "t.parquet").write_bytes(to_parquet(operations))
    assert parquet.read_table(tmp_path / "t.parquet").to_pylist() == rows
    assert to_parquet([])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(FormatError, match="pip install pyarrow"):
        to_parquet(operations)
