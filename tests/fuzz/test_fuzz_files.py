"""Files that are not what they are called: session files, live.json, summary.json, spools, locks, …"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import sqlite3
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import BOMBS, bounded, fuzz, json_values, limited, mutated
from hypothesis import example, given
from hypothesis import strategies as st
from played import Played

from traceml_ray import cli
from traceml_ray.analysis.step_history import begun
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import RankRows
from traceml_ray.dash_app.app import Refresher
from traceml_ray.dash_app.elements import keys_of
from traceml_ray.dash_app.listing import choose
from traceml_ray.dash_app.pages import sessions
from traceml_ray.dash_app.route import Route
from traceml_ray.dash_app.session_pages import SessionPages
from traceml_ray.launchers import control
from traceml_ray.reports.listing import entries
from traceml_ray.store import query, session
from traceml_ray.store.history_reader import pack, unpack
from traceml_ray.store.schema import NONSENSE, SessionFileError
from traceml_ray.store.session import Live
from traceml_ray.store.session_file import SessionFile
from traceml_ray.views.source import SourceError, StoredSource, _attachment
from traceml_ray.wire.spool import read_spool, write_spool

SECONDS = 60.0
MIB = 512
"""Of a session file of 200 kB whose bytes make no sense."""


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stored session with everything in it."""
    folder = tmp_path_factory.mktemp("out") / "good"
    played = Played(folder, 2, late=1)
    for _ in range(8):
        played.play(5)
    played.end()
    return folder


def run_cli(*argv: str) -> tuple[int, str, str]:
    """The exit code of the command line and what it says, as in a terminal that takes UTF-8 alone."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, err
    try:
        code = cli.main(argv)
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.stdout, sys.stderr = before
    texts = []
    for process in (out, err):
        process.flush()
        texts.append(process.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return code, texts[0], texts[1]


def read_all(folder: Path) -> None:
    """Every way to read a session gives an answer, or its own error in one line."""
    with bounded(SECONDS), limited(MIB):
        commands = ("report",), ("report", "--json", "--run", "job"), ("status",), ("analyze",)
        for command in commands:
            code, _, error = run_cli(command[0], str(folder), *command[1:])
            assert code in (0, 2) and error.count("\n") == (code == 2), error
        with contextlib.suppress(SessionFileError), SessionFile(folder / "session.sqlite") as file:
            for clock in file.clocks().values():
                assert len(clock.to_aggregator(np.array([0, 1 << 60]))[0]) == 2
            for samples in file.memory_samples()[0]:
                assert (np.diff(samples.t_ns) >= 0).all() and len(samples.step) == len(samples.t_ns) > 0
        with contextlib.suppress(SourceError):
            pages = SessionPages(StoredSource(folder))
            pages.poll()
            for page in ("/", "/events", "/ledger", "/sessions", "/rank/0"):
                assert Refresher(pages).refresh(page, "", {})[1]["set"]


@fuzz(0.3)
@given(st.data())
def test_session_file_with_changed_bytes_is_read_or_refused(
    good: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("bad")
    whole = bytearray((good / "session.sqlite").read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "head", "zeros"]))
    if kind == "cut":
        del whole[data.draw(st.integers(0, len(whole))) :]
    elif kind == "head":
        whole[:200] = data.draw(mutated(bytes(whole[:200])))
    elif kind == "zeros":
        begin = data.draw(st.integers(0, len(whole)))
        whole[begin : begin + 4096] = bytes(len(whole[begin : begin + 4096]))
    else:
        for begin in data.draw(st.lists(st.integers(100, len(whole) - 1), min_size=1, max_size=200)):
            whole[begin] ^= 1 << data.draw(st.integers(0, 7))
    (folder / "session.sqlite").write_bytes(whole)
    read_all(folder)
    shutil.rmtree(folder)


TABLES = [
    "meta",
    "node",
    "rank_process",
    "relay",
    "chunk",
    "process_sample",
    "memory_sample",
    "node_sample",
    "clock",
    "span",
    "event",
    "verdict",
]
values = (
    st.none() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats() | st.binary(max_size=60)
    | st.sampled_from(["", "{}", "[]", "null", "1", '{"label": 3}', "nonsense", "[" * 5000, "job", "\x1b[2J"])
)  # fmt: skip


@fuzz(0.7)
@given(st.data())
def test_session_file_with_changed_values_is_read_or_refused(
    good: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A file that SQLite has nothing against, with values in it that nobody wrote."""
    folder = tmp_path_factory.mktemp("bad")
    shutil.copy(good / "session.sqlite", folder)
    with contextlib.closing(sqlite3.connect(folder / "session.sqlite")) as changed, changed:
        for table in data.draw(st.lists(st.sampled_from(TABLES), min_size=1, max_size=3)):
            columns = [row[1] for row in changed.execute(f"PRAGMA table_info({table})")]
            column, value = data.draw(st.sampled_from(columns)), data.draw(values)
            some = (
                data.draw(st.sampled_from(["true", "rowid % 2 = 0"]))
                if table not in ("meta", "relay")
                else "true"
            )
            with contextlib.suppress(sqlite3.Error):  # it may not be unique
                changed.execute(f"UPDATE {table} SET {column} = ? WHERE {some}", (value,))
    read_all(folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("sql", [f"DROP TABLE {table}" for table in TABLES] + [
    "ALTER TABLE rank_process DROP COLUMN job_id", "ALTER TABLE chunk RENAME COLUMN rows TO rows2",
    "PRAGMA user_version=99", "PRAGMA application_id=0", "DELETE FROM meta", "DELETE FROM node",
    "DELETE FROM rank_process",
])  # fmt: skip
def test_session_file_of_another_schema_is_read_or_refused(good: Path, tmp_path: Path, sql: str) -> None:
    shutil.copy(good / "session.sqlite", tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "session.sqlite", isolation_level=None)) as changed:
        changed.execute(sql)
    read_all(tmp_path)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def folder_there(path: Path) -> None:
    path.mkdir()


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def unreadable(path: Path) -> None:
    path.touch(mode=0)


