"""Foreign bytes as recordings of memory: they are read, or refused with a reason in one line."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fuzzing import bounded, fuzz, json_values, limited, mutated
from hypothesis import given
from hypothesis import strategies as st
from stormlog_example import BEGAN_NS, MIB, events, level

from traceml_ray.identity import RankFilterError, rank_filter
from traceml_ray.reports.analyze import AnalyzeError, analyze, render_analysis, to_json

SECONDS = 60.0
MEMORY_MIB = 512
RECORDS = events(level(1, 8), rank=1, world=2) + events(level(0, 8), rank=0, world=2, outside=90 * MIB)
TIMELINE = {
    "timestamps": [BEGAN_NS / 1e9 + second for second in range(8)],
    "allocated": level(0, 8),
    "rank": 1,
}
LEGACY = [
    {"timestamp": BEGAN_NS / 1e9 + second, "memory_allocated": second * MIB, "rank": 0} for second in range(8)
]
PIECES = [b"[" * 50_000, b'{"a":' * 20_000, b"9" * 5000, b"null", b"-1", b"1e308", b"NaN", b"\0", b'"', b"\n"]


def as_csv(records: list[dict[str, Any]]) -> bytes:
    file = io.StringIO(newline="")
    rows = csv.DictWriter(file, records[0].keys())
    rows.writeheader()
    rows.writerows(records)
    return file.getvalue().encode()


FILES = {
    "events.json": json.dumps(RECORDS).encode(),
    "one.json": json.dumps({"telemetry_events": RECORDS[:4]}).encode(),
    "legacy.json": json.dumps(LEGACY).encode(),
    "events.jsonl": "".join(json.dumps(record) + "\n" for record in RECORDS).encode(),
    "events.csv": as_csv(RECORDS),
    "telemetry_timeline.json": json.dumps(TIMELINE).encode(),
}


def analyzed(folder: Path) -> None:
    """What is in the folder is analyzed, in text and JSON, or there is a reason."""
    with bounded(SECONDS), limited(MEMORY_MIB):
        try:
            analysis = analyze(folder)
        except AnalyzeError as error:
            assert 0 < len(str(error)) < 2000
            return
        json.loads(to_json(analysis))
        assert render_analysis(analysis).endswith("\n")
        assert all(0 < len(source.reason) < 1000 for source in analysis.refused)


@pytest.mark.parametrize("name", FILES)
@fuzz(0.5)
@given(data=st.data())
def test_changed_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("in")
    (folder / name).write_bytes(data.draw(mutated(FILES[name], PIECES)))
    (folder / "manifest.json").write_bytes(data.draw(st.binary(max_size=30)))
    analyzed(folder)
    shutil.rmtree(folder)


values = json_values | st.sampled_from([0, 1, 2, 1 << 20, 1 << 53, (1 << 63) - 1, 1 << 63, -1, 1e308, ""])


@pytest.mark.parametrize("suffix", ["json", "csv"])
@fuzz()
@given(data=st.data())
def test_records_with_other_values_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("in")
    records = [dict(record) for record in RECORDS]
    for _ in range(data.draw(st.integers(1, 5))):
        changed = data.draw(st.sampled_from(records))
        changed[data.draw(st.sampled_from([*RECORDS[0]]))] = data.draw(values)
    text = as_csv(records) if suffix == "csv" else json.dumps(records).encode()
    (folder / f"x.{suffix}").write_bytes(text)
    analyzed(folder)
    shutil.rmtree(folder)


@fuzz()
@given(data=st.data())
def test_timeline_with_other_values_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("in")
    timeline = dict(TIMELINE)
    numbers = st.lists(st.floats() | st.integers(0, 1 << 64) | st.none(), min_size=8, max_size=8)
    for name in data.draw(st.lists(st.sampled_from(["timestamps", "allocated", "reserved", "rank"]))):
        timeline[name] = data.draw(numbers | json_values)
    (folder / "telemetry_timeline.json").write_text(json.dumps(timeline))
    analyzed(folder)
    shutil.rmtree(folder)


@fuzz()
@given(st.text(max_size=30) | st.text("0123456789,- al", max_size=20))
def test_rank_filter_of_any_text_is_read_or_refused(text: str) -> None:
    with bounded(SECONDS, 4):
        try:
            assert isinstance(3 in rank_filter(text), bool)
        except RankFilterError as error:
            assert len(str(error)) < 2000
