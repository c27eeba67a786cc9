"""The Memory page, on a played session one of whose ranks leaks."""

from __future__ import annotations

from pathlib import Path

import pytest
from played import Played, look
from plotly.io.json import to_json_plotly

from traceml_ray.dash_app.app import Refresher
from traceml_ray.dash_app.session_pages import SessionPages
from traceml_ray.views.source import StoredSource

LEAK = 256 << 20


@pytest.fixture
def leaking(tmp_path: Path) -> Played:
    played = Played(tmp_path / "demo", late=None)
    played.leaks = {5: LEAK}
    for _ in range(90):
        played.play(5)
    played.end()
    return played


def test_page_names_the_rank_that_leaks_and_draws_it(leaking: Played) -> None:
    pages = SessionPages(StoredSource(leaking.folder))
    pages.poll()
    view = look(pages, "memory")
    assert view["session"]["memory"]
    assert view["of_memory"][0].rank == view["memory"].first_cause.rank == 5
    assert next(iter(view["lines"]["allocated_bytes"])) == "rank 5, GPU 1"
    shown = to_json_plotly(Refresher(pages).refresh("/memory", "", {}))
    assert "Nothing stands out" not in shown and "memory-allocated_bytes" in shown
    assert "Keep the last minutes now" not in shown  # it is over
    assert '"href":"/memory"' in shown.replace("\\u002f", "/")


def test_search_takes_ranks_and_says_what_is_wrong_with_them(leaking: Played) -> None:
    pages = SessionPages(StoredSource(leaking.folder))
    pages.poll()
    some = look(pages, "memory", q="0,4-6")
    assert [row.rank for row in some["chosen"].items] == [0, 0, 4, 4, 5, 5, 6, 6]  # host and device
    others = look(pages, "memory", q="0-3")
    assert not others["of_memory"] and [row.rank for row in others["chosen"].items] == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]
    assert "is not a rank" in look(pages, "memory", q="0,x")["wrong"]
    assert {row.node for row in look(pages, "memory", q="host-1")["chosen"].items} == {"host-1"}


def test_session_without_samples_has_no_tab_of_memory(tmp_path: Path) -> None:
    played = Played(tmp_path / "demo", late=None)
    for _ in range(3):
        played.play(5, memory=[], memory_from={})
    played.end()
    pages = SessionPages(StoredSource(played.folder))
    pages.poll()
    view = look(pages, "memory")
    assert view["memory"] is None and not view["session"]["memory"]
    assert "No rank has sent a sample" in to_json_plotly(Refresher(pages).refresh("/memory", "", {}))
