"""
The shapes of what `Session` returns; that of `summary` is in `summary_shape`.

Some are structs, the others plain dicts. Names ending in `_ms` are milliseconds, `_s` seconds, `_ns`
nanoseconds since the epoch, `_pct` percent, `_at` moments (ISO 8601, UTC); a `share` is 0 to 1. What is not
known is None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypedDict

import msgspec

from traceml_ray.analysis.labels import Label, Pattern, ReasonKind


class Dropped(TypedDict):
    """Rows that were lost, by where."""

    agent: int
    relay: int
    aggregator: int


class Ledger(TypedDict):
    """Where every row is: `produced = stored + dropped + in_flight`."""

    produced: int
    stored: int
    in_flight: int
    dropped: Dropped


class RankLedger(Ledger):
    """The same of one rank, all of its attempts together."""

    unreported: int | None
    """What it produced after its last report: 0 after a regular end, None for a process that was killed."""


class WholeLedger(Ledger):
    """The same of the session, and of each rank of the run (by its number as text; `unknown`)."""

    per_rank: dict[str, RankLedger]
    folded: int
    """Rows that are stored as statistics only."""


class BundleInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What was kept of an incident."""

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
    """Bytes by name."""
    requests: list[str]
    """Ids of the requests that it answers."""


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the cluster, for as long as it is in it: one that comes back is another node."""

    node_id: str
    """Ray's."""
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
    """What is added to a time of its clock to have it on the aggregator's; None: not known."""
    clock_bound_ns: int | None
    """How far off that is at most."""
    errors: dict[str, int]
    """What its relay swallowed, by place."""


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
    """The run."""
    attempt: int
    pid: int
    source: str
    """Who said so: explicit, ray_train, torch.distributed, torchrun, openmpi, slurm, pmi, ray, single, v1."""
    name: str
    """Of the Ray actor, where it has one."""
    stored: int


class EarlierStart(TypedDict):
    """What came of one start of all ranks before the one that the numbers are of."""

    attempt: int
    steps: int
    """That all its ranks closed, and that no number but this is of."""
    seconds: float
    """From its first rank to its end."""


class RunInfo(TypedDict):
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
    """Of its verdict."""
    ledger: Ledger


class MachineInfo(TypedDict):
    """Something about a node, or one device of it, that is not as on other nodes or as before."""

    kind: str
    node: str
    device: int | None
    value: float | None
    usual: float | None
    """What it was compared with; None: it is an anomaly whatever is usual."""
    text: str


class StackInfo(TypedDict):
    """Where `ranks` stood when the job hung, all alike: the innermost call last."""

    ranks: list[int]
    text: str


class SuspectInfo(TypedDict):
    """One rank late out of one stage; ms per step."""

    stage: str
    rank: int
    node: str
    excess_ms: float
    """Its lasting excess over its peers, or the time by which it held them up where that is more."""
    share: float
    """Of the mean step."""
    gain_ms: float
    """What a step gets shorter when this one alone is fixed."""
    cost_pct: float
    """The same as a share of the time; where a finding names just this, the cost of that finding."""


class ExpertInfo(TypedDict):
    """The tokens of the experts of one router, of all ranks together."""

    router: str
    experts: int
    tokens: int
    most: int
    """The expert that had most,"""
    times_mean: float
    """and how many times the mean of all."""
    idle: int
    """Experts that had none."""


class FirstStepsInfo(TypedDict):
    """The first steps of a run, where they took much longer than the others: compilation, warm-up."""

    steps: int
    """How many they are."""
    ranks: list[int]
    """Those that worked longest in them; empty where all took about as long, or that is not known."""
    stage: str
    """Where most of that time is."""
    longest_s: float
    """What the longest rank worked in them."""
    others_s: float | None
    """The median of the ranks that are not named; None where none is."""
    cost_s: float
    """By how much they were longer than as many usual steps."""
    cost_pct: float
    """That, of the run."""
    why: str


class RoleInfo(TypedDict):
    """The ranks that have the same place in a pipeline and among tensor-parallel ranks."""

    role: str
    size: int
    """How many they are."""
    bubble: float | None
    """Share (0..1) of their time in which they wait for ranks of other roles; None: not seen."""


class ReasonInfo(TypedDict):
    """
    Why ranks are late. Shares (0..1) are of the variance of their work beside the other ranks of the
    same step.
    """

    what: ReasonKind
    """
    `tokens` or `samples` of the ranks' batches, `data` (loading and preparing), `between_steps`, `experts`,
    `pauses` (few steps hold most of it), `other`, or `unknown`.
    """
    share: float | None
    """The share that `what` explains, or that is in these stages."""
    tokens: float | None
    """The share that tokens explain,"""
    samples: float | None
    """and that samples explain; None: not known, or no more than chance explains."""
    compute: float | None
    """The share of the variance of `forward` and `backward` alone that tokens, else samples, explain."""
    in_compute: float | None
    """The share that is in `forward` and `backward`."""
    sizes_known: bool
    """The sizes of enough batches are known."""
    times: float | None
    """
    Of ranks that are named: how many times as many tokens, else samples, their batches have as those of the
    others. Then the shares are of what they work longer, in proportion to that.
    """
    steps: int
    """How many steps this is of."""
    unknown_ranks: list[int]
    """Ranks whose sizes of batches are not known."""


