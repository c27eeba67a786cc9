"""
The work of the aggregator in a second of a large job, counted in calls that Python makes. The count is the
same on every machine, and shows when something looks at every rank once more.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from sessions import SECOND, Clock, Rank, Relay, aggregation

from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.stages import FORWARD, POST_SYNC, SYNC_WAIT
from traceml_ray.wire import messages as wire

RANKS, ON_A_NODE, STEPS = 128, 8, 5
MOST = 102
"""Largest number of calls a second for each rank."""


class _Calls:
    """Counts calls of functions, of Python and of C."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        self.count += event in ("call", "c_call")


def _batch(rank: Rank, now_ns: int) -> bytes:
    """Return what a rank under DDP sends in a second."""
    first = rank.produced
    spans = [
        wire.SpanSum(name, stage, STEPS, 5, 1, first, first + STEPS - 1)
        for name, stage in (("optimizer", POST_SYNC), ("all_reduce", SYNC_WAIT))
    ]
    return rank.batch(
        STEPS,
        open=wire.OpenStage(first + STEPS, FORWARD, 0),
        process=wire.ProcessSample(now_ns, 99.0, 1 << 30, 20, 0, 0),
        overhead=wire.Overhead(now_ns // SECOND, 0, 0, 0),
        spans=spans,
    )


def _second(aggregator: AggregatorCore, messages: Sequence[bytes]) -> int:
    """Let the aggregator do the work of a second; return the number of calls."""
    calls = _Calls()
    gc.collect()
    sys.setprofile(calls)
    try:
        for message in messages:
            aggregator.ingest(message)
        aggregator.judge()
        aggregator.commit()
    finally:
        sys.setprofile(None)
    return calls.count


def test_second_of_a_large_job_takes_few_calls_for_each_rank(tmp_path: Path) -> None:
    clock = Clock()
    aggregator = aggregation(tmp_path, clock, world_size=RANKS)
    relays = [Relay(number) for number in range(RANKS // ON_A_NODE)]
    ranks = [Rank(number, RANKS, node_id=f"node-{number // ON_A_NODE}") for number in range(RANKS)]
    seconds = []
    for _ in range(6):
        clock.tick()
        batches = [_batch(rank, clock()) for rank in ranks]
        messages = [
            relay.message(*batches[number * ON_A_NODE : (number + 1) * ON_A_NODE])
            for number, relay in enumerate(relays)
        ]
        seconds.append(_second(aggregator, messages))
    assert aggregator.verdict is not None
    assert not aggregator.errors
    assert max(seconds[2:]) / RANKS < MOST
