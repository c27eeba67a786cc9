"""The struct of a summary (`summary.json`, `traceml_ray/summary/1`). Units are as in `results`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from traceml_ray.analysis.episodes import Brief
from traceml_ray.analysis.roles import RoleShare
from traceml_ray.analysis.step_stats import FirstSteps
from traceml_ray.analysis.uneven_work import ExpertLoad
from traceml_ray.analysis.verdict import Suspect
from traceml_ray.analysis.verdict_shapes import TimedEpisode, VerdictInfo
from traceml_ray.signals.finding import Finding
from traceml_ray.signals.layers.judge import Layers
from traceml_ray.signals.logged.judge import LoggedNumbers
from traceml_ray.signals.memory.shapes import MemoryNumbers
from traceml_ray.signals.output.last_lines import LastOutput
from traceml_ray.signals.sharding.judge import ShardingInfo
from traceml_ray.signals.throughput.judge import ThroughputStatistics
from traceml_ray.store.results import RunInfo, WholeLedger
from traceml_ray.wire.codec import ready


class SummaryNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the run."""

    node_rank: int | None
    """Number of the node in the job, from 0; None: not known."""
    node_id: str | None
    """Ray's id of the node; None: not known."""
    hostname: str
    """Hostname of the node."""
    lost: bool
    """Whether the node has left the cluster."""
    ranks: list[int]
    """Global ranks of the run on the node."""
    clock_offset_ns: int | None
    """Offset to add to a time of the node's clock to get the aggregator's time (ns); null: not known."""
    clock_bound_ns: int | None
    """Largest possible error of `clock_offset_ns` (ns)."""


class SummarySession(msgspec.Struct, frozen=True, kw_only=True):
    """The session of a summary, as described by its launcher."""

    id: str | None
    """Id of the session; null: not known."""
    status: str
    """Status of the session: running, finished, failed or stopped."""
    exit_code: int | None
    """Exit code of the session; null: not known."""
    started_at: str | None
    """When the session started (ISO 8601, UTC); null: not known."""
    ended_at: str | None
    """When the session ended (ISO 8601, UTC); null: it has not ended."""
    launcher: str | None
    """Launcher of the run; null: not known."""
    command: str | None
    """Command line of the training script; null: not known."""
    strategy: str | None
    """
    Parallelism mode: single, ddp, fsdp, fsdp2, hsdp, deepspeed, or the function that appears to exchange
    the gradients; with +tp and +pp.
    """
    world_size: int | None
    """Number of ranks in the job; null: not known."""
    silent_ranks: list[int]
    """Global ranks that never reported."""
    nnodes: int | None
    """Number of nodes in the job; null: not known."""
    nodes: list[SummaryNode]
    """The nodes that the run's ranks are on, then the nodes that the run lost before."""


class Covers(msgspec.Struct, frozen=True, kw_only=True):
    """The steps and rows that the statistics and the verdict over the run cover."""

    from_step: int | None
    """Number of the first step covered; null: there is none."""
    to_step: int | None
    """Number of the last step covered; null: there is none."""
    rows: int
    """Number of rows covered."""
    rows_pct: float
    """Share of the stored rows that `rows` is, in %."""
    error_pct: float
    """Largest error of medians and percentiles, in % of their value."""
    counted_pct: float
    """Share of the stored rows that the number of steps and their mean time cover, in %."""
    timed_pct: float
    """
    Share of the steps that have times, in %. Below 100 where a device's clock is read in only some of the
    steps.
    """


class StepStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """
    Step times of the run. `median_ms`, `p95_ms` and `mean_ms` are for the whole step. All other times are
    busy time, which is the step's time without waiting.
    """

    count: int
    """Number of steps of the rank that has the fewest."""
    exchanges: float | None = None
    """Exchanges of gradients per step, mean."""
    median_ms: float | None = None
    """Median time of a whole step (ms)."""
    p95_ms: float | None = None
    """95th percentile of the time of a whole step (ms)."""
    busy_median_ms: float | None = None
    """Median over the ranks of their median busy time per step (ms)."""
    busy_p95_ms: float | None = None
    """95th percentile of the busy time per step, over all ranks (ms)."""
    per_rank_median_ms: dict[str, float | None] = {}
    """Median busy time per step of each rank: rank number as text → ms. null: not known."""
    per_node_median_ms: dict[str, float] = {}
    """Busy time per step of each node, the median of its ranks' medians: node label → ms."""
    per_rank_gpu_idle_pct: dict[str, float | None] = {}
    """
    Share of its time in which a rank's device waited for its host: rank number as text → %. Empty without
    device clocks.
    """
    worst_rank: int | None = None
    """Rank with the largest median busy time; null: a single rank, or not known."""
    worst_node: str | None = None
    """Node with the largest busy time; null: a single node, or not known."""
    global_skew_pct: float | None = None
    """Skew of busy time over ranks: (worst − median) ÷ median, in %."""
    node_skew_pct: float | None = None
    """Skew of busy time over nodes: (slowest − fastest) ÷ fastest, in %."""
    judged: int
    """Number of steps that the statistics cover; the warm-up is left out."""
    mean_ms: float | None = None
    """Mean time of a whole step (ms)."""
    covers: Covers | None = None
    """The steps and rows that these statistics cover; null: there are none."""


class StageStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one stage, per step."""

    name: str
    """Name of the stage."""
    exposed_ms: float
    """Exposed time of the stage per step, mean (ms)."""
    exposed_share: float
    """Exposed time of the stage as a share of the mean step, from 0 to 1."""
    median_ms: float
    """Median over the ranks of their median time in the stage (ms)."""
    max_ms: float
    """Median time of `worst_rank` in the stage, the largest of all ranks (ms)."""
    worst_rank: int | None
    """Rank with the largest median time in the stage; null for waiting, which no rank causes for itself."""


class SpanStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a named span inside a stage, per step."""

    stage: str
    """Name of the stage that the span is in."""
    name: str
    """Name of the span."""
    median_ms: float
    """Median over the ranks of the span's mean time per step (ms). It is 0 for a rank without the span."""
    max_ms: float
    """Mean time of the span per step on `worst_rank`, the largest of all ranks (ms)."""
    worst_rank: int
    """Rank with the largest mean time in the span."""
    share: float | None
    """Share of the time of `worst_rank` in the stage that the span takes, from 0 to 1; null: not known."""
    times_per_step: float
    """Number of times that `worst_rank` enters the span per step, mean."""
    bytes: float | None
    """Bytes that the span handles per step on `worst_rank`, mean; 0: not known."""


class BaselineStage(msgspec.Struct, frozen=True, kw_only=True):
    """Time of one stage in a healthy step."""

    name: str
    """Name of the stage."""
    exposed_ms: float
    """Exposed time of the stage per step (ms)."""
    mad_ms: float
    """Median absolute deviation of the exposed time between windows of steps (ms)."""


class BaselineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Time that a healthy step of the run takes."""

    from_step: int | None
    """First step that the baseline was learned from; null: it was learned in another run."""
    to_step: int | None
    """Last step that the baseline was learned from; null: it was learned in another run."""
    steps: int
    """Number of steps that the baseline was learned from."""
    source: str | None
    """Session or earlier attempt that the baseline comes from; null if it was learned in this run."""
    step_ms: float
    """Time of a healthy step (ms)."""
    stages: list[BaselineStage]
    """Time of each stage in a healthy step."""


class SummaryRank(msgspec.Struct, frozen=True, kw_only=True):
    """How far a rank came and how it ended."""

    name: str | None
    """Name of the rank's Ray actor; null: it has none."""
    node: str | None
    """Label of the rank's node; null: not known."""
    pid: int | None
    """Process id on the node; null: not known."""
    attempt: int | None
    """Number of the launcher's attempt; null: not known."""
    processes: int
    """Number of processes of the run that had this rank."""
    last_step: int | None
    """Newest step that the rank sent a row of; null: no step."""
    open_stage: str | None
    """Stage that the rank was in at its last report; null: it ended regularly, or it is not known."""
    last_seen: str | None
    """When the rank last reported (ISO 8601, UTC)."""
    ended: str | None
    """How the rank ended: died or finished; null: neither is known."""
    exit_code: int | None
    """Exit code that the launcher saw; negative: the number of the signal. null: not known."""
    exit_reason: str | None
    """Reason of the rank's death; null: it did not die."""
    missing: dict[str, str]
    """Attributes that could not be patched: name → reason."""
    errors: dict[str, int]
    """Number of exceptions of the monitor that were swallowed in the rank: place in the code → count."""
    role: str | None
    """
    Place of the rank in a pipeline and among tensor-parallel ranks, such as "pp=1 tp=0". null: all ranks
    do the same work.
    """
    placement: dict[str, Any]
    """
    Position of the rank in the job: by dimension of its device `mesh` its coordinate and the size; the
    pipeline `stages` that it holds; its name as a `worker` of torch.distributed.rpc.
    """
    serves: bool
    """Whether the rank only serves others over RPC. Such a rank takes no steps, and is not missing."""


