"""The data of the web app: its numbers are the report's, live or stored, and its memory has a bound."""

from __future__ import annotations

import itertools
import json
import shutil
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from played import HOST, Played, PlayedSource, look
from plotly.io.json import to_json_plotly
from sessions import LIMITS, Clock, Rank, Relay, aggregation, run_message, written_summary
from snapshot import Snapshot

from traceml_ray import text
from traceml_ray.analysis.anomalies import Anomaly
from traceml_ray.analysis.spread import MISSING, deviations, excess, quantiles, ratio
from traceml_ray.dash_app import shell
from traceml_ray.dash_app.app import Refresher
from traceml_ray.dash_app.pages import rank
from traceml_ray.dash_app.route import Route
from traceml_ray.dash_app.session_pages import SessionPages
from traceml_ray.document import timezone
from traceml_ray.reports.answers import QUESTIONS
from traceml_ray.reports.comparison import compare
from traceml_ray.reports.files import write_reports
from traceml_ray.reports.headlines import named
from traceml_ray.sinks.prometheus import Metrics, health
from traceml_ray.stages import FORWARD, N_STAGES, POST_SYNC, SYNC_WAIT
from traceml_ray.store import query
from traceml_ray.store.session import SessionFolder, prepare
from traceml_ray.store.session_file import SessionFile
from traceml_ray.terminal.panel import panel
from traceml_ray.terminal.snapshot import Choice, take_snapshot
from traceml_ray.text import natural
from traceml_ray.views import figures
from traceml_ray.views.session_poll import SessionPoll
from traceml_ray.views.source import StoredSource
from traceml_ray.views.values import by_stage
from traceml_ray.wire import messages as wire

DRAWN = ("heat", "columns", "nodes", "kpis")


@pytest.fixture
def played(tmp_path: Path) -> Played:
    made = Played(tmp_path / "demo")
    made.memory_s = 5
    return made


def followed(played: Played, seconds: int = 30, **fields: Any) -> SessionPages:
    """Pages that are polled while a session is played."""
    pages = SessionPages(played.source, clock=played.clock, timer=played.clock.timer)
    for _ in range(seconds):
        played.play(5, **fields)
        pages.poll()
    assert not pages.errors
    return pages


def _read(view: dict[str, Any]) -> list[str]:
    """What a person reads first: headline, why and next, and what is under each number."""
    verdict = view["verdict"]
    kpis = [f"{kpi['key']}: {kpi['text']}" for kpi in view["kpis"]]
    return [named(verdict), verdict.why, verdict.next, *kpis]


def same(one: Any, other: Any) -> bool:
    """Whether two payloads are equal, arrays and all."""
    if isinstance(one, msgspec.Struct):
        one, other = msgspec.structs.asdict(one), msgspec.structs.asdict(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other, equal_nan=True))
    return bool(one == other)


def kpi(view: dict[str, Any], key: str) -> float:
    return next(kpi["value"] for kpi in view["kpis"] if kpi["key"] == key)


def waited_pct(played: Played) -> float:
    """Of all ranks' time beyond the warm-up, how much they waited."""
    with SessionFile(played.folder / "session.sqlite") as session:
        rows = np.array(
            [rank_rows.rows[LIMITS.warmup_steps + 1 :, :N_STAGES] for rank_rows in session.rows()[0]]
        )
    return float(100 * rows[..., SYNC_WAIT].sum() / rows.sum())


@pytest.mark.parametrize(
    ("world", "per_node", "late", "stage"), [(8, 4, 5, 1), (4, 2, 0, 3), (6, 2, None, 1)]
)
def test_board_numbers_are_those_of_the_summary(
    tmp_path: Path, world: int, per_node: int, late: int | None, stage: int
) -> None:
    played = Played(tmp_path / "demo", world, per_node=per_node, late=late, stage=stage)
    live = followed(played)
    played.end()
    live.poll()
    with SessionFile(played.folder / "session.sqlite") as session:
        summary = written_summary(session, LIMITS)
    source = StoredSource(played.folder)
    stored = SessionPages(source)
    stored.poll()
    steps = summary["steps"]
    for pages in (live, stored):
        view = look(pages, "overview")
        assert kpi(view, "median") == pytest.approx(steps["median_ms"], rel=1e-6)
        assert next(kpi["text"] for kpi in view["kpis"]) == f"median; p95 {text.ms(steps['p95_ms'])}"
        assert kpi(view, "worst") == pytest.approx(1 + steps["global_skew_pct"] / 100, abs=1e-4)
        assert kpi(view, "wait") == pytest.approx(waited_pct(played), abs=0.01)
        cards = {card["label"]: card for card in view["nodes"]}
        for node, ms in steps["per_node_median_ms"].items():
            assert cards[node]["median_ms"] == pytest.approx(ms, rel=1e-6)
            rows = look(pages, "node", node=node)["ranks"]
            medians = {str(row["rank"]): row["median_ms"] for row in rows}
            assert medians == pytest.approx({r: steps["per_rank_median_ms"][r] for r in medians}, rel=1e-6)
        assert max(card["slower_pct"] for card in view["nodes"]) == pytest.approx(
            steps["node_skew_pct"], abs=1e-3
        )
        warm = LIMITS.warmup_steps
        for stage in summary["stages"]:
            mean = np.mean(by_stage(view["columns"].exposed)[stage["name"]][warm:])
            assert mean == pytest.approx(stage["exposed_ms"], rel=1e-3, abs=1e-3)
    assert look(stored, "header")["verdict"].label == summary["verdict"]["label"]
    assert look(stored, "header")["verdict"].rank == summary["verdict"]["rank"] == late
    source.close()


def test_stored_board_equals_the_live_one(played: Played) -> None:
    live = followed(played)
    played.end()
    live.poll()
    stored = SessionPages(StoredSource(played.folder), clock=played.clock, timer=played.clock.timer)
    stored.poll()
    for stage in ("total", "data"):
        one, other = (look(pages, "overview", stage=stage) for pages in (live, stored))
        assert all(same(one[name], other[name]) for name in DRAWN)
        assert one["events"] == other["events"]
    for page, selection in (
        ("rank", {"rank": 5}),
        ("node", {"node": "node-1"}),
        ("events", {}),
        ("cell", CELL),
    ):
        one, other = (look(pages, page, **selection) for pages in (live, stored))
        common = one.keys() - look(live, "header").keys() - OF_JUDGEMENT
        assert common and all(same(one[name], other[name]) for name in common)
    assert (look(live, "header")["state"], look(stored, "header")["state"]) == ("finished", "stored")


