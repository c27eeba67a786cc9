"""
Signals for a launcher are forwarded to its command, once.

The command is in the launcher's process group, as it would be in the group of a shell's job. A signal for the
group (`timeout`, `kill %1`, Ctrl-C) reaches both from the kernel; one for the launcher alone reaches only the
launcher, and is forwarded. The kernel does not show which of the two it was. So there is a witness: a process
in the same group that blocks these signals and reports which of them are pending.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time

_FORWARDED = frozenset(
    (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
)
_END = 0
_MOST = 256
_SETTLE_S = 0.1
"""
Delay between a signal and the question to the witness, in s: `timeout` signals the launcher first, then its
group.
"""
_ANSWER_S = 2.0
# Not a fork of the launcher: `pkill -f` of a name in the launcher's command line must not find it.
_WITNESS = """
import os, signal
while number := os.read(0, 1):
    pending = number[0] in signal.sigpending()
    if pending:
        signal.sigwait(number)
    os.write(1, bytes([pending]))
"""


class Forwarder:
    """
    Takes this process's signals from now on until `close`. Call it on the main thread.

    Signals come through a pipe, to which Python writes at once. A handler could be too late: that of a signal
    just before the main thread waits for the command is not called until the command has ended.
    """

    def __init__(self) -> None:
        self._before = {number: signal.getsignal(number) for number in _FORWARDED}
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._fd_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread: threading.Thread | None = None
        self._witness: subprocess.Popen[bytes] | None = None
        for number, handler in self._before.items():
            if handler != signal.SIG_IGN:  # as under nohup: it is the command's, too
                signal.signal(number, _do_nothing)

    def to(self, command: subprocess.Popen[bytes]) -> None:
        """Send `command` what came before it, and from now on what comes to this process alone."""
        self._witness = _witness()
        thread = threading.Thread(target=self._forward, args=(command,), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there is no thread to be had
            self.close()
        else:
            self._thread = thread

    def command_is_over(self) -> None:
        """
        Forward nothing more. Until `close` signals have no effect: a second one (a shell hands on that its
        terminal is gone, a scheduler repeats itself) would end this process before its own end. But Ctrl-C
        raises KeyboardInterrupt: a person does not want to wait.
        """
        signal.signal(signal.SIGINT, self._before[signal.SIGINT])
        self._put(_END)
        self._dismiss()

    def close(self) -> None:
        """Have signals do what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        self._put(_END)
        self._dismiss()
        if self._thread is not None:
            self._thread.join(_SETTLE_S + _ANSWER_S)
        if self._thread is None or not self._thread.is_alive():
            os.close(self._read)
            os.close(self._write)

    def _put(self, number: int) -> None:
        with contextlib.suppress(BlockingIOError):  # full of signals that nobody takes any more
            os.write(self._write, bytes([number]))

    def _forward(self, command: subprocess.Popen[bytes]) -> None:
        while _END not in (came := self._received() | self._received_soon()):
            of_group = {number for number in came if self._whole_group_has(number)}
            for number in came - of_group:
                with contextlib.suppress(OSError):  # as to a command of another user
                    command.send_signal(number)
            if of_group:  # this process may have had one before, and be told of the group's only now
                for number in self._received_soon() - of_group:
                    self._put(number)

    def _received(self) -> set[int]:
        """Wait for signals and return those received."""
        return {number for number in os.read(self._read, _MOST) if number in _FORWARDED or number == _END}

    def _received_soon(self) -> set[int]:
        """Return the signals received within `_SETTLE_S`."""
        time.sleep(_SETTLE_S)
        came: set[int] = set()
        while select.select([self._read], [], [], 0)[0]:
            came |= self._received()
        return came

    def _whole_group_has(self, number: int) -> bool:
        """Return whether the signal came to the whole group; False where the witness does not answer."""
        witness = self._witness
        if witness is None or witness.stdin is None or witness.stdout is None:
            return False
        with contextlib.suppress(OSError):
            witness.stdin.write(bytes([number]))
            if select.select([witness.stdout], [], [], _ANSWER_S)[0]:
                return witness.stdout.read(1) == b"\x01"
        self._dismiss()  # a late answer would be taken for that to the next question
        return False

    def _dismiss(self) -> None:
        witness, self._witness = self._witness, None
        if witness is not None:
            witness.kill()
            witness.wait()


def _do_nothing(_number: int, _frame: object) -> None:
    """The handler of a signal that is forwarded: without one Python writes nothing to the pipe."""


def _witness() -> subprocess.Popen[bytes] | None:
    """Start it with the signals blocked: a mask outlives the start of a program."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WITNESS],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
