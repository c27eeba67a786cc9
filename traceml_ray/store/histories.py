"""The step histories of stored runs that are asked for, each read from the session file once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.store.history_reader import HistoryReader
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.session_file import SessionFile

_MAX_READERS = 3
"""Runs that are read from the file at the same time."""


class RunSteps(Protocol):
    """The history of a run, and the processes that it is of."""

    history: StepHistory
    ranks: dict[int, RankProcess]
    whole: bool
    """All that is stored has been read."""

    @property
    def world(self) -> int:
        """How many ranks the job has."""


class StoredHistories:
    """
    May be used by several threads.

    Args:
        open_file: opens the session file once more, for one run.
        limits: of the session.
    """

    def __init__(self, open_file: Callable[[str | None], SessionFile], limits: Thresholds) -> None:
        self._open = open_file
        self._limits = limits
        self._lock = threading.Lock()
        self._readers: OrderedDict[str | None, HistoryReader] = OrderedDict()

    @contextmanager
    def of(self, run: str | None, read_on: bool) -> Iterator[RunSteps]:
        """Give the history of a run; `read_on`: with a slice more of the file. Raises `SessionFileError`."""
        with self._lock:
            reader = self._readers.get(run)
            if reader is None:
                reader, read_on = HistoryReader(self._open(run), self._limits), True
                self._readers[run] = reader
                while len(self._readers) > _MAX_READERS:
                    self._readers.popitem(last=False)[1].session.close()
            self._readers.move_to_end(run)
            if read_on:
                reader.read()
            yield reader

    def close(self) -> None:
        """Close what is open."""
        with self._lock:
            while self._readers:
                self._readers.popitem()[1].session.close()
