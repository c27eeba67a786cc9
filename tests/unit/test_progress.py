"""The bar of long work: on a terminal only, only once it has taken a while, and gone at its end."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import TextIO

import pytest

from traceml_ray import text

NEVER = 1e6


class Terminal:
    """A pseudo-terminal in place of stderr."""

    def __init__(self) -> None:
        self._master, slave = os.openpty()
        self.file: TextIO = os.fdopen(slave, "w")

    @contextmanager
    def shown(self, what: str, after_s: float) -> Iterator[text.Progress]:
        """What is shown there; only within a test has pytest no stderr of its own."""
        with redirect_stderr(self.file), text.progress_bar(what, after_s) as advance:
            yield advance

    def until(self, words: str) -> str:
        """What is on it once `words` are; the test's own time limit ends a wait that is in vain."""
        seen = b""
        while words.encode() not in seen:
            seen += os.read(self._master, 65536)
        return seen.decode()

    def rest(self) -> str:
        """What else is on it."""
        seen = b""
        while select.select([self._master], [], [], 0)[0]:
            seen += os.read(self._master, 65536)
        return seen.decode()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    made = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    yield made
    made.file.close()


def test_long_work_has_a_bar_that_is_gone_at_its_end(terminal: Terminal) -> None:
    with terminal.shown("reading", 0):
        terminal.until("reading")
        text.advance("merging [rank 5]", 0.5)
        assert "━" in terminal.until("merging [rank 5]")
    assert "\x1b[2K" in terminal.rest(), "the line is cleared"


def test_short_work_leaves_the_terminal_as_it_was(terminal: Terminal) -> None:
    with terminal.shown("reading", NEVER):
        text.advance("merging", 0.5)
    assert terminal.rest() == ""


def test_work_inside_of_work_is_on_the_same_bar(terminal: Terminal) -> None:
    with terminal.shown("outer", 0):
        terminal.until("outer")
        with terminal.shown("inner", NEVER) as advance:
            terminal.until("inner")
            advance("inner, nearly", 0.9)
            terminal.until("inner, nearly")


def test_nothing_is_drawn_away_from_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    threads = threading.active_count()
    with text.progress_bar("reading", after_s=0) as advance:
        advance("merging", 0.5)
        assert threading.active_count() == threads
    assert capsys.readouterr() == ("", "")


def test_a_dumb_terminal_and_a_process_without_stderr_have_none(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with terminal.shown("reading", 0):
        assert not _timers()
    monkeypatch.setattr(sys, "stderr", None)
    with text.progress_bar("reading", after_s=0):
        assert not _timers()
    assert terminal.rest() == ""


def test_the_bar_ends_with_an_error(terminal: Terminal) -> None:
    with pytest.raises(ValueError), terminal.shown("reading", 0):
        terminal.until("reading")
        raise ValueError
    text.advance("later", 0.5)
    assert "later" not in terminal.rest()


def _timers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
