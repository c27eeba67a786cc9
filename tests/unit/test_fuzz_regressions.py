"""What foreign bytes once broke: each found by tests/fuzz, each kept from coming back."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from sessions import Clock, Rank, Relay, aggregation, identity

from traceml_ray import cli
from traceml_ray.files import read_file
from traceml_ray.launchers import control, torchrun
from traceml_ray.reports.listing import entries
from traceml_ray.settings import SettingError, Settings
from traceml_ray.signals.nodes.records import NodeSample
from traceml_ray.store import query, session
from traceml_ray.store.rank_processes import RankProcess, world_size
from traceml_ray.store.schema import SessionFileError, legible
from traceml_ray.text import one_line
from traceml_ray.views.source import StoredSource, _attachment
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire


def stored(folder: Path) -> Path:
    aggregator, relay, rank = aggregation(folder), Relay(), Rank(0, 1)
    aggregator.ingest(relay.message(rank.batch(60)))
    aggregator.finish(wire.Finish(codec.VERSION, 0))
    aggregator.close()
    return folder


def change(folder: Path, sql: str, *values: Any) -> None:
    with contextlib.closing(sqlite3.connect(folder / "session.sqlite")) as changed, changed:
        changed.execute(sql, values)


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE rank_process SET world_size = 391226345",  # it took gigabytes
        "UPDATE rank_process SET global_rank = -1",
        "UPDATE meta SET value = 'x' WHERE key = 'session'",
        "UPDATE meta SET value = '1.5'",
        "UPDATE chunk SET rows = x'00'",
        "UPDATE chunk SET flags = NULL",
    ],
)
def test_invalid_values_in_a_session_file_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sql: str
) -> None:
    change(stored(tmp_path / "s"), sql)
    assert cli.main(["report", str(tmp_path / "s")]) == 2
    output = capsys.readouterr()
    assert str(tmp_path / "s") in output.err and "the session file is damaged" in output.err
    assert (output.out, output.err.count("\n")) == ("", 1)


def test_session_file_errors_keep_their_text() -> None:
    with pytest.raises(SessionFileError, match="as it was"), legible(Path("x")):
        raise SessionFileError("as it was")


def test_world_size_claimed_by_a_launcher_is_bounded() -> None:
    assert world_size({}, 1 << 62) == 1 << 20
    assert world_size({0: RankProcess(1, "a", identity(0, 4))}, 1 << 62) == 4


@pytest.mark.parametrize("last", [-1 << 10, -6 << 10, -1 << 63, (1 << 63) - 1])
def test_last_row_with_an_impossible_step_does_not_keep_the_report_from_being_written(
    last: int, tmp_path: Path
) -> None:
    keys = b"".join(key.to_bytes(8, "little", signed=True) for key in (0, last))
    aggregator = aggregation(tmp_path / "s")
    batch = Rank(0, 4).batch(0, keys=keys, flags=bytes(2), rows=bytes(96), produced=2)
    aggregator.ingest(Relay().message(batch))
    aggregator.finish(wire.Finish(codec.VERSION, 0))
    assert not aggregator.errors


def test_infinite_samples_do_not_keep_the_report_from_being_written(tmp_path: Path) -> None:
    clock, relay = Clock(), Relay()
    aggregator = aggregation(tmp_path / "s", clock)
    nothing = [None] * 8
    for cpu in (float("inf"), 1.7e308, 1.7e308):
        sample = NodeSample(clock(), cpu, *nothing)  # type: ignore[arg-type]
        aggregator.ingest(relay.message(Rank(0, 1).batch(1), node=[sample]))
    aggregator.finish(wire.Finish(codec.VERSION, 0))
    aggregator.close()
    assert "n/a" in (tmp_path / "s" / "report.txt").read_text()


@pytest.mark.parametrize("name", ["OUT", "RING_ROWS", "SESSION", "INTERVAL"])
def test_undecodable_bytes_are_no_setting(name: str) -> None:
    with pytest.raises(SettingError, match=f"TRACEML_{name}="):
        Settings.load({f"TRACEML_{name}": os.fsdecode(b"caf\xe9")})


def test_fifo_in_a_session_folder_is_not_read(tmp_path: Path) -> None:
    stored(tmp_path / "s")
    for name in ("live.json", ".lock", "x"):
        (tmp_path / "s" / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / "s" / name)
    (tmp_path / "s" / "summary.json").unlink()
    os.mkfifo(tmp_path / "s" / "summary.json")
    assert session.holder(tmp_path / "s") is None
    assert _attachment(tmp_path / "s") is None
    assert entries(str(tmp_path))[0].label is None
    assert query.ask(StoredSource(tmp_path / "s").reply, [query.GetVerdict()])[0].label == "healthy"
    with pytest.raises(OSError, match="not a regular file"):
        read_file(tmp_path / "s" / "x", 10)
    (tmp_path / "y").write_bytes(b"x" * 11)
    with pytest.raises(OSError, match="larger than 10 bytes"):
        read_file(tmp_path / "y", 10)


@pytest.mark.parametrize("socket", ["", "/", "a\\u0000b", "x" * 300])
def test_live_json_with_an_unusable_path_still_gives_the_address(tmp_path: Path, socket: str) -> None:
    text = f'{{"pid": 1, "socket": "{socket}", "address": "127.0.0.1:1"}}'
    (tmp_path / "live.json").write_text(text)
    attachment = _attachment(tmp_path)
    assert attachment is not None and attachment.address == "127.0.0.1:1"
    with pytest.raises(control.ControlError, match="does not answer"):
        control.stop(tmp_path)


def test_sessions_are_listed_though_one_is_moved_away_and_one_is_very_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(stored(tmp_path / "s") / "summary.json", (0, 0))
    there = [tmp_path / name / "session.sqlite" for name in ("moved", "s")]
    monkeypatch.setattr(Path, "glob", lambda *_: there)
    listed = entries(str(tmp_path))
    assert [(entry.name, entry.label) for entry in listed] == [("s", "healthy"), ("moved", None)]


@pytest.mark.parametrize("summary", ["[]", '{"verdict": 3}', '{"steps": {"median_ms": "x"}}', "[" * 100_000])
def test_foreign_summary_is_ignored(tmp_path: Path, summary: str) -> None:
    (stored(tmp_path / "s") / "summary.json").write_text(summary)
    assert entries(str(tmp_path))[0].label is None
    assert query.ask(StoredSource(tmp_path / "s").reply, [query.GetVerdict()])[0].label == "healthy"


@pytest.mark.parametrize("given", ["\n", "\x1b[2J", "x" * 5000, "caf\udce9"])
def test_invalid_arguments_are_reported_in_one_line(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", given]) == 2
    output = capsys.readouterr().err
    assert output.count("\n") == 1 and output.rstrip("\n").isprintable()


def test_master_address_that_cannot_be_a_name_has_no_free_port() -> None:
    assert torchrun._port_is_free("é" * 100, 1) is False


def test_script_with_an_impossible_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert torchrun.main(["x" * 5000]) == 2
    assert "there is no script xxx" in capsys.readouterr().err


def test_control_characters_are_escaped_in_one_line() -> None:
    assert one_line("a\nb\x1b[2J é \udce9") == "a\\nb\\u001b[2J é \\udce9"
