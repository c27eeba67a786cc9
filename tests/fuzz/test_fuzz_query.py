"""Questions to a session that nobody of ours would ask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from fuzzing import BOMBS, anything, bounded, fuzz, mutated, scalars
from hypothesis import given
from hypothesis import strategies as st
from sessions import Clock, Rank, Relay, aggregation, ask

from traceml_ray import wire
from traceml_ray.monitor.aggregator import AggregatorCore

MIB = 24.0
WHAT = [
    "several", "status", "verdict", "file", "unsnapshot", "snapshot", "summary", "runs", "nodes", "rows",
    "process_of", "node_samples_of", "parts", "events", "node_samples", "verdicts", "ranks",
    "meta",
    "streams", "details", "ledger", "close", "__class__", "_all", "",
    "times", "columns", "busy", "rank_steps", "cell",
]  # fmt: skip
NUMBERS = st.sampled_from([-1, 0, 1, 2, 1 << 31, 1 << 63, (1 << 64) - 1, -(1 << 63), 1 << 20, -1000, 0.5])
some = NUMBERS | scalars | st.lists(NUMBERS, max_size=4) | anything
FIELDS = ("since", "run", "only", "last", "most", "rank", "first", "n", "offset", "brief", "new")
FIELDS += ("stage", "whole", "ranks")
asked = st.fixed_dictionaries(
    {"what": st.sampled_from(WHAT) | scalars},
    optional=dict.fromkeys(FIELDS, some)
    | {
        "name": st.sampled_from(
            ["summary.json", "../session.sqlite", "session.sqlite", "/etc/passwd", "snapshot-"]
        )
        | some
    },
)
questions = st.recursive(
    asked,
    lambda inner: st.fixed_dictionaries(
        {"what": st.just("several"), "asked": st.lists(inner, max_size=4) | some}
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AggregatorCore]:
    folder = tmp_path_factory.mktemp("out") / "live"
    clock = Clock()
    aggregator, relay = aggregation(folder, clock), Relay()
    ranks = [Rank(0), Rank(1)]
    detail = wire.Detail("optimizer", 0, 5, 10, 3, 0, 4)
    process = wire.ProcessSample(clock(), 1.0, 2, 3, None, None)
    for _ in range(6):
        aggregator.ingest(
            relay.message(*(rank.batch(5, details=[detail], process=process) for rank in ranks))
        )
        clock.tick()
        aggregator.judge()
        aggregator.commit()
    yield aggregator
    aggregator.close()


def answer(session: AggregatorCore, request: bytes) -> dict[str, Any]:
    """The answer: there always is one, and it says one thing or the other."""
    with bounded(mib=MIB):
        told = msgspec.msgpack.decode(session.query(request))
    assert set(told) in ({"error"}, {"result"}, {"result", "cursor"}), told
    assert len(str(told.get("error", ""))) < 2000
    return told


@fuzz(4)
@given(questions)
def test_questions_of_any_kind(session: AggregatorCore, question: dict[str, Any]) -> None:
    answer(session, msgspec.msgpack.encode(question))
    assert len(list(session.folder.path.glob("snapshot-*"))) <= 8
    assert ask(session, "status")["ledger"]["stored"] == 60


@fuzz()
@given(st.binary(max_size=200) | anything.map(msgspec.msgpack.encode))
def test_bytes_of_any_kind(session: AggregatorCore, request: bytes) -> None:
    answer(session, request)


@fuzz()
@given(
    mutated(
        msgspec.msgpack.encode({"what": "several", "asked": [{"what": "rows", "since": 0, "most": 5}] * 2})
    )
)
def test_a_good_question_with_bytes_changed(session: AggregatorCore, request: bytes) -> None:
    answer(session, request)


def test_bombs(session: AggregatorCore) -> None:
    for bomb in BOMBS:
        assert "error" in answer(session, bomb)
        for name in (b"what", b"asked", b"since", b"only"):
            answer(session, b"\x82\xa4what\xa4rows" + bytes([0xA0 + len(name)]) + name + bomb)
    nested = msgspec.msgpack.encode({"what": "status"})
    for _ in range(300):
        nested = b"\x82\xa4what\xa7several\xa5asked\x91" + nested
    answer(session, nested)
