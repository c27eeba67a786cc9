"""Questions about a session: each is answered live as from the file, and what cannot be answered is said."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from played import Played
from sessions import LIMITS, SECOND, ask, run_message, stored

from traceml_ray import __version__
from traceml_ray.reports.answers import QUESTIONS, Answers
from traceml_ray.signals.check.view import GetCheck
from traceml_ray.signals.collectives.view import GetCollectives
from traceml_ray.signals.experts.view import GetExperts
from traceml_ray.signals.goodput.view import GetGoodput
from traceml_ray.signals.layers.view import GetLayers
from traceml_ray.signals.logged.view import GetLogged
from traceml_ray.signals.memory.view import GetMemory
from traceml_ray.signals.nodes.view import GetSystem
from traceml_ray.signals.output.view import GetOutput
from traceml_ray.signals.sharding.view import GetSharding
from traceml_ray.signals.throughput.view import GetThroughput
from traceml_ray.store import query
from traceml_ray.store.session import SessionFolder, prepare
from traceml_ray.store.summary_shape import to_builtins
from traceml_ray.wire import messages as wire

COMMANDS = {
    *(query.Dump, query.StartProfile, query.StartLayers, query.RemoveProfile),
    *(query.Snapshot, query.ReadFile, query.Discard, query.NoteSinks, query.SetRayMetrics),
    query.PassFigures,
}
OF_TIME = ("version", "token")
"""Of how an answer came about, not of what it is."""


def questions(run: str | None, processes: tuple[int, ...] = (1, 3)) -> list[query.Request[Any]]:
    """At least one of each kind."""
    return [
        query.GetStatus(), query.GetRuns(), query.GetProcesses(), query.GetNodes(run), query.GetRanks(run),
        query.GetLedger(run), query.GetDeaths(run), query.GetBundles(), query.ReadBundle("x", "y", 0, 9),
        query.GetProfiles(), query.ReadProfile("x", "y", 0, 9),
        query.GetVerdict(run), query.GetVerdicts(run), query.GetVerdicts(run, 1),
        GetOutput(run), GetOutput(run, 1), GetOutput(run, 99), GetOutput(run, 0, most=1),
        query.GetEvents(run), query.GetEvents(run, 3, brief=True, most=2), query.GetSummary(run),
        query.GetSummary(run, whole=True), query.GetReportPage(run),
        query.GetNodeSamples(("node-0", "node-1", "x"), 3),
        query.GetProcessSamples(processes, 2), query.GetTimes(run), query.GetTimes(run, whole=False),
        query.GetTimes(run, whole=True), query.GetColumns(run), query.GetColumns(run, "data", whole=True),
        query.GetColumns(run, first=10, last=30), query.GetTimeline(run), query.GetTimeline(run, 0),
        query.GetChange(run, 2, 20), query.GetChange(run, 2, 20, 25),
        query.GetStepRows(run), query.GetStepRows(run, 10, 20, (1, 9)),
        query.GetStepRows(run, since=2, most=5),
        query.GetRankSteps(run, 1, 100, first=10, last=30),
        query.GetNodeSamples(("node-1",), 2, 3 * SECOND, 1 << 60),
        query.GetProcessSamples(processes, 2, 3 * SECOND),
        GetExperts(run), GetExperts(run, 1), GetSystem(run), GetLogged(run), GetCollectives(run),
        GetCheck(run),
        query.Findings(run), GetMemory(run), GetSharding(run),
        query.GetMemorySamples(processes, 3),
        query.GetMemorySamples(processes, 4, 3 * SECOND),
        query.GetBusy(run, (1, 2, 9), 50), query.GetRankSteps(run, 1, 100), query.GetRankSteps(run, 99, 100),
        query.GetCell(run, 1, 5, 9), query.GetCell(run, 99, 5, 9), query.GetSpans(run, 1, 0, 30),
        GetGoodput(run),
        GetThroughput(run), GetThroughput(run, whole=False), GetThroughput(run, whole=True),
        query.GetRankTimes(run), query.GetRankTimes(run, whole=True), query.GetStepSample(run),
        query.GetRankTimes(run, first=10, last=30), query.GetTimes(run, first=10, last=30),
        query.GetTimes(run, first=500, last=501),
        GetLayers(run), GetLayers(run, "a"),
        query.GetStep(run, 0), query.GetStep(run, 7), query.GetStep(run, 1 << 40),
    ]  # fmt: skip


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Say where two answers are not the same, arrays and all."""
    if isinstance(one, msgspec.Struct) and type(one) is type(other):
        one, other = msgspec.structs.asdict(one), msgspec.structs.asdict(other)
    if isinstance(one, dict) and isinstance(other, dict):
        yield from (f"{where}.{name}: in one only" for name in one.keys() ^ other.keys())
        for name in (one.keys() & other.keys()) - set(OF_TIME):
            yield from differences(one[name], other[name], f"{where}.{name}")
    elif isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.shape != other.shape or not np.allclose(one, other, rtol=1e-5, equal_nan=True):
            yield f"{where}: {one} and {other}"
    elif isinstance(one, float) and isinstance(other, float):
        if not np.isclose(one, other, rtol=1e-5, equal_nan=True):
            yield f"{where}: {one} and {other}"
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        for index, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            yield from differences(mine, theirs, f"{where}[{index}]")
    elif one != other:
        yield f"{where}: {one} and {other}"


