"""
Inputs and results of the memory analysis.

Times (`*_ns`) are int64 nanoseconds since the epoch on the aggregator's clock, sizes (`*_bytes`) are bytes,
`*_s` are seconds. Unknown values are None (NaN in columns), never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

Float = np.ndarray[Any, np.dtype[np.float64]]
Int64 = np.ndarray[Any, np.dtype[np.int64]]

Severity = Literal["info", "warning", "critical"]
Confidence = Literal["low", "medium", "high"]
Sensitivity = Literal["low", "medium", "high"]
Kind = Literal[
    "persistent_drift", "step_change", "transient_spike", "fragmentation", "creep", "near_limit", "imbalance"
]  # fmt: skip
AttributionKind = Literal["collective_confident", "collective_likely", "collective_suspect"]
Counter = Literal["allocated_bytes", "gap_bytes", "rss_bytes"]
"""Counter that grew. The gap is memory that the driver counts for the process and the allocator does not."""
Value = int | float | str | None
"""A value of evidence."""
NO_STEP = -1
"""In `Series.step`: the step is not known."""


@dataclass(frozen=True)
class Series:
    """The memory samples of one rank process on one device, as arrays of n samples."""

    rank: int
    node: str
    """Label of the node."""
    process: str
    """Identifies the process. Two attempts of a rank are two series."""
    device: int | None
    """Device index in the process. None: the host, for a rank without a device."""
    t_ns: Int64
    """(n,), ascending."""
    step: Int64
    """(n,). NO_STEP: not known."""
    columns: Mapping[str, Float] = field(default_factory=dict)
    """
    (n,) each, by the name of the sample's field (`allocated_bytes`, `rss_bytes`, …). NaN: not known. A field
    without any known value has no column.
    """
    bound_ns: int = 0
    """Error bound of the offset between its node's clock and the aggregator's, in ns."""
    first_step_ns: int | None = None
    """
    When its first optimizer step, or else its first step, was over. Before that nothing counts
    as growth.
    """


@dataclass(frozen=True)
class Collective:
    """
    The use of collectives of one kind by one rank, summed over some time. A kind may have
    several entries.
    """

    rank: int
    op: str
    group: str | None
    """Torch's name of its process group."""
    first_ns: int
    last_ns: int
    count: int = 1
    bytes: int | None = None


class _Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the answers: plain values, in JSON by name."""


class MemoryFinding(_Shape, frozen=True, kw_only=True):
    """Something about the memory of one rank on one device."""

    kind: Kind
    """What was found, such as `creep` or `near_limit` (docs/memory.md)."""
    rank: int
    """Global rank."""
    node: str
    """Label of the rank's node."""
    device: int | None
    """Index of the device as the process sees it. None: the host's memory."""
    severity: Severity
    """info, warning or critical."""
    confidence: Confidence
    """low, medium or high."""
    from_ns: int
    """Time at which it began (ns, aggregator's clock)."""
    to_ns: int
    """Time at which it was last seen (ns, aggregator's clock)."""
    evidence: dict[str, Value]
    """Numbers by name. The end of a name is its unit."""
    next: list[str]
    """What to do, in one to three lines."""
    why: str
    """One sentence for a person."""


class Incident(_Shape, frozen=True, kw_only=True):
    """A rank's memory grew above its own settled baseline, and stayed there."""

    rank: int
    """Global rank."""
    node: str
    """Label of the rank's node."""
    device: int | None
    """Index of the device as the process sees it. None: the host's memory."""
    at_ns: int
    """Time at which the memory left its level (ns, aggregator's clock)."""
    delta_bytes: int
    """Growth above the baseline, in bytes."""
    counter: Counter
    """The counter that grew."""


class FirstCause(_Shape, frozen=True, kw_only=True):
    """The rank whose memory grew before that of all others, or alone."""

    rank: int
    """Global rank."""
    node: str
    """Label of the rank's node."""
    device: int | None
    """Index of the device as the process sees it. None: the host's memory."""
    at_ns: int
    """Time at which the memory left its level (ns, aggregator's clock)."""
    lead_ns: int | None
    """Time until the second rank grew, in ns. None: no other rank grew."""
    lead_bound_ns: int | None
    """Error bound of `lead_ns`, from clocks and sampling. A shorter lead names nobody."""
    delta_bytes: int
    """Growth above the baseline, in bytes."""
    counter: Counter
    """The counter that grew."""
    confidence: Confidence
    """How certain it is: low, medium or high."""
    coverage: float
    """Share of the expected ranks that were observed when it began, 0..1."""
    why: str
    """One or two sentences for a person."""
    next: list[str]
    """What to do, in one to three lines."""


