"""Records of signals on their way: encoded once, taken through one door, stored, and read again."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest
from messages import RECORDS
from played import Played
from sessions import Clock, Rank, Relay, aggregation

from traceml_ray.agent.outbox import BatchDraft, Unsent
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.errors import Errors
from traceml_ray.exports.tables import TABLES
from traceml_ray.monitor.offline import finish_offline
from traceml_ray.reports.summary import summarize
from traceml_ray.settings import Settings
from traceml_ray.signals.experts.records import EXPERTS, MAX_ROUTERS, RouterTokens
from traceml_ray.signals.goodput.totals import RankTotals
from traceml_ray.signals.kinds import KINDS, OF_RECORD, encoded
from traceml_ray.signals.nodes.records import NODE, GpuProcess, GpuSample, NodeSample
from traceml_ray.signals.output.records import OUTPUT, Output
from traceml_ray.signals.sharding.records import SHARDING, Sharding, UnevenShard
from traceml_ray.signals.throughput.records import WORK, StepWork
from traceml_ray.store.schema import SessionFileError, connect
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.writer import SessionWriter
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.spool import write_spool

GPU = GpuSample(0, "H200", 98.0, 1, 2, throttle=["gpu_idle"], processes=[GpuProcess(7, 5)])
TOTALS = RankTotals(99, 1 << 62, 1 << 40, 1 << 41, [(0, 63, 1 << 40), (64, 64, 0)])
EVERY = [
    *RECORDS,
    TOTALS,
    NodeSample(1, 50.0, 8, 0.5, 1, 2, 3, 4, 5, None, [GPU]),
    NodeSample(2, *[None] * 9),
]


def test_every_kind_is_tried_here_and_has_names_of_its_own() -> None:
    assert {type(record) for record in EVERY} == {kind.record for kind in KINDS.values()}
    for names in ("name", "table", "exported", "lost"):
        assert len({getattr(kind, names) for kind in KINDS.values()}) == len(KINDS)
    assert {kind.exported for kind in KINDS.values()} <= {*TABLES}


@pytest.mark.parametrize("record", EVERY, ids=lambda record: type(record).__name__)
def test_record_that_was_stored_is_as_it_was_sent(record: Any, tmp_path: Path) -> None:
    kind = OF_RECORD[type(record)]
    (raw,) = encoded([record])[kind.name]
    assert kind.decode(raw) == record
    writer = SessionWriter(tmp_path / "session.sqlite")
    writer.add_record(kind, 7 if kind.scope == "process" else "node-7", record)
    writer.commit()
    with writer.reader() as file:
        assert [(owner, one) for _, owner, one in file.records(kind)] == [
            (7 if kind.scope == "process" else "node-7", record)
        ]
    writer.close()


def test_records_that_a_rank_left_in_the_spool_are_stored(tmp_path: Path) -> None:
    """By the aggregator, and by whoever ends the session without it."""
    for name, take in (("live", _taken), ("offline", _finished)):
        folder = tmp_path / name
        rank = Rank(0, 1)
        by_kind: dict[str, list[Any]] = {}
        for record in RECORDS:
            by_kind.setdefault(OF_RECORD[type(record)].name, []).append(record)
        aggregator = aggregation(folder, Clock())
        (tmp_path / f"{name}-spool").mkdir()
        write_spool(tmp_path / f"{name}-spool" / "a.spool", [rank.batch(1, **by_kind)])
        take(aggregator, folder, tmp_path / f"{name}-spool")
        with SessionFile(folder / "session.sqlite") as file:
            for kind, sent in by_kind.items():
                assert [one for _, _, one in file.records(KINDS[kind])] == sent, kind


def _taken(aggregator: Any, _: Path, spool: Path) -> None:
    assert aggregator.ingest_spool(spool) and aggregator.commit() and not aggregator.errors
    aggregator.close()


def _finished(aggregator: Any, folder: Path, spool: Path) -> None:
    aggregator.close()
    finish_offline(folder, Settings(), wire.Finish(codec.VERSION, 0), spool)


def test_record_that_cannot_be_read_costs_itself_and_is_counted(tmp_path: Path) -> None:
    aggregator, relay, work = aggregation(tmp_path, Clock()), Relay(), StepWork(0, 4, 5, 5)
    bad, odd = msgspec.Raw(msgspec.msgpack.encode([1, 2])), msgspec.Raw(msgspec.msgpack.encode("odd"))
    sent = encoded([work])["work"]
    records = {"work": [bad, *sent], "of a newer version": [odd, odd], "node": sent}
    aggregator.ingest(relay.message(Rank(0).batch(5, records=records), records={"work": sent}))
    aggregator.commit()
    assert dict(aggregator.errors) == {"sizes of batches: malformed": 1, "records: unknown_kind": 4}
    with SessionFile(tmp_path / "session.sqlite") as file:
        assert [one for _, _, one in file.records(WORK)] == [work] and [*file.records(NODE)] == []
        assert file.ledger().stored == 5


def test_record_of_a_newer_version_is_read_without_its_last_fields(tmp_path: Path) -> None:
    aggregator = aggregation(tmp_path, Clock())
    newer = msgspec.msgpack.encode([*msgspec.structs.astuple(StepWork(0, 4, 5, 5)), "more"])
    aggregator.ingest(Relay().message(Rank(0).batch(5, records={"work": [msgspec.Raw(newer)]})))
    aggregator.commit()
    with SessionFile(tmp_path / "session.sqlite") as file:
        assert [one for _, _, one in file.records(WORK)] == [StepWork(0, 4, 5, 5)]


def test_record_that_would_be_refused_or_has_no_room_costs_itself_only() -> None:
    errors = Errors()
    unsent, draft = Unsent(errors), BatchDraft(errors)
    unsent.add(
        [StepWork(0, -1, 1, 1), StepWork(1, 1, 1, 1), Output(1, 0, ["x" * 40_000]), Output(1, 0, ["x"])]
    )
    assert unsent.move_into(draft) == {"work": 1, "output": 1} and not unsent
    assert [len(some) for some in draft.fields["records"].values()] == [1, 1]
    assert (
        errors["sizes of batches not sent: malformed"] == errors["lines of output not sent: too_large"] == 1
    )


def test_records_that_do_not_fit_go_with_the_next_batches_in_order() -> None:
    errors = Errors()
    unsent = Unsent(errors)
    unsent.add(Output(1, n, [f"{n} " + "x" * 4000]) for n in range(40))
    unsent.add([StepWork(n, n, 1, 1) for n in range(2000)])
    seen: dict[str, list[int]] = {"work": [], "output": []}
    while unsent:
        draft = BatchDraft(errors)
        amounts = unsent.move_into(draft)
        assert amounts == {name: len(some) for name, some in draft.fields["records"].items()} != {}
        assert draft.row_bytes > 8 * 1024, "rows have room beside them"
        for raw in draft.fields["records"].get("work", ()):
            seen["work"].append(WORK.decode(raw).first_step)
        for raw in draft.fields["records"].get("output", ()):
            seen["output"].append(OUTPUT.decode(raw).t_ns)
    assert seen == {"work": [*range(2000)], "output": [*range(40)]} and not errors


def test_records_that_a_process_makes_up_do_not_grow_a_table_of_few(tmp_path: Path) -> None:
    writer = SessionWriter(tmp_path / "session.sqlite")
    for number in range(5):
        writer.add_record(EXPERTS, 1, RouterTokens(3, f"router {number}", [number]))
        writer.commit()
    writer.add_record(EXPERTS, 2, RouterTokens(3, "other", [7]))
    writer.commit()
    with writer.reader() as file:
        assert [one.tokens for one in file.records_of(EXPERTS)[1]] == [[4]]
        assert [one.name for one in file.records_of(EXPERTS, [2])[2]] == ["other"]
    writer.close()
    with pytest.raises(codec.WireError, match="malformed"):
        EXPERTS.decode(encoded([RouterTokens(MAX_ROUTERS, "one more", [])])["experts"][0])


def test_older_file_without_a_kind_or_some_of_its_fields_is_read_and_goes_on(tmp_path: Path) -> None:
    played = Played(tmp_path / "demo", 2, per_node=2, late=None)
    for _ in range(3):
        played.play()
    played.aggregator.close()
    path = tmp_path / "demo" / "session.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE router")
        connection.execute("ALTER TABLE step_work DROP COLUMN total_steps")
        connection.execute("ALTER TABLE output DROP COLUMN by_relay")
        connection.execute("INSERT INTO output(process, stream, t_ns, lines) VALUES(1, 1, 5, 'a line')")
    connection.close()
    with SessionFile(path) as file:
        (_, _, work), *_ = file.records(WORK)
        assert work.total_steps is None and [*file.records(EXPERTS)] == []
        assert [one for _, _, one in file.records(OUTPUT)] == [Output(1, 5, ["a line"])]
    again = Played(tmp_path / "demo", 2, per_node=2, late=None)
    again.begin(attempt=1)
    again.play(5, experts=[RouterTokens(0, "router", [1])], work=[StepWork(0, 4, 5, 5, total_steps=9)])
    again.aggregator.close()
    with SessionFile(path) as file:
        assert [*file.records(WORK)][-1][2].total_steps == 9 and len([*file.records(EXPERTS)]) == 2


def test_importing_what_a_rank_sends_brings_no_numpy() -> None:
    import subprocess
    import sys

    code = "import sys, traceml_ray.signals.collectors; print('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_shards_and_experts_of_an_older_file_are_read_and_stay_when_it_goes_on(tmp_path: Path) -> None:
    """They were in a table `sharding`, as JSON, and in a column of `rank_process`."""
    routers = [RouterTokens(0, "first", [7, 9]), RouterTokens(1, "second", [1])]
    shard = Sharding(2, 10, 40, 0, 10, 4, 1, 1, [4], [], {}, {}, uneven=[UnevenShard("w", 3, 1, 4)], steps=5)
    played = Played(tmp_path / "demo", 2, per_node=2, late=None)
    played.play(experts=routers, sharding=[shard])
    played.aggregator.close()
    path = tmp_path / "demo" / "session.sqlite"
    with SessionFile(path) as file:
        before = summarize(file, Thresholds())
    assert before.experts and before.sharding
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE router")
        connection.execute("DROP TABLE shard")
        connection.execute("CREATE TABLE sharding(process PRIMARY KEY, body)")
        connection.execute("ALTER TABLE rank_process ADD COLUMN experts")
        body = msgspec.json.encode(shard).decode()
        tokens = json.dumps({one.name: one.tokens for one in routers})
        for (process,) in connection.execute("SELECT id FROM rank_process").fetchall():
            connection.execute("INSERT INTO sharding VALUES(?, ?)", (process, body))
            connection.execute("UPDATE rank_process SET experts = ? WHERE id = ?", (tokens, process))
        connection.commit()
    for writing in (False, True, False):
        if writing:
            connect(path, create=True).close()
        with SessionFile(path) as file:
            assert file.records_of(EXPERTS) == {1: routers, 2: routers}
            assert file.records_of(SHARDING) == {1: [shard], 2: [shard]}
            assert summarize(file, Thresholds()) == before


def test_older_file_whose_shards_make_no_sense_says_that_it_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "session.sqlite"
    with contextlib.closing(connect(path, create=True)) as connection:
        connection.execute("DROP TABLE shard")
        connection.execute("CREATE TABLE sharding(process PRIMARY KEY, body)")
        connection.execute("INSERT INTO sharding VALUES(1, '{}')")
    with pytest.raises(SessionFileError, match="damaged"):
        SessionFile(path)
