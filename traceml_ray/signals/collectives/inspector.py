"""
Follows the files of NCCL Inspector, NVIDIA's profiler plugin of NCCL, which writes a line of JSON for each
collective on a GPU.

A relay finds the file of a rank among the files that the process has open, and reads it as it grows. This
costs the training process nothing. The plugin writes while the job runs if
`NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS` is set.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from traceml_ray.errors import sendable
from traceml_ray.monitor.rank_files import PollThread
from traceml_ray.signals.collectives.records import CallTimes
from traceml_ray.signals.collectives.sums import CallSums, Kindred
from traceml_ray.wire.codec import ready

_NAME = re.compile(r"-pid\d+\.log\Z")
"""End of the name of a file: HOST-pidPID.log."""
_INTERVAL_S = 2.0
_SEARCH_S, _SEARCHES = 5.0, (1, 2, 4, 8, 12, 24, 60)
"""Time after which a process is searched for its file, in s, and by what it is multiplied each time."""
_PIECE_BYTES, _POLL_BYTES, _BACKLOG_BYTES = 1 << 20, 4 << 20, 64 << 20
"""
Largest number of bytes read at a time; read of a file in one poll; and left unread in a file. Beyond that,
the oldest are skipped, and counted.
"""
_LINE_BYTES = 1 << 18
"""Largest length of a line in bytes. Lines with a trace of events are long."""
_DRAIN_SAMPLES = 4096
"""Largest number of samples handed over at a time, except for a single process."""
_OPS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "AllGatherV": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "All2All": "all_to_all",
    "AlltoAll": "all_to_all",
    "Send": "send",
    "Recv": "recv",
}
_OF_EACH_RANK = ("AllGather", "AllGatherV", "ReduceScatter")
"""Collectives whose size is written as that of each rank's part."""
_SIZE_UNKNOWN = ("All2All", "AlltoAll")
_LAUNCH = "collective_cpu"
"""Source of times that end when the kernel is launched."""


class _Header(msgspec.Struct):
    id: str
    n_ranks: int
    comm_name: str = ""


class _Collective(msgspec.Struct):
    coll: str
    coll_sn: int
    coll_msg_size_bytes: int
    coll_exec_time_us: int
    coll_timing_source: str = ""


class _Exchange(msgspec.Struct):
    p2p: str
    p2p_sn: int
    p2p_msg_size_bytes: int
    p2p_exec_time_us: int
    p2p_timing_source: str = ""


class _Line(msgspec.Struct):
    header: _Header
    coll_perf: _Collective | None = None
    p2p_perf: _Exchange | None = None


_decoder = msgspec.json.Decoder(ready(_Line))


def add_line(sums: CallSums, line: bytes) -> None:
    """Add the call that a line describes. Raises `msgspec.MsgspecError` or ValueError for another line."""
    known = _decoder.decode(line)
    header, call = known.header, known.coll_perf
    if call is not None:
        op, number, size, took_us = call.coll, call.coll_sn, call.coll_msg_size_bytes, call.coll_exec_time_us
        source = call.coll_timing_source
    elif (pair := known.p2p_perf) is not None:
        op, number, size, took_us = pair.p2p, pair.p2p_sn, pair.p2p_msg_size_bytes, pair.p2p_exec_time_us
        source = pair.p2p_timing_source
    else:
        raise ValueError("a line without a call")
    size = 0 if op in _SIZE_UNKNOWN else size * header.n_ranks if op in _OF_EACH_RANK else size
    if not (0 < header.n_ranks <= 1 << 24 and 0 <= number < 1 << 48):
        raise ValueError("a number out of range")
    if not (0 <= size < 1 << 56 and 0 <= took_us < 1 << 48):
        raise ValueError("a size or time out of range")
    name = "" if header.comm_name == "unknown" else header.comm_name
    kindred = Kindred(_OPS.get(op) or sendable(op), sendable(header.id), sendable(name), header.n_ranks)
    timed = source != _LAUNCH and took_us > 0
    sums.add(kindred, number, 1_000 * took_us if timed else None, size)


