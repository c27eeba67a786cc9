"""
The structs that `Session` returns, except the one of `summary`, which is in `summary_shape`.

`traceml_ray.to_builtins` converts them to dicts. Names ending in `_ms` are milliseconds, `_s` seconds, `_ns`
nanoseconds since the epoch, `_pct` percent, `_at` moments (ISO 8601, UTC); a `share` is 0 to 1. What is not
known is None, never 0.
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
    """Rows that the agents in the training processes lost."""
    relay: int
    """Rows that the relays of the nodes lost."""
    aggregator: int
    """Rows that the aggregator lost."""

    @property
    def total(self) -> int:
        """Number of rows lost in all places together."""
        return self.agent + self.relay + self.aggregator

    @property
    def by_place(self) -> dict[str, int]:
        """Number of rows lost by each place that lost any: place → count."""
        return {name: count for name, count in msgspec.structs.asdict(self).items() if count}


class SinkState(msgspec.Struct, frozen=True, kw_only=True):
    """State of one sink: a place outside of the session, such as Prometheus, that it is reported to."""

    name: str
    """Name of the sink, such as `prometheus`."""
    where: str
    """URL or address that it reports to, or that it is scraped at. It holds no secret."""
    sent: int = 0
    """Number of reports that were delivered, or of scrapes that were answered."""
    failed: int = 0
    """Number of attempts that failed."""
    dropped: int = 0
    """Number of reports that were dropped because a newer one replaced them."""
    error: str = ""
    """The newest failure; "" if the last attempt succeeded."""


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Where every row is. `produced = stored + dropped + in_flight`, in rows."""

    produced: int
    """Number of rows that the ranks have produced."""
    stored: int
    """Number of rows that are stored in the session file."""
    in_flight: int
    """Number of rows that have been produced, and have neither arrived nor been dropped yet."""
    dropped: Dropped
    """Number of rows that were lost, by place."""


class RankLedger(Ledger, frozen=True, kw_only=True):
    """Where every row of one rank is, all of its attempts together."""

    unreported: int | None
    """
    Number of rows produced after the rank's last report. 0 after a regular end; None for a process that
    was killed.
    """


class WholeLedger(Ledger, frozen=True, kw_only=True):
    """Where every row of the session is, and where those of each rank of one run are."""

    per_rank: dict[str, RankLedger]
    """
    The ledger of each rank of the run: rank number as text → ledger. `unknown`: processes without a known
    rank.
    """
    folded: int
    """Number of stored rows that are kept as statistics only."""


class BundleInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle: the files that were kept of one incident."""

    name: str
    """Name of the bundle's folder."""
    path: str
    """Path of the bundle's folder, on the aggregator's node. `traceml-ray analyze` and `report` read it."""
    reason: str
    """Kind of the incident: oom, exception, killed, terminated, hang or request."""
    time: str
    """When the incident began (ISO 8601, UTC)."""
    why: str
    """One sentence that says which rank is concerned, and why the bundle was made."""
    run: str | None
    """Id of the run; None: not known."""
    rank: int | None
    """Global rank that is named first; None: no rank is named."""
    node: str | None
    """Label of that rank's node; None: not known."""
    step: int | None
    """Number of the step of the incident; None: not known."""
    bytes: int
    """Size of all files of the bundle together (bytes)."""
    files: dict[str, int]
    """Size of each file of the bundle: file name → bytes."""
    requests: list[str]
    """Ids of the requests for a bundle that this bundle answers."""


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """
    A node of the cluster, from its joining to its leaving. A node that comes back is listed as another
    node.
    """

    node_id: str
    """Ray's id of the node."""
    hostname: str
    """Hostname of the node."""
    address: str
    """Network address of the node."""
    label: str
    """
    Name by which pages and reports show the node: the hostname, with the address where hostnames repeat.
    """
    alive: bool
    """Whether the node is still in the cluster."""
    ranks: list[int]
    """Global ranks of the newest run that were last seen on the node."""
    last_seen: str | None
    """When the node's relay last reported (ISO 8601, UTC); None: never."""
    last_seen_ns: int | None
    """When the node's relay last reported (ns since the epoch); None: never."""
    lost_at: str | None
    """When the node was found to have left the cluster (ISO 8601, UTC); None: it has not left."""
    lost_ns: int | None
    """When the node was found to have left the cluster (ns since the epoch); None: it has not left."""
    clock_offset_ns: int | None
    """Offset to add to a time of the node's clock to get the aggregator's time (ns); None: not known."""
    clock_bound_ns: int | None
    """Largest possible error of `clock_offset_ns` (ns)."""
    errors: dict[str, int]
    """Number of exceptions that the node's relay swallowed: place in the code → count."""


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of one rank's process, with the fields of `RankIdentity`, and its number of stored rows."""

    global_rank: int
    """Rank among all processes of the job, from 0."""
    local_rank: int
    """Rank among the processes on the same node, from 0."""
    node_rank: int
    """Number of the node in the job, from 0."""
    world_size: int
    """Number of ranks in the job."""
    local_world_size: int
    """Number of ranks on the node."""
    nnodes: int
    """Number of nodes in the job."""
    hostname: str
    """Hostname of the node."""
    node_id: str | None
    """Ray's id of the node; None: not known."""
    job_id: str
    """Id of the run that the process belongs to."""
    attempt: int
    """Number of the launcher's attempt. A restart of the job is another attempt."""
    pid: int
    """Process id on the node."""
    source: str
    """
    Source of the rank numbers: explicit, ray_train, torch.distributed, torchrun, openmpi, slurm, pmi,
    ray, single, v1.
    """
    name: str
    """Name of the process's Ray actor; "" if it has none."""
    stored: int
    """Number of rows of the process that are stored."""


