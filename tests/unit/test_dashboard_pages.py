"""What a browser is sent: only what it has not yet, every part of every page, and never a traceback."""

from __future__ import annotations

import base64
import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from dash import dcc, html
from hypothesis import given
from hypothesis import strategies as st
from played import Played
from plotly.io.json import to_json_plotly

from traceml_ray import text
from traceml_ray.analysis.shapes import StepColumns
from traceml_ray.analysis.spread import MISSING
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.verdict_shapes import verdict_info
from traceml_ray.dash_app import elements, heatmap
from traceml_ray.dash_app.app import Refresher
from traceml_ray.dash_app.elements import part
from traceml_ray.dash_app.pages import overview, ranks
from traceml_ray.dash_app.route import Route
from traceml_ray.dash_app.session_pages import SessionPages
from traceml_ray.document import drawing
from traceml_ray.views import figures, machines
from traceml_ray.views.heat_figure import heat_figure
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

PAGES = [
    "/",
    "/node/host-1",
    "/rank/5",
    "/ranks",
    "/step/60",
    "/profiles",
    "/signals",
    "/events",
    "/sessions",
    "/ledger",
]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    made = Played(tmp_path_factory.mktemp("out") / "played", onset=20)
    for _ in range(16):
        made.play(5)
    return made


@pytest.fixture
def pages(played: Played) -> SessionPages:
    made = SessionPages(played.source, clock=played.clock, timer=played.clock.timer)
    made.poll()
    return made


def step_columns(steps: np.ndarray, **fields: Any) -> StepColumns:
    """Columns of one step each, all equal."""
    ms = np.ones(len(steps))
    by_column = {name: ms for name, kind in StepColumns.__annotations__.items() if kind == "Array"}
    fields = {"first": steps, "last": steps, "worst_rank": np.zeros(len(steps), np.int64), **fields}
    return StepColumns(**{**by_column, "token": [], "z": np.zeros((0, len(steps)), np.uint8), **fields})


def sent(answer: Any) -> int:
    return len(to_json_plotly(answer))


def ids(element: Any) -> set[str]:
    return {
        element_with_id.id for element_with_id in element._traverse() if getattr(element_with_id, "id", None)
    }


def _graphs(refresher: Refresher, path: str) -> dict[str, Any]:
    page, _ = refresher.refresh(path, "", {})
    return {graph.id: graph.figure for graph in page._traverse() if hasattr(graph, "figure")}


def _longer(figure: Any, ends: dict[str, Any]) -> Any:
    """Return a figure with what is new at its end, as assets/app.js makes it."""
    data = [
        {**trace, **{name: [*trace[name][len(trace[name]) - ends["keep"] :], *new[name]] for name in new}}
        for trace, new in zip(figure["data"], ends["data"], strict=True)
    ]
    return {"data": data, "layout": ends["layout"]}


