"""
A profile of a few steps on this rank: armed by the agent's thread, recorded by the one that trains.

That thread asks one attribute a step (`Recorder.step_hook`), which is None while nothing is wanted. Whatever
goes wrong ends the capture, with a reason, and nothing else.

The trace of a rank as a compressed file, which the relay reads (`wire.messages`).

The captures of one process: what commands ask for, and what each batch says of it, by the agent's thread.
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
"""Largest size of a trace as torch writes it, in bytes. A step of a large model has tens of MB."""
_CHUNK = 1 << 20
_LEVEL = 5


class TraceTooLargeError(ValueError):
    """The trace is too large to be kept."""


class TraceFile:
    """
    A file in a folder of its own, for this user alone. Raises OSError, `TraceTooLargeError`, and what `write`
    does.

    Args:
        write: writes the trace to a path.
        place: where to make the folder; None: where temporary files are.
        process_id: of this rank process, which will be in the folder's name.
        max_bytes: how large the trace may be, in bytes, before it is compressed.
    """

    def __init__(
        self,
        write: Callable[[Path], object],
        place: str | None,
        process_id: str,
        max_bytes: int = MAX_TRACE_BYTES,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp("", f"{FOLDER_PREFIX}{process_id}-", place)).absolute()
        """Folder of the trace, an absolute path."""
        self.size: int | None = None
        """Size of the compressed trace, in bytes; None: it is not there yet."""
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
        """Compress the trace. It takes long and releases the GIL. Raises OSError."""
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
"""Longest wait of the training thread for its own marks, once a step while there is a capture."""
SPAN = "profiler"
"""The span of what turning the profiler on and off takes, on the training thread."""
_REASON_CHARS = 300

_AT_MOST = 8
"""Steps beyond those of a capture that are taken for slowed where the marks cannot be read at its end."""
_PROFILE, _TRACE = "profile", "trace"
"""What makes steps longer, see `SlowedSteps`: torch's profiler is on; a trace is written."""

_NICE = 10
"""Lower priority of the thread that compresses a trace."""

State = CaptureState | Literal["recorded", "packing"]
"""
recorded: the trace must still be written. packing: it is being compressed. Both are reported as
recording.
"""