class EarlierStart(msgspec.Struct, frozen=True):
    """An earlier start of all ranks of a run. The run's numbers cover a later start, not this one."""

    attempt: int
    """Number of the launcher's attempt; -1: not known."""
    steps: int
    """Number of steps that all its ranks completed. No other number of the run counts them."""
    seconds: float
    """Time from the first sight of its first rank to its end (s)."""


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a session: a `fit()`, a launch, or a group of actors."""

    id: str
    """Id of the run."""
    name: str
    """Name of the run; its id if it has no name."""
    launcher: str | None
    """Launcher of the run; None: not known."""
    status: str
    """Status of the run: running, ended, finished, failed or stopped."""
    started_at: str | None
    """When the run started (ISO 8601, UTC); None: not known."""
    ended_at: str | None
    """When the run ended (ISO 8601, UTC); None: it has not ended, or it is not known."""
    world_size: int | None
    """Number of ranks in the job; None: not known."""
    nnodes: int | None
    """Number of nodes in the job; None: not known."""
    attempts: int
    """Number of attempts that have reported."""
    earlier: list[EarlierStart]
    """Earlier starts of the run that had steps, the oldest first. The run's numbers do not cover them."""
    label: Label | None
    """Label of the verdict on the run; None: there is no verdict."""
    ledger: Ledger
    """Where every row of the run is, in rows."""


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
    """Kind of the event, such as `note`, `exception` or `node_lost`."""
    t_ns: int
    """When it happened (ns since the epoch, on the aggregator's clock)."""
    step: int | None
    """Step in which it happened; None: not known."""
    stage: int | None
    """Index of the stage in which it happened, in `stages.STAGES`; None: not known."""
    message: str
    """Text that describes the event; "" if it has none."""
    data: dict[str, Any]
    """Further values by name; the names depend on `kind`."""


class LiveVerdict(VerdictInfo, frozen=True, kw_only=True):
    """
    The verdict of a session. While the session runs it is the current verdict; after the end it is the
    verdict on the whole run.
    """

    suspects: list[Suspect]
    """Ranks that may be the cause, with their excess time."""
    exposed_ms: list[float] | None
    """
    Exposed time of each stage, mean per step (ms). The values add up to `mean_step_ms`. None: not known.
    """
    roles: list[RoleShare]
    """Shares of each role. Empty if all ranks are known, or assumed, to do the same work."""
    episodes: list[TimedEpisode] | None
    """
    Episodes of the run, the costliest first. None: not known, for example when a running session is read
    from its file.
    """
    brief: Brief | None
    """Number and cost of the findings that ended before they were named; None: not known."""


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
    """State of the session itself. A value that the launcher did not give is null."""

    session: str | None = None
    """Id of the session."""
    status: str = "running"
    """Status of the session: running, finished, failed or stopped."""
    started_at: int | None = None
    """When the session started (ns since the epoch)."""
    ended_at: int | None = None
    """When the session ended (ns since the epoch)."""
    exit_code: int | None = None
    """Exit code of the session."""
    launcher: str | None = None
    """Launcher of the session."""
    command: str | None = None
    """Command line of the training script."""
    settings: dict[str, str] | None = None
    """Settings that differ from the defaults: name → value as text."""
    world_size: int | None = None
    """Number of ranks that the launcher started."""
    nnodes: int | None = None
    """Number of nodes that the launcher used."""
    strategy: str | None = None
    """Parallelism mode of the job, as in `SummarySession.strategy`."""
    ending: dict[str, int] | None = None
    """
    End of the session: the number of `nodes` that it ran on, and how many of these were `missing` when
    the files were written.
    """
    run: str | None = None
    """Id of the newest run that has rows."""
    ranks: int
    """Number of ranks of that run that have reported."""
    ledger: Ledger
    """Where every row of the session is, in rows."""
    errors: dict[str, int]
    """Number of exceptions that the aggregator swallowed: place in the code → count."""
    sinks: list[SinkState] = []
    """State of each sink that the session is reported to."""
    verdict: str | None
    """Label of the verdict on that run; None: there is no verdict."""
