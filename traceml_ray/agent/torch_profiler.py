"""
Controls torch's profiler. The training thread turns it on and off; another thread writes the trace.

The code uses the layer below `torch.profiler.profile`, whose `stop` may parse all events in Python on the
training thread. A process has one profiler at a time, and the script's own profiler has priority: ours then
ends immediately, without a result. One line that a C library prints is kept out of stderr, because that
library has no switch for it.

For jobs on torch.distributed.rpc the profiler records all threads of a process, because requests of other
workers run on threads of the RPC agent. Turning the profiler off frees memory that other threads may be
writing to. If they run operations all the time, the process crashes in about one of ten cases. So recording
stops first, which lets threads finish their current operations. `GRACE_S` later a thread that does not train
turns the profiler off.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, get_ident
from typing import Any, ClassVar

from traceml_ray.agent.patch.rpc import RpcCalls

_UNBUFFERED = 2
"""`_IONBF` of the GNU C library."""


@contextlib.contextmanager
def without_line(part: bytes) -> Iterator[None]:
    """
    Keep lines that contain `part` out of what C code prints to `stderr` in this block.

    Everything else is printed at the end of the block. If this is not possible, nothing is kept out. Only C's
    variable `stderr` is replaced, which the GNU C library allows. File descriptor 2 is not changed: Python,
    child processes and signal handlers write there as always.
    """
    try:
        variable = ctypes.c_void_p.in_dll(ctypes.CDLL(None), "stderr")
        fd, file = _memory_file()
    except (AttributeError, OSError, ValueError):
        yield
        return
    original, variable.value = variable.value, file
    try:
        yield
    finally:
        variable.value = original
        printed = os.pread(fd, os.fstat(fd).st_size, 0)
        if kept := b"".join(line for line in printed.splitlines(keepends=True) if part not in line):
            with contextlib.suppress(OSError):
                os.write(2, kept)


def _memory_file() -> tuple[int, int]:
    """
    Return the descriptor of a file in memory, and a C `FILE *` that writes to it.

    The file is never closed: another thread may have read it as `stderr` just before the end of the block.
    Raises OSError.
    """
    fd = os.memfd_create("traceml-stderr", os.MFD_CLOEXEC)
    library = ctypes.CDLL(None, use_errno=True)
    library.fdopen.restype = ctypes.c_void_p
    file = library.fdopen(fd, b"w")
    if not file:
        os.close(fd)
        raise OSError(ctypes.get_errno(), "fdopen")
    library.setvbuf(ctypes.c_void_p(file), None, _UNBUFFERED, ctypes.c_size_t(0))
    return fd, int(file)


_LOG = "KINETO_LOG_LEVEL"
_SILENT = "99"
"""
Log level that silences the library. At other levels it writes two lines to stderr each time. It reads the
level once.
"""

_REGISTERED = b"External init callback must run in same thread as registerClient"
"""
Kineto prints this as an error if the first profiler of the process is started by another thread than the one
that loaded torch. A worker of Ray Train does, because it trains in a thread of its own. Kineto then skips a
call that only matters for MTIA devices.
"""
_started = False
"""Whether a profiler of ours has been started in this process."""

WAIT_S = 60.0
"""
Longest time in s that another thread which starts a profiler waits for ours to end. Only the training thread
can end ours, after its step. If both were on, turning ours off would crash the process.
"""


class ProfilerBusyError(RuntimeError):
    """Another profiler is on."""


class TorchProfiler:
    """
    One recording. The training thread calls `start` and `stop`. torch must be imported.

    Args:
        memory, stacks, shapes: what is recorded in addition.
        gave_way: called if the script has started its own profiler meanwhile.
    """

    any_thread_stops = False
    """Whether any thread may `drop` the recording, or only the thread that started it."""

    def __init__(self, memory: bool, stacks: bool, shapes: bool, gave_way: Callable[[], object]) -> None:
        self._options: dict[str, Any] = {
            "profile_memory": memory,
            "with_stack": stacks,
            "record_shapes": shapes,
        }
        self.cannot = ""
        """Why the profiler cannot record what was requested. Empty if it can."""
        self._gave_way = gave_way
        self._thread = 0
        self._lost = False
        """Whether another profiler has replaced ours, which then has nothing to save."""
        self._is_off = Event()
        self._too_late = False
        """Whether another profiler was already on."""
        self._undo: Callable[[], None] = lambda: None
        self._device: Any = None
        self._result: Any = None

    def start(self) -> None:
        """Start recording on this thread. Raises `ProfilerBusyError`, and whatever torch raises."""
        torch, profiler = torch_and_profiler()
        if getattr(profiler, "_is_profiler_enabled", False) or torch.autograd._profiler_enabled():
            raise ProfilerBusyError("a profiler is on already")
        cuda = torch.cuda.is_initialized()
        ours = profiler.profile(use_device="cuda" if cuda else None, use_kineto=True, **self._options)
        self._thread, self._device = get_ident(), torch.cuda if cuda else None
        prepare = self._watch(profiler.profile)
        silenced = os.environ.setdefault(_LOG, _SILENT) == _SILENT
        try:
            with _first_start():
                prepare(ours)
            ours._start_trace()
        except BaseException:
            self._undo()
            self._thread = 0
            if torch.autograd._profiler_enabled():
                profiler._disable_profiler()
            profiler._run_on_profiler_stop()
            self._is_off.set()
            raise
        finally:
            if silenced:
                os.environ.pop(_LOG, None)

    def _watch(self, profile: Any) -> Callable[[Any], object]:
        """Make the start of any other profiler end this one first. Returns the function that starts ours."""
        original = profile._prepare_trace

        def prepare_trace(other: Any, *args: Any, **kwargs: Any) -> Any:
            self._yield()
            return original(other, *args, **kwargs)

        def undo() -> None:
            if profile.__dict__.get("_prepare_trace") is prepare_trace:
                profile._prepare_trace = original

        profile._prepare_trace = prepare_trace
        self._undo = undo
        return original  # type: ignore[no-any-return]

    def _yield(self) -> None:
        if self._thread and not self._lost:
            self._lost = True
            self._gave_way()
            if get_ident() == self._thread:
                self._disable()
            else:
                self._too_late = not self._is_off.wait(WAIT_S)

    def stop(self) -> bool:
        """Stop recording. Returns whether there is something to save. Runs on the thread that started it."""
        if not self._thread:
            return False
        try:
            if not self._lost and self._device is not None:
                self._device.synchronize()  # kernels launched in these steps belong to them
        finally:
            self._disable()
        return not self._lost

    def _disable(self) -> None:
        _, profiler = torch_and_profiler()
        self._undo()
        if self._thread and not self._too_late:
            self._thread = 0
            self._result = profiler._disable_profiler()
            profiler._run_on_profiler_stop()
        self._is_off.set()

    def forked(self) -> None:
        """
        In a forked child of this process, which has only the forking thread: stop recording.

        Kineto is not called, as the usual end of a profile would: threads that no longer exist may hold its
        locks, and CUPTI does not work after a fork.
        """
        thread, self._thread = self._thread, 0
        self._undo()
        if thread:
            _, profiler = torch_and_profiler()
            profiler._run_on_profiler_stop()
            self._discard(thread)

    def _discard(self, thread: int) -> None:
        """
        Remove the profiler from this thread, where `thread` turned it on, and discard
        everything recorded.
        """
        if thread == get_ident():
            _autograd = torch_and_profiler()[0]._C._autograd
            _autograd._disable_profiler_legacy(_autograd._ProfilerDisableOptions(True, False))
            if self._options["with_stack"]:
                sys.setprofile(None)  # torch's own function, which the usual end would have replaced

    def is_complete(self) -> bool:
        """Return whether the recording can be saved."""
        return True

    def drop(self) -> None:
        """Discard the recording."""
        self._result = None

    def save(self, path: Path) -> None:
        """
        Write the trace and discard the recording. No Python code of this process runs meanwhile. Any thread
        may call this.
        """
        result, self._result = self._result, None
        if result is None or self._lost:  # torch would crash
            raise ProfilerBusyError("there is nothing to save")
        result.save(str(path))


@contextlib.contextmanager
def _first_start() -> Iterator[None]:
    """Keep Kineto's harmless error line (see `_REGISTERED`) out of stderr. It is printed once per process."""
    global _started
    first, _started = not _started, True
    # Nearly always the main thread loads torch.
    quiet = first and threading.current_thread() is not threading.main_thread()
    with without_line(_REGISTERED) if quiet else contextlib.nullcontext():
        yield


