"""The session file: what is written is read back, with cursors; what is no session is refused."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sessions import MS, SECOND, Clock, Rank, Relay, aggregation, ask, check_ledger

from traceml_ray.reports.status import render_status
from traceml_ray.signals.memory.records import MemorySample
from traceml_ray.signals.nodes.records import GpuSample, NodeSample
from traceml_ray.stages import FLAG_EXCLUDED, SEGMENT_BITS
from traceml_ray.store.retention import Retention
from traceml_ray.store.schema import SessionFileError, connect, on_network_filesystem, write
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.writer import SessionWriter
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire


def _stored(folder: Path, *messages: bytes) -> SessionFile:
    aggregator = aggregation(folder)
    for message in messages:
        aggregator.ingest(message)
    assert aggregator.commit()
    assert not aggregator.errors
    aggregator.close()
    return SessionFile(folder / "session.sqlite")


def test_rows_come_back_as_sent_with_cursor_and_limit(tmp_path: Path) -> None:
    aggregator, relay = aggregation(tmp_path), Relay()
    ranks = [Rank(0), Rank(1)]
    aggregator.ingest(relay.message(*(rank.batch(5, [1, 2, 3, 4, 5, 6 + rank.seq]) for rank in ranks)))
    aggregator.commit()
    with SessionFile(tmp_path / "session.sqlite") as session:
        chunk, cursor = session.rows()
        assert [(rows.rank, rows.node) for rows in chunk] == [(0, "host-0"), (1, "host-0")]
        assert (chunk[0].keys >> SEGMENT_BITS).tolist() == [0, 1, 2, 3, 4]
        assert chunk[0].flags.tolist() == [FLAG_EXCLUDED, 0, 0, 0, 0]
        assert (chunk[1].rows == np.array([1, 2, 3, 4, 5, 5]) * MS).all()
        assert session.rows(since=cursor) == ([], cursor)

        aggregator.ingest(relay.message(*(rank.batch(3) for rank in ranks)))
        aggregator.commit()
        later, cursor = session.rows(since=cursor)
        assert [(rows.keys >> SEGMENT_BITS).tolist() for rows in later] == [[5, 6, 7]] * 2
        newest = [rows for rows in session.rows(last=4)[0] if rows.rank == 1]
        assert [(rows.rank, len(rows.keys)) for rows in newest] == [(1, 4)]
        assert (newest[0].keys >> SEGMENT_BITS).tolist() == [4, 5, 6, 7]


def test_batch_fields_are_all_read_back(tmp_path: Path) -> None:
    gpus = [GpuSample(0, "H200", 90.0, 10, None)]
    sample = NodeSample(7, 50.0, 8, None, 1, 2, 3, 4, 5, 6, gpus)
    batch = Rank(0, 1).batch(
        2,
        process=wire.ProcessSample(9, None, 4096, 3, None, 1),
        spans=[
            wire.SpanSum("checkpoint", 0, 2, 30, 20, 1, 2),
            wire.SpanSum("checkpoint", 0, 1, 40, 40, 3, 3),
        ],
        events=[wire.Event("note", 11, 1, 2, "hello", {"x": 1})],
        open=wire.OpenStage(2, 1, 77),
        overhead=wire.Overhead(1, 2, 3, 4),
        missing={"h2d": "no device"},
        errors={"hook": 2},
        strategy="ddp",
    )
    message = Relay().message(batch, node=[sample], errors={"sampler": 1})
    with _stored(tmp_path, message) as session:
        (rank,) = session.processes()
        assert (rank.open_step, rank.open_stage, rank.open_elapsed_ns) == (2, 1, 77)
        assert (rank.marks_ns, rank.agent_cpu_ns, rank.agent_wall_ns, rank.sent_bytes) == (1, 2, 3, 4)
        assert (rank.missing, rank.errors, rank.strategy) == ({"h2d": "no device"}, {"hook": 2}, "ddp")
        assert rank.identity is not None
        assert (rank.identity.node_id, rank.identity.hostname) == ("node-0", "host-0")
        ((_, process),) = session.process_samples([rank.id], 2)
        assert session.memory() == {rank.id: (4096, 4096)}
        assert (process.rss_bytes, process.cpu_pct) == (4096, None)
        ((_, node),) = session.node_samples(["node-0"], 2)
        assert (node.load1, node.cpu_pct) == (None, 50.0)
        assert node.gpus == gpus
        (span,) = session.spans()
        assert (span["rank"], span["count"], span["total_ns"], span["max_ns"]) == (0, 3, 70, 40)
        (event,), _ = session.events()
        assert (event.rank, event.message, event.data) == (0, "hello", {"x": 1})
        assert session.cluster()[0].errors == {"sampler": 1}
        assert session.meta()["launcher"] == "torchrun"
        assert list(session.node_columns()["node-0"][0, "util_pct"]) == [90.0]


def test_query_of_the_last_steps_takes_no_longer_in_a_long_run(tmp_path: Path) -> None:
    work = []
    for batches in (20, 400):
        rank, sent = Rank(0, 1), []
        for batch in range(batches):
            part = wire.SpanSum("load", 1, 1, 100, 100, 10 * batch, 10 * batch + 9)
            sent.append(Relay(0, f"relay {batch}").message(rank.batch(10, spans=[part])))
        with _stored(tmp_path / str(batches), *sent) as session:
            counted: list[int] = []
            session._connection.set_progress_handler(lambda into=counted: into.append(1), 10)
            last = 10 * batches - 1
            (span,) = session.spans(last - 14, last)
            session._connection.set_progress_handler(None, 0)
            assert (span["count"], span["total_ns"], span["last_step"]) == (2, 150, last)
            work.append(len(counted))
    assert work[1] < 1.5 * work[0]


def test_node_is_shown_with_its_address_where_hostnames_repeat(tmp_path: Path) -> None:
    first, second = Relay(0), Relay(1)
    ranks = [Rank(0), Rank(1)]  # one hostname, two nodes
    with _stored(tmp_path, first.message(ranks[0].batch()), second.message(ranks[1].batch())) as session:
        assert [rows.node for rows in session.rows()[0]] == ["host-0 (10.0.0.1)", "host-0 (10.0.0.2)"]


def test_stored_session_is_one_private_file(tmp_path: Path) -> None:
    _stored(tmp_path, Relay().message(Rank(0).batch())).close()
    assert [path.name for path in tmp_path.iterdir()] == ["session.sqlite"]
    assert (tmp_path / "session.sqlite").stat().st_mode & 0o777 == 0o600


def test_files_that_are_no_session_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    with pytest.raises(SessionFileError, match=f"{path}: no such session file"):
        SessionFile(path)
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(SessionFileError, match="cannot use the session file"):
        SessionFile(path)
    path.unlink()
    sqlite3.connect(path).execute("CREATE TABLE t(x)").connection.close()
    with pytest.raises(SessionFileError, match="not a traceml-ray session"):
        SessionFile(path)


@pytest.mark.parametrize(("schema", "reason"), [(99, "a newer .*upgrade"), (1, "an older .*any more")])
def test_other_schema_is_refused(schema: int, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "session.sqlite"
    connection = connect(path, create=True)
    connection.execute(f"PRAGMA user_version = {schema}")
    connection.close()
    with pytest.raises(SessionFileError, match=reason):
        SessionFile(path)


def test_damaged_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    relay, rank = Relay(), Rank(0)
    _stored(tmp_path, *(relay.message(rank.batch(100)) for _ in range(50))).close()
    path = tmp_path / "session.sqlite"
    data = bytearray(path.read_bytes())
    data[8192:] = b"\xff" * (len(data) - 8192)
    path.write_bytes(data)
    with pytest.raises(SessionFileError, match=str(path)), SessionFile(path) as session:
        session.rows()
        session.events()


@pytest.mark.parametrize(("kind", "network"), [("ext4", False), ("nfs4", True), ("fuse.sshfs", True)])
def test_network_filesystems_are_recognised_by_their_mount(
    tmp_path: Path, kind: str, network: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mounts = tmp_path / "a b", tmp_path / "self" / "mounts"
    mounts.parent.mkdir()
    mount = str(folder).replace(" ", "\\040")
    mounts.write_text(
        f"/dev/sda / ext4 rw 0 0\n/dev/sdb {mount} ext3 rw 0 0\nserver:/x {mount} {kind} rw 0 0\n"
        f"server:/y {mount}c nfs rw 0 0\n"
    )
    monkeypatch.setattr("psutil.PROCFS_PATH", str(tmp_path))
    assert on_network_filesystem(folder / "session.sqlite") is network


@pytest.fixture(params=["local", "network"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of filesystem that a session file is taken to lie on."""
    on_network = request.param == "network"
    monkeypatch.setattr("traceml_ray.store.schema.on_network_filesystem", lambda _: on_network)
    return str(request.param)


