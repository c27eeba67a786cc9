"""
The live runs of a session: which processes are their ranks, and which clock each process uses. Also their
step history, fed with arriving rows, and the newest samples and spans in memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from traceml_ray.analysis.anomalies import Excerpt, Samples
from traceml_ray.analysis.row_table import RankMeta, from_wire
from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.window import Int64, RankRows, UInt8
from traceml_ray.errors import Errors
from traceml_ray.signals.experts.records import RouterTokens
from traceml_ray.signals.live import LiveSignal
from traceml_ray.signals.nodes.records import NodeSample
from traceml_ray.signals.throughput.records import StepSizes
from traceml_ray.stages import N_STAGES, SEGMENT_BITS
from traceml_ray.store.history_reader import HistoryReader
from traceml_ray.store.rank_processes import (
    RankProcess,
    by_run,
    latest_generation_with_rows,
    latest_process_per_rank,
    pending_ranks,
    process_labels,
    run_names,
    training,
    world_size,
)
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.writer import SessionWriter
from traceml_ray.wire import messages as wire

_SPANS = 1 << 17
_SIZES = 1 << 15
_NODES = 4096


class Recent:
    """
    The newest spans, sizes, tokens and samples. Memory is bounded, however many rank processes and nodes
    exist.
    """

    def __init__(self) -> None:
        self._spans: dict[int, deque[wire.SpanSum]] = {}
        self._sizes: dict[int, deque[StepSizes]] = {}
        self._routers: dict[int, dict[int, RouterTokens]] = {}
        self._nodes: dict[str, Samples] = {}

    def add_spans(self, process: int, spans: Iterable[wire.SpanSum]) -> None:
        """Add spans. The newest 32 to 512 spans of a rank process are kept."""
        if process not in self._spans:
            self._spans[process] = deque(maxlen=min(512, max(32, _SPANS // (len(self._spans) + 1))))
        self._spans[process].extend(spans)

    def spans(self, process: int) -> list[wire.SpanSum]:
        """Return the newest spans of a rank process, oldest first."""
        return list(self._spans.get(process, ()))

    def add_sizes(self, process: int, sizes: StepSizes) -> None:
        """Add batch sizes. The newest 8 to 64 of a rank process are kept."""
        if process not in self._sizes:
            self._sizes[process] = deque(maxlen=min(64, max(8, _SIZES // (len(self._sizes) + 1))))
        self._sizes[process].append(sizes)

    def sizes(self, process: int) -> list[StepSizes]:
        """Return the newest batch sizes of a rank process, oldest first."""
        return list(self._sizes.get(process, ()))

    def add_tokens(self, process: int, tokens: RouterTokens) -> None:
        """Replace the tokens of one router of a rank process."""
        self._routers.setdefault(process, {})[tokens.number] = tokens

    def tokens(self, process: int) -> list[RouterTokens]:
        """Return the newest tokens of each router of a rank process."""
        return list(self._routers.get(process, {}).values())

    def add_sample(self, node: str, sample: NodeSample) -> None:
        """
        Add a sample of the node with id `node`, see `Samples`. Beyond 4,096 nodes, the first node is
        forgotten.
        """
        if node not in self._nodes:
            self._nodes[node] = Samples()
            if len(self._nodes) > _NODES:
                del self._nodes[next(iter(self._nodes))]
        self._nodes[node].add(sample)

    def machines(self, nodes: Sequence[str], first_ns: int, last_ns: int) -> dict[str, Excerpt]:
        """Return the samples of those of `nodes` that are known, see `analysis.anomalies.Between`."""
        known = {node: self._nodes[node] for node in nodes if node in self._nodes}
        return {node: samples.between(first_ns, last_ns) for node, samples in known.items()}

    def keep(self, processes: set[int]) -> None:
        """Forget all rank processes except `processes`."""
        known: tuple[dict[int, Any], ...] = (self._spans, self._sizes, self._routers)
        for of_process in known:
            for process in of_process.keys() - processes:
                del of_process[process]


MAX_LIVE = 16
"""Largest number of runs judged at the same time: the newest. Rows of other runs are not kept in memory."""
MAX_UNKNOWN = 256
"""Largest number of rank processes of unknown rank, the newest, whose rows are kept in memory."""


@dataclass(frozen=True)
class LiveRanks:
    """Which processes are the ranks of the live runs."""

    epoch: int = -1
    """
    Version of the writer's processes that this was made from, see `SessionWriter.epoch`. -1: make it again
    each time.
    """
    runs: dict[str, list[RankProcess]] = field(default_factory=dict)
    ranks: dict[str, dict[int, RankProcess]] = field(default_factory=dict)
    which: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Key of the generation that `ranks` belong to, by run; see `rank_processes.Generation`."""
    labels: dict[int, str] = field(default_factory=dict)
    """Display names of the rank processes' nodes."""
    unknown: list[int] = field(default_factory=list)
    """Rank processes of unknown rank, the newest."""


