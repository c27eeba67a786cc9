"""The newest rows of every stream and samples of every node, in memory, for the live verdict."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from traceml_ray import wire
from traceml_ray.analysis.samples import Excerpt, Samples
from traceml_ray.store.session_file import Columns

Array = np.ndarray[Any, Any]

_ROWS = 4096
_FULL_RANKS = 32
_MIN_ROWS = 256
_DETAILS = 1 << 17
_NODES = 4096


class Recent:
    """
    Bounded columns per stream: 4,096 rows up to 32 streams, fewer as the world grows, 256 at least.

    Rows are kept by stream, not by rank: a rank that is learned late needs no moving of rows.
    """

    def __init__(self) -> None:
        self._rings: dict[int, _Ring] = {}
        self._details: dict[int, deque[wire.Detail]] = {}
        self._nodes: dict[str, Samples] = {}

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

    def tail(self, stream: int, last: int, n: int) -> Columns:
        """Return copies of the rows of `n` steps (or fewer) up to key `last`: keys, flags, rows (m, 6)."""
        ring = self._rings.get(stream) or _NO_ROWS
        end = int(np.searchsorted(ring.keys[: ring.end], last, "right"))
        steps = ring.keys[max(0, end - n) : end] >> wire.SEGMENT_BITS
        several = -(-len(steps) // (np.count_nonzero(np.diff(steps)) + 1))  # rows of a step
        part = slice(max(0, end - n * several), end)
        return ring.keys[part].copy(), ring.flags[part].copy(), ring.rows[part].copy()

    def add_detail(self, stream: int, detail: wire.Detail) -> None:
        """Add time spent in a named part; the newest 32 to 512 of a stream are kept."""
        if stream not in self._details:
            self._details[stream] = deque(maxlen=min(512, max(32, _DETAILS // (len(self._details) + 1))))
        self._details[stream].append(detail)

    def details(self, stream: int) -> list[wire.Detail]:
        """Return the newest named parts of a stream, oldest first."""
        return list(self._details.get(stream, ()))

    def add_sample(self, node: str, sample: wire.NodeSample) -> None:
        """Add a sample of a node (by id), see `Samples`; of more than 4,096 nodes, the first is forgotten."""
        if node not in self._nodes:
            self._nodes[node] = Samples()
            if len(self._nodes) > _NODES:
                del self._nodes[next(iter(self._nodes))]
        self._nodes[node].add(sample)

    def machines(self, nodes: Sequence[str], first_ns: int, last_ns: int) -> dict[str, Excerpt]:
        """Return what was sampled on those of `nodes` that are known, see `analysis.samples.Between`."""
        known = {node: self._nodes[node] for node in nodes if node in self._nodes}
        return {node: samples.between(first_ns, last_ns) for node, samples in known.items()}

    def forget(self, stream: int) -> None:
        """Forget what is known of a stream: an earlier attempt of its rank."""
        self._rings.pop(stream, None)
        self._details.pop(stream, None)

    def keep(self, streams: set[int]) -> None:
        """Forget all other streams."""
        for stream in (self._rings.keys() | self._details.keys()) - streams:
            self.forget(stream)


class _Ring:
    """Rows in one piece: when the buffer is full its newer half moves to the front."""

    def __init__(self, size: int) -> None:
        self.keys = np.empty(size, dtype=np.int64)
        self.flags = np.empty(size, dtype=np.uint8)
        self.rows = np.empty((size, wire.N_STAGES), dtype=np.int64)
        self.end = 0

    def append(self, keys: Array, flags: Array, rows: Array) -> None:
        n = min(len(keys), len(self.keys) // 2)
        if self.end + n > len(self.keys):
            keep = len(self.keys) // 2
            for column in (self.keys, self.flags, self.rows):
                column[:keep] = column[self.end - keep : self.end]
            self.end = keep
        new = slice(self.end, self.end + n)
        self.keys[new], self.flags[new] = keys[len(keys) - n :], flags[len(keys) - n :]
        self.rows[new] = rows[len(keys) - n :]
        self.end += n


_NO_ROWS = _Ring(0)
