"""The shape of a summary (`summary.json`, `traceml_ray/summary/1`); units as in `results`."""

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
    """A node of a summary, by the number that its ranks have for it."""

    node_rank: int | None
    node_id: str | None
    hostname: str
    lost: bool
    ranks: list[int]
    clock_offset_ns: int | None
    """What is added to a time of the node's clock to have it on the aggregator's (ns); null: not known."""
    clock_bound_ns: int | None
    """Largest possible error of `clock_offset_ns` (ns)."""


class SummarySession(msgspec.Struct, frozen=True, kw_only=True):
    """The session of a summary, as described by its launcher."""

    id: str | None
    status: str
    exit_code: int | None
    started_at: str | None
    ended_at: str | None
    launcher: str | None
    command: str | None
    strategy: str | None
    """
    The parallelism mode: single, ddp, fsdp, fsdp2, hsdp, deepspeed, or the function that gradients are
    inferred to be exchanged by; with +tp and +pp.
    """
    world_size: int | None
    silent_ranks: list[int]
    """Ranks that never reported."""
    nnodes: int | None
    nodes: list[SummaryNode]


class Covers(msgspec.Struct, frozen=True, kw_only=True):
    """The steps that the statistics and the verdict over the run cover."""

    from_step: int | None
    to_step: int | None
    rows: int
    rows_pct: float
    error_pct: float
    """Largest error of medians and percentiles, in % of their value."""
    counted_pct: float
    """Share of the rows that the number of steps and their mean cover."""
    timed_pct: float
    """Share of the steps that have times: below 100 where a device's clock is read in some of them only."""


class StepStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """
    Step times of the run. `median_ms` and `p95_ms` are for the whole step; all other times are busy time
    (without waiting). Skew: (worst − median) ÷ median over ranks, (slowest − fastest) ÷ fastest over nodes.
    """

    count: int
    exchanges: float | None = None
    """Exchanges of gradients in a step, mean."""
    median_ms: float | None = None
    p95_ms: float | None = None
    busy_median_ms: float | None = None
    busy_p95_ms: float | None = None
    per_rank_median_ms: dict[str, float | None] = {}
    per_node_median_ms: dict[str, float] = {}
    per_rank_gpu_idle_pct: dict[str, float | None] = {}
    """Share of its time in which a rank's device waited for its host; empty without device clocks."""
    worst_rank: int | None = None
    worst_node: str | None = None
    global_skew_pct: float | None = None
    node_skew_pct: float | None = None
    judged: int
    mean_ms: float | None = None
    covers: Covers | None = None


class StageStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One stage, per step."""

    name: str
    exposed_ms: float
    exposed_share: float
    median_ms: float
    """Median over the ranks of their median time in the stage (ms)."""
    max_ms: float
    """Largest median time of a rank in the stage (ms): that of `worst_rank`."""
    worst_rank: int | None


class SpanStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A named span inside a stage, per step."""

    stage: str
    name: str
    median_ms: float
    max_ms: float
    worst_rank: int
    share: float | None
    """Share of the time of `worst_rank` in the stage that the span takes, from 0 to 1."""
    times_per_step: float
    bytes: float | None


class BaselineStage(msgspec.Struct, frozen=True, kw_only=True):
    """A stage of the baseline."""

    name: str
    exposed_ms: float
    mad_ms: float


class BaselineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Time of a healthy step of the run."""

    from_step: int | None
    to_step: int | None
    steps: int
    source: str | None
    """Session that the baseline was taken from; None if it was learned in this run."""
    step_ms: float
    stages: list[BaselineStage]


class SummaryRank(msgspec.Struct, frozen=True, kw_only=True):
    """How far a rank came and how it ended."""

    name: str | None
    node: str | None
    pid: int | None
    attempt: int | None
    processes: int
    last_step: int | None
    open_stage: str | None
    last_seen: str | None
    ended: str | None
    """died or finished."""
    exit_code: int | None
    exit_reason: str | None
    missing: dict[str, str]
    """Attributes that could not be patched, each with the reason."""
    errors: dict[str, int]
    role: str | None
    """Its place in a pipeline and among tensor-parallel ranks: "pp=1 tp=0"; None: all do the same work."""
    placement: dict[str, Any]
    """
    By dimension of its device `mesh` its coordinate and the size; the `stages` of a pipeline that it has; its
    name as a `worker` of torch.distributed.rpc.
    """
    serves: bool
    """It only serves others over RPC: it takes no steps, and is not missing."""


class ProfileFound(msgspec.Struct, frozen=True, kw_only=True):
    """A profile of the run, without what became of each rank."""

    id: str
    """Its folder is `profiles/<id>` in the session's folder."""
    time: str
    why: str
    by_itself: bool
    """No person has asked for it."""
    first_step: int | None
    n_steps: int
    suspect: int | None
    median: int | None
    """The rank that it is compared with."""
    stage: str | None
    found: list[str]
    """Sentences on what the suspect does more of, operation by operation."""
    ranks: list[int]
    """Whose traces are there."""


