"""
The nodes, rank processes and runs of a session. A rank process is the life of one process as a rank, in
memory and as a row on disk. A session may have several runs: several `fit()` of a driver, groups of plain
actors, or one torchrun job.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from traceml_ray import text
from traceml_ray.analysis.roles import role_of
from traceml_ray.identity import MAX_RANKS, RankIdentity
from traceml_ray.stages import SEGMENT_BITS, STAGES
from traceml_ray.store.results import Dropped, EarlierStart, Ledger, RankLedger, RunInfo, WholeLedger
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import ready


@dataclass
class Node:
    """A machine, from its joining the cluster to its leaving. A machine that comes back is another node."""

    node_id: str
    hostname: str
    address: str
    last_seen_ns: int | None = None
    """When the node's relay last reported, in ns."""
    lost_ns: int | None = None
    """When the node was found to have left the cluster (ns); None: it has not left."""
    clock_offset_ns: int | None = None
    """Offset to add to times of the node's clock to get the aggregator's, in ns; None: not known."""
    clock_bound_ns: int | None = None
    """Largest error of that offset, in ns."""
    errors: dict[str, int] = field(default_factory=dict)
    """Number of errors that the node's relay swallowed: place in the code → count."""

    @property
    def correction_ns(self) -> int:
        """Offset to add to a time of the node's clock (ns). 0 if the clocks are not known to differ."""
        if self.clock_offset_ns is None or abs(self.clock_offset_ns) <= (self.clock_bound_ns or 0):
            return 0
        return self.clock_offset_ns

    def to_row(self) -> tuple[Any, ...]:
        """Return the node as a row of `COLUMNS`."""
        return *_plain_node(self), json.dumps(self.errors) if self.errors else "{}"

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> Node:
        """Return the node from a row of `COLUMNS`."""
        node = cls(*row)
        node.errors = json.loads(row[-1])
        return node


NODE_COLUMNS = tuple(column.name for column in fields(Node))
_plain_node = attrgetter(*NODE_COLUMNS[:-1])


def node_key(process: RankProcess) -> str:
    """Return the key of the rank process's node: the node's id, or its hostname while the id is not known."""
    assert process.identity is not None
    return process.identity.node_id or process.identity.hostname


def label_nodes(nodes: Iterable[Node], processes: Iterable[RankProcess]) -> dict[str, str]:
    """
    Return the label of each node (by `node_key`). The label is the hostname. If two nodes have the same
    hostname, the address is added; if that is the same too, the beginning of the node's id.

    If ranks of the node have reported, their hostname is used.
    """
    nodes = list(nodes)
    hostnames = {node.node_id: node.hostname for node in nodes}
    hostnames.update(
        {node_key(process): process.identity.hostname for process in processes if process.identity}
    )
    addresses = {node.node_id: node.address for node in nodes}
    places = {key: (name, addresses.get(key, "address unknown")) for key, name in hostnames.items()}
    same_name, same_place = Counter(hostnames.values()), Counter(places.values())
    labels = {}
    for key, (name, address) in places.items():
        labels[key] = name
        if same_place[name, address] > 1:
            node, dot, launch = key.partition(".")  # see `ActorConfig.launch`
            labels[key] = f"{name} ({address}, {node[:8]}{dot}{launch})"
        elif same_name[name] > 1:
            labels[key] = f"{name} ({address})"
    return labels


def process_labels(nodes: Iterable[Node], processes: Iterable[RankProcess]) -> dict[int, str]:
    """Return the label of each rank process's node: process id → label, see `label_nodes`."""
    processes = list(processes)
    labels = label_nodes(nodes, processes)
    return {process.id: labels[node_key(process)] for process in processes if process.identity}


_IDENTITY = RankIdentity.__struct_fields__
NUMBERED = "ray"
"""Source of Ray processes that have no rank of their own. The aggregator numbers the processes of one run."""
_LATE_NS = 2_000_000_000
"""
Largest delay with which the end of a process becomes known, after the next process has started on another
node (ns).
"""


