"""The newest rows of every stream, in memory, for the live verdict."""

from __future__ import annotations

import numpy as np

from traceml_ray import wire
from traceml_ray.store.session_file import Columns

_ROWS = 4096
_FULL_RANKS = 32
_MIN_ROWS = 256


class Recent:
    """
    Bounded columns per stream: 4,096 rows up to 32 streams, fewer as the world grows, 256 at least.

    Rows are kept by stream, not by rank: a rank that is learned late needs no moving of rows.
    """

    def __init__(self) -> None:
        self._rings: dict[int, _Ring] = {}

    def append(self, stream: int, keys: bytes, flags: bytes, rows: bytes) -> None:
        """Add rows, columns as on the wire."""
        ring = self._rings.get(stream)
        if ring is None:
            share = _ROWS * _FULL_RANKS // max(_FULL_RANKS, len(self._rings))
            ring = self._rings[stream] = _Ring(max(_MIN_ROWS, share))
        ring.append(
            np.frombuffer(keys, "<i8"),
            np.frombuffer(flags, np.uint8),
            np.frombuffer(rows, "<i8").reshape(-1, wire.N_STAGES),
        )

    def last_key(self, stream: int) -> int | None:
        """Return the key of the stream's newest row, None when it has none."""
        ring = self._rings.get(stream)
        return int(ring.keys[ring.end - 1]) if ring and ring.end else None

    def tail(self, stream: int, n: int) -> Columns:
        """Return copies of the newest `n` rows, or as many as there are: keys (m,), flags (m,), rows (m, 6)."""
        ring = self._rings.get(stream) or _NO_ROWS
        part = slice(max(0, ring.end - n), ring.end)
        return ring.keys[part].copy(), ring.flags[part].copy(), ring.rows[part].copy()

    def keep_only(self, streams: set[int]) -> None:
        """Forget the rows of every other stream: earlier attempts of a rank."""
        for stream in self._rings.keys() - streams:
            del self._rings[stream]


class _Ring:
    """Rows in one piece: when the buffer is full its newer half moves to the front."""

    def __init__(self, size: int) -> None:
        self.keys = np.empty(size, dtype=np.int64)
        self.flags = np.empty(size, dtype=np.uint8)
        self.rows = np.empty((size, wire.N_STAGES), dtype=np.int64)
        self.end = 0

    def append(self, *new: np.ndarray) -> None:  # type: ignore[type-arg]
        size = len(self.keys)
        n = min(len(new[0]), size // 2)
        columns = (self.keys, self.flags, self.rows)
        if self.end + n > size:
            keep = size // 2
            for column in columns:
                column[:keep] = column[self.end - keep : self.end]
            self.end = keep
        for column, values in zip(columns, new, strict=True):
            column[self.end : self.end + n] = values[len(values) - n :]
        self.end += n


_NO_ROWS = _Ring(0)
