"""Answers about the steps of a run, made by `analysis.step_numbers`. Times are ms, shares %."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class NodeTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long the ranks of one node are busy in a step."""

    median_ms: float
    """Median over the ranks of the node of their busy time in a step (ms); NaN: not known."""
    worst_rank: int | None
    """Rank of the node with the longest busy time; None if no rank has a time."""
    worst_ms: float
    """Busy time of `worst_rank` (ms); NaN: not known."""
    skew_pct: float | None
    """By how much `worst_rank` is above the median of the node (%); None for a node with one rank."""
    slower_pct: float | None
    """By how much the node is slower than the fastest node (%); None in a run on one node."""


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The numbers of a run's steps. Before its first step, `steps` is 0 and the times are not known."""

    version: int
    """Number of the state of the run's history that the numbers come from. It changes with new steps."""
    last_step: int | None
    """Last step that all ranks have reported; None before the first one."""
    world: int
    """Number of ranks of the job."""
    ranks: list[int]
    """Ranks that have reported: R numbers, ascending."""
    steps: int
    """Number of steps that the numbers cover."""
    of_all: bool
    """Whether the numbers cover all steps of the run. If not, they cover the newest steps."""
    all_read: bool
    """Whether nearly all stored rows have been read."""
    timed_pct: float
    """Share of all steps that have times (%)."""
    whole: bool = False
    """Whether all stored rows of the run have been read."""
    wall_s: float | None
    """Time from the first report to the last rows (s); None if steps began before the first report."""
    productive_pct: float | None
    """Share of `wall_s` that was spent in steps (%); None: not known."""
    busy_ms: Array
    """Median busy time of each of `ranks` in a step: (R,) ms; NaN: not known."""
    gpu_idle_pct: Array
    """Share of the time of each rank's device in which it waited for its host: (R,) %; NaN: not known."""
    nodes: dict[str, NodeTimes]
    """Busy times of each node, by its label; empty before the first step."""
    median_ms: float = np.nan
    """Median time of a step (ms); NaN before the first step."""
    p95_ms: float = np.nan
    """95th percentile of the time of a step (ms); NaN before the first step."""
    steps_per_s: float = np.nan
    """Steps per second of the mean step; NaN before the first step."""
    worst_rank: int | None = None
    """Rank with the longest busy time; None if it is not known, or there is one rank only."""
    worst_over: float = np.nan
    """Busy time of the worst rank as a multiple of the median rank's busy time; NaN: not known."""
    skew_pct: float = np.nan
    """By how much the worst rank is above the median rank (%); NaN: not known, or of one rank only."""
    waiting_pct: float = np.nan
    """Share of the time of all ranks in which they waited for others (%); NaN before the first step."""
    stages: dict[str, float] = {}
    """Stage → mean exposed time of a step (ms); empty before the first step."""


