"""A session as parquet, CSV and a trace: all of it, unchanged, and on one clock."""

from __future__ import annotations

import csv
import gzip
import json
import sqlite3
import sys
import zlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import trace_format
from measured_layers import window
from played import Played
from sessions import MS, Rank

from traceml_ray.agent.batch_size import packed
from traceml_ray.cli import main
from traceml_ray.exports import step_trace
from traceml_ray.exports.tables import TABLES
from traceml_ray.signals.layers.records import LayerSum
from traceml_ray.signals.output.records import Output
from traceml_ray.stages import SEGMENT_BITS, STAGES
from traceml_ray.store.schema import LISTS

FILES = {
    "collective_calls": "collectives",
    "logged_values": "logged",
    "lifecycle": "lifecycle",
    "rank_process": "ranks",
    "node": "nodes",
    "meta": "meta",
    "process_sample": "process_samples",
    "memory_sample": "memory_samples",
    "node_sample": "node_samples",
    "clock": "clocks",
    "span": "spans",
    "step_work": "work",
    "output": "output",
    "event": "events",
    "verdict": "verdicts",
}


class Apart(Played):
    """Two ranks whose rows reach their relay, but of which each begins at another time."""

    def rows(self, n: int) -> np.ndarray:
        rows = super().rows(n)
        if self.step == 0:
            rows[1, 0, 0] += 500 * MS
        return rows

    def _batch(self, rank: Rank, rows: np.ndarray, **fields: Any) -> bytes:
        output = Output(2, self.clock(), ["one", "two"], skipped=3)
        layers = [window({"": (1, 2), "mlp": (3, 4)}, number=self.step // 5, waits=True)]
        sizes = packed(
            [(self.step + index, 4, -1 if index else 64 * rank.identity.global_rank) for index in range(5)]
        )
        more = {"output": [output], "layers": layers, "sizes": sizes[: len(rows)]}
        return super()._batch(rank, rows, **more, **fields)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out")
    for name, given in (("host", {}), ("device", {"device": True})):
        played = Apart(out / name, 3, per_node=2, late=1, onset=5, **given)
        for _ in range(4):
            played.play(5)
        played.dies(2, -9, "RuntimeError: planted")
        played.end()
        played.aggregator.close()
    return out


def export(out: Path, name: str, kind: str, to: Path, *more: str) -> int:
    return main(["export", name, "--sessions", str(out), "--format", kind, "-o", str(to), *more])


def rows_of(out: Path, name: str) -> list[dict[str, Any]]:
    """The rows of the session file, decoded here once more."""
    expected = []
    with sqlite3.connect(out / name / "session.sqlite") as file:
        ranks = dict(file.execute("SELECT id, global_rank FROM rank_process"))
        chunks = file.execute(
            "SELECT process, first_row, keys, flags, rows, host_rows, leads FROM chunk ORDER BY id"
        )
        for process, first, keys, flags, rows, host, leads in chunks:
            for index, key in enumerate(np.frombuffer(keys, "<i8").tolist()):
                row = np.frombuffer(rows, "<i8").reshape(-1, 6)[index].tolist()
                hosts = np.frombuffer(host, "<i8").reshape(-1, 6)[index].tolist() if host else [None] * 6
                three = [*leads[3 * index : 3 * index + 3]] if leads else [None] * 3
                step, segment = key >> SEGMENT_BITS, key & 255
                head = {"run": "job", "rank": ranks[process], "process": process, "row": first + index}
                head |= {"step": step, "segment": segment, "flags": flags[index]}
                stages = {f"{stage}_ns": ns for stage, ns in zip(STAGES, row, strict=True)}
                beside = {f"host_{stage}_ns": ns for stage, ns in zip(STAGES, hosts, strict=True)}
                expected.append(
                    head | stages | beside | dict(zip(("late", "full", "sure"), three, strict=True))
                )
    return expected


def layers_of(file: sqlite3.Connection) -> list[dict[str, Any]]:
    """The layers of each window that is stored, decoded here once more."""
    expected = []
    for row in file.execute("SELECT * FROM layer_window ORDER BY process, number"):
        about = {name: row[name] for name in row.keys() if name not in ("id", "layers")}  # noqa: SIM118
        for layer in msgspec.msgpack.decode(zlib.decompress(row["layers"])):
            expected.append(about | dict(zip(LayerSum.__struct_fields__, layer, strict=True)))
    assert len(expected) == 3 * 4 * 2
    return expected


@pytest.mark.parametrize("name", ["host", "device"])
def test_parquet_is_the_session_file(out: Path, name: str, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert export(out, name, "parquet", tmp_path / "tables") == 0
    read = {path.stem: parquet.read_table(path) for path in (tmp_path / "tables").iterdir()}
    assert {*read} == {*TABLES}
    assert read["steps"].to_pylist() == rows_of(out, name)
    assert read["steps"].num_rows == 60
    with sqlite3.connect(out / name / "session.sqlite") as file:
        file.row_factory = sqlite3.Row
        for table, exported in FILES.items():
            stored = [dict(row) for row in file.execute(f"SELECT * FROM {table} ORDER BY rowid")]
            if "id" not in TABLES[exported].columns:
                stored = [{key: value for key, value in row.items() if key != "id"} for row in stored]
            assert read[exported].to_pylist() == stored, exported
        assert read["layers"].to_pylist() == layers_of(file)
        ranks = {row["id"]: row["global_rank"] for row in file.execute("SELECT * FROM rank_process")}
    sizes = [(row.pop("process"), row) for row in read["batch_sizes"].to_pylist()]
    for process, rank in ranks.items():
        wanted = [
            {"step": step, "samples": 4, "tokens": None if step % 5 else 64 * rank} for step in range(20)
        ]
        assert [row for owner, row in sizes if owner == process] == wanted
    assert {name for name, table in read.items() if not table.num_rows} == {
        "clocks",
        "shards",
        "experts",
        "collectives",
        "logged",
        "lifecycle",
        "life",
        "step_totals",
        "checks",
        "last_calls",
        "findings",
    }
    for exported, table in read.items():  # the kinds do not hang on what a session happens to hold
        kinds = {"integer": "int64", "real": "double", "text": "string"}
        assert [str(kind) for kind in table.schema.types] == [
            kinds[k] for k in TABLES[exported].columns.values()
        ]


def test_every_list_of_the_session_file_is_exported() -> None:
    """But for the sums of rows that were folded away, which mean nothing by themselves."""
    assert {*LISTS} - {*FILES} == {"chunk", "rollup", "step_sizes"}  # the last one is decoded
    for table, exported in FILES.items():
        assert {*TABLES[exported].columns} >= {*LISTS.get(table, ())}


def test_csv_is_the_session_file(out: Path, tmp_path: Path) -> None:
    assert export(out, "device", "csv", tmp_path / "tables", "--ranks", "1", "--steps", "3-8") == 0
    with (tmp_path / "tables" / "steps.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    wanted = [row for row in rows_of(out, "device") if row["rank"] == 1 and 3 <= row["step"] <= 8]
    assert rows == [{k: "" if v is None else str(v) for k, v in row.items()} for row in wanted]
    assert len([*(tmp_path / "tables").iterdir()]) == len(TABLES)


def test_trace_has_one_track_for_each_rank_and_stage_on_one_clock(out: Path, tmp_path: Path) -> None:
    assert export(out, "host", "perfetto", tmp_path / "trace.json.gz") == 0
    document = trace_format.check(tmp_path / "trace.json.gz")
    assert [*trace_format.processes(document).values()] == [
        "rank 0 (host-0)",
        "rank 1 (host-0)",
        "rank 2 (host-1)",
    ]
    events = document["traceEvents"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert Counter(tracks.values()) == dict.fromkeys(STAGES, 3)
    slices = [event for event in events if event["ph"] == "X"]
    assert all(tracks[e["pid"], e["tid"]] == e["name"] for e in slices)
    stored = {
        (row["rank"], row["step"], stage): row[f"{stage}_ns"]
        for row in rows_of(out, "host")
        for stage in STAGES
    }
    took = {(e["pid"] - 1, e["args"]["step"], e["name"]): e["dur"] * 1000 for e in slices}
    assert took == pytest.approx({key: ns for key, ns in stored.items() if ns}, abs=2)
    over: dict[int, list[float]] = defaultdict(list)  # all leave an exchange together
    for event in slices:
        if event["name"] == "sync_wait" and event["args"]["step"] > 0:
            over[event["args"]["step"]].append(event["ts"] + event["dur"])
    assert len(over) == 19 and max(max(ends) - min(ends) for ends in over.values()) < 1
    assert min(event["ts"] for event in slices) == 0


def test_clocks_that_run_apart_are_one_in_the_trace() -> None:
    """Each rank counts from its own first row; one clock is 100 ppm fast, and its rank lacks some rows."""
    steps = np.arange(5000)
    lines = {rank: step_trace._Line(rank, "node") for rank in (0, 1)}
    for rank, fast in ((0, 0.0), (1, 1e-4)):
        ends = np.rint((steps + 1) * 20 * MS * (1 + fast)).astype(np.int64)
        gone = (steps > 2000) & (steps <= 2010) & (rank == 1)
        ends = np.where(steps > 2000, ends - 200 * MS * (rank == 1), ends)
        lines[rank].edges = dict(zip(steps[~gone].tolist(), ends[~gone].tolist(), strict=True))
    step_trace._Lines._compare(None, lines[1], lines[0], {})  # type: ignore[arg-type]
    placed = np.array([lines[1].edges[step] for step in lines[1].steps.tolist()]) + lines[1].offsets
    apart = np.abs(placed - np.array([lines[0].edges[step] for step in lines[1].steps.tolist()]))
    near = np.abs(lines[1].steps - 2005) < 20
    assert apart[~near].max() < 0.1 * MS


def test_trace_of_some_steps_and_ranks_is_of_these(out: Path, tmp_path: Path) -> None:
    assert export(out, "host", "perfetto", tmp_path / "t.gz", "--ranks", "0,2", "--steps", "4") == 0
    events = json.loads(gzip.decompress((tmp_path / "t.gz").read_bytes()))["traceEvents"]
    assert {(e["pid"], e["args"]["step"]) for e in events if e["ph"] == "X"} == {(1, 4), (3, 4)}


def test_edges_are_kept_within_a_bound(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_trace, "_MOST_EDGES", 12)
    assert export(out, "host", "perfetto", tmp_path / "t.gz") == 0
    assert trace_format.check(tmp_path / "t.gz")


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (("--format", "perfetto", "--ranks", "7"), 1, "no step to draw"),
        (("--format", "csv", "--ranks", "x"), 2, "'x' is not a rank"),
        (("--format", "perfetto", "--run", "gone"), 2, "no run 'gone'"),
    ],
)
def test_what_cannot_be_exported_is_said_and_leaves_no_file(
    out: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, reason: str, capsys: Any
) -> None:
    assert main(["export", "host", "--sessions", str(out), "-o", str(tmp_path / "x"), *arguments]) == code
    assert reason in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


def test_a_place_that_cannot_be_written_to_is_refused_and_left_as_it_was(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script, session = tmp_path / "train.py", out / "host" / "session.sqlite"
    script.write_text("pass")
    before = session.read_bytes()
    for kind, to, why in (
        ("csv", Path("-"), "files are written"),
        ("perfetto", Path("-"), "files are written"),
        ("parquet", script, "it is a file"),
        ("perfetto", out, "it is a folder"),
        ("perfetto", Path("none/x.gz"), "there is no folder none"),
        ("perfetto", session, "it is the session itself"),
    ):
        assert export(out, "host", kind, to) == 1
        assert f"cannot export to {to}: {why}" in capsys.readouterr().err
    assert session.read_bytes() == before and [*tmp_path.iterdir()] == [script]


def test_parquet_without_pyarrow_says_what_to_install(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert export(out, "host", "parquet", tmp_path / "tables") == 1
    assert "parquet needs pyarrow (pip install pyarrow)" in capsys.readouterr().err


def test_session_of_an_older_version_is_exported_without_what_it_lacks(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    played = Apart(tmp_path / "old", 2, late=None)
    played.play(5)
    played.end()
    played.aggregator.close()
    with sqlite3.connect(tmp_path / "old" / "session.sqlite") as file:
        file.execute("ALTER TABLE span DROP COLUMN max_ns")
        file.execute("DROP TABLE clock")
    assert export(tmp_path, "old", "parquet", tmp_path / "tables") == 0
    spans, clocks = (
        parquet.read_table(tmp_path / "tables" / f"{name}.parquet") for name in ("spans", "clocks")
    )
    assert spans.num_rows and set(spans.column("max_ns").to_pylist()) == {None}
    assert None not in spans.column("total_ns").to_pylist() and clocks.num_rows == 0


def test_value_that_does_not_fit_its_column_is_named_and_the_file_is_not_called_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    played = Apart(tmp_path / "odd", 2, late=None)
    played.play(5)
    played.end()
    played.aggregator.close()
    with sqlite3.connect(tmp_path / "odd" / "session.sqlite") as file:
        file.execute("UPDATE span SET count = 'many'")
    assert export(tmp_path, "odd", "parquet", tmp_path / "tables") == 1
    errors = capsys.readouterr().err
    assert "table 'spans': column 'count' has a value that is not int64" in errors and "damaged" not in errors
    assert not (tmp_path / "tables" / "spans.parquet").exists()
    assert export(tmp_path, "odd", "csv", tmp_path / "csv") == 0
