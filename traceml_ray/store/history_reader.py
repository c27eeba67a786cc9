"""
The step history of a run, built from its session file a slice at a time; a file that grows is followed.

The step histories of stored runs that are asked for, each read from the session file once.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from traceml_ray import text
from traceml_ray.analysis.row_table import RankMeta
from traceml_ray.analysis.step_history import Reduction, StepHistory
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import RankRows
from traceml_ray.store.nodes import process_labels
from traceml_ray.store.packing import unpack
from traceml_ray.store.rank_processes import RankProcess, pending_ranks, training, world_size
from traceml_ray.store.session_file import SessionFile

SLICE_ROWS = 1 << 18
"""Rows that are read at a time: about a quarter of a second."""
_FEW_CHUNKS, _MANY_CHUNKS = 1 << 7, 1 << 18


class HistoryReader:
    """
    `history` is of the run that `session` reads; it begins anew where a rank is another process.

    Args:
        session: is read.
        limits: of the session.
        since: negative, how many chunks before the newest it begins.
        run: takes the rows; None: one without verdicts, which begins with what is kept of folded rows.
    """

    def __init__(
        self,
        session: SessionFile,
        limits: Thresholds,
        since: int = 0,
        run: Reduction | None = None,
    ) -> None:
        self.session = session
        self.ranks: dict[int, RankProcess] = {}
        """The rank processes that stand for the ranks."""
        self.whole = False
        """All that is stored has been read."""
        self._limits = limits
        self._patience_ns = int(limits.report_timeout_s * 1e9)
        self._run = run or Reduction(StepHistory(limits))
        self.history = self._run.history
        self._reporting = run is not None
        self._processes: dict[int, int] | None = None if run is None else {}
        self._since = self._cursor = since
        self._chunks = _FEW_CHUNKS

    @property
    def world(self) -> int:
        """How many ranks the job has, as far as they have said so."""
        return world_size(self.ranks, None)

    @property
    def _training(self) -> int:
        return training(self.ranks, self.world)

    def read(self, most: int = SLICE_ROWS) -> None:
        """Read on, about `most` rows. Raises `SessionFileError`."""
        self.ranks = self.session.ranks()
        processes = {rank: process.id for rank, process in self.ranks.items()}
        before = self._processes
        if before is None or any(processes.get(rank) != process for rank, process in before.items()):
            self._begin()
        self._processes = processes
        self._know_ranks()
        read = 0
        while read < most:
            chunk, cursor = self.session.rows(since=self._cursor, most=self._chunks)
            count = sum(len(rank_rows.keys) for rank_rows in chunk)
            self.whole = self._cursor >= 0 and cursor < self._cursor + self._chunks
            self._cursor, read = cursor, read + count
            self._add(chunk)
            if self.whole:
                return
            self._chunks = int(np.clip(self._chunks * most // max(1, count), _FEW_CHUNKS, _MANY_CHUNKS))

    def read_all(self, most: int) -> None:
        """Read all that is stored, about `most` rows at a time. Raises `SessionFileError`."""
        while not self.whole:
            self.read(most)
            stored = sum(process.stored for process in self.ranks.values())
            text.advance("reading the steps", min(1.0, self._run.rows / max(1, stored)))
        self._run.finish(self._training)

    def _know_ranks(self) -> None:
        """Give a line to each rank, as a live run does; not for a report, which is of ranks with rows."""
        if self._reporting or self.ranks.keys() <= self.history.who.keys():
            return
        labels = process_labels(self.session.cluster(), self.session.processes())
        self.history.register_ranks(
            {
                rank: RankMeta(labels[process.id], process.group, process.strategy, process.role)
                for rank, process in self.ranks.items()
                if rank not in self.history.who
            }
        )

    def _begin(self) -> None:
        self._run = (self._kept() if self._since == 0 else None) or Reduction(StepHistory(self._limits))
        self.history = self._run.history
        self._cursor, self._chunks = self._since, _FEW_CHUNKS
        self.whole = False

    def _kept(self) -> Reduction | None:
        """Return what folded rows come to, None where that is not known."""
        run, body = None, self.session.kept()
        if body is None:
            return None
        with contextlib.suppress(ValueError):  # of another version: then there are the rows that are left
            run = unpack(body, self.session.rows(last=1)[0])
        if run is not None:
            run.replay = None
        return run

    def _add(self, chunk: Sequence[RankRows]) -> None:
        known = self.history.reported() | {rank_rows.rank for rank_rows in chunk}
        holding, waited = pending_ranks(self.ranks, self._training, self._patience_ns, known)
        if not self.whole:  # of a rank that has been read to its end nothing is waited for
            ends, none = self.history.ends(), (-1, -1)
            last = {rank: process.last_key or 0 for rank, process in self.ranks.items()}
            holding = {rank for rank, key in last.items() if ends.get(rank, none)[1] < key}
        self._run.add(chunk, holding, waited, self._training)


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
