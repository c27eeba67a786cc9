"""A bounded ring of rows between the training thread and the agent's thread."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from traceml_ray.stages import N_STAGES, ROW_BYTES

_ROW = struct.Struct(f"<qq{N_STAGES}q")  # key, flags, stages


class StepRing:
    """
    Single producer (the training thread), single consumer (the agent), preallocated, no lock.

    A row that finds the ring full is dropped and counted: the training thread never waits.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._buffer = bytearray(capacity * _ROW.size)
        self._head = 0  # rows accepted so far; written by the producer only
        self._tail = 0  # rows taken so far; written by the consumer only
        self.dropped = 0

    @property
    def accepted(self) -> int:
        """Rows that went in."""
        return self._head

    def push(self, key: int, flags: int, row: Sequence[int]) -> None:
        """Put one row (int64 ns per stage) in, or drop and count it."""
        head = self._head
        if head - self._tail >= self._capacity:
            self.dropped += 1
            return
        _ROW.pack_into(self._buffer, head % self._capacity * _ROW.size, key, flags, *row)
        self._head = head + 1

    def drain(self, limit: int) -> tuple[int, bytes, bytes, bytes]:
        """
        Take up to `limit` rows out: (number of the first, keys, flags, rows).

        The three columns are as `wire.RankBatch` holds them: n × int64, n × uint8, n × 6 × int64 ns.
        """
        first = self._tail
        last = min(self._head, first + limit)
        keys, flags, rows = bytearray(), bytearray(), bytearray()
        for number in range(first, last):
            start = number % self._capacity * _ROW.size
            keys += self._buffer[start : start + 8]
            flags.append(self._buffer[start + 8])
            rows += self._buffer[start + 16 : start + 16 + ROW_BYTES]
        self._tail = last
        return first, bytes(keys), bytes(flags), bytes(rows)
