"""Where the web app finds its session: live or stored, coming and going, and never waiting for ever."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from played import Played, look

from traceml_ray.dash_app.session_pages import SessionPages
from traceml_ray.ray.actors import Attachment
from traceml_ray.reports.answers import QUESTIONS
from traceml_ray.store import query, session
from traceml_ray.store.session import Live, SessionError, write_live
from traceml_ray.views import source as sources
from traceml_ray.views.source import (
    LiveSource,
    LocalSource,
    SourceError,
    StoredSource,
    _attachment,
    open_source,
)
from traceml_ray.wire.messages import Event

NOWHERE = "127.0.0.1:1"


def recorded(folder: Path, seconds: int = 10) -> Played:
    played = Played(folder, 2, late=None)
    for _ in range(seconds):
        played.play(5)
    return played


def test_source_waits_for_a_session_and_then_shows_it(tmp_path: Path) -> None:
    source = open_source(None, str(tmp_path), None)
    pages = SessionPages(source, timer=lambda: 0.0)  # a source that is slow would be asked less often
    assert pages.poll() and look(pages, "overview")["state"] == "empty"
    text = look(pages, "header")["state_text"]
    assert str(tmp_path) in text and "traceml_ray.launch" in text
    assert not pages.poll()
    recorded(tmp_path / "demo").end()
    assert pages.poll() and look(pages, "header")["state"] == "stored"
    assert (source.target, source.stored) == ("demo", True)
    assert look(pages, "header")["step"] == 49
    pages.poll()  # answers what the header has asked
    assert not pages.poll()
    source.close()


def test_source_is_chosen_by_name_path_and_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path / "demo", 1)
    out = str(tmp_path)
    assert isinstance(open_source("demo", out, None), LocalSource)
    assert isinstance(open_source(str(tmp_path / "demo" / "session.sqlite"), out, None), LocalSource)
    with pytest.raises(SessionError, match="no session"):
        open_source(str(tmp_path / "nothing"), out, None)
    on_cluster = open_source("demo", out, NOWHERE)
    assert isinstance(on_cluster, LiveSource) and on_cluster.target == "demo"
    monkeypatch.setenv("RAY_ADDRESS", NOWHERE)
    assert isinstance(open_source("demo", out, None), LocalSource)
    assert isinstance(open_source(None, out, None), LiveSource)  # what is here is over
    elsewhere = open_source("other", out, None)
    assert isinstance(elsewhere, LiveSource)
    with pytest.raises(SourceError, match=f"cannot attach to Ray at {NOWHERE}"):
        query.ask(elsewhere.reply, [query.GetStatus()])


def test_live_session_that_cannot_be_attached_is_read_from_its_file(tmp_path: Path) -> None:
    held = session.prepare(tmp_path, "demo")
    played = recorded(held.path)
    write_live(held.path, Live(1, str(tmp_path / "relay.sock"), NOWHERE))
    source = open_source("demo", str(tmp_path), None)
    pages = SessionPages(source, clock=played.clock, timer=played.clock.timer)
    pages.poll()
    assert (look(pages, "header")["state"], source.stored) == ("live", False)
    played.play(5)
    assert pages.poll() and look(pages, "header")["step"] == 54
    assert look(pages, "header")["verdict"].label == "healthy"
    played.end()
    held.release()
    assert pages.poll() and look(pages, "header")["state"] == "stored"


def test_session_that_runs_but_cannot_be_attached_is_not_said_to_have_ended(tmp_path: Path) -> None:
    held = session.prepare(tmp_path, "demo")
    recorded(held.path)
    write_live(held.path, Live(1, str(tmp_path / "relay.sock"), NOWHERE))
    source = open_source("demo", str(tmp_path), None)
    with pytest.raises(
        query.QueryError, match="Dump needs the monitor of the session, which cannot be reached"
    ):
        query.ask_one(source.reply, query.Dump("asked"))
    held.release()
    with pytest.raises(query.QueryError, match="Dump needs a running session; this one has ended"):
        query.ask_one(source.reply, query.Dump("asked"))
    source.close()


def test_token_is_shown_to_the_cluster_that_a_session_of_this_user_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_live(tmp_path, Live(1, str(tmp_path / "relay.sock"), NOWHERE))
    assert _attachment(tmp_path) == Attachment(NOWHERE)  # there is no token
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("t")
    assert _attachment(tmp_path) == Attachment(NOWHERE, environ={"RAY_AUTH_MODE": "token"})
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert _attachment(tmp_path) == Attachment(NOWHERE)
    monkeypatch.delenv("RAY_AUTH_MODE")
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)  # the folder is of another user
    assert _attachment(tmp_path) == Attachment(NOWHERE)


def test_session_file_takes_over_when_the_aggregator_is_gone_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = session.prepare(tmp_path, "demo")
    played = recorded(held.path)
    write_live(held.path, Live(1, str(tmp_path / "relay.sock"), NOWHERE))
    alive = threading.Event()
    alive.set()

    def query(_: LiveSource, request: bytes) -> bytes:
        if not alive.is_set():
            raise SourceError("the aggregator of session 'demo' is gone")
        return played.aggregator.query(request)

    monkeypatch.setattr(LiveSource, "_query", query)
    pages = SessionPages(
        open_source("demo", str(tmp_path), None), clock=played.clock, timer=played.clock.timer
    )
    alive.clear()
    pages.poll()
    header = look(pages, "header")
    assert (header["state"], header["state_text"]) == (
        "starting",
        "Training is running. Its aggregator does not answer yet.",
    )
    alive.set()
    pages.poll()
    assert look(pages, "header")["state"] == "live"
    alive.clear()
    assert pages.poll() and look(pages, "header")["state"] == "stale"
    alive.set()
    assert pages.poll() and look(pages, "header")["state"] == "live"
    alive.clear()
    played.end()
    held.release()
    assert pages.poll() and look(pages, "header")["state"] == "stored"


@pytest.mark.parametrize(
    ("monitor", "state", "sentence"),
    [
        ("waiting_for_cpu", "starting", "waiting for a free CPU core (12 s so far)"),
        ("starting", "starting", "The monitor is starting (12 s so far)"),
        ("failed", "unwatched", "without a live monitor; its steps are stored when it ends (no room)"),
    ],
)
def test_session_without_a_file_says_how_far_its_monitor_is(
    tmp_path: Path, monitor: session.MonitorState, state: str, sentence: str
) -> None:
    held = session.prepare(tmp_path, "demo")
    write_live(held.path, Live(1, "", NOWHERE, monitor, time.time_ns() - 12_000_000_000, "no room"))
    for target in ("demo", str(held.path), None):
        pages = SessionPages(open_source(target, str(tmp_path), None))
        pages.poll()
        header = look(pages, "header")
        assert header["state"] == state
        assert header["state_text"].startswith("Training is running") and sentence in header["state_text"]
    held.release()


def test_missing_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "ATTACH_S", 0.05)
    stuck = threading.Event()

    def late(_: LiveSource, request: bytes) -> bytes:
        stuck.wait(240)
        return query.encode([{"items": [], "cursor": len(query.decode(request, QUESTIONS)[0])}])

    monkeypatch.setattr(LiveSource, "_query", late)
    source = LiveSource("demo", Attachment(NOWHERE), "")
    for _ in range(3):
        with pytest.raises(SourceError, match="not answer"):
            query.ask(source.reply, [query.GetStatus()])
    stuck.set()
    monkeypatch.setattr(sources, "ATTACH_S", 240.0)
    for _ in range(100):  # the answers to those questions are nobody's
        try:
            assert query.ask(source.reply, [query.GetEvents()]) == [query.Page([], 1)]
            break
        except SourceError:
            time.sleep(0.01)
    else:
        raise AssertionError("it did not recover")
    source.close()


def test_file_that_is_no_session_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "session.sqlite").write_bytes(b"no database")
    with pytest.raises(SourceError, match=r"demo/session\.sqlite"):
        StoredSource(tmp_path / "demo")
    with pytest.raises(SourceError, match="Start one"):
        query.ask(LocalSource("other", str(tmp_path)).reply, [query.GetStatus()])


def test_stored_session_answers_queries_like_a_live_one(tmp_path: Path) -> None:
    played = Played(tmp_path / "demo", 2, late=1, onset=0)
    for _ in range(20):
        played.play(5, events=[Event("note", 7, message="x")])
    played.end()
    source = StoredSource(tmp_path / "demo")
    asked = query.GetRanks(), query.GetEvents(since=3)
    assert query.ask(source.reply, asked) == query.ask(played.source.reply, asked)
    status, verdict = query.ask(source.reply, [query.GetStatus(), query.GetVerdict()])
    assert (status.status, verdict.rank) == ("finished", 1)
    (tmp_path / "demo" / "summary.json").unlink()
    assert query.ask(StoredSource(tmp_path / "demo").reply, [query.GetVerdict()]) == [verdict]
    with pytest.raises(query.QueryError, match="there is no run 'x'"):
        query.ask(source.reply, [query.GetRanks("x")])
    source.close()
