"""`traceml-ray sessions`: what is listed, and what is removed, which is never too much."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from played import Played
from sessions import SECOND, Clock

from traceml_ray.cli import main
from traceml_ray.reports import listing
from traceml_ray.reports.listing import listed, to_go
from traceml_ray.store.session import SessionError, prepare, remove

DAY = 86_400


def made(out: Path, name: str, age_days: float, now: int, *, end: bool = True) -> Path:
    """A session that was over so long before `now`."""
    clock = Clock()
    clock.now = now - int(age_days * DAY * SECOND)
    played = Played(out / name, 2, late=None, gpus=0, clock=clock)
    played.play(5)
    if end:
        played.end()
    played.aggregator.close()
    return out / name


NOW = Clock().now + 100 * DAY * SECOND


@pytest.fixture(scope="module")
def played_sessions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sessions of `out`, none of which runs. Tests use copies."""
    out = tmp_path_factory.mktemp("played") / "out"
    for days in (1, 10, 40, 50):
        made(out, f"day-{days}", days, NOW)
    made(out, "lost-60", 60, NOW, end=False)
    made(out, "fresh", 0.01, NOW, end=False)
    prepare(out, "runs").release()
    made(out, "runs", 70, NOW, end=False)
    return out


@pytest.fixture
def out(played_sessions: Path, tmp_path: Path) -> Iterator[Path]:
    """Sessions of 1, 10, 40 and 50 days, one of 60 that was never finished, one of now, and one that runs."""
    out = shutil.copytree(played_sessions, tmp_path / "out")
    held = prepare(out, "runs", again=True)
    assert held.lock_fd is not None
    yield out
    held.release()


def names(sessions: Any) -> list[str]:
    return [session.name for session in sessions]


def test_sessions_are_listed_with_age_size_ranks_and_verdict(out: Path) -> None:
    begins = prepare(out, "begins")  # it has no file yet
    sessions = listed(str(out), NOW)
    assert (sessions[0].name, sessions[0].status) == ("begins", "starting")
    assert names(sessions).count("begins") == 1
    assert "begins" in listing.names(str(out)) and not {"begins"} & {*names(to_go(sessions, None, 0))}
    begins.release()
    sessions = listed(str(out), NOW)
    assert names(sessions) == ["runs", "fresh", "day-1", "day-10", "day-40", "day-50", "lost-60"]
    ages = {session.name: (session.age_s or 0) / DAY for session in sessions}
    assert ages == pytest.approx(
        {"runs": 0, "fresh": 0, "day-1": 1, "day-10": 10, "day-40": 40, "day-50": 50, "lost-60": 60}, abs=0.1
    )
    one = next(session for session in sessions if session.name == "day-40")
    assert (one.status, one.world_size, one.steps) == ("finished", 2, 5)
    assert one.bytes >= (out / "day-40" / "session.sqlite").stat().st_size > 1000


@pytest.mark.parametrize(
    ("older", "keep", "gone"),
    [
        (30, None, {"day-40", "day-50", "lost-60"}),
        (None, 3, {"day-10", "day-40", "day-50", "lost-60"}),
        (30, 5, {"day-50", "lost-60"}),
        (45, 2, {"day-50", "lost-60"}),
        (None, 0, {"day-1", "day-10", "day-40", "day-50", "lost-60"}),
        (90, None, set()),
    ],
)
def test_old_sessions_go_but_those_that_are_to_be_kept(
    out: Path, older: int | None, keep: int | None, gone: set[str]
) -> None:
    sessions = listed(str(out), NOW)
    assert {*names(to_go(sessions, older and older * DAY, keep))} == gone


def test_nothing_is_removed_until_that_is_asked_for(out: Path, capsys: Any) -> None:
    arguments = ["sessions", "--out", str(out), "--prune", "--keep", "3"]
    before = {path.name for path in out.iterdir()}
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "Nothing was removed" in printed and "day-40" in printed and "day-1 " not in printed
    assert {path.name for path in out.iterdir()} == before
    assert main([*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    removed = {entry["name"] for entry in answer if entry["remove"]}
    assert main([*arguments, "--yes"]) == 0
    assert {path.name for path in out.iterdir()} == before - removed
    assert removed == {"day-10", "day-40", "day-50", "lost-60"}


def test_session_that_runs_and_files_of_others_are_not_removed(out: Path) -> None:
    with pytest.raises(SessionError, match="already running"):
        remove(out / "runs")
    assert (out / "runs" / "session.sqlite").is_file()
    (out / "day-50" / "weights.pt").write_text("mine")
    (out / "day-50" / "bundles" / "b").mkdir(parents=True)
    assert remove(out / "day-50") == ["weights.pt"]
    assert {path.name for path in (out / "day-50").iterdir()} == {"weights.pt", ".lock"}
    (out / "link").symlink_to(out / "day-40")
    with pytest.raises(SessionError, match="not the folder of a session"):
        remove(out / "link")
    with pytest.raises(SessionError):
        remove(out)
    assert remove(out / "day-40") == [] and not (out / "day-40").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--prune",),
        ("--older-than", "30d"),
        ("--yes",),
        ("--prune", "--keep", "-1"),
        ("--prune", "--older-than", "30"),
    ],
)
def test_half_an_order_to_remove_is_refused(out: Path, arguments: tuple[str, ...], capsys: Any) -> None:
    before = {path.name for path in out.iterdir()}
    try:
        code = main(["sessions", "--out", str(out), *arguments])
    except SystemExit as error:
        code = int(str(error))
    assert code == 2 and len(capsys.readouterr().err.splitlines()) == 1
    assert {path.name for path in out.iterdir()} == before
