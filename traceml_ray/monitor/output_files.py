"""
Reads the ends of the files to which ranks write stdout and stderr: Ray's log of a worker, torchrun's log with
`--redirects`, Slurm's log of a task.

This costs the training process nothing, and shows output that the agent cannot see: what C code writes, and
the last words of a crashed process. Only a file that belongs to one rank is read. If its parent or another
rank has the same file, all of them write into it. A terminal or a pipe cannot be read without taking data
from its reader. In those cases the agent records what Python writes (`signals.output.tap`).
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from traceml_ray.monitor.rank_files import PollThread
from traceml_ray.signals.output.last_lines import LastLines
from traceml_ray.signals.output.records import Output

_READ_BYTES = 1 << 16
"""Largest number of bytes read from the end of a file at a time."""
_MOST_BYTES = 1 << 14
"""Approximate number of bytes handed over at a time."""
_STREAMS = 1, 2
_OF_RAY = re.compile(r"^:(?:job_id|actor_name|task_name):.*\n", re.MULTILINE)
"""A line with which Ray marks, in a worker's log, the job or actor that the worker serves."""
_Key = tuple[int, int]
"""Identity of a file: device and inode."""


@dataclass(eq=False)
class _File:
    """One stream of a process, open for reading."""

    key: _Key
    fd: int
    offset: int
    lines: LastLines
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def read(self) -> str:
        """Return the new output. If there is much, return only its end."""
        size = os.fstat(self.fd).st_size
        if size < self.offset:  # it was emptied
            self.offset = 0
        if size - self.offset > _READ_BYTES:
            self.offset = size - _READ_BYTES
            self.lines.lose()
            self.decoder.reset()
        data = os.pread(self.fd, _READ_BYTES, self.offset)
        self.offset += len(data)
        return _OF_RAY.sub("", self.decoder.decode(data))


@dataclass(eq=False)
class _Process:
    pid: int
    files: dict[int, _File] = field(default_factory=dict)
    """Open files, by stream."""
    ended: bool = False


