"""
The parts of a report that are not about steps: the nodes of the ranks, the ends of ranks,
memory, events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from functools import cached_property
from typing import Any

from traceml_ray.analysis.roles import mode
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import missing_of
from traceml_ray.identity import RankIdentity
from traceml_ray.reports.deaths import Death, culprits, deaths
from traceml_ray.stages import STAGES
from traceml_ray.store.rank_processes import (
    RankProcess,
    current_ranks,
    is_own,
    label_nodes,
    node_key,
    of_run,
    rpc_only_ranks,
    world_size,
)
from traceml_ray.store.results import EventRow
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.step_shapes import DeathInfo
from traceml_ray.store.summary_shape import EventInfo, RankOverhead, SummaryNode, SummaryRank, SummarySession

_MAX_EVENTS = 1000
_MAX_MESSAGE = 2000
_EXACT_NS = 2_000_000_000


class RunFacts:
    """The facts of one run, read from the session file once. Raises `SessionFileError`."""

    def __init__(self, session: SessionFile, thresholds: Thresholds) -> None:
        self.session = session
        self.thresholds = thresholds
        self.meta = session.meta()
        self.runs = session.runs()
        run = session.run_id()
        """The entry of `runs` that the summary covers; empty if there is no run."""
        self.run: dict[str, Any] = next((entry for entry in self.runs if entry["id"] == run), {})
        """The one of `runs` that the summary is of; empty before any."""
        self.every = session.processes()
        self.processes = of_run(self.every, run)
        """Rank processes of the run."""
        self.ranks = current_ranks(self.processes)
        self.nodes = {node.node_id: node for node in session.cluster()}
        self.labels = label_nodes(self.nodes.values(), self.every)
        """Labels of the nodes, by `node_key`."""
        self.events = session.events()[0]

    def fact(self, name: str) -> Any:
        """Return a fact of the run. If there is no run yet, return the fact of the session."""
        return (self.run or self.meta).get(name)

    @cached_property
    def rpc_only_ranks(self) -> set[int]:
        """Ranks that only serve others over RPC."""
        return rpc_only_ranks(self.ranks)

    @property
    def stored(self) -> int:
        """Rows of the run's ranks that were stored."""
        return sum(process.stored for process in self.ranks.values())

    @property
    def world_size(self) -> int:
        """Number of ranks the job has."""
        return world_size(self.ranks, self.fact("world_size"))

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Failures of the run's ranks that the launcher saw. Times are on the aggregator's clock."""
        who = {(s.rank, s.identity.pid): s.identity for s in self.every if s.identity}
        runs = {key: identity.job_id for key, identity in who.items()}
        run_id = self.run.get("id")
        other = run_id if is_own(run_id, self.runs, self.meta) else None
        failures = self.meta.get("failures", [])
        kept = [f for f in failures if runs.get((f["rank"], f["pid"]), other) == run_id]
        return [{**f, "t_ns": f["t_ns"] + self._offset(who.get((f["rank"], f["pid"])))} for f in kept]

    def _offset(self, identity: RankIdentity | None) -> int:
        """Return the offset to add to a time of the rank's node to get the aggregator's time (ns)."""
        node = self.nodes.get(identity.node_id or "") if identity else None
        return node.correction_ns if node else 0

    @cached_property
    def deaths(self) -> list[Death]:
        """The deaths of the run in order of time, see `deaths.deaths`."""
        return deaths(self.failures, self.events, self.processes, failed=self.fact("status") == "failed")

    def processes_of(self, ranks: Iterable[int], all_deaths: Iterable[Death]) -> dict[int, RankProcess]:
        """
        Return the process of each known rank of `ranks`. For a rank that died, it is the
        process that died.
        """
        died = {death.rank: death.process for death in all_deaths}
        processes = {rank: died.get(rank) or self.ranks.get(rank) for rank in ranks}
        return {rank: process for rank, process in processes.items() if process is not None}

    def node_of(self, rank: int) -> str | None:
        """Label of the rank's node; None: not known."""
        process = self.ranks.get(rank)
        return self.labels[node_key(process)] if process else None


def session_block(facts: RunFacts) -> SummarySession:
    """Return the part of the summary about the session as a whole."""
    meta, nodes = facts.meta, _nodes(facts)
    return SummarySession(
        id=meta.get("session"),
        status=meta.get("status", "running"),
        exit_code=meta.get("exit_code"),
        started_at=moment(meta.get("started_at")),
        ended_at=moment(meta.get("ended_at")),
        launcher=facts.fact("launcher"),
        command=meta.get("command"),
        strategy=mode(process.strategy for process in facts.ranks.values()) or meta.get("strategy"),
        world_size=facts.world_size or None,
        silent_ranks=missing_of(facts.world_size, facts.ranks),
        nnodes=facts.fact("nnodes") or sum(bool(node.ranks) for node in nodes) or None,
        nodes=nodes,
    )


