"""`--live`: the session beneath the output of a job, in a pseudo-terminal that both write to."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from played import Played
from scrolled_terminal import ScrolledTerminal

from traceml_ray.store.session import prepare

WAIT_S = 120.0
LINES = """
import os, sys, time

def write(stop, step=lambda: None, bar=sys.stderr):
    '''A thousand lines a second above a bar of its own, as tqdm's `write` does it.'''
    done, due = 0, time.monotonic()
    while not os.path.exists(stop):
        step()
        for _ in range(20):
            bar.write("\\r" + " " * 40 + "\\r")
            bar.flush()
            print(f"line {done:06} of the job", flush=True)
            bar.write(f"\\r{done % 100:3}%|{'#' * (done % 20):20}| it/s")
            bar.flush()
            done += 1
        due += 0.02
        time.sleep(max(0, due - time.monotonic()))
    bar.write("\\r100%|" + "#" * 20 + "| it/s\\n")
    print(f"wrote {done} lines", flush=True)
"""
TRAIN = (
    LINES
    + """
import torch
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def step():
    net(torch.ones(2, 8)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()

write(sys.argv[1], step)
"""
)


class Terminal:
    """A process with a terminal of its own."""

    def __init__(self, command: Sequence[str], folder: Path, width: int = 80, height: int = 24) -> None:
        self.screen = ScrolledTerminal(width, height)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._ours, self.theirs = pty.openpty()
        self._size(width, height)
        self.modes = termios.tcgetattr(self.theirs)
        self.process = subprocess.Popen(
            command,
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "xterm-256color", "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"},
            cwd=folder,
        )

    def _size(self, width: int, height: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def resize(self, width: int, height: int) -> None:
        self.read(0.0)
        self.screen.resize(width, height)
        self._size(width, height)

    def read(self, seconds: float = 0.1) -> bool:
        ready, _, _ = select.select([self._ours], [], [], seconds)
        data = os.read(self._ours, 1 << 16) if ready else b""
        self.screen.feed(self._decoder.decode(data))
        return bool(data)

    def until(self, test: Callable[[list[str]], object]) -> list[str]:
        """Wait until what is on the screen is as wanted."""
        by = time.monotonic() + WAIT_S
        while not test(self.screen.lines):
            self.read()
            assert time.monotonic() < by, "\n".join(["on the screen:", *self.screen.lines])
        return self.screen.lines

    def ends(self) -> int:
        by = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            self.read()
            assert time.monotonic() < by, "\n".join(self.screen.lines)
        while self.read(0.2):
            pass
        assert termios.tcgetattr(self.theirs)[:4] == self.modes[:4]
        return self.process.returncode

    @property
    def everything(self) -> list[str]:
        """All that was written, also what has left the screen."""
        return [*self.screen.gone, *self.screen.lines]

    def check_given_back(self) -> None:
        """All lines scroll, and nothing of the panel is left below."""
        assert (self.screen.first, self.screen.last) == (0, self.screen.height - 1)
        assert not [
            line for line in self.screen.lines if "SESSION" in line or line.startswith(("┌", "│", "└"))
        ]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self.theirs)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def start(*command: str) -> Terminal:
        made.append(Terminal(command, tmp_path))
        return made[-1]

    yield start
    for terminal in made:
        terminal.close()


def panel_at(lines: list[str], top: int, *words: str) -> bool:
    """Whether the lines from `top` on are a panel with these words, and those above are not."""
    under = "\n".join(lines[top:])
    framed = lines[top].startswith("┌─") and lines[-1].startswith("└─")
    complete = all(re.search(word, under) for word in words)
    return framed and complete and "│" not in "".join(lines[:top])


def whole_lines(terminal: Terminal, loose: range) -> None:
    """
    Each line of the job is there once, in order, and whole. Behind those in `loose`, written between a new
    size of the terminal and the next look at it, may be something of the panel.
    """
    everything = terminal.everything
    lines = [line for line in everything if "line " in line]
    (last_line,) = [line for line in everything if line.startswith("wrote ")]
    written = [f"line {n:06} of the job" for n in range(int(last_line.split()[1]))]
    assert [line[: len(written[0])] for line in lines] == written
    assert [line for n, line in enumerate(lines) if line != written[n] and n not in loose] == []
    assert "100%|####################| it/s" in everything


def newest(terminal: Terminal) -> int:
    """The number of the newest line that is written."""
    return int([line for line in terminal.everything if line.startswith("line ")][-1].split()[1])


def test_session_is_shown_beneath_a_jobs_output_and_neither_tears_the_other(
    terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    launch = [
        sys.executable,
        "-m",
        "traceml_ray.launch",
        "--live",
        "--nproc-per-node",
        "1",
        "train.py",
        "stop",
    ]
    shown = terminal(*launch)
    shown.until(lambda lines: panel_at(lines, 15, "SESSION", r"STEP \d"))
    before = newest(shown)
    shown.resize(100, 30)
    lines = shown.until(lambda lines: panel_at(lines, 18, "SESSION", r"STEP \d"))
    assert any(line.startswith("line ") for line in lines[:18]), "\n".join(lines)
    loose = range(before - 30, newest(shown) + 1)
    (tmp_path / "stop").touch()
    assert shown.ends() == 0
    whole_lines(shown, loose)
    shown.check_given_back()
    messages = [line for line in shown.everything if line.startswith("traceml-ray: ")]
    assert any("files: " in line for line in messages)
    assert not [line for line in shown.everything if "┌" in line and "line" in line]


def test_terminal_is_given_back_while_the_launcher_is_stopped_and_when_it_is_killed(
    terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    held = prepare(tmp_path / "out", "demo")
    played = Played(held.path)
    played.play(30)
    launcher = (
        "import subprocess, sys, time; "
        "view = subprocess.Popen([sys.executable, '-m', 'traceml_ray.terminal.live', sys.argv[1]], "
        "stdin=subprocess.PIPE, start_new_session=True); time.sleep(600)"
    )
    shown = terminal(sys.executable, "-u", "-c", launcher, str(held.path))
    shown.until(lambda lines: panel_at(lines, 15, "SESSION demo"))
    for end in (signal.SIGSTOP, signal.SIGKILL):
        shown.process.send_signal(end)
        shown.until(lambda lines: not any("SESSION" in line for line in lines))
        shown.check_given_back()
        shown.process.send_signal(signal.SIGCONT)
        if end == signal.SIGSTOP:
            shown.until(lambda lines: panel_at(lines, 15, "SESSION demo"))


def test_without_a_terminal_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from traceml_ray.launchers.view_processes import terminal; print(terminal())"
    command, ours = [sys.executable, "-c", code], pty.openpty()
    for name, out, shown in (("dumb", ours[1], "None"), ("xterm", ours[1], "2"), ("xterm", None, "None")):
        monkeypatch.setenv("TERM", name)
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=out or subprocess.PIPE, timeout=240)
        assert done.stdout.decode().strip() == shown
    for fd in ours:
        os.close(fd)
