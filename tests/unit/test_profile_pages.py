"""The Profiles page: what is listed and asked for, and what is made of traces while pages are served."""

from __future__ import annotations

import gzip
import json
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import msgspec
import pytest
from played import Played, look
from plotly.io.json import to_json_plotly
from profiled import events, stored
from recorded import written

from traceml_ray.dash_app import session_cache, shell, trace_job
from traceml_ray.dash_app.app import Refresher
from traceml_ray.dash_app.route import Route
from traceml_ray.dash_app.server import create_app
from traceml_ray.dash_app.session_cache import FILE, Breakdowns, traces_of
from traceml_ray.dash_app.session_pages import SessionPages
from traceml_ray.errors import Errors
from traceml_ray.store import profiles, query
from traceml_ray.store.profiles import Profile, ProfileInfo, RankProfile
from traceml_ray.traces import breakdown as made_of
from traceml_ray.traces.breakdown import Breakdown
from traceml_ray.traces.difference import difference
from traceml_ray.traces.key_averages import key_averages
from traceml_ray.traces.sources import sources_of_profile
from traceml_ray.views.source import StoredSource
from traceml_ray.wire import messages as wire

SENTENCE = "rank 5 spends 4 ms a step of `forward` more in `aten::copy_` (8 calls more) than rank 1."
TOKEN = {"Authorization": "Bearer secret"}
ACCEPT = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"
BROWSER = {**TOKEN, "Accept": ACCEPT}
"""As Chromium asks."""


@pytest.fixture
def played(tmp_path: Path) -> Played:
    made = Played(tmp_path / "demo", onset=60)
    made.memory_s = 5
    for _ in range(24):
        made.play(5)
    return made


def pages_of(played: Played) -> SessionPages:
    pages = SessionPages(played.source, clock=played.clock, timer=played.clock.timer)
    pages.poll()
    return pages


def aimed(played: Played, name: str = "20260101T000000", **about: Any) -> Profile:
    """Have the profile that the verdict on rank 5 leads to, and its event."""
    (run,) = query.ask_one(played.source.reply, query.GetRuns())
    lacking = [RankProfile(7, "refused", "it has not answered within 15 s")]
    usual: dict[str, Any] = {
        "suspect": 5,
        "stage": "data",
        "median": 1,
        "found": [SENTENCE],
        "first_step": 80,
    }
    write = {
        1: lambda path: written(path, events()),
        2: lambda path: written(path, events()),
        5: lambda path: written(path, events(8)),
    }
    about = {"run": run.id, "by_itself": True, "others": lacking} | usual | about
    profile = stored(played.folder, name, write, **about)
    event = wire.Event("profile", played.clock(), 80, message="a profile", data={"profile": name})
    played.aggregator.ingest(played.relays[0].message(events=[event]))
    played.play(5)
    return profile


def shown(pages: SessionPages, path: str, search: str = "") -> str:
    refresher = Refresher(pages)
    for _ in range(2):  # what a page asks is there with the next poll
        page, answer = refresher.refresh(path, search, {})
        pages.poll()
    text = to_json_plotly([page, answer["set"]])
    return text.replace("\\u002f", "/").replace("\\u003e", ">")


def wait_for(pages: SessionPages, info: ProfileInfo, until: threading.Event) -> Breakdown:
    assert pages.breakdowns.get(info) is None or until.wait(0)
    assert until.wait(240)
    breakdown = pages.breakdowns.get(info)
    assert isinstance(breakdown, Breakdown), breakdown
    return breakdown


def test_breakdown_is_what_table_and_difference_say(played: Played) -> None:
    aimed(played)
    (one,) = profiles.profiles_of(played.folder)
    sources = sources_of_profile(one)
    breakdown = made_of.decode(made_of.encode(made_of.breakdown(sources)))
    assert breakdown.operations == key_averages(sources) and breakdown.n_operations == 7
    for beside, stage in (("median", None), (1, None), (1, "forward")):
        assert breakdown.difference(5, beside, stage) == difference(sources, 5, beside, stage)
    assert breakdown.stages() and breakdown.difference(5, 4) is None and breakdown.difference(4) is None
    other = msgspec.structs.replace(breakdown, version="0.0")
    with pytest.raises(ValueError, match=r"version 0\.0"):
        made_of.decode(made_of.encode(other))


def test_trace_that_cannot_be_read_is_a_problem_and_no_other_is_lost(played: Played) -> None:
    profile = aimed(played)
    (one,) = profiles.profiles_of(played.folder)
    one.trace(profile.captured[0]).write_bytes(b"no gzip")
    breakdown = made_of.breakdown(sources_of_profile(one))
    assert [rank.rank for rank in breakdown.ranks] == [2, 5] and len(breakdown.problems) == 1
    assert breakdown.problems[0].startswith("node-0 / rank 1: ")


