"""The structs of answers that only pages and commands ask for. Those that a person gets are in `results`."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from traceml_ray.analysis.roles import RoleShare
from traceml_ray.analysis.verdict import Suspect
from traceml_ray.analysis.verdict_shapes import VerdictInfo

Array = np.ndarray[Any, np.dtype[Any]]


class StepSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A named span of one rank. Its time is the mean over several steps that were summed up together."""

    rank: int
    """Global rank of the process that the span was measured in."""
    stage: str
    """Name of the stage that the span is inside of."""
    name: str
    """Name of the span, as the training script or a patch gave it."""
    ms: float
    """Mean time of the span in a step, over the steps `from_step` to `to_step` (ms)."""
    from_step: int
    """First step that the mean covers."""
    to_step: int
    """Last step that the mean covers."""


class OneStep(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """
    One step of all ranks that have it, in ms since each rank left the previous exchange. Ranks leave an
    exchange together, so all ranks share this clock; the clocks of nodes are not compared.
    """

    step: int
    """Number of the step."""
    first: int | None
    """First step whose rows are kept one by one; None if there is none yet."""
    last: int | None
    """Last step whose rows are kept one by one; None if there is none yet."""
    ranks: list[int]
    """Ranks that have this step: R numbers, ascending."""
    row_ranks: list[int]
    """Rank of each of the n rows; a rank has one row for each exchange of the step, in order."""
    stages: Array
    """Time of each row in each stage: (n, 6) ms."""
    took_ms: float | None
    """Time of the slowest rank (ms); None if no rank has the step."""
    arrived: Array
    """When each of `ranks` reached its last exchange: (R,) ms; NaN if backward and waiting are one stage."""
    late: Array
    """How long after the median rank each of `ranks` reached its last exchange: (R,) ms; NaN: not known."""
    device: list[int]
    """Ranks whose rows are timed by their device's clock, not by their host's."""
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
    """Median over all ranks of this time (ms); None in a large job, where only one rank is read."""
    times_per_step: float
    """Mean number of times that the span was entered in a step."""
    bytes: float | None
    """Mean size of the data moved each time (bytes); None if the span has no counted transfer."""


class VerdictChange(VerdictInfo, frozen=True, kw_only=True):
    """A change of the live verdict on a run. Its fields are the new verdict."""

    t_ns: int
    """When it was judged (ns since the epoch, on the aggregator's clock)."""
    suspects: list[Suspect]
    """Ranks that were late, each out of one stage, the costliest first."""
    exposed_ms: list[float] | None
    """Mean exposed time of each stage in a step: 6 values (ms); None: not known."""
    roles: list[RoleShare]
    """How long ranks of each role wait for other roles; empty if all ranks do the same work."""


class DeathInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How the process of a rank died."""

    rank: int
    """Global rank of the process."""
    t_ns: int
    """When it died (ns since the epoch, on the aggregator's clock)."""
    exact: bool
    """Whether `t_ns` is known to within two seconds."""
    step: int | None
    """Last step that the process completed, as last reported. It may have died in a later step."""
    stage: str | None
    """Stage that the process was in, as last reported."""
    how: str
    """What happened in words: its exception, "killed by SIGKILL", "its node was lost"."""
    message: str
    """Exception in full; "" if it raised none."""
    traceback: str | None
    """Last calls before the exception, as Python prints them."""
    first: bool
    """
    Whether no earlier death explains this one. Several ranks are first if the clocks cannot tell which died
    first.
    """
