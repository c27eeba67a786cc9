"""Reduces a run as its rows are read: to its step history and, if asked for, its verdicts over time."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import numpy as np

from traceml_ray.analysis.baseline import Baseline
from traceml_ray.analysis.history import Replay
from traceml_ray.analysis.row_table import RankMeta
from traceml_ray.analysis.step_history import StepHistory, before_step
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import Int64, RankRows
from traceml_ray.stages import SEGMENT_BITS


class Reduction:
    """
    Reduces the rows of a run, in pieces of any size, in bounded memory.

    If there is a `replay`, its verdicts use the steps that all ranks of `processes` (the process of each)
    have.
    """

    def __init__(
        self, history: StepHistory, replay: Replay | None = None, processes: Mapping[int, int] | None = None
    ) -> None:
        self.history = history
        self.replay = replay
        self.processes = dict(sorted((processes or {}).items()))
        self.rows = 0
        """Number of rows received so far."""
        self.last_step: int | None = None
        """Last step that all ranks will have rows of. None if that is not known."""
        self._first_step: int | None = None
        self._judged_to = -1

    def add(self, pieces: Sequence[RankRows], holding: Container[int], waited: int, expected: int) -> None:
        """Add rows, and reduce the steps that are complete, see `StepHistory.advance`."""
        self.rows += sum(len(rank_rows.keys) for rank_rows in pieces)
        for part in _parts(pieces, self.history.table.size // 2):
            self.history.add_rows(part)
            if self.history.advance(holding, waited, expected):
                self._judge(before_step(self.history.done), expected)

    def finish(self, expected: int) -> None:
        """Reduce all remaining steps, even if some ranks are behind."""
        self.history.advance((), 0, expected)
        self._judge(self.history.done, expected)

    def _judge(self, to: int, expected: int) -> None:
        if self.replay is None or to <= self._judged_to:
            return
        window = self.history.between(self._judged_to, to, [*self.processes], expected)
        self._judged_to = to
        if len(window.keys):
            self._first_step = window.first_step if self._first_step is None else self._first_step
            if self.last_step is not None:
                self.replay.expect(self.last_step - (self._first_step or 0) + 1)
            self.replay.add(window)


def begun(ranks: Sequence[RankRows], limits: Thresholds, baseline: Baseline | None) -> Reduction:
    """
    Return a reduction for a report. Its verdicts use the steps that all of `ranks` have; rows of any process
    of a rank count.
    """
    history = StepHistory(limits, deep=True)
    history.register_ranks(
        {
            process.rank: RankMeta(process.node, process.group, process.strategy, process.role)
            for process in ranks
        }
    )
    return Reduction(history, Replay(None, limits, baseline), processes_of(ranks))


def processes_of(rows: Iterable[RankRows]) -> dict[int, int]:
    """Return the process id of each rank."""
    return {rank_rows.rank: rank_rows.process_id for rank_rows in rows}


def last_common_step(newest: Sequence[RankRows]) -> int:
    """Return the last step that all ranks have, given the newest rows of each."""
    return min((int(rank_rows.keys.max()) for rank_rows in newest), default=0) >> SEGMENT_BITS


def _parts(pieces: Sequence[RankRows], most: int) -> Iterator[list[RankRows]]:
    """Yield the rows in order of their keys, with at most `most` different keys at a time."""
    keys = np.sort(
        np.concatenate([_NO_KEYS, *(rank_rows.keys for rank_rows in pieces)]), kind="stable"
    )  # of sorted runs
    keys = keys[np.diff(keys, prepend=-1) > 0]
    if len(keys) <= most:
        yield [*pieces]
        return
    edges = [*keys[most - 1 : -1 : most].tolist(), int(keys[-1])]
    left = [*pieces]
    for edge in edges:
        yield [
            rank_rows.select(rank_rows.keys <= edge) for rank_rows in left if (rank_rows.keys <= edge).any()
        ]
        left = [rank_rows.select(rank_rows.keys > edge) for rank_rows in left]


_NO_KEYS: Int64 = np.empty(0, np.int64)
