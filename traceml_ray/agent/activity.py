"""
Whether the training thread does anything while no step ends.

The agent's thread looks at the stack of the training thread once per round, from when it has been in one
stage for some seconds. A thread that waits is found at the same instruction each time, and the kernel does
not run it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from traceml_ray.agent.stacks import current_frames, python_threads

OPEN_NS = 3_000_000_000
"""Time in one stage after which the training thread is looked at, in ns."""
RUNS = 2
"""
Number of times that a thread must have given up its core between two looks: some waits wake up every few
seconds.
"""
_MAX_FRAMES = 200


class Activity:
    """
    When the training thread was last found to do something. Only the agent's thread uses it.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: tuple[object, int | None] | None = None
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
        self._last = None if frame is None else (_stack(frame), _runs(owner))
        if before is None or self._last is None:
            return
        (stack, runs), (stack_before, runs_before) = self._last, before
        ran = runs is not None and runs_before is not None and runs - runs_before >= RUNS
        if stack != stack_before or ran:
            self._moved = now

    @property
    def still_s(self) -> float | None:
        """Time since the thread was last found to do something, in s. None: it was never looked at."""
        return None if self._moved is None else self._clock() - self._moved


def _stack(frame: FrameType | None) -> tuple[tuple[int, int], ...]:
    """Return the instruction of each call of a stack."""
    calls: list[tuple[int, int]] = []
    while frame is not None and len(calls) < _MAX_FRAMES:
        calls.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(calls)


def _runs(owner: int | None) -> int | None:
    """Return how often a thread has given up its core by itself. None: not known."""
    thread = python_threads().get(owner or -1)
    try:
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_bytes()  # type: ignore[union-attr]
        return int(status.partition(b"\nvoluntary_ctxt_switches:")[2].split()[0])
    except Exception:  # no /proc, or a thread that Python does not know
        return None