@dataclass(frozen=True)
class RunNow:
    """A live run, as profiling needs it."""

    run: str
    name: str
    ranks: Mapping[int, RankProcess]
    labels: Mapping[int, str]
    """Display names of the rank processes' nodes."""
    clocks: Mapping[str, tuple[int, int]]
    """Offset and bound of each node's clock, ns, by its id."""
    verdict: Verdict | None = None
    """Current verdict on the run."""
    step_s: float | None = None
    """Approximate length of a step, in s; None: not known."""

    @property
    def world(self) -> int:
        """Number of ranks of the run, as far as they have reported it."""
        return world_size(dict(self.ranks), None)


@dataclass(eq=False)
class LiveRuns:
    """
    Args:
        writer: writes the session file; its lock is held briefly.
        recent: keeps only what belongs to the ranks of these runs.
    """

    writer: SessionWriter
    recent: Recent

    def __post_init__(self) -> None:
        self.known = LiveRanks()
        """Result of the last `refresh`."""

    def processes(self) -> dict[str, list[RankProcess]]:
        """Return the rank processes of the runs to judge, by run. Called with the writer's lock."""
        facts = self.writer.meta.get("runs", {})
        runs = by_run(self.writer.processes.values())
        going = [run for run in runs if "ended_at" not in facts.get(run, {})]
        return {run: runs[run] for run in going[-MAX_LIVE:]}

    def refresh(self) -> LiveRanks:
        """Return which processes are the ranks of the live runs. Called with the writer's lock."""
        if self.known.epoch != self.writer.epoch:
            self.known = self._refresh()
        return self.known

    def _refresh(self) -> LiveRanks:
        writer = self.writer
        runs, processes = self.processes(), writer.processes.values()
        unknown = [process.id for process in processes if process.identity is None][-MAX_UNKNOWN:]
        latest = {run: latest_generation_with_rows(of_run) for run, of_run in runs.items()}
        ranks = {run: latest_process_per_rank(one.processes) for run, one in latest.items()}
        kept = {
            process.id for processes_of_run in ranks.values() for process in processes_of_run.values()
        }.union(unknown)
        self.recent.keep(kept)
        # If a rank has had several processes, time alone may decide which of them is current.
        epoch = writer.epoch if len(kept) == sum(map(len, runs.values())) + len(unknown) else -1
        which = {run: one.key for run, one in latest.items()}
        return LiveRanks(epoch, runs, ranks, which, process_labels(writer.nodes.values(), processes), unknown)

    def running(
        self,
        verdict: Callable[[str], Verdict | None],
        step_s: Callable[[Iterable[RankProcess]], float | None],
    ) -> list[RunNow]:
        """
        Return the runs that have ranks; the newest is last.

        Args:
            verdict: returns the current verdict on a run.
            step_s: returns how long the newest steps of rank processes took.
        """
        known, clocks = self.known, self.clocks()
        names = run_names([], self.writer.meta)
        running = []
        for run, ranks in known.ranks.items():
            now = verdict(run)
            took = now.mean_step_ms / 1e3 if now and now.mean_step_ms else step_s(ranks.values())
            if ranks:
                running.append(RunNow(run, names.get(run, run), ranks, known.labels, clocks, now, took))
        return running

    def clocks(self) -> dict[str, tuple[int, int]]:
        """Return offset and bound of each node's clock, in ns, by node id. Only has clocks that are known."""
        with self.writer.lock:
            return {
                name: (node.clock_offset_ns, node.clock_bound_ns)
                for name, node in self.writer.nodes.items()
                if node.clock_offset_ns is not None and node.clock_bound_ns is not None
            }