OF_JUDGEMENT = {"suspect", "episodes", "brief"}
"""Live they are of the windows that were judged then."""
CELL = {"ranks": [5], "first": 120, "last": 122}


def test_late_rank_is_in_verdict_heatmap_and_timeline(played: Played, snapshot: Snapshot) -> None:
    view = look(followed(played), "overview")
    assert (view["verdict"].label, view["verdict"].rank) == ("straggler", 5)
    snapshot("web", *_read(view))
    z, late = view["heat"].z, view["heat"].ranks.index(5)
    after = view["heat"].first >= played.onset
    assert (abs(ratio(z[late, after]) - 31.3 / 19.3) < 0.05).all()
    assert (np.delete(z, late, 0)[:, after] < 135).all() and (z[:, ~after] < 135).all()
    assert set(view["columns"].worst_rank[after]) == {5}
    total = view["columns"].exposed.sum(axis=1)
    assert total[after].mean() == pytest.approx(33, abs=1)
    assert view["nodes"][0]["worst_rank"] == 5
    assert kpi(view, "worst") == pytest.approx(1 + 12 / 19.2, abs=0.01)  # though most of the run was well
    assert view["events"][0]["kind"] == "verdict" and view["events"][0]["step"] == played.onset


def test_missing_rows_are_never_zero(played: Played, snapshot: Snapshot) -> None:
    """One rank never reports, another falls silent, a row of a third is lost on the way."""
    pages = SessionPages(played.source, clock=played.clock, timer=played.clock.timer)
    for second in range(20):
        played.play(5, silent=(7, 2) if second >= 8 else (7,), lost=(3,) if second == 4 else ())
        pages.poll()
    heat = look(pages, "overview")["heat"]
    z, ranks, first = heat.z, heat.ranks, heat.first.tolist()
    assert (z[ranks.index(7)] == MISSING).all()
    assert heat.nodes[ranks.index(7)] == "no report"
    assert (z[ranks.index(2)][np.array(first) >= 40] == MISSING).all()
    assert (z[ranks.index(0)] != MISSING).all() and first == list(range(1, 100))
    assert (z[ranks.index(3)] == MISSING).tolist() == [20 <= step < 25 for step in first]
    exposed = by_stage(look(pages, "overview")["columns"].exposed)["forward"]
    assert np.isnan(exposed).tolist() == [20 <= step < 25 or step >= 40 for step in first]
    rows = {row["rank"]: row for row in look(pages, "node", node="node-0")["ranks"]}
    assert rows[2]["busy"][-1] is None and rows[1]["busy"][-1] > 0
    assert look(pages, "cell", ranks=[2], first=90, last=92)["text"] == "no row of this rank here"
    header = look(pages, "header")
    snapshot("web", header["state_text"], header["coverage_text"])
    nobody = look(pages, "rank", rank=7)
    assert (nobody["rank"], nobody["world"]) == (None, 8)


def test_heatmap_has_the_lowest_missing_ranks_of_a_huge_job(tmp_path: Path, snapshot: Snapshot) -> None:
    aggregator, clock, relay = aggregation(tmp_path / "s"), Clock(), Relay()
    pages = SessionPages(PlayedSource(aggregator), clock=clock, timer=clock.timer)
    ranks = [Rank(number, 1 << 20) for number in (0, 1)]
    for _ in range(2):
        aggregator.ingest(relay.message(*(rank.batch(20) for rank in ranks)))
        assert aggregator.commit()
        pages.poll()
    snapshot("web", look(pages, "header")["state_text"])
    heat = look(pages, "overview")["heat"]
    assert heat is None or heat.ranks == [0, 2]


def test_rows_that_come_late_are_in_their_columns(played: Played) -> None:
    """A node is cut off for longer than anybody waits for it; one rank begins late."""
    other = SessionPages(played.source, clock=played.clock, timer=played.clock.timer)
    pages = SessionPages(played.source, clock=played.clock, timer=played.clock.timer)
    for second in range(30):
        cut_off = (4, 5, 6, 7) if 8 <= second < 20 else (2,) if second < 7 else ()
        played.play(5, late=cut_off)
        pages.poll()
        heat = look(pages, "overview")["heat"]
        if second == 18:
            z = heat.z
            assert (z[4:, -40:] == MISSING).all() and (z[:4] != MISSING).all()
    assert not pages.errors
    other.poll()
    one, whole = look(pages, "overview"), look(other, "overview")
    assert (one["heat"].z != MISSING).all()
    assert all(same(one[name], whole[name]) for name in DRAWN)


def test_board_states_follow_the_session(played: Played, snapshot: Snapshot) -> None:
    pages = SessionPages(played.source, clock=played.clock, timer=played.clock.timer)
    played.source.down = True
    assert pages.poll() and look(pages, "overview")["state"] == "empty"
    snapshot("web", look(pages, "header")["state_text"])
    played.source.down = False
    pages.poll()
    assert look(pages, "overview")["state"] == "waiting"
    played.play(0)
    pages.poll()
    snapshot("web", look(pages, "header")["state_text"])
    played.play(50)
    assert pages.poll() and look(pages, "header")["state"] == "live"
    before, machine = look(pages, "overview"), look(pages, "node", node="host-1")["samples"]
    played.source.down = True
    assert pages.poll()
    stale = look(pages, "overview")
    assert stale["state"] == "stale"
    snapshot("web", stale["state_text"])
    assert all(same(stale[name], before[name]) for name in DRAWN)
    played.clock.tick(30)
    assert not pages.poll()
    assert look(pages, "header")["coverage_text"].endswith(" 30 s old")
    assert look(pages, "node", node="host-1")["samples"] == machine and machine["t_ns"]
    assert look(pages, "rank", rank=1)["process"]["t_ns"] == []
    played.source.down = False
    assert pages.poll() and look(pages, "header")["state"] == "live"
    played.end()
    assert pages.poll() and look(pages, "header")["state"] == "finished"
    assert not pages.errors


