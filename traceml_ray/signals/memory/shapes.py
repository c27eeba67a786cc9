"""
What the memory analysis takes and what it says.

Times (`*_ns`) are int64 nanoseconds since the epoch on the aggregator's clock, sizes (`*_bytes`) bytes, `*_s`
seconds. What is not known is None (in a column NaN), never 0.
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
"""What was seen to grow. The gap is what the driver counts for the process and the allocator does not."""
Value = int | float | str | None
"""Of evidence."""
NO_STEP = -1
"""In `Series.step`: not known."""


@dataclass(frozen=True)
class Series:
    """The memory samples of one rank process on one device, as arrays of n samples."""

    rank: int
    node: str
    """As it is shown."""
    process: str
    """Tells processes of a rank apart: two attempts are two series."""
    device: int | None
    """As the process numbers it; None: the host, of a rank without a device."""
    t_ns: Int64
    """(n,), ascending."""
    step: Int64
    """(n,), NO_STEP: not known."""
    columns: Mapping[str, Float] = field(default_factory=dict)
    """
    (n,) each, by the name of the sample's field (`allocated_bytes`, `rss_bytes`, …), NaN: not known. What is
    not known at all has no column.
    """
    bound_ns: int = 0
    """Error bound of the offset between its node's clock and the aggregator's."""
    first_step_ns: int | None = None
    """When its first optimizer step, or its first step, was over: before that nothing is growth."""


@dataclass(frozen=True)
class Collective:
    """What one rank did in collectives of one kind, summed over some time; there may be several of a kind."""

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
    rank: int
    node: str
    device: int | None
    """None: the host's memory."""
    severity: Severity
    confidence: Confidence
    from_ns: int
    to_ns: int
    evidence: dict[str, Value]
    """Numbers by name; the ends of the names are units."""
    next: list[str]
    """What to do, one to three lines."""
    why: str
    """One sentence for a person."""


class Incident(_Shape, frozen=True, kw_only=True):
    """A rank's memory grew above its own settled baseline, and stayed there."""

    rank: int
    node: str
    device: int | None
    at_ns: int
    """When it left its level."""
    delta_bytes: int
    counter: Counter


class FirstCause(_Shape, frozen=True, kw_only=True):
    """The rank whose memory grew before that of all others, or alone."""

    rank: int
    node: str
    device: int | None
    at_ns: int
    lead_ns: int | None
    """By how much before the second rank; None: no other rank grew."""
    lead_bound_ns: int | None
    """Error bound of `lead_ns`: clocks and sampling; a shorter lead names nobody."""
    delta_bytes: int
    counter: Counter
    confidence: Confidence
    coverage: float
    """Share of the expected ranks that were observed when it began, 0..1."""
    why: str
    next: list[str]


class CollectiveOnset(_Shape, frozen=True, kw_only=True):
    """Several ranks grew at once, as far as clocks and sampling can tell: no rank is the cause."""

    at_ns: int
    bound_ns: int | None = None
    """To within so much they began at the same time: clocks, sampling and noise; None: not known."""
    ranks: list[int]
    delta_bytes: int
    """The largest of theirs,"""
    counter: Counter
    """and what grew there."""
    why: str


class Attribution(_Shape, frozen=True, kw_only=True):
    """A finding about hidden memory that stands with communication."""

    kind: AttributionKind
    rank: int
    device: int | None
    finding: Kind
    """The kind of the finding that it explains,"""
    from_ns: int
    """and when that began."""
    op: str | None
    group: str | None
    """Torch's name of the process group; `world`: that of all ranks."""
    bytes: int | None
    """Of the hidden memory that it explains."""
    evidence: dict[str, Value]
    why: str


class RankMemory(_Shape, frozen=True, kw_only=True):
    """One rank process on one device, in numbers: a line of the table."""

    rank: int
    node: str
    process: str
    device: int | None
    samples: int
    allocated_growth_bytes: int | None
    """From its settled baseline to now, as are the others."""
    reserved_growth_bytes: int | None
    rss_growth_bytes: int | None
    gap_bytes: int | None
    """Now: used by the process on the device and not by torch's allocator."""
    used_bytes: int | None
    """Now: of the device (at least, where the driver was not asked), or of the host's limit,"""
    total_bytes: int | None
    """of so much."""
    forecast_steps: int | None
    """When memory runs out at the present slope, where it grows."""
    forecast_s: float | None
    anomaly: Kind | None
    """Its most severe finding."""
    severity: Severity | None
    rise_bytes: int | None = None
    """By how much the newest sample is above the first half: what a rank that died had taken at the end."""


class Memory(_Shape, frozen=True, kw_only=True):
    """What can be said about the memory of a run."""

    first_cause: FirstCause | None = None
    collective_onset: CollectiveOnset | None = None
    findings: list[MemoryFinding] = []
    """The most severe first, then what fills memory soonest, then the earliest."""
    collectives: list[Attribution] = []
    incidents: list[Incident] = []
    """Every growth above a rank's baseline, the earliest first."""
    ranks: list[RankMemory] = []
    missing_ranks: list[int] = []
