"""The runs of a session that go on: which processes are their ranks, and on whose clock each of these is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from traceml_ray.analysis.verdict import Verdict
from traceml_ray.store.nodes import process_labels
from traceml_ray.store.rank_processes import (
    RankProcess,
    latest_generation_with_rows,
    latest_process_per_rank,
    world_size,
)
from traceml_ray.store.recent import Recent
from traceml_ray.store.runs import by_run, run_names
from traceml_ray.store.writer import SessionWriter

MAX_LIVE = 16
"""Runs judged at the same time, the newest; no rows of other runs are kept in memory."""
MAX_UNKNOWN = 256
"""Rank processes of unknown rank, the newest, whose rows are kept in memory."""


@dataclass(frozen=True)
class LiveRanks:
    """Which processes are the ranks of the live runs."""

    epoch: int = -1
    """
    Version of the writer's processes that this was made from, see `SessionWriter.epoch`; -1: make it again
    each time.
    """
    runs: dict[str, list[RankProcess]] = field(default_factory=dict)
    ranks: dict[str, dict[int, RankProcess]] = field(default_factory=dict)
    which: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Key of the generation that `ranks` are from, see `rank_processes.Generation`."""
    labels: dict[int, str] = field(default_factory=dict)
    """Display names of the rank processes' nodes."""
    unknown: list[int] = field(default_factory=list)
    """Rank processes of unknown rank, the newest."""


@dataclass(frozen=True)
class RunNow:
    """A run that goes on, as it is profiled."""

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
        """How many ranks it has, as far as they have said."""
        return world_size(dict(self.ranks), None)


@dataclass(eq=False)
class LiveRuns:
    """
    Args:
        writer: of the session; its lock is held briefly.
        recent: keeps what belongs to the ranks of these runs, and nothing else.
    """

    writer: SessionWriter
    recent: Recent

    def __post_init__(self) -> None:
        self.known = LiveRanks()
        """Result of the last `refresh`."""

    def processes(self) -> dict[str, list[RankProcess]]:
        """Return the rank processes of the runs that are judged. Called with the writer's lock."""
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
        # Where a rank has had several processes, time alone may decide which of them is the one.
        epoch = writer.epoch if len(kept) == sum(map(len, runs.values())) + len(unknown) else -1
        which = {run: one.key for run, one in latest.items()}
        return LiveRanks(epoch, runs, ranks, which, process_labels(writer.nodes.values(), processes), unknown)

    def running(
        self,
        verdict: Callable[[str], Verdict | None],
        step_s: Callable[[Iterable[RankProcess]], float | None],
    ) -> list[RunNow]:
        """
        Return the runs that have ranks, the newest last.

        Args:
            verdict: returns that on a run as it stands.
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
        """Return offset and bound of each node's clock that are known."""
        with self.writer.lock:
            return {
                name: (node.clock_offset_ns, node.clock_bound_ns)
                for name, node in self.writer.nodes.items()
                if node.clock_offset_ns is not None and node.clock_bound_ns is not None
            }
