"""The command `traceml-ray profile` beside a relay that is slow, and its progress in a terminal."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from traceml_ray.cli import main
from traceml_ray.launchers import control
from traceml_ray.store import profiles
from traceml_ray.store.profiles import Profile, ProfileStep, RankProfile
from traceml_ray.store.session import DATABASE, Live, MonitorState, prepare, write_live
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

NOTED = codec.encode(wire.Finished(codec.VERSION, "noted"))


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Path]:
    """Return the folder of a session that is live."""
    folder = prepare(tmp_path, "s")
    (folder.path / DATABASE).touch()
    write_live(folder.path, Live(os.getpid(), str(tmp_path / "relay.sock"), ""))
    yield folder.path
    folder.release()


@pytest.fixture
def relay(session: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.settimeout(20)
        listener.bind(str(session.parent / "relay.sock"))
        listener.listen()
        yield listener


def _answer(relay: socket.socket) -> wire.ControlRequest:
    asking, _ = relay.accept()
    with asking:
        asked = codec.decode(asking.recv(1 << 16), wire.ControlRequest)
        asking.send(NOTED)
    return asked


def test_relay_that_is_slow_is_waited_for_as_long_as_asked(
    session: Path, relay: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "SILENT_S", 0.01)
    message = wire.ControlRequest(codec.VERSION, "me")
    with pytest.raises(control.ControlError, match=r"does not answer within 0\.05 s"):
        control.request(session, message, 0.05)
    relay.accept()[0].close()
    asking = threading.Thread(target=control.request, args=(session, message, 20.0))
    asking.start()
    asking.join(0.1)
    assert asking.is_alive() and _answer(relay) == message
    asking.join(240)
    assert not asking.is_alive()


def test_relay_that_is_gone_is_not_waited_for(session: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ended:
        ended.bind(str(session.parent / "relay.sock"))
    with pytest.raises(control.ControlError, match="does not answer at"):
        control.request(session, wire.ControlRequest(codec.VERSION, "me"), 20.0)


def _profile(state: profiles.State, asked: str) -> Profile:
    rank = RankProfile(0, state, steps=[ProfileStep(12, 0, 10, None)], total_bytes=4, bytes=4)
    rank.file = profiles.trace_name(0) if state == "captured" else None
    return Profile(
        id="20261123T080006", session="s", run="r", time="", t_ns=0, why="", requests=[asked], first_step=12,
        n_steps=2, ranks=[rank], traceml_ray="",
    )  # fmt: skip


def test_session_that_is_starting_is_named_where_an_older_one_is_found(session: Path) -> None:
    (session / DATABASE).unlink()
    older = session.parent / "older"
    older.mkdir()
    with pytest.raises(control.ControlError, match=r"'older' is not live: .*; live is 's', which may"):
        control.request(older, wire.ControlRequest(codec.VERSION, "me"), 20.0)


def test_session_that_is_starting_is_waited_for(session: Path, relay: socket.socket) -> None:
    def show(monitor: MonitorState) -> None:
        write_live(session, Live(os.getpid(), str(session.parent / "relay.sock"), "", monitor, 1, "no room"))

    (session / DATABASE).unlink()
    show("waiting_for_cpu")
    message, done = wire.ControlRequest(codec.VERSION, "me"), threading.Event()

    def ask() -> None:
        control.request(session, message, 240.0)
        done.set()

    asking = threading.Thread(target=ask)
    asking.start()
    assert not done.wait(0.3)
    show("running")
    assert _answer(relay) == message and done.wait(240)
    asking.join()
    show("failed")
    for asks in (lambda: control.request(session, message, 240.0), lambda: control.stop(session)):
        with pytest.raises(control.ControlError, match=r"'s': .* without a live monitor; .* \(no room\)"):
            asks()


def test_status_of_a_session_that_is_starting(session: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (session / DATABASE).unlink()
    write_live(session, Live(os.getpid(), "", "", "waiting_for_cpu"))
    assert main(["status", "s", "--out", str(session.parent)]) == 0
    shown = capsys.readouterr().out
    assert f"starting (launcher pid {os.getpid()})" in shown and "waiting for a free CPU core" in shown
    assert main(["report", "s", "--sessions", str(session.parent), "--wait", "0"]) == 1
    assert "'s' has no steps yet. Training is running. The monitor is waiting" in capsys.readouterr().err


def test_profile_that_could_not_be_kept_is_not_waited_for(
    session: Path, relay: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_GONE_S", 0.3)
    errors, seen, so_far = list[str](), threading.Event(), control.so_far

    def noted(profile: Profile) -> tuple[str, float | None]:
        seen.set()
        return so_far(profile)

    monkeypatch.setattr(control, "so_far", noted)

    def ask() -> None:
        try:
            control.profile(session, wire.ProfileRequest(), 60.0)
        except control.ControlError as error:
            errors.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    profiles.show(session, _profile("recording", _answer(relay).request))
    assert seen.wait(240)
    profiles.clear_unfinished(session)
    asking.join(240)
    assert errors == ["session 's' could not keep the profile; `traceml-ray status` may give the reason"]


def test_progress_is_shown_in_a_terminal(
    session: Path, relay: socket.socket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen, terminal = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    shown, codes = b"", list[int]()
    with os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        asking = threading.Thread(
            target=lambda: codes.append(main(["profile", "s", "--steps", "2", "--out", str(session.parent)]))
        )
        asking.start()
        asked = _answer(relay).request
        deadline = time.monotonic() + 20
        for state, text in (("recording", "recording step 12 and after"), ("sending", "profile: sending")):
            profiles.show(session, _profile(state, asked))
            while text.encode() not in shown and time.monotonic() < deadline:
                shown += os.read(screen, 1 << 16)
        profiles.finish(session, _profile("captured", asked))
        asking.join(240)
    os.close(screen)
    assert codes == [0] and "20261123T080006" in capsys.readouterr().out
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert "profile: recording step 12 and after ━" in plain and "profile: sending ━" in plain
