"""The launcher's helper process, as far as it needs no Ray."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from traceml_ray.launchers.helper import until_ready

TWO_ANSWERS = """
import sys, threading, time
from traceml_ray.launchers import helper

class Slow:  # the second answer is ready before the first has been flushed
    def write(self, text):
        sys.stdout.write(text)
        other.start()
        other.join(0.3)
    def flush(self):
        sys.stdout.flush()

late = sys.stdout, helper.HelperReply(False, "late")
other = threading.Thread(target=helper._answer, args=late, daemon=True)
helper._answer(Slow(), helper.HelperReply(True))
"""


def test_helper_prints_one_reply_when_the_deadline_meets_the_answer() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWO_ANSWERS], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, ['{"ok":true,"detail":""}']), done.stderr


class UnavailableError(RuntimeError):
    """As Ray's, while an actor is being made again."""


class Relay:
    """Is killed when it is asked the first time, and listens again from the second on."""

    def __init__(self, path: Path) -> None:
        self._path, self._asked = path, 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def ready(self, _limit_s: float) -> None:
        self._asked += 1
        if self._asked == 1:
            raise UnavailableError
        if self._asked == 3:
            self._listener.bind(str(self._path))
            self._listener.listen()


def test_relay_that_is_killed_while_it_is_awaited_is_awaited_again(tmp_path: Path) -> None:
    relay = Relay(tmp_path / "relay.sock")
    until_ready(relay.ready, UnavailableError, str(tmp_path / "relay.sock"), 240.0)
    assert relay._asked == 3


def test_relay_that_cannot_be_is_not_awaited(tmp_path: Path) -> None:
    def fails(_limit_s: float) -> None:
        raise PermissionError if asked else ValueError("no such folder")

    asked = list[int]()
    with pytest.raises(ValueError, match="no such folder"):
        until_ready(fails, UnavailableError, str(tmp_path / "relay.sock"), 240.0)
    with pytest.raises(FileNotFoundError):
        until_ready(asked.append, UnavailableError, str(tmp_path / "relay.sock"), 240.0)  # type: ignore[arg-type]
    assert 1 < len(asked) < 100
