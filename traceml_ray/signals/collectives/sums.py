"""Sums up the calls of collectives of one process in bounded memory, and picks the calls that are sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from traceml_ray.signals.collectives.records import (
    FEW_SAMPLES,
    MAX_CHARS,
    MAX_SAMPLES,
    MAX_SUMS,
    CallSample,
    CallTimes,
    Source,
)

_MANY_RANKS = 256
"""From this number of ranks on, fewer samples are sent, less often."""
_OF_A_STEP = 4
"""Largest number of samples of one step."""
_FIRST_S, _LONGEST_S, _SHARE = 5.0, 60.0, 0.02
"""Shortest and longest time between two records, in s; in between, a share of the time since the first."""
_MANY_TIMES, _PHASES = 12, 64
"""In a job of many ranks, records are sent so many times less often, and not by all ranks at once."""


class Kindred(NamedTuple):
    """What the calls of one sum have in common."""

    op: str
    group: str
    description: str
    group_size: int | None


class _Sum:
    __slots__ = ("bytes", "calls", "every", "first", "last", "place", "samples", "timed", "total_ns")

    def __init__(self, step: int) -> None:
        self.first = self.last = step
        self.calls = self.timed = self.bytes = self.total_ns = self.place = 0
        self.every = 1
        self.samples: list[CallSample] = []

    def add(self, step: int, ns: int | None, size: int, most: int) -> None:
        self.place = self.place + 1 if self.calls and step == self.last else 0
        self.calls += 1
        self.bytes += size
        self.last = step
        if ns is None:
            return
        self.timed += 1
        self.total_ns += ns
        if self.place < _OF_A_STEP and step % self.every == 0:
            self.samples.append(CallSample(step, self.place, ns, size))
            while len(self.samples) > most:
                self.every *= 2
                self.samples = [one for one in self.samples if one.step % self.every == 0]


class CallSums:
    """
    The calls of one process from one source.

    Samples are chosen by step (or sequence number) alone: all ranks of a group choose the same calls.
    """

    def __init__(self, source: Source, world: int | None = None, rank: int = 0) -> None:
        self._source = source
        self._many = (world or 0) >= _MANY_RANKS
        self._phase = rank % _PHASES / _PHASES
        self._sums: dict[tuple[Kindred, int], _Sum] = {}
        self._changed: set[tuple[Kindred, int]] = set()
        self._began: float | None = None
        self._due = 0.0
        self.refused = 0
        """Number of calls that are in no sum, because there were too many sums."""

    def add(self, kindred: Kindred, step: int, ns: int | None, size: int) -> None:
        """Add a call of `size` bytes. `ns` None: the call only started the collective."""
        key = kindred, size.bit_length()
        known = self._sums.get(key)
        if known is None:
            if len(self._sums) >= MAX_SUMS:
                self.refused += 1
                return
            known = self._sums[key] = _Sum(step)
            self._many |= (kindred.group_size or 0) >= _MANY_RANKS
        known.add(step, ns, size, FEW_SAMPLES if self._many else MAX_SAMPLES)
        self._changed.add(key)

    def due(self, now: float, final: bool) -> list[CallTimes]:
        """Return the sums that have changed, if it is time to send them. `now`: monotonic seconds."""
        if not self._changed:
            return []
        times = _MANY_TIMES if self._many else 1
        if self._began is None:
            self._began = now
            self._due = now + self._phase * _FIRST_S * times if self._many else now
        if not final and now < self._due:
            return []
        self._due = now + times * max(_FIRST_S, min(_LONGEST_S, _SHARE * (now - self._began)))
        records = [*self._records()]
        self._changed.clear()
        return records

    @property
    def waiting(self) -> bool:
        """Whether a sum has changed since it was sent."""
        return bool(self._changed)

    def _records(self) -> Iterator[CallTimes]:
        for number, (key, one) in enumerate(self._sums.items()):
            if key in self._changed:
                kindred, bits = key
                op, group, description = (part[:MAX_CHARS] for part in kindred[:3])
                yield CallTimes(
                    number, self._source, op, group, description, kindred.group_size, bits, one.calls,
                    one.timed, one.bytes, one.total_ns, one.first, one.last, one.every, one.samples[:],
                )  # fmt: skip