class StepCapture:
    """
    One capture; `on_step` runs on the training thread, the rest on the agent's.

    Only the thread that turns the profiler on turns it off: others say that it is to (`_given_up`), and it
    looks after `start`, which may take long, and at each step.
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
        """How far it is; changed by the thread that records, and after that by the agent's."""
        self._ended: tuple[Literal["refused", "failed"], str] | None = None
        """Why the capture failed. Any thread may set it; the first reason counts."""
        self._recorder, self._spans, self._errors = recorder, spans, errors
        self._profiler = profiler(self._give_way)
        self._slowed = recorder.steps.rows.slowed
        self._wall_ns = time.time_ns() - recorder.clock()
        """Difference between the wall clock and the clock of marks, in ns."""
        self._steps: list[tuple[int, int, int, int | None]] = []
        self._edge: tuple[int, int] = (0, 0)
        """The step being recorded, and the time at which it began."""
        self._cost: dict[str, int] = {}
        self._file: TraceFile | None = None
        self._packing: threading.Thread | None = None
        """Compresses the trace."""
        self._thread = 0
        """Id of the thread that has turned the profiler on, or is about to."""
        self._given_up = False
        """Whether the profiler is to be turned off, whichever thread has turned it on."""
        self._on_since = 0.0
        """Time at which the agent's thread first saw the profiler on."""
        self.serves = not recorder.steps.rows.step and isinstance(self._profiler, AllThreadsProfiler)
        """Whether the process does no steps of its own: others have it work, over torch.distributed.rpc."""
        self.others_are_done = False

    def arm(self) -> None:
        if self._profiler.cannot:
            self.end("refused", self._profiler.cannot)
        elif not self.serves:
            self._recorder.add_step_hook(self.on_step)

    @property
    def state(self) -> State:
        """How far it is."""
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
        """Whether a thread has the profiler on, or is turning it on or off."""
        return bool(self._thread)

    def watch(self, now: float) -> None:
        """
        End it where its steps take much longer than they should, as with an evaluation among them: what is
        recorded takes memory. The thread that trains does so at its next wait for data, or after its step.
        """
        self._on_since = self._on_since or now
        if now - self._on_since > self.wanted.record_s:
            limit = duration(self.wanted.record_s)
            self.end("failed", f"its steps took longer than {limit}, and what is recorded takes memory")
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
        if self._given_up:  # while it was turned on
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
        """Turn the profiler off, whatever has become of the capture; on the thread that has turned it on."""
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
        """Note that the open step, in which the profiler was turned off, is the last that it slowed."""
        position = self._recorder.step_now(SETTLE_S)
        if position is not None:
            self._slowed.end(_PROFILE, position[0])

    def _fail(self, error: Exception) -> None:
        """End the capture because of an error, on the recording thread."""
        if isinstance(error, ProfilerBusyError):
            self.end("refused", f"{error}: the script's own")
        elif isinstance(error, CannotRecordError):
            self.end("refused", str(error))
        else:
            self._errors.note("profile", error)
            self.end("failed" if self._thread else "refused", error_text(error))
        self._turn_off()

    def _give_way(self) -> None:
        """The script starts its own profiler; called by the thread that does."""
        self.end("failed", "the script has started a profiler of its own")

    # -- the agent's thread --------------------------------------------------------------------------

    def serve(self, now: float) -> None:
        """Record without steps: until the others have recorded theirs."""
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
        """Whether the recording is complete and may be written."""
        return self._profiler.is_complete()

    def export(self, place: str | None, process_id: str) -> None:
        """Make the file of what was recorded, see `TraceFile`; a thread of its own compresses it."""
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
        """In the thread for it: while a large trace is compressed the agent goes on to send rows."""
        try:
            with contextlib.suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            file.pack()
        except Exception as error:
            self._errors.note("profile", error)
            self._end_unwritten(error)

    def finish_export(self) -> None:
        """Go on once the trace is compressed, or that has failed."""
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
        End it with nothing. A profiler that only the thread that trains may turn off, it turns off once it is
        on, or at its next step, also when this process is no longer watched (`patch.optimizer`).
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
        """In a child of this process: stop recording, and release everything."""
        self._given_up, self._thread = True, 0
        self._profiler.forked()


KEPT_S = 30.0
"""Time after which a trace that is no longer asked for is removed, in s."""


class CaptureAgent:
    """
    The captures of one process, one at a time.

    Args:
        recorder: of the training thread's marks.
        spans: shows what the profiler costs as a span.
        errors: counts what goes wrong.
        place: where the folder of a trace is made, see `TraceFile`.
        process_id: returns that of this rank process.
        clock: monotonic seconds.
        calls: names calls over torch.distributed.rpc; None: no thread but the one that trains is recorded.
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
        """Handle a command that is meant for this rank. Commands are repeated."""
        wanted = msgspec.convert(command.args, ready(wire.ProfileCommand))
        self._heard = self._clock()
        now = self._now
        if now is not None and now.wanted.id == wanted.id and now.wanted.number >= wanted.number:
            now.others_are_done = bool(wanted.over)
            return
        if now is not None:
            now.let_go()
        self._recorder.replay(LOCK_S)  # whether it has done a step
        self._now = StepCapture(
            wanted, self._recorder, self._spans, self._errors, self._profiler(wanted), self._clock()
        )
        self._now.arm()

    def _profiler(self, wanted: wire.ProfileCommand) -> Callable[[Callable[[], object]], TorchProfiler]:
        """Return what makes the profiler, of a function that is called when the script starts its own."""
        options = bool(wanted.memory), bool(wanted.stacks), bool(wanted.shapes)
        if self._calls is None or not rpc.is_on() or not torch_profiler.is_possible():
            return functools.partial(TorchProfiler, *options)
        return functools.partial(AllThreadsProfiler, *options, calls=self._calls)

    def tick(self) -> None:
        """Write a finished trace, give up what takes too long, and release what is over."""
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
        """State of the present capture. None if there is none."""
        return None if self._now is None else self._now.status()

    def abandon(self) -> None:
        """End the capture because this process is no longer watched. Any thread may call it, once."""
        now, self._now = self._now, None
        if now is not None:
            now.let_go()

    def forked(self) -> None:
        """In a child of this process, which is not watched: nothing is recorded."""
        now, self._now = self._now, None
        if now is not None:
            now.forked()