ODD = [fifo, loop, folder_there, dangling, device, unreadable]


@pytest.mark.parametrize("make", ODD)
def test_session_folder_with_special_files_is_read_or_refused(
    good: Path, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    with bounded(SECONDS), limited(MIB):
        make(tmp_path / "session.sqlite")
        read_all(tmp_path)
        folder = tmp_path / "out" / "s"
        folder.mkdir(parents=True)
        shutil.copy(good / "session.sqlite", folder)
        for name in ("live.json", "summary.json", ".lock", "session.sqlite-wal"):
            make(folder / name)
        read_all(folder)
        assert run_cli("report", str(folder))[0] in (0, 2)
        assert entries(str(folder.parent))[0].name == "s"
        assert session.holder(folder) is None
        assert _attachment(folder) is None
        with pytest.raises(control.ControlError, match="not live"):
            control.stop(folder)
        make(tmp_path / "a.spool")
        with contextlib.suppress(OSError):
            assert read_spool(tmp_path / "a.spool") == []


LIVE = {"pid": 1, "socket": "/nowhere/relay.sock", "address": "127.0.0.1:1"}
pieces = [b"[" * 50_000, b"null", b"1e999", b"\\u0000", b"\\ud800", b'"' + b"x" * 300 + b'"', b'"/"', b'""']


@fuzz()
@given(mutated(json.dumps(LIVE).encode(), pieces) | json_values.map(lambda value: json.dumps(value).encode()))
@example(json.dumps({**LIVE, "socket": "a\0b"}).encode())
@example(json.dumps({**LIVE, "socket": "/"}).encode())
@example(json.dumps({**LIVE, "socket": "x" * 200}).encode())
@example(b"[" * 100_000)
def test_live_json_of_any_bytes_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    folder = tmp_path_factory.mktemp("live")
    (folder / session.LIVE).write_bytes(data)
    with bounded(SECONDS, 16):
        _attachment(folder)
        with pytest.raises(control.ControlError) as error:
            control.stop(folder)
        assert len(str(error.value)) < 2000
    shutil.rmtree(folder)


@fuzz()
@given(mutated(b'{"address": "127.0.0.1:1", "temp_dir": "", "environ": {"A": null}}', pieces))
def test_attach_json_of_any_bytes_leaves_a_usable_address(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    folder = tmp_path_factory.mktemp("live")
    session.write_live(folder, Live(**{**LIVE, "socket": str(folder / "relay.sock")}))  # type: ignore[arg-type]
    (folder / "attach.json").write_bytes(data)
    with bounded(SECONDS, 16):
        attachment = _attachment(folder)
    assert attachment is not None and isinstance(attachment.address, str)
    shutil.rmtree(folder)


@st.composite
def summaries(draw: st.DrawFn, whole: dict[str, Any]) -> bytes:
    """A summary in which some of the values are others."""
    for _ in range(draw(st.integers(1, 4))):
        block = draw(st.sampled_from(["", "session", "steps", "stages", "verdict", "verdict"]))
        if not block or not isinstance(whole.get(block), dict):
            whole[block or draw(st.sampled_from(sorted(whole)))] = draw(json_values)
        else:
            whole[block][draw(st.sampled_from(sorted(whole[block]) or ["x"]))] = draw(json_values)
    return json.dumps(whole).encode()


@fuzz(0.5)
@given(st.data())
def test_summary_json_of_any_contents_does_not_break_the_session_list(
    good: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("out") / "s"
    shutil.copytree(good, folder)
    whole = (good / "summary.json").read_bytes()
    text = data.draw(mutated(whole[:2000], pieces) | summaries(json.loads(whole)))
    (folder / "summary.json").write_bytes(text)
    with bounded(SECONDS), limited(MIB):
        (entry,) = entries(str(folder.parent))
        assert entry.name == "s"
        rows = [sessions._listed(entry, 0)]
        chosen = choose(rows, Route("sessions"), sessions._words, keys_of(sessions._COLUMNS))
        assert sessions.layout({"chosen": chosen, "states": {}}, Route("sessions"))
        with contextlib.suppress(SourceError):
            (verdict,) = query.ask(StoredSource(folder).reply, [query.GetVerdict()])
            assert isinstance(verdict.label, str)
    shutil.rmtree(folder.parent)


@fuzz()
@given(st.data())
def test_spool_with_changed_bytes_is_read_within_its_size(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    frames = data.draw(st.lists(st.binary(max_size=50), max_size=4))
    write_spool(folder / "a.spool", frames)
    assert read_spool(folder / "a.spool") == frames
    (folder / "a.spool").write_bytes(data.draw(mutated((folder / "a.spool").read_bytes())))
    with bounded(mib=8):
        assert sum(map(len, read_spool(folder / "a.spool"))) <= (folder / "a.spool").stat().st_size
    shutil.rmtree(folder)


def folded(steps: range) -> list[RankRows]:
    keys = np.array([step << 8 for step in steps])
    rows = np.random.default_rng(1).gamma(20, 1e5, (2, len(keys), 6)).astype(np.int64)
    return [RankRows(rank, "host", keys, np.zeros(len(keys), np.uint8), rows[rank]) for rank in range(2)]


def kept() -> bytes:
    run = begun(folded(range(200)), Thresholds(), None)
    run.add(folded(range(200)), (0, 1), 0, 2)
    return zlib.decompress(pack(run))


@fuzz()
@given(mutated(kept(), BOMBS))
def test_kept_statistics_of_any_bytes_are_used_or_refused(data: bytes) -> None:
    with bounded(SECONDS), limited(MIB), contextlib.suppress(*NONSENSE):
        statistics = unpack(zlib.compress(data), folded(range(1)))
        if statistics is not None:
            statistics.add(folded(range(200, 400)), (0, 1), 0, 2)
            statistics.finish(2)
            assert statistics.replay is not None
            statistics.replay.done().run_verdict()
            stats = statistics.history.stats()
            assert stats is None or stats.stages().shape[1] == 6
