import tracemalloc

import msgspec
import pytest
from messages import EVENT, IDENTITY, MESSAGES, rank_batch, relay_batch

from traceml_ray.signals.memory.records import MemorySample
from traceml_ray.stages import LEAD_BYTES, N_STAGES, ROW_BYTES, SYNC_WAIT
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

KINDS = [type(message) for message in MESSAGES]
every_message = pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)


def reason(data: bytes, kind: type[codec.Message]) -> str | None:
    """Return why `decode` refuses `data`, None if it does not. Any other exception fails the test."""
    try:
        message = codec.decode(data, kind)
    except codec.WireError as error:
        assert error.reason in {
            "too_large",
            "garbage",
            "wrong_version",
            "wrong_kind",
            "malformed",
            "bad_columns",
        }
        return error.reason
    assert type(message) is kind
    return None


def tail(message: codec.Message) -> list[object]:
    """Return the fields of `message` as they stand on the wire: tag, version, …"""
    return msgspec.msgpack.decode(codec.encode(message))


def test_request_of_a_profile_travels_in_the_messages_of_rank_and_relay():
    request = wire.MeasureRequest("asked", wire.ProfileRequest("0,4-7", 5, memory=True, run="job"))
    for batch in (rank_batch(), relay_batch()):
        message = msgspec.structs.replace(batch, requests=[request])
        assert codec.decode(codec.encode(message), type(message)).requests == [request]


@every_message
def test_messages_round_trip(message):
    data = codec.encode(message)
    assert codec.decode(data, type(message)) == message
    assert codec.tag_of(data) == type(message).__struct_config__.tag


@every_message
def test_trailing_fields_of_a_newer_version_are_ignored(message):
    data = msgspec.msgpack.encode([*tail(message), "new", {"deep": [1, 2]}, None])
    assert codec.decode(data, type(message)) == message


def test_trailing_fields_inside_a_nested_struct_are_ignored():
    fields = tail(rank_batch(open=wire.OpenStage(1, 2, 3)))
    position = 1 + wire.RankBatch.__struct_fields__.index("open")
    fields[position] = [*fields[position], "new"]
    assert codec.decode(msgspec.msgpack.encode(fields), wire.RankBatch).open == wire.OpenStage(1, 2, 3)


def test_optional_fields_may_be_missing():
    short = tail(rank_batch())[: 1 + wire.RankBatch.__struct_fields__.index("identity")]
    assert codec.decode(msgspec.msgpack.encode(short), wire.RankBatch) == rank_batch()


@every_message
@pytest.mark.parametrize("version", [0, 1, 2, 4, -1])
def test_other_version_is_refused_by_name(message, version):
    data = codec.encode(msgspec.structs.replace(message, v=version))
    with pytest.raises(codec.WireError, match=f"^wrong_version: message has {version}, this is 3$"):
        codec.decode(data, type(message))


@every_message
def test_message_of_another_kind_is_refused(message):
    for kind in KINDS:
        assert reason(codec.encode(message), kind) == (None if kind is type(message) else "wrong_kind")


@every_message
def test_truncated_messages_are_all_refused(message):
    data = codec.encode(message)
    assert {reason(data[:size], type(message)) for size in range(len(data))} == {"garbage"}
    assert reason(data + b"\x00", type(message)) == "garbage"


@every_message
def test_size_is_checked_before_anything_else(message):
    data = codec.encode(message)
    with pytest.raises(codec.WireError, match=r"^too_large: \d+ bytes, limit \d+$"):
        codec.decode(data, type(message), max_bytes=len(data) - 1)
    assert codec.decode(data, type(message), max_bytes=len(data)) == message
    assert reason(bytes(codec.MAX_MESSAGE_BYTES + 1), type(message)) == "too_large"


@pytest.mark.parametrize("data", [None, 7, "text", bytearray(b"\x90"), memoryview(b"\x90")])
def test_non_bytes_are_garbage(data):
    assert reason(data, wire.RankBatch) == "garbage"


@pytest.mark.parametrize(
    "change",
    [
        {"keys": b""},
        {"keys": bytes(8 * 3)},
        {"flags": b""},
        {"flags": bytes(3)},
        {"rows": bytes(ROW_BYTES * 2 - 1)},
        {"rows": bytes(ROW_BYTES * 3)},
        {"dropped": 80_000},
        {"host_rows": bytes(ROW_BYTES)},
        {"host_rows": bytes(ROW_BYTES * 3), "leads": bytes(LEAD_BYTES * 2)},
        {"host_rows": bytes(ROW_BYTES * 2), "leads": bytes(LEAD_BYTES * 2 - 1)},
        {"leads": bytes(LEAD_BYTES * 2)},
    ],
    ids=str,
)
def test_mismatched_columns_are_refused(change):
    assert reason(codec.encode(rank_batch(**change)), wire.RankBatch) == "bad_columns"


def test_host_rows_and_leads_are_empty_or_of_all_rows():
    host, leads = bytes(ROW_BYTES * 2), bytes(LEAD_BYTES * 2)
    for beside in ({}, {"host_rows": host}, {"host_rows": host, "leads": leads}):
        batch = rank_batch(**beside)
        assert codec.decode(codec.encode(batch), wire.RankBatch) == batch


