"""Layers from the wire to every face, and the way of a request to the ranks."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from measured_layers import LATE, LAYER, NAMES, measured
from played import Played, look
from plotly.io.json import to_json_plotly
from sessions import aggregation

from traceml_ray import cli
from traceml_ray.dash_app.app import Refresher
from traceml_ray.dash_app.server import create_app
from traceml_ray.dash_app.session_pages import SessionPages
from traceml_ray.launchers.control import ControlError, profile
from traceml_ray.monitor import profiling
from traceml_ray.reports.answers import QUESTIONS
from traceml_ray.signals.layers.records import LAYERS, WINDOWS
from traceml_ray.signals.layers.view import GetLayers
from traceml_ray.stages import DATA, FORWARD, STAGES
from traceml_ray.store import query
from traceml_ray.store.rank_processes import why_over
from traceml_ray.store.schema import SessionFileError
from traceml_ray.store.session import LIVE, Live
from traceml_ray.store.session_file import SessionFile
from traceml_ray.views.layer_call import ask_layers
from traceml_ray.views.source import StoredSource
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.messages import MAX_LAYER_STEPS, LayersRequest

TOKEN = {"Authorization": "Bearer secret"}


@pytest.fixture
def played(tmp_path: Path) -> Played:
    made = Played(tmp_path / "demo", late=None)
    made.memory_s = 5
    for _ in range(8):
        made.play(5)
    return made


def ask(played: Played) -> Callable[[query.Request[Any]], Any]:
    return lambda request: query.ask_one(played.source.reply, request)


def test_layer_of_a_rank_is_named_on_every_face(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    measured(played)
    (one,) = ask(played)(GetLayers()).findings
    assert (one.rank, one.layer, one.phase) == (LATE, LAYER, "forward") and 11 < one.excess_ms < 13
    pages = SessionPages(played.source, clock=played.clock, timer=played.clock.timer)
    pages.poll()
    view = look(pages, "layers", q="mlp")
    assert [view["layers"].layers[index].name for index in view["chosen"].items] == ["blocks.0.mlp", LAYER]
    played.end()
    summary = json.loads((played.folder / "summary.json").read_text())
    assert summary["layers"]["findings"][0]["layer"] == LAYER
    text = (played.folder / "report.txt").read_text()
    assert f"Layer {LAYER} (Linear) takes 12 ms longer on rank {LATE}" in text
    assert one.why[1:60] in (played.folder / "report.html").read_text()
    assert cli.main(["layers", str(played.folder)]) == 0
    assert f"takes 12 ms longer on rank {LATE}" in capsys.readouterr().out
    assert cli.main(["layers", str(played.folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0]["rank"] == LATE
    stored = SessionPages(StoredSource(played.folder))
    stored.poll()
    assert look(stored, "layers")["layers"].findings[0].layer == LAYER


@pytest.mark.parametrize(("stage", "named"), [(FORWARD, True), (DATA, False)])
def test_layer_stands_beside_a_verdict_on_its_rank_and_stage(tmp_path: Path, stage: int, named: bool) -> None:
    played = Played(tmp_path / "demo", late=LATE, stage=stage, onset=0)
    played.memory_s = 5
    for _ in range(20):
        played.play(5)
    measured(played)
    live = SessionPages(played.source, clock=played.clock, timer=played.clock.timer)
    live.poll()
    assert_beside_the_verdict(live, stage, named)
    played.end()
    stored = SessionPages(StoredSource(played.folder))
    stored.poll()
    assert_beside_the_verdict(stored, stage, named)


def assert_beside_the_verdict(pages: SessionPages, stage: int, named: bool) -> None:
    header = [look(pages, page) for page in ("header", "overview", "header")][-1]  # asked with the page
    assert (header["verdict"].rank, header["verdict"].stage) == (LATE, STAGES[stage])
    sentence = f"Layer {LAYER} (Linear) takes 12 ms longer on rank {LATE}"
    (layer,) = (one for one in header["findings"] if one.signal == "layers")
    assert layer.why.startswith(sentence)
    assert layer.explains == (header["first"].key if named else None)
    page, answer = Refresher(pages).refresh("/", "", {})
    assert (sentence.partition(" ms")[0] in to_json_plotly([page, answer["set"]])) == named
    assert f"slow layer: {LAYER} on rank {LATE}" in to_json_plotly([page, answer["set"]])


def test_live_header_asks_for_layers_in_the_message_of_a_tick_and_seldom(tmp_path: Path) -> None:
    played = Played(tmp_path / "demo", late=LATE, stage=FORWARD, onset=0)
    played.memory_s = 5
    for _ in range(20):
        played.play(5)
    pages = SessionPages(played.source, clock=played.clock, timer=played.clock.timer)
    for _ in range(3):
        pages.poll()
        look(pages, "header")
        played.play(5)
    asked, reply = list[list[str]](), played.source.reply

    def noted(message: bytes) -> bytes:
        asked.append([type(request).__name__ for request in query.decode(message, QUESTIONS)[0]])
        return reply(message)

    played.source.reply = noted  # type: ignore[method-assign]
    named = []
    for second in range(40):
        if second == 10:
            measured(played)
        played.play(5)
        pages.poll()
        named.append(any(one.signal == "layers" for one in look(pages, "header")["findings"]))
    of_layers = [message for message in asked if "GetLayers" in message]
    assert 1 <= len(of_layers) <= 2 and all("GetStatus" in message for message in of_layers)
    assert named == sorted(named) and 10 <= named.index(True) <= 30


def test_newest_windows_of_a_rank_are_kept(played: Played) -> None:
    measured(played, WINDOWS + 3)
    with SessionFile(played.folder / "session.sqlite") as file:
        kept = file.records_of(LAYERS, [1, 99])
    assert [one.number for one in kept[1]] == [*range(3, WINDOWS + 3)] and 99 not in kept
    assert [layer.name for layer in kept[1][0].layers] == [*NAMES]


def test_file_from_before_there_were_layers_is_read_and_gets_them(played: Played) -> None:
    measured(played)
    played.aggregator.close()
    path = played.folder / "session.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE layer_window")
    with SessionFile(path) as file:
        assert file.records_of(LAYERS, [1]) == {}
    assert cli.main(["layers", str(played.folder)]) == 1
    assert cli.main(["report", str(played.folder)]) == 0
    again = aggregation(played.folder, played.clock, world_size=8)
    again.close()
    with SessionFile(path) as file:
        assert file._all("SELECT count(*) FROM layer_window") == [(0,)]


def test_window_that_is_damaged_is_said_to_be(played: Played) -> None:
    measured(played)
    played.aggregator.close()
    with sqlite3.connect(played.folder / "session.sqlite") as connection:
        connection.execute("UPDATE layer_window SET layers = ?", (b"x" * 40,))
    with (
        SessionFile(played.folder / "session.sqlite") as file,
        pytest.raises(SessionFileError, match="damaged"),
    ):
        file.records_of(LAYERS, [1])


def commands(played: Played) -> list[wire.Command]:
    reply = codec.decode(played.aggregator.ingest(played.relays[0].message()), wire.RelayReply)
    return [command for command in reply.commands if command.name == "layers"]


def test_request_comes_to_all_ranks_of_the_run_and_ends(played: Played) -> None:
    wanted = wire.MeasureRequest("a", layers=LayersRequest(12))
    played.aggregator.ingest(played.relays[0].message(requests=[wanted]))
    played.play(5)
    (command,) = commands(played)
    assert command.args == {"id": "a", "run": "job", "ranks": "all", "steps": 12}
    measured(played, asked="a")
    assert len(ask(played)(GetLayers(asked="a")).ranks) == 8
    assert ask(played)(GetLayers(asked="b")).ranks == []
    for _ in range(int(profiling.SEND_S) + 1):
        played.play(1)
    assert commands(played) == []


def test_driver_waits_for_what_it_has_asked_for(played: Played) -> None:
    asked = []

    def answer(request: query.Request[Any]) -> Any:
        if isinstance(request, query.StartLayers):
            asked.append(request)
        elif asked and isinstance(request, GetLayers) and len(asked) == 1:
            measured(played, asked=asked[0].id)
        return ask(played)(request)

    assert ask_layers(answer, 10, None, 60).findings[0].rank == LATE
    assert asked[0].request.steps == 10
    assert ask_layers(answer, None, None, 60).ranks == [*range(8)]
    with pytest.raises(ValueError, match="steps=0"):
        ask_layers(answer, 0, None, 60)


def test_run_that_is_over_has_no_step_left_and_nobody_waits_for_one(played: Played) -> None:
    runs = ask(played)(query.GetRuns())
    assert why_over(runs, None) == why_over([], "x") == why_over(runs, "another, which may begin") == ""
    for rank, relay in ((rank, played.relays[rank.identity.node_rank]) for rank in played.ranks):
        played.aggregator.ingest(relay.message(rank.batch(0, final=True)))
    played.aggregator.commit()
    (run,) = runs = ask(played)(query.GetRuns())
    assert why_over(runs, None).startswith(f"run {run.name!r} has no step left to record: ended")
    assert why_over(runs, run.id) == why_over(runs, None)
    other = msgspec.structs.replace(run, id="b", name="'b'", status="running")
    assert "; 'b' goes on" in why_over([*runs, other], run.id)
    assert not ask_layers(ask(played), 10, None, 60).ranks  # asked in its last second: it waits for no rank
    (played.folder / LIVE).write_bytes(msgspec.json.encode(Live(os.getpid(), "no socket", "")))
    with pytest.raises(ControlError, match="has no step left to record"):
        profile(played.folder, wire.ProfileRequest("0"), 60.0)


def test_page_asks_under_the_token(played: Played) -> None:
    pages = SessionPages(played.source, clock=played.clock, timer=played.clock.timer)
    pages.poll()
    client = create_app(pages, token="secret", hosts=["localhost"]).server.test_client()
    assert client.post("/layers", data={"steps": "7"}).status_code == 401
    assert client.post("/layers", data={"steps": "x"}, headers=TOKEN).status_code == 400
    too_many = {"steps": str(MAX_LAYER_STEPS + 1)}
    assert client.post("/layers", data=too_many, headers=TOKEN).status_code == 400
    response = client.post("/layers", data={"steps": "7"}, headers=TOKEN)
    assert response.status_code == 202
    browser = {**TOKEN, "Accept": "text/html", "Referer": "http://localhost/layers?run=job&asked=old"}
    back = client.post("/layers", data={"steps": "7"}, headers=browser)
    assert back.status_code == 303 and back.headers["Location"].startswith("/layers?run=job&asked=")
    played.play(1)
    assert [command.args["steps"] for command in commands(played)] == [7, 7]
    assert commands(played)[0].args["id"] == response.json["request"]