@dataclass
class RankProcess:
    """
    One process's life as a rank. Counts are rows since the process started. `next_row` is the number of the
    next new row: every row below it is stored or lost for good. `last_batch` is the number of the last batch
    taken.
    """

    id: int
    process_id: str
    identity: RankIdentity | None = None
    produced: int = 0
    stored: int = 0
    dropped_by_agent: int = 0
    dropped_aggregator: int = 0
    lost_rows: int = 0
    """Number of rows in flight when the session ended. The relay counted them as dropped."""
    dropped_by_relay: dict[str, int] = field(default_factory=dict)
    """Rows dropped by each relay incarnation: incarnation id → count."""
    next_row: int = 0
    last_batch: int = -1
    last_key: int | None = None
    last_rows_ns: int | None = None
    """When the last rows were received, in ns."""
    final: bool = False
    lost: bool = False
    exit_code: int | None = None
    """Exit code that the launcher saw; negative: the number of the signal."""
    first_seen_ns: int = 0
    last_seen_ns: int = 0
    open_step: int | None = None
    open_stage: int | None = None
    open_elapsed_ns: int | None = None
    open_span: str | None = None
    open_span_ns: int | None = None
    strategy: str | None = None
    missing: dict[str, str] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    memory_from: dict[str, str] = field(default_factory=dict)
    """Source of each field of its memory samples, see `wire.RankBatch`."""
    environment: dict[str, str] = field(default_factory=dict)
    """Versions and settings of the process, by name."""
    marks_ns: int | None = None
    agent_cpu_ns: int | None = None
    agent_wall_ns: int | None = None
    sent_bytes: int | None = None
    group_first: int | None = None
    group_size: int | None = None
    placement: dict[str, Any] = field(default_factory=dict)
    """
    Coordinates of the rank in a job that is not only data parallel, as in
    `wire.Placement`; empty: not known.
    """
    open_still_ns: int | None = None
    """Time since its training thread was last found to do something, as last reported, in ns."""

    @property
    def group(self) -> tuple[int, int] | None:
        """Group of the ranks that this rank exchanges gradients with, see `wire.RankBatch`."""
        if self.group_first is None or self.group_size is None:
            return None
        return self.group_first, self.group_size

    @property
    def role(self) -> str | None:
        """Role of the rank, if the ranks of the job do different work; else None."""
        return role_of(self.placement, self.group_size) if self.placement else None

    @property
    def worker(self) -> str | None:
        """Name of the process as a worker of torch.distributed.rpc; None: it is not a worker."""
        return self.placement.get("worker") or None

    @property
    def serves(self) -> bool:
        """Whether the process is an RPC worker that has taken no step so far: other ranks give it work."""
        return self.worker is not None and self.last_key is None

    @property
    def work(self) -> str:
        """
        Role of the rank and its RPC name, as text. "" if all ranks are known, or assumed, to do the same
        work.
        """
        serves = ", serves, no steps" if self.serves else ""
        return " ".join(filter(None, [self.role, f"RPC {self.worker}{serves}" if self.worker else ""]))

    @property
    def rank(self) -> int | None:
        """Global rank; None: not known yet."""
        return self.identity.global_rank if self.identity else None

    @property
    def last_step(self) -> int | None:
        """Newest step that the process sent a row of."""
        return None if self.last_key is None else self.last_key >> SEGMENT_BITS

    @property
    def stage(self) -> str | None:
        """Stage that the process was in at its last report."""
        return None if self.open_stage is None else STAGES[self.open_stage]

    @property
    def dropped_agent(self) -> int:
        """
        Number of rows that the agent dropped. Rows that an agent or relay dropped while their confirmation
        was in transit did arrive: they count as stored.
        """
        return min(self.dropped_by_agent, self.produced - self.stored - self.dropped_aggregator)

    @property
    def dropped_relay(self) -> int:
        """Number of rows that relays dropped, including those in flight when the session ended."""
        dropped = sum(self.dropped_by_relay.values()) + self.lost_rows
        return min(dropped, self.produced - self.stored - self.dropped_aggregator - self.dropped_agent)

    @property
    def in_flight(self) -> int:
        """Number of rows that have been produced, and have neither arrived nor been dropped yet."""
        return self.produced - self.stored - self.dropped_aggregator - self.dropped_agent - self.dropped_relay

    @property
    def ended(self) -> bool:
        """
        Whether no more rows will come: after the last batch, a lost process, or an exit that the launcher
        saw.
        """
        return self.final or self.lost or self.exit_code is not None

    @property
    def end(self) -> str:
        """How the process ended, in words; "" while it runs."""
        if self.exit_code:
            return f"exit code {self.exit_code}"
        return "finished" if self.final else "lost" if self.ended else ""

    def absorb(self, batch: wire.RankBatch, now: int) -> bool:
        """
        Copy the cumulative and latest values of a batch that arrived at `now` (not its rows). Return whether
        values other than `PROGRESS` have changed.
        """
        self.last_batch = batch.seq
        self.last_seen_ns = now
        self.produced = max(self.produced, batch.produced, self.next_row)
        if batch.open is not None:
            self.open_step, self.open_stage = batch.open.step, batch.open.stage
            self.open_elapsed_ns = batch.open.elapsed_ns
            self.open_span, self.open_span_ns = batch.open.span, batch.open.span_ns
            self.open_still_ns = batch.open.still_ns
        if batch.overhead is not None:
            self.marks_ns, self.agent_cpu_ns = batch.overhead.marks_ns, batch.overhead.agent_cpu_ns
            self.agent_wall_ns, self.sent_bytes = batch.overhead.agent_wall_ns, batch.overhead.sent_bytes
        changed = batch.dropped > self.dropped_by_agent or batch.final > self.final
        self.dropped_by_agent = max(self.dropped_by_agent, batch.dropped)
        self.final = self.final or batch.final
        if batch.group is not None and batch.group != (self.group_first, self.group_size):
            changed, (self.group_first, self.group_size) = True, batch.group
        if batch.strategy and batch.strategy != self.strategy:
            changed, self.strategy = True, batch.strategy
        if batch.missing and batch.missing != self.missing:
            changed, self.missing = True, batch.missing
        if batch.errors and batch.errors != self.errors:
            changed, self.errors = True, batch.errors
        if batch.memory_from and batch.memory_from != self.memory_from:
            changed, self.memory_from = True, batch.memory_from
        if batch.environment and batch.environment != self.environment:
            changed, self.environment = True, batch.environment
        placement = msgspec.structs.asdict(batch.placement) if batch.placement else {}
        if placement and placement != self.placement:
            changed, self.placement = True, placement
        return changed