class StepsLock:
    """
    A lock for one thread at a time. A waiting feeder gets it next, however many readers wait: the feeder's
    thread has to commit, while an answer may come later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reader = threading.Lock()
        """Lock held by the one reader that waits for `lock` or holds it."""
        self._state = threading.Condition()
        self._feeders = 0
        """Number of feeders that wait for the lock or hold it."""

    @contextmanager
    def feeding(self) -> Iterator[None]:
        """Hold the lock to change the histories, or to read them in the thread that changes them."""
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
Largest number of rows that wait for `feed` (120 MB; with device clocks 230 MB). Rows only accumulate to this
number while the thread that calls `feed` is delayed.
"""
MAX_UNKNOWN_ROWS = 4096
"""Number of newest rows kept of a process of unknown rank."""
_NEWEST, _SOME = 32, 64
"""Numbers of rows and of ranks from which the present step time is estimated. All ranks take equally long."""
OLDER_ROWS = 1 << 16
"""Number of older rows read at a time, from those stored before a restart."""
Rows = wire.Columns


@dataclass(eq=False)
class LiveSteps:
    """
    The step histories of the live runs. Any thread may call `append` and `drain` with the writer's lock. All
    other methods are called by one thread.

    Args:
        limits: the session's limits.
        open_file: opens the session file once more, for one run.
        errors: counts what fails.
        signals: look at the histories after new steps, and before they end.
    """

    limits: Thresholds
    open_file: Callable[[str], SessionFile]
    errors: Errors
    signals: Sequence[LiveSignal] = ()

    def __post_init__(self) -> None:
        self.lock = StepsLock()
        """Lock held while a history is changed, or is read by another thread."""
        self._arrived: list[tuple[int, Rows]] = []
        self._rows = 0
        self._runs: dict[str, LiveRun] = {}
        self._owners: dict[int, tuple[LiveRun, int]] = {}
        """Run and rank of each rank process."""
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
        """Return the rows that have arrived since the last call."""
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
            runs: the rank process of each rank of each live run. Rows of other runs are not kept.
            labels: of the rank processes' nodes.
            unknown: rank processes whose rows are kept until their rank is known.
        """
        with self.lock.feeding():
            for run in self._runs.keys() - runs.keys():
                self._show_steps(run, ends=True)
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
                self._show_steps(run)

    def get(self, run: str) -> LiveRun | None:
        """Return a live run. Another thread must read its history inside `lock.reading()`."""
        return self._runs.get(run)

    def rows_of(self, process: int, last: int) -> tuple[Int64, UInt8, Int64]:
        """Return the newest `last` rows of a rank process: keys (n,), flags (n,), row times in ns (n, 6)."""
        if process not in self._owners:
            return _NO_KEYS, np.empty(0, np.uint8), np.empty((0, N_STAGES), np.int64)
        owner, rank = self._owners[process]
        keys, flags, row = owner.history.table.line(rank, last)
        return keys, flags, row[:, :N_STAGES]

    def step_s(self, processes: Iterable[RankProcess]) -> float | None:
        """
        Return the shortest time that the newest steps of `processes` took, in s. None: there are no steps
        yet.
        """
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
        """Begin with the newest rows that had arrived before a restart. The rows before them follow later."""
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
        except Exception as error:  # only this run is affected: it goes on with the rows that follow
            live_run.forget()
            self.errors.swallow("steps", error)
        try:
            live_run.read_older()
        except Exception as error:
            live_run.close()
            self.errors.note("older steps", error)

    def _show_steps(self, run: str, *, ends: bool = False) -> None:
        """Let the signals look at the steps of a run whose rows have all been read."""
        live_run = self._runs[run]
        last = next(iter(live_run.ranks.values()), None)
        if not live_run.whole or last is None:
            return
        for signal in self.signals:
            try:
                signal.add_steps(run, live_run.history, live_run.processes, last.last_seen_ns, ends)
            except Exception as error:
                self.errors.swallow(signal.name, error)

    def _follow(self, run: str, ranks: dict[int, RankProcess], labels: Mapping[int, str]) -> None:
        """
        Update which processes are the ranks of a run. If a rank has a different process than before, begin
        the history anew.
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
        if before is not None and anew:
            self._show_steps(run, ends=True)
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
    """The history of one run, and the processes that it describes."""

    def __init__(self, limits: Thresholds) -> None:
        self.history = StepHistory(limits)
        self.whole = True
        """Whether all stored rows have been read."""
        self.older: HistoryReader | None = None
        """Reads the rows that were stored before this history began. None: nothing is left to read."""
        self.ranks: dict[int, RankProcess] = {}
        self.world = 0
        """Number of ranks of the job, as far as the ranks have reported it."""
        self.training = 0
        """Number of the job's ranks that may take steps."""
        self.processes: dict[int, int] = {}
        """Rank process id by rank."""
        self._known: list[tuple[int, RankMeta]] = []
        self._patience_ns = int(limits.report_timeout_s * 1e9)

    def register_ranks(self, ranks: dict[int, RankProcess], labels: Mapping[int, str]) -> None:
        """Record node, group, strategy and role of the ranks."""
        self.ranks, self.world = ranks, world_size(ranks, None)
        self.training = training(ranks, self.world)
        who = {rank: RankMeta(labels[s.id], s.group, s.strategy, s.role) for rank, s in ranks.items()}
        known = [(process.id, who[rank]) for rank, process in ranks.items()]
        if known != self._known:
            self._known = known
            self.history.register_ranks(who)

    def rows_of(self, processes: dict[int, int]) -> list[RankRows]:
        """Return the newest rows of the ranks whose processes are the same in `processes`."""
        same = [rank for rank, process in self.processes.items() if processes.get(rank) == process]
        lines = {rank: self.history.table.line(rank, 1 << 20) for rank in same}
        who = self.history.who
        return [
            RankRows(rank, who[rank].node, *line, who[rank].group, who[rank].strategy, role=who[rank].role)
            for rank, line in lines.items()
        ]

    def put(self, ranks_rows: list[tuple[int, Rows]]) -> None:
        """Add rows of ranks, all with the same keys."""
        ranks_rows.sort(key=lambda rank_row: rank_row[0])
        keys = np.frombuffer(ranks_rows[0][1][0], "<i8")
        flags = np.frombuffer(b"".join(rows[1] for _, rows in ranks_rows), np.uint8).reshape(
            len(ranks_rows), -1
        )
        stages = from_wire([rows[2:] for _, rows in ranks_rows])
        stages = stages.reshape(len(ranks_rows), len(keys), -1)
        self.history.put([rank for rank, _ in ranks_rows], keys, flags, stages)

    def read_older(self) -> None:
        """Read more of the older rows. Once all are read, go on from there."""
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
        """Stop reading older rows."""
        older, self.older, self.whole = self.older, None, True
        if older is not None:
            older.session.close()

    def advance(self) -> None:
        """Reduce the steps that all ranks have completed."""
        pending = pending_ranks(self.ranks, self.training, self._patience_ns, self.history.reported())
        self.history.advance(pending.reporting, pending.missing_count, self.training)


def _keep(kept: list[Rows], rows: Rows) -> None:
    kept.append(rows)
    while sum(len(rows[1]) for rows in kept) > MAX_UNKNOWN_ROWS and len(kept) > 1:
        del kept[0]


_NO_KEYS: Int64 = np.empty(0, np.int64)
