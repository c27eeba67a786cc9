"""Signals for a launcher are forwarded to its command once, in whatever order the kernel shows them."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from traceml_ray.launchers.command import Forwarder


class Command:
    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[int] = queue.SimpleQueue()

    def send_signal(self, number: int) -> None:
        self.heard.put(number)


class OfGroup(Forwarder):
    """The first signal is one for the group, of which this process is told after it has asked the witness."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = queue.SimpleQueue[int]()

    def _whole_group_has(self, number: int) -> bool:
        first = self.asked.empty()
        self.asked.put(number)
        if first:
            threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
        return first


@pytest.fixture
def forwarder() -> Iterator[OfGroup]:
    made = OfGroup()
    yield made
    made.close()


def test_signal_of_the_group_that_comes_late_is_not_forwarded_and_the_next_one_is(forwarder: OfGroup) -> None:
    command: Any = Command()
    forwarder.to(cast("subprocess.Popen[bytes]", command))
    os.kill(os.getpid(), signal.SIGUSR1)  # as `timeout` does, before it sends one to the group
    with pytest.raises(queue.Empty):
        command.heard.get(timeout=1)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert command.heard.get(timeout=240) == signal.SIGUSR1
    os.kill(os.getpid(), signal.SIGUSR2)
    assert command.heard.get(timeout=240) == signal.SIGUSR2


def test_second_signal_does_not_cut_the_end_of_the_launcher_short_but_ctrl_c_does() -> None:
    """A terminal that closes sends one, and its shell another one."""
    command: Any = Command()
    forwarder = Forwarder()
    forwarder.to(cast("subprocess.Popen[bytes]", command))
    forwarder.command_is_over()
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1):
        signal.raise_signal(number)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    forwarder.close()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    assert command.heard.empty()


def test_signal_that_python_does_not_handle_before_the_command_ends_is_forwarded() -> None:
    """As one that comes just before the main thread waits: the kernel does not wake that thread for it."""
    script = "trap 'exit 7' USR1; echo ready; read line"
    command = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert command.stdout is not None and command.stdin is not None
    assert command.stdout.readline() == b"ready\n"
    forwarder = Forwarder()
    forwarder.to(command)

    def send() -> None:
        threading.Event().wait(0.3)  # the main thread waits for the command by then
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    threading.Thread(target=send).start()
    ending = threading.Timer(240, command.kill)
    ending.start()
    code = command.wait()
    ending.cancel()
    forwarder.command_is_over()
    forwarder.close()
    command.stdin.close()
    command.stdout.close()
    assert code == 7
