"""What a rank process knows of the calls of its collectives."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from traceml_ray.signals.kind import Kind
from traceml_ray.wire.codec import Count, Int64, Part

MAX_SUMS = 32
"""Largest number of records per rank process and source."""
MAX_CHARS = 64
"""Largest length of the texts of a record, in characters."""
MAX_SAMPLES, FEW_SAMPLES = 64, 32
"""Largest number of calls in a record: in a job of few ranks, and in one of many."""
SOURCES = ("host", "inspector")
Source = Literal["host", "inspector"]
_Text = Annotated[str, msgspec.Meta(max_length=MAX_CHARS)]


class CallSample(Part, frozen=True, array_like=True):
    """One call. `step` and `place` are the same for all ranks of the group."""

    step: Int64
    """Step of the call; from NCCL Inspector: its sequence number in the communicator."""
    place: Count
    """Number of calls of this record in the same step before it."""
    ns: Count
    """Time in the call, in ns. It contains the wait for the last rank."""
    size: Count
    """Bytes, as `CallTimes.bytes` counts them."""


class CallTimes(Part, frozen=True):
    """
    The calls of one collective in one process group, of about one size, since the process has
    started. A newer record replaces it.
    """

    number: Annotated[int, msgspec.Meta(ge=0, lt=MAX_SUMS)]
    """Number of the record in its rank process and source, from 0."""
    source: Source
    """`host`: marks around the call. `inspector`: files of NCCL Inspector."""
    op: _Text
    """`all_reduce`, `all_gather_into_tensor`, …"""
    process_group: _Text
    """Torch's name of the process group, `world` for the group of all ranks; or the id of a communicator."""
    description: _Text
    """What the program calls the group; "": nothing."""
    group_size: Count | None
    """Number of ranks of the group; None: not known."""
    size_bits: Annotated[int, msgspec.Meta(ge=0, le=64)]
    """Number of bits of the bytes of each call: they are below 2 to the power of this. 0: no bytes."""
    calls: Count
    timed: Count
    """Number of `calls` that contain the exchange. The others only start it."""
    bytes: Count
    """
    Sum over `calls` of the size of the data of all ranks: what a rank holds before an all-reduce, after an
    all-gather, and before a reduce-scatter.
    """
    total_ns: Count
    """Sum over `timed` of the time in the call, in ns. It contains waits for other ranks."""
    first_step: Int64
    """First step, or first sequence number, of these calls."""
    last_step: Int64
    every: Count
    """Samples are of steps, or sequence numbers, that this number divides."""
    samples: Annotated[list[CallSample], msgspec.Meta(max_length=MAX_SAMPLES)]
    """Some of the `timed` calls, evenly over the run."""


def _slot(record: CallTimes) -> int:
    return record.number + MAX_SUMS * SOURCES.index(record.source)


CALLS = Kind(
    "collectives",
    CallTimes,
    "times of collectives",
    table="collective_calls",
    exported="collectives",
    keep=MAX_SUMS * len(SOURCES),
    slot=_slot,
)
