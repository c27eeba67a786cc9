"""Every command with everything that a person may name: exit code, and one line that says what is wrong."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from played import Played

from traceml_ray.cli import main
from traceml_ray.dash_app import process as dashboard
from traceml_ray.store.session import DATABASE, prepare
from traceml_ray.terminal import top

COMMANDS: dict[str, Sequence[str]] = {
    "report": ("report", "{}"),
    "report --json": ("report", "{}", "--json"),
    "report --html": ("report", "{}", "--html", "-o", "page.html"),
    "status": ("status", "{}"),
    "status --json": ("status", "{}", "--json"),
    "top --once": ("top", "{}", "--once", "--wait", "0"),
    "dashboard": ("dashboard", "{}", "--port", "0", "--child"),
    "bundles": ("bundles", "{}"),
    "dump": ("dump", "{}"),
    "profile": ("profile", "{}"),
    "profile --list": ("profile", "{}", "--list"),
    "layers": ("layers", "{}"),
    "stop": ("stop", "{}"),
    "analyze": ("analyze", "{}"),
    "compare": ("compare", "{}", "other"),
    "export": ("export", "{}", "--format", "csv", "-o", "tables"),
    "sessions": ("sessions", "--sessions", "{}"),
}
GIVEN = {
    "name": "demo",
    "folder": f"sessions{os.sep}demo",
    "file": f"sessions{os.sep}demo{os.sep}{DATABASE}",
    "missing": "nobody",
    "junk file": "junk.txt",
    "empty folder": "empty",
    "no permission": "locked",
    "starting": "new",
}
SESSION = "name", "folder", "file"
NOT_LIVE = "dump", "profile", "stop"
SAYS_IT_STARTS = "status", "status --json", "top --once", "dashboard"
WAITING = {*COMMANDS} - {*SAYS_IT_STARTS, "analyze", "sessions"}
OF_FOLDERS = {"folder": "sessions", "missing": "nobody", "no permission": "locked", "empty folder": "empty"}
"""What is given to a command that is about a folder of sessions."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with two sessions that are over, and with what is none."""
    place = tmp_path_factory.mktemp("place")
    for name in ("demo", "other"):
        played = Played(place / "sessions" / name, 2, late=None)
        for _ in range(12):
            played.play(5)
        played.end()
    (place / "junk.txt").write_text("junk")
    for name in ("empty", "locked"):
        (place / name).mkdir()
    starting = prepare(place / "sessions", "new")
    yield place
    starting.release()


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """
    The current folder is `place`, and nobody may enter `locked` in it. The threads of a dashboard, which end
    with its process, end with the test.
    """
    monkeypatch.chdir(place)
    monkeypatch.setenv("TRACEML_OUT", "sessions")
    for name in ("stat", "lstat", "open", "scandir", "listdir"):
        monkeypatch.setattr(os, name, _refusing(getattr(os, name)))
    for module in (dashboard, top):
        monkeypatch.setattr(module, "exit_soon", lambda _code: None)  # it ends this process
        monkeypatch.setattr(module, "exit_now", lambda code: code)
    monkeypatch.setattr(os, "nice", lambda _by: None)
    over, before = threading.Event(), {*threading.enumerate()}
    monkeypatch.setattr(dashboard, "_poll", lambda _session: over.wait(240))
    monkeypatch.setattr(dashboard, "_serve", lambda _app, listening: over.wait(240) and listening.close())
    yield
    over.set()
    for thread in {*threading.enumerate()} - before:
        thread.join(240)


def _refusing(call: Callable[..., Any]) -> Callable[..., Any]:
    def refuses(path: Any, *args: Any, **named: Any) -> Any:
        if not isinstance(path, int) and "locked" in Path(os.fsdecode(path)).parts:
            raise PermissionError(13, "Permission denied", path)
        return call(path, *args, **named)

    return refuses


def _outcome(kind: str, command: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    given = OF_FOLDERS.get(kind, GIVEN[kind]) if command == "sessions" else GIVEN[kind]
    wait = ["--wait", "0"] * (kind == "starting" and command in WAITING)
    code = main([word.format(given) for word in COMMANDS[command]] + wait)
    out, err = capfd.readouterr()
    return code, out, err


def _expected(kind: str, command: str) -> int:
    if command == "sessions":
        return 0 if kind in ("folder", "empty folder") else 2
    if kind == "starting" and command not in SAYS_IT_STARTS:
        return 2 if command == "analyze" else 1
    if kind in (*SESSION, "starting"):
        return 1 if command in (*NOT_LIVE, "layers") else 0
    return 0 if (command, kind) == ("dashboard", "missing") else 2  # its page waits for the session


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.parametrize("command", COMMANDS)
def test_command_takes_a_session_by_any_name_and_refuses_the_rest_in_one_line(
    capfd: pytest.CaptureFixture[str], command: str, kind: str
) -> None:
    if command == "sessions" and kind in ("name", "file", "starting"):
        pytest.skip("it is about a folder of sessions")
    code, out, err = _outcome(kind, command, capfd)
    print(f"| {command} | {kind} | {code} | {(err or out).splitlines()[0]}")  # the table: pytest -rP
    assert code == _expected(kind, command), err
    if code == 0:
        assert out and not err
        assert kind != "starting" or command == "dashboard" or "starting" in out
        return
    assert (out, err.count("\n")) == ("", 1) and err.startswith("traceml-ray: ")
    assert len(err) < 400 and "live.json" not in err and ".lock" not in err
    assert any(word in err for word in ("demo", "nobody", "junk.txt", "empty", "locked", "new")), (
        "it says what"
    )
    if kind == "no permission":
        assert "ermission denied" in err
    if kind == "starting":
        assert "session 'new' has no steps yet. Training is running. The monitor is starting." in err
    if kind == "junk file" and command not in ("analyze", "sessions"):
        assert "is a file, not a session" in err