def answered(send: Callable[[bytes], bytes], requests: list[query.Request[Any]]) -> list[Any]:
    """The answers; nothing of what was sent is lost where they are decoded."""
    replies: list[bytes] = []
    answers = query.ask(lambda message: replies.append(send(message)) or replies[0], requests)
    sent, again = (
        msgspec.msgpack.decode(reply, ext_hook=query._decode)["answers"]
        for reply in (replies[0], query.encode(answers))
    )
    for request, before, after in zip(requests, sent, again, strict=True):
        assert [*differences(before, after, type(request).__name__)] == []
    return answers


def compare(played: Played, requests: list[query.Request[Any]], unlike: Callable[[str], bool]) -> None:
    """Check that each answer of the aggregator is that of its file; `unlike`: what need not be the same."""
    answers = Answers(played.folder, LIMITS)
    live, kept = (answered(send, requests) for send in (played.aggregator.query, answers.reply))
    answers.close()
    for request, one, other in zip(requests, live, kept, strict=True):
        unequal = differences(one, other, type(request).__name__)
        assert [text for text in unequal if not unlike(text)] == [], request


def test_every_question_is_asked_here() -> None:
    kinds = {type(request) for request in questions(None)}
    assert kinds | COMMANDS == set(QUESTIONS)


@fuzz(1 / 6)
@given(st.data())
def test_each_question_is_answered_live_as_from_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """While the session runs, and when it is over; of the newest run, and of one that is named."""
    held = prepare(tmp_path_factory.mktemp("out"), "demo")
    played = Played(held.path, 4, per_node=2, late=2, onset=20, device=data.draw(st.booleans()))
    some = st.lists(st.integers(0, 3), max_size=2).map(tuple)
    events = [wire.Event("note", 5, message="x"), wire.Event("stacks", 6, message="y")]
    for _ in range(data.draw(st.integers(1, 12))):
        played.play(
            data.draw(st.integers(0, 12)), late=data.draw(some), silent=data.draw(some), events=events
        )
    if data.draw(st.booleans()):
        played.begin(job_id="second")
        played.play(data.draw(st.integers(0, 30)))
    played.play(1)
    of_now = ("GetVerdict.", "GetVerdict:", "GetStatus.verdict", "Findings")
    compare(played, questions("job"), lambda text: text.startswith(of_now))
    played.end()
    held.release()
    for run in (None, "job"):
        compare(played, questions(run), lambda _: False)
    played.aggregator.close()


def test_rank_that_took_no_step_has_a_line_live_as_from_the_file(tmp_path: Path) -> None:
    played = Played(tmp_path / "demo", 4, per_node=2, late=None)
    for _ in range(3):
        played.play(0)
    played.play(2, silent=(0,))
    played.play(0, late=(0,))
    played.begin(job_id="second")
    played.play(0)
    played.play(1)
    for send in (played.aggregator.query, stored(played.folder)):
        assert list(query.ask_one(send, query.GetTimes("job")).ranks) == [0, 1, 2, 3]
    played.aggregator.close()


def test_verdict_of_a_session_that_is_over_is_that_of_its_report(tmp_path: Path) -> None:
    played = Played(tmp_path / "demo", 2, late=1, onset=0)
    for _ in range(20):
        played.play(5)
    played.end()
    summary = msgspec.json.decode(SessionFolder(played.folder).summary_json.read_bytes())
    for send in (played.aggregator.query, stored(played.folder)):
        verdict: Any = to_builtins(query.ask_one(send, query.GetVerdict()))
        assert {name: verdict[name] for name in summary["verdict"]} == summary["verdict"]
        assert sum(verdict["exposed_ms"]) == pytest.approx(verdict["mean_step_ms"], rel=1e-3)
        assert (verdict["episodes"], verdict["brief"]) == (summary["episodes"], summary["brief"])
        status = query.ask_one(send, query.GetStatus())
        assert (status.verdict, status.status) == (verdict["label"], "finished")
    played.aggregator.close()


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (
            {"what": "Secrets"},
            "does not understand the question 'Secrets' of traceml-ray '9.9': Inv",
        ),
        ({"what": "Times", "depth": 3}, "'Times' .* unknown field `depth`"),
        ({"what": "Times", "run": 3}, "'Times' .* Expected `str | null`, got `int`"),
        ({"what": [0] * 60_000}, "does not understand the question"),
        ({}, "does not understand the question 'None'"),
        (3, "does not understand the question 'None'"),
    ],
    ids=["kind", "field", "type", "long", "none", "no dict"],
)
def test_question_of_another_version_is_answered_with_both_versions(
    tmp_path: Path, request_: object, why: str
) -> None:
    played = Played(tmp_path / "demo", 2, late=None)
    played.play(5)
    message = msgspec.msgpack.encode({"version": "9.9", "requests": [{"what": "Status"}, request_]})
    for send in (played.aggregator.query, stored(played.folder)):
        error = msgspec.msgpack.decode(send(message))["error"]
        assert re.search(rf"^this session runs traceml-ray {re.escape(__version__)}.*{why}", error)
        assert len(error) <= 1000
    played.aggregator.close()


