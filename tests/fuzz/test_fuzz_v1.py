"""Foreign bytes as a message of version 1, alone and through a relay."""

from __future__ import annotations

import random
import string
from typing import Any

import msgspec
from fuzzing import BOMBS, anything, bounded, fuzz, mutated, scalars
from hypothesis import given
from hypothesis import strategies as st

from traceml_ray.importers import v1
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

REASONS = {"too_large", "too_many", "wrong_version", "malformed"}
MIB = 24.0
INTERNAL = "_traceml_internal:"
numbers = st.floats() | st.integers(-(1 << 63), (1 << 64) - 1) | st.none() | st.text(max_size=3)
times = st.dictionaries(
    st.sampled_from(["cpu", "cuda:0"]),
    st.fixed_dictionaries({}, optional={"duration_ms": numbers, "cpu_ms": numbers, "is_gpu": scalars})
    | anything,
    max_size=2,
)
NAMES = ["dataloader_next", "h2d_time", "forward_time", "backward_time", "optimizer_step", "step_time", "new"]
steps = st.fixed_dictionaries(
    {"step": numbers | st.integers(0, 100)},
    optional={
        "events": st.dictionaries(st.sampled_from(NAMES).map(INTERNAL.__add__), times | anything),
        "new": scalars,
    },
)
looks = st.fixed_dictionaries({"ts": numbers}, optional={"cpu": numbers, "ram_used": numbers, "pid": scalars})
maps = st.fixed_dictionaries(
    {"rank": st.integers(0, 3) | scalars, "sampler": st.text(max_size=3)},
    optional={
        "tables": st.fixed_dictionaries(
            {},
            optional={
                "StepTimeTable": st.lists(steps | anything, max_size=4) | anything,
                "ProcessTable": st.lists(looks | anything, max_size=4) | anything,
                "OtherTable": anything,
            },
        ),
        "_v": st.sampled_from([1, 0, 2, 1.0, True, None, "1"]),
        "new": anything,
    },
)
GOOD = msgspec.msgpack.encode(
    {
        "rank": 1,
        "sampler": "StepTimeSampler",
        "_v": 1,
        "tables": {
            "StepTimeTable": [
                {"step": n, "events": {INTERNAL + name: {"cpu": {"duration_ms": 1.5}} for name in NAMES}}
                for n in range(3)
            ],
            "ProcessTable": [{"ts": 1.8e9, "cpu": 1.0, "ram_used": 5.0}],
        },
    }
)


def read(senders: v1.Senders, data: bytes) -> None:
    """Whatever it is, it becomes batches that the wire takes and that add up, or reasons."""
    with bounded(mib=MIB):
        messages = list(senders.read(data, 1, 0)) if v1.is_v1(data) else []
    for batch in messages:
        if isinstance(batch, codec.WireError):
            assert batch.reason in REASONS and len(str(batch)) < 500
            continue
        encoded = codec.encode(batch)
        assert len(encoded) <= 2 * wire.MAX_BATCH_BYTES
        assert codec.decode(encoded, wire.RankBatch).seq == batch.seq
        assert batch.produced == batch.first_row + len(batch.flags) + batch.dropped
        assert len(batch.errors) <= v1.MAX_NAMES + 1


@fuzz()
@given(st.lists(st.binary(max_size=200), max_size=3))
def test_v1_message_of_any_bytes_is_read_or_refused(sent: list[bytes]) -> None:
    senders = v1.Senders("run")
    for data in sent:
        read(senders, b"\x84" + data)
        read(senders, b"\x92\x80" + data)


@fuzz(2)
@given(st.lists(maps, min_size=1, max_size=3), st.booleans())
def test_v1_message_of_any_maps_is_read_or_refused(sent: list[Any], listed: bool) -> None:
    senders = v1.Senders("run")
    for data in [msgspec.msgpack.encode(sent)] if listed else map(msgspec.msgpack.encode, sent):
        read(senders, data)


@fuzz(2)
@given(mutated(GOOD))
def test_v1_message_with_changed_bytes_is_read_or_refused(data: bytes) -> None:
    read(v1.Senders("run"), data)


def test_v1_message_with_a_bomb_in_any_field_is_read_or_refused() -> None:
    fields = {"rank": b"\x01", "sampler": b"\xa1s", "tables": b"\x80", "_v": b"\x01", "new": b"\x01"}
    tables = {"StepTimeTable": b"\x90", "ProcessTable": b"\x90"}
    step = {"step": b"\x01", "events": b"\x80", "new": b"\x01"}
    event = {f"{INTERNAL}step_time": b"\x80", "new": b"\x01"}

    def joined(fields: dict[str, bytes]) -> bytes:
        return bytes([0x80 + len(fields)]) + b"".join(
            msgspec.msgpack.encode(name) + fields[name] for name in fields
        )

    for bomb in BOMBS:
        made = [{**fields, name: bomb} for name in fields]
        made += [{**fields, "tables": joined({**tables, name: bomb})} for name in tables]
        for row in [{**step, name: bomb} for name in step] + [
            {**step, "events": joined({**event, name: bomb})} for name in event
        ]:
            made.append({**fields, "tables": joined({**tables, "StepTimeTable": b"\x91" + joined(row)})})
        for message in made:
            read(v1.Senders("run"), joined(message))
            read(v1.Senders("run"), b"\x91" + joined(message))


def test_v1_sender_with_ever_new_names_uses_bounded_memory() -> None:
    senders, letters = v1.Senders("run"), random.Random(1)
    with bounded(mib=4):
        for _ in range(300):
            names = ["".join(letters.choices(string.printable, k=60)) for _ in range(20)]
            sent = {"rank": letters.randrange(8), "sampler": "", "tables": {name: [] for name in names}}
            for batch in senders.read(msgspec.msgpack.encode(sent), 1, 0):
                assert isinstance(batch, wire.RankBatch) and len(batch.errors) <= v1.MAX_NAMES + 1