def test_page_of_a_profile_is_made_meanwhile_and_kept_beside_it(played: Played) -> None:
    profile = aimed(played)
    pages = pages_of(played)
    ready, renew = threading.Event(), pages.renew
    pages.breakdowns._renew = lambda: (renew(), ready.set())
    path = f"/profile/{profile.id}"
    assert "being read" in shown(pages, path)
    assert ready.wait(240) and not pages.errors
    text = shown(pages, path)
    assert "8 calls more) than the median of ranks 1 and 2" in text
    assert "rank-5.json.gz" in text and "it has not answered within 15 s" in text
    view = look(
        pages, "profile", profile=profile.id, of=5, beside=1, stage="forward", q="copy", sort="-calls"
    )
    assert view["difference"].others == [1] and view["difference"].stage == "forward"
    assert [(row.rank, row.calls) for row in view["chosen"].items] == [(5, 16)]
    folder = played.folder / "profiles" / profile.id
    for trace in folder.glob("rank-*"):
        trace.write_bytes(b"")  # it is not read again
    info = query.ask_one(played.source.reply, query.GetProfiles()).done[0]
    again = SessionPages(played.source)
    done = threading.Event()
    again.breakdowns._renew = done.set
    assert wait_for(again, info, done).operations == pages.breakdowns.get(info).operations


