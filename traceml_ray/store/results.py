"""
The shapes of what `Session` returns; that of `summary` is in `summary_shape`.

Answers are structs; `traceml_ray.to_builtins` makes dicts of them. Names ending in `_ms` are milliseconds,
`_s` seconds, `_ns` nanoseconds since the epoch, `_pct` percent, `_at` moments (ISO 8601, UTC); a `share` is
0 to 1. What is not known is None, never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import asdict

from traceml_ray.analysis.episodes import Brief
from traceml_ray.analysis.labels import Label
from traceml_ray.analysis.roles import RoleShare
from traceml_ray.analysis.verdict import Suspect, Verdict
from traceml_ray.analysis.verdict_shapes import TimedEpisode, VerdictInfo, verdict_info


class Dropped(msgspec.Struct, frozen=True):
    """Number of rows that were lost, by the place that lost them."""

    agent: int
    relay: int
    aggregator: int

    @property
    def total(self) -> int:
        """All that was lost."""
        return self.agent + self.relay + self.aggregator

    @property
    def by_place(self) -> dict[str, int]:
        """Where rows were lost, and how many."""
        return {name: count for name, count in msgspec.structs.asdict(self).items() if count}


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Where every row is: `produced = stored + dropped + in_flight`."""

    produced: int
    stored: int
    in_flight: int
    dropped: Dropped


class RankLedger(Ledger, frozen=True, kw_only=True):
    """The same of one rank, all of its attempts together."""

    unreported: int | None
    """Rows produced after its last report: 0 after a regular end, None for a process that was killed."""


class WholeLedger(Ledger, frozen=True, kw_only=True):
    """The same of the session, and of each rank of the run (by its number as text; `unknown`)."""

    per_rank: dict[str, RankLedger]
    folded: int
    """Rows that are stored as statistics only."""


class BundleInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The bundle of an incident."""

    name: str
    path: str
    """Its folder, on the aggregator's node; `traceml-ray analyze` and `report` read it."""
    reason: str
    """oom, exception, killed, terminated, hang or request."""
    time: str
    """When it began (ISO 8601, UTC)."""
    why: str
    """A sentence: who, and why."""
    run: str | None
    rank: int | None
    node: str | None
    step: int | None
    bytes: int
    files: dict[str, int]
    """Size of each file of the bundle (bytes), by its name."""
    requests: list[str]
    """Ids of the requests for a bundle that this one answers."""


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the cluster, for as long as it is in it: one that comes back is another node."""

    node_id: str
    """Id that Ray gave the node."""
    hostname: str
    address: str
    label: str
    """How it is shown: the hostname, with the address where hostnames repeat."""
    alive: bool
    ranks: list[int]
    """Ranks of the newest run that were seen there last."""
    last_seen: str | None
    """When its relay reported last."""
    last_seen_ns: int | None
    lost_at: str | None
    """When it was found to be gone from the cluster."""
    lost_ns: int | None
    clock_offset_ns: int | None
    """What is added to a time of the node's clock to have it on the aggregator's (ns); None: not known."""
    clock_bound_ns: int | None
    """Largest possible error of `clock_offset_ns` (ns)."""
    errors: dict[str, int]
    """Number of exceptions that the node's relay swallowed, by place in the code."""


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Which process is which rank: the fields of `RankIdentity`, and how many of its rows are stored."""

    global_rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    nnodes: int
    hostname: str
    node_id: str | None
    job_id: str
    """Id of the run that the process belongs to."""
    attempt: int
    pid: int
    source: str
    """
    Where the rank was read from: explicit, ray_train, torch.distributed, torchrun, openmpi, slurm, pmi, ray,
    single, v1.
    """
    name: str
    """Name of the Ray actor that the process is; "" if it has none."""
    stored: int


class EarlierStart(msgspec.Struct, frozen=True):
    """An earlier start of all ranks, before the one that the numbers cover."""

    attempt: int
    steps: int
    """Steps that all its ranks closed. Only this number counts them."""
    seconds: float
    """From its first rank to its end."""


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a session: a `fit()`, a launch, or a group of actors."""

    id: str
    name: str
    launcher: str | None
    status: str
    """running, ended, finished, failed, stopped."""
    started_at: str | None
    ended_at: str | None
    world_size: int | None
    nnodes: int | None
    attempts: int
    earlier: list[EarlierStart]
    """The starts before the one that is shown, those that had steps, the oldest first."""
    label: Label | None
    """Label of the verdict on the run."""
    ledger: Ledger


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a run or of a node, as it is stored."""

    id: int
    """Number of the event in the session; later ones are larger. 0: it is not stored yet."""
    rank: int | None
    """Global rank of the process that reported it; None for an event of a node or of the run."""
    process: int | None
    """Id of that process in the session; None for an event of a node or of the run."""
    node_id: str | None
    """Id of the event's node; None: it has no node, or it is not known."""
    run: str | None
    """Id of the event's run, for an event without a rank; None for other events."""
    kind: str
    """What happened, as `note`, `exception`, `node_lost`."""
    t_ns: int
    """When it happened (ns since the epoch, on the aggregator's clock)."""
    step: int | None
    """Step in which it happened; None: not known."""
    stage: int | None
    """Index of the stage in which it happened, in `stages.STAGES`; None: not known."""
    message: str
    """What happened, in words; "" without any."""
    data: dict[str, Any]
    """Further values by name; the names depend on `kind`."""


class LiveVerdict(VerdictInfo, frozen=True, kw_only=True):
    """The verdict of a session: the current one, or that on the whole run after its end."""

    suspects: list[Suspect]
    exposed_ms: list[float] | None
    """Exposed time of each stage, mean per step; the sum is `mean_step_ms`."""
    roles: list[RoleShare]
    """Empty if all ranks are known, or assumed, to do the same work."""
    episodes: list[TimedEpisode] | None
    """Of the run, the costliest first; None: not known, as where a running session is read from its file."""
    brief: Brief | None


def live_verdict(verdict: Verdict, episodes: Sequence[TimedEpisode], brief: Brief) -> LiveVerdict:
    """Return a verdict as `Session.verdict` has it, with the episodes of its run."""
    return LiveVerdict(
        **asdict(verdict_info(verdict)),
        suspects=[*verdict.suspects],
        exposed_ms=None if verdict.exposed_ms is None else [*verdict.exposed_ms],
        roles=[*verdict.roles],
        episodes=[*episodes],
        brief=brief,
    )


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """State of the session itself. Values that its launcher did not give are null."""

    session: str | None = None
    status: str = "running"
    """running, finished, failed or stopped."""
    started_at: int | None = None
    """ns since the epoch."""
    ended_at: int | None = None
    exit_code: int | None = None
    launcher: str | None = None
    command: str | None = None
    settings: dict[str, str] | None = None
    """Those that are not as by default."""
    world_size: int | None = None
    nnodes: int | None = None
    strategy: str | None = None
    ending: dict[str, int] | None = None
    """On how many `nodes` it ran, and how many were `missing` when the files were written."""
    run: str | None = None
    """The newest run that has rows."""
    ranks: int
    """Ranks of that run that have reported."""
    ledger: Ledger
    errors: dict[str, int]
    """Exceptions that the aggregator swallowed, by place."""
    verdict: str | None
    """The label of the verdict on that run."""
