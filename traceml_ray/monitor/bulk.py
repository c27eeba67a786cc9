"""
How a relay sends traces: from the file of a rank on the same host to the aggregator, separately from rows.

A thread does all of this; it exists only while there is a trace to send. At most one call is unanswered, and
the aggregator says when the next call may follow. So rows are not delayed, and only the part being sent is
held in memory. The aggregator says how much it has, and the relay continues from there: either side may be
restarted.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from traceml_ray.errors import Errors, sendable
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.messages import FOLDER_PREFIX, PART_BYTES, TRACE_NAME, TracePart, TraceReply

RETRY_S = 0.5
"""Time to wait after a call that failed, or could not be made, in s."""
WAIT_S = 0.25
"""Time to wait for a reply before checking whether the relay has ended, in s."""


class BulkTransport(Protocol):
    """Calls to the aggregator of one kind, made by one thread; see `aggregator_link.Transport`."""

    def send_part(self, data: bytes) -> bool:
        """
        Send a `TracePart`; the reply is a `TraceReply`. Returns False if it cannot be sent now. Does not
        wait.
        """

    def part_replies(self, timeout_s: float) -> list[bytes | Exception]:
        """
        Return the replies that have arrived. If there are none, wait at most `timeout_s` seconds
        for one.
        """


class TraceUnreadableError(OSError):
    """The file of a rank does not match what the rank announced."""


def open_trace(folder: str, total_bytes: int) -> int:
    """
    Open the trace that a rank has left in `folder`; return the file descriptor.

    The folder must be private to this user, who also runs the rank. The trace must be a regular file of
    `total_bytes` bytes in that folder. No link is followed, and opening never blocks on another kind of file.
    Raises OSError.
    """
    inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        about = os.fstat(inside)
        if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
            raise TraceUnreadableError(f"{folder} is not private to this user")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(TRACE_NAME, flags, dir_fd=inside)
    finally:
        os.close(inside)
    about = os.fstat(file)
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid():
        os.close(file)
        raise TraceUnreadableError(f"{folder}/{TRACE_NAME} is not a regular file of this user")
    if about.st_size != total_bytes:
        os.close(file)
        raise TraceUnreadableError(f"{folder}/{TRACE_NAME} has {about.st_size} bytes, not {total_bytes}")
    return file


@dataclass(eq=False)
class _Trace:
    """The trace of one rank process, and how much of it has been sent."""

    process_id: str
    profile: str
    number: int
    folder: str
    total_bytes: int
    offset: int | None = None
    """Number of bytes that the aggregator has. None: the aggregator has not been asked yet."""
    file: int | None = None
    failure: str = ""
    due: float = 0.0
    """Time at which the next call may be made, in monotonic seconds."""
    over: bool = False
    """Whether no more of the trace is wanted."""

    def is_of(self, capture: wire.Capture) -> bool:
        return (self.profile, self.number) == (capture.id, capture.number)

    def next_part(self) -> TracePart:
        """Return the next part to send. If it is not known how much the aggregator has, return a question."""
        data = b""
        if self.offset is not None and not self.failure:
            try:
                data = self._read(self.offset)
            except OSError as error:
                self.failure = sendable(str(error.strerror or error))[:300]
        return TracePart(
            codec.VERSION,
            self.process_id,
            self.profile,
            self.number,
            self.total_bytes,
            self.offset or 0,
            data,
            self.failure,
        )

    def _read(self, offset: int) -> bytes:
        if self.file is None:
            self.file = open_trace(self.folder, self.total_bytes)
        data = os.pread(self.file, min(PART_BYTES, self.total_bytes - offset), offset)
        if not data and offset < self.total_bytes:
            raise TraceUnreadableError(f"{self.folder}/{TRACE_NAME} has become shorter")
        return data

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None


class TraceSender:
    """
    Sends traces; one per relay. `offer`, `process_ended` and `close` return at once, even if a disk hangs.

    Args:
        transport: calls the aggregator.
        spool: folder in which ranks make the folders of their traces. Folders left by ended ranks are
            removed.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        transport: BulkTransport,
        spool: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.errors = Errors()
        """Number of calls that failed, by kind."""
        self._transport, self._spool, self._clock = transport, spool, clock
        self._changed = threading.Condition()  # held for moments only, never while a file or a call waits
        self._traces: dict[str, _Trace] = {}
        """Traces by rank process, in the order in which they are sent next."""
        self._calling: _Trace | None = None
        """The trace whose part is being sent."""
        self._ended: set[str] = set()
        """Rank processes that have ended and may have left a trace."""
        self._running = self._closed = False

    def offer(self, process_id: str, capture: wire.Capture) -> None:
        """Send the trace of a rank process if it has a new one. Called with each batch."""
        if capture.state != "sending" or not capture.folder or capture.total_bytes is None:
            return
        with self._changed:
            known = self._traces.get(process_id)
            if self._closed or (known is not None and known.is_of(capture)):
                return
            if known is not None:
                known.over = True
                self._traces[f"{process_id} {known.number}"] = known  # its file is closed by the thread
            self._traces[process_id] = _Trace(
                process_id, capture.id, capture.number, capture.folder, capture.total_bytes
            )
            self._wake()

    def process_ended(self, process_id: str) -> None:
        """Note that a rank process has ended: its trace is removed once it is sent."""
        with self._changed:
            if process_id in self._traces or self._spool is not None:
                self._ended.add(process_id)
                self._wake()

    def close(self) -> None:
        """Stop sending."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wake(self) -> None:
        if not self._running and not self._closed:
            self._running = True
            threading.Thread(target=self._run, name="traceml-bulk", daemon=True).start()
        self._changed.notify_all()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                wait_s = self.tick()
            except Exception as error:
                self.errors.note("bulk", error)
                wait_s = RETRY_S
            with self._changed:
                if self._closed or wait_s is None:
                    self._running = False
                    for trace in self._traces.values() if self._closed else ():
                        trace.close()
                    return
                if wait_s:
                    self._changed.wait(wait_s)

    def tick(self) -> float | None:
        """
        Process the reply that has arrived, or make the next call.

        Returns the time to wait before the next tick, in s. None: there is nothing to send.
        """
        if self._calling is not None:
            for reply in self._transport.part_replies(WAIT_S):
                self._take(reply)
            return 0.0
        with self._changed:
            over = {name: trace for name, trace in self._traces.items() if trace.over}
            waiting = [trace for trace in self._traces.values() if not trace.over]
            gone = self._ended - {trace.process_id for trace in waiting}
            self._ended -= gone
            for name, trace in over.items():
                if trace.process_id in gone or name != trace.process_id:
                    del self._traces[name]
        for trace in over.values():
            trace.close()
        for process_id in gone:
            self._remove(process_id, [trace for trace in over.values() if trace.process_id == process_id])
        if not waiting:
            return None
        now = self._clock()
        first = min(waiting, key=lambda trace: trace.due)
        if first.due > now:
            return first.due - now
        self._send(first, now)
        return 0.0 if self._calling is not None else RETRY_S

    def _remove(self, process_id: str, traces: list[_Trace]) -> None:
        """Remove the trace folders that a rank process made and could not remove itself."""
        folders = {Path(trace.folder) for trace in traces}
        if self._spool is not None:
            folders.update(self._spool.glob(f"{FOLDER_PREFIX}{process_id}-*"))
        for folder in folders:
            if folder.name.startswith(FOLDER_PREFIX):
                shutil.rmtree(folder, ignore_errors=True)

    def _send(self, trace: _Trace, now: float) -> None:
        part = trace.next_part()
        if self._transport.send_part(codec.encode(part)):
            self._calling = trace
        else:
            trace.due = now + RETRY_S
            for reply in self._transport.part_replies(0.0):  # why it could not be made
                self._take(reply)

    def _take(self, reply: bytes | Exception) -> None:
        trace, self._calling = self._calling, None
        try:
            if isinstance(reply, Exception):
                raise reply
            answer = codec.decode(reply, TraceReply)
        except Exception as error:
            self.errors.note("bulk call", error)
            if trace is not None:
                trace.due, trace.offset = self._clock() + RETRY_S, None
            return
        if trace is not None:
            trace.over = answer.offset is None
            trace.offset = None if answer.offset is None else min(answer.offset, trace.total_bytes)
            # All traces share one rate and are sent in turn: the one that has waited longest is next.
            trace.due = self._clock() + answer.pause_s
