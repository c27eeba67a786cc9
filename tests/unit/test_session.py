"""Session folders: made, held, moved aside, found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from traceml_ray.settings import SettingError
from traceml_ray.store.schema import connect
from traceml_ray.store.session import (
    Live,
    NoSessionError,
    SessionError,
    SessionFolder,
    SessionStartingError,
    await_session,
    find,
    holder,
    live_state,
    prepare,
    start_text,
    write_live,
)


def _finished(out: Path, name: str) -> Path:
    folder = prepare(out, name)
    connect(folder.sqlite, create=True).close()
    folder.release()
    return folder.path


def test_session_name_is_generated_and_its_folder_is_private(tmp_path: Path) -> None:
    first, second = prepare(tmp_path), prepare(tmp_path)
    assert first.name != second.name
    assert first.path.stat().st_mode & 0o777 == 0o700
    assert holder(first.path) == os.getpid()
    first.release()
    assert holder(first.path) is None


def test_live_session_is_not_entered_by_another_process(tmp_path: Path) -> None:
    folder = prepare(tmp_path, "s")
    code = "import sys; from traceml_ray.store.session import prepare; prepare(sys.argv[1], 's')"
    child = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert f"session 's' is already running (pid {os.getpid()})" in child.stderr
    with pytest.raises(SessionError, match="already running"):
        prepare(tmp_path, "s")
    folder.release()
    assert prepare(tmp_path, "s").moved is None  # nothing was written: nothing to keep


def test_finished_sessions_are_moved_aside_one_after_the_other(tmp_path: Path) -> None:
    for _ in range(2):
        _finished(tmp_path, "s")
    third = prepare(tmp_path, "s")
    assert third.moved == tmp_path / "s.2"
    assert (tmp_path / "s.1" / "session.sqlite").is_file()
    assert (tmp_path / "s.2" / "session.sqlite").is_file()
    assert {entry.name for entry in third.path.iterdir()} == {".lock"}


def test_restarted_holder_goes_on_in_its_folder(tmp_path: Path) -> None:
    path = _finished(tmp_path, "s")
    again = prepare(tmp_path, "s", again=True)
    assert (again.path, again.moved) == (path, None)
    assert again.sqlite.is_file()
    with pytest.raises(SessionError, match="already running"):
        prepare(tmp_path, "s", again=True)
    again.release()
    assert prepare(tmp_path, "s", again=False).moved == tmp_path / "s.1"
    assert prepare(tmp_path, "new", again=True).path.is_dir()


def test_folder_that_is_no_session_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("")
    with pytest.raises(SessionError, match="is not a session"):
        prepare(tmp_path, "src")
    assert [entry.name for entry in (tmp_path / "src").iterdir()] == ["train.py"]


@pytest.mark.parametrize("name", ["", "a/b", "..", "x" * 65])
def test_invalid_session_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingError):
        prepare(tmp_path, name)


def test_unwritable_out_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SessionError, match=str(tmp_path / "file")):
        prepare(tmp_path / "file", "s")


def test_find_by_name_folder_file_and_newest(tmp_path: Path) -> None:
    old, new = _finished(tmp_path, "old"), _finished(tmp_path, "new")
    os.utime(old / "session.sqlite", (1, 1))
    assert find(None, tmp_path) == new
    assert find("old", tmp_path) == find(old, "elsewhere") == find(old / "session.sqlite", "elsewhere") == old


def test_find_error_names_what_was_searched(tmp_path: Path) -> None:
    with pytest.raises(SessionError, match=f"no session under {tmp_path}"):
        find(None, tmp_path)
    _finished(tmp_path, "a")
    with pytest.raises(SessionError, match=r"no session 'b' under .*sessions there: a"):
        find("b", tmp_path)
    with pytest.raises(SessionError, match=r"is a folder of sessions: choose one .* there: a"):
        find(tmp_path, tmp_path)


def test_session_that_is_starting_is_found_by_who_can_wait_and_named_to_others(tmp_path: Path) -> None:
    older = _finished(tmp_path, "older")
    os.utime(older / "session.sqlite", (1, 1))
    folder = prepare(tmp_path, "new")
    state = live_state(folder.path)
    assert state == Live(os.getpid(), "", "", "starting") and "The monitor is starting." in start_text(state)
    write_live(folder.path, Live(os.getpid(), "", "", "waiting_for_cpu"))
    for named in ("new", str(folder.path), None):
        assert find(named, tmp_path, starting=True) == folder.path
        with pytest.raises(SessionStartingError, match=r"'new' has no steps yet\. .* waiting for a free CPU"):
            find(named, tmp_path)
    assert find("older", tmp_path) == older
    folder.release()
    assert live_state(folder.path) is None
    assert find(None, tmp_path) == older
    with pytest.raises(SessionError, match="is not a session"):
        find(folder.path, tmp_path)


def test_session_that_begins_while_it_is_awaited_is_found(tmp_path: Path) -> None:
    notices: list[str] = []
    held: list[SessionFolder] = []

    def begins(notice: str) -> None:
        notices.append(notice)
        held.append(prepare(tmp_path, "new"))
        connect(held[0].sqlite, create=True).close()

    missing, starting = (NoSessionError,), (SessionStartingError,)
    assert await_session("new", tmp_path, 600, missing, begins) == tmp_path / "new"
    assert "no session 'new' under" in notices[0] and "waiting 10 min for it" in notices[0]
    held[0].sqlite.unlink()
    with pytest.raises(SessionStartingError, match="has no steps yet"):
        await_session("new", tmp_path, 0, starting, notices.append)
    with pytest.raises(NoSessionError, match="no session 'other'"):
        await_session("other", tmp_path, 600, starting, notices.append)
    assert len(notices) == 1, "what is not awaited is an error at once"


def test_session_that_runs_comes_before_one_that_was_written_later(tmp_path: Path) -> None:
    running = prepare(tmp_path, "runs")
    connect(running.sqlite, create=True).close()
    os.utime(running.sqlite, (1, 1))
    over = _finished(tmp_path, "over")
    assert find(None, tmp_path) == running.path
    running.release()
    assert find(None, tmp_path) == over