def test_run_is_meant_by_id_or_name_and_one_that_there_is_not_is_an_error(tmp_path: Path) -> None:
    played = Played(tmp_path / "demo", 2, late=None)
    played.play(5)
    for run in ("a", "b"):
        assert run_message(played.aggregator, run, info={"name": "fit"}).ok
        played.begin(job_id=run)
        played.play(5)
    for send in (played.aggregator.query, stored(played.folder)):
        run_names = [query.ask_one(send, query.GetSummary(run)).run for run in ("job", "a", "fit", None)]
        assert run_names == ["job", "a", "b", "b"]
        for asked in questions("x"):
            if isinstance(asked, query.OfRun):
                with pytest.raises(query.QueryError, match=r"no run 'x' in .*demo; .*, fit \(a\), fit \(b\)"):
                    query.ask_one(send, asked)
    assert not played.aggregator.errors
    played.aggregator.close()


@pytest.mark.parametrize("reply", [b"", b"\xc1", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({})])
def test_what_is_no_answer_is_said_to_be_none(reply: bytes) -> None:
    with pytest.raises(query.QueryError, match="the answer cannot be read"):
        query.ask(lambda _: reply, [query.GetStatus()])


@pytest.mark.parametrize("answers", [[], [{"items": []}], [3], [None, None]])
def test_answer_of_another_version_that_cannot_be_read_is_said_with_both_versions(answers: Any) -> None:
    reply = msgspec.msgpack.encode({"version": "9.9", "answers": answers})
    with pytest.raises(
        query.QueryError, match=f"answer to GetEvents .*of traceml-ray 9.9, this is {__version__}"
    ):
        query.ask_one(lambda _: reply, query.GetEvents())


def test_command_to_a_session_that_is_only_a_file_is_refused(tmp_path: Path) -> None:
    played = Played(tmp_path / "demo", 2, late=None)
    played.aggregator.close()
    for command in (query.Snapshot(), query.ReadFile("summary.json", 0, 9), query.Discard("x")):
        with pytest.raises(query.QueryError, match=f"{type(command).__name__} needs a running session"):
            query.ask_one(stored(played.folder), command)


def test_error_with_a_path_that_is_no_text_is_answered(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    with pytest.raises(query.QueryError, match="no such session file"):
        query.ask_one(stored(folder), query.GetRuns())


def test_answers_are_given_again_after_they_let_go_of_the_file(tmp_path: Path) -> None:
    played = Played(tmp_path / "demo", 2, late=None)
    played.play(5)
    answers = Answers(played.folder, LIMITS)
    for _ in range(2):
        assert query.ask_one(answers.reply, query.GetTimes("job", whole=True)).steps == 4
        assert len(query.ask_one(answers.reply, query.GetRanks())) == 2
        answers.close()
        assert not answers._histories._readers
    played.aggregator.close()


def test_array_comes_as_it_was_sent() -> None:
    sent = {"ranks": [0], "busy_ms": np.arange(6.0).reshape(2, 3)}
    answer = query.ask_one(lambda _: query.encode([sent]), query.GetBusy())
    assert answer.busy_ms.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_answer_with_an_invalid_array_is_refused() -> None:
    head = msgspec.msgpack.encode(["|O8", [1]])
    for body in (len(head).to_bytes(2, "little") + head + bytes(8), b"", b"\xff\xff"):
        array = msgspec.msgpack.Ext(1, body)
        with pytest.raises(query.QueryError, match="answer to GetBusy cannot be read"):
            query.ask_one(lambda _, a=array: query.encode([{"ranks": [0], "busy_ms": a}]), query.GetBusy())


def test_only_questions_of_a_person_bring_what_has_come_into_the_answer(tmp_path: Path) -> None:
    played = Played(tmp_path / "demo", 2, late=None)
    played.play(5, commit=False)
    (watched,) = query.ask(played.aggregator.query, [query.GetRanks()], watching=True)
    assert watched == {}
    assert len(ask(played.aggregator, "ranks")) == 2
    played.aggregator.close()
