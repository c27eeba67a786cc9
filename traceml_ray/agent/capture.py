"""
Captures a profile of a few steps on this rank. The agent's thread arms it; the training thread records it.

While nothing is requested, the training thread reads one attribute a step (`Recorder.step_hook`), which is
None. An error ends the capture with a reason, and affects nothing else.

`TraceFile` holds the trace of a rank as a compressed file, which the relay reads (`wire.messages`).
`CaptureAgent` manages the captures of one process on the agent's thread: it handles commands and reports the
state with each batch.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from typing import Literal

import msgspec

from traceml_ray.agent import torch_profiler
from traceml_ray.agent.mark_log import LOCK_S
from traceml_ray.agent.patch import rpc
from traceml_ray.agent.recorder import Recorder, Spans
from traceml_ray.agent.torch_profiler import (
    AllThreadsProfiler,
    CannotRecordError,
    ProfilerBusyError,
    TorchProfiler,
)
from traceml_ray.errors import Errors, error_text, sendable
from traceml_ray.text import duration
from traceml_ray.text import size as size_text
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import ready
from traceml_ray.wire.messages import FOLDER_PREFIX, LATE, TRACE_NAME, CaptureState

MAX_TRACE_BYTES = 1 << 29
"""Largest size of a trace as torch writes it, in bytes. One step of a large model has tens of MB."""
_CHUNK = 1 << 20
_LEVEL = 5


class TraceTooLargeError(ValueError):
    """The trace is larger than the limit and is not kept."""


class TraceFile:
    """
    A file in a folder of its own that only this user can read.

    Raises OSError, `TraceTooLargeError`, and whatever `write` raises.

    Args:
        write: writes the trace to a path.
        place: where the folder is made. None: where temporary files are.
        process_id: id of this rank process. It is part of the folder's name.
        max_bytes: largest size of the trace before it is compressed, in bytes.
    """

    def __init__(
        self,
        write: Callable[[Path], object],
        place: str | None,
        process_id: str,
        max_bytes: int = MAX_TRACE_BYTES,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp("", f"{FOLDER_PREFIX}{process_id}-", place)).absolute()
        """Absolute path of the folder of the trace."""
        self.size: int | None = None
        """Size of the compressed trace, in bytes. None until it is compressed."""
        self._plain, self._removed = self.folder / "trace.json", False
        try:
            write(self._plain)
            self._check_size(max_bytes)
        except BaseException:
            self.remove()
            raise

    def _check_size(self, max_bytes: int) -> None:
        made = self._plain.stat().st_size
        if made > max_bytes:
            raise TraceTooLargeError(
                f"its trace has {size_text(made)}, more than the {size_text(max_bytes)} that are kept: ask "
                "for fewer steps, or without stacks"
            )

    def pack(self) -> None:
        """Compress the trace. This takes long and releases the GIL. Raises OSError."""
        packed = self.folder / TRACE_NAME
        file = os.open(packed, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with (
            self._plain.open("rb") as plain,
            os.fdopen(file, "wb") as out,
            gzip.GzipFile("", "wb", _LEVEL, out, mtime=0) as zipped,
        ):
            while chunk := plain.read(_CHUNK):
                if self._removed:
                    return
                zipped.write(chunk)
        self._plain.unlink()
        self.size = packed.stat().st_size

    def remove(self) -> None:
        """Remove the trace with its folder. A relay that has the file open can still read it."""
        self._removed = True
        shutil.rmtree(self.folder, ignore_errors=True)


SETTLE_S = 0.05
"""Longest time that the training thread waits for its own marks, once a step during a capture, in s."""
SPAN = "profiler"
"""Name of the span in which the training thread turns the profiler on and off."""
_REASON_CHARS = 300

_AT_MOST = 8
"""If marks cannot be read at the end of a capture: number of steps beyond it that are counted as slowed."""
_PROFILE, _TRACE = "profile", "trace"
"""Causes of slower steps, see `SlowedSteps`: torch's profiler is on, or a trace is being written."""

_NICE = 10
"""Niceness of the thread that compresses a trace."""

State = CaptureState | Literal["recorded", "packing"]
"""
`recorded`: the trace is not written yet. `packing`: the trace is being compressed. Both are reported as
`recording`.
"""


