"""A session taken away while it runs: a whole copy in pieces, and nothing else of the folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sessions import Clock, Rank, Relay, aggregation, ask, check_ledger

from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.store.query import QueryError
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire


def _download(aggregator: AggregatorCore, name: str, n: int = 1000) -> bytes:
    data = b""
    while chunk := ask(aggregator, "read_file", name=name, offset=len(data), n=n):
        assert len(chunk) <= n
        data += chunk
    return data


@pytest.mark.parametrize("shared", [False, True])
def test_copy_is_whole_though_rows_keep_arriving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    monkeypatch.setattr("traceml_ray.store.schema.on_network_filesystem", lambda _: shared)
    live, away = tmp_path / "live", tmp_path / "away"
    aggregator, relay, rank = aggregation(live, Clock()), Relay(), Rank(0, 1)
    aggregator.ingest(relay.message(rank.batch(100)))  # not committed yet
    copy = ask(aggregator, "snapshot")
    assert (live / copy).stat().st_mode & 0o777 == 0o600
    aggregator.ingest(relay.message(rank.batch(50)))
    aggregator.commit()
    away.mkdir()
    (away / "session.sqlite").write_bytes(_download(aggregator, copy, 7000))
    assert (away / "session.sqlite").stat().st_size == (live / copy).stat().st_size
    assert (away / "session.sqlite").read_bytes()[
        18:20
    ] == b"\1\1"  # not WAL: reads where nothing can be written
    assert check_ledger(away)["stored"] == 100
    assert [path.name for path in away.iterdir()] == ["session.sqlite"]
    assert json.loads(_download(aggregator, "summary.json"))["ledger"]["stored"] == 100
    assert _download(aggregator, "report.txt").startswith(b"traceml-ray")
    assert ask(aggregator, "read_file", name="report.txt", offset=(1 << 63) - 1, n=9) == b""
    (live / "report.txt").unlink()
    with pytest.raises(QueryError, match=r"no report\.txt yet"):
        ask(aggregator, "read_file", name="report.txt", offset=0, n=9)
    assert not any("query" in place for place in aggregator.errors)
    ask(aggregator, "discard", name=copy)
    assert not list(live.glob("snapshot-*"))


def test_files_that_are_no_copies_cannot_be_read(tmp_path: Path) -> None:
    aggregator = aggregation(tmp_path / "live")
    (tmp_path / "secret").write_text("x")
    for name in (
        "../secret",
        "session.sqlite",
        str(tmp_path / "secret"),
        "snapshot-../../secret.sqlite",
        "",
    ):
        with pytest.raises(QueryError, match="no file called"):
            ask(aggregator, "read_file", name=name, offset=0, n=9)


def test_copies_are_limited_in_number(tmp_path: Path) -> None:
    aggregator = aggregation(tmp_path)
    made = [ask(aggregator, "snapshot") for _ in range(6)]
    assert sorted(path.name for path in tmp_path.glob("snapshot-*")) == sorted(made[-3:])
    aggregator.close()


def test_copies_are_removed_at_restart_and_finish(tmp_path: Path) -> None:
    aggregator = aggregation(tmp_path)
    for _ in range(2):
        ask(aggregator, "snapshot")
    assert len(list(tmp_path.glob("snapshot-*"))) == 2
    aggregator.close()
    restarted = aggregation(tmp_path)
    assert not list(tmp_path.glob("snapshot-*"))
    ask(restarted, "snapshot")
    restarted.finish(wire.Finish(codec.VERSION, 0))
    assert not list(tmp_path.glob("snapshot-*"))
