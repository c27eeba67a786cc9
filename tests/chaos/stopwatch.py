"""
How long our hooks hold up the training thread: its time in them, without the original that they call.

What a busy machine does is taken out, so that it cannot fail a test: a hook that never left the processor has
taken its CPU time; one that did has also been blocked (a lock, I/O, the GIL) for as long as neither it nor a
thread of ours (which may hold what it waits for) was only waiting for a processor.

A garbage collection is taken out, too: it falls on whoever happens to be there. And while a rank of torchrun
attaches to Ray, once, only CPU time counts: Ray's import and start hold up hooks and everything else alike.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PARTS = ("wall", "cpu", "switches", "cpu of the process", "gc", "ready", "ours ready", "cpu of ours")
"""What a time is made of, in ns. A thread that is ready waits for a processor."""
Now = tuple[int, ...]
TOLD_NS = 1_000_000
_TRIES = 5


class Stopwatch:
    """Times hooks: `outer` around each, `inner` around the original inside it."""

    def __init__(self) -> None:
        self.longest_ns = 0
        self.where = ""
        self.parts = ""
        self.count = 0
        self._local = threading.local()
        self._gc_ns = self._gc_began_ns = 0
        gc.callbacks.append(self._collected)

    def _collected(self, phase: str, _info: dict[str, int]) -> None:
        now_ns = time.perf_counter_ns()
        if phase == "stop":
            self._gc_ns += now_ns - self._gc_began_ns
        self._gc_began_ns = now_ns

    def outer(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return `hook`, timed."""

        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            running = self._running()
            if not running:
                _look_up(self._local)
            attaching = _attaching()
            running.append([(0,) * len(PARTS), self._now()])
            try:
                return hook(*args, **kwargs)
            finally:
                ended = self._now()
                self._note(name, _more(*running.pop(), ended), attaching or _attaching())

        return call

    def inner(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `original`, whose time is not the hook's."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            running = self._running()
            if not running:
                return original(*args, **kwargs)
            mine = running[-1]
            mine[0] = _more(*mine, self._now())
            try:
                return original(*args, **kwargs)
            finally:
                mine[1] = self._now()

        return call

    def _running(self) -> list[list[Any]]:
        running: list[list[Any]] = self._local.__dict__.setdefault("running", [])
        return running

    def _note(self, name: str, spent: Now, attaching: bool) -> None:
        self.count += 1
        ns = _held_up(spent, attaching)
        if ns > self.longest_ns:
            self.longest_ns, self.where = ns, name
            self.parts = ", ".join(f"{part} {n:,}" for part, n in zip(PARTS, spent, strict=True))
            if ns > TOLD_NS:  # where ours are now, they most likely were
                self.parts += "".join(map(_place, _ours()))

    def _now(self) -> Now:
        """
        Read all at one moment: if this thread waits for a processor between two of the readings, they are
        made again. Otherwise that wait would be taken out of a time that does not contain it.
        """
        me, *ours = self._local.accounts
        for _ in range(_TRIES):
            _, ready_before = me.read()
            clocks = self._clocks()
            _, ready = me.read()
            if ready == ready_before:
                break
        accounts = [account.read() for account in ours]
        return (*clocks, ready, sum(ready for _, ready in accounts), sum(ran for ran, _ in accounts))

    def _clocks(self) -> Now:
        return (
            time.perf_counter_ns(),
            time.thread_time_ns(),
            resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw,
            time.process_time_ns(),
            self._gc_ns,
        )


def _more(before: Now, began: Now, ended: Now) -> Now:
    return tuple(so_far + b - a for so_far, a, b in zip(before, began, ended, strict=True))


def _held_up(spent: Now, attaching: bool) -> int:
    wall, of_thread, switches, of_process, gc_ns, ready, ours_ready, _ = spent
    cpu = min(of_thread, of_process)  # else the machine stood still between the two readings of the clocks
    blocked = wall - cpu - ready - ours_ready if switches and not attaching else 0
    return max(0, cpu + max(0, blocked) - gc_ns)


def _look_up(local: threading.local) -> None:
    """Open the accounts of this thread and of those of ours, twice a second."""
    if time.monotonic() < local.__dict__.get("again", 0.0):
        return
    for account in local.__dict__.get("accounts", ()):
        os.close(account.fd)
    ids = (threading.get_native_id(), *(thread.native_id for thread in _ours()))
    local.accounts = [_Account(number) for number in ids if number]
    local.again = time.monotonic() + 0.5


def _ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("traceml")]


def _attaching() -> bool:
    return any(thread.name == "traceml-attach" for thread in threading.enumerate())


def _place(thread: threading.Thread) -> str:
    """Return where a thread is: its calls from the outermost on."""
    frame = sys._current_frames().get(thread.ident or 0)
    calls = [
        f"{Path(frame_summary.filename).name}:{frame_summary.lineno}"
        for frame_summary in traceback.extract_stack(frame)
    ]
    return f"; {thread.name}: {' '.join(calls)}"


class _Account:
    """For how many ns a thread has run, and was ready to run and did not: as last read, when it is gone."""

    def __init__(self, thread: int) -> None:
        self._ns = (0, 0)
        try:
            self.fd = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> tuple[int, int]:
        """Return both."""
        with contextlib.suppress(OSError, ValueError):
            ran, ready, *_ = map(int, os.pread(self.fd, 64, 0).split())
            self._ns = ran, ready
        return self._ns


def stalls_s() -> float:
    """Return seconds for which, since the machine started, something waited for a processor."""
    try:
        return int(Path("/proc/pressure/cpu").read_text().split("total=")[1].split()[0]) / 1e6
    except OSError:
        return 0.0


def measured() -> Stopwatch:
    """Have every hook that is put in from now on timed."""
    from traceml_ray.agent.instrument import Instrumentation
    from traceml_ray.agent.patch import root_modules
    from traceml_ray.agent.patch.patcher import Patcher

    watch = Stopwatch()
    replace, install, marked = Patcher.replace, Instrumentation.install, root_modules._marked

    def replaced(self: Any, owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
        def timed(original: Any) -> Any:
            wrapper = make(watch.inner(original))
            _inside(watch, wrapper)
            return watch.outer(f"{getattr(owner, '__name__', owner)}.{name}", wrapper)

        return replace(self, owner, name, timed)

    def installed(self: Any) -> None:
        install(self)
        from torch.optim import optimizer

        for hooks in (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks):
            for key, hook in hooks.items():
                hooks[key] = watch.outer("optimizer", hook)

    def mark(cls: Any, instance: Any, root_id: Any, roots: Any) -> Any:
        theirs = (
            instance if instance is not None else lambda self, *a, **k: super(cls, self).__call__(*a, **k)
        )
        return watch.outer("forward", marked(cls, watch.inner(theirs), root_id, roots))

    Patcher.replace = replaced  # type: ignore[method-assign, assignment]
    Instrumentation.install = installed  # type: ignore[method-assign]
    root_modules._marked = mark
    return watch


def _inside(watch: Stopwatch, wrapper: Any) -> None:
    """Time what a backward calls from inside torch, too."""
    names = getattr(getattr(wrapper, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(wrapper, "__closure__", None) or (), strict=True))
    if "carrier" not in cells:
        return
    hooks = cells["carrier"].cell_contents._backward_hooks
    first = hooks[0]
    hooks[0] = watch.outer("first gradient", first)
    done = dict(zip(first.__code__.co_freevars, first.__closure__, strict=True))["gradients_done"]
    done.cell_contents = watch.outer("gradients done", done.cell_contents)