def test_stored_session_that_cannot_be_read_says_why(played: Played) -> None:
    followed(played, 25)
    played.end()
    played.aggregator.close()
    with sqlite3.connect(played.folder / "session.sqlite") as connection:
        connection.execute('UPDATE verdict SET body = \'{"label": "healthy"}\'')
    pages = SessionPages(StoredSource(played.folder), clock=played.clock, timer=played.clock.timer)
    pages.poll()
    state_text = look(pages, "header")["state_text"]
    assert state_text.startswith("The session has finished. Part of it cannot be read: the answer to")
    assert "the session file is damaged" in state_text


def test_session_whose_run_has_ended_is_idle_until_the_next_one(played: Played, snapshot: Snapshot) -> None:
    """As between two `fit()` of a driver."""
    pages = followed(played, 35)
    played.clock.tick()
    for node, relay in enumerate(played.relays):
        ranks = [rank for rank in played.ranks if rank.identity.node_rank == node]
        played.aggregator.ingest(relay.message(*(rank.batch(0, final=True) for rank in ranks)))
    assert played.aggregator.commit() and pages.poll()
    assert health(pages)["state"] == "ending", "its launcher has not reported how it ended"
    assert run_message(played.aggregator, "job", info={"name": "fit"}, status="finished").ok
    pages.poll()
    assert health(pages) == {"status": "ok", "state": "idle"}
    assert b'traceml_state{state="idle"} 1' in Metrics(pages).exposition()[0]
    idle = look(pages, "header")
    assert (idle["coverage_text"], idle["verdict"].label) == ("data from 8 of 8 ranks", "straggler")
    assert not idle["incident"].episode.goes_on
    assert pages.newest is not None and pages.newest.times is not None and pages.newest.times.of_all
    assert run_message(played.aggregator, "second", info={"name": "fit 2"}).ok
    assert played.aggregator.commit() and pages.poll()
    snapshot("web", idle["state_text"], look(pages, "header")["state_text"])
    played.begin(job_id="second")
    played.play(15)
    pages.poll()
    assert health(pages)["state"] == "live"
    assert look(pages, "header", run="job")["state"] == "idle"
    played.end()
    pages.poll()
    assert health(pages)["state"] == "finished"
    assert not pages.errors


def test_run_of_plain_actors_has_ended_with_its_ranks(tmp_path: Path) -> None:
    aggregator = aggregation(tmp_path / "demo", clock := Clock(), launcher="ray")
    rank, relay = Rank(0, 1), Relay()
    pages = SessionPages(PlayedSource(aggregator), clock=clock, timer=clock.timer)
    for final in (False, True):
        clock.tick()
        aggregator.ingest(relay.message(rank.batch(15, final=final)))
        assert aggregator.commit()
        aggregator.judge()
        pages.poll()
        assert health(pages)["state"] == ("idle" if final else "live")
    assert look(pages, "header")["state_text"].startswith(
        "Run job has ended. The session continues: it waits"
    )
    aggregator.close()


def test_new_attempt_and_new_run_take_over(played: Played, snapshot: Snapshot) -> None:
    pages = followed(played, 10)
    played.begin(attempt=1)
    played.late = None
    for _ in range(6):
        played.play(5)
        pages.poll()
    assert look(pages, "overview")["heat"].first.tolist() == list(range(1, 30))
    assert look(pages, "rank", rank=3)["rank"]["attempt"] == 1
    played.begin(job_id="second")
    for _ in range(4):
        played.play(5)
        pages.poll()
    view = look(pages, "overview")
    assert (view["session"]["run"], view["step"]) == ("second", 19)
    first = look(pages, "overview", run="job")
    assert (first["session"]["run"], first["step"]) == ("job", 29)
    assert first["heat"].first.tolist() == list(range(1, 30))
    assert [run["id"] for run in view["session"]["runs"]] == ["job", "second"]
    none = look(pages, "overview", run="third")
    assert (none["state"], none["verdict"], none["step"]) == ("missing", None, None)
    assert none["others"] == ["job", "second"]
    snapshot("web", none["state_text"])


def test_headline_has_onset_cost_evidence_and_what_changed(played: Played) -> None:
    """The onset is at step 100, which comes in the 21st second, and stays where it is."""
    pages = followed(played, 20)
    note = [wire.Event("restart", played.clock(), message="its loader")]
    saved = [wire.SpanSum("checkpoint", POST_SYNC, 1, 40_000_000, 40_000_000, 101, 101)]
    played.play(5, events=note, spans=saved)
    incidents = []
    for _ in range(3):
        for _ in range(12):
            played.play(5)
            pages.poll()
        incidents.append(look(pages, "overview")["incident"])
    episodes = [one.episode for one in incidents]
    assert {(one.from_step, one.started_at[:19]) for one in episodes} == {(100, "2023-11-14T22:13:41")}
    assert episodes[0].cost_s < episodes[-1].cost_s and episodes[-1].goes_on
    assert incidents[-1].changes == ["a checkpoint was written", "restart of ranks 0-7: its loader"]
    evidence = Anomaly(kind="thermal", node="host-1", device=1, text="GPU 1 throttles: too hot")
    assert pages.newest is not None and pages.newest.verdict is not None
    pages.newest.verdict = msgspec.structs.replace(pages.newest.verdict, machine=[evidence])
    pages.version += 1
    _, answer = Refresher(pages).refresh("/", "?session=demo", {})
    shown = to_json_plotly(answer["set"]["verdict-strip"]).replace("\\u002f", "/")
    assert "Since step 100 (22:13:41 UTC), for " in shown and " s so far." in shown
    assert "GPU 1 throttles: too hot" in shown and "/node/host-1?session=demo#gpu-temperature_c" in shown
    assert '"data-link":"/?session=demo&run=job"' in shown and "Open rank 5" in shown
    played.end()
    pages.poll()
    stored = look(pages, "header")["incident"].episode
    assert stored.from_step == 100 and stored.started_at


