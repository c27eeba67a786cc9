"""Traces as a stream: both forms, packed or not, and what is wrong with those that are none."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from pathlib import Path

import pytest
from recorded import operation, written

from traceml_ray.traces import chrome
from traceml_ray.traces.chrome import ChromeTrace, TraceError

EVENTS = [
    operation(f'aten::{name} \u00e9 \\ " ]}}', begin, 1.5) for begin, name in enumerate(("mm", "add", "t"))
]


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 18])
def test_events_and_header_are_read_whatever_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, chunk: int
) -> None:
    monkeypatch.setattr(chrome, "_CHUNK", chunk)
    path = written(tmp_path / name, EVENTS, distributedInfo={"rank": 3})
    stream = ChromeTrace(path)
    assert [*stream] == EVENTS and [*stream] == EVENTS
    assert stream.header["distributedInfo"] == {"rank": 3}


@pytest.mark.parametrize("end", ["]", "", ",\n", "\n]\n"])
def test_bare_array_is_read_with_and_without_its_end(tmp_path: Path, end: str) -> None:
    path = tmp_path / "t.json"
    path.write_text("\ufeff[" + ",\n".join(map(json.dumps, EVENTS)) + end)
    assert [*ChromeTrace(path)] == EVENTS


def test_header_after_the_events_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": EVENTS, "baseTimeNanoseconds": 5}))
    stream = ChromeTrace(path)
    assert [*stream] == EVENTS and stream.header == {"baseTimeNanoseconds": 5}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "neither { nor \\["),
        (b"SQLite format 3", "neither"),
        (b"{}", "no traceEvents"),
        (b'{"traceEvents": 5}', "no traceEvents"),
        (b'{"traceEvents": [', "cut off"),
        (b'{"traceEvents": [{"ph": "X"', "cut off"),
        (b'{"traceEvents": [{"ph": "X"}]', "cut off"),
        (b'{"traceEvents": [5]}', "is not an event"),
        (b'{"traceEvents": [{"ph": nothing}]}', "damaged: Expecting value at character 1[0-9]"),
        (b"{5: []}", "a name is missing"),
        (b'{"traceEvents": [{"a":' + b"[" * 100_000, "damaged at character 17"),
        (b'{"traceEvents": [{"a":' + b"9" * 5000 + b"}]}", "damaged at character 17"),
        (b'{"traceEvents": [{"a": "' + b"x" * (3 << 20), "damaged at character 17: Unterminated"),
        (b'{"x": "' + b"x" * (1 << 20) + b'", "y": "' + b"x" * (1 << 20) + b'"}', "besides its events"),
        (gzip.compress(json.dumps({"traceEvents": EVENTS}).encode())[:-30], "cut off"),
        (gzip.compress(json.dumps({"traceEvents": EVENTS}).encode())[:-8] + bytes(8), "damaged"),
        (b"\x1f\x8b" + bytes(100), "damaged"),
    ],
)
def test_what_is_no_whole_trace_is_refused_with_a_reason(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=reason) as caught:
        [*ChromeTrace(path)]
    assert str(caught.value).startswith(f"{path}: ") and len(str(caught.value)) < 500


def test_what_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (("missing", "No such file"), ("pipe", "not a regular file"), (".", "not a regular")):
        with pytest.raises(TraceError, match=reason):
            [*ChromeTrace(tmp_path / name)]


def test_more_than_is_read_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    path = written(tmp_path / "t.json.gz", EVENTS * 100)
    with pytest.raises(TraceError, match="more than 299 events: record fewer steps"):
        [*ChromeTrace(path, max_events=299)]
    with pytest.raises(TraceError, match="more than 10 kB: record fewer steps"):
        [*ChromeTrace(path, max_bytes=10_000)]


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    event = json.dumps(operation("aten::mm", 1, 1, args={"Call_stack": "x" * 1000}))
    with gzip.open(path, "wt", 1) as file:
        file.write('{"traceEvents": [' + ",".join([event] * 20_000) + "]}")
    tracemalloc.start()
    try:
        assert sum(1 for _ in ChromeTrace(path)) == 20_000
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