def test_other_processes_read_while_the_session_is_written(tmp_path: Path, kind: str) -> None:
    aggregator, relay, rank = aggregation(tmp_path), Relay(), Rank(0)
    aggregator.ingest(relay.message(rank.batch(5)))
    assert aggregator.commit()
    assert bool(list(tmp_path.glob("*-wal"))) is (kind == "local")
    done = subprocess.run(
        [sys.executable, "-m", "traceml_ray.cli", "status", str(tmp_path)],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert "5 rows produced = 5 stored" in done.stdout, done.stderr
    aggregator.ingest(relay.message(rank.batch(5)))
    assert aggregator.commit()
    aggregator.finish(wire.Finish(codec.VERSION, 0))
    aggregator.close()
    assert check_ledger(tmp_path)["stored"] == 10


@pytest.mark.usefixtures("kind")
def test_query_inside_a_transaction_of_the_writer_sees_the_last_commit(tmp_path: Path) -> None:
    aggregator, relay, rank = aggregation(tmp_path), Relay(), Rank(0)
    aggregator.ingest(relay.message(rank.batch(5)))
    assert aggregator.commit()
    writer, answers = aggregator._writer, []
    with pytest.raises(KeyboardInterrupt), writer._transaction():
        writer._connection.execute("DELETE FROM rank_process")
        answers.append(ask(aggregator, "processes"))
        raise KeyboardInterrupt
    assert [process.stored for process in answers[0]] == [5]
    aggregator.close()


def test_finished_session_is_one_file_while_its_aggregator_lives(tmp_path: Path) -> None:
    aggregator = aggregation(tmp_path)
    aggregator.ingest(Relay().message(Rank(0).batch(5)))
    aggregator.finish(wire.Finish(codec.VERSION, 0))
    shutil.copy(tmp_path / "session.sqlite", tmp_path / "copy.sqlite")
    with SessionFile(tmp_path / "copy.sqlite") as session:
        assert session.ledger().stored == 5


def test_rows_stay_pending_within_the_bound_while_the_disk_refuses(tmp_path: Path) -> None:
    aggregator, relay, rank = aggregation(tmp_path, Clock()), Relay(), Rank(0, 1)
    writer: SessionWriter = aggregator._writer
    writer.max_pending_bytes = 40 * 57
    blocker = sqlite3.connect(tmp_path / "session.sqlite", isolation_level=None)
    writer._connection.execute("PRAGMA busy_timeout = 10")
    aggregator.commit()
    blocker.execute("BEGIN IMMEDIATE")
    for _ in range(10):
        aggregator.ingest(relay.message(rank.batch(10)))
        assert not aggregator.commit()
    assert aggregator.errors == {"commit: OperationalError": 10}
    blocker.execute("ROLLBACK")
    blocker.close()
    assert aggregator.commit()
    aggregator.ingest(relay.message(rank.batch(10)))
    aggregator.commit()
    count = check_ledger(tmp_path)
    assert count["produced"] == 110
    assert 0 < count["dropped"]["aggregator"] <= 70
    assert count["stored"] == 110 - count["dropped"]["aggregator"]
    aggregator.close()


def test_items_cut_while_the_disk_refuses_are_counted_by_kind(tmp_path: Path) -> None:
    aggregator, relay, rank = aggregation(tmp_path, Clock()), Relay(), Rank(0, 1)
    writer = aggregator._writer
    writer.max_pending_items = 5
    aggregator.commit()
    blocker = sqlite3.connect(tmp_path / "session.sqlite", isolation_level=None)
    writer._connection.execute("PRAGMA busy_timeout = 10")
    blocker.execute("BEGIN IMMEDIATE")
    for number in range(12):
        batch = rank.batch(
            events=[wire.Event("note", number)],
            spans=[wire.SpanSum("a", 1, 1, 5, 5, 0, 0)],
            process=wire.ProcessSample(number, 1.0, 1, 1, 0, 0),
            memory=[MemorySample(number, 1, None)],
        )
        aggregator.ingest(relay.message(batch, node=[NodeSample(number, *[None] * 9)]))
        assert not aggregator.commit()
    blocker.execute("ROLLBACK")
    blocker.close()
    assert aggregator.commit() and aggregator.commit()
    with SessionFile(tmp_path / "session.sqlite") as stored:
        samples = {f"{kind}_sample": f"{kind} sample" for kind in ("process", "memory", "node")}
        for table, name in {"event": "event", "span": "span", **samples}.items():
            kept = stored._all(f"SELECT count(*) FROM {table}")[0][0]
            lost = stored.meta()["errors"][f"{name}: not stored, no room"]
            done = 1 if table == "event" else 0  # of the commit that failed
            assert 0 < kept <= 5 and kept + lost == 12 + done
            line = f"{lost} × aggregator, {name}: not stored, no room"
            assert line in render_status(aggregator.query, tmp_path, None, 0)
    aggregator.close()
    again = aggregation(tmp_path)
    assert again.commit()
    assert again.errors["span: not stored, no room"] == lost
    again.close()


def test_commit_has_succeeded_where_only_folding_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aggregator, rank = aggregation(tmp_path), Rank(0)

    def refuse(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(Retention, "due", lambda _: True)
    monkeypatch.setattr(Retention, "fold", refuse)
    reply = aggregator.ingest(Relay().message(rank.batch(5)))
    assert aggregator.commit()
    assert aggregator.errors == {"fold: OperationalError": 1}
    assert check_ledger(tmp_path)["stored"] == 5
    assert reply
    aggregator.close()


def test_query_on_unchanged_data_reads_no_rows(tmp_path: Path) -> None:
    relay, rank = Relay(), Rank(0)
    with _stored(tmp_path, *(relay.message(rank.batch(100)) for _ in range(20))) as session:
        _, cursor = session.rows()
        asked: list[str] = []
        session._connection.set_trace_callback(asked.append)
        assert session.rows(since=cursor) == ([], cursor)
        assert len(asked) == 1
        assert "max(id)" in asked[0]


def test_sample_times_are_those_of_the_sender(tmp_path: Path) -> None:
    process = wire.ProcessSample(5 * SECOND, 1.0, 2, 3, 4, 5)
    with _stored(tmp_path, Relay().message(Rank(0).batch(process=process))) as session:
        assert session.process_samples([1], 1)[0][1].t_ns == 5 * SECOND


def test_long_tables_can_be_read_in_slices(tmp_path: Path) -> None:
    relay, ranks = Relay(), [Rank(0), Rank(1)]
    kinds = ("note", "stacks")
    events = [wire.Event(kind, t, message="x") for t, kind in enumerate(kinds)]
    messages = []
    for second in range(6):
        process = wire.ProcessSample(second, 1.0, second, 1, 0, 0)
        sample = NodeSample(second, 1.0, 1, None, 1, 2, 3, 4, 5, 6)
        batches = [rank.batch(2, process=process, events=events) for rank in ranks]
        messages.append(relay.message(*batches, node=[sample]))
    with _stored(tmp_path, *messages) as session:
        lengths, cursor, read = [], 0, -1
        while cursor != read:
            read = cursor
            rows, cursor = session.rows(since=read, most=4)
            lengths.append([len(part.keys) for part in rows])
        assert lengths == [[4, 4]] * 3 + [[]]
        newest, _ = session.rows(since=-2)
        assert [(part.keys >> SEGMENT_BITS).tolist() for part in newest] == [[10, 11]] * 2
        assert len({part.process_id for part in newest}) == 2
        assert {event.kind for event in session.events(brief=True)[0]} == {"note"}
        second = session.ranks()[1].id
        assert [(id, s.t_ns) for id, s in session.process_samples([second], 2)] == [(second, 4), (second, 5)]
        assert [(id, s.t_ns) for id, s in session.node_samples(["node-0", "node-9"], 2)] == [
            ("node-0", 4), ("node-0", 5),
        ]  # fmt: skip


def test_rows_are_written_as_they_are_in_any_number_and_with_any_values_left_out(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "rows.sqlite")
    connection.execute("CREATE TABLE some(id, a, b, c, d)")
    rows = [
        (n, None, b"" if n % 7 else bytes([n % 256]), None if n % 3 else b"x", "text" if n % 2 else 1.5)
        for n in range(700)
    ]
    for part in (rows[:1], rows[1:500], [], rows[500:]):
        write(connection, "INSERT INTO some VALUES ?", part)
    assert connection.execute("SELECT * FROM some ORDER BY id").fetchall() == rows