_JSON = ("dropped_by_relay", "missing", "errors", "memory_from", "environment", "placement")
_PLAIN = tuple(f.name for f in fields(RankProcess) if f.name not in ("identity", *_JSON))
COLUMNS = (*_PLAIN, *_JSON, *_IDENTITY)
"""Columns of table `rank_process`, in order."""
PROGRESS = (
    *("produced", "stored", "next_row", "last_batch", "last_key", "last_rows_ns", "last_seen_ns"),
    *("open_step", "open_stage", "open_elapsed_ns", "open_span", "open_span_ns", "open_still_ns"),
    *("marks_ns", "agent_cpu_ns", "agent_wall_ns", "sent_bytes"),
)
"""
Columns that change with every batch. Writing only these takes a third of the time of
writing all columns.
"""
_NO_IDENTITY = (None,) * len(_IDENTITY)
_plain = attrgetter(*_PLAIN)
to_progress = attrgetter("id", *PROGRESS)
"""Returns the id of a rank process and the values of `PROGRESS`."""
_json = attrgetter(*_JSON)


def to_row(process: RankProcess) -> tuple[Any, ...]:
    """Return `process` as a row of `COLUMNS`."""
    identity = msgspec.structs.astuple(process.identity) if process.identity else _NO_IDENTITY
    return (*_plain(process), *map(_dump, _json(process)), *identity)


def from_row(values: dict[str, Any]) -> RankProcess:
    """
    Return the process from a row: column → value. A file of another version may lack columns, or have others.

    Raises ValueError, LookupError, TypeError, msgspec.ValidationError for invalid values.
    """
    identity = [values.pop(name) for name in _IDENTITY]
    for name in _JSON:
        values[name] = {} if values.get(name, "{}") == "{}" else json.loads(values[name])
    for name in ("final", "lost"):
        values[name] = bool(values[name])
    who = None if identity[0] is None else msgspec.convert(identity, ready(RankIdentity))
    known = {name: value for name, value in values.items() if name in COLUMNS}
    return RankProcess(**known, identity=who)


