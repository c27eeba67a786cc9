"""What a browser is sent: only what it has not yet, every part of every page, and never a traceback."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dash import dcc, html
from hypothesis import given
from hypothesis import strategies as st
from played import Played
from plotly.io.json import to_json_plotly

from traceml_ray.dash_app import figures
from traceml_ray.dash_app.app import Refresher
from traceml_ray.dash_app.board import Board
from traceml_ray.dash_app.heat import HeatWire
from traceml_ray.dash_app.light import light
from traceml_ray.dash_app.pages import bits
from traceml_ray.dash_app.place import Place

PAGES = ["/", "/node/host-1", "/rank/5", "/events", "/sessions", "/ledger"]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    made = Played(tmp_path_factory.mktemp("out") / "played", onset=20)
    for _ in range(16):
        made.play(5)
    return made


@pytest.fixture
def board(played: Played) -> Board:
    made = Board(played.source, clock=played.clock, timer=played.clock.timer)
    made.poll()
    return made


def sent(answer: Any) -> int:
    return len(to_json_plotly(answer))


def ids(element: Any) -> set[str]:
    return {found.id for found in element._traverse() if getattr(found, "id", None)}


class TestRefresh:
    @pytest.mark.parametrize("path", PAGES)
    def test_a_page_comes_once_and_then_nothing_until_something_changes(
        self, board: Board, path: str
    ) -> None:
        refresher = Refresher(board)
        page, first = refresher.refresh(path, "", {})
        assert first["seen"]["page"]
        assert "Traceback" not in to_json_plotly(page)
        again, second = refresher.refresh(path, "", first["seen"])
        assert sent(again) < 100
        assert (second["set"], second["heat"]) == ({}, None)
        assert not board.errors

    def test_the_verdict_is_in_every_answer_that_a_browser_has_not_seen(self, board: Board) -> None:
        _, answer = Refresher(board).refresh("/events", "", {})
        assert "rank 5" in answer["set"]["verdict-headline"]["children"]
        assert answer["marks"] == {"ranks": [5], "nodes": ["host-1"]}

    def test_new_steps_change_parts_and_not_the_page(self, played: Played, board: Board) -> None:
        refresher = Refresher(board)
        _, first = refresher.refresh("/", "", {})
        played.play(5)
        board.poll()
        page, second = refresher.refresh("/", "", first["seen"])
        assert sent(page) < 100
        assert {"exposed", "timeline", "tiles"} <= second["set"].keys()
        assert 0 < second["heat"]["columns"].count(-1) <= 10
        assert "ranks" not in second["heat"]

    def test_another_stage_is_the_same_page(self, board: Board) -> None:
        refresher = Refresher(board)
        _, first = refresher.refresh("/", "", {})
        _, second = refresher.refresh("/", "?stage=data", first["seen"])
        assert second["page"] == first["page"]
        assert second["heat"]["stage"] == "data"

    def test_what_goes_wrong_is_one_line_and_is_counted(self, board: Board) -> None:
        def fail(*_: Any, **__: Any) -> dict[str, Any]:
            raise RuntimeError("secret of the inside")

        board.view = fail  # type: ignore[method-assign]
        _, answer = Refresher(board).refresh("/", "", {})
        told = to_json_plotly(answer)
        assert "could not be made" in told
        assert "secret" not in told
        assert board.errors.total() == 1

    @pytest.mark.parametrize(
        "path",
        ["/nowhere", "/rank", "/rank/x", "/rank/-1", "/node", "/events/1", "/rank/9999999999999999999999"],
    )
    def test_a_url_of_nothing_is_said(self, board: Board, path: str) -> None:
        page, _ = Refresher(board).refresh(path, "", {})
        assert "There is no such page" in to_json_plotly(page)

    @pytest.mark.parametrize("path", ["/rank/77", "/node/gone"])
    def test_a_rank_or_node_that_is_not_there_is_said(self, board: Board, path: str) -> None:
        _, answer = Refresher(board).refresh(path, "", {})
        assert path.rpartition("/")[2] in to_json_plotly(answer["set"])
        assert not board.errors

    @pytest.mark.parametrize(
        "search",
        [
            "?run=none",
            "?session=none",
            "?session=../etc",
            "?stage=none",
            "?rank=x",
            "?a=../../etc&b=x",
            "?" + "x=1&" * 100,
            "?kind=%00",
        ],
    )
    @pytest.mark.parametrize("path", PAGES)
    def test_a_strange_query_is_no_error(self, board: Board, path: str, search: str) -> None:
        Refresher(board).refresh(path, search, {})
        assert not board.errors

    def test_nothing_played_yet(self, tmp_path: Path) -> None:
        source = Played(tmp_path / "played").source
        board = Board(source)
        for page in PAGES:
            Refresher(board).refresh(page, "", {})
        board.poll()
        for page in PAGES:
            Refresher(board).refresh(page, "", {})
        assert not board.errors

    def test_a_cell_in_words(self, board: Board) -> None:
        found = Refresher(board).cell({"rank": 5, "first": 60, "last": 60}, "")
        assert found is not None
        assert "data 14" in found["text"]


class TestHeat:
    @given(
        st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=6)
    )
    def test_a_browser_puts_together_what_the_board_had(self, states: list[tuple[int, int, int]]) -> None:
        wire, has = HeatWire(), Browser()
        for first, count, noise in states:
            heat = self.heat(first, count, noise)
            told = wire.delta(heat, has.id)
            if told is not None:
                has.take(json.loads(json.dumps(told)))
            assert has.first == heat["first"]
            np.testing.assert_array_equal(has.z, heat["z"])

    def test_an_unknown_state_is_sent_whole(self) -> None:
        told = HeatWire().delta(self.heat(0, 5, 0), 12345)
        assert told is not None
        assert told["columns"] == [-1] * 5
        assert told["ranks"] == [0, 1, 2]

    @staticmethod
    def heat(first: int, count: int, noise: int) -> dict[str, Any]:
        steps = [*range(first, first + count)]
        z = np.array([[(7 * step + rank) % 256 for step in steps] for rank in range(3)], dtype=np.uint8)
        z[0, :noise] = 255
        return {
            "ranks": [0, 1, 2],
            "nodes": ["a", "a", "b"],
            "first": steps,
            "last": steps,
            "z": z,
            "stage": "total",
            "by": "rank",
        }


class Browser:
    """What assets/app.js does with an answer."""

    def __init__(self) -> None:
        self.id: int | None = None
        self.first: list[int] = []
        self.z = np.empty((0, 0), dtype=np.uint8)

    def take(self, told: dict[str, Any]) -> None:
        if "ranks" not in told:
            assert told["base"] == self.id
        new = np.frombuffer(base64.b64decode(told["z"]), dtype=np.uint8).reshape(-1, 3)
        come = iter(new)
        self.z = np.array(
            [next(come) if at < 0 else self.z[:, at] for at in told["columns"]], dtype=np.uint8
        ).T
        self.id, self.first = told["id"], told["first"]


class TestLight:
    def test_components_as_plain_data(self) -> None:
        made = html.Div(
            [None, "a & <b>", dcc.Link("rank 5", href="/rank/5")], className="x", style={"width": "3%"}
        )
        assert light(made) == {
            "t": "div",
            "a": {"class": "x", "style": "width:3%"},
            "c": ["a & <b>", {"t": "a", "a": {"href": "/rank/5"}, "c": "rank 5"}],
        }
        assert light([html.Details(open=True), None, 3]) == [{"t": "details", "a": {"open": ""}}, "3"]


class TestPlace:
    @given(st.text(min_size=1, max_size=20), st.text(max_size=20))
    def test_a_link_leads_where_it_says(self, key: str, value: str) -> None:
        path, _, search = Place(query=(("run", "r1"),)).to("node", key, a=value or None).partition("?")
        place = Place.of(path, "?" + search)
        assert place is not None
        assert (place.page, place.key, place.get("run")) == ("node", key, "r1")
        assert place.get("a") == (value or None)

    def test_a_part_of_the_selection_changes(self) -> None:
        place = Place("overview", "", (("run", "r1"), ("stage", "data")))
        assert place.here(stage=None) == "/?run=r1"
        assert place.here(stage="forward") == "/?run=r1&stage=forward"


class TestFigures:
    def test_every_axis_has_a_unit_or_the_figure_says_why_it_is_empty(self) -> None:
        line = {name: [1.0, 2.0] for name in ("median_ms", "p10_ms", "p90_ms", "worst_ms")}
        full = [
            figures.exposed([1, 2], {"data": [1.0, None]}),
            figures.timeline([1, 2], {**line, "worst_rank": [0, None]}, []),
            figures.lines([1, 2], {"a": [1.0, 2.0]}, "ms"),
        ]
        for figure in full:
            assert all(figure["layout"][axis]["title"]["text"] for axis in ("xaxis", "yaxis"))
        for figure in (
            figures.exposed([], {}),
            figures.lines([1], {"a": [None]}, "ms"),
            figures.lines([], {}, "ms"),
        ):
            assert figure["layout"]["annotations"][0]["text"]

    def test_a_slow_first_step_is_cut_off_and_said(self) -> None:
        figure = figures.lines(range(200), {"a": [2310.0] + [100.0] * 199}, "ms", unit="ms")
        assert figure["layout"]["yaxis"]["autorangeoptions"]["maxallowed"] < 200
        assert "2,310 ms" in figure["layout"]["annotations"][0]["text"]

    def test_a_sparkline_has_gaps_where_nothing_is_known(self) -> None:
        assert str(figures.spark([1.0, None, 2.0, 3.0])).count("M") == 2
        assert figures.spark([1.0, None]) is None


class TestSentences:
    def test_numbers_stay_with_their_units(self) -> None:
        assert bits.marked("41 ms, 12 % of `data`")[0] == "41\u00a0ms, 12\u00a0% of "