class StepCapture:
    """
    One capture. `on_step` runs on the training thread, everything else on the agent's thread.

    The profiler is turned off only by the thread that turned it on. Other threads set `_given_up`; that
    thread checks it after `start`, which may take long, and at each step.
    """

    def __init__(
        self,
        wanted: wire.ProfileCommand,
        recorder: Recorder,
        spans: Spans,
        errors: Errors,
        profiler: Callable[[Callable[[], object]], TorchProfiler],
        began: float,
    ) -> None:
        self.wanted, self.began = wanted, began
        self._phase: State = "armed"
        """State of the capture. First the recording thread changes it, afterwards the agent's thread."""
        self._ended: tuple[Literal["refused", "failed"], str] | None = None
        """Why the capture failed. Any thread may set it; only the first reason is kept."""
        self._recorder, self._spans, self._errors = recorder, spans, errors
        self._profiler = profiler(self._give_way)
        self._slowed = recorder.steps.rows.slowed
        self._wall_ns = time.time_ns() - recorder.clock()
        """Difference between the wall clock and the clock of marks, in ns."""
        self._steps: list[tuple[int, int, int, int | None]] = []
        self._edge: tuple[int, int] = (0, 0)
        """(step being recorded, time at which it began)."""
        self._cost: dict[str, int] = {}
        self._file: TraceFile | None = None
        self._packing: threading.Thread | None = None
        """Thread that compresses the trace."""
        self._thread = 0
        """Id of the thread that has turned the profiler on, or is about to."""
        self._given_up = False
        """Whether the thread that turned the profiler on must turn it off."""
        self._on_since = 0.0
        """Time at which the agent's thread first saw that the profiler is on."""
        self.serves = not recorder.steps.rows.step and isinstance(self._profiler, AllThreadsProfiler)
        """Whether this process takes no steps itself, but works for others over torch.distributed.rpc."""
        self.others_are_done = False

    def arm(self) -> None:
        if self._profiler.cannot:
            self.end("refused", self._profiler.cannot)
        elif not self.serves:
            self._recorder.add_step_hook(self.on_step)

    @property
    def state(self) -> State:
        """State of the capture."""
        return self._phase if self._ended is None else self._ended[0]

    def end(self, state: Literal["refused", "failed"], reason: str) -> None:
        """
        End the capture without a result. Any thread may call it. If the profiler is on, it is turned off at
        the next step.
        """
        self._ended = self._ended or (state, reason[:_REASON_CHARS])
        self._given_up = True
        if not self._thread:
            self._disarm()

    @property
    def is_on(self) -> bool:
        """Return whether a thread has the profiler on, or is turning it on or off."""
        return bool(self._thread)

    def watch(self, now: float) -> None:
        """
        End the capture if its steps take much longer than expected, for example because of an evaluation: a
        long recording takes memory. The training thread then turns the profiler off at its next wait for
        data, or after its step.
        """
        self._on_since = self._on_since or now
        if now - self._on_since > self.wanted.record_s:
            limit = duration(self.wanted.record_s)
            self.end("failed", f"its steps took longer than {limit}, and a recording uses memory")
            self._recorder.new_iterator()

    def _disarm(self) -> None:
        self._recorder.remove_step_hook(self.on_step)

    # -- the training thread -------------------------------------------------------------------------

    def on_step(self) -> None:
        """Turn the profiler on where the requested steps begin, and off where they end. Raises nothing."""
        if self._thread not in (0, get_ident()):
            return
        try:
            if self._given_up:
                self._turn_off()
            elif self._phase == "armed":
                self._may_start()
            elif self._phase == "recording":
                self._note_step()
        except Exception as error:
            self._fail(error)

    def _may_start(self) -> None:
        position = self._recorder.step_begins(SETTLE_S)
        if position is None or position[0] < self.wanted.first_step:
            return
        step, began, _ = position
        if step > self.wanted.first_step:
            self.end("refused", f"step {self.wanted.first_step} {LATE}")
            return
        self._start(step, began)

    def _start(self, step: int, began: int) -> None:
        span, self._thread = self._spans.begin(SPAN), get_ident()
        self._slowed.begin(_PROFILE, step, step + self.wanted.steps + _AT_MOST)
        try:
            self._profiler.start()
        except BaseException:
            self._thread = 0
            self._slowed.end(_PROFILE, step)
            raise
        finally:
            now = self._recorder.clock()
            if span is not None:
                self._spans.end(span)
        self._cost["start_ns"] = now - began
        self._edge = step, now
        self._phase = "recording"
        if self._given_up:  # it was set while the profiler was being turned on
            self._turn_off()

    def _note_step(self) -> None:
        position = self._recorder.step_now(SETTLE_S)
        if position is None or position[0] <= self._edge[0]:
            return
        step, now, exit_ns = position
        last, began = self._edge
        wall = self._wall_ns
        ended = exit_ns + wall if began < exit_ns <= now else None
        self._steps.append((last, began + wall, now + wall, ended))
        self._edge = step, now
        if step >= self.wanted.first_step + self.wanted.steps:
            self._stop()

    def _stop(self) -> None:
        began, span = self._recorder.clock(), self._spans.begin(SPAN)
        try:
            there = self._profiler.stop()
        finally:
            if span is not None:
                self._spans.end(span)
        self._thread = 0
        self._cost["stop_ns"] = self._recorder.clock() - began
        self._disarm()
        self._end_slowed()
        if there:
            self._phase = "recorded"

    def _turn_off(self) -> None:
        """Turn the profiler off, whatever the state of the capture. Runs on the thread that turned it on."""
        if self._thread not in (0, get_ident()):
            return
        if self._thread:
            try:
                self._profiler.stop()
                self._profiler.drop()
            except Exception as error:
                self._errors.note("profile", error)
            self._thread = 0
            self._end_slowed()
        self._disarm()

    def _end_slowed(self) -> None:
        """Record that the open step, in which the profiler was turned off, is the last one that it slowed."""
        position = self._recorder.step_now(SETTLE_S)
        if position is not None:
            self._slowed.end(_PROFILE, position[0])

    def _fail(self, error: Exception) -> None:
        """End the capture because of an error. Runs on the recording thread."""
        if isinstance(error, ProfilerBusyError):
            self.end("refused", f"{error}: the script's own")
        elif isinstance(error, CannotRecordError):
            self.end("refused", str(error))
        else:
            self._errors.note("profile", error)
            self.end("failed" if self._thread else "refused", error_text(error))
        self._turn_off()

    def _give_way(self) -> None:
        """End the capture because the script starts its own profiler. Runs on the thread that starts it."""
        self.end("failed", "the script has started a profiler of its own")

    # -- the agent's thread --------------------------------------------------------------------------

    def serve(self, now: float) -> None:
        """Record without steps, until the other ranks have recorded theirs."""
        try:
            if self._phase == "armed":
                self._on_since = now
                self._start(0, self._recorder.clock())
            elif self._phase == "recording" and (
                self.others_are_done or now - self._on_since > self.wanted.serve_s
            ):
                ended, wall = self._recorder.clock(), self._wall_ns
                self._steps.append((0, self._edge[1] + wall, ended + wall, None))
                self._stop()
        except Exception as error:
            self._fail(error)

    @property
    def is_complete(self) -> bool:
        """Return whether the recording is complete and can be written."""
        return self._profiler.is_complete()

    def export(self, place: str | None, process_id: str) -> None:
        """Write the recording to a file, see `TraceFile`. A separate thread compresses it."""
        began = self._recorder.clock()
        self._slowed.begin(_TRACE, self._open_step())
        try:
            self._file = TraceFile(self._profiler.save, place, process_id)
            self._packing = threading.Thread(target=self._pack, args=(self._file,), name="traceml-trace")
            self._packing.daemon = True
            self._packing.start()
            self._phase = "packing"
        except (TraceTooLargeError, ProfilerBusyError) as error:
            self.end("failed", str(error))
        except Exception as error:
            self._errors.note("profile", error)
            self._end_unwritten(error)
        finally:
            if self._phase != "packing":
                self._slowed.end(_TRACE, self._open_step())
        self._cost["export_ns"] = self._recorder.clock() - began

    def _pack(self, file: TraceFile) -> None:
        """Compress the trace in a separate thread, so that the agent's thread goes on sending rows."""
        try:
            with contextlib.suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            file.pack()
        except Exception as error:
            self._errors.note("profile", error)
            self._end_unwritten(error)

    def finish_export(self) -> None:
        """Continue once the trace is compressed, or compressing it has failed."""
        if self._phase == "packing" and self._packing is not None and not self._packing.is_alive():
            self._slowed.end(_TRACE, self._open_step())
            self._phase = "sending"

    def _end_unwritten(self, error: Exception) -> None:
        self.end("failed", f"its trace could not be written: {error_text(error)}")

    def _open_step(self) -> int:
        self._recorder.replay(LOCK_S)
        return self._recorder.steps.rows.step

    def status(self) -> wire.Capture:
        """Return the state that each batch reports."""
        total, state = None if self._file is None else self._file.size, self.state
        return wire.Capture(
            self.wanted.id,
            self.wanted.number,
            "recording" if state == "recorded" or state == "packing" else state,
            "" if self._ended is None else self._ended[1],
            total,
            list(self._steps),
            self._cost.get("start_ns"),
            self._cost.get("stop_ns"),
            self._cost.get("export_ns"),
            self.serves,
            "" if self._file is None or total is None else sendable(str(self._file.folder)),
        )

    def let_go(self) -> None:
        """
        End the capture without a result. If only the training thread may turn the profiler off, it does so
        once the profiler is on, or at its next step. This also works when the process is no longer watched
        (`patch.optimizer`).
        """
        self._given_up = True
        stops = self._profiler.any_thread_stops and self._phase != "armed"
        if stops or not self._thread:
            self._disarm()
            self._profiler.drop()
            if stops:
                self._slowed.end(_PROFILE, self._open_step())
        elif self._thread == get_ident():
            self._turn_off()
        if self._phase == "packing":
            self._slowed.end(_TRACE, self._open_step())
        if self._file is not None:
            self._file.remove()
            self._file = None

    def forked(self) -> None:
        """In a forked child of this process: stop recording and release everything."""
        self._given_up, self._thread = True, 0
        self._profiler.forked()