class System(msgspec.Struct, frozen=True, kw_only=True):
    """Each node (`node_id`, `hostname`) with median and peak of each sampled value, and `gpus`."""

    nodes: list[dict[str, Any]]


class EventInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened: a restart, a death, a note, an exception that was swallowed."""

    time: str | None
    kind: str
    rank: int | None
    node: str | None
    step: int | None
    stage: str | None
    message: str
    data: dict[str, Any]


class RankOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """What the monitor cost the rank that it cost most."""

    of: str
    training_thread_us_per_step: float | None
    agent_cpu_pct: float | None
    bytes_per_step: float | None


Tone = Literal["critical", "warning", "notice", "unsure", "good"]


class Conclusion(msgspec.Struct, frozen=True):
    """The most severe finding of a run, which people read first."""

    subject: str
    """The signal that it is about; `steps`: it is the verdict."""
    tone: Tone
    label: str
    """Its kind in words: the label of the verdict, or "memory creep"."""
    headline: str
    """The kind, and who: "straggler: rank 5 (node-1) in data", "memory creep: rank 2 (node-0)"."""
    why: str
    next: str
    rank: int | None
    key: str | None = None
    """Key of that finding; None: the verdict has found nothing."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`summary.json`: a run of a session from its first step to its last."""

    schema: str
    session: SummarySession
    run: str | None
    runs: list[RunInfo]
    steps: StepStatistics
    stages: list[StageStatistics]
    throughput: ThroughputStatistics
    first_steps: FirstSteps | None
    """Where they took a tenth of a run that is over, and 2 s; no other number has them."""
    spans: list[SpanStatistics]
    conclusion: Conclusion
    verdict: VerdictInfo
    """On its steps."""
    findings: list[Finding]
    """All that was found, in order, as `Session.findings` has it; a hundred at most."""
    suspects: list[Suspect]
    roles: list[RoleShare]
    """Shares of each role; empty if all ranks do the same work."""
    experts: list[ExpertLoad]
    """Loads of the watched routers, the least even first."""
    verdicts: list[VerdictInfo]
    """Every change of verdict."""
    episodes: list[TimedEpisode]
    """The costliest first."""
    brief: Brief
    baseline: BaselineInfo | None
    ranks: dict[str, SummaryRank]
    output: list[LastOutput]
    """What ranks that died or hang printed last, the first cause first."""
    memory: MemoryNumbers
    sharding: ShardingInfo | None
    """Null where no model is divided by FSDP2."""
    layers: Layers
    """Measurements of each layer, as in `Session.layers`."""
    profiles: list[ProfileFound]
    """The oldest first."""
    system: System
    events: list[EventInfo]
    """The newest thousand."""
    ledger: WholeLedger
    overhead: RankOverhead
    logged: list[LoggedNumbers] = []
    """What the script has logged, in the order in which names were first logged."""
    more: dict[str, Any] = {}
    """
    Blocks of signals without a field here, as in a newer version, as plain values by name. `summary.json`
    has them beside the others.
    """


def summary_of(every: Mapping[str, Any]) -> Summary:
    """
    Return the summary of what `summary.json` holds, with the blocks that this version does not know. Raises
    msgspec.ValidationError where a block is missing, as in a summary of an older version.
    """
    summary = msgspec.convert(
        {name: every[name] for name in every if name != "more"}, ready(Summary), str_keys=True
    )
    unknown = {name: block for name, block in every.items() if name not in Summary.__struct_fields__}
    return msgspec.structs.replace(summary, more=unknown) if unknown else summary


def plain(summary: Summary) -> dict[str, Any]:
    """Return a summary as `summary.json` holds it."""
    blocks: dict[str, Any] = msgspec.to_builtins(summary, str_keys=True)
    more: dict[str, Any] = blocks.pop("more")
    return {**blocks, **more}


def to_builtins(answer: Any) -> Any:
    """
    Return any answer of traceml-ray in plain dicts, lists, numbers and strings, as `json.dumps` takes them.

    It takes anything that a method of `Session`, `analyze`, `compare` or `profile` returns, and parts of it.
    Objects become dicts of their fields, arrays lists, and keys that are numbers text. NaN, which JSON has
    not, becomes None: both mean that it is not known.

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
