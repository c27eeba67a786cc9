"""A session file has one writer: one before it writes nothing any more, wherever it was stopped."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sessions import Clock, Rank, Relay, aggregation, check_ledger, confirmed

from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.monitor.offline import finish_offline
from traceml_ray.settings import Settings
from traceml_ray.store.fence import Fenced
from traceml_ray.store.schema import connect
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.spool import write_spool

# Another process that writes the session, and stops in the middle: of a transaction, or of writing its pages.
WRITER = """
import sqlite3, sys, os, signal
from pathlib import Path
import traceml_ray.store.schema as schema
if sys.argv[2] == "network":
    schema.on_network_filesystem = lambda _: True
from sessions import Rank, Relay, aggregation
from traceml_ray.store.writer import SessionWriter
aggregator, relay, rank = aggregation(Path(sys.argv[1])), Relay(), Rank(0, 1)
aggregator.ingest(relay.message(rank.batch(10)))
assert aggregator.commit()
connection, write = aggregator._writer._connection, SessionWriter._write
def stop(self, *rows):
    with self._transaction():
        pass
    os.kill(os.getpid(), signal.SIGSTOP)
    write(self, *rows)
def stop_inside(self, *rows):
    run = self._connection
    class Stopping:
        in_transaction = property(lambda _: run.in_transaction)
        def execute(self, sql, *more):
            if sql == "COMMIT":
                if sys.argv[2] == "network":
                    run.execute("PRAGMA cache_size = 1")
                    run.execute("PRAGMA cache_spill = 1")
                    run.executemany("INSERT INTO event(message) VALUES(?)", [("x" * 4000,)] * 50)
                os.kill(os.getpid(), signal.SIGSTOP)
            return run.execute(sql, *more)
        def executemany(self, *what):
            return run.executemany(*what)
    self._connection = Stopping()
    write(self, *rows)