class BusyTimes(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Busy time of m ranks in the newest K steps."""

    ranks: list[int]
    """Ranks of those asked for that have reported: m numbers."""
    busy_ms: Array
    """Busy time of each of `ranks` in each step: (m, K) ms; NaN: not known."""


class RankTimes(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Step times of each of R ranks, by stage."""

    steps: int
    """Number of steps that the times cover."""
    ranks: list[int]
    """Ranks that have reported: R numbers, ascending."""
    busy_ms: Array
    """Median busy time of each of `ranks` in a step: (R,) ms; NaN without any step."""
    over: Array
    """Busy time of each of `ranks` as a multiple of the median rank's: (R,); NaN without any step."""
    stages: Array
    """Mean time of each of `ranks` in each stage: (R, 6) ms; NaN without any step."""


class StepColumns(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """
    Data of charts by step, in C columns. A column is one step or, in a long run, several. A partial answer
    (`since` is not None) has the columns from one step on, and no facts about lines.
    """

    token: list[int | str]
    """
    Identity of the columns. Columns with equal tokens continue each other; with another token all columns are
    new.
    """
    since: int | None = None
    """First step of a partial answer; None: the columns are complete."""
    first: Array
    """First step of each column: (C,) int64."""
    last: Array
    """Last step of each column: (C,) int64."""
    exposed: Array
    """Mean exposed time of each stage in a step: (C, 6) ms."""
    median_ms: Array
    """Median busy time over the ranks: (C,) ms."""
    p10_ms: Array
    """Busy time below which a tenth of the ranks are: (C,) ms."""
    p90_ms: Array
    """Busy time above which a tenth of the ranks are: (C,) ms."""
    worst_ms: Array
    """Busy time of `worst_rank`: (C,) ms; NaN: not known."""
    worst_rank: Array
    """Rank with the longest busy time: (C,) int64; -1: not known."""
    global_pct: Array
    """By how much `worst_rank` is above the median rank: (C,) %; NaN: not known."""
    node_pct: Array
    """By how much the slowest node is above the fastest one: (C,) %; NaN: not known."""
    worst_over: Array
    """Busy time of `worst_rank` ÷ that of the median rank: (C,); NaN: not known."""
    step_ms: Array
    """Mean time of a step: (C,) ms."""
    steps_per_s: Array
    """Steps a second: (C,); NaN: not known."""
    waiting_pct: Array
    """Share of their time in which ranks wait for others: (C,) %; NaN: not known."""
    z: Array
    """Level of each line over the median (`spread.deviations`): (lines, C) uint8."""
    by: str = ""
    """What a line of `z` is: "rank" or, in a large job, "node"; "" in a part of an answer."""
    ranks: list[int] = []
    """Rank of each line; of a node its first one. Empty in a part of an answer."""
    nodes: list[str] = []
    """Label of the node of each line. Empty in a part of an answer."""

    @property
    def next(self) -> tuple[list[int | str], int]:
        """
        Arguments of the question for later columns: `token`, and the last step (-1 before
        the first one).
        """
        return self.token, int(self.last[-1]) if len(self.last) else -1


class RankSteps(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The stages of one rank in K columns, each of one step or of several."""

    steps: Array
    """Last step of each column: (K,); empty if the rank has no step."""
    stages: Array
    """Time of the rank in each stage: (K, 6) ms."""
    median: Array
    """Time of the median rank in each stage: (K, 6) ms."""
    host: Array | None
    """
    Times of `stages` on the clock of the rank's host: (K, 6) ms; NaN for a column of several steps. None if
    `stages` is on that clock itself.
    """
    mean: dict[str, float]
    """Stage → mean time of the rank over all columns (ms); empty if the rank has no step."""


class StepSample(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """
    Time of a step of a run, and its variation by chance, from the C columns of steps beyond the warm-up. With
    too few steps nothing is drawn: `numbers` is empty.
    """

    world: int
    """Number of ranks of the job."""
    ranks: list[int]
    """Ranks that have reported: R numbers, ascending."""
    nodes: list[str]
    """Label of the node of each of `ranks`."""
    columns: int
    """Number of columns, C."""
    per: int
    """Number of steps in each column."""
    first: int | None
    """First step of the sample; None if it has none."""
    last: int | None
    """Last step of the sample; None if it has none."""
    block: int
    """Number of consecutive columns in a block of the bootstrap."""
    numbers: dict[str, float]
    """
    Q numbers by name: mean time of the `step` and of each stage, `median step` and `p95 step` (ms), and
    `skew` (%); NaN: not known.
    """
    replicates: Array
    """Values of `numbers`, in that order, in each of B draws: (B, Q)."""
    drift: Array
    """Standard deviation by which each of `numbers` of the next run may differ: (Q,)."""
    stages: Array
    """Mean time of each of `ranks` in each stage: (R, 6) ms."""
    errors: Array
    """Standard error of `stages`, including the difference between runs: (R, 6) ms."""
    flags: int
    """Bits of `stages.FLAG_*` that most rows have."""


class CellMeans(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the steps of one cell of the heatmap."""

    rank: int
    """Global rank whose means these are; in a large job, the slowest rank of its node."""
    node: str | None
    """Label of the rank's node; None if the rank has not reported."""
    steps: int
    """Number of steps that the means cover."""
    busy_ms: float | None
    """Mean busy time of the rank (ms); None if the rank has not reported, NaN if it has no step here."""
    median_ms: float | None
    """Busy time of the median rank (ms); None if the rank has not reported."""
    over: float | None
    """`busy_ms` as a multiple of `median_ms`; None: one of the two is not known."""
    stages: dict[str, tuple[float, float]]
    """Stage → mean time of the rank and of the median rank (ms); empty where only sums are kept."""


class RunTimeline(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """All steps of a run in C columns."""

    first: Array
    """First step of each column: (C,)."""
    last: Array
    """Last step of each column: (C,)."""
    step_ms: Array
    """Mean time of a step of each column: (C,) ms."""
    t_ns: Array | None
    """When the last step of each column ended: (C,) ns since the epoch; None: not known."""


class PartMeans(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a step went in a part of a run."""

    steps: int
    """Number of steps of the part that have times."""
    stages: dict[str, float] | None
    """Stage → mean exposed time of a step (ms); None if the part has no step."""


class ChangedParts(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a step went before a change, and since."""

    before: PartMeans
    """Means of the steps before the change."""
    since: PartMeans
    """Means of the steps from the change on."""
