"""Messages from nobody knows whom: `codec.decode`, and what an aggregator makes of those that it takes."""

from __future__ import annotations

import sqlite3
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fuzzing import BOMBS, anything, bounded, fuzz, mutated
from hypothesis import example, given
from hypothesis import strategies as st
from messages import MESSAGES, rank_batch, relay_batch
from sessions import Clock, Rank, Relay

from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.settings import Settings
from traceml_ray.signals.experts.records import MAX_ROUTERS, RouterTokens
from traceml_ray.signals.goodput.totals import TOTALS
from traceml_ray.signals.kinds import KINDS
from traceml_ray.signals.layers.records import LAYERS
from traceml_ray.signals.memory.records import MemorySample
from traceml_ray.signals.nodes.records import NODE, GpuSample, NodeSample
from traceml_ray.signals.output.records import Output
from traceml_ray.signals.sharding.records import Sharding
from traceml_ray.signals.throughput.records import SIZES, StepWork
from traceml_ray.stages import N_STAGES
from traceml_ray.store import query
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

TYPES = [type(message) for message in MESSAGES]
REASONS = {"too_large", "garbage", "wrong_version", "wrong_kind", "malformed", "bad_columns", "unknown_kind"}
MIB = 24.0
"""Of the largest message that is let in, 1 MiB of entries of one byte, as Python's objects."""
kinds = st.sampled_from(TYPES)


def decoded(data: bytes, kind: type[Any]) -> Any:
    """The message, or None; nothing but a WireError of a known reason is let through."""
    with bounded(mib=MIB):
        try:
            message = codec.decode(data, kind)
        except codec.WireError as error:
            assert error.reason in REASONS and len(str(error)) < 500
            return None
        codec.tag_of(data)
    assert type(message) is kind
    return message


@fuzz()
@given(kinds, st.binary(max_size=300))
@example(wire.RankBatch, b"")
def test_message_of_any_bytes_is_decoded_or_refused(kind: type[Any], data: bytes) -> None:
    decoded(data, kind)


@fuzz()
@given(kinds, st.lists(anything, max_size=24), st.booleans())
def test_message_of_any_msgpack_shape_is_decoded_or_refused(
    kind: type[Any], fields: list[Any], headed: bool
) -> None:
    head = [kind.__struct_config__.tag, codec.VERSION] if headed else []
    decoded(msgspec.msgpack.encode(head + fields), kind)


@fuzz()
@given(st.sampled_from(MESSAGES), st.data())
def test_message_with_one_field_replaced_is_decoded_or_refused(message: Any, data: st.DataObject) -> None:
    fields = msgspec.msgpack.decode(codec.encode(message))
    fields[data.draw(st.integers(2, len(fields) - 1))] = data.draw(anything)
    taken = decoded(msgspec.msgpack.encode(fields), type(message))
    assert taken is None or codec.decode(codec.encode(taken), type(message)) is not None


@fuzz(2)
@given(st.sampled_from(MESSAGES), st.data())
def test_message_with_changed_bytes_is_decoded_or_refused(message: Any, data: st.DataObject) -> None:
    decoded(data.draw(mutated(codec.encode(message))), type(message))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_with_a_bomb_in_any_field_is_decoded_or_refused(message: Any) -> None:
    fields = [msgspec.msgpack.encode(field) for field in msgspec.msgpack.decode(codec.encode(message))]
    for bomb in BOMBS:
        decoded(bomb, type(message))
        for index in range(len(fields)):
            decoded(
                bytes([0xDC, 0, len(fields)]) + b"".join([*fields[:index], bomb, *fields[index + 1 :]]),
                type(message),
            )