def test_dead_rank_is_shown_as_dead_and_events_begin_with_the_cause(played: Played) -> None:
    pages = followed(played, 35)
    assert look(pages, "rank", rank=5)["suspect"]
    played.dies(5, -9)
    played.dies(2, 1, "RuntimeError: Connection closed by peer\n[10.0.0.2]:5")
    pages.poll()
    header = look(pages, "header")
    assert (header["state"], header["verdict"].label) == ("ending", "rank_lost")
    assert header["state_text"] == "Ranks 2 and 5 have ended, ranks 0, 1, 3, 4, 6 and 7 still run."
    assert b'traceml_state{state="ending"} 1' in Metrics(pages).exposition()[0]
    paths = "/rank/5", "/rank/2", "/rank/1"
    shown = [to_json_plotly(Refresher(pages).refresh(path, "", {})) for path in paths]
    died = '"Killed by SIGKILL at ",["time",{"dateTime":"2023-11-14T22:13:56.000+00:00",'
    assert died + '"title":"2023-11-14 22:13:56 UTC"},"22:13:56 UTC"],", after step 174, in "' in shown[0]
    steps = {event["step"] for event in look(pages, "events")["chosen"].items if event["rank"] == 5}
    assert "after step 174, in `forward`" in header["verdict"].why
    assert header["verdict"].last_step == 174
    assert 174 in steps and 175 not in steps, "one death has one step"
    assert "first of 2 ranks" in shown[0] and "This rank is" not in shown[0]
    assert (
        "Connection closed by peer at " in shown[1]
        and '"22:13:57 UTC"' in shown[1]
        and "[10.0.0.2]:5" in shown[1]
    )
    assert "line 7, in step" in shown[1]
    assert "It ended after " in shown[1]
    assert "callout critical" not in shown[2]
    rows = {row["rank"]: row["death"] for row in look(pages, "node", node="node-1")["ranks"]}
    assert rows[5].how == "killed by SIGKILL" and rows[4] is None
    events = [*look(pages, "events")["chosen"].items]
    assert [(event["group"], event["kind"], event["rank"]) for event in events[:4]] == [
        ("First cause", "death", 5),
        ("What followed", "verdict", 5),
        ("What followed", "death", 2),
        ("", "verdict", 5),
    ]
    page, _ = Refresher(pages).refresh("/events", "", {})
    texts = [to_json_plotly(page).find(title) for title in ("First cause", "What followed", "Before")]
    assert texts == sorted(texts) and texts[0] > 0
    for other in (0, 1, 3, 4, 6, 7):
        played.dies(other, -15)
    pages.poll()
    assert look(pages, "header")["state_text"] == "All ranks have ended."
    assert [death.rank for death in look(pages, "rank", rank=5)["deaths"] if death.first] == [5]
    played.end(1)
    pages.poll()
    assert look(pages, "header")["state"] == "finished"
    assert not pages.errors


def test_one_message_a_tick_for_all_browsers(played: Played) -> None:
    pages = followed(played, 5)
    look(pages, "overview")  # the first look asks for what is drawn
    asked = played.source.asked
    views = [look(pages, "overview") for _ in range(20)]
    assert played.source.asked == asked
    assert all(view["heat"].z is views[0]["heat"].z for view in views)
    played.play(5)
    pages.poll()
    assert played.source.asked == asked + 1
    assert views[0]["heat"].z.shape[1] == 24  # what was handed out stays as it was
    assert look(pages, "overview")["heat"].z.shape[1] == 29


class Slow(PlayedSource):
    """A source that takes a second to answer."""

    def reply(self, message: bytes) -> bytes:
        self.clock.tick()
        return super().reply(message)


def slow(played: Played) -> SessionPages:
    source = Slow(played.aggregator)
    source.clock = played.clock
    return SessionPages(source, clock=played.clock, timer=played.clock.timer)


