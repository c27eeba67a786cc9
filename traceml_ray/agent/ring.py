"""A bounded ring of rows between the training thread and the agent's thread."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from traceml_ray.stages import LEAD_BYTES, LEAD_UNKNOWN, N_STAGES, ROW_BYTES

_ROW = struct.Struct(f"<qq{N_STAGES}q")  # key, flags, stages
_NO_LEAD = bytes([LEAD_UNKNOWN] * LEAD_BYTES)
_HOST = struct.Struct(f"<{N_STAGES}q{LEAD_BYTES}s")


class StepRing:
    """
    Preallocated ring without a lock, for a single producer and a single consumer.

    The producer is the training thread, or the agent if a device's clock is read. The consumer is the agent.
    If the ring is full a row is dropped and counted: the training thread never waits.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._buffer = bytearray(capacity * _ROW.size)
        self._hosts = bytearray()  # for rows on a device's clock; empty before there is one
        self._hosts_end = 1 << 62  # rows from this number on have no host row
        self._head = 0  # number of rows accepted so far; written only by the producer
        self._tail = 0  # number of rows drained so far; written only by the consumer
        self.dropped = 0

    @property
    def accepted(self) -> int:
        """Number of rows accepted."""
        return self._head

    @property
    def row_bytes(self) -> int:
        """Size of one row in a batch, in bytes."""
        return 9 + ROW_BYTES + (_HOST.size if self._hosts and self._tail < self._hosts_end else 0)

    def push(
        self, key: int, flags: int, row: Sequence[int], host: Sequence[int] = (), leads: bytes = _NO_LEAD
    ) -> None:
        """
        Add one row (int64 ns per stage). If the ring is full, drop and count it.

        For a row on a device's clock, `host` is the same row on the CPU's clock, and `leads` is as in
        `wire.RankBatch`.
        """
        head = self._head
        if head - self._tail >= self._capacity:
            self.dropped += 1
            return
        _ROW.pack_into(self._buffer, head % self._capacity * _ROW.size, key, flags, *row)
        if host and not self._hosts:
            self._keep_hosts()
        if self._hosts:
            _HOST.pack_into(self._hosts, head % self._capacity * _HOST.size, *(host or row), leads)
        self._head = head + 1

    def _keep_hosts(self) -> None:
        """From now on keep two rows per step. Rows that are waiting are on the CPU's clock."""
        self._hosts = bytearray(self._capacity * _HOST.size)
        for number in range(self._tail, self._head):
            slot = number % self._capacity
            _, _, *row = _ROW.unpack_from(self._buffer, slot * _ROW.size)
            _HOST.pack_into(self._hosts, slot * _HOST.size, *row, _NO_LEAD)

    def end_hosts(self) -> None:
        """The device's clock has ended: later rows have no host row."""
        self._hosts_end = min(self._head, self._hosts_end)

    def drain(self, limit: int) -> tuple[int, bytes, bytes, bytes]:
        """
        Remove up to `limit` rows. Returns (number of the first row, keys, flags, rows).

        The three columns are as in `wire.RankBatch`: n × int64, n × uint8, n × 6 × int64 ns.
        """
        first, keys, flags, rows, _, _ = self.drain_hosts(limit)
        return first, keys, flags, rows

    def drain_hosts(self, limit: int) -> tuple[int, bytes, bytes, bytes, bytes, bytes]:
        """
        As `drain`, plus the columns `host_rows` and `leads`. They are empty if there is no
        device clock.
        """
        first = self._tail
        last = min(self._head, first + limit)
        keys, flags, rows = bytearray(), bytearray(), bytearray()
        hosts, leads = bytearray(), bytearray()
        hosted = self._hosts and first < self._hosts_end
        for number in range(first, last):
            start = number % self._capacity * _ROW.size
            keys += self._buffer[start : start + 8]
            flags.append(self._buffer[start + 8])
            rows += self._buffer[start + 16 : start + 16 + ROW_BYTES]
            if hosted:
                start = number % self._capacity * _HOST.size
                hosts += self._hosts[start : start + ROW_BYTES]
                leads += self._hosts[start + ROW_BYTES : start + _HOST.size]
        self._tail = last
        return first, bytes(keys), bytes(flags), bytes(rows), bytes(hosts), bytes(leads)
