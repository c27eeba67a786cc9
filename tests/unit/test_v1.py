"""Messages of TraceML's own format, alone, and through a relay and an aggregator into a session's files."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from sessions import Clock, NoSamples, Straight, aggregation, check_ledger
from snapshot import Snapshot

from traceml_ray.importers import v1
from traceml_ray.monitor.relay import RelayCore
from traceml_ray.settings import Settings
from traceml_ray.stages import (
    FLAG_DEVICE_CLOCK,
    FLAG_INSEPARABLE,
    FLAG_NO_BACKWARD,
    FLAG_NO_DATA,
    FLAG_NO_FORWARD,
    FLAG_NO_SPLIT,
    FORWARD,
    N_STAGES,
    SEGMENT_BITS,
)
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

INTERNAL = "_traceml_internal:"
NS = 1_000_000
SAMPLE = {"seq": 1, "ts": 1.8e9, "pid": 7, "cpu": 90.5, "cpu_cores": 4, "ram_used": 2.0e9, "ram_total": 8e9}
UNTOLD = FLAG_NO_SPLIT | FLAG_INSEPARABLE


def times(ms: float, **more: Any) -> dict[str, Any]:
    return {"cpu": {"is_gpu": False, "duration_ms": ms, "n_calls": 1, **more}}


def step(number: int, **ms: Any) -> dict[str, Any]:
    """A row of StepTimeTable; by default all that TraceML times."""
    ms = ms or {
        "dataloader_next": 5.0, "h2d_time": 1.0, "forward_time": 3.0, "backward_time": 6.0,
        "optimizer_step": 2.0, "step_time": 13.5,
    }  # fmt: skip
    events = {INTERNAL + name: times(value) for name, value in ms.items()}
    return {"seq": number, "timestamp": 1.8e9, "step": number, "events": events}


def message(*steps: Any, rank: Any = 0, samples: Any = (), tables: Any = None, **more: Any) -> dict[str, Any]:
    made = {"StepTimeTable": list(steps)} if steps else {}
    made.update({"ProcessTable": list(samples)} if samples else {})
    made.update(tables or {})
    return {"rank": rank, "sampler": "StepTimeSampler", "timestamp": 1.8e9, "tables": made, **more}


def encode(sent: Any) -> bytes:
    return msgspec.msgpack.encode(sent)


def read(sent: Any, senders: v1.Senders | None = None, pid: int = 4242) -> list[wire.RankBatch]:
    """The batches of a message of which nothing is refused."""
    messages = list((senders or v1.Senders("run")).read(encode(sent), pid, 9))
    assert all(isinstance(batch, wire.RankBatch) for batch in messages), messages
    for batch in messages:
        assert codec.decode(codec.encode(batch), wire.RankBatch) == batch
        assert batch.produced == batch.first_row + len(batch.flags) + batch.dropped
    return messages


def refusals(data: bytes) -> list[str]:
    messages = list(v1.Senders("run").read(data, 1, 9))
    return [error.reason for error in messages if isinstance(error, codec.WireError)]


def rows(batch: wire.RankBatch) -> list[list[float]]:
    return (np.frombuffer(batch.rows, "<i8").reshape(-1, N_STAGES) / NS).tolist()


def test_step_becomes_a_row_of_six_stages() -> None:
    (batch,) = read(message(step(7)))
    assert rows(batch) == [[3.5, 5, 1, 3, 6, 0]]  # 13.5 less 1, 3 and 6: of that the optimizer has 2
    assert np.frombuffer(batch.keys, "<i8").tolist() == [7 << SEGMENT_BITS]
    assert list(batch.flags) == [UNTOLD]
    assert (batch.produced, batch.dropped, batch.first_row, batch.sent_ns) == (1, 0, 0, 9)
    who = batch.identity
    assert who is not None
    assert (who.global_rank, who.node_rank, who.hostname, who.nnodes) == (0, 0, "localhost", 1)
    assert (who.pid, who.source, who.job_id) == (4242, "v1", "run")
    assert not batch.errors


@pytest.mark.parametrize(
    ("ms", "row", "flags"),
    [
        ({"forward_time": 3.0}, [0, 0, 0, 3, 0, 0], FLAG_NO_DATA | FLAG_NO_BACKWARD),
        ({"step_time": 4, "backward_time": 3}, [1, 0, 0, 0, 3, 0], FLAG_NO_DATA | FLAG_NO_FORWARD),
        (
            {"dataloader_next": 1, "forward_time": 3, "backward_time": 4,
             "optimizer_step": 2, "step_time": 5},
            [2, 1, 0, 3, 4, 0],  # the parts are longer than the whole, as a device's are: none is negative
            0,
        ),
    ],
)  # fmt: skip
def test_stages_that_were_not_timed_set_a_flag(ms: dict[str, float], row: list[float], flags: int) -> None:
    (batch,) = read(message(step(1, **ms)))
    assert rows(batch) == [row]
    assert batch.flags[0] == UNTOLD | flags


def test_cpu_clock_is_used_where_it_is_there() -> None:
    stage_times = {
        "cuda:0": {"is_gpu": True, "duration_ms": 50.0, "cpu_ms": 2.0, "gpu_ms": 50.0, "n_calls": 1}
    }
    device = {"cuda:0": {"is_gpu": True, "duration_ms": 50.0}, "cuda:1": {"is_gpu": True, "duration_ms": 1.0}}
    one, other = step(1), step(2)
    one["events"][f"{INTERNAL}forward_time"] = stage_times
    other["events"][f"{INTERNAL}forward_time"] = device
    (batch,) = read(message(one, other))
    assert [row[FORWARD] for row in rows(batch)] == [2, 51]
    assert list(batch.flags) == [UNTOLD, UNTOLD | FLAG_DEVICE_CLOCK]


def test_rows_are_numbered_for_each_rank_of_each_process() -> None:
    senders = v1.Senders("run")
    (first,) = read(message(step(1), step(2)), senders)
    (second,) = read(message(step(3)), senders)
    assert (second.process_id, second.seq, second.first_row, second.produced) == (first.process_id, 1, 2, 3)
    others = read([message(step(1), rank=1), message(step(1), rank=2)], senders)
    assert len({first.process_id, *(batch.process_id for batch in others)}) == 3
    assert read(message(step(1)), senders, pid=5)[0].process_id != first.process_id
    senders.forget(4242)
    assert read(message(step(4)), senders)[0].process_id != first.process_id


def test_process_samples_are_converted_and_bounded() -> None:
    odd = {"ts": 1.8e9, "cpu": float("nan"), "ram_used": 0.0}
    one, two, three = read(
        message(step(1), samples=[SAMPLE, odd, {**SAMPLE, "ts": -1.0}, {**SAMPLE, "ram_used": 1e300}])
    )
    assert one.process == wire.ProcessSample(1_800_000_000_000_000_000, 90.5, 2_000_000_000, None, None, None)
    assert two.process == wire.ProcessSample(1_800_000_000_000_000_000, None, None, None, None, None)
    assert three.process is not None and three.process.rss_bytes is None
    assert [len(batch.flags) for batch in (one, two, three)] == [1, 0, 0]
    assert three.errors == {"v1 sample: malformed": 1}
    many = read(message(samples=[SAMPLE] * 500))
    assert len(many) == v1.MAX_SAMPLES


def test_unknown_fields_are_ignored_and_counted_by_name() -> None:
    named = step(1)
    named["events"] |= {"tokenize": times(1), "odd": "not even times"}
    sent = message({**named, "new": 1}, tables={"LayerTimeTable": [1, 2]}, hostname="a", session_id=None)
    (batch,) = read(sent)
    assert rows(batch) == [[3.5, 5, 1, 3, 6, 0]]
    assert batch.errors == {
        "v1 field: hostname": 1,
        "v1 field: session_id": 1,
        "v1 table: LayerTimeTable": 1,
        "v1 event: tokenize": 1,
        "v1 event: odd": 1,
        "v1 field of a step: new": 1,
    }
    senders = v1.Senders("run")
    for index in range(50):
        (batch,) = read(
            message(
                tables={f"\x1b[2J{index}" + "x" * 2000: [] for index in range(index * 20, index * 20 + 20)}
            ),
            senders,
        )
    assert len(batch.errors) == v1.MAX_NAMES + 1
    assert sum(batch.errors.values()) == 1000
    assert all(name.isprintable() and len(name) < 80 for name in batch.errors)


BAD_ROWS: list[Any] = [
    None, 1, [], {}, {"step": 1}, {"step": 1, "events": {}}, {"step": 1, "events": {"mine": times(1)}},
    step(-1), step(1 << 56), step(1, forward_time=-1e-9), step(1, forward_time=float("nan")),
    step(1, forward_time=float("inf")), step(1, forward_time=1e9), step(1, forward_time=1 << 64 - 1),
    {**step(1), "step": 1.5}, {**step(1), "step": True}, {**step(1), "step": "1"}, {**step(1), "events": []},
    {"step": 1, "events": {f"{INTERNAL}forward_time": {"cpu": {"duration_ms": "3"}}}},
    {"step": 1, "events": {f"{INTERNAL}forward_time": {"a": {"duration_ms": 5}, "b": {"duration_ms": -1}}}},
]  # fmt: skip


def test_invalid_rows_are_dropped_and_counted() -> None:
    for bad in BAD_ROWS:
        (batch,) = read(message(step(1), bad, step(2)))
        assert (len(batch.flags), batch.produced, batch.dropped) == (2, 3, 1), bad
        assert batch.errors["v1 row: malformed"] == 1
    (batch,) = read(message(*[0] * 5000))
    assert (len(batch.flags), batch.dropped, batch.errors["v1 row: too_many"]) == (0, 5000, 1)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (message(step(1), _v=2), "wrong_version"),
        (message(step(1), _v=0), "wrong_version"),
        (message(step(1), _v="1"), "wrong_version"),
        (message(step(1), _v=True), "wrong_version"),
        (message(step(1), _v=None), "wrong_version"),
        (message(step(1), _v=[[[1]]]), "wrong_version"),
        ({}, "malformed"),
        ({"rank": 0, "tables": {}}, "malformed"),
        ({"meta": {"rank": 0}, "body": {"tables": {}}}, "malformed"),
        ({1: 2}, "malformed"),
        (message(step(1), rank=-1), "malformed"),
        (message(step(1), rank=1 << 40), "malformed"),
        (message(step(1), rank=None), "malformed"),
        (message(step(1), rank=1.0), "malformed"),
        ({**message(), "tables": []}, "malformed"),
        ({**message(), "sampler": 3}, "malformed"),
        (message(tables={"StepTimeTable": {}}), "malformed"),
        (message(tables={"x" * 70_000: []}), "too_large"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_messages_are_refused_with_a_reason(sent: Any, reason: str) -> None:
    assert v1.is_v1(encode(sent))
    assert refusals(encode(sent)) == [reason]


def test_one_invalid_entry_of_a_list_does_not_spoil_the_others() -> None:
    messages = list(v1.Senders("run").read(encode([message(step(1)), 7, message(step(1), rank=1)]), 1, 9))
    assert [type(part) for part in messages] == [wire.RankBatch, codec.WireError, wire.RankBatch]
    assert refusals(encode([{}] + [0] * 5000))[0] == "too_many"


def test_version_1_is_distinguished_from_version_2() -> None:
    batch = read(message(step(1)))[0]
    for data in (b"", b"\x90", b"\xdc\x00", b"\xdd\x00\x00\x00\x01", codec.encode(batch), b"\xc1", b"{}"):
        assert not v1.is_v1(data)
    for sent in ({}, [{}], message(step(1)), [message()] * 20, {str(n): n for n in range(20)}):
        assert v1.is_v1(encode(sent))
    for data in (b"\x81", b"\xdf\xff\xff\xff\xff", b"\x91\xdf\xff\xff\xff\xff\x01", b"\x81\xa1" * 20_000):
        assert v1.is_v1(data) and refusals(data) == ["malformed"]
    deep = encode(message())[:-1] + b"\x81\xa1x" + b"\x91" * 60_000 + b"\xc0"
    assert refusals(deep) == ["malformed"]


def test_senders_are_bounded() -> None:
    senders = v1.Senders("run")
    for rank in range(v1.MAX_SENDERS):
        read(message(rank=rank), senders)
    (error,) = senders.read(encode(message(rank=v1.MAX_SENDERS)), 4242, 9)
    assert isinstance(error, codec.WireError) and error.reason == "too_many"
    read(message(step(1), rank=3), senders)


# -- through a relay and an aggregator ---------------------------------------------------------------


class Bench:
    """A relay and an aggregator whose clocks only move when told to."""

    def __init__(self, out: Path) -> None:
        self.now = 100.0
        self.folder = out / "session"
        self.clock = Clock()
        self.aggregator = aggregation(self.folder, self.clock)
        self.home = Path(tempfile.mkdtemp(prefix="tr-"))
        node = wire.NodeIdentity("ab" * 28, "real-host", "10.0.0.1")
        path = self.home / "relay.sock"
        self.relay = RelayCore(
            path, node, Straight(self.aggregator), NoSamples(), Settings(), clock=lambda: self.now
        )
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.connect(str(path))
        self.relay.poll(5)

    def send(self, sent: Any) -> None:
        self.sock.send(sent if isinstance(sent, bytes) else encode(sent))
        self.relay.poll(5)

    def tick(self) -> None:
        self.now += wire.TICK_S
        self.clock.tick(wire.TICK_S)
        self.relay.poll()
        self.aggregator.commit()

    def close(self) -> None:
        self.sock.close()
        self.relay.close()
        self.aggregator.close()
        shutil.rmtree(self.home)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def test_ranks_of_version_1_are_stored_judged_and_counted_like_any_other(bench: Bench) -> None:
    for number in range(0, 80, 10):
        steps = [step(step_number) for step_number in range(number, number + 10)]
        late = [
            {**row, "events": {**row["events"], f"{INTERNAL}dataloader_next": times(25)}} for row in steps
        ]
        bench.send([message(*steps, samples=[SAMPLE]), message(*late, step(-1), rank=1)])
        bench.tick()
    bench.send(message(step(1), _v=3))
    bench.send(b"\x93\xa4rank\x01\xc0")  # version 1 of a batch, and no map
    bench.relay.accept(encode(message(step(0), rank=2)))
    with pytest.raises(codec.WireError, match="wrong_version"):
        bench.relay.accept(encode(message(_v=7)))
    for _ in range(3):
        bench.tick()
    bench.aggregator.judge()
    bench.aggregator.finish(wire.Finish(codec.VERSION, 0))
    count = check_ledger(bench.folder)
    assert (count["produced"], count["stored"], count["in_flight"]) == (169, 161, 0)
    assert count["dropped"] == {"agent": 8, "relay": 0, "aggregator": 0}
    summary = json.loads((bench.folder / "summary.json").read_bytes())
    assert summary["run"] == "v1-real-host"
    (node,) = summary["session"]["nodes"]
    assert (node["hostname"], node["node_rank"], node["ranks"]) == ("localhost", 0, [0, 1, 2])
    report = (bench.folder / "report.txt").read_text()
    assert "localhost" in report
    errors = bench.aggregator._writer.nodes["ab" * 28].errors
    assert errors == {
        "packet: wrong_version": 2,
        "batch of a caller: wrong_version": 1,
    }


def test_late_rank_of_version_1_is_not_blamed_and_one_that_ends_is_no_death(
    bench: Bench, snapshot: Snapshot
) -> None:
    for number in range(0, 100, 10):
        steps = [step(step_number) for step_number in range(number, number + 10)]
        late = [
            {**row, "events": {**row["events"], f"{INTERNAL}dataloader_next": times(25)}} for row in steps
        ]
        bench.send([message(*steps), message(*late, rank=1)])
        bench.tick()
    (peer,) = bench.relay._connections._connected
    bench.relay._intake.gone(peer)  # as when its process has ended, which is this one
    bench.tick()
    bench.tick()
    bench.aggregator.judge()
    bench.aggregator.finish(wire.Finish(codec.VERSION, 0))
    check_ledger(bench.folder)
    summary = json.loads((bench.folder / "summary.json").read_bytes())
    assert summary["verdict"]["label"] == "accounting_only"
    assert summary["verdict"]["rank"] is None
    snapshot("verdict", summary["verdict"]["why"])
    assert summary["steps"]["count"] > 80


def test_relay_survives_hostile_messages_of_version_1(bench: Bench) -> None:
    nest = b"\x91" * 30_000
    for data in (b"\x80", b"\xdf\xff\xff\xff\xff", b"\x81\xa4rank" + nest, b"\x91\x80", b"\x80" * 60_000):
        bench.send(data)
    bench.send(struct.pack(">BI", 0xDD, 60_000) + b"\x80" * 60_000)
    bench.send(message(*BAD_ROWS))
    bench.send(message(step(1)))
    for _ in range(3):
        bench.tick()
    count = check_ledger(bench.folder)
    assert (count["stored"], count["dropped"]["agent"], count["in_flight"]) == (1, len(BAD_ROWS), 0)