def _dump(value: dict[str, Any]) -> str:
    return json.dumps(value) if value else "{}"


def attempt_of(process: RankProcess) -> int:
    """Return the attempt that a rank process belongs to; -1: not known yet."""
    return process.identity.attempt if process.identity else -1


def last_attempt(processes: Iterable[RankProcess]) -> list[RankProcess]:
    """
    Return the rank processes of the last attempt whose rank is known. All `processes`
    belong to one run.
    """
    known = [process for process in processes if process.identity is not None]
    last = max(map(attempt_of, known), default=-1)
    return [process for process in known if attempt_of(process) == last]


def generations(processes: Iterable[RankProcess]) -> list[list[RankProcess]]:
    """
    Return the processes with a known rank by generation, the oldest generation first, each in order of `age`.
    The processes of a generation started together to train together. All `processes` belong to one run (see
    `of_run`).

    An attempt starts a generation. So does a restart within an attempt (by an elastic launcher at a change of
    membership, or as a second round of actors): a rank starts again after all earlier processes have gone.

    A process that replaces one rank while others continue belongs to their generation. So does a rank that
    joins late, and a rank that ended early.
    """
    known = sorted((process for process in processes if process.identity is not None), key=age)
    newest = {(attempt_of(process), process.rank): process.id for process in known}
    if len(newest) == len(known):  # no rank comes again
        return [list(start) for _, start in groupby(known, key=attempt_of)]
    replaced = {process.id for process in known if newest[attempt_of(process), process.rank] != process.id}
    all_generations: list[list[RankProcess]] = []
    ranks: set[int | None] = set()
    for process in known:
        if not all_generations or attempt_of(all_generations[-1][0]) != attempt_of(process):
            all_generations.append([])
            ranks = set()
        generation = all_generations[-1]
        generation.append(process)
        if process.rank in ranks and (
            cut := _restart(generation, replaced, -1) or _restart(generation, replaced, _LATE_NS)
        ):
            all_generations[-1:] = [generation[:cut], generation[cut:]]
            ranks = {one.rank for one in generation[cut:]}
        ranks.add(process.rank)
    return all_generations


def _restart(generation: list[RankProcess], replaced: set[int], late_ns: int) -> int:
    """
    Return the first index from which on the processes (in order of `age`) started after all processes before
    them had gone; 0 if there is none. The rank of the last process is among the ranks before. The end of a
    process may become known `late_ns` too late.
    """
    last = generation[-1]
    size = last.identity.world_size if last.identity else 0
    gone_ns, again = 0, False
    for cut, process in enumerate(generation):
        if again and gone_ns <= process.first_seen_ns + late_ns:
            return cut
        if process.rank is not None and process.rank < size:  # others are none of the new job's
            if not process.ended and process.id not in replaced:
                return 0
            gone_ns = max(gone_ns, process.last_seen_ns)
        again = again or process.rank == last.rank
    return 0


class Generation(NamedTuple):
    """Rank processes that started together, and their position among the starts of the run."""

    processes: list[RankProcess]
    attempt: int = -1
    """Attempt of the launcher; -1: there are no processes."""
    index_in_attempt: int = 0
    """Number of generations of the same attempt before it."""

    @property
    def key(self) -> tuple[int, int]:
        """The attempt and the index in it. The key identifies a generation in its run."""
        return self.attempt, self.index_in_attempt


def latest_generation_with_rows(processes: Iterable[RankProcess]) -> Generation:
    """
    Return the newest generation that stored rows. Falls back to the newest generation if none did: a
    generation that died before its first step has no rows. All `processes` belong to one run.
    """
    all_generations = generations(processes)
    if not all_generations:
        return Generation([])
    with_rows = [generation for generation in all_generations if any(one.stored for one in generation)]
    latest = with_rows[-1] if with_rows else all_generations[-1]
    attempts = [attempt_of(generation[0]) for generation in all_generations]
    index = next(index for index, generation in enumerate(all_generations) if generation is latest)
    return Generation(latest, attempts[index], attempts[:index].count(attempts[index]))