class ProfileFound(msgspec.Struct, frozen=True, kw_only=True):
    """A profile of the run, without the result of each rank."""

    id: str
    """Id of the profile. Its folder is `profiles/<id>` in the session's folder."""
    time: str
    """When the profile was requested (ISO 8601, UTC)."""
    why: str
    """One sentence that says who requested the profile, or which verdict did."""
    by_itself: bool
    """Whether a verdict started the profile, not a person."""
    first_step: int | None
    """First recorded step; null: the recorded ranks have no steps."""
    n_steps: int
    """Number of recorded steps. Without steps: number of recorded seconds."""
    suspect: int | None
    """Rank named by the verdict that started the profile; null: none."""
    median: int | None
    """Rank that the suspect is compared with; null: none."""
    stage: str | None
    """Stage in which the suspect is late; null: none."""
    found: list[str]
    """Sentences on what the suspect does more of than the median, operation by operation."""
    ranks: list[int]
    """Global ranks whose traces are stored."""


class System(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled values of the nodes and their GPUs."""

    nodes: list[dict[str, Any]]
    """
    One dict for each node: `node_id`, `hostname`, median and peak of each sampled value, and `gpus` with
    the same for each GPU.
    """


class EventInfo(msgspec.Struct, frozen=True, kw_only=True):
    """
    An event of the run or of a node, such as a restart, a death, a note or an exception that was
    swallowed.
    """

    time: str | None
    """When the event happened (ISO 8601, UTC); null: not known."""
    kind: str
    """Kind of the event, such as `note`, `exception` or `node_lost`."""
    rank: int | None
    """Global rank that the event is about; null: none, or not known."""
    node: str | None
    """Label of the node that the event is about; null: none, or not known."""
    step: int | None
    """Step in which the event happened; null: not known."""
    stage: str | None
    """Stage in which the event happened; null: not known."""
    message: str
    """Text that describes the event, at most 2,000 characters."""
    data: dict[str, Any]
    """Further values by name. The names depend on `kind`."""


class RankOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of the monitor. Each figure is the largest of all ranks, by itself."""

    of: str
    """Which ranks the figures are about: `worst rank`."""
    training_thread_us_per_step: float | None
    """Time that the monitor took on the training thread per step (µs); null: not known."""
    agent_cpu_pct: float | None
    """CPU time of the monitor's agent, in % of one core; null: not known."""
    bytes_per_step: float | None
    """Bytes that the rank sent to the monitor per step; null: not known."""


Tone = Literal["critical", "warning", "notice", "unsure", "good"]


class Conclusion(msgspec.Struct, frozen=True):
    """The most severe finding of a run. Every page and report shows it first."""

    subject: str
    """Signal that the finding is about. `steps`: the finding is the verdict."""
    tone: Tone
    """Severity of the finding."""
    label: str
    """Kind of the finding in words: the label of the verdict, or for example "memory creep"."""
    headline: str
    """
    Kind of the finding and who is concerned, such as "straggler: rank 5 (node-1) in data" or "memory
    creep: rank 2 (node-0)".
    """
    why: str
    """One sentence that gives the reason, with its numbers."""
    next: str
    """What to do next."""
    rank: int | None
    """Global rank that the finding names first; null: it names no rank."""
    key: str | None = None
    """Key of the finding in `findings`; null: the verdict has found nothing."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`summary.json`: a run of a session from its first step to its last."""

    schema: str
    """Name and version of the format: `traceml_ray/summary/1`."""
    session: SummarySession
    """The session that the run belongs to."""
    run: str | None
    """Id of the run; null: the session has no run."""
    runs: list[RunInfo]
    """All runs of the session."""
    steps: StepStatistics
    """Statistics of the run's steps."""
    stages: list[StageStatistics]
    """Statistics of each stage."""
    throughput: ThroughputStatistics
    """Throughput of the run."""
    first_steps: FirstSteps | None
    """
    The first steps of a run, which no other number covers. null unless the run is over and they cost a
    tenth of it, and 2 s.
    """
    spans: list[SpanStatistics]
    """Statistics of the named spans, the longest on any rank first."""
    conclusion: Conclusion
    """The most severe finding of the run."""
    verdict: VerdictInfo
    """The verdict on the run."""
    findings: list[Finding]
    """All findings of the run, in the order of `Session.findings`, at most a hundred."""
    suspects: list[Suspect]
    """Ranks that the verdict on the steps suspects."""
    roles: list[RoleShare]
    """Shares of each role. Empty if all ranks do the same work."""
    experts: list[ExpertLoad]
    """Loads of the watched routers, the least even first."""
    verdicts: list[VerdictInfo]
    """Every change of the verdict, in order of steps."""
    episodes: list[TimedEpisode]
    """Episodes of the run, the costliest first."""
    brief: Brief
    """Number and cost of the findings that ended before they were named."""
    baseline: BaselineInfo | None
    """Time of a healthy step; null: no baseline is known."""
    ranks: dict[str, SummaryRank]
    """Each rank: rank number as text → how far it came and how it ended."""
    output: list[LastOutput]
    """Last printed lines of the ranks that died or hang, the first cause first."""
    memory: MemoryNumbers
    """Memory of the ranks."""
    sharding: ShardingInfo | None
    """Sharding of the models; null if FSDP2 divides no model."""
    layers: Layers
    """Measurements of each layer, as in `Session.layers`."""
    profiles: list[ProfileFound]
    """Profiles of the run, the oldest first."""
    system: System
    """Sampled values of the nodes and their GPUs."""
    events: list[EventInfo]
    """The newest events, at most 1,000."""
    ledger: WholeLedger
    """Where every row of the session and of each rank is."""
    overhead: RankOverhead
    """Cost of the monitor."""
    logged: list[LoggedNumbers] = []
    """Numbers that the script has logged, in the order in which their names were first logged."""
    more: dict[str, Any] = {}
    """
    Blocks of signals that have no field here, for example of a newer version: name → plain values. In
    `summary.json` they are at the top level, beside the other blocks.
    """


def summary_of(every: Mapping[str, Any]) -> Summary:
    """
    Return the summary for the contents `every` of `summary.json`. Blocks that this version does not know
    go to `more`. Raises msgspec.ValidationError if a block is missing, as in a summary of an older
    version.
    """
    summary = msgspec.convert(
        {name: every[name] for name in every if name != "more"}, ready(Summary), str_keys=True
    )
    unknown = {name: block for name, block in every.items() if name not in Summary.__struct_fields__}
    return msgspec.structs.replace(summary, more=unknown) if unknown else summary


def plain(summary: Summary) -> dict[str, Any]:
    """Return a summary as the dict that `summary.json` holds."""
    blocks: dict[str, Any] = msgspec.to_builtins(summary, str_keys=True)
    more: dict[str, Any] = blocks.pop("more")
    return {**blocks, **more}


def to_builtins(answer: Any) -> Any:
    """
    Return any answer of traceml-ray as plain dicts, lists, numbers and strings, ready for `json.dumps`.

    `answer` is anything that a method of `Session`, `analyze`, `compare` or `profile` returns, or a part of
    it. Objects become dicts of their fields, arrays become lists, and numeric keys become text. NaN does not
    exist in JSON and becomes None: both mean that the value is not known.

    Raises TypeError for anything else.
    """
    if isinstance(answer, Summary):
        answer = plain(answer)
    return _plain(msgspec.to_builtins(answer, str_keys=True, enc_hook=_of_array))


def _of_array(value: Any) -> Any:
    import numpy as np

    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not an answer of traceml-ray")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
