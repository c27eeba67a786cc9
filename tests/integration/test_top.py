"""`traceml-ray top` as a person has it: a process in a pseudo-terminal, its keys, its signals, its end."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from played import Played
from sessions import Clock
from terminal_screen import TerminalScreen

from traceml_ray.store.session import prepare

WAIT_S = 120.0


class Terminal:
    """`traceml-ray top` with a terminal of its own."""

    def __init__(
        self,
        *arguments: str,
        width: int = 80,
        height: int = 24,
        shell: Sequence[str] = (),
        **environ: str,
    ) -> None:
        self.screen = TerminalScreen(width, height)
        self.sent = 0
        # A kernel throws away what is not shown yet when a job is stopped: half a character may be left.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ours, theirs = pty.openpty()
        self._size(width, height)
        self.modes = termios.tcgetattr(theirs)
        self._theirs = theirs
        self.process = subprocess.Popen(
            [*shell, sys.executable, "-m", "traceml_ray.cli", "top", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "xterm-256color", "PYTHONUTF8": "1", **environ},
        )

    def _size(self, width: int, height: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def resize(self, width: int, height: int) -> None:
        self.screen.resize(width, height)
        self._size(width, height)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def read(self, seconds: float = 0.1) -> bool:
        """Take what comes within some time; whether anything came."""
        ready, _, _ = select.select([self._ours], [], [], seconds)
        try:
            data = os.read(self._ours, 1 << 16) if ready else b""
        except OSError:  # the process has ended
            return False
        self.sent += len(data)
        self.screen.feed(self._decoder.decode(data))
        return bool(data)

    def until(self, test: Callable[[str], bool]) -> str:
        """Wait until what is on the screen is as wanted."""
        by = time.monotonic() + WAIT_S
        while not test(self.screen.text):
            self.read()
            assert time.monotonic() < by, f"on the screen:\n{self.screen.text}"
        return self.screen.text

    def shows(self, *words: str) -> str:
        return self.until(lambda text: all(word in text for word in words))

    def ends(self) -> int:
        """Wait for its end; the terminal is as it was, and what it showed is gone."""
        by = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            self.read()
            assert time.monotonic() < by, self.screen.text
        while self.read(0.0):
            pass
        modes = termios.tcgetattr(self._theirs)
        assert modes[:4] == self.modes[:4], "the terminal's modes are as they were"
        assert self.screen.modes == {"25", "7"}, "cursor, lines that wrap, and the first screen are back"
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


class Going:
    """A session that goes on in this process: what it has stored is followed from its file."""

    def __init__(self, folder: Path) -> None:
        clock = Clock()
        clock.now = time.time_ns()
        self.played = Played(prepare(folder, "demo").path, clock=clock)
        for _ in range(30):
            self.played.play(5)
        self.out = str(folder)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go_on)
        self._thread.start()

    def _go_on(self) -> None:
        while not self._over.wait(0.5):
            self.played.play(5)

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture(scope="module")
def going(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Going]:
    session = Going(tmp_path_factory.mktemp("out"))
    yield session
    session.stop()


@pytest.fixture
def top(going: Going) -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def start(*arguments: str, **how: Any) -> Terminal:
        made.append(Terminal(*arguments, "--out", going.out, "--interval", "0.3", **how))
        return made[-1]

    yield start
    for terminal in made:
        terminal.close()


def _step(text: str) -> int:
    return int(text.partition("STEP ")[2].split(" ")[0].replace(",", ""))


def test_keys_and_a_new_size_change_what_is_shown_and_q_leaves_a_clean_terminal(
    top: Callable[..., Terminal],
) -> None:
    terminal = top()
    first = terminal.shows("SESSION demo", "STRAGGLER rank 5", "[1overview]")
    assert terminal.screen.modes == {"1049"}
    assert "▲ straggler: rank 5 (host-1) in data" in first and "rank5    31" in first
    terminal.until(lambda text: _step(text) > _step(first))  # by itself
    terminal.type("3")
    terminal.shows("[3ranks]", "÷ med", "sync_wait")
    terminal.type("r5\r")
    terminal.shows("RANK 5", "ITS STEP", "named by the verdict")
    terminal.type("\x1b")
    terminal.shows("[3ranks]")
    terminal.type("\t")
    terminal.shows("[4memory]", "MEMORY OF RANKS")
    terminal.type("?")
    terminal.shows("KEYS", "one rank alone")
    terminal.resize(120, 40)
    terminal.type("1")
    terminal.shows("[1 overview]", "NODE HEALTH", "host-1  CPU 50 %", "EVENTS")
    terminal.until(lambda text: [len(line) for line in text.splitlines()] == [120] * 40)  # all of it has come
    terminal.resize(60, 15)
    terminal.until(lambda text: {len(line) for line in text.splitlines()} == {60})
    terminal.screen.feed("\x1b[2J")  # somebody else writes there
    terminal.process.send_signal(signal.SIGSTOP)  # while it is stopped, but by no key
    terminal.process.send_signal(signal.SIGCONT)
    terminal.shows("SESSION demo", "VERDICT")
    terminal.type("p")
    held = _step(terminal.shows("paused: p goes on"))
    for _ in range(5):
        terminal.read(0.2)
    assert _step(terminal.screen.text) == held
    terminal.type("pq")
    assert terminal.ends() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_it_with_a_clean_terminal(top: Callable[..., Terminal], number: int) -> None:
    terminal = top()
    terminal.shows("STRAGGLER rank 5")
    if number == signal.SIGINT:
        terminal.type("\x03")  # as the terminal sends it
    else:
        terminal.process.send_signal(number)
    assert terminal.ends() == 0


def test_stopped_process_gives_the_terminal_back_and_goes_on_later(top: Callable[..., Terminal]) -> None:
    terminal = top(shell=("bash", "-m", "-c", '"$@"; echo "it has stopped"; read -r; fg >&-', "bash"))
    terminal.shows("STRAGGLER rank 5")
    terminal.type("\x1a")
    terminal.until(lambda text: "it has stopped" in text and terminal.screen.modes == {"25", "7"})
    terminal.type("\n")  # the shell reads lines again
    terminal.until(lambda text: "STRAGGLER rank 5" in text and terminal.screen.modes == {"1049"})
    terminal.type("q")
    assert terminal.ends() == 0


def test_error_leaves_a_clean_terminal_and_one_line(top: Callable[..., Terminal]) -> None:
    terminal = top("--run", "nonsense")
    assert terminal.ends() == 2
    shown = terminal.screen.text.replace("\n", "")
    assert "traceml-ray: no run has that name in session 'demo'" in shown


def test_without_a_terminal_there_is_a_line_an_interval(going: Going) -> None:
    command = [sys.executable, "-m", "traceml_ray.cli", "top", "--out", going.out, "--interval", "0.3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [line for line, _ in zip(process.stdout, range(4), strict=False)]
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
    assert all("▲ straggler: rank 5 (host-1) in data" in line and "\x1b" not in line for line in lines)
    steps = [line.partition("step ")[2].split()[0] for line in lines]
    assert len({*steps}) > 1 and steps == sorted(steps)


def test_stored_session_is_one_line_and_one_that_is_not_there_an_error(tmp_path: Path) -> None:
    played = Played(tmp_path / "over")
    for _ in range(20):
        played.play(5)
    played.end()
    command = [sys.executable, "-m", "traceml_ray.cli", "top", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    assert " stored file  step 99  " in done.stdout
    command += ["nobody", "--wait", "0.3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    awaited, ended = done.stderr.splitlines()
    assert "no session 'nobody' under" in awaited and "sessions there: over; waiting 0.3 s for it" in awaited
    assert "no session 'nobody' under" in ended and "(waited 0.3 s for it: --wait)" in ended


def test_session_that_was_just_launched_is_awaited_and_not_taken_for_an_old_one(tmp_path: Path) -> None:
    Played(tmp_path / "old").end()
    terminal = Terminal("new", "--out", str(tmp_path), "--interval", "0.3")
    newest = None
    try:
        terminal.shows("no session 'new' under", "waiting 30 s for it to begin")
        held = prepare(tmp_path, "new")
        terminal.shows("The monitor is starting.", "STEP n/a")
        newest = Terminal("--out", str(tmp_path), "--interval", "0.3")
        newest.shows("The monitor is starting.", "STEP n/a")
        played = Played(held.path)
        for _ in range(4):
            played.play(5)
        for screen in (terminal, newest):
            screen.shows("SESSION new", "STEP 19")
            screen.type("q")
            assert screen.ends() == 0
    finally:
        for screen in filter(None, (terminal, newest)):
            screen.close()
