"""A session file is read where nothing may be written, whatever state its writer left it in."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sessions import Rank, Relay, aggregation

from traceml_ray import cli
from traceml_ray.store import reader
from traceml_ray.store.schema import SessionFileError
from traceml_ray.store.session import DATABASE
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

NOBODY = 65534


@pytest.fixture
def out(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that other users reach, and that TMPDIR is not in."""
    with tempfile.TemporaryDirectory(prefix="traceml-test-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "tmp").mkdir()
        (folder / "tmp").chmod(0o777)
        monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
        yield folder
        reader._copies.remove()


@contextlib.contextmanager
def nothing_may_be_written(folder: Path) -> Iterator[None]:
    """Nobody may write to a folder and what is in it. Root, whom no mode stops, is another user meanwhile."""
    root = os.geteuid() == 0
    for path in (*folder.iterdir(), folder):
        if root:
            os.chown(path, NOBODY, NOBODY)
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        if root:
            os.seteuid(NOBODY)
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o700)


def finished(folder: Path) -> Path:
    """A session that is over, with 30 rows."""
    aggregator, rank = aggregation(folder), Rank(0, 1)
    aggregator.ingest(Relay().message(rank.batch(30), rank.batch(0, final=True)))
    aggregator.finish(wire.Finish(codec.VERSION, 0))
    aggregator.close()
    return folder


def killed_in_a_transaction(folder: Path, to: Path) -> None:
    """Copy a session as SIGKILL leaves it while pages are written: with the journal that undoes it."""
    with contextlib.closing(sqlite3.connect(folder / DATABASE, isolation_level=None)) as connection:
        connection.execute("PRAGMA cache_size = 1")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("DELETE FROM chunk")
        connection.executemany("INSERT INTO event(message) VALUES(?)", [("x" * 4000,)] * 50)
        shutil.copytree(folder, to)
        connection.execute("ROLLBACK")
    assert (to / f"{DATABASE}-journal").stat().st_size > 0


def stored(folder: Path) -> int:
    with SessionFile(folder / DATABASE) as session:
        rows = sum(len(keys) for _, _, keys, *_ in session.chunks()) // 8
        assert session.ledger().stored == rows
        return rows


def test_commands_read_a_session_whose_last_transaction_was_cut_off(
    out: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    whole, cut = finished(out / "whole"), out / "cut"
    killed_in_a_transaction(whole, cut)
    for command in ("status", "report"):  # imports what another user may not reach
        assert cli.main([command, str(whole)]) == 0
    assert not caplog.records
    before = {path.name: path.read_bytes() for path in cut.iterdir()}
    with nothing_may_be_written(cut):
        for command in ("status", "report"):
            assert cli.main([command, str(cut)]) == 0
        assert stored(cut) == 30
        (copies,) = (out / "tmp").iterdir()
    assert "30 rows produced = 30 stored" in capsys.readouterr().out
    (line,) = caplog.messages  # once, however often it is opened
    assert line.startswith(f"traceml-ray: {cut / DATABASE}: ") and line.endswith(str(copies))
    assert {path.name: path.read_bytes() for path in cut.iterdir()} == before
    reader._copies.remove()
    assert not [*(out / "tmp").iterdir()]


def test_copy_is_made_anew_when_the_file_has_changed(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    killed_in_a_transaction(finished(out / "whole"), out / "cut")
    with nothing_may_be_written(out / "cut"):
        assert stored(out / "cut") == 30
    os.utime(out / "cut" / DATABASE, ns=(0, 0))
    with nothing_may_be_written(out / "cut"):
        assert stored(out / "cut") == stored(out / "cut") == 30
        assert len([*(out / "tmp").iterdir()]) == 1
    assert len(caplog.records) == 2


def test_write_ahead_log_without_its_shared_memory_is_read(out: Path) -> None:
    aggregator = aggregation(out / "live")
    aggregator.ingest(Relay().message(Rank(0, 1).batch(20)))
    assert aggregator.commit()
    shutil.copytree(out / "live", out / "killed", ignore=shutil.ignore_patterns("*-shm"))
    aggregator.close()
    with nothing_may_be_written(out / "killed"):
        assert stored(out / "killed") == 20


def test_file_that_needs_no_repair_is_read_in_place(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In WAL mode, as a view that has it open at the end leaves it."""
    folder = finished(out / "odd name?#%")
    with contextlib.closing(sqlite3.connect(folder / DATABASE)) as connection:
        assert connection.execute("PRAGMA journal_mode = WAL").fetchone() == ("wal",)
    assert not (folder / f"{DATABASE}-wal").exists()
    with nothing_may_be_written(folder):
        assert stored(folder) == 30
        assert not [*(out / "tmp").iterdir()]
    assert not caplog.records


def test_missing_room_for_a_copy_is_an_error_that_names_it(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    killed_in_a_transaction(finished(out / "whole"), out / "cut")
    monkeypatch.setattr(shutil, "copyfile", full)
    with nothing_may_be_written(out / "cut"), pytest.raises(SessionFileError, match=r"No space left.*TMPDIR"):
        stored(out / "cut")
    assert not [*(out / "tmp").iterdir()]


def test_copies_are_bounded(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_COPIES", 1)
    whole = finished(out / "whole")
    for name in ("a", "b"):
        killed_in_a_transaction(whole, out / name)
    with nothing_may_be_written(out / "a"):
        first = SessionFile(out / "a" / DATABASE)
    with first, nothing_may_be_written(out / "b"):
        assert stored(out / "b") == 30
        assert len([*(out / "tmp").iterdir()]) == 1
        assert first.ledger().stored == 30  # still open