SessionWriter._write = {"before": stop, "inside": stop_inside}[sys.argv[3]]
aggregator.ingest(relay.message(rank.batch(20)))
committed = aggregator.commit()
aggregator.ingest(relay.message(rank.batch(5)))
again = aggregator.commit()
from traceml_ray.wire import codec, messages as wire
reply = codec.decode(aggregator.ingest(relay.message(seq=2)), wire.RelayReply)
aggregator.end(codec.encode(wire.Finish(codec.VERSION, 0, node_id="node-0")))
aggregator.endings.write_due()
print(committed, again, reply.stored_seq, aggregator.fenced, flush=True)
aggregator.close()
"""


@pytest.mark.parametrize("disk", ["local", "network"])
@pytest.mark.parametrize("where", ["before", "inside"])
def test_stopped_writer_that_goes_on_changes_nothing(tmp_path: Path, disk: str, where: str) -> None:
    folder, spool = tmp_path / "session", tmp_path / "spool"
    spool.mkdir()
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), disk, where],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        _, status = os.waitpid(writer.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        rank = Rank(0, 1)
        batches = [rank.batch(10), rank.batch(20), rank.batch(0, final=True)]
        write_spool(spool / f"{rank.process_id}.spool", batches[1:])
        finish_offline(folder, Settings(), wire.Finish(codec.VERSION, 1), spool)
        before = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".sqlite-shm"}
        writer.send_signal(signal.SIGCONT)
        output, _ = writer.communicate(timeout=240)
    finally:
        writer.kill()
        writer.wait()
    assert output.split() == ["False", "False", "1", "True"]  # nothing more is said to be stored
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert after["summary.json"] == before["summary.json"]
    assert after["report.txt"] == before["report.txt"]
    assert after["report.html"] == before["report.html"]
    count = check_ledger(folder)
    assert (count["stored"], count["produced"], count["in_flight"]) == (30, 30, 0)
    summary = json.loads(after["summary.json"])
    assert (summary["session"]["status"], summary["session"]["exit_code"]) == ("failed", 1)
    assert {name for name in after if not name.startswith("session.sqlite-")} == {
        "session.sqlite", "summary.json", "report.txt", "report.html"
    }  # fmt: skip
    with connect(folder / "session.sqlite") as stored:
        assert stored.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert stored.execute("SELECT value FROM meta WHERE key = 'status'").fetchone() == ('"failed"',)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[], AggregatorCore]]:
    """Aggregators on the same folder, as Ray makes one anew while the one before still runs."""
    made: list[AggregatorCore] = []

    def another() -> AggregatorCore:
        made.append(aggregation(tmp_path, Clock()))
        return made[-1]

    yield another
    for aggregator in made:
        aggregator.close()


def test_new_aggregator_fences_the_one_before(tmp_path: Path, opened: Callable[[], AggregatorCore]) -> None:
    first, relay, rank = opened(), Relay(), Rank(0, 1)
    sent = relay.message(rank.batch(5))
    first.ingest(sent)
    assert first.commit()
    second = opened()
    again = relay.message(rank.batch(7))
    assert confirmed(first.ingest(again)) == 1
    assert not first.commit() and first.fenced and not second.fenced
    assert confirmed(first.ingest(again)) == 1
    second.ingest(again)
    assert second.commit() and confirmed(second.ingest(again)) == 2
    with pytest.raises(Fenced):
        first.finish(wire.Finish(codec.VERSION, 1))
    assert not (tmp_path / "summary.json").exists()
    assert [*first.errors] == ["commit: Fenced"]
    assert check_ledger(tmp_path)["stored"] == 12


def test_reports_of_a_fenced_aggregator_do_not_replace_later_ones(
    tmp_path: Path, opened: Callable[[], AggregatorCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, relay, rank = opened(), Relay(), Rank(0, 1)
    first.ingest(relay.message(rank.batch(5)))
    put = first._writer.put

    def late(files: dict[Path, bytes]) -> None:
        finish_offline(tmp_path, Settings(), wire.Finish(codec.VERSION, 1))
        put(files)

    monkeypatch.setattr(first._writer, "put", late)
    with pytest.raises(Fenced):
        first.finish(wire.Finish(codec.VERSION, 0))
    summary = json.loads((tmp_path / "summary.json").read_bytes())
    assert summary["session"]["exit_code"] == 1
    assert not list(tmp_path.glob("*.tmp"))


def test_missing_session_file_is_no_fence_and_confirms_no_rows(
    tmp_path: Path, opened: Callable[[], AggregatorCore]
) -> None:
    first, relay, rank = opened(), Relay(), Rank(0, 1)
    (tmp_path / "session.sqlite").rename(tmp_path / "elsewhere")
    sent = relay.message(rank.batch(5))
    first.ingest(sent)
    assert not first.commit() and not first.fenced
    assert confirmed(first.ingest(sent)) == 0
    (tmp_path / "elsewhere").rename(tmp_path / "session.sqlite")
    assert first.commit() and confirmed(first.ingest(sent)) == 1


@pytest.fixture
def unclaimed(
    opened: Callable[[], AggregatorCore], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], AggregatorCore]:
    """An aggregator that was opened while the disk was full, so that it could not claim the file."""

    def full(_: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    def open_() -> AggregatorCore:
        with monkeypatch.context() as patch:
            patch.setattr("traceml_ray.store.fence.claim", full)
            return opened()

    return open_


def test_file_that_cannot_be_claimed_yet_is_claimed_by_its_first_transaction(
    opened: Callable[[], AggregatorCore], unclaimed: Callable[[], AggregatorCore]
) -> None:
    first = opened()
    assert first.commit()
    second = unclaimed()
    assert second.commit() and second.commit()
    assert not first.commit() and first.fenced and not second.fenced


def test_writer_that_could_not_claim_does_not_write_over_what_came_since(
    tmp_path: Path, opened: Callable[[], AggregatorCore], unclaimed: Callable[[], AggregatorCore]
) -> None:
    """What it knows of the file is out of date: the next message would be stored a second time."""
    first, relay, rank = opened(), Relay(), Rank(0, 1)
    first.ingest(relay.message(rank.batch(5)))
    assert first.commit()
    second, sent = unclaimed(), relay.message(rank.batch(7))
    first.ingest(sent)
    assert first.commit()  # nobody has claimed the file
    second.ingest(sent)  # the answer was lost
    assert not second.commit() and second.fenced and not first.fenced
    assert check_ledger(tmp_path)["stored"] == 12
    third = opened()
    assert confirmed(third.ingest(sent)) == 2


def test_writer_that_could_not_claim_stays_out_of_a_session_that_a_later_one_has_ended(
    tmp_path: Path, opened: Callable[[], AggregatorCore], unclaimed: Callable[[], AggregatorCore]
) -> None:
    rank = Rank(0, 1)
    first = opened()
    first.ingest(Relay().message(rank.batch(30)))
    assert first.commit()
    second = unclaimed()
    finish_offline(tmp_path, Settings(), wire.Finish(codec.VERSION, 1))
    before = (tmp_path / "session.sqlite").read_bytes()
    second.ingest(Relay(incarnation="later").message(rank.batch(20)))
    assert not second.commit() and second.fenced
    assert (tmp_path / "session.sqlite").read_bytes() == before
    assert check_ledger(tmp_path)["stored"] == 30


def test_failed_commits_of_its_own_fence_no_writer(
    tmp_path: Path, unclaimed: Callable[[], AggregatorCore]
) -> None:
    """Before it has claimed the file as well as afterwards."""
    writer, relay, rank = unclaimed(), Relay(), Rank(0, 1)
    connection = writer._writer._connection
    for _ in range(2):
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
        writer.ingest(relay.message(rank.batch(1000)))
        assert not writer.commit() and not writer.commit() and not writer.fenced
        connection.execute(f"PRAGMA max_page_count = {1 << 30}")
        assert writer.commit() and writer.commit()
    assert check_ledger(tmp_path)["stored"] == 2000
