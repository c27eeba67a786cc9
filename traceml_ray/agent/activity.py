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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from traceml_ray.agent.stacks import current_frames, python_threads

OPEN_NS = 3_000_000_000
"""Time in one stage after which the training thread is looked at, in ns."""
SPAN_S = 3.0
"""Time over which looks are compared, in s: who works may sleep for a second now and then."""
RUNS = 2
"""
Number of times that a thread that works has given up its core in this time. Some waits wake up every few
seconds.
"""
SHARE = 0.2
"""Share of this time for which something that works needs a core."""
MIN_BYTES = 256 * 1024
"""Number of bytes that a started process that works reads and writes in this time."""
_MAX_FRAMES, _MAX_PROCESSES, _MAX_THREADS, _MAX_LOOKS = 200, 64, 64, 8
_DEBUGGERS = ("/pdb.py", "/pydevd.py")
_PAUSES = {"interaction", "cmdloop", "_cmdloop", "do_wait_suspend", "_do_wait_suspend"}
"""Functions of debuggers in which a thread is paused. Others are in the stack of all that runs there."""
_SLACK_S = 1.0
"""Time by which the age of a stage may be out of date when processes are looked at, in s."""
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
    awaited_switches: int
    """How often those started in this stage have given up a core: the thread may wait for one of them."""


class Activity:
    """
    When the training thread was last found to do something. Only the agent's thread uses it.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looks: deque[ThreadLook] = deque(maxlen=_MAX_LOOKS)
        self._moved: float | None = None

    def look(self, owner: int | None, open_ns: int) -> None:
        """
        Look at the training thread.

        Args:
            owner: identifier of the thread. None: the main thread.
            open_ns: time since the thread has entered its stage, in ns.
        """
        now = self._clock()
        entered = now - open_ns / 1e9
        self._moved = entered if self._moved is None else max(self._moved, entered)
        owner = owner if owner is not None else threading.main_thread().ident
        frame = current_frames().get(owner or -1) if open_ns > OPEN_NS else None
        if frame is None:
            self._looks.clear()
            return
        look = _look(frame, owner, now, open_ns / 1e9)
        while len(self._looks) > 1 and self._looks[1].t_s <= now - SPAN_S:
            self._looks.popleft()
        if _in_debugger(frame) or (self._looks and has_moved(self._looks, look)):
            self._moved = now
        self._looks.append(look)

    @property
    def still_s(self) -> float | None:
        """Time since the thread was last found to do something, in s. None: it was never looked at."""
        return None if self._moved is None else self._clock() - self._moved


def _look(frame: FrameType, owner: int | None, now: float, open_s: float) -> ThreadLook:
    thread = python_threads().get(owner or -1)
    native = thread.native_id if thread is not None else None
    return ThreadLook(now, _stack(frame), _switches(native), _core_ns(native), *_started(native, open_s))


def has_moved(before: Sequence[ThreadLook], look: ThreadLook) -> bool:
    """Return whether something was done between the first of the looks `before`, or the last, and `look`."""
    first = before[0]
    needed_s = SHARE * (look.t_s - first.t_s)
    core_s = _more(first.core_ns, look.core_ns) / 1e9
    started_s = look.started_s - first.started_s
    return (
        look.stack != before[-1].stack
        or _more(first.switches, look.switches) >= RUNS
        or look.awaited_switches - first.awaited_switches >= RUNS
        or (needed_s > 0 and (core_s >= needed_s or started_s >= needed_s))
        or look.started_bytes - first.started_bytes >= MIN_BYTES
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
    """Return whether the thread is paused in a debugger."""
    codes = (call.f_code for call in _calls(frame))
    return any(code.co_name in _PAUSES and code.co_filename.endswith(_DEBUGGERS) for code in codes)


def _switches(native: int | None) -> int | None:
    """Return how often a thread has given up its core by itself. None: not known."""
    try:
        return _switches_in(Path(f"/proc/self/task/{native}/status"))
    except Exception:  # no /proc, or a thread that Python does not know
        return None


def _switches_in(status: Path) -> int:
    return int(status.read_bytes().partition(b"\nvoluntary_ctxt_switches:")[2].split()[0])


def _core_ns(native: int | None) -> int | None:
    """Return for how long a thread was on a core, or waited for one, in ns. None: not known."""
    try:
        on_core, waited = Path(f"/proc/self/task/{native}/schedstat").read_bytes().split()[:2]
        return int(on_core) + int(waited)
    except Exception:
        return None


def _started(native: int | None, open_s: float) -> tuple[float, int, int]:
    """
    Look at the processes that a thread has started.

    Returns their CPU time in s, the bytes that they have read and written, and how often the threads of those
    that are at most `open_s` s old have given up a core.
    """
    seconds, size, switches = 0.0, 0, 0
    pending, seen = _children(os.getpid(), native), 0
    since_s = time.clock_gettime(time.CLOCK_BOOTTIME) - open_s - _SLACK_S
    while pending and seen < _MAX_PROCESSES:
        process = pending.pop(0)
        seen += 1
        pending += _children(process, process)
        folder = Path(f"/proc/{process}")
        try:
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            seconds += sum(map(int, fields[11:15])) / _TICKS
            words = (folder / "io").read_bytes().split()
            size += int(words[1]) + int(words[3])
            if int(fields[19]) / _TICKS >= since_s:
                threads = islice((folder / "task").iterdir(), _MAX_THREADS)
                switches += sum(_switches_in(one / "status") for one in threads)
        except Exception:  # it has ended, or is another user's
            continue
    return seconds, size, switches


def _children(process: int, native: int | None) -> list[int]:
    try:
        return [*map(int, Path(f"/proc/{process}/task/{native}/children").read_bytes().split())]
    except Exception:
        return []
