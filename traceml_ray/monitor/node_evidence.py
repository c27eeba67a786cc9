"""Anomalies of the nodes that the live verdict names, for as long as it names them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from traceml_ray.analysis.anomalies import Anomaly
from traceml_ray.analysis.samples import Excerpt
from traceml_ray.analysis.step_times import of_rows, span, trained_since
from traceml_ray.analysis.thresholds import MACHINE
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.monitor.live_steps import LiveSteps
from traceml_ray.reports.machines import Machines, reference_rank
from traceml_ray.store.nodes import node_key
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.recent import Recent
from traceml_ray.store.writer import SessionWriter

EVERY_NS = 1_000_000_000
_ROWS = 1024


@dataclass(eq=False)
class NodeEvidence:
    """Of one run. What was usual before the present ranks were named counts as usual while they are named."""

    writer: SessionWriter
    recent: Recent
    steps: LiveSteps
    clock: Callable[[], int]
    warmup_steps: int

    def __post_init__(self) -> None:
        self._trained: tuple[int | None, int] = None, 0
        self._named: object = None
        self._since_ns = 0
        self._examined_ns = 0
        self._machine: tuple[Anomaly, ...] | None = None

    def add(self, verdict: Verdict, ranks: dict[int, RankProcess], labels: dict[int, str]) -> Verdict:
        """
        Return `verdict` with its `machine`, examined again after a second; of a death, only once.

        Args:
            verdict: on the run.
            ranks: the process of each of its ranks.
            labels: names of the rank processes' nodes.
        """
        rank, now = reference_rank(verdict, ranks), self.clock()
        trained_ns = self._trained_ns(ranks)
        if rank is None:
            self._named = None
            return verdict
        named = verdict.label, verdict.stages, verdict.ranks
        fresh = named != self._named
        due = now - self._examined_ns >= EVERY_NS and verdict.exit_reason is None
        if fresh or due:
            process = ranks[rank]
            with self.writer.lock:
                every = list(self.writer.processes.values())
            names = {node_key(process): labels[process.id] for process in every if process.id in labels}
            machines = Machines(self._sampled, ranks, every, names)
            keys, _, rows = self.steps.rows_of(process.id, _ROWS)
            with self.writer.lock:
                when = machines.when(verdict, of_rows(keys, rows))
            if when is None:
                return verdict
            if fresh:
                self._named, self._since_ns = named, when[0]
            first_ns = max(self._since_ns, when[1] - int(MACHINE.live_s * 1e9))
            self._examined_ns = now
            self._machine = machines.examine(verdict, first_ns, when[1], trained_ns, self._since_ns).machine
        return msgspec.structs.replace(verdict, machine=self._machine)

    def began_ns(self, rank: int | None, step: int, ranks: dict[int, RankProcess]) -> int | None:
        """
        Return when `rank` (None: all) came to `step`, ns since the epoch; None where its rows are not known
        from there on.
        """
        process = ranks.get(min(ranks, default=-1) if rank is None else rank)
        if process is None or process.last_rows_ns is None:
            return None
        keys, _, rows = self.steps.rows_of(process.id, _ROWS)
        line = of_rows(keys, rows)
        if not len(line.first) or line.first[0] > step:
            return None
        when = span(line, process.last_rows_ns, step, None)
        return None if when is None else when[0]

    def _trained_ns(self, ranks: dict[int, RankProcess]) -> int:
        """Return since when the run is beyond its warm-up, by its first rows, which are dropped later."""
        process = ranks[min(ranks)] if ranks else None
        if process is None or process.last_rows_ns is None:
            return self.clock()
        if process.id != self._trained[0]:
            keys, _, rows = self.steps.rows_of(process.id, _ROWS)
            trained_ns = trained_since(of_rows(keys, rows), process.last_rows_ns, self.warmup_steps)
            if trained_ns == process.last_rows_ns:
                return trained_ns
            self._trained = process.id, trained_ns
        return self._trained[1]

    def _sampled(self, nodes: Sequence[str], first_ns: int, last_ns: int) -> dict[str, Excerpt]:
        machines = {}
        for node in nodes:
            with self.writer.lock:  # node by node: a message never waits until all of them are copied
                machines.update(self.recent.machines([node], first_ns, last_ns))
        return machines
