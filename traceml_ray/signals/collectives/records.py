"""What a rank process knows of the calls of its collectives: their times, and the last ones."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from traceml_ray.signals.kind import Kind
from traceml_ray.wire.codec import FEW, Count, Int64, Part

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


MAX_GROUPS, MAX_CALLS = 64, 256
"""Largest number of process groups, and of calls, in one report."""
MAX_TENSORS = 8
"""Largest number of tensors of a call whose sizes are reported."""
AT_END = "end"
"""`asked` of a report that a rank makes when it ends by an exception."""

Sizes = Annotated[list[Annotated[list[Count], FEW]], FEW]
Dtypes = Annotated[list[str], FEW]


class GroupReport(Part, frozen=True):
    """A process group of a rank."""

    name: str
    """torch's name of the group."""
    description: str
    ranks: Annotated[list[tuple[Count, Count, Count]], FEW] | None
    """Its global ranks as (first, number of ranks, distance). None: not known."""
    enqueued: Count | None = None
    """Number of the last collective that the rank has called in the group. None: not known."""
    completed: Count | None = None
    """Number of the last collective that was completed. None: not known."""


class CallReport(Part, frozen=True):
    """One call of a collective, or of a point-to-point operation."""

    group: Count
    """Index of its group in `CollectivesReport.groups`."""
    number: Count
    """Number of the call in its group, from 1. Point-to-point operations are counted separately."""
    point_to_point: bool
    op: str
    """Name of the operation, such as `all_reduce`."""
    input_sizes: Sizes
    """Shape of each input tensor, of the first `MAX_TENSORS`."""
    input_dtypes: Dtypes
    output_sizes: Sizes
    output_dtypes: Dtypes
    finished: bool
    age_ns: Count
    """Time between the call and the report, in ns."""
    where: str | None
    """The line of the user's code that made the call, as `function (file.py:12)`. None: not known."""


class CollectivesReport(Part, frozen=True):
    """
    The newest collectives of a rank process, by group.

    Of each group these calls are reported: the last finished ones, the first that are not finished, and the
    newest.
    """

    t_ns: Int64
    asked: str
    """Id of the command that asked for the report, or `AT_END`."""
    source: Literal["recorder", "marks"]
    """`recorder`: torch's flight recorder. `marks`: marks of this monitor, only of calls by user code."""
    groups: Annotated[list[GroupReport], msgspec.Meta(max_length=MAX_GROUPS)]
    calls: Annotated[list[CallReport], msgspec.Meta(max_length=MAX_CALLS)]
    """In the order in which the rank made them."""
    whole: bool = False
    """Whether the process has made no call in a group of which there is none in `calls`."""


def _check_groups(report: CollectivesReport) -> None:
    if any(call.group >= len(report.groups) for call in report.calls):
        raise ValueError("a call is in no group")


LAST_CALLS = Kind(
    "last_calls",
    CollectivesReport,
    "reports of last collectives",
    table="last_calls",
    exported="last_calls",
    keep=1,
    node_times=("t_ns",),
    bundle="all",
    check=_check_groups,
)
