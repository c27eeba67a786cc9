"""The step history of a run, built from its session file a slice at a time; a file that grows is followed."""

from __future__ import annotations

import numpy as np

from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.streams import Stream, awaited, world_size

SLICE_ROWS = 1 << 18
"""Rows that are read at a time: about a quarter of a second."""
_FEW_CHUNKS, _MANY_CHUNKS = 1 << 7, 1 << 14
_ROWS = 1 << 15
"""Rows that are asked for at once."""


class HistoryReader:
    """
    `history` is of the run that `session` reads; it begins anew where a rank is another process.

    Negative, `since` is how many chunks before the newest it begins.
    """

    def __init__(self, session: SessionFile, limits: Thresholds, since: int = 0) -> None:
        self.session = session
        self._since = since
        self.ranks: dict[int, Stream] = {}
        """The streams that stand for the ranks."""
        self.whole = False
        """All that is stored has been read."""
        self._limits = limits
        self._patience_ns = int(limits.report_timeout_s * 1e9)
        self._begin()

    def _begin(self) -> None:
        self.history = StepHistory(self._limits)
        self._processes: dict[int, int] = {}
        self._cursor = self._since
        self._chunks = _FEW_CHUNKS
        self.whole = False

    @property
    def world(self) -> int:
        """How many ranks the job has, as far as they have said so."""
        return world_size(self.ranks, None)

    def read(self, most: int = SLICE_ROWS) -> None:
        """Read on, about `most` rows. Raises `SessionFileError`."""
        self.ranks = self.session.ranks()
        processes = {rank: stream.id for rank, stream in self.ranks.items()}
        if any(processes.get(rank) != stream for rank, stream in self._processes.items()):
            self._begin()
        self._processes = processes
        read = 0
        while read < most:
            found, cursor = self.session.rows(since=self._cursor, most=self._chunks)
            count = sum(len(own.keys) for own in found)
            self.whole = self._cursor >= 0 and cursor < self._cursor + self._chunks
            self._cursor, read = cursor, read + count
            self.history.take(found)
            known = self.history.reported()
            holding, waited = awaited(self.ranks, self.world, self._patience_ns, known)
            self.history.advance(holding if self.whole else known, waited, self.world)
            if self.whole:
                return
            self._chunks = int(np.clip(self._chunks * _ROWS // max(1, count), _FEW_CHUNKS, _MANY_CHUNKS))
