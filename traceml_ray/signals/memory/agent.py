"""
Sends the memory samples of a rank: one per round, and from time to time the sources of their values.

With TRACEML_MEMORY_HISTORY=1 torch records where device memory is allocated. It then takes the Python stack
of each allocation, on the allocating thread. When a device runs out of memory, the record is written to a
file for PyTorch's memory viewer (pytorch.org/memory_viz).
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

from traceml_ray.errors import Errors, error_text, sendable
from traceml_ray.signals.collector import Collector, Rank
from traceml_ray.signals.memory.records import SNAPSHOT, SNAPSHOT_NAME, SNAPSHOTS, MemorySample
from traceml_ray.signals.memory.samplers import MemorySampler
from traceml_ray.wire.codec import Part, Value
from traceml_ray.wire.messages import Event

MAX_ENTRIES = 20_000
"""
Largest number of entries of torch's record that are kept, the newest. Each takes several KB of
the file.
"""
MAX_FILES = 3
"""Largest number of files per process."""
PAUSE_S = 60.0
"""Shortest time between two files, in s: a script may catch the error and try again in every step."""
_MISSING = "memory history"


class MemoryHistory(Collector):
    """
    The memory history of one process. Any thread may call `write`; only the agent calls the rest.

    Args:
        wanted: whether the user has requested it.
        spool: where this node's agents leave rows. Its entry `SNAPSHOTS` links to the session if that is on
            this node.
        add_event: sends an event.
        errors: counts errors.
        missing: receives the reason why there is no record.
        torch: returns the module. None while it is not imported.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        wanted: bool,
        spool: str | None,
        add_event: Callable[[Event], object],
        errors: Errors,
        missing: MutableMapping[str, str],
        torch: Callable[[], Any] = lambda: sys.modules.get("torch"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wanted = wanted
        self._spool = spool
        self._add_event, self._errors, self._missing = add_event, errors, missing
        self._torch, self._clock = torch, clock
        self._ours = False
        """Whether we have turned the record on."""
        self._files = 0
        self._next = 0.0
        self._writing = threading.Lock()

    @classmethod
    def of_rank(cls, rank: Rank) -> MemoryHistory:
        """Make the history of a rank."""
        return cls(rank.settings.memory_history, rank.spool, rank.add_event, rank.errors, rank.missing)

    def collect(self, final: bool) -> list[Part]:
        """Turn the record on once torch has initialized CUDA. Returns no records."""
        torch = self._torch() if self._wanted else None
        if torch is not None and torch.cuda.is_initialized():
            self._turn_on(torch)
        return []

    def _turn_on(self, torch: Any) -> None:
        self._wanted = False
        try:
            attach = torch._C._cuda_attach_out_of_memory_observer
            is_on = getattr(torch._C, "_cuda_isHistoryEnabled", lambda: False)
            if not is_on():  # otherwise the script has turned it on with its own options
                torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES, stacks="python")
                self._ours = True
            attach(lambda *_: self.write())
            self._next = self._clock()
        except Exception as error:
            self._missing[_MISSING] = error_text(error)[:200]

    def abandon(self, forked: bool) -> None:
        """Turn the record off if we turned it on."""
        self._files, self._wanted = MAX_FILES, False
        if self._ours and not forked:  # a child must not touch the device
            self._ours = False
            torch = self._torch()
            torch.cuda.memory._record_memory_history(enabled=None)

    def write(self) -> None:
        """Write the record to a file, on the thread whose allocation failed. Never raises."""
        if not self._next or not self._writing.acquire(blocking=False):
            return
        try:
            if self._files < MAX_FILES and self._clock() >= self._next:
                self._files += 1
                self._write()
                self._next = self._clock() + PAUSE_S
        except Exception as error:
            self._errors.note("memory snapshot", error)
        finally:
            self._writing.release()

    def _write(self) -> None:
        path = (
            self._folder()
            / f"{SNAPSHOT_NAME}{os.environ.get('RANK', 'x')}-{os.getpid()}-{self._files}.pickle"
        )
        self._torch().cuda.memory._dump_snapshot(str(path))
        size, text = path.stat().st_size, sendable(str(path))
        about: dict[str, Value] = {"path": text, "bytes": size, "host": socket.gethostname()}
        self._add_event(Event(SNAPSHOT, time.time_ns(), message=f"torch's allocator: {text}", data=about))

    def _folder(self) -> Path:
        """
        Return a folder below the session's folder, from which the file gets into the bundle; otherwise a
        folder that is not deleted.
        """
        if self._spool is not None and (place := Path(self._spool, SNAPSHOTS)).is_dir():
            return place.resolve()
        here = Path.cwd()
        return here if os.access(here, os.W_OK) else Path(tempfile.gettempdir())


_SOURCES_EVERY = 30
"""The sources of values are sent once in this many rounds, unless they change."""


class MemoryCollector(Collector):
    """
    Collects the memory samples of one process.

    Args:
        rank: provides the current step, and receives the sources of values and the reasons for missing
            values.
        sampler: takes the samples.
    """

    def __init__(self, rank: Rank, sampler: MemorySampler | None = None) -> None:
        self._rank, self._sampler = rank, sampler or MemorySampler()
        self._rounds = 0
        self._reasons: dict[str, str] = {}

    def collect(self, final: bool) -> list[MemorySample]:
        """Return a sample of each device in use, or one sample of a process without devices."""
        sampler, before = self._sampler, dict(self._sampler.sources)
        samples = sampler.sample(time.time_ns(), self._rank.recorder.open_stage().step)
        if sampler.sources != before or self._rounds % _SOURCES_EVERY == 0:
            self._rank.memory_from = dict(sampler.sources)
        self._rounds += 1
        for name in self._reasons.keys() - sampler.missing.keys():  # these values could be read again
            self._rank.missing.pop(name, None)
        self._reasons = sampler.missing
        self._rank.missing.update(sampler.missing)
        return samples