INT64 = st.integers(-(1 << 63), (1 << 63) - 1) | st.sampled_from([0, -1, 1, (1 << 63) - 1, -(1 << 63)])
COUNT = INT64.map(lambda n: n & ((1 << 63) - 1))
ROWS = INT64.map(lambda n: n & ((1 << 44) - 1)) | st.just(1 << 44)
FLOAT = st.none() | st.floats()
details = st.builds(
    wire.SpanSum, st.text(max_size=9), st.integers(0, 5), COUNT, INT64, st.none() | INT64, INT64, INT64,
    st.none() | COUNT,
)  # fmt: skip
events = st.builds(
    wire.Event,
    st.sampled_from(["exception", "rank_lost", "process_ended", "stacks", "standing", "note", ""]),
    INT64, st.none() | INT64, st.none() | st.integers(0, 5), st.text(max_size=9),
    st.dictionaries(
        st.sampled_from(["dump", "process_id", "state", "exit_code", "oom_kills", "call", "pending_ns"]),
        st.none() | st.text(max_size=9) | INT64 | st.floats(), max_size=4,
    ),
)  # fmt: skip
processes = st.builds(wire.ProcessSample, INT64, FLOAT, *[st.none() | COUNT for _ in range(4)])
memories = st.builds(MemorySample, INT64, *[st.none() | COUNT for _ in range(16)])
works = st.builds(StepWork, *[COUNT] * 4, *[st.none() | COUNT] * 2, FLOAT, FLOAT, st.none() | COUNT)
outputs = st.builds(
    Output,
    st.sampled_from([1, 2]),
    INT64,
    st.lists(st.text(max_size=5), max_size=2),
    st.text(max_size=5),
    COUNT,
)
routers = st.builds(
    RouterTokens, st.integers(0, MAX_ROUTERS - 1), st.text(max_size=9), st.lists(COUNT, max_size=4)
)
shards = st.builds(
    Sharding, *[COUNT] * 8, st.lists(COUNT, max_size=2), st.lists(st.text(max_size=3), max_size=2),
    st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    st.dictionaries(st.text(max_size=3), COUNT, max_size=2),
)  # fmt: skip
gpus = st.builds(
    GpuSample, COUNT, st.none(), FLOAT, st.none() | COUNT, st.none() | COUNT, FLOAT, FLOAT, FLOAT
)
samples = st.builds(
    NodeSample, INT64, FLOAT, st.none() | COUNT, FLOAT, *[st.none() | COUNT for _ in range(6)],
    st.none() | st.lists(gpus, max_size=2), st.none() | COUNT, FLOAT, FLOAT, FLOAT, st.none() | COUNT,
)  # fmt: skip
opens = st.builds(
    wire.OpenStage, INT64, st.integers(0, 5), INT64, st.none() | st.text(max_size=9), st.none() | INT64
)


UNKNOWN = "records: unknown_kind"
raws = anything.map(lambda value: msgspec.Raw(msgspec.msgpack.encode(value)))
unknown = st.text(max_size=9).filter(lambda name: name not in KINDS) | st.just(NODE.name)
"""Kinds that no rank sends, as far as is known here: of other versions, and of nodes."""
no_records = anything.filter(lambda value: not isinstance(value, list)).map(
    lambda value: msgspec.Raw(msgspec.msgpack.encode(value))
)
refused = st.dictionaries(unknown, st.lists(raws, max_size=2), max_size=1) | st.dictionaries(
    st.sampled_from([LAYERS.name, SIZES.name]), st.lists(no_records, max_size=2), max_size=2
)
"""Records that an aggregator is to refuse, each by itself."""


@st.composite
def batches(draw: st.DrawFn) -> bytes:
    """A rank batch that the wire lets in, with whatever values it lets in."""
    n = draw(st.integers(0, 12))
    columns = {
        "keys": b"".join(draw(INT64).to_bytes(8, "little", signed=True) for _ in range(n)),
        "flags": draw(st.binary(min_size=n, max_size=n)),
        "rows": b"".join(draw(INT64).to_bytes(8, "little", signed=True) for _ in range(n * N_STAGES)),
    }
    dropped, more = sorted((draw(ROWS), draw(ROWS)))
    return Rank(draw(st.integers(0, 3)), 4, process_id=draw(st.sampled_from(["a", "b", "c"]))).batch(
        0, **columns, seq=draw(COUNT), first_row=draw(ROWS | st.integers(0, 40)), produced=more,
        dropped=dropped, sent_ns=draw(INT64), open=draw(st.none() | opens), final=draw(st.booleans()),
        process=draw(st.none() | processes), spans=draw(st.lists(details, max_size=2)),
        events=draw(st.lists(events, max_size=2)), group=draw(st.none() | st.tuples(COUNT, COUNT)),
        strategy=draw(st.none() | st.text(max_size=5)), memory=draw(st.lists(memories, max_size=2)),
        work=draw(st.lists(works, max_size=2)), output=draw(st.lists(outputs, max_size=2)),
        experts=draw(st.lists(routers, max_size=2)), sharding=draw(st.lists(shards, max_size=1)),
        records=draw(refused),
        memory_from=draw(st.dictionaries(st.text(max_size=9), st.text(max_size=5), max_size=2)),
    )  # fmt: skip


clocks = st.builds(dict, sent_ns=INT64, answer=st.none() | st.tuples(INT64, INT64))
ticks = st.tuples(st.lists(batches(), max_size=3), st.none() | samples, st.lists(events, max_size=1), clocks)