class VerdictInfo(TypedDict):
    """What is wrong, where, what it costs, and what to do. Labels: docs/concepts/verdicts.md."""

    label: Label
    stage: str | None
    """The first of `stages`."""
    stages: list[str]
    rank: int | None
    """The worst of `ranks`."""
    ranks: list[int]
    node: str | None
    nodes: list[str]
    confidence: str | None
    """low, medium or high; None where nothing is judged."""
    excess_pct: float | None
    """By how much `rank` is late out of `stage`, of the mean step; of `group_wide`, all ranks together."""
    gain_pct: float | None
    """What fixing `stage` alone saves; of what, says `about`."""
    cost_pct: float | None
    """What all that is named costs together; of what, says `about`."""
    cost_range_pct: list[float] | None
    """Between what `cost_pct` was in most windows (p10, p90)."""
    about: str
    """What `cost_pct` is a share of: `now`, the time since what it names began; `run`, the whole run's."""
    cost_s: float | None
    """`cost_pct` in seconds: what the run has waited for what is named here."""
    lost_s: float | None
    """What all that has been named in the run so far made it wait for."""
    elapsed_s: float | None
    """How long the run has been judged."""
    rank_hours_per_hour: float | None
    chronic: bool | None
    pattern: Pattern | None
    """A finding is late in most steps (`lasting`), now and then (`transient`), or in turn (`rotating`)."""
    host_bound: bool | None
    """On a device's clock: devices wait for their hosts. A gain is then at most as large as it says."""
    coverage: float | None
    """Share of the ranks that report."""
    from_step: int | None
    """Where it began, or the first step of the window if it began before that."""
    to_step: int | None
    window_steps: int
    mean_step_ms: float | None
    why: str
    next: str
    note: str
    """What is too brief to be named as yet, or named and not seen just now."""
    also: list[VerdictInfo]
    """Other findings, the costliest first, each with its own cost; null there: what is of one window."""
    last_step: int | None
    open_stage: str | None
    exit_reason: str | None
    span: str | None
    """The span that `rank` is late in, inside `stage`; of a hang, what is open."""
    began_ns: int | None
    """Of a hang: when the last row before it came."""
    lasted_s: float | None
    """Of a hang that is over."""
    stacks: list[StackInfo]
    machine: list[MachineInfo] | None
    """What else was anomalous then on the nodes that are named: evidence, not cause. None: not known."""
    z: float | None
    """By how many standard errors `rank` is late more often than it would be by chance."""
    at_most: bool
    """Fixing it may save less than `gain_pct`."""
    saving: str
    """The sentence of `why` on what fixing it saves; "" where it has none."""
    reason: ReasonInfo | None
    """Why ranks are late in turn, or by how much the batches of those that are named are larger."""


class EpisodeInfo(TypedDict):
    """What was named from one step to another, and what it cost in all."""

    label: Label
    stage: str | None
    stages: list[str]
    rank: int | None
    ranks: list[int]
    node: str | None
    nodes: list[str]
    pattern: Pattern
    confidence: str | None
    from_step: int
    to_step: int
    seconds: float
    cost_s: float
    """By how much it made the job longer."""
    rank_hours: float
    """That, on all ranks that exchange gradients with the late ones."""
    cost_pct: float | None
    """As a share of its time; of a run that is over, and in a summary, of the run's."""
    cost_range_pct: list[float] | None
    goes_on: bool
    why: str
    next: str


class TimedEpisode(EpisodeInfo, total=False):
    """
    An episode, and when it began; of a run that is over, and in a summary, also when it ended and the span
    that was late.
    """

    span: str | None
    started_at: str | None
    ended_at: str | None


class BriefFindings(TypedDict):
    """What came and went without being named."""

    count: int
    cost_s: float


class LiveVerdict(VerdictInfo):
    """The verdict of a session: of now, or of the whole run where it is over."""

    suspects: list[SuspectInfo]
    exposed_ms: list[float] | None
    """Exposed time of each stage, mean per step; the sum is `mean_step_ms`."""
    roles: list[RoleInfo]
    """Empty where all ranks do the same work, as far as is known."""
    episodes: list[TimedEpisode] | None
    """Of the run, the costliest first; None: not known, as where a running session is read from its file."""
    brief: BriefFindings | None


class Status(TypedDict, total=False):
    """How a session itself is doing; what its launcher did not say is not there."""

    session: str
    status: str
    """running, finished, failed or stopped."""
    started_at: int
    """ns since the epoch."""
    ended_at: int
    exit_code: int
    launcher: str
    command: str
    settings: dict[str, str]
    """Those that are not as by default."""
    world_size: int | None
    nnodes: int | None
    strategy: str
    ending: dict[str, int]
    """On how many `nodes` it ran, and how many were `missing` when the files were written."""
    run: str | None
    """The newest run that has rows."""
    ranks: int
    ledger: Ledger
    errors: dict[str, int]
    """Exceptions that the aggregator swallowed, by place."""
    verdict: str | None
    """The label."""


def to_builtins(answer: Any) -> Any:
    """
    Return any answer of traceml-ray in plain dicts, lists, numbers and strings, as `json.dumps` takes them.

    It takes what a method of `Session`, `analyze`, `compare` or `profile` returns, and whatever is in that.
    Objects become dicts of their fields, arrays lists, and keys that are numbers text. NaN, which JSON has
    not, becomes None: both mean that it is not known.

    Raises TypeError for what is no answer.
    """
    return _plain(msgspec.to_builtins(answer, str_keys=True, enc_hook=_of_array))


def _of_array(value: Any) -> Any:
    import numpy as np

    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no answer of traceml-ray")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