def earlier_starts(processes: Iterable[RankProcess]) -> list[EarlierStart]:
    """
    Return each generation with rows before the current one (`latest_generation_with_rows`), the oldest first:
    its `attempt`, the `steps` that all its ranks completed, and `seconds` from its first rank to its end.
    """
    processes = list(processes)
    latest = latest_generation_with_rows(processes).processes
    starts = []
    for generation in generations(processes):
        if latest and generation[0].id == latest[0].id:
            break
        last = [process.last_step for process in latest_process_per_rank(generation).values()]
        known = [step for step in last if step is not None]
        if known:
            began = min(process.first_seen_ns for process in generation)
            ended = max(process.last_seen_ns for process in generation)
            seconds = (ended - began) / 1e9
            starts.append(EarlierStart(attempt_of(generation[0]), min(known) + 1, seconds))
    return starts


def current_ranks(processes: Iterable[RankProcess]) -> dict[int, RankProcess]:
    """
    Return one process per rank, all from the same generation (`latest_generation_with_rows`), so that steps
    before and after a restart are never mixed. All `processes` belong to one run (see `of_run`).
    """
    return latest_process_per_rank(latest_generation_with_rows(processes).processes)


def latest_process_per_rank(generation: Iterable[RankProcess]) -> dict[int, RankProcess]:
    """Return one process per rank. If a rank has several processes, it is the last one with rows."""
    best: dict[int, RankProcess] = {}
    for process in generation:
        if process.rank is not None and (
            process.stored or process.rank not in best or not best[process.rank].stored
        ):
            best[process.rank] = process
    return dict(sorted(best.items()))


def reporting(ranks: dict[int, RankProcess], patience_ns: int) -> set[int]:
    """
    Return the ranks that may still deliver rows. They have not ended, and are not silent for `patience_ns`
    longer than the others.
    """
    since = max((process.last_seen_ns for process in ranks.values()), default=0) - patience_ns
    return {rank for rank, process in ranks.items() if process.last_seen_ns >= since and not process.ended}


class PendingRanks(NamedTuple):
    """The ranks whose rows a window of steps may still need."""

    reporting: set[int]
    """Ranks that may still deliver rows, see `reporting`."""
    missing_count: int
    """Number of other ranks that have rows, or may soon have some, but have not reported."""


def pending_ranks(
    ranks: dict[int, RankProcess], world: int, patience_ns: int, reported: Collection[int]
) -> PendingRanks:
    """
    Return the ranks whose rows may still come. While a job is younger than `patience_ns`, all `world` ranks
    count as missing until they are among the `reported`.
    """
    latest = max((process.last_seen_ns for process in ranks.values()), default=0)
    young = latest - min((process.first_seen_ns for process in ranks.values()), default=0) < patience_ns
    rowless = {rank for rank, process in ranks.items() if process.serves and process.ended}
    lack = [rank for rank, process in ranks.items() if (young or process.stored) and rank not in reported]
    lack = [rank for rank in lack if rank not in rowless]
    unknown = max(0, world - len(ranks)) if young else 0
    return PendingRanks(reporting(ranks, patience_ns), len(lack) + unknown)


def world_size(ranks: dict[int, RankProcess], launched: int | None) -> int:
    """
    Return the current size of the job: the world size of the newest of `ranks` (see `current_ranks`) with
    rows, else the number of launched ranks. For numbered actors it is the number of numbers given.
    """
    newest = max(ranks.values(), key=lambda process: (process.stored > 0, age(process)), default=None)
    if newest is None or newest.identity is None:
        return min(launched or 0, MAX_RANKS)
    return max(ranks) + 1 if newest.identity.source == NUMBERED else newest.identity.world_size


def rpc_only_ranks(ranks: Mapping[int, RankProcess]) -> set[int]:
    """Return the `current_ranks` that only serve others over RPC; none if no rank takes steps."""
    rpc_only = {rank for rank, process in ranks.items() if process.serves}
    return rpc_only if len(rpc_only) < len(ranks) else set()