def _nodes(facts: RunFacts) -> list[SummaryNode]:
    """
    Return the nodes that the run's ranks are on, then those that the run lost before. Their numbers are those
    that the ranks report, if each node has one number and no number occurs twice; otherwise they follow the
    order of the lowest ranks.
    """
    ranks: dict[str, list[int]] = {}
    claimed: dict[str, set[int]] = {}
    for rank, process in facts.ranks.items():
        if process.identity is not None:
            ranks.setdefault(node_key(process), []).append(rank)
            claimed.setdefault(node_key(process), set()).add(process.identity.node_rank)
    numbers = [number for numbers in claimed.values() for number in numbers]
    if len(numbers) == len(claimed) == len(set(numbers)):
        number = {key: min(numbers) for key, numbers in claimed.items()}
    else:
        number = {
            key: number_of_node
            for number_of_node, key in enumerate(sorted(ranks, key=lambda key: ranks[key][0]))
        }
    before = {node_key(process) for process in facts.processes if process.identity}.difference(ranks)
    gone = [key for key in sorted(before) if _is_lost(facts, key)]
    return [
        SummaryNode(
            node_rank=number.get(key),
            node_id=key if key in facts.nodes else None,
            hostname=facts.labels[key],
            lost=_is_lost(facts, key),
            ranks=ranks.get(key, []),
            clock_offset_ns=facts.nodes[key].clock_offset_ns if key in facts.nodes else None,
            clock_bound_ns=facts.nodes[key].clock_bound_ns if key in facts.nodes else None,
        )
        for key in [*sorted(ranks, key=lambda key: number[key]), *gone]
    ]


def _is_lost(facts: RunFacts, key: str) -> bool:
    return key in facts.nodes and facts.nodes[key].lost_ns is not None


def deaths_of(facts: RunFacts) -> list[DeathInfo]:
    """Return the deaths of ranks of the run, the first cause first."""
    all_deaths = facts.deaths
    first = culprits(all_deaths) if all_deaths else []
    return [_death(death, death in first) for death in [*first, *(d for d in all_deaths if d not in first)]]


def _death(death: Death, first: bool) -> DeathInfo:
    when = death.when
    return DeathInfo(
        rank=death.rank,
        t_ns=when.t_ns,
        exact=when.early_ns + when.late_ns <= _EXACT_NS,
        step=death.last_step,
        stage=death.stage,
        how=death.how,
        message=death.message[:_MAX_MESSAGE],
        traceback=death.traceback,
        first=first,
    )


def ranks_block(facts: RunFacts, all_deaths: Sequence[Death]) -> dict[str, SummaryRank]:
    """Return how far each rank came and how it ended."""
    died = {death.rank: death for death in all_deaths if death.process is not None}
    processes = Counter(process.rank for process in facts.processes)
    return {str(rank): _rank(facts, rank, died.get(rank), processes[rank]) for rank in facts.ranks}


def _rank(facts: RunFacts, rank: int, death: Death | None, processes: int) -> SummaryRank:
    process = facts.ranks[rank]
    identity = process.identity
    return SummaryRank(
        name=(identity.name or None) if identity else None,
        node=facts.node_of(rank),
        pid=identity.pid if identity else None,
        attempt=identity.attempt if identity else None,
        processes=processes,
        last_step=process.last_step,
        open_stage=None if process.final else process.stage,
        last_seen=moment(process.last_seen_ns),
        ended="died" if death else "finished" if process.final else None,
        exit_code=process.exit_code,
        exit_reason=death.reason if death else None,
        missing=process.missing,
        errors=process.errors,
        role=process.role,
        placement=process.placement,
        serves=process.rank in facts.rpc_only_ranks,
    )


def events_block(facts: RunFacts) -> list[EventInfo]:
    """Return the newest events."""
    return [_event(event, facts) for event in facts.events[-_MAX_EVENTS:]]


def _event(event: EventRow, facts: RunFacts) -> EventInfo:
    rank: Any = event.rank if event.rank is not None else event.data.get("rank")
    stage, node_id = event.stage, event.node_id
    return EventInfo(
        time=moment(event.t_ns),
        kind=event.kind,
        rank=rank,
        node=facts.labels.get(node_id, node_id) if node_id else facts.node_of(rank),
        step=event.step,
        stage=None if stage is None else STAGES[stage],
        message=event.message[:_MAX_MESSAGE],
        data=event.data,
    )


def alike(facts: RunFacts, values_of: Callable[[RankProcess], Mapping[str, str]]) -> list[dict[str, Any]]:
    """
    Return the values that the ranks' processes report, by name, with the ranks that
    report the same values.
    """
    ranks_of_values: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for rank, process in facts.ranks.items():
        if values := values_of(process):
            ranks_of_values.setdefault(tuple(sorted(values.items())), []).append(rank)
    return [{"ranks": ranks, "values": dict(values)} for values, ranks in ranks_of_values.items()]


def overhead_of(processes: Iterable[RankProcess]) -> RankOverhead:
    """
    Return the cost of the monitor, each figure for the rank where it is largest.

    A batch reports what was measured and sent before it. For a process with a single batch, 0 therefore means
    "not known".
    """
    marks, cpu, sent = [], [], []
    for process in processes:
        known = process.produced if process.last_step is None else process.last_step + 1
        steps = min(process.produced, known)
        if process.produced and process.marks_ns:
            marks.append(process.marks_ns / steps / 1e3)
        if process.produced and process.sent_bytes:
            sent.append(process.sent_bytes / steps)
        if process.agent_wall_ns and process.agent_cpu_ns:
            cpu.append(100 * process.agent_cpu_ns / process.agent_wall_ns)
    return RankOverhead(
        of="worst rank",
        training_thread_us_per_step=max(marks, default=None),
        agent_cpu_pct=max(cpu, default=None),
        bytes_per_step=max(sent, default=None),
    )


def moment(t_ns: int | None) -> str | None:
    """Return ns since the epoch as ISO 8601 in UTC."""
    if not t_ns:
        return None
    return datetime.fromtimestamp(t_ns / 1e9, timezone.utc).isoformat(timespec="milliseconds")