def test_header_is_made_once_until_something_is_new(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    pages, made = followed(played, 20), []
    data = shell.data
    monkeypatch.setattr(shell, "data", lambda *arguments: made.append(arguments) or data(*arguments))
    look(pages, "overview")
    made.clear()  # an answer to what the page has asked may be of the header
    for _ in range(3):
        look(pages, "overview")
    assert len(made) == 0
    played.clock.tick()  # it has ages
    look(pages, "overview")
    assert len(made) == 1


def test_poll_catches_up_with_an_aggregator_far_ahead(played: Played) -> None:
    for _ in range(40):
        played.play(200, judge=False)
    pages = SessionPages(played.source, clock=played.clock, timer=played.clock.timer)
    pages.poll()
    assert look(pages, "header")["step"] == 7999
    recent, run = (look(pages, "overview", **{"from": first}) for first in ("newest", 0))
    assert recent["heat"].first.tolist() == list(range(7700, 8000))
    assert (run["heat"].first[0], run["heat"].last[-1]) == (1, 7999)
    assert 150 < len(run["heat"].first) <= 300
    assert (run["heat"].first[1:] == run["heat"].last[:-1] + 1).all()


def test_slow_aggregator_is_not_asked_for_a_while(played: Played) -> None:
    pages = slow(played)
    for _ in range(3):
        played.play(5)
        pages.poll()
    asked = pages.source.asked  # type: ignore[attr-defined]
    played.play(5)
    assert not pages.poll() and pages.source.asked == asked  # type: ignore[attr-defined]
    played.clock.tick(10)
    assert pages.poll() and look(pages, "header")["step"] == 19


def test_node_page_shows_address_samples_and_ranks(played: Played) -> None:
    page = look(followed(played, 12), "node", node="node-1")
    assert (page["node"]["label"], page["node"]["address"], page["node"]["ranks"]) == (
        "host-1",
        "10.0.0.2",
        [4, 5, 6, 7],
    )
    samples = page["samples"]
    assert samples["net_rx_bps"][0] is None and samples["net_rx_bps"][1] == pytest.approx(1 << 27)
    assert samples["cpu_pct"][-1] == 50
    gpu = page["gpus"][1]
    assert (gpu["index"], gpu["name"], gpu["throttle"], gpu["ecc"][-1]) == (
        1,
        "NVIDIA H200",
        ["sw_power_cap"],
        0,
    )
    assert gpu["nvlink_rx_bps"][-1] == pytest.approx(1 << 30)
    assert card_of(page, "host-1")["gpu_mem_pct"] == pytest.approx(100 * 60 / 140)
    rank = page["ranks"][1]
    assert (rank["rank"], rank["local_rank"], rank["last_step"], rank["open_stage"]) == (5, 1, 59, "forward")
    assert (rank["rss_bytes"], rank["gpu"], rank["state"]) == ((900 + 5 * 12) << 20, 1, "running")
    assert rank["device_memory"] == [40 << 30, 50 << 30]


def test_rank_page_shows_memory_of_process_and_device(played: Played) -> None:
    played.memory_s = 1
    pages = followed(played, 12)
    (memory,) = look(pages, "rank", rank=5)["memory"]
    assert memory["device"] == 1 and len(memory["t_ns"]) == 12
    assert set(memory["process_bytes"]) == {52 << 30} and set(memory["limit_bytes"]) == {512 << 30}
    drawn = to_json_plotly(Refresher(pages).refresh("/rank/5", "", {}))
    assert "42.9 GB allocated, 53.7 GB reserved" in drawn and "215 GB of 550 GB" in drawn
    assert '"memory-gpu-1-allocated_bytes' in drawn and '"memory-limit_used_bytes' in drawn


def card_of(page: dict[str, Any], label: str) -> dict[str, Any]:
    return next(card for card in page["nodes"] if card["label"] == label)


def test_node_page_has_the_critical_errors_of_a_device(played: Played) -> None:
    pages = followed(played, 6)
    xids = [{"gpu": 1, "xid": 31}, {"gpu": 1}, {"xid": 79}, {"gpu": 1, "xid": 79}]  # two by somebody else
    events = [wire.Event("xid", played.clock(), message="GPU", data=data) for data in xids]
    played.aggregator.ingest(played.relays[1].message(events=events))
    assert played.aggregator.commit() and pages.poll()
    assert [gpu["xid"] for gpu in look(pages, "node", node="node-1")["gpus"]] == [None, [79, 31]]


def test_events_of_a_flood_are_the_newest(played: Played) -> None:
    pages = followed(played, 2)
    for part in range(3):
        events = [wire.Event("note", 1000 * part + n, message="x") for n in range(1000)]
        played.play(5, events=events, silent=tuple(range(1, played.world)))
    run = pages.newest
    assert run is not None
    [asked] = [request for request in run.questions(0.0) if isinstance(request, query.GetEvents)]
    page = query.ask_one(played.source.reply, asked)
    events_read, cursor = page.items, page.cursor
    assert len(events_read) == 2000 and [event.t_ns for event in events_read] == list(range(1000, 3000))
    assert pages.poll() and len(run.events) == 2000
    assert cursor >= 3000


def test_node_page_without_sensors_has_no_devices(tmp_path: Path) -> None:
    played = Played(tmp_path / "demo", 2, late=None, gpus=0)
    page = look(followed(played, 3), "node", node="host-0")
    assert page["gpus"] == []
    assert card_of(page, "host-0")["gpu_util_pct"] is None


def test_rank_page_shows_suspect_stages_spans_and_process(played: Played) -> None:
    page = look(followed(played, 40), "rank", rank=5)
    assert page["suspect"].stage == "data"
    after = np.array(page["stages"]["steps"]) >= played.onset
    more = np.array(page["stages"]["data"]) - np.array(page["median"]["data"])
    assert more[after].mean() == pytest.approx(12, abs=0.2) and abs(more[~after].mean()) < 0.2
    (part,) = page["spans"]
    assert (part["name"], part["stage"], part["times_per_step"]) == (
        "optimizer",
        "post_sync",
        pytest.approx(1),
    )
    assert part["ms"] == part["median_ms"] == pytest.approx(0.5, rel=0.01)
    assert part["share"] == pytest.approx(0.5 / 1.15, rel=0.05)
    assert page["process"]["write_bps"][-1] == pytest.approx(1 << 21)


def test_rank_page_has_the_rows_of_gpu_and_host_under_each_other(tmp_path: Path) -> None:
    played = Played(tmp_path / "demo", device=True)
    live = followed(played)
    played.end()
    live.poll()
    source = StoredSource(played.folder)
    stored = SessionPages(source)
    stored.poll()
    for pages in (live, stored):
        view = look(pages, "rank", rank=5)
        assert view["rank"]["gpu_idle_pct"] == pytest.approx(25.7, abs=0.5)
        late = np.array(view["stages"]["steps"]) >= played.onset
        assert view["host"]["data"][late] == pytest.approx(view["stages"]["data"][late])
        assert view["host"]["forward"][1:] == pytest.approx(HOST[FORWARD])
        (panel,) = rank._both_rows(view, Route("rank", "5"))
        (figure,) = [element.figure for element in panel._traverse() if hasattr(element, "figure")]
        bars = {bar["name"]: dict(zip(bar["y"], bar["x"], strict=True)) for bar in figure["data"]}
        host, gpu = bars["forward"].values()  # the last is on top
        assert host == 2 and 6 < gpu < 7
        assert max(kpi["value"] for kpi in look(pages, "overview")["kpis"] if kpi["key"] == "idle") > 20
        (mine,) = [row for row in look(pages, "node", node="host-1")["ranks"] if row["rank"] == 5]
        assert mine["gpu_idle_pct"] == view["rank"]["gpu_idle_pct"]
    source.close()


def test_episodes_are_shown_live_and_stored(played: Played) -> None:
    live = look(followed(played), "events")
    (episode,) = live["episodes"]
    assert (named(episode), episode.goes_on) == ("straggler: rank 5 (host-1) in data", True)
    assert (episode.from_step, episode.to_step) == (played.onset, 149)
    assert episode.cost_s == pytest.approx(50 * 0.012, rel=0.05)
    assert shell._lost(live).endswith(" so far")
    played.end()
    with SessionFile(played.folder / "session.sqlite") as session:
        write_reports(SessionFolder(played.folder), session, LIMITS)
    source = StoredSource(played.folder)
    pages = SessionPages(source, clock=played.clock, timer=played.clock.timer)
    pages.poll()
    (stored,) = look(pages, "events")["episodes"]
    source.close()
    assert (stored.rank, stored.from_step, stored.to_step) == (5, played.onset, 149)
    assert stored.started_at < stored.ended_at


def test_events_are_selected_by_kind_rank_and_node(played: Played) -> None:
    pages = followed(played, 25, events=[wire.Event("note", 1_700_000_000_000_000_000, message="here")])
    every = look(pages, "events")
    assert every["kinds"]["note"] == 200 and every["kinds"]["verdict"] == 2
    assert every["severities"].keys() == {"warning", "info"}
    parts = [pages.view(Route("events", "", (("page", n),)))["chosen"].items for n in "123"]
    assert [len(items) for items in parts] == [100, 100, every["chosen"].n_all - 200]
    moments = [event["t_ns"] for items in parts for event in items]
    assert moments == sorted(moments, reverse=True)
    for selection, kinds in (
        ({"severity": "warning", "q": "host-1 here"}, {"note"}),
        ({"q": "straggler"}, {"verdict"}),
        ({"last": "10 min", "kind": "verdict"}, {"verdict"}),
        ({"severity": "critical"}, set()),
    ):
        assert {event["kind"] for event in look(pages, "events", **selection)["chosen"].items} == kinds
    played.clock.tick(700)
    pages.poll()
    pages.version += 1
    assert not look(pages, "events", last="10 min")["chosen"].items
    assert look(pages, "events", last="1 h")["chosen"].n_matching == every["chosen"].n_all
    assert {event["rank"] for event in look(pages, "events", rank=3)["chosen"].items} == {3}
    assert {event["node"] for event in look(pages, "events", node="node-1", kind="note")["chosen"].items} == {
        "host-1"
    }


def test_sessions_are_compared_side_by_side(tmp_path: Path) -> None:
    for name, late in (("good", None), ("slow", 1)):
        played = Played(tmp_path / name, 2, late=late, onset=0)
        played.aggregator._writer.set_meta(command=f"python train.py --lr {1 + (late or 0)}")
        for _ in range(12):
            played.play(5)
        played.end()
    with SessionFile(tmp_path / "slow" / "session.sqlite") as session:
        write_reports(SessionFolder(tmp_path / "slow"), session, LIMITS)
    view = look(SessionPages(StoredSource(tmp_path / "good")), "sessions", a="good", b="slow")
    compared = {session.name: session for session in view["chosen"].items}
    assert (compared["good"].label, compared["slow"].label, compared["slow"].rank) == (
        "healthy",
        "straggler",
        1,
    )
    good, slow = view["sides"]
    assert (good["verdict"].label, slow["verdict"].label) == ("healthy", "straggler")
    assert len(good["columns"].step_ms) == len(slow["columns"].step_ms) > 50
    pages = SessionPages(StoredSource(tmp_path / "good"))
    page, answer = Refresher(pages).refresh("/sessions", "?a=good&b=slow", {})
    shown = json.dumps(json.loads(to_json_plotly([page, answer])), ensure_ascii=False).replace("\xa0", " ")
    compared = compare("good", "slow", out=tmp_path)  # the command line says the same
    assert compared.change_pct == pytest.approx(57, abs=3) and compared.stage == "data"
    before, _, after = compared.headline.split("`")  # what is in backticks is code
    assert before in shown and after in shown and after.endswith("more on rank 1 (host-0)")
    assert "python train.py --lr 2" in shown and "+57" in shown and not pages.errors
    for names in (("good", "gone"), ("gone", "slow")):
        page, _ = Refresher(pages).refresh("/sessions", "?a={}&b={}".format(*names), {})
        assert "Session 'gone' cannot be read" in to_json_plotly(page) and not pages.errors


def test_sessions_are_listed_with_the_running_ones_first(tmp_path: Path) -> None:
    """One runs, one has ended, one was never finished, of one the summary is gone."""
    clock = Clock()
    for name in ("ended", "lost", "bare"):
        played = Played(tmp_path / name, 2, late=1, onset=0, clock=clock)
        for _ in range(14):  # of two ranks, 50 steps are needed
            played.play(5)
        if name != "lost":
            played.end()
        if name == "bare":
            (tmp_path / name / "summary.json").unlink(missing_ok=True)
        played.aggregator.close()
    with SessionFile(tmp_path / "ended" / "session.sqlite") as session:
        write_reports(SessionFolder(tmp_path / "ended"), session, LIMITS)
    held = prepare(tmp_path, "goes-on")
    running = Played(held.path, 2, late=1, onset=0, clock=clock)
    for _ in range(14):  # of two ranks, 50 steps are needed
        running.play(5)
    pages = SessionPages(running.source, clock=clock, timer=clock.timer)
    pages.poll()
    entries = {entry.name: entry for entry in look(pages, "sessions")["chosen"].items}
    assert next(iter(entries)) == "goes-on"
    states = {name: (entry.status, entry.label, entry.rank) for name, entry in entries.items()}
    assert states == {
        "goes-on": ("running", "straggler", 1),
        "ended": ("finished", "straggler", 1),
        "bare": ("finished", "straggler", 1),
        "lost": ("never finished", "straggler", 1),
    }
    assert entries["goes-on"].cost_pct and entries["goes-on"].steps == 70
    assert [e.name for e in look(pages, "sessions", state="never finished")["chosen"].items] == ["lost"]
    assert [e.name for e in look(pages, "sessions", q="rank 1 ended")["chosen"].items] == ["ended"]
    running.aggregator.close()
    held.release()


def test_heatmap_above_a_thousand_ranks_has_a_row_per_node(tmp_path: Path) -> None:
    pages = followed(Played(tmp_path / "demo", 1032, per_node=8, late=1029, onset=10, gpus=0), 4)
    heat = look(pages, "overview")["heat"]
    assert (heat.by, heat.z.shape, heat.nodes[-1]) == ("node", (129, 19), "host-128")
    assert (heat.z[-1, 10:] > 165).all() and (heat.z[:-1] < 135).all()
    (last,) = heat.ranks[-1:]
    cell = look(pages, "cell", ranks=[last, last], first=15, last=15)
    assert cell["text"].startswith("rank 1029: 1.6")


def test_past_sessions_open_in_the_same_pages(tmp_path: Path) -> None:
    for name, late in (("old", 1), ("now", None)):
        played = Played(tmp_path / name, 2, late=late, onset=0)
        pages = followed(played, 12)
        if name == "old":
            played.end()
    assert look(pages, "header")["session"]["id"] == "now"
    old = look(pages, "overview", session="old")
    assert (old["session"]["id"], old["state"], old["step"]) == ("old", "stored", 59)
    assert old["verdict"].rank == 1 and len(old["heat"].first) == 59
    assert look(pages, "rank", session="old", rank=1)["rank"]["state"] == "finished"
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "session.sqlite").write_bytes(b"no database")
    assert look(pages, "header", session="now")["session"]["id"] == "now"
    shutil.rmtree(tmp_path / "old")  # it has been read before
    for name in ("gone", "bad", "old", "../now", str(tmp_path / "now")):
        header = look(pages, "header", session=name)
        assert (header["session"]["id"], header["state"], header["verdict"]) == (name, "missing", None)
        for page in ("overview", "node", "rank", "events", "health"):
            assert look(pages, page, session=name) == header
    assert not pages.errors


