"""
torch's profiler on all threads of a process, for jobs on torch.distributed.rpc: what another worker asks for
runs on threads of the RPC agent.

Turning it off frees what other threads may just be writing to: where they run operations all the time, the
process crashes in one of some ten times. So it first stops to record, which lets them end the operations that
they are in, and is turned off `GRACE_S` later, by a thread that does not train.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from traceml_ray.agent.patch.rpc import RpcCalls
from traceml_ray.agent.torch_profiler import TorchProfiler, torch_and_profiler

GRACE_S = 0.4
"""Far longer than an operation takes, also where its thread has to wait for a core."""


class CannotRecordError(RuntimeError):
    """It cannot be recorded now; the message says why."""


class AllThreadsProfiler(TorchProfiler):
    """
    One recording. Any thread may call `start`, `stop` and `save`; memory is not recorded.

    Args:
        memory, stacks, shapes, gave_way: see `TorchProfiler`.
        calls: gives names to calls while they are recorded.
    """

    any_thread_stops = True
    _last: ClassVar[AllThreadsProfiler | None] = None
    """The one that may not have been turned off yet."""

    def __init__(
        self, memory: bool, stacks: bool, shapes: bool, gave_way: Callable[[], object], calls: RpcCalls
    ) -> None:
        super().__init__(memory, stacks, shapes, gave_way)
        if stacks:
            self.cannot = "in a job on torch.distributed.rpc, stacks cannot be recorded"
        self._options["experimental_config"] = _all_threads()
        self._calls = calls
        self._lock = threading.Lock()
        self._stopped_s: float | None = None

    def start(self) -> None:
        """Start to record, as `TorchProfiler.start`."""
        before = AllThreadsProfiler._last
        if before is not None:
            before._end()
        if self._calls.recorded_run:  # their end would be written to what is gone
            raise CannotRecordError("a call that an earlier profile has recorded still runs")
        with self._lock:  # which another thread that ends it waits for
            super().start()
            AllThreadsProfiler._last = self
            self._calls.recording = True

    def stop(self) -> bool:
        """Stop to record; return whether there is something to save, once it is complete."""
        if not self._thread:
            return False
        if self._stopped_s is None:
            if self._device is not None and not self._lost:
                self._device.synchronize()
            self._calls.recording = False
            _, profiler = torch_and_profiler()
            profiler._toggle_collection_dynamic(False, _activities())
            self._stopped_s = time.monotonic()
        return not self._lost

    def is_complete(self) -> bool:
        """Return whether all threads have ended the operations that are recorded."""
        return self._stopped_s is None or time.monotonic() - self._stopped_s >= GRACE_S

    def save(self, path: Path) -> None:
        """Turn it off, write the trace, and let go of it."""
        self._end()
        super().save(path)

    def drop(self) -> None:
        """Let go of what was recorded; returns at once."""
        if self._thread:
            self.stop()
            with contextlib.suppress(RuntimeError):  # the process ends
                threading.Thread(target=self._end, name="traceml-profiler", daemon=True).start()

    def _yield(self) -> None:
        if self._thread and not self._lost:
            self._lost = True
            self._gave_way()
            self._end()

    def _discard(self, thread: int) -> None:
        """Take the profiler off all threads."""
        self._calls.recording, AllThreadsProfiler._last = False, None
        if self._stopped_s is None:
            _, profiler = torch_and_profiler()
            with _silent():
                profiler._toggle_collection_dynamic(False, {_cpu()})

    def _end(self) -> None:
        """Turn it off; waits until that is safe."""
        with self._lock:
            if self._thread:
                self.stop()
                time.sleep(max(0.0, GRACE_S - (time.monotonic() - (self._stopped_s or 0.0))))
                self._disable()
                AllThreadsProfiler._last = None


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep out what torch prints to stderr; only for a process that has no other thread."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def is_possible() -> bool:
    """Return whether this torch, which must be imported, can record all threads."""
    _, profiler = torch_and_profiler()
    try:
        return hasattr(profiler, "_toggle_collection_dynamic") and _all_threads() is not None
    except TypeError:
        return False


def _all_threads() -> Any:
    from torch._C._profiler import _ExperimentalConfig

    return _ExperimentalConfig(profile_all_threads=True)


def _cpu() -> Any:
    from torch.profiler import ProfilerActivity

    return ProfilerActivity.CPU


def _activities() -> set[Any]:
    """Return all kinds: torch warns where only some of them are stopped."""
    from torch.profiler import ProfilerActivity

    return {ProfilerActivity.CPU, ProfilerActivity.CUDA, ProfilerActivity.XPU}