class TestRefresh:
    @pytest.mark.parametrize("path", PAGES)
    def test_page_comes_once_then_nothing_until_a_change(self, pages: SessionPages, path: str) -> None:
        refresher = Refresher(pages)
        page, first = refresher.refresh(path, "", {})
        assert first["seen"]["page"]
        assert "Traceback" not in to_json_plotly(page)
        again, second = refresher.refresh(path, "", first["seen"])
        assert sent(again) < 100
        assert second["set"] == {}
        assert not pages.errors

    def test_verdict_is_in_the_first_answer_of_every_page(self, pages: SessionPages) -> None:
        _, answer = Refresher(pages).refresh("/events", "", {})
        assert "rank 5" in to_json_plotly(answer["set"]["verdict-strip"])

    def test_new_steps_update_components_and_not_the_page(self, played: Played, pages: SessionPages) -> None:
        refresher = Refresher(pages)
        _, first = refresher.refresh("/", "", {})
        played.play(5)
        pages.poll()
        page, second = refresher.refresh("/", "", first["seen"])
        assert sent(page) < 100
        assert {"exposed", "timeline", "kpis", "heat"} <= second["set"].keys()

    @pytest.mark.parametrize("path", ["/node/host-1", "/rank/5"])
    def test_chart_that_gets_longer_is_sent_its_new_points(
        self, played: Played, pages: SessionPages, path: str
    ) -> None:
        refresher = Refresher(pages)
        _, first = refresher.refresh(path, "", {})
        shown = _graphs(refresher, path)
        played.play(5)
        pages.poll()
        _, second = refresher.refresh(path, "", first["seen"])
        now = _graphs(refresher, path)
        new = {id: props["grown"] for id, props in second["set"].items() if "grown" in props}
        assert len(new) > 3
        assert not {id for id, props in second["set"].items() if "figure" in props}
        for id, ends in new.items():
            assert _longer(shown[id], ends) == now[id]
        _, late = refresher.refresh(
            path, "", {**first["seen"], "sums": dict.fromkeys(first["seen"]["sums"], 1)}
        )
        assert {id for id in new if "figure" in late["set"][id]} == {*new}

    def test_chart_that_is_full_moves_on_by_its_new_points(
        self, played: Played, pages: SessionPages, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Rates, and counters that come with every fifth sample, have what they need before the first."""
        monkeypatch.setattr(machines, "SAMPLES", 8)
        refresher = Refresher(pages)
        _, first = refresher.refresh("/node/host-1", "?from=newest", {})
        played.play(5)
        pages.poll()
        _, second = refresher.refresh("/node/host-1", "?from=newest", first["seen"])
        charts = {id: props for id, props in second["set"].items() if id.startswith(("node-", "gpu-"))}
        drawn = {id: [*props] for id, props in charts.items() if "content" not in props}
        assert {"node-disk_read_bps", "gpu-util_pct", "gpu-pcie_tx_bps"} <= drawn.keys()
        assert {*map(tuple, drawn.values())} == {("grown", "of")}

    def test_page_stays_with_another_stage(self, pages: SessionPages) -> None:
        refresher = Refresher(pages)
        _, first = refresher.refresh("/", "", {})
        _, second = refresher.refresh("/", "?stage=data", first["seen"])
        assert second["seen"]["page"] == first["seen"]["page"]
        assert "data" in second["set"]["heat"]["figure"]["layout"]["uirevision"]

    def test_error_is_counted_and_one_line_until_the_next_refresh(self, pages: SessionPages) -> None:
        def fail(*_: Any, **__: Any) -> dict[str, Any]:
            raise RuntimeError("secret of the inside")

        refresher, header = Refresher(pages), pages.header
        _, first = refresher.refresh("/", "", {})
        pages.header = fail  # type: ignore[method-assign]
        _, answer = refresher.refresh("/", "", first["seen"])
        sent = to_json_plotly(answer)
        assert "could not be made" in sent
        assert "secret" not in sent
        assert pages.errors.total() == 1
        pages.header = header  # type: ignore[method-assign]
        _, good = refresher.refresh("/", "", answer["seen"])
        assert "problem" in good["set"] and "could not be made" not in to_json_plotly(good)

    @pytest.mark.parametrize(
        "path",
        ["/nowhere", "/rank", "/rank/x", "/rank/-1", "/node", "/events/1", "/rank/9999999999999999999999"],
    )
    def test_url_of_no_page_says_so(self, pages: SessionPages, path: str) -> None:
        page, _ = Refresher(pages).refresh(path, "", {})
        assert "There is no such page" in to_json_plotly(page)

    @pytest.mark.parametrize(
        ("path", "sentence", "others"),
        [
            ("/rank/5000", "There is no rank 5,000 in this run: it has 8 ranks.", {"/rank/0", "/rank/7"}),
            ("/node/gone", "There is no node gone in this run.", {"/node/node-0", "/node/node-1"}),
        ],
    )
    def test_page_of_an_unknown_rank_or_node_says_so_and_offers_others(
        self, pages: SessionPages, path: str, sentence: str, others: set[str]
    ) -> None:
        page, answer = Refresher(pages).refresh(path, "", {})
        sent = to_json_plotly(page).replace("\\u002f", "/")
        assert sentence in sent
        assert all(f'"{href}"' in sent for href in others)
        assert "rank 5 " in to_json_plotly(answer["set"]["verdict-strip"])
        assert not pages.errors

    @pytest.mark.parametrize("path", PAGES)
    def test_link_to_a_session_that_cannot_be_read_says_why_and_offers_others(
        self, pages: SessionPages, path: str
    ) -> None:
        broken = Path(pages.source.out) / "broken"
        broken.mkdir(exist_ok=True)
        (broken / "session.sqlite").write_bytes(b"no database")
        for name, why in (
            ("broken", "cannot use the session file: "),
            ("gone", "no session has that name under"),
        ):
            page, answer = Refresher(pages).refresh(path, f"?session={name}", {})
            shown = to_json_plotly([page, answer]).replace("\\u002f", "/")
            assert f"Session '{name}' cannot be read: " in shown and why in shown
            assert "?session=played" in shown
            if path == "/sessions":  # the list has verdicts of other sessions
                shown = to_json_plotly([answer["set"]["verdict-strip"], answer["set"]["tab"]])
            assert "rank 5 " not in shown and "host-1" not in shown
        assert not pages.errors

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
    def test_query_with_foreign_values_is_no_error(self, pages: SessionPages, path: str, search: str) -> None:
        Refresher(pages).refresh(path, search, {})
        assert not pages.errors

    def test_pages_before_any_session_are_no_error(self, tmp_path: Path) -> None:
        source = Played(tmp_path / "played").source
        pages = SessionPages(source)
        for page in PAGES:
            Refresher(pages).refresh(page, "", {})
        pages.poll()
        for page in PAGES:
            Refresher(pages).refresh(page, "", {})
        assert not pages.errors

    def test_session_that_ended_before_any_row_says_so(self, tmp_path: Path) -> None:
        played = Played(tmp_path / "played")
        played.aggregator.finish(wire.Finish(codec.VERSION, 1))
        pages = SessionPages(played.source, clock=played.clock, timer=played.clock.timer)
        pages.poll()
        page, _ = Refresher(pages).refresh("/", "", {})
        assert "No rank has reported in this session" in to_json_plotly(page)
        assert not pages.errors

    def test_cell_has_its_times_in_words(self, pages: SessionPages) -> None:
        heading = "rank 5 (host-1), step 60: 1.62×"
        words = Refresher(pages).cell({"ranks": [5], "first": 60, "last": 60, "heading": heading}, "")
        assert words is not None
        assert words.startswith(f"{heading}\n1.6") and "busy 31" in words and "data 14" in words

    def test_row_of_others_keeps_its_heading(self, pages: SessionPages) -> None:
        asked = {"ranks": [], "first": 60, "last": 60, "heading": "worst of 984 other ranks"}
        assert Refresher(pages).cell(asked, "") == asked["heading"]
        assert not pages.errors

    def test_cell_of_a_node_names_its_worst_rank(self, pages: SessionPages) -> None:
        for search in ("", "?stage=data", "?from=0"):
            words = Refresher(pages).cell({"ranks": [4, 7], "first": 60, "last": 60}, search)
            assert words is not None
            assert words.startswith("rank 5: 1.6") and "busy 31" in words, search
        words = Refresher(pages).cell({"ranks": [0, 77], "first": 60, "last": 60}, "?stage=none")
        assert words is not None and words.startswith("rank 0: ")
        assert not pages.errors


class TestHeatmap:
    @given(st.integers(1, 400), st.sampled_from([1, 4, 8]), st.integers(0, 399), st.booleans(), st.booleans())
    def test_row_is_the_worst_of_its_ranks(
        self, world: int, per_node: int, late: int, named: bool, by_cost: bool
    ) -> None:
        heat = self.heat(world, per_node)
        late %= world
        ranks = (late,) if named and not by_cost else ()
        verdict = verdict_info(Verdict(label="straggler", ranks=ranks))
        drawn = heatmap.rows(heat, verdict, Route(query=(("order", "cost"),) if by_cost else ()))
        covered = [line for row in drawn for line in row.lines]
        assert sorted(covered) == [*range(world)]
        assert by_cost or covered == sorted(covered)
        assert [row.rank for row in drawn if row.named] == [late][: len(ranks)]
        figure = heat_figure(heat, drawn, "", {"between": (4.5, 14.5), "onset": None})
        assert "y" not in figure["data"][0]  # rows that are not equally high are painted cell by cell
        sent = figure["data"][0]["z"]
        shape = [int(n) for n in sent["shape"].split(",")]
        z = np.frombuffer(base64.b64decode(sent["bdata"]), np.uint8).reshape(shape)
        shown = np.repeat(np.arange(len(drawn)), [row.height for row in drawn])  # lines are equally high
        for row, values in zip([drawn[row_index] for row_index in shown], z, strict=True):
            lines = np.where(heat.z[[*row.lines]] == MISSING, -1, heat.z[[*row.lines]].astype(int))
            assert (lines.max(axis=0) % 256 == values).all()
        tops = [float(label.style["top"][:-2]) for label in heatmap.gutter(drawn).children]
        assert 1 <= len(tops) <= 23 and all(b - a >= 12.9 for a, b in pairwise(tops))

    def test_few_ranks_are_rows_of_their_own(self) -> None:
        drawn = heatmap.rows(self.heat(8, 4), None, Route(query=(("run", "r1"),)))
        assert [row.rank for row in drawn] == [*range(8)]
        assert (drawn[5].name, drawn[5].href) == ("rank 5 (host-1)", "/rank/5?run=r1")
        assert [self.high(world) for world in (3, 8, 128, 1024)] == [124, 234, 336, 336]

    def high(self, world: int) -> int:
        return int(heatmap.gutter(heatmap.rows(self.heat(world, 4), None, Route())).style["height"][:-2])

    def test_many_ranks_are_rows_of_nodes_that_open_and_close(self) -> None:
        heat = self.heat(1024, 8)
        drawn = heatmap.rows(heat, None, Route())
        assert (len(drawn), drawn[3].name, drawn[3].href) == (128, "worst of host-3", "/?open=host-3")
        drawn = heatmap.rows(heat, None, Route(query=(("open", "host-3"),)))
        opened = [row for row in drawn if row.rank is not None]
        assert [row.rank for row in opened] == [*range(24, 32)]
        assert len(drawn) == 127 + 8 and opened[0].height > 1 and opened[0].toggle == "/?shut=host-3"
        straggler = verdict_info(Verdict(label="straggler", ranks=(9,)))
        by_verdict = heatmap.rows(heat, straggler, Route())
        assert [row.rank for row in by_verdict if row.rank is not None] == [*range(8, 16)]
        closed = heatmap.rows(heat, straggler, Route(query=(("shut", "host-1"),)))
        assert len(closed) == 128 and closed[1].toggle == "/?open=host-1"

    def test_node_of_a_small_job_closes_and_opens_again(self) -> None:
        drawn = heatmap.rows(self.heat(8, 4), None, Route())
        assert [row.toggle for row in drawn if row.toggle] == ["/?shut=host-0", "/?shut=host-1"]
        drawn = heatmap.rows(self.heat(8, 4), None, Route(query=(("shut", "host-0"),)))
        assert [row.rank for row in drawn] == [None, 4, 5, 6, 7] and drawn[0].toggle == "/?open=host-0"

    def test_order_by_cost_begins_with_the_worst_and_has_the_others_as_one_row(self) -> None:
        heat = self.heat(1024, 8)
        heat.z[:, :] = 127
        heat.z[[700, 3]] = [[254], [190]]  # more than four times, and twice as long
        heat.z[700, 0] = MISSING
        drawn = heatmap.rows(
            heat, verdict_info(Verdict(label="straggler", ranks=(700,))), Route(query=(("order", "cost"),))
        )
        assert [row.rank for row in drawn[:3]] == [700, 3, 0] and drawn[0].named
        assert (len(drawn), drawn[-1].name, drawn[-1].href) == (41, "worst of 984 other ranks", None)
        text = json.dumps(
            json.loads(to_json_plotly(heatmap.as_table(heat, drawn, Route()))), ensure_ascii=False
        )
        assert "≥ 4.00×" in text and "1.99×" in text and "missing" in text

    def test_row_of_a_very_large_job_is_some_nodes(self) -> None:
        heat = msgspec.structs.replace(self.heat(1000, 1), by="node")
        named_late = verdict_info(Verdict(label="straggler", nodes=("host-7",), ranks=(7,)))
        drawn = heatmap.rows(heat, named_late, Route())
        assert len(drawn) == 200 + 4
        (named,) = (row for row in drawn if row.named)
        assert (named.name, named.href, named.rank) == ("host-7", "/node/host-7", None)

    @staticmethod
    def heat(world: int, per_node: int) -> StepColumns:
        steps = np.arange(5, 15)
        z = np.random.default_rng(world).integers(0, 256, (world, len(steps)), dtype=np.uint8)
        ranks = [*range(world)]
        nodes = [f"host-{rank // per_node}" for rank in ranks]
        return step_columns(steps, z=z, by="rank", ranks=ranks, nodes=nodes)


class TestParts:
    def test_part_is_its_tag_properties_and_children(self) -> None:
        made = part(
            html.Div(
                [None, "a & <b>", dcc.Link("rank 5", href="/rank/5")],
                id="x",
                className="y",
                style={"width": "3%"},
            )
        )
        link = ["a", {"href": "/rank/5"}, "rank 5"]
        assert made.content == [
            "div",
            {"id": "x", "className": "y", "style": {"width": "3%"}},
            "a & <b>",
            link,
        ]
        assert part(html.Details(id="z", open=True)).content == ["details", {"id": "z", "open": True}]


class TestRoute:
    @given(st.text(min_size=1, max_size=20), st.text(max_size=20))
    def test_link_is_read_as_the_route_it_was_made_of(self, key: str, value: str) -> None:
        path, _, search = Route(query=(("run", "r1"),)).to("node", key, a=value or None).partition("?")
        route = Route.parse(path, "?" + search)
        assert route is not None
        assert (route.page, route.key, route.get("run")) == ("node", key, "r1")
        assert route.get("a") == (value or None)

    def test_link_changes_a_part_of_the_selection(self) -> None:
        route = Route("overview", "", (("run", "r1"), ("stage", "data")))
        assert route.here(stage=None) == "/?run=r1"
        assert route.here(stage="forward") == "/?run=r1&stage=forward"

    def test_lasting_link_has_session_run_and_all_of_the_selection_but_no_token(self) -> None:
        off = ",".join(f"chart-of-a-long-name.series {n}" for n in range(8))
        route = Route.parse("/rank/5", f"?from=2&to=9&step=3&off={off}&token=secret")
        assert route is not None and "secret" not in route.here(step=4)
        path, _, search = route.lasting("job", "r1").partition("?")
        shown = Route.parse(path, search)
        assert shown is not None
        assert (shown.page, shown.key) == ("rank", "5")
        selection = {"from": "2", "to": "9", "step": "3", "off": off, "session": "job", "run": "r1"}
        assert dict(shown.query) == selection


class TestFigures:
    def test_figure_has_a_unit_on_every_axis_or_says_why_it_is_empty(self) -> None:
        full = [
            figures.exposed([1, 2], {"data": [1.0, None]}),
            figures.timeline(step_columns(np.arange(1, 3)), []),
            figures.lines([1, 2], {"a": [1.0, 2.0]}, "ms"),
        ]
        for figure in full:
            assert all(figure["layout"][axis]["title"]["text"] for axis in ("xaxis", "yaxis"))
        for figure in (
            figures.exposed([], {}),
            figures.lines([1], {"a": [None]}, "ms"),
            figures.lines([], {}, "ms"),
            figures.timeline(None, []),
        ):
            assert figure["layout"]["annotations"][0]["text"]

    def test_figure_cuts_off_a_slow_first_step_and_says_so(self) -> None:
        figure = figures.lines(range(200), {"a": [2310.0] + [100.0] * 199}, "ms", unit="ms")
        assert figure["layout"]["yaxis"]["autorangeoptions"]["maxallowed"] < 200
        assert "2,310 ms" in figure["layout"]["annotations"][0]["text"]

    def test_line_keeps_the_colour_of_its_legend_where_another_was_not_measured(self) -> None:
        (drawn,) = figures.lines([1, 2], {"used": [None, None], "installed": [1.0, 2.0]}, "GB")["data"]
        assert (drawn["name"], drawn["line"]["color"]) == ("installed", figures.LINES[1])

    def test_legend_switches_a_series_off_and_on_by_the_url(self, pages: SessionPages) -> None:
        sent = {}
        for search in ("", "?off=timeline.worst,exposed.data"):
            page, _ = Refresher(pages).refresh("/", search, {})
            sent[search] = to_json_plotly(page).replace("\\u002f", "/")
        assert sent[""].count('"visible":false') == 1  # the axis of the heatmap
        assert sent["?off=timeline.worst,exposed.data"].count('"visible":false') == 3
        assert (
            '"href":"/?off=timeline.worst%2Cexposed.data%2Cskew.nodes"'
            in sent["?off=timeline.worst,exposed.data"]
        )
        assert '"href":"/?off=exposed.data"' in sent["?off=timeline.worst,exposed.data"]

    def test_sparkline_has_gaps_where_nothing_is_known(self) -> None:
        assert drawing.spark([1.0, None, 2.0, 3.0], None, (120, 28)).count("M") == 2
        assert drawing.spark([1.0, None], None, (120, 28)) == ""


class TestSentences:
    def test_numbers_stay_with_their_units(self) -> None:
        assert elements.marked("41 ms, 12 % of `data`")[0] == "41\u00a0ms, 12\u00a0% of "


@pytest.mark.parametrize(
    ("path", "chart", "head"),
    [
        ("/", "timeline", ["step", "time (UTC)", "worst", "median"]),
        ("/rank/5", "stage-data", ["step", "time (UTC)", "this rank", "median rank"]),
        ("/node/host-1", "node-mem_used_bytes", ["time (UTC)", "used", "installed"]),
    ],
)
def test_chart_is_a_table_where_the_url_asks_for_it(
    pages: SessionPages, path: str, chart: str, head: list[str]
) -> None:
    page, _ = Refresher(pages).refresh(path, f"?table={chart}", {})
    charts = {
        one.id: one.content for one in page._traverse() if str(getattr(one, "id", "")).endswith("-table")
    }
    drawn = next(one.figure for one in page._traverse() if getattr(one, "id", "") == chart)
    assert all(len(content or "list") == 4 for id, content in charts.items() if id != f"{chart}-table")
    _, _, _, _, (_, _, (_, _, (_, _, names), (_, _, newest, *_))) = charts[f"{chart}-table"]
    assert [cell[2] for cell in names[2:]] == head
    values = newest[3 + ("time (UTC)" in head[1:]) :]
    assert [cell[2] for cell in values] == [
        text.number(trace["y"][-1]) for trace in drawn["data"] if trace["name"] in head
    ]


def test_of_very_many_nodes_the_slowest_have_cards() -> None:
    known = dict.fromkeys(("worst_rank", "worst_ms", "skew_pct", "cpu_pct", "mem_pct"))
    known |= {"gpu_util_pct": None, "gpu_mem_pct": None, "alive": True, "named": False, "ranks": [0]}
    over = {index: 40.0 if index == 29 else index / 10 for index in range(30)}
    nodes = [
        {**known, "node_id": f"n{index}", "label": f"host-{index}", "median_ms": 10.0, "slower_pct": pct}
        for index, pct in over.items()
    ]
    *cards, others = overview._cards(nodes, Route())
    assert [card.href for card in cards[:2]] == ["/node/n29", "/node/n28"]
    linked = links_in(others)
    assert "/node/n0" in linked and "/node/n29" not in linked and len(cards) + len(linked) == 30


def links_in(element: Any) -> set[str]:
    return {one.href for one in element._traverse() if getattr(one, "href", None)}


def test_exit_codes_have_a_column_once_one_is_known(pages: SessionPages) -> None:
    run = pages.newest
    assert run is not None
    names = []
    for code in (None, 1):
        run.ranks[5] = dataclasses.replace(run.ranks[5], exit_code=code)
        _, view = pages.make(lambda: ranks.data(pages, run, Route("ranks")))
        names.append([column.name for column in view["columns"]])
    assert names[1] == [*names[0][:5], "exit code", *names[0][5:]]