class CollectiveOnset(_Shape, frozen=True, kw_only=True):
    """Several ranks grew at once, within the error of clocks and sampling: no rank is the cause."""

    at_ns: int
    """Time at which the first of them left its level (ns, aggregator's clock)."""
    bound_ns: int | None = None
    """Error bound within which the ranks began at the same time, in ns. None: not known."""
    ranks: list[int]
    """Global ranks that grew at the same time."""
    delta_bytes: int
    """Largest growth of one of the ranks, in bytes."""
    counter: Counter
    """The counter that grew most."""
    why: str
    """One or two sentences for a person."""


class Attribution(_Shape, frozen=True, kw_only=True):
    """A finding about hidden memory that coincides with communication."""

    kind: AttributionKind
    """How certain it is that collectives are the cause: `collective_confident`, `_likely` or `_suspect`."""
    rank: int
    """Global rank."""
    device: int | None
    """Index of the device as the process sees it. None: the host's memory."""
    finding: Kind
    """Kind of the finding that the communication explains."""
    from_ns: int
    """Time at which that finding began (ns, aggregator's clock)."""
    op: str | None
    """Name of the collective. None: not known."""
    group: str | None
    """Torch's name of the process group. `world`: that of all ranks."""
    bytes: int | None
    """Size of the hidden memory that it explains, in bytes."""
    evidence: dict[str, Value]
    """Numbers by name. The end of a name is its unit."""
    why: str
    """One sentence for a person."""


class MemoryOfRank(msgspec.Struct, frozen=True):
    """Memory of a rank's newest process, in bytes. Unknown values are None."""

    rss_peak_bytes: int | None = None
    """Largest resident memory of the process."""
    rss_last_bytes: int | None = None
    """Resident memory in its last sample."""
    allocated_peak_bytes: int | None = None
    """Largest memory that torch's allocator ever had allocated, in bytes."""


class RankMemory(_Shape, frozen=True, kw_only=True):
    """One rank process on one device, in numbers: a line of the table."""

    rank: int
    """Global rank."""
    node: str
    """Label of the rank's node."""
    process: str
    """Id of the rank process. Two attempts of a rank are two processes."""
    device: int | None
    """Index of the device as the process sees it. None: the host's memory."""
    samples: int
    """Number of samples."""
    allocated_growth_bytes: int | None
    """Growth of the memory that torch has allocated, from its settled baseline to now, in bytes."""
    reserved_growth_bytes: int | None
    """Growth of the memory that torch has reserved, from its settled baseline to now, in bytes."""
    rss_growth_bytes: int | None
    """Growth of the resident memory of the process, from its settled baseline to now, in bytes."""
    gap_bytes: int | None
    """Memory that the process uses on the device now, and torch's allocator does not count, in bytes."""
    used_bytes: int | None
    """
    Used part of `total_bytes` now: of the device (a lower bound where the driver was not asked), or of the
    host's limit.
    """
    total_bytes: int | None
    """Memory of the device, or the host's limit, in bytes."""
    forecast_steps: int | None
    """Number of steps until memory runs out at the present slope. None: it does not grow."""
    forecast_s: float | None
    """Seconds until memory runs out at the present slope. None: it does not grow."""
    anomaly: Kind | None
    """Kind of its most severe finding."""
    severity: Severity | None
    """Severity of its most severe finding."""
    rise_bytes: int | None = None
    """Excess of the newest sample over the first half, in bytes: the final growth of a dead rank."""


class Memory(_Shape, frozen=True, kw_only=True):
    """Analysis of the memory of a run."""

    first_cause: FirstCause | None = None
    """The rank whose memory grew first. None: no rank is named."""
    collective_onset: CollectiveOnset | None = None
    """Growth of several ranks at once. None: there was none."""
    findings: list[MemoryFinding] = []
    """The most severe first, then what fills memory soonest, then the earliest."""
    collectives: list[Attribution] = []
    """Findings about hidden memory that coincide with communication."""
    incidents: list[Incident] = []
    """Every growth above a rank's baseline, the earliest first."""
    ranks: list[RankMemory] = []
    """Each rank process on each device in numbers, by rank and device."""
    missing_ranks: list[int] = []
    """Expected ranks without a sample."""


class MemoryNumbers(_Shape, frozen=True, kw_only=True):
    """The memory of a run in a summary."""

    per_rank: dict[int, MemoryOfRank] = {}
    """Peak and last memory of each rank's newest process."""
    first_cause: FirstCause | None = None
    """The rank whose memory grew first. None: no rank is named."""
    collective_onset: CollectiveOnset | None = None
    """Growth of several ranks at once. None: there was none."""
    findings: list[MemoryFinding] = []
    """The hundred most severe, in the order of `Session.memory`."""
    missing_ranks: list[int] = []
    """Expected ranks without a sample."""
