"""Data of a profile page, read once from its traces: table of operations, and time of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from traceml_ray import __version__
from traceml_ray.stages import STAGES
from traceml_ray.traces.chrome import TraceError
from traceml_ray.traces.difference import MEDIAN, Difference, RecordingError, Spent, compare, spent_in
from traceml_ray.traces.key_averages import Operation, operations_of_trace, sort
from traceml_ray.traces.sources import Source
from traceml_ray.traces.trace import nest, read_trace
from traceml_ray.wire.codec import ready

MAX_BYTES = 64 << 20
"""Largest size of an encoded Breakdown, in bytes."""
MOST = 3000
"""Largest number of operations in the table."""


class RankSpent(msgspec.Struct, frozen=True):
    """Time of one rank, by operation."""

    rank: int
    all: Spent
    """Time spent in one step."""
    stages: dict[str, Spent]
    """Time spent in each stage, for the stages that were recorded completely."""


class Breakdown(msgspec.Struct, frozen=True):
    """What pages show of a profile's traces."""

    operations: list[Operation]
    """Operations with the largest own time, in that order. At most `MOST`."""
    n_operations: int
    """Number of operations in the traces, including those left out of `operations`."""
    ranks: list[RankSpent]
    problems: list[str]
    """Why some ranks are missing, one sentence each."""
    version: str = __version__
    """Version of this package that read the traces. Another version reads them again."""

    def stages(self) -> list[str]:
        """Return the stages that can be compared."""
        return [stage for stage in STAGES if sum(stage in rank.stages for rank in self.ranks) > 1]

    def slowest(self) -> int | None:
        """Return the rank whose step has the largest time without waiting. None with fewer than two ranks."""
        if len(self.ranks) < 2:
            return None
        return max(self.ranks, key=lambda rank: rank.all.step_ns - rank.all.waiting_ns).rank

    def difference(
        self, rank: int, beside: int | Literal["median"] = MEDIAN, stage: str | None = None
    ) -> Difference | None:
        """Return what one rank does more of than others. None if that was not recorded."""
        spent_by_rank = {
            rank_times.rank: rank_times.all if stage is None else rank_times.stages.get(stage)
            for rank_times in self.ranks
        }
        rank_spent = spent_by_rank.pop(rank, None)
        if beside != MEDIAN:
            spent_by_rank = {beside: spent_by_rank.get(beside)}
        others = {other: spent for other, spent in spent_by_rank.items() if spent is not None}
        return compare(rank, rank_spent, others, stage) if rank_spent is not None and others else None


_DECODER = msgspec.msgpack.Decoder(ready(Breakdown))


def encode(made: Breakdown) -> bytes:
    """Return the breakdown as bytes for `decode`."""
    return msgspec.msgpack.encode(made)


def decode(data: bytes) -> Breakdown:
    """Decode a breakdown from `encode`. Raises ValueError, also if another version wrote it."""
    try:
        made = _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError, TypeError) as error:
        raise ValueError(f"this is not a breakdown: {error}") from None
    if made.version != __version__:
        raise ValueError(f"it was made by version {made.version[:20]}")
    return made


def breakdown(sources: Sequence[Source], by_shape: bool = False) -> Breakdown:
    """Return the breakdown of a profile's traces. A trace that cannot be read becomes a problem."""
    operations, ranks, problems = list[Operation](), list[RankSpent](), list[str]()
    for source in sources:
        try:
            trace = read_trace(source.path, source.window)
            nesting = nest(trace)
            operations += operations_of_trace(source, trace, nesting, by_shape)
            if source.rank is None:
                continue
            stages = {}
            for stage in STAGES:
                try:
                    stages[stage] = spent_in(source, trace, nesting, stage)
                except RecordingError:
                    continue  # these steps do not have the stage
            ranks.append(RankSpent(source.rank, spent_in(source, trace, nesting), stages))
        except (TraceError, RecordingError) as error:
            problems.append(f"{source.label}: {error}")
    operations = sort(operations, "self_cpu_ms")
    longest = sorted(
        operations, key=lambda operation: -max(operation.self_cpu_ms, operation.self_device_ms or 0.0)
    )[:MOST]
    return Breakdown(longest, len(operations), ranks, problems)