KEPT_S = 30.0
"""Time after which a trace that nobody requests any more is removed, in s."""


class CaptureAgent:
    """
    Manages the captures of one process, one at a time.

    Args:
        recorder: recorder of the training thread's marks.
        spans: records the cost of the profiler as a span.
        errors: counts errors.
        place: where the folder of a trace is made, see `TraceFile`.
        process_id: returns the id of this rank process.
        clock: monotonic seconds.
        calls: names calls over torch.distributed.rpc. None: only the training thread is recorded.
    """

    def __init__(
        self,
        recorder: Recorder,
        spans: Spans,
        errors: Errors,
        place: str | None,
        process_id: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
        calls: rpc.RpcCalls | None = None,
    ) -> None:
        self._recorder, self._spans, self._errors = recorder, spans, errors
        self._place, self._process_id, self._clock, self._calls = place, process_id, clock, calls
        self._now: StepCapture | None = None
        self._heard = 0.0

    # -- the agent's thread --------------------------------------------------------------------------

    def handle_command(self, command: wire.Command) -> None:
        """Handle a command for this rank. The same command may arrive repeatedly."""
        wanted = msgspec.convert(command.args, ready(wire.ProfileCommand))
        self._heard = self._clock()
        now = self._now
        if now is not None and now.wanted.id == wanted.id and now.wanted.number >= wanted.number:
            now.others_are_done = bool(wanted.over)
            return
        if now is not None:
            now.let_go()
        self._recorder.replay(LOCK_S)  # this finds out whether the process has taken a step
        self._now = StepCapture(
            wanted, self._recorder, self._spans, self._errors, self._profiler(wanted), self._clock()
        )
        self._now.arm()

    def _profiler(self, wanted: wire.ProfileCommand) -> Callable[[Callable[[], object]], TorchProfiler]:
        """
        Return the constructor of the profiler. Its argument is called when the script starts its own
        profiler.
        """
        options = bool(wanted.memory), bool(wanted.stacks), bool(wanted.shapes)
        if self._calls is None or not rpc.is_on() or not torch_profiler.is_possible():
            return functools.partial(TorchProfiler, *options)
        return functools.partial(AllThreadsProfiler, *options, calls=self._calls)

    def tick(self) -> None:
        """Write a finished trace, end a capture that takes too long, and release what is no longer needed."""
        now = self._now
        if now is None:
            return
        now.finish_export()
        if now.state == "recorded":
            if now.is_complete:
                now.export(self._place, self._process_id())
        elif now.serves and now.state in ("armed", "recording"):
            now.serve(self._clock())
        elif now.state == "armed" and not now.is_on and self._clock() - now.began > now.wanted.limit_s:
            now.end("refused", f"step {now.wanted.first_step} did not come within {now.wanted.limit_s:g} s")
        elif now.state == "recording":
            now.watch(self._clock())
        elif now.state in ("sending", "refused", "failed") and self._clock() - self._heard > KEPT_S:
            now.let_go()
            self._now = None

    @property
    def status(self) -> wire.Capture | None:
        """State of the current capture. None if there is none."""
        return None if self._now is None else self._now.status()

    def abandon(self) -> None:
        """End the capture because this process is no longer watched. Any thread may call it, once."""
        now, self._now = self._now, None
        if now is not None:
            now.let_go()

    def forked(self) -> None:
        """In a forked child of this process, which is not watched: stop recording."""
        now, self._now = self._now, None
        if now is not None:
            now.forked()