def torch_and_profiler() -> tuple[Any, Any]:
    """Return torch and its `autograd.profiler`."""
    import torch
    from torch.autograd import profiler

    return torch, profiler


GRACE_S = 0.4
"""
Time to let operations finish, in s. It is far longer than an operation takes, even if its thread waits for a
core.
"""


class CannotRecordError(RuntimeError):
    """Recording is not possible now. The message says why."""


class AllThreadsProfiler(TorchProfiler):
    """
    One recording of all threads. Any thread may call `start`, `stop` and `save`. Memory is not recorded.

    Args:
        memory, stacks, shapes, gave_way: see `TorchProfiler`.
        calls: names RPC calls while they are recorded.
    """

    any_thread_stops = True
    _last: ClassVar[AllThreadsProfiler | None] = None
    """The newest recording, which may not have been turned off yet."""

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
        """Start recording, as `TorchProfiler.start`."""
        before = AllThreadsProfiler._last
        if before is not None:
            before._end()
        if self._calls.recorded_run:  # their ends would be written to freed memory
            raise CannotRecordError("a call that an earlier profile has recorded still runs")
        with self._lock:  # a thread that ends the recording waits for this lock
            super().start()
            AllThreadsProfiler._last = self
            self._calls.recording = True

    def stop(self) -> bool:
        """Stop recording. Returns whether there is something to save, once `is_complete`."""
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
        """Return whether all threads have finished the operations that are recorded."""
        return self._stopped_s is None or time.monotonic() - self._stopped_s >= GRACE_S

    def save(self, path: Path) -> None:
        """Turn the profiler off, write the trace, and discard the recording."""
        self._end()
        super().save(path)

    def drop(self) -> None:
        """Discard the recording. Returns immediately."""
        if self._thread:
            self.stop()
            with contextlib.suppress(RuntimeError):  # raised when the process is ending
                threading.Thread(target=self._end, name="traceml-profiler", daemon=True).start()

    def _yield(self) -> None:
        if self._thread and not self._lost:
            self._lost = True
            self._gave_way()
            self._end()

    def _discard(self, thread: int) -> None:
        """Turn the profiler off for all threads."""
        self._calls.recording, AllThreadsProfiler._last = False, None
        if self._stopped_s is None:
            _, profiler = torch_and_profiler()
            with _silent():
                profiler._toggle_collection_dynamic(False, {_cpu()})

    def _end(self) -> None:
        """Turn the profiler off. Waits until that is safe."""
        with self._lock:
            if self._thread:
                self.stop()
                time.sleep(max(0.0, GRACE_S - (time.monotonic() - (self._stopped_s or 0.0))))
                self._disable()
                AllThreadsProfiler._last = None


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Suppress what torch prints to stderr. Only for a process without other threads."""
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
    """Return all kinds of activities: torch warns if only some of them are stopped."""
    from torch.profiler import ProfilerActivity

    return {ProfilerActivity.CPU, ProfilerActivity.CUDA, ProfilerActivity.XPU}
