"""Questions to a session that nobody of ours would ask."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from fuzzing import BOMBS, anything, bounded, fuzz, mutated, scalars
from hypothesis import given
from hypothesis import strategies as st
from sessions import Clock, Rank, Relay, aggregation, ask

from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.reports.answers import QUESTIONS
from traceml_ray.signals.memory.records import MemorySample
from traceml_ray.store import query
from traceml_ray.wire import messages as wire

MIB = 24.0
NUMBERS = st.sampled_from([-1, 0, 1, 2, 1 << 31, 1 << 63, (1 << 64) - 1, -(1 << 63), 1 << 20, -1000, 0.5])
some = NUMBERS | scalars | st.lists(NUMBERS, max_size=4) | anything
NAMES = st.sampled_from(["summary.json", "../session.sqlite", "session.sqlite", "/etc/passwd", "snapshot-"])
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "name": NAMES | st.text(max_size=5),
    "run": st.none() | st.sampled_from(["job", "x"]),
    "stage": st.sampled_from(["total", "data", "x"]),
    "whole": st.none() | st.booleans(),
    "brief": st.booleans(),
    "nodes": st.lists(st.sampled_from(["node-0", "x"]), max_size=3),
}
"""Values that a field may have, else numbers."""


def fields(kind: type[query.Request[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Fields of a question: with values that it may have, or any; some left out."""
    names = kind.__struct_fields__
    listed = st.lists(NUMBERS, max_size=3)
    likely = {name: LIKELY.get(name, listed if name in ("ranks", "processes") else NUMBERS) for name in names}
    made = {name: value | (some if draws else value) for draws, (name, value) in enumerate(likely.items())}
    return st.fixed_dictionaries({"what": st.just(kind.__struct_config__.tag)}, optional=made)


REQUESTS = {kind.__struct_config__.tag: kind for kind in QUESTIONS}
KINDS = [fields(kind) for kind in QUESTIONS]
asked = st.one_of(KINDS) | st.dictionaries(st.sampled_from(["what", "run", "since", "x"]), some, max_size=3)
questions = st.lists(asked, max_size=4) | some


def message(requests: Any, **more: Any) -> bytes:
    """An encoded question."""
    return msgspec.msgpack.encode({"version": "0.0", "requests": requests, **more})


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AggregatorCore]:
    folder = tmp_path_factory.mktemp("out") / "live"
    clock = Clock()
    aggregator, relay = aggregation(folder, clock), Relay()
    ranks = [Rank(0), Rank(1)]
    span = wire.SpanSum("optimizer", 0, 5, 10, 3, 0, 4)
    process = wire.ProcessSample(clock(), 1.0, 2, 3, None, None)
    for _ in range(6):
        fields = {"spans": [span], "process": process, "memory": [MemorySample(clock(), 1, None)]}
        aggregator.ingest(relay.message(*(rank.batch(5, **fields) for rank in ranks)))
        clock.tick()
        aggregator.judge()
        aggregator.commit()
    yield aggregator
    aggregator.close()


def answer(session: AggregatorCore, request: bytes) -> dict[str, Any]:
    """The answer: there always is one, and it says one thing or the other."""
    with bounded(mib=MIB):
        reply: dict[str, Any] = msgspec.msgpack.decode(session.query(request), ext_hook=lambda *_: None)
    assert reply["version"] and bool(reply.get("error")) != ("answers" in reply and not reply.get("error"))
    assert len(reply.get("error", "")) <= 1000
    return reply


@fuzz(4)
@given(questions)
def test_query_of_any_shape_is_answered(session: AggregatorCore, requests: Any) -> None:
    answer(session, message(requests))
    assert len(list(session.folder.path.glob("snapshot-*"))) <= 8
    assert ask(session, "status").ledger.stored == 60


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_question_with_values_at_the_limits(session: AggregatorCore, kind: str) -> None:
    """Those that the types let through are answered, and not as a damaged file."""

    @fuzz()
    @given(fields(REQUESTS[kind]))
    def check(request: dict[str, Any]) -> None:
        error = answer(session, message([request])).get("error", "")
        assert "damaged" not in error and "query" not in "".join(session.errors), (request, error)

    check()


@fuzz()
@given(st.binary(max_size=200) | anything.map(msgspec.msgpack.encode))
def test_query_of_any_bytes_is_answered(session: AggregatorCore, request: bytes) -> None:
    answer(session, request)


@fuzz()
@given(mutated(message([{"what": "Events", "since": 0, "most": 5}, {"what": "Cell", "rank": 1}] * 2)))
def test_query_with_changed_bytes_is_answered(session: AggregatorCore, request: bytes) -> None:
    answer(session, request)


def test_query_with_msgpack_bombs_is_answered_within_bounds(session: AggregatorCore) -> None:
    for bomb in BOMBS:
        assert answer(session, bomb)["error"]
        assert answer(session, b"\x82\xa7version\xa1x\xa8requests" + bomb)["error"]
        assert answer(session, b"\x82\xa7version\xa1x\xa8requests\x91" + bomb)["error"]
        for name in (b"what", b"run", b"since", b"nodes"):
            one = b"\x82\xa4what\xa6Events" + bytes([0xA0 + len(name)]) + name + bomb
            assert answer(session, b"\x82\xa7version\xa1x\xa8requests\x91" + one)["error"]
    assert answer(session, message([{"what": "Rank processes"}] * 60_000))["error"]


@fuzz()
@given(st.data())
def test_answers_of_any_kind_are_read_or_refused(session: AggregatorCore, data: st.DataObject) -> None:
    """Whatever comes back to who asks."""
    requests = [
        query.GetStatus(),
        query.GetTimes("job"),
        query.GetRanks("job"),
        query.GetNodeSamples(("node-0",), 2),
    ]
    replies: list[bytes] = []
    query.ask(lambda sent: replies.append(session.query(sent)) or replies[0], requests)
    changed = data.draw(mutated(replies[0]))
    with bounded(mib=MIB), contextlib.suppress(query.QueryError):
        query.ask(lambda _: changed, requests)
