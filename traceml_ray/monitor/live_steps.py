"""
The step history of each live run, fed with the rows that arrive.

The lock of the step histories: the thread that feeds and judges them waits for one reader at most.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import numpy as np

from traceml_ray.analysis.row_table import RankMeta, from_wire
from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import Int64, RankRows, UInt8
from traceml_ray.errors import Errors
from traceml_ray.stages import N_STAGES, SEGMENT_BITS
from traceml_ray.store.history_reader import HistoryReader
from traceml_ray.store.rank_processes import RankProcess, pending_ranks, training, world_size
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import messages as wire


class StepsLock:
    """
    Held by one thread at a time. A feeder that waits gets it next, however many readers wait: the feeder's
    thread has to commit, while an answer may come later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reader = threading.Lock()
        """Lock held by the one reader that waits for `lock` or has it."""
        self._state = threading.Condition()
        self._feeders = 0
        """Number of feeders that wait for the lock or have it."""

    @contextmanager
    def feeding(self) -> Iterator[None]:
        """Hold the lock to change the histories, or in the thread that does."""
        with self._state:
            self._feeders += 1
        try:
            with self._lock:
                yield
        finally:
            with self._state:
                self._feeders -= 1
                self._state.notify_all()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the lock to read a history, in any other thread."""
        with self._reader:
            with self._state:
                self._state.wait_for(lambda: not self._feeders)
            with self._lock:
                yield


MAX_ARRIVED = 1 << 21
"""
Largest number of rows that wait for `feed` (120 MB; with device clocks 230 MB). More come only while its
thread is held up.
"""
MAX_UNKNOWN_ROWS = 4096
"""Newest rows kept of a process of unknown rank."""
_NEWEST, _SOME = 32, 64
"""Rows that say how long a step takes just now, and ranks: all take as long."""
OLDER_ROWS = 1 << 16
"""Rows read at a time of those that were stored before a restart."""
Rows = wire.Columns


@dataclass(eq=False)
class LiveSteps:
    """
    `append` and `drain` may be called by any thread with the writer's lock, all else by one thread.

    Args:
        limits: of the session.
        open_file: opens the session file once more, for one run.
        errors: where what goes wrong is counted.
    """

    limits: Thresholds
    open_file: Callable[[str], SessionFile]
    errors: Errors

    def __post_init__(self) -> None:
        self.lock = StepsLock()
        """Lock held while a history is changed, or read by another thread."""
        self._arrived: list[tuple[int, Rows]] = []
        self._rows = 0
        self._runs: dict[str, LiveRun] = {}
        self._owners: dict[int, tuple[LiveRun, int]] = {}
        """Run and rank that each rank process belongs to."""
        self._unknown: dict[int, list[Rows]] = {}

    def append(self, process: int, rows: Rows) -> None:
        """Add rows of a rank process."""
        self._arrived.append((process, rows))
        self._rows += len(rows[1])
        while self._rows > MAX_ARRIVED:
            half = self._arrived[: len(self._arrived) // 2 + 1]
            del self._arrived[: len(half)]
            dropped = sum(len(rows[1]) for _, rows in half)
            self._rows -= dropped
            self.errors.count("rows: stored, but not judged, no room", dropped)

    def drain(self) -> list[tuple[int, Rows]]:
        """Return the rows that have arrived since the last time."""
        arrived, self._arrived, self._rows = self._arrived, [], 0
        return arrived

    def feed(
        self,
        arrived: list[tuple[int, Rows]],
        runs: Mapping[str, dict[int, RankProcess]],
        labels: Mapping[int, str],
        unknown: Collection[int],
    ) -> None:
        """
        Put rows into the histories of the live runs.

        Args:
            arrived: what `drain` returned.
            runs: the rank process of each rank of each live run; of others nothing is kept.
            labels: of the rank processes' nodes.
            unknown: rank processes of unknown rank whose rows are kept until it is known.
        """
        with self.lock.feeding():
            for run in self._runs.keys() - runs.keys():
                self._disown(self._runs[run])
                self._runs.pop(run).close()
            for run, ranks in runs.items():
                self._follow(run, ranks, labels)
            alike: dict[tuple[LiveRun, bytes], list[tuple[int, Rows]]] = {}
            for process, rows in arrived:
                if process in self._owners:
                    owner, rank = self._owners[process]
                    alike.setdefault((owner, rows[0]), []).append((rank, rows))
                elif process in unknown:
                    _keep(self._unknown.setdefault(process, []), rows)
            for (owner, _), rows_of_ranks in alike.items():
                owner.put(rows_of_ranks)
            for process in self._unknown.keys() - unknown:
                del self._unknown[process]
            for run in runs:
                self._advance(self._runs[run])

    def get(self, run: str) -> LiveRun | None:
        """Return a live run; another thread reads its history with `lock.reading()`."""
        return self._runs.get(run)

    def rows_of(self, process: int, last: int) -> tuple[Int64, UInt8, Int64]:
        """Return the newest rows of a rank process: keys (n,), flags (n,), rows ns (n, 6)."""
        if process not in self._owners:
            return _NO_KEYS, np.empty(0, np.uint8), np.empty((0, N_STAGES), np.int64)
        owner, rank = self._owners[process]
        keys, flags, row = owner.history.table.line(rank, last)
        return keys, flags, row[:, :N_STAGES]

    def step_s(self, processes: Iterable[RankProcess]) -> float | None:
        """Return how long the newest steps of these took, of the shortest, s; None: there are none so far."""
        with self.lock.feeding():
            newest = [self.rows_of(process.id, _NEWEST) for process in islice(processes, _SOME)]
        took = [
            int(rows.sum()) / 1e9 / len(np.unique(keys >> SEGMENT_BITS))
            for keys, _, rows in newest
            if len(keys)
        ]
        return min(took, default=0.0) or None

    def resume(
        self, run: str, ranks: dict[int, RankProcess], labels: Mapping[int, str], rows: list[RankRows]
    ) -> None:
        """Begin with rows that had arrived before a restart, the newest; those before them follow."""
        self._follow(run, ranks, labels)
        self._runs[run].history.add_rows(rows)
        self._look_back(run)

    def close(self) -> None:
        """Close the session file."""
        with self.lock.feeding():
            for live_run in self._runs.values():
                live_run.close()

    def _look_back(self, run: str) -> None:
        """Start reading all stored rows of a run, one slice at a time."""
        live_run = self._runs[run]
        live_run.older, live_run.whole = HistoryReader(self.open_file(run), self.limits), False

    def _advance(self, live_run: LiveRun) -> None:
        try:
            live_run.advance()
        except Exception as error:  # of one run: it goes on with the rows that follow
            live_run.forget()
            self.errors.swallow("steps", error)
        try:
            live_run.read_older()
        except Exception as error:
            live_run.close()
            self.errors.note("older steps", error)

    def _follow(self, run: str, ranks: dict[int, RankProcess], labels: Mapping[int, str]) -> None:
        """
        Update which processes are the ranks of a run. If a rank has another process than
        before, begin anew.
        """
        before = self._runs.get(run)
        if before is not None and before.ranks is ranks:
            return
        processes = {rank: process.id for rank, process in ranks.items()}
        if before is not None and before.processes == processes:
            before.register_ranks(ranks, labels)
            return
        anew = before is None or any(
            processes.get(rank) != process for rank, process in before.processes.items()
        )
        live_run = self._runs[run] = LiveRun(self.limits) if before is None or anew else before
        live_run.processes = processes
        live_run.register_ranks(ranks, labels)
        if before is not None and live_run is not before:
            same = before.rows_of(processes)
            live_run.history.add_rows(same)
            if same:
                self._look_back(run)
            self._disown(before)
            before.close()
        for rank, process in processes.items():
            self._owners[process] = live_run, rank
            for rows in self._unknown.pop(process, ()):
                live_run.put([(rank, rows)])

    def _disown(self, live_run: LiveRun) -> None:
        for process in [process for process, (owner, _) in self._owners.items() if owner is live_run]:
            del self._owners[process]


class LiveRun:
    """The history of one run, and the processes it is of."""

    def __init__(self, limits: Thresholds) -> None:
        self.history = StepHistory(limits)
        self.whole = True
        """Whether all stored rows have been read."""
        self.older: HistoryReader | None = None
        """Reads the rows that were stored before this history began."""
        self.ranks: dict[int, RankProcess] = {}
        self.world = 0
        """Number of ranks of the job, as far as they have reported it."""
        self.training = 0
        """Number of the job's ranks that may take steps."""
        self.processes: dict[int, int] = {}
        """Rank process id by rank."""
        self._known: list[tuple[int, RankMeta]] = []
        self._patience_ns = int(limits.report_timeout_s * 1e9)

    def register_ranks(self, ranks: dict[int, RankProcess], labels: Mapping[int, str]) -> None:
        """Note node, group, strategy and role of the ranks."""
        self.ranks, self.world = ranks, world_size(ranks, None)
        self.training = training(ranks, self.world)
        who = {rank: RankMeta(labels[s.id], s.group, s.strategy, s.role) for rank, s in ranks.items()}
        known = [(process.id, who[rank]) for rank, process in ranks.items()]
        if known != self._known:
            self._known = known
            self.history.register_ranks(who)

    def rows_of(self, processes: dict[int, int]) -> list[RankRows]:
        """Return the newest rows of those ranks that are the same processes in `processes`."""
        same = [rank for rank, process in self.processes.items() if processes.get(rank) == process]
        lines = {rank: self.history.table.line(rank, 1 << 20) for rank in same}
        who = self.history.who
        return [
            RankRows(rank, who[rank].node, *line, who[rank].group, who[rank].strategy, role=who[rank].role)
            for rank, line in lines.items()
        ]

    def put(self, ranks_rows: list[tuple[int, Rows]]) -> None:
        """Add rows of ranks that have the same keys."""
        ranks_rows.sort(key=lambda rank_row: rank_row[0])
        keys = np.frombuffer(ranks_rows[0][1][0], "<i8")
        flags = np.frombuffer(b"".join(rows[1] for _, rows in ranks_rows), np.uint8).reshape(
            len(ranks_rows), -1
        )
        stages = from_wire([rows[2:] for _, rows in ranks_rows])
        stages = stages.reshape(len(ranks_rows), len(keys), -1)
        self.history.put([rank for rank, _ in ranks_rows], keys, flags, stages)

    def read_older(self) -> None:
        """Read on in older rows; once all are read, go on from there."""
        if self.older is None:
            return
        self.older.read(OLDER_ROWS)
        if self.older.whole:
            whole, who = self.older.history, self.history.who
            whole.register_ranks(who)
            whole.add_rows(self.rows_of(self.processes))
            self.history = whole
            self.close()

    def forget(self) -> None:
        """Begin the history anew."""
        who, self.history = self.history.who, StepHistory(self.history.limits)
        self.history.register_ranks(who)

    def close(self) -> None:
        """Read no more older rows."""
        older, self.older, self.whole = self.older, None, True
        if older is not None:
            older.session.close()

    def advance(self) -> None:
        """Reduce the steps that are complete."""
        pending = pending_ranks(self.ranks, self.training, self._patience_ns, self.history.reported())
        self.history.advance(pending.reporting, pending.missing_count, self.training)


def _keep(kept: list[Rows], rows: Rows) -> None:
    kept.append(rows)
    while sum(len(rows[1]) for rows in kept) > MAX_UNKNOWN_ROWS and len(kept) > 1:
        del kept[0]


_NO_KEYS: Int64 = np.empty(0, np.int64)