def training(ranks: Mapping[int, RankProcess], world: int) -> int:
    """Return how many of the job's ranks (`world` in all) may take steps."""
    return max(0, world - len(rpc_only_ranks(ranks)))


def age(process: RankProcess) -> tuple[int, int, int]:
    """Sort key of the processes of one rank; the newest process comes last."""
    return attempt_of(process), process.first_seen_ns, process.id


MAX_RUNS = 256
"""Largest number of runs whose facts are kept."""
_MAX_TEXT = 500
_MAX_FACTS = 32
_OURS = frozenset({"id", "started_at", "ended_at", "status"})


def by_run(processes: Iterable[RankProcess]) -> dict[str, list[RankProcess]]:
    """
    Return the rank processes of each run: run id → processes, the oldest run first. Processes with an unknown
    rank are left out.
    """
    by_job: dict[str, list[RankProcess]] = {}
    for process in processes:
        if process.identity is not None:
            by_job.setdefault(process.identity.job_id, []).append(process)
    return by_job


def of_run(processes: Iterable[RankProcess], run: str | None) -> list[RankProcess]:
    """Return the rank processes of `run`, and those whose run is not known."""
    return [process for process in processes if process.identity is None or process.identity.job_id == run]


def newest(processes: Iterable[RankProcess], meta: Mapping[str, Any]) -> str | None:
    """
    Return the id of the newest run that has rows. Falls back to the newest run; None if
    there is no run.
    """
    runs = by_run(processes)
    return newest_of(
        {run: any(s.stored for s in processes_of_run) for run, processes_of_run in runs.items()}, meta
    )


def newest_of(has_rows: Mapping[str, bool], meta: Mapping[str, Any]) -> str | None:
    """
    Return the newest run as `newest` does, from the reported runs (oldest first): run id → whether it has
    rows.
    """
    stored = [run for run, rows in has_rows.items() if rows]
    known = [*has_rows, *(run for run in meta.get("runs", {}) if run not in has_rows)]
    return stored[-1] if stored else known[-1] if known else None