class OutputFiles:
    """
    Reads the output files of the ranks of one node. After `start`, a separate thread calls `poll`, so a file
    system that hangs delays nothing else. Any thread may call the other methods.

    Args:
        most: number of lines kept per stream; 0: nothing is read.
        wall: the node's clock, ns since the epoch.
        interval: seconds between two polls.
    """

    def __init__(self, most: int, wall: Callable[[], int] = time.time_ns, interval: float = 1.0) -> None:
        self.errors: Counter[str] = Counter()
        self._most, self._wall = most, wall
        self._processes: dict[str, _Process] = {}
        self._lock = threading.Lock()
        """Lock held while lines are changed, but never while a file is read."""
        self._polling = PollThread(
            "traceml-output", self.poll, self._drop_all, self.errors, "output", interval
        )

    def start(self) -> None:
        """Read from now on."""
        if self._most:
            self._polling.start()

    def follow(self, process_id: str, pid: int) -> None:
        """
        Read the output of a rank process from now on. The first read is soon: the process may end before a
        poll.
        """
        if self._most:
            with self._lock:
                self._processes.setdefault(process_id, _Process(pid))
            self.poll_soon()

    def ended(self, process_id: str) -> None:
        """Read the output of a rank process once more because the process has ended."""
        with self._lock:
            if (process := self._processes.get(process_id)) is not None:
                process.ended = True
        self.poll_soon()

    def poll_soon(self) -> None:
        """Read soon, before the next regular poll. Does not wait."""
        self._polling.poll_soon()

    def read_once_more(self, timeout_s: float) -> None:
        """Read all files once more now. Wait at most `timeout_s` seconds for the read."""
        self._polling.poll_once_more(timeout_s)

    def close(self) -> None:
        """Stop reading."""
        self._polling.close()

    @property
    def waiting(self) -> bool:
        """Whether there is output that has not been drained yet."""
        with self._lock:
            files = [file for process in self._processes.values() for file in process.files.values()]
            return any(file.lines.waiting for file in files)

    def drain(self) -> dict[str, list[Output]]:
        """Return new output by rank process. If there is much, the rest is returned by the next call."""
        new_output: dict[str, list[Output]] = {}
        size, t_ns = 0, self._wall()
        with self._lock:
            for name, process in [*self._processes.items()]:
                if size > _MOST_BYTES:
                    break
                self._processes[name] = self._processes.pop(name)  # the others are next
                outputs = [file.lines.drain(t_ns) for file in process.files.values()]
                if new := [output for output in outputs if output is not None]:
                    new_output[name] = new
                    size += sum(len(line) for output in new for line in (*output.lines, output.unfinished))
        return new_output

    def poll(self) -> None:
        """Read new output from all files."""
        with self._lock:
            processes = [*self._processes.items()]
        self._open(processes)
        for name, process in processes:
            over = process.ended
            for file in [*process.files.values()]:
                try:
                    new = file.read()
                except OSError as error:
                    self.errors[f"output file: {type(error).__name__}"] += 1
                    continue
                with self._lock:
                    file.lines.feed(new)
            if over:
                self._forget(name, process)

    def _open(self, processes: list[tuple[str, _Process]]) -> None:
        """Open files of streams that have changed; close files that several processes write into."""
        used: dict[_Key, set[int]] = {}
        files_of_name = {
            name: dict(_regular(process.pid)) for name, process in processes if not process.ended
        }
        for name, process in processes:
            keys = {*files_of_name.get(name, {}).values(), *(file.key for file in process.files.values())}
            for key in keys:
                used.setdefault(key, set()).add(process.pid)
        for name, process in processes:
            others = {key for key, pids in used.items() if pids != {process.pid}}
            to_open: dict[int, _Key] = {}
            for number, key in files_of_name.get(name, {}).items():
                if key not in to_open.values():
                    to_open[number] = key
            if to_open:
                others.update(_of_parent(process.pid))
            for number, file in [*process.files.items()]:
                if file.key in others:
                    self._drop(process, number)
            for number, key in to_open.items():
                before = process.files.get(number)
                if key not in others and (before is None or before.key != key):
                    self._drop(process, number)
                    with contextlib.suppress(OSError):  # it has just ended, or is not ours to read
                        opened = self._opened(process.pid, number)
                        with self._lock:
                            process.files[number] = opened

    def _opened(self, pid: int, number: int) -> _File:
        """Open the file of a stream. Everything in it is read, except what was there before the process."""
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(fd)
        old = status.st_mtime < _began(pid)
        lines = LastLines(number, self._most, by_relay=True)
        return _File((status.st_dev, status.st_ino), fd, status.st_size if old else 0, lines)

    def _drop(self, process: _Process, number: int) -> None:
        with self._lock:
            file = process.files.pop(number, None)
        if file is not None:
            os.close(file.fd)

    def _drop_all(self) -> None:
        for process in [*self._processes.values()]:
            for number in [*process.files]:
                self._drop(process, number)

    def _forget(self, name: str, process: _Process) -> None:
        """Forget a process that has ended, once all output read from it has been drained."""
        with self._lock:
            left = any(file.lines.waiting for file in process.files.values())
            if not left:
                del self._processes[name]
        for number in [] if left else [*process.files]:
            self._drop(process, number)


def _regular(pid: int) -> Iterator[tuple[int, _Key]]:
    """Yield each stream of a process that goes to a regular file, and the identity of the file."""
    for number in _STREAMS:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/fd/{number}").stat()
            if stat.S_ISREG(status.st_mode):
                yield number, (status.st_dev, status.st_ino)


def _of_parent(pid: int) -> list[_Key]:
    try:
        return [key for _, key in _regular(psutil.Process(pid).ppid())]
    except psutil.Error:
        return []


def _began(pid: int) -> float:
    """Return when a process began, in seconds since the epoch. 0: unknown."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return 0.0
