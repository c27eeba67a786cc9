"""Lists of ranks, and what the search box finds: chosen, in order and paged by the URL alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from played import Played, look

from traceml_ray.dash_app.app import Refresher
from traceml_ray.dash_app.listing import PER_PAGE, choose
from traceml_ray.dash_app.route import Route
from traceml_ray.dash_app.session_pages import SessionPages
from traceml_ray.store import query


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> SessionPages:
    """Ranks 0 to 10 on hosts 0 to 2; rank 7 is late in data."""
    played = Played(tmp_path_factory.mktemp("out") / "played", 11, per_node=4, late=7, onset=20)
    made = SessionPages(played.source, clock=played.clock, timer=played.clock.timer)
    for _ in range(20):
        played.play(5)
        made.poll()
    return made


def ranks(pages: SessionPages, **selection: Any) -> list[int]:
    return [row["rank"] for row in look(pages, "ranks", **selection)["chosen"].items]


def test_ranks_are_in_order_with_the_named_one_first(pages: SessionPages) -> None:
    assert ranks(pages) == [7, *range(7), 8, 9, 10]
    assert look(pages, "ranks")["states"] == {"named by the verdict": 1, "running": 10}


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ({"q": "host-2"}, [8, 9, 10]),
        ({"q": "1"}, [1]),
        ({"q": "HOST-1 running"}, [4, 5, 6]),
        ({"q": "nowhere"}, []),
        ({"node": "host-0"}, [0, 1, 2, 3]),
        ({"node": "node-2"}, [8, 9, 10]),
        ({"state": "named by the verdict"}, [7]),
        ({"sort": "-rank"}, [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]),
        ({"sort": "none", "state2": "x"}, [7, *range(7), 8, 9, 10]),
    ],
)
def test_ranks_are_searched_filtered_and_put_in_order(
    pages: SessionPages, selection: dict[str, str], expected: list[int]
) -> None:
    assert ranks(pages, **selection) == expected


def test_rank_without_a_report_is_last_in_either_order(tmp_path: Path) -> None:
    played = Played(tmp_path / "played", 11, late=7, onset=0)
    pages = SessionPages(played.source, clock=played.clock, timer=played.clock.timer)
    for _ in range(10):
        played.play(5, silent=(10,))
    pages.poll()
    assert ranks(pages, state="no report") == [10]
    up, down = ranks(pages, sort="data"), ranks(pages, sort="-data")
    assert up[-2:] == [7, 10] and down[0] == 7 and down[-1] == 10


def test_rank_table_has_the_numbers_of_the_query(pages: SessionPages) -> None:
    source = query.ask_one(pages.source.reply, query.GetRankTimes())
    rows = {row["rank"]: row for row in look(pages, "ranks")["chosen"].items}
    for rank, busy, stages in zip(source.ranks, source.busy_ms, source.stages, strict=True):
        assert rows[rank]["busy_ms"] == pytest.approx(busy, rel=1e-3)
        assert [*rows[rank]["stages"].values()] == pytest.approx(stages, rel=1e-3, abs=1e-3)
    assert rows[7]["over"] == pytest.approx(1 + 12 / 19.2, abs=0.02)
    assert (rows[5]["gpu"], rows[0]["gpu"], rows[2]["gpu"]) == (1, 0, None)


def test_long_list_comes_in_pages() -> None:
    numbers, seen = [*range(2 * PER_PAGE + 7)], []
    for page in ("", "2", "3"):
        chosen = choose(numbers, Route("ranks", "", (("page", page),)), str, {})
        seen += chosen.items
        assert (chosen.n_matching, chosen.n_all, chosen.pages) == (len(numbers), len(numbers), 3)
    assert seen == numbers
    assert choose(numbers, Route("ranks", "", (("page", "99"),)), str, {}).page == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", ["rank 5 on host-1", "step 5"]),
        ("rank 5", ["rank 5 on host-1"]),
        ("host-2", ["node host-2", "rank 8 on host-2", "rank 9 on host-2", "rank 10 on host-2"]),
        ("10.0.0.2", ["node host-1"]),
        ("step 1,000", []),
        ("step 60", ["step 60"]),
        ("  ", []),
        ("99999999999", []),
        ("²", []),
    ],
)
def test_search_box_finds_ranks_nodes_and_steps(pages: SessionPages, text: str, expected: list[str]) -> None:
    assert [*Refresher(pages).search_targets(text, "/events", "?kind=exit")] == expected


def test_search_box_leads_to_pages_of_the_same_run(pages: SessionPages) -> None:
    places = Refresher(pages).search_targets("5", "/events", "?run=job&kind=exit")
    assert places == {"rank 5 on host-1": "/rank/5?run=job", "step 5": "/step/5?run=job"}


def test_nodes_stay_in_order_with_the_named_one_first(tmp_path: Path) -> None:
    played = Played(tmp_path / "played", 12, per_node=2, late=9, onset=40, jitter_ms=2.0)
    pages = SessionPages(played.source, clock=played.clock, timer=played.clock.timer)
    seen = []
    for _ in range(20):
        played.play(5)
        pages.poll()
        seen.append([card["label"] for card in look(pages, "overview")["nodes"]])
    names = [f"host-{n}" for n in range(6)]
    assert seen[5] == seen[6] == seen[7] == names
    assert seen[-1] == seen[-2] == ["host-4", *(name for name in names if name != "host-4")]
