"""The shapes of what a session answers about its steps; what each number is, `analysis.step_numbers` says."""

from __future__ import annotations

from typing import Any, TypedDict

import msgspec
import numpy as np

from traceml_ray.analysis.roles import RoleShare
from traceml_ray.analysis.shapes import NodeTimes
from traceml_ray.analysis.verdict import Suspect
from traceml_ray.store.results import VerdictInfo

Array = np.ndarray[Any, np.dtype[Any]]


class StepTimes(TypedDict, total=False):
    """The numbers of a run; before its first step, those down to `nodes`."""

    version: int
    last_step: int | None
    world: int
    ranks: list[int]
    steps: int
    of_all: bool
    all_read: bool
    timed_pct: float
    whole: bool
    wall_s: float | None
    productive_pct: float | None
    busy_ms: Array
    """(R,), of each of `ranks`;"""
    gpu_idle_pct: Array
    """(R,), of its device's time, how much it waited for its host; NaN without a device clock."""
    nodes: dict[str, NodeTimes]
    median_ms: float
    p95_ms: float
    steps_per_s: float
    worst_rank: int | None
    worst_over: float
    skew_pct: float
    """By how much the worst rank is above the median one; NaN of one rank."""
    waiting_pct: float
    """Of all ranks' time, how much they waited."""
    stages: dict[str, float]


class StepColumns(TypedDict, total=False):
    """
    What is drawn step by step, C columns: all, with what their lines are (`by`, `ranks`, `nodes`), or those
    from step `since` on. `z` is (lines, C).
    """

    token: list[int | str]
    since: int | None
    first: Array
    last: Array
    exposed: Array
    """(C, 6) ms."""
    median_ms: Array
    p10_ms: Array
    p90_ms: Array
    worst_ms: Array
    worst_rank: Array
    global_pct: Array
    node_pct: Array
    worst_over: Array
    step_ms: Array
    steps_per_s: Array
    waiting_pct: Array
    z: Array
    by: str
    ranks: list[int]
    nodes: list[str]


class BusyTimes(TypedDict):
    """Busy time of `ranks` in the newest K steps: (m, K) ms."""

    ranks: list[int]
    busy_ms: Array


class RankSteps(TypedDict, total=False):
    """The stages of a rank in K columns; only `steps`, the last of each, and that empty, without any."""

    steps: Array
    stages: Array
    """(K, 6) ms,"""
    median: Array
    """of the median rank."""
    host: Array | None
    """(K, 6) ms, where `stages` is on the device's clock: the same on the host's. NaN: no longer known."""
    mean: dict[str, float]


class StepSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A named span of one rank, in a step that it was summed up over with others."""

    rank: int
    """Global rank of the process that the span was measured in."""
    stage: str
    """Name of the stage that the span is inside of."""
    name: str
    """Name of the span, as the training script or a patch gave it."""
    ms: float
    """Mean time of the span in a step, over the steps `from_step` to `to_step` (ms)."""
    from_step: int
    """First step of the sum that the mean is of."""
    to_step: int
    """Last step of the sum that the mean is of."""


class StepSample(TypedDict):
    """
    What a step of a run takes, and how far that would differ by chance: see `analysis.comparison`. Of the
    steps beyond the warm-up, C columns of `per` steps each; `numbers` (Q) is empty where they are too few.
    """

    world: int
    ranks: list[int]
    nodes: list[str]
    columns: int
    per: int
    first: int | None
    last: int | None
    block: int
    """Columns that are drawn together."""
    numbers: dict[str, float]
    """Mean ms of `step` and of each stage, `median step`, `p95 step` (ms), `skew` (%); NaN is not known."""
    replicates: Array
    """(B, Q), of `numbers` in that order;"""
    drift: Array
    """(Q,), by how much the next run may differ (a standard deviation), see `analysis.comparison.drift`."""
    stages: Array
    """(R, 6) mean ms of each rank,"""
    errors: Array
    """(R, 6), and its standard error, as that of one run among others."""
    flags: int
    """Of `stages.FLAG_*`, those that most rows have."""


class OneStep(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """
    One step of all ranks that have it, in ms since each rank left the exchange before. Ranks leave it
    together, so this is one clock for all of them; the clocks of nodes are not compared.
    """

    step: int
    """Number of the step."""
    first: int | None
    """First step whose rows are kept one by one; None if there is none yet."""
    last: int | None
    """Last step whose rows are kept one by one; None if there is none yet."""
    ranks: list[int]
    """Ranks that have this step: R numbers, ascending."""
    of: list[int]
    """Rank of each of the n rows; a rank has one row for each exchange of the step, in order."""
    stages: Array
    """Time of each row in each stage: (n, 6) ms."""
    took_ms: float | None
    """Time of the rank that needed longest (ms); None if no rank has the step."""
    arrived: Array
    """When each of `ranks` came to its last exchange: (R,) ms; NaN if backward and waiting are one stage."""
    late: Array
    """How long after the median rank each of `ranks` came to its last exchange: (R,) ms; NaN: not known."""
    device: list[int]
    """Ranks whose rows are on the clock of their device, not of their host."""
    spans: list[StepSpan]
    """Spans of the step, the longest first; in a large job, only of the ranks that came last."""


class SpanTimes(msgspec.Struct, frozen=True, kw_only=True):
    """A named span of a rank, per step."""

    stage: str
    """Name of the stage that the span is inside of."""
    name: str
    """Name of the span, as the training script or a patch gave it."""
    ms: float
    """Mean time of the span in a step of this rank (ms)."""
    median_ms: float | None
    """Median of the same over all ranks (ms); None in a large job, where only one rank is read."""
    times_per_step: float
    """Mean number of times that the span was entered in a step."""
    bytes: float | None
    """Mean size of what was moved each time (bytes); None if the span moves nothing that is counted."""


class VerdictChange(VerdictInfo, frozen=True, kw_only=True):
    """A verdict as it was judged live, and since when it was."""

    t_ns: int
    suspects: list[Suspect]
    exposed_ms: list[float] | None
    roles: list[RoleShare]


class DeathInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How the process of a rank died."""

    rank: int
    """Global rank of the process."""
    t_ns: int
    """When it died (ns since the epoch, on the aggregator's clock)."""
    exact: bool
    """Whether `t_ns` is known to within two seconds."""
    step: int | None
    """Last step that it closed, as last reported; it may have died in a later one."""
    stage: str | None
    """Stage that it was in, as last reported."""
    how: str
    """What happened in words: its exception, "killed by SIGKILL", "its node was lost"."""
    message: str
    """Exception in full; "" if it raised none."""
    traceback: str | None
    """Last calls before the exception, as Python prints them."""
    first: bool
    """Whether no earlier death explains it. Several ranks are first if clocks cannot tell which one was."""


class EventRow(TypedDict):
    """An event as it is stored; times are ns."""

    id: int
    rank: int | None
    process: int | None
    node_id: str | None
    run: str | None
    kind: str
    t_ns: int
    step: int | None
    stage: int | None
    message: str
    data: dict[str, Any]