def test_batch_of_an_agent_without_device_clock_has_no_host_rows():
    older = tail(rank_batch())[: 1 + wire.RankBatch.__struct_fields__.index("host_rows")]
    assert codec.decode(msgspec.msgpack.encode(older), wire.RankBatch) == rank_batch()


def test_rows_above_the_limit_are_refused():
    assert reason(codec.encode(rank_batch(wire.MAX_ROWS)), wire.RankBatch) is None
    assert reason(codec.encode(rank_batch(wire.MAX_ROWS + 1)), wire.RankBatch) == "too_large"


@pytest.mark.parametrize(
    "change",
    [
        {"seq": -1},
        {"first_row": -1},
        {"produced": -1},
        {"produced": 1 << 63},
        {"sent_ns": 1 << 63},
        {"keys": "text"},
        {"process_id": b"bytes"},
        {"final": 1},
        {"open": wire.OpenStage(1, N_STAGES, 0)},
        {"open": wire.OpenStage(1, -1, 0)},
        {"open": wire.OpenStage(1 << 63, 0, 0)},
        {"events": [wire.Event("note", 0, data={"n": 1 << 63})]},
        {"identity": msgspec.structs.replace(IDENTITY, global_rank=-1)},
        {"identity": msgspec.structs.replace(IDENTITY, world_size=1 << 40)},
        {"events": [EVENT] * (codec.MAX_ITEMS + 1)},
        {"errors": {str(i): 1 for i in range(codec.MAX_ITEMS + 1)}},
        {"missing": {str(i): "" for i in range(codec.MAX_ITEMS + 1)}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_fields_out_of_type_or_range_are_malformed(change):
    assert reason(codec.encode(rank_batch(**change)), wire.RankBatch) == "malformed"


@pytest.mark.parametrize("field", ["batches", "dropped", "lost", "events", "errors"])
def test_relay_batch_is_bounded_in_every_list(field):
    many = getattr(relay_batch(), field) or {"x": 1}
    if isinstance(many, dict):
        many = {str(i): 1 for i in range(codec.MAX_ITEMS + 1)}
    else:
        many = many * (codec.MAX_ITEMS + 1)
    message = msgspec.structs.replace(relay_batch(), batches=[])
    data = codec.encode(msgspec.structs.replace(message, **{field: many}))
    assert reason(data, wire.RelayBatch) in {"malformed", "too_large"}


@pytest.mark.parametrize(
    "head", [b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"], ids=["list", "map", "bytes", "str", "ext"]
)
@pytest.mark.parametrize("place", ["whole", "batches", "trailing"])
def test_declared_length_costs_no_memory(head, place):
    huge = head + b"\xff\xff\xff\xff" + b"\x01\x01"
    fields = [msgspec.msgpack.encode(field) for field in tail(relay_batch())]
    if place == "batches":
        fields[1 + wire.RelayBatch.__struct_fields__.index("batches")] = huge
    elif place == "trailing":
        fields.append(huge)
    data = huge if place == "whole" else bytes([0xDC, 0, len(fields)]) + b"".join(fields)
    codec.decode(codec.encode(relay_batch()), wire.RelayBatch)  # the decoder itself is made once
    tracemalloc.start()
    try:
        assert reason(data, wire.RelayBatch) == "garbage"
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("nest", [b"\x91", b"\x81\xa1k", b"\x81"], ids=["lists", "maps", "map keys"])
def test_deep_nesting_is_garbage(nest):
    deep = nest * (codec.MAX_MESSAGE_BYTES // len(nest) - 64) + b"\xc0"
    for data in (deep, b"\x93\xa4rank\x02" + deep):
        assert reason(data, wire.RankBatch) == "garbage"
        assert codec.tag_of(data) == ""


def test_tag_of_garbage_is_empty():
    assert [codec.tag_of(data) for data in (b"", b"\x90", b"\xff", b"\x92\xa1\xff\x02")] == ["", "", "", ""]


@pytest.mark.parametrize("device", [False, True], ids=["host", "host and device"])
def test_row_costs_at_most_128_bytes(device):
    """At 10 steps a second and one batch a second a row may cost 128 bytes, everything counted."""
    batch = rank_batch(
        10,
        **({"host_rows": bytes(ROW_BYTES * 10), "leads": bytes(LEAD_BYTES * 10)} if device else {}),
        open=wire.OpenStage(70_010, SYNC_WAIT, 12_000_000),
        process=wire.ProcessSample(1_800_000_000_000_000_000, 99.5, 1 << 33, 41, 1 << 40, 1 << 40),
    )
    assert len(codec.encode(batch)) <= 128 * 10
    assert len(codec.encode(rank_batch(wire.MAX_ROWS))) <= wire.MAX_BATCH_BYTES


def test_sample_of_memory_costs_at_most_160_bytes():
    """Of them one goes a second for each device, beside 2 kB that a rank may send."""
    of_device = MemorySample(1_800_000_000_000_000_000, 70_010, 7, *[1 << 37] * 5, 1, 0, *[1 << 37] * 7)
    of_host = MemorySample(1_800_000_000_000_000_000, 70_010, None, rss_bytes=1 << 37, limit_bytes=1 << 40)
    assert codec.size_of(of_device) <= 160
    assert codec.size_of(of_host) <= 50
