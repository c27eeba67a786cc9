"""
Sums up the collectives that a rank's training thread has called, from the marks around them.

A call on the CPU contains the exchange, and the wait for the last rank before it. A call that returns a
handle, or whose tensors are on a device, only starts the exchange.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from traceml_ray.agent.marks import STARTED, SpanSums
from traceml_ray.agent.patch.collectives import named_groups
from traceml_ray.errors import Errors, sendable
from traceml_ray.signals.collectives.records import CallTimes
from traceml_ray.signals.collectives.sums import CallSums, Kindred
from traceml_ray.signals.collector import Collector, Rank

_ON_CPU = ("gloo", "mpi", "fake")
"""Backends whose calls return after the exchange."""


class CollectiveCalls(Collector):
    """
    Reads the calls of one process.

    Args:
        spans: sums of the recorder, which keep the newest calls.
        errors: counts calls that are lost.
        clock: monotonic seconds.
    """

    def __init__(self, spans: SpanSums, errors: Errors, clock: Callable[[], float] = time.monotonic) -> None:
        self._spans, self._errors, self._clock = spans, errors, clock
        self._sums: CallSums | None = None
        self._known: dict[int, tuple[Kindred, bool]] = {}
        """Number of a span → (what its calls have in common, whether they contain the exchange)."""
        self._read = self._refused = 0

    @classmethod
    def of_rank(cls, rank: Rank) -> CollectiveCalls:
        """Make the collector of a rank."""
        return cls(rank.recorder.steps.sums, rank.errors)

    def collect(self, final: bool) -> list[CallTimes]:
        """Return the sums that are due."""
        calls = self._spans.calls
        if not calls and self._sums is None:
            return []
        sums = self._sums = self._sums or CallSums("host", *_place())
        while calls:
            number, step, ns, size = calls.popleft()
            self._read += 1
            kindred, timed = self._known.get(number) or self._look_up(number)
            started = size >= STARTED or not timed
            sums.add(kindred, step, None if started else ns, size & (STARTED - 1))
        self._count_lost(sums)
        return sums.due(self._clock(), final)

    def _count_lost(self, sums: CallSums) -> None:
        lost = self._spans.call_count - self._read - len(self._spans.calls)
        if lost > 0:
            self._read += lost
            self._errors.count("collectives not summed: no room", lost)
        self._errors.count("collectives not summed: too many kinds", sums.refused - self._refused)
        self._refused = sums.refused

    def _look_up(self, number: int) -> tuple[Kindred, bool]:
        op = self._spans.names[number].partition(" of ")[0]
        name = self._spans.groups[number] or ""
        group = named_groups().get(name)
        size = timed = None
        description = ""
        if group is not None:
            import torch.distributed as dist

            size = dist.get_world_size(group)
            timed = not _on_device(str(dist.get_backend(group)))
            description = str(getattr(group, "group_desc", "") or "")
        description = "" if description in ("default_pg", "undefined") else sendable(description)
        known = self._known[number] = Kindred(op, sendable(name), description, size), bool(timed)
        return known


def _on_device(backend: str) -> bool:
    """Return whether calls of a group may return before the exchange: a device of this process is in use."""
    torch: Any = sys.modules["torch"]
    return backend.lower() not in _ON_CPU and bool(torch.cuda.is_initialized())


def _place() -> tuple[int | None, int]:
    """Return the number of ranks of the job (None: not known), and the number of this rank."""
    dist: Any = sys.modules.get("torch.distributed")
    known = dist is not None and dist.is_initialized()
    return (int(dist.get_world_size()), int(dist.get_rank())) if known else (None, 0)