@dataclass(eq=False)
class _File:
    """An open file of a process."""

    fd: int
    offset: int = 0
    rest: bytes = b""
    """Begin of a line whose end is not written yet."""
    sums: CallSums = field(default_factory=lambda: CallSums("inspector"))
    genuine: bool = False
    """Whether a line of it was read as one of NCCL Inspector."""
    refused: int = 0

    def read(self, errors: Counter[str], last: bool = False) -> None:
        """Read new lines, at most `_POLL_BYTES`; all of them if it is the `last` time. Raises OSError."""
        size = os.fstat(self.fd).st_size
        if size < self.offset:  # it was emptied
            self.offset, self.rest = 0, b""
        if size - self.offset > _BACKLOG_BYTES:
            skipped = size - self.offset - _POLL_BYTES
            self.offset, self.rest = self.offset + skipped - 1, b""
            self._read_piece(_LINE_BYTES)
            cut, _, self.rest = self.rest.partition(b"\n")
            errors["collectives: bytes of NCCL Inspector skipped"] += skipped + len(cut)
        for _ in range((_BACKLOG_BYTES if last else _POLL_BYTES) // _PIECE_BYTES):
            if not self._read_piece(_PIECE_BYTES):
                break
            self._add_lines(errors)

    def _read_piece(self, most: int) -> bool:
        data = os.pread(self.fd, most, self.offset)
        self.offset += len(data)
        self.rest += data
        return bool(data)

    def _add_lines(self, errors: Counter[str]) -> None:
        *lines, self.rest = self.rest.split(b"\n")
        if len(self.rest) > _LINE_BYTES:
            self.rest = b""
            lines.append(b"too long")
        for line in lines:
            if not line.strip():
                continue
            try:
                add_line(self.sums, line)
                self.genuine = True
            except (msgspec.MsgspecError, ValueError, RecursionError):
                errors["collectives: lines of NCCL Inspector that cannot be read"] += 1
        if self.sums.refused > self.refused:
            errors["collectives not summed: too many kinds"] += self.sums.refused - self.refused
            self.refused = self.sums.refused


@dataclass(eq=False)
class _Process:
    pid: int
    search_at: float
    searches: int = 0
    file: _File | None = None
    ended: bool = False


class InspectorFiles:
    """
    Reads the files of NCCL Inspector of the ranks of one node. After `start`, a separate thread calls `poll`,
    so a file system that hangs delays nothing else. Any thread may call the other methods.

    Args:
        clock: monotonic seconds.
        interval: seconds between two polls.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, interval: float = _INTERVAL_S) -> None:
        self.errors: Counter[str] = Counter()
        self._clock = clock
        self._processes: dict[str, _Process] = {}
        self._records: dict[str, dict[int, CallTimes]] = {}
        """Records that were not drained yet: rank process → number → record."""
        self._lock = threading.Lock()
        """Held while processes and records are changed, but never while a file is read."""
        self._polling = PollThread(
            "traceml-inspector", self.poll, self._drop_all, self.errors, "NCCL Inspector", interval
        )
        self._started = self._final = False

    def start(self) -> None:
        """Read from now on."""
        self._started = True

    def follow(self, process_id: str, pid: int) -> None:
        """Look for the file of a rank process from now on."""
        with self._lock:
            self._processes.setdefault(process_id, _Process(pid, self._clock() + _SEARCH_S))
            if self._started:
                self._polling.start()

    def ended(self, process_id: str) -> None:
        """Read the file of a rank process once more because the process has ended."""
        with self._lock:
            process = self._processes.get(process_id)
            if process is not None:
                process.ended = True
        if process is not None and process.file is not None:
            self._polling.poll_soon()

    def poll_soon(self) -> None:
        """Do nothing: the next regular poll is soon enough."""

    def read_once_more(self, timeout_s: float) -> None:
        """Read all files once more now. Wait at most `timeout_s` seconds for the read."""
        self._final = True
        self._polling.poll_once_more(timeout_s)

    def close(self) -> None:
        """Stop reading."""
        self._polling.close()

    @property
    def waiting(self) -> bool:
        """Whether there are records that have not been drained yet."""
        return bool(self._records)

    def drain(self) -> dict[str, Sequence[CallTimes]]:
        """Return new records by rank process. If there are many, the rest is returned by the next call."""
        drained: dict[str, Sequence[CallTimes]] = {}
        left = _DRAIN_SAMPLES
        with self._lock:
            for name in [*self._records]:
                records = [*self._records[name].values()]
                left -= sum(len(record.samples) for record in records)
                if left < 0 and drained:
                    break
                drained[name] = records
                del self._records[name]
        return drained

    def poll(self) -> None:
        """Search for files that are due, and read new lines from those that are open."""
        now, final = self._clock(), self._final
        with self._lock:
            processes = [*self._processes.items()]
        for name, process in processes:
            over = process.ended
            try:
                if process.file is None and (now >= process.search_at or over or final):
                    self._search(process, now)
                if process.file is not None:
                    self._read(name, process.file, now, over or final)
            except OSError as error:
                self.errors[f"file of NCCL Inspector: {type(error).__name__}"] += 1
            if over:
                self._forget(name, process)

    def _search(self, process: _Process, now: float) -> None:
        """Open the file of a process, if it has one open."""
        times = _SEARCHES[min(process.searches, len(_SEARCHES) - 1)]
        process.searches += 1
        process.search_at = now + _SEARCH_S * times
        try:
            links = [*Path(f"/proc/{process.pid}/fd").iterdir()]
        except OSError:  # it has ended, or is not ours to read
            return
        for link in links:
            with contextlib.suppress(OSError):  # it has been closed
                if _NAME.search(str(link.readlink())) and stat.S_ISREG(link.stat().st_mode):
                    process.file = _File(os.open(link, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
                    return

    def _read(self, name: str, file: _File, now: float, final: bool) -> None:
        errors: Counter[str] = Counter()
        file.read(errors, final)
        if file.genuine:  # else it is another program's file of such a name
            self.errors.update(errors)
        if records := file.sums.due(now, final):
            with self._lock:
                self._records.setdefault(name, {}).update({one.number: one for one in records})

    def _forget(self, name: str, process: _Process) -> None:
        with self._lock:
            self._processes.pop(name, None)
        if process.file is not None:
            os.close(process.file.fd)

    def _drop_all(self) -> None:
        for name, process in [*self._processes.items()]:
            self._forget(name, process)