class Held:
    """Makes a source wait with its answer to one question until it is let go."""

    def __init__(self, source: Any, monkeypatch: pytest.MonkeyPatch, kind: type[query.Request[Any]]) -> None:
        self.waits, self.go = threading.Event(), threading.Event()
        reply = source.reply

        def held(*args: Any, **more: Any) -> Any:
            if any(isinstance(request, kind) for request in query.decode(args[-1], QUESTIONS)[0]):
                self.waits.set()
                assert self.go.wait(240)
            return reply(*args, **more)

        monkeypatch.setattr(source, "reply", held)


@pytest.mark.parametrize(
    ("page", "selection", "kind"),
    [("health", {}, query.GetLedger), ("overview", {"run": "a"}, query.GetVerdict)],
)
def test_slow_aggregator_holds_up_only_views_that_need_its_answer(
    played: Played, monkeypatch: pytest.MonkeyPatch, page: str, selection: dict[str, Any], kind: Any
) -> None:
    pages = followed(played)
    pages.runs = [
        *pages.runs,
        msgspec.structs.replace(pages.runs[0], id="a", name="a"),
    ]  # one that is not followed yet
    held = Held(played.source, monkeypatch, kind)
    slow = ThreadPoolExecutor(1).submit(look, pages, page, **selection)
    assert held.waits.wait(240)
    others = ThreadPoolExecutor(1).submit(look, pages, "overview")
    assert others.result(240)["state"] == "live"
    assert not slow.done()
    held.go.set()
    page_now = slow.result(240)
    if page == "health":
        assert page_now["ledger"].stored == look(pages, "health")["ledger"].stored > 0


