"""Foreign bytes as traces: they are read, or refused with a reason in one line."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fuzzing import bounded, fuzz, json_values, limited, mutated
from hypothesis import given
from hypothesis import strategies as st
from recorded import WALL_NS, operation

from traceml_ray.reports.profiles import render_difference, render_operations
from traceml_ray.traces import breakdown
from traceml_ray.traces.chrome import TraceError
from traceml_ray.traces.difference import RecordingError, difference
from traceml_ray.traces.key_averages import key_averages, to_csv, to_json
from traceml_ray.traces.merged_trace import merge
from traceml_ray.traces.sources import Source, sources_of_files

SECONDS = 60.0
MEMORY_MIB = 512
PIECES = [
    b"[" * 50_000,
    b'{"a":' * 20_000,
    b"9" * 5000,
    b"null",
    b"-1",
    b"1e308",
    b"NaN",
    b"\0",
    b'"',
    b"}",
    b"\n",
]
EVENTS: list[dict[str, Any]] = [
    {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "args": {"name": "python"}},
    operation("aten::linear", 0, 100, args={"External_id": 1, "Input_Dims": [[2, 3], []]}),
    operation("aten::linear", 10, 80.5, args={"External_id": 2}),
    operation("gloo:all_reduce", 40, 70, cat="user_annotation", tid=8),
    operation("gemm", 40, 70, cat="kernel", pid=0, tid=20, args={"External_id": 2, "correlation": 9}),
    {"ph": "i", "name": "[memory]", "pid": 7, "tid": 7, "ts": 20, "args": {"Bytes": 5, "Device Type": 0}},
    {"ph": "s", "id": 1, "pid": 7, "tid": 7, "ts": 1, "cat": "fwdbwd", "name": "fwdbwd"},
    {"ph": "f", "id": 1, "pid": 7, "tid": 7, "ts": 12, "cat": "fwdbwd", "name": "fwdbwd", "bp": "e"},
    {"ph": "B", "name": "x", "pid": "p", "tid": "t", "ts": 20},
    {"ph": "E", "pid": "p", "tid": "t", "ts": 30},
]
GROUPS = [{"pg_name": "0", "ranks": [0, 1]}]
HEADER = {
    "baseTimeNanoseconds": WALL_NS,
    "distributedInfo": {"rank": 0, "world_size": 2, "pg_config": GROUPS},
}
TRACE = json.dumps(HEADER | {"traceEvents": EVENTS}).encode()
FILES = {"rank-0.json": TRACE, "array.json": json.dumps(EVENTS).encode(), "x.json.gz": gzip.compress(TRACE)}


def compared(sources: list[Source]) -> None:
    """Two ranks are compared, or there is a reason."""
    try:
        result = difference(sources, 1)
    except RecordingError as error:
        assert 0 < len(str(error)) < 2000
        return
    assert render_difference(result).endswith("\n") and msgspec.json.encode(result)


def made_of(folder: Path) -> None:
    """All that is made of traces is made of those in the folder, or there is a reason."""
    with bounded(SECONDS), limited(MEMORY_MIB):
        try:
            sources = sources_of_files([folder])
            operations = key_averages(sources, by_shape=True)
            merge(sources, folder / "merged")
            compared(sources)
            made = breakdown.breakdown(sources, by_shape=True)
            assert breakdown.decode(breakdown.encode(made)).n_operations == len(operations)
        except TraceError as error:
            assert 0 < len(str(error)) < 2000
            return
        json.loads(gzip.decompress((folder / "merged").read_bytes()))
        json.loads(to_json(operations))
        assert to_csv(operations).startswith(b"node_id,") and render_operations("x", operations).endswith(
            "\n"
        )


@pytest.mark.parametrize("name", FILES)
@fuzz(0.5)
@given(data=st.data())
def test_changed_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("in")
    (folder / name).write_bytes(data.draw(mutated(FILES[name], PIECES)))
    (folder / "rank-1.json").write_bytes(TRACE.replace(b'"rank": 0', b'"rank": 1'))
    made_of(folder)
    shutil.rmtree(folder)


values = json_values | st.sampled_from(
    [0, 1, 1 << 53, (1 << 63) - 1, 1 << 64, -1, 1e308, float("nan"), "", "X", "B"]
)


@fuzz()
@given(data=st.data())
def test_events_with_other_values_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("in")
    events: list[dict[str, Any]] = json.loads(json.dumps(EVENTS))
    for _ in range(data.draw(st.integers(1, 6))):
        changed = data.draw(st.sampled_from(events))
        changed = data.draw(st.sampled_from([changed, changed.get("args") or changed]))
        if isinstance(changed, dict):
            changed[data.draw(st.sampled_from([*changed]))] = data.draw(values)
    header = HEADER | {"distributedInfo": {"rank": 1, "pg_config": GROUPS}}
    if data.draw(st.booleans()):
        header[data.draw(st.sampled_from([*HEADER]))] = data.draw(values)
    (folder / "rank-0.json").write_bytes(TRACE)
    (folder / "rank-1.json").write_text(json.dumps(header | {"traceEvents": events}))
    made_of(folder)
    shutil.rmtree(folder)