def test_traces_on_another_node_are_fetched_in_pieces(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = aimed(played)
    monkeypatch.setattr(session_cache, "_PIECE", 100)
    here = query.ask_one(played.source.reply, query.GetProfiles()).done[0]
    away = msgspec.structs.replace(here, path="/nowhere/profiles/x")
    with traces_of(played.source, away) as folder:
        assert profiles.read_profile(folder) == profile
        for rank in profile.captured:
            assert (folder / rank.file).read_bytes() == (Path(here.path) / rank.file).read_bytes()
    assert not folder.exists()
    profiles.remove_profile(played.folder, profile.id)
    done, results = threading.Event(), list[Any]()
    errors = Errors()
    made = Breakdowns(played.source, errors, done.set)
    results.append(made.get(away))
    assert results == [None] and done.wait(240)
    assert made.get(away) == f"profile {profile.id} has been removed" and errors.total() == 1


def test_job_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(trace_job.JobError, match="No such file"):
        trace_job.run("breakdown", tmp_path / "none", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_overview_says_by_operation_why_a_rank_is_late(played: Played) -> None:
    pages = pages_of(played)
    assert look(pages, "header")["by_operation"] is None
    profile = aimed(played)
    pages.poll()
    text = shown(pages, "/")
    assert "By operation " in text and "aten::copy_" in text and f"/profile/{profile.id}" in text
    assert f"/profile/{profile.id}?of=5" in shown(pages, "/rank/5")
    assert f"/profile/{profile.id}?of=3" not in shown(pages, "/rank/3")


@pytest.mark.parametrize("about", [{"first_step": 20}, {"suspect": 3}, {"found": []}, {"run": "another"}])
def test_profile_of_another_episode_says_nothing_about_this_one(played: Played, about: Any) -> None:
    aimed(played, **about)
    pages = pages_of(played)
    assert "aten::copy_" not in shown(pages, "/")


def test_list_has_cost_reasons_and_progress(played: Played) -> None:
    aimed(played)
    pages = pages_of(played)
    ranks = [RankProfile(0, "sending", bytes=430, total_bytes=1000), RankProfile(3, "refused", "no torch")]
    now = msgspec.structs.replace(aimed(played, "b"), id="c", ranks=ranks, requests=["r"], found=[])
    profiles.show(played.folder, now)
    pages.poll()
    text = shown(pages, "/profiles", "?asked=r")
    assert "sending 43" in text and "no torch" in text and "rank 7: it has not answered within 15 s" in text
    assert "45 ms" in text and "68.8 ms" in text  # to start it; (45 + 12.5 + 80) ms in 2 steps
    offered = look(pages, "profiles")["ranks"]
    assert len(offered.split(",")) == 2 and "5" in offered and f'"defaultValue":"{offered}"' in text
    assert "which begin some seconds from now" in text


def test_form_says_what_is_wrong_with_its_values(played: Played) -> None:
    pages = pages_of(played)
    assert "is not a rank" in shown(pages, "/profiles", "?ranks=0,x")
    assert "is not a number of steps" in shown(pages, "/profiles", "?steps=many")
    assert "role" not in look(pages, "profiles", ranks="0-3", steps=50)["wrong"]
    assert look(pages, "profiles", ranks="0-3", steps=51)["wrong"]


def test_tabs_are_the_same_while_a_session_runs_and_afterwards(played: Played) -> None:
    def tabs(pages: SessionPages) -> Any:
        nav = shell.parts(look(pages, "header"), Route())[0].content
        return [label for _, _, label in nav[2:]]

    live = tabs(pages_of(played))
    assert {"Layers", "Memory", "Profiles"} <= {*live}
    played.end()
    pages = SessionPages(StoredSource(played.folder))
    pages.poll()
    assert tabs(pages) == live
    assert "No layer has been measured" in shown(pages, "/layers")
    stored(played.folder, "a", {0: lambda path: written(path, events())})
    pages = SessionPages(StoredSource(played.folder))
    pages.poll()
    look(pages, "overview")
    text = shown(pages, "/profiles")
    assert '"/profile/a"' in text and "profile-form" not in text


def test_profiles_are_asked_for_under_the_token(played: Played) -> None:
    client = create_app(pages_of(played), token="secret", hosts=["localhost"]).server.test_client()
    wanted = {"ranks": "1,5", "steps": "2", "shapes": "1"}
    assert client.post("/profiles", data=wanted).status_code == 401
    elsewhere = {**TOKEN, "Origin": "http://elsewhere"}
    assert client.post("/profiles", data=wanted, headers=elsewhere).status_code == 403
    wrong = client.post("/profiles", data={"ranks": "x"}, headers=TOKEN)
    assert wrong.status_code == 400 and "'x' is not a rank" in wrong.text
    browser = {**BROWSER, "Referer": "http://localhost//profiles?run=0&asked=old"}
    back = client.post("/profiles", data={"ranks": "x", "steps": "3"}, headers=browser)
    assert (back.status_code, back.headers["Location"]) == (303, "/profiles?run=0&ranks=x&steps=3")
    back = client.post("/profiles", data=wanted, headers=browser)
    asked = parse_qs(back.headers["Location"].partition("?")[2])["asked"]
    other = client.post("/profiles", data={"ranks": "0"}, headers=TOKEN)
    assert other.status_code == 202 and other.json["request"] != asked[0]
    played.play(5)
    while (now := profiles.under_way(played.folder)) is None:
        time.sleep(0.01)  # a thread of its own writes it
    assert now.requests == asked and now.shapes and not now.stacks
    assert [rank.rank for rank in now.ranks] == [1, 5]


def test_files_of_a_profile_are_downloaded_and_removed(played: Played) -> None:
    profile = aimed(played)
    client = create_app(pages_of(played), token="secret", hosts=["localhost"]).server.test_client()
    path = f"/profiles/{profile.id}"
    assert client.get(f"{path}/trace.json.gz").status_code == 401
    trace = json.loads(gzip.decompress(client.get(f"{path}/trace.json.gz", headers=TOKEN).data))
    assert [rank["rank"] for rank in trace["traceml_ray"]["ranks"]] == [1, 2, 5]
    table = client.get(f"{path}/operations.csv", headers=TOKEN)
    assert table.text.startswith("node_id,node,rank,name,") and table.text.count("\n") == 8
    data = client.get(f"{path}/rank-5.json.gz", headers=TOKEN).data
    assert data == (played.folder / "profiles" / profile.id / "rank-5.json.gz").read_bytes()
    for wrong in ("rank-0.json.gz", "profile.json", FILE, "rank-5.json.gz%00"):
        assert client.get(f"{path}/{wrong}", headers=TOKEN).status_code == 404
    assert client.get(f"{path}/remove", headers=TOKEN).status_code == 404
    browser = {**BROWSER, "Referer": f"http://localhost/profile/{profile.id}?run=0&sort=calls"}
    back = client.post(f"{path}/remove", headers=browser)
    assert (back.status_code, back.headers["Location"]) == (303, "/profiles?run=0")
    assert client.post(f"{path}/remove", headers=TOKEN).status_code == 404


def test_profile_of_a_session_that_is_over_is_removed(played: Played) -> None:
    profile = aimed(played)
    played.end()
    pages = SessionPages(StoredSource(played.folder))
    pages.poll()
    assert profile.id in shown(pages, "/profiles")
    client = create_app(pages, token=None, hosts=["localhost"]).server.test_client()
    assert client.post(f"/profiles/{profile.id}/remove").status_code == 200
    assert profiles.names_of(played.folder) == [] and profile.id not in shown(pages, "/profiles")