def stored_records(path: Path) -> Counter[str]:
    """How many records of each kind a session file has, without the sums that the aggregator makes itself."""
    with closing(sqlite3.connect(path)) as file:
        count = {
            name: file.execute(f"SELECT count(*) FROM {kind.table}").fetchone()[0]
            for name, kind in KINDS.items()
            if kind is not TOTALS
        }
    return +Counter(count)


class Expected:
    """What an aggregator is to make of the records of messages that come in order: stored, or refused."""

    def __init__(self) -> None:
        self.errors: Counter[str] = Counter()
        self.stored: Counter[str] = Counter()
        self._slots: set[tuple[str, str, int]] = set()
        self._newest: dict[str, int] = {}

    def take(self, data: bytes) -> None:
        """Expect the records of a rank batch. One with the number of an older batch was sent twice."""
        batch = codec.decode(data, wire.RankBatch)
        is_new = batch.seq > self._newest.get(batch.process_id, -1)
        if is_new:
            self._newest[batch.process_id] = batch.seq
        for name, records in batch.records.items():
            if name not in KINDS or name == NODE.name:
                self.errors[UNKNOWN] += len(records)
            elif name in (LAYERS.name, SIZES.name):
                self.errors[f"{KINDS[name].lost}: malformed"] += len(records)
            elif is_new:
                self._store(batch.process_id, name, records)

    def _store(self, owner: str, name: str, records: list[msgspec.Raw]) -> None:
        kind = KINDS[name]
        if kind.keep == "all":
            self.stored[name] += len(records)
            return
        self._slots |= {(owner, name, kind.slot(kind.decode(raw))) for raw in records}
        self.stored[name] = sum(slot[1] == name for slot in self._slots)


@fuzz(0.5)
@given(st.lists(ticks, max_size=4), st.dictionaries(st.sampled_from(["a", "b", "new"]), ROWS, max_size=2))
def test_aggregator_keeps_its_ledger_balanced_for_any_decoded_message(
    sent: list[Any], dropped: dict[str, int]
) -> None:
    with tempfile.TemporaryDirectory() as folder, bounded():
        clock, relay, expected = Clock(), Relay(), Expected()
        aggregator = AggregatorCore(Path(folder), Settings(debug=True), {"launcher": "torchrun"}, clock)
        for inner, sample, events, clocks in sent:
            expected.stored[NODE.name] += sample is not None
            for batch in inner:
                expected.take(batch)
            aggregator.ingest(
                relay.message(
                    *inner,
                    node=[sample] if sample else [],
                    events=events,
                    dropped=dropped,
                    lost=["b"],
                    **clocks,
                )
            )
            clock.tick(30)
            assert aggregator.commit(), aggregator.errors
            aggregator.judge()
        query.ask(
            aggregator.query, [query.GetStatus(), query.GetRuns(), query.GetLedger(), query.GetVerdict()]
        )
        assert dict(aggregator.errors) == dict(+expected.errors)
        aggregator.finish(wire.Finish(codec.VERSION, 0))
        aggregator.close()
        with SessionFile(Path(folder) / "session.sqlite") as stored:
            count = msgspec.to_builtins(stored.ledger())
        assert stored_records(Path(folder) / "session.sqlite") == +expected.stored
        for part in (count, *count["per_rank"].values()):
            assert part["produced"] == part["stored"] + part["in_flight"] + sum(part["dropped"].values())
            assert min(part["in_flight"], part["stored"], *part["dropped"].values()) >= 0


@fuzz()
@given(st.data())
def test_aggregator_answers_any_relay_or_launcher_message(data: st.DataObject) -> None:
    """Whatever comes, it is answered; what is refused is counted under the name of a WireError."""
    run = wire.RunEnd(codec.VERSION, "job", {"name": "fit"}, [], "finished")
    with tempfile.TemporaryDirectory() as folder, bounded():
        aggregator = AggregatorCore(Path(folder), Settings(), {})
        aggregator.ingest(data.draw(mutated(codec.encode(relay_batch()))))
        aggregator.ingest(Relay().message(data.draw(mutated(codec.encode(rank_batch())))))
        decoded = codec.decode(
            aggregator.end(data.draw(mutated(codec.encode(run)) | st.binary(max_size=50))), wire.Finished
        )
        assert decoded.ok or decoded.pending or "WireError" in decoded.detail
        aggregator.endings.write_due()
        assert aggregator.commit()
        names = {name.partition(": ")[2] for name in aggregator.errors}
        assert names <= REASONS | {"WireError"}, aggregator.errors
        aggregator.close()
