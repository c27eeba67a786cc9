"""
Whether a rank does anything while no step ends.

The agent's thread looks at the training thread once per round, from when it has been in one stage for some
seconds. A thread that waits is found at the same instruction each time, and the kernel does not run it. It
may wait for processes that it has started, such as a compiler, an upload, or the workers of a loader: then
these are looked at.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from traceml_ray.agent.stacks import current_frames, python_threads

OPEN_NS = 3_000_000_000
"""Time in one stage after which the training thread is looked at, in ns."""
RUNS = 2
"""
Number of times that a thread must have given up its core between two looks: some waits wake up every few
seconds.
"""
SHARE = 0.2
"""Share of the time between two looks for which something that works needs a core."""
MIN_BYTES = 64 * 1024
"""Number of bytes that a started process that works reads and writes between two looks."""
_MAX_FRAMES, _MAX_PROCESSES = 200, 64
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/pydevd.py", "/pydevd_frame.py", "/pydevd_sys_monitoring.py")
_TICKS = os.sysconf("SC_CLK_TCK")


class ThreadLook(NamedTuple):
    """What is seen of the training thread. Numbers grow; None: not known."""

    t_s: float
    stack: tuple[tuple[int, int], ...]
    """Code and instruction of each call."""
    switches: int | None
    """How often the thread has given up its core by itself."""
    core_ns: int | None
    """Time for which it was on a core, or waited for one."""
    started_s: float
    """CPU time of the processes that it has started."""
    started_bytes: int
    """Bytes that these have read and written."""


class Activity:
    """
    When the training thread was last found to do something. Only the agent's thread uses it.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: ThreadLook | None = None
        self._moved: float | None = None

    def look(self, owner: int | None, open_ns: int) -> None:
        """
        Look at the training thread.

        Args:
            owner: identifier of the thread. None: the main thread.
            open_ns: time since the thread has entered its stage, in ns.
        """
        now, before = self._clock(), self._last
        entered = now - open_ns / 1e9
        self._moved = entered if self._moved is None else max(self._moved, entered)
        owner = owner if owner is not None else threading.main_thread().ident
        frame = current_frames().get(owner or -1) if open_ns > OPEN_NS else None
        self._last = None if frame is None else _look(frame, owner, now)
        moved = before is not None and self._last is not None and has_moved(before, self._last)
        if moved or (frame is not None and _in_debugger(frame)):
            self._moved = now

    @property
    def still_s(self) -> float | None:
        """Time since the thread was last found to do something, in s. None: it was never looked at."""
        return None if self._moved is None else self._clock() - self._moved


def _look(frame: FrameType, owner: int | None, now: float) -> ThreadLook:
    thread = python_threads().get(owner or -1)
    native = thread.native_id if thread is not None else None
    return ThreadLook(now, _stack(frame), _switches(native), _core_ns(native), *_started(native))


def has_moved(before: ThreadLook, look: ThreadLook) -> bool:
    """Return whether something was done between two looks."""
    needed_s = SHARE * (look.t_s - before.t_s)
    switches = _more(before.switches, look.switches)
    core_s = _more(before.core_ns, look.core_ns) / 1e9
    started_s = look.started_s - before.started_s
    return (
        look.stack != before.stack
        or switches >= RUNS
        or (needed_s > 0 and (core_s >= needed_s or started_s >= needed_s))
        or look.started_bytes - before.started_bytes >= MIN_BYTES
    )


def _more(before: int | None, now: int | None) -> int:
    """Return by how much a number has grown. 0 if it is not known."""
    return 0 if before is None or now is None else now - before


def _calls(frame: FrameType | None) -> Iterator[FrameType]:
    count = 0
    while frame is not None and count < _MAX_FRAMES:
        yield frame
        frame, count = frame.f_back, count + 1


def _stack(frame: FrameType) -> tuple[tuple[int, int], ...]:
    """Return the instruction of each call of a stack."""
    return tuple((id(call.f_code), call.f_lasti) for call in _calls(frame))


def _in_debugger(frame: FrameType) -> bool:
    """Return whether a person looks at the thread in a debugger."""
    return any(call.f_code.co_filename.endswith(_DEBUGGERS) for call in _calls(frame))


def _switches(native: int | None) -> int | None:
    """Return how often a thread has given up its core by itself. None: not known."""
    try:
        status = Path(f"/proc/self/task/{native}/status").read_bytes()
        return int(status.partition(b"\nvoluntary_ctxt_switches:")[2].split()[0])
    except Exception:  # no /proc, or a thread that Python does not know
        return None


def _core_ns(native: int | None) -> int | None:
    """Return for how long a thread was on a core, or waited for one, in ns. None: not known."""
    try:
        on_core, waited = Path(f"/proc/self/task/{native}/schedstat").read_bytes().split()[:2]
        return int(on_core) + int(waited)
    except Exception:
        return None


def _started(native: int | None) -> tuple[float, int]:
    """Return the CPU time of the processes that a thread has started, in s, and the bytes of their files."""
    seconds, size = 0.0, 0
    pending, seen = _children(os.getpid(), native), 0
    while pending and seen < _MAX_PROCESSES:
        process = pending.pop(0)
        seen += 1
        pending += _children(process, process)
        try:
            times = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
            seconds += sum(map(int, times[11:15])) / _TICKS
            lines = Path(f"/proc/{process}/io").read_bytes().split()
            size += int(lines[1]) + int(lines[3])
        except Exception:  # it has ended, or is another user's
            continue
    return seconds, size


def _children(process: int, native: int | None) -> list[int]:
    try:
        return [*map(int, Path(f"/proc/{process}/task/{native}/children").read_bytes().split())]
    except Exception:
        return []