def run_names(processes: Iterable[RankProcess], meta: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of each run of a session: run id → name, the oldest run first."""
    reported = meta.get("runs", {})
    return {run: reported.get(run, {}).get("name") or run for run in [*by_run(processes), *reported]}


def note(
    reported: Mapping[str, Any], job_id: str, now: int, info: Mapping[str, Any], status: str | None = None
) -> dict[str, Any]:
    """
    Return `reported` (the facts of each run) with facts of one run added. The numbers of runs and facts are
    bounded.
    """
    facts: dict[str, Any] = {**reported.get(job_id, {"id": job_id, "started_at": now})}
    for name, value in info.items():
        if name not in _OURS and (name in facts or len(facts) < _MAX_FACTS):
            facts[name[:_MAX_TEXT]] = value[:_MAX_TEXT] if isinstance(value, str) else value
    if status is not None:
        facts["status"] = status[:_MAX_TEXT]
        facts.setdefault("ended_at", now)
    runs = {**reported, job_id: facts}
    while len(runs) > MAX_RUNS:
        del runs[next((run for run in runs if "ended_at" in runs[run]), next(iter(runs)))]
    return runs


def is_over(meta: Mapping[str, Any], run: str | None = None) -> bool:
    """
    Return whether the session has ended. With `run`, also True if that run has ended while the session
    continues.
    """
    return meta.get("status", "running") != "running" or has_ended(meta, run)


def has_ended(meta: Mapping[str, Any], run: str | None) -> bool:
    """Return whether a run was reported as ended. Its session may continue."""
    return "ended_at" in meta.get("runs", {}).get(run, {})


def status_of(processes: list[RankProcess], reported: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
    """
    Return the status of a run: the reported one, else that of the session.

    While the session runs, a run without a reported status is `ended` once all its ranks have ended.
    """
    session: str = reported.get("status") or meta.get("status", "running")
    last = generations(processes)[-1:]
    return "ended" if session == "running" and last and all(s.ended for s in last[0]) else session


def list_runs(
    processes: Iterable[RankProcess], meta: Mapping[str, Any], labels: Mapping[str, str]
) -> list[dict[str, Any]]:
    """
    Return every run of a session, oldest first: `id`, `name`, `launcher`, `status`, `started_at` and
    `ended_at` (ns), `world_size`, `nnodes`, `attempts`, `earlier` (see `earlier_starts`), `label` of its
    verdict (`labels`: the last live ones), `ledger` in rows.
    """
    runs, every = by_run(processes), meta.get("runs", {})
    entries = []
    for run in (ids := {**runs, **every}):
        processes_of_run, reported = runs.get(run, []), every.get(run, {})
        facts = {**meta, **reported} if is_own(run, ids, meta) else reported
        status = status_of(processes_of_run, reported, meta)
        ended = reported.get("ended_at") or meta.get("ended_at")
        if not ended and status == "ended":
            ended = max(process.last_seen_ns for process in processes_of_run)
        first = min((process.first_seen_ns for process in processes_of_run), default=None)
        entry = {
            "id": run,
            "name": reported.get("name") or run,
            "launcher": reported.get("launcher") or meta.get("launcher"),
            "status": status,
            "started_at": facts.get("started_at") or first,
            "ended_at": ended,
            "world_size": world_size(current_ranks(processes_of_run), facts.get("world_size")) or None,
            "nnodes": facts.get("nnodes"),
            "attempts": len({attempt_of(process) for process in processes_of_run}),
            "earlier": earlier_starts(processes_of_run),
            "label": reported.get("label") or labels.get(run),
            "ledger": count(processes_of_run),
        }
        entries.append(entry)
    return entries


def is_own(run: str | None, runs: Sized, meta: Mapping[str, Any]) -> bool:
    """
    Whether the facts of the session are those of `run`, one of `runs`. A launcher makes a session for one
    run.
    """
    return len(runs) <= 1 or run == meta.get("session")


def count(processes: Iterable[RankProcess]) -> Ledger:
    """Return where every produced row is: `produced = stored + dropped + in_flight`, in rows."""
    return Ledger(**_counts(processes))


def _counts(processes: Iterable[RankProcess]) -> dict[str, Any]:
    """Return the fields of a `Ledger`: field → value."""
    processes = list(processes)

    def total(name: str) -> int:
        return sum(getattr(process, name) for process in processes)

    dropped = Dropped(*(total(f"dropped_{where}") for where in ("agent", "relay", "aggregator")))
    return {**{name: total(name) for name in ("produced", "stored", "in_flight")}, "dropped": dropped}


def ledger(processes: Iterable[RankProcess], run: str | None, folded: int) -> WholeLedger:
    """
    Return the ledger of the session, with the ledger of each rank of `run` in `per_rank`. Attempts and
    processes of one rank are added up; those of other runs are not in `per_rank`. `folded` rows are stored as
    statistics only.

    `unreported` is the number of rows produced after a rank's last report: 0 after a last batch, None (not
    known) for a process that was killed.
    """
    processes = list(processes)
    ranks: dict[int | None, list[RankProcess]] = {}
    for process in of_run(processes, run):
        ranks.setdefault(process.rank, []).append(process)
    per_rank = {
        "unknown" if rank is None else str(rank): RankLedger(
            **_counts(ranks[rank]),
            unreported=0 if all(process.final for process in ranks[rank]) else None,
        )
        for rank in sorted(ranks, key=lambda rank: (rank is None, rank))
    }
    return WholeLedger(**_counts(processes), per_rank=per_rank, folded=folded)


_GOES_ON = "running"


def why_over(runs: Sequence[RunInfo], run: str | None) -> str:
    """
    Return why no more steps of a run can be measured; "" if the run continues, or may still begin.

    Args:
        runs: the runs of the session.
        run: id or name of the run; None: any run that continues.
    """
    asked = [info for info in runs if run in (None, info.id, info.name)]
    if not asked or any(info.status == _GOES_ON for info in asked):
        return ""
    last = asked[-1]
    state = f"{last.status} at {last.ended_at}" if last.ended_at else last.status
    going = [info.name for info in runs if info.status == _GOES_ON]
    others = f"; {text.listed(going)} goes on" if going else ""
    return f"run {last.name!r} has no step left to record: {state}{others}"