def test_page_that_is_opened_twice_at_once_is_whole_for_both(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = followed(played)
    held = Held(played.source, monkeypatch, query.GetRankTimes)
    first = ThreadPoolExecutor(1).submit(look, pages, "ranks")
    assert held.waits.wait(240)
    second = ThreadPoolExecutor(1).submit(look, pages, "ranks")
    done, _ = wait([second], timeout=0.2)
    assert not done or second.result()["chosen"].items[0]["busy_ms"]
    held.go.set()
    for seen in (first, second):
        assert seen.result(240)["chosen"].items[0]["busy_ms"]


def test_session_stays_open_while_another_thread_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abcd":
        played = Played(tmp_path / name, 2, per_node=2, late=None)
        played.play(40)
        played.end()
        played.aggregator.close()
    pages = SessionPages(StoredSource(tmp_path / "a"))
    assert pages.poll()
    held = Held(StoredSource, monkeypatch, query.GetVerdict)
    reading = ThreadPoolExecutor(1).submit(look, pages, "overview", session="b")
    assert held.waits.wait(240)
    monkeypatch.undo()
    for name in "cd":
        assert look(pages, "overview", session=name)["session"]["id"] == name
    held.go.set()
    seen = reading.result(240)
    assert (seen["session"]["id"], seen["state"], seen["step"]) == ("b", "stored", 39)
    assert seen["verdict"].label


def test_health_page_shows_ledger_overhead_and_relays(played: Played) -> None:
    pages = SessionPages(played.source, clock=played.clock, timer=played.clock.timer)
    assert health(pages) == {"status": "ok", "state": "empty"}
    pages = followed(played)
    page = look(pages, "health")
    assert page["ledger"].produced == page["ledger"].stored == 8 * 150
    assert page["overhead"].training_thread_us_per_step == pytest.approx(5, rel=0.1)
    assert [relay["age_s"] for relay in page["relays"]] == [0, 0]


@given(st.lists(st.floats(0.1, 100) | st.just(float("nan")), min_size=1, max_size=20), st.floats(0, 1))
def test_quantiles_are_those_of_numpy(values: list[float], share: float) -> None:
    known = [value for value in values if value == value]
    quantile = quantiles(np.array(values), (share,))[0]
    assert quantile == pytest.approx(np.quantile(known, share)) if known else np.isnan(quantile)


def test_deviations_tell_twice_from_four_times_in_one_byte() -> None:
    values = np.array([[0.25, 0.5, 1.0, 1.05, 2.0, 4.0, 20.0, 0.0, np.nan]])
    middle = np.ones(9)
    levels = deviations(values, middle, middle)
    assert levels.tolist() == [[0, 64, 127, 131, 190, 254, 254, 0, MISSING]]
    assert ratio(levels[0, :6]) == pytest.approx(values[0, :6], rel=0.01)
    assert excess(levels[:, [2, 4, 8]]) == pytest.approx([0.5], rel=0.02)
    assert (deviations(values, middle, np.zeros(9)) == MISSING).all()


def test_few_runs_are_polled_at_a_time(played: Played) -> None:
    pages = SessionPages(played.source, clock=played.clock, timer=itertools.count(0.0, 1e-3).__next__)
    for name in "abcdef":
        played.begin(job_id=name)
        played.play(30)
        pages.poll()
    for name in "abcd":
        assert look(pages, "overview", run=name)["session"]["run"] == name
    assert len(pages._polled) == 3
    assert look(pages, "header")["session"]["run"] == "f"


class Paced(Played):
    """As many steps in a second as a second has room for: when a step was is known from those after it."""

    def rows(self, n: int) -> np.ndarray:
        return (super().rows(n) * 9.5).astype("<i8")


def test_default_range_holds_the_onset_and_stays_for_a_while(tmp_path: Path) -> None:
    played = Played(tmp_path / "demo", onset=400)
    pages = followed(played, 100)
    assert look(pages, "overview")["axis"]["between"] == (200, 499)
    for seconds in (60, 5):
        for _ in range(seconds):
            played.play(5)
        pages.poll()
        view = look(pages, "overview")
        first, last = view["axis"]["between"]
        assert first == 400 - 64 and last == view["step"] and view["axis"]["onset"] == 400
        assert view["columns"].first[0] == first and view["columns"].last[-1] == last
        assert len(view["columns"].first) <= 300
    assert look(pages, "overview", **{"from": "newest"})["axis"]["between"] == (last - 299, last)
    played.end()
    pages.poll()
    assert look(pages, "overview")["axis"]["between"] == (1, last)


@pytest.mark.parametrize("page", ["overview", "rank", "node"])
def test_range_of_the_url_is_that_of_every_chart(tmp_path: Path, page: str) -> None:
    """Node and process are drawn over time: their samples are of the time in which these steps were."""
    played = Paced(tmp_path / "demo", late=None)
    pages = followed(played, 60)
    key: dict[str, Any] = {"overview": {}, "rank": {"rank": 5}, "node": {"node": "node-1"}}[page]
    view = look(pages, page, **key, **{"from": 150, "to": 200})
    assert view["axis"]["between"] == (150, 200)
    if page == "overview":
        assert view["columns"].first.tolist() == view["columns"].last.tolist() == list(range(150, 201))
    else:
        times = view["process" if page == "rank" else "drawn"]["t_ns"]
        seconds = [(t_ns - played.clock()) / 1e9 + 60 for t_ns in times]  # of 5 steps each
        assert 28 <= seconds[0] <= 33 and 38 <= seconds[-1] <= 42 and len(seconds) >= 8
    if page == "rank":
        assert view["stages"]["steps"] == list(range(150, 201))
    path = {"overview": "/", "rank": "/rank/5", "node": "/node/node-1"}[page]
    for search in ("?from=500&to=400", "?from=-1&to=x", "?to=3", "?from=99999999&to=99999999999999"):
        _, answer = Refresher(pages).refresh(path, search, {})
        assert "could not be made" not in to_json_plotly(answer)
    assert not pages.errors


def test_spine_has_a_lane_for_each_cause_and_events_by_their_time(tmp_path: Path) -> None:
    played = Paced(tmp_path / "demo", late_ms=4.0)
    pages = followed(played, 30)
    note = wire.Event("note", played.clock(), message="disk replaced")
    played.aggregator.ingest(played.relays[0].message(events=[note]))
    for _ in range(5):
        played.play(5)
    pages.poll()
    spine = look(pages, "overview")["axis"]
    ((name, (episode,)),) = spine["lanes"]
    assert name == "rank 5 data" and episode.from_step == 100 and episode.goes_on
    (tick,) = spine["ticks"]
    assert abs(tick["step"] - 150) <= 5 and tick["text"].endswith("disk replaced")
    assert (spine["first"][0], spine["last"][-1]) == (1, 174)
    assert np.nanmax(spine["step_ms"]) == pytest.approx(9.5 * 25, rel=0.05)
    seconds = (spine["t_ns"] - played.clock()) / 1e9
    assert seconds[-1] == pytest.approx(0, abs=1) and (np.diff(spine["t_ns"]) > 0).all()


def test_change_at_the_onset_is_in_the_stage_that_is_late(played: Played) -> None:
    """Of single steps, and of a run so long that the onset is inside a sum; live as stored."""
    pages = followed(played, 30)
    for seconds in (0, 2000):
        played.play(seconds)
        pages.poll()
        change = look(pages, "overview")["change"]
        before, since = change.before, change.since
        added = {stage: since.stages[stage] - before.stages[stage] for stage in since.stages}
        assert 70 < before.steps < 100 and 40 < since.steps <= 50 + seconds
        assert added.pop("data") == pytest.approx(12, abs=0.3)
        assert max(map(abs, added.values())) < 0.7
    trace = figures.waterfall(before.stages, since.stages)["data"][0]
    ends = [base + wide for base, wide in zip(trace["base"], trace["x"], strict=True)]
    assert trace["y"][0] == "since" and trace["y"][-1] == "before"
    assert trace["x"][0] == pytest.approx(max(ends), abs=1.0)


def test_cost_is_said_once_on_the_first_screen(played: Played) -> None:
    pages = followed(played, 40)
    _, answer = Refresher(pages).refresh("/", "", {})
    strip = json.loads(to_json_plotly(answer["set"]["verdict-strip"]))["content"]

    def words(element: Any) -> list[str]:
        if isinstance(element, list):
            return [word for child in element[2:] for word in words(child)]
        return [element] if isinstance(element, str) else []

    shown_text = " ".join(words(strip))
    cost = look(pages, "header")["incident"].episode.cost_s
    assert (
        shown_text.count(text.duration(cost)) == 1
        and shown_text.count(" % ") + shown_text.count("\u00a0% ") == 2
    )  # of steps
    assert "Fixing" not in shown_text and "so far" in shown_text and "Since step 100" in shown_text


def test_names_are_in_the_order_of_their_numbers() -> None:
    """A digit that is no decimal one is a letter."""
    names = ["node-10", "node-²", "node-2", "²"]
    assert sorted(names, key=natural) == ["node-2", "node-10", "node-²", "²"]


@pytest.mark.parametrize(
    ("of_browser", "shown"),
    [
        ("Asia/Kolkata 330", "03:43:25 IST"),
        ("Not/Known 330", "03:43:25 UTC+05:30"),  # as on a machine without a database of zones
        ("Not/Known -210", "18:43:25 UTC-03:30"),
        ("Not/Known 9999", "22:13:25 UTC"),
        ("UTC", "22:13:25 UTC"),
    ],
)
def test_moments_are_those_of_the_reader(of_browser: str, shown: str) -> None:
    with timezone.timezone_of(of_browser):
        assert text.with_clocks("2023-11-14T22:13:25+00:00") == shown


def test_faces_of_a_job_without_gpus_have_the_same_words(tmp_path: Path) -> None:
    """Hours are of ranks; a stage has its name; who died is said where the data is counted."""
    played = Played(tmp_path / "demo", gpus=0, onset=20)
    for _ in range(60):
        played.play(5)
    for number in range(8):
        played.dies(number, -9 if number == 5 else -15)
    played.end(1)
    pages = SessionPages(StoredSource(played.folder))
    pages.poll()
    header = look(pages, "overview")
    assert header["coverage_text"] == "data from 8 of 8 ranks, 8 died"
    shown = {
        path: to_json_plotly(Refresher(pages).refresh(path, "", {})).replace("\\u002f", "/")
        for path in ("/", "/events", "/rank/5")
    }
    assert ">of it" not in shown["/events"] and "of its time" in shown["/events"]
    assert "rank-hours" in shown["/events"]
    poll = SessionPoll(StoredSource(played.folder))
    poll.poll()
    _, newest = poll.make(lambda: take_snapshot(poll, poll.newest, Choice()))
    shown["top"] = "\n".join(row.plain for row in panel(newest, Choice(), 120, 60))
    shown |= {name: (played.folder / name).read_text() for name in ("report.txt", "report.html")}
    for face, words in shown.items():
        assert not [wrong for wrong in ("GPU-hours", "sync wait", "post sync") if wrong in words], face
    assert "data from 8 of 8 ranks, 8 died" in shown["report.html"]
    assert "data from 8 of 8 ranks, 8 died" in shown["top"]
