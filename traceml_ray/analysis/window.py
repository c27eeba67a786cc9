"""Rows of all ranks brought onto common steps: what every judgement starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from traceml_ray.wire import FLAG_FIRST, N_STAGES, SEGMENT_BITS

Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
Bool = npt.NDArray[np.bool_]
Float = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RankRows:
    """What one rank reported: `keys` int64 (n,), `flags` uint8 (n,), `rows` int64 ns (n, 6)."""

    rank: int
    node: str
    keys: Int64
    flags: UInt8
    rows: Int64


@dataclass(frozen=True)
class Window:
    """
    The steps that every live rank reported, in order.

    `keys` (K,), `ranks` (R,) ascending, `nodes` one label per rank, `d` int64 ns (K, R, 6),
    `flags` uint8 (K, R). `expected` is the world size, `missing` the ranks that do not report,
    `gaps` the number of keys inside the window's range that some live rank lacks.
    """

    keys: Int64
    ranks: Int64
    nodes: tuple[str, ...]
    d: Int64
    flags: UInt8
    expected: int
    missing: tuple[int, ...] = ()
    gaps: int = 0

    @property
    def coverage(self) -> float:
        """Share of the expected ranks that report, 0..1."""
        return min(1.0, len(self.ranks) / max(self.expected, 1))

    @property
    def first_step(self) -> int | None:
        return int(self.keys[0]) >> SEGMENT_BITS if len(self.keys) else None

    @property
    def last_step(self) -> int | None:
        return int(self.keys[-1]) >> SEGMENT_BITS if len(self.keys) else None

    def take(self, which: slice | Bool) -> Window:
        """Return the window with only the keys of `which`."""
        return replace(self, keys=self.keys[which], d=self.d[which], flags=self.flags[which])


def align(
    streams: Sequence[RankRows], expected: int, missing: Sequence[int] = (), last: int | None = None
) -> Window:
    """
    Return the keys that every live rank reported, sorted; the newest `last` of them if given.

    `streams` holds one entry per rank; those of `missing` ranks are left out. Rows flagged
    FLAG_FIRST are left out, of a repeated key the first row counts. `d` is laid out rank by rank
    (a transposed view), which is the order in which the frontier sums it.
    """
    gone = frozenset(missing)
    live = sorted((stream for stream in streams if stream.rank not in gone), key=lambda s: s.rank)
    lengths = np.array([len(stream.keys) for stream in live], dtype=np.int64)
    if not lengths.sum():
        keys, at = np.empty(0, dtype=np.int64), np.empty((len(live), 0), dtype=np.int64)
        rows, flags, seen = np.empty((0, N_STAGES), dtype=np.int64), np.empty(0, dtype=np.uint8), keys
    else:
        rows = np.concatenate([stream.rows for stream in live])
        flags = np.concatenate([stream.flags for stream in live])
        keys, at, seen = _common(np.concatenate([stream.keys for stream in live]), flags, lengths)
    if last is not None:
        keys, at = keys[len(keys) - min(last, len(keys)) :], at[:, at.shape[1] - min(last, at.shape[1]) :]
    inside = (seen >= keys[0]) & (seen <= keys[-1]) if len(keys) else np.empty(0, dtype=bool)
    everything = np.array_equal(at.ravel(), np.arange(len(flags)))
    shape = (len(live), len(keys))
    d = (rows if everything else rows[at.ravel()]).reshape(*shape, N_STAGES)
    marks = (flags if everything else flags[at.ravel()]).reshape(shape)
    return Window(
        keys=keys,
        ranks=np.array([stream.rank for stream in live], dtype=np.int64),
        nodes=tuple(stream.node for stream in live),
        d=d.transpose(1, 0, 2),
        flags=marks.T,
        expected=expected,
        missing=tuple(sorted(gone)),
        gaps=int(inside.sum()) - len(keys) if len(keys) else len(seen),
    )


def _common(keys: Int64, flags: UInt8, lengths: Int64) -> tuple[Int64, Int64, Int64]:
    """
    Return (common keys (K,), their places in `keys` (R, K), every key seen), all sorted by key.

    `keys` and `flags` are the ranks' columns end to end, `lengths` says where each rank ends.
    """
    ranks = len(lengths)
    first = flags & FLAG_FIRST != 0
    if (lengths == lengths[0]).all() and not first.any():
        table = keys.reshape(ranks, -1)
        if (table == table[0]).all() and (np.diff(table[0]) > 0).all():
            return table[0].copy(), np.arange(len(keys)).reshape(table.shape), table[0]
    owner = np.repeat(np.arange(ranks), lengths)
    order = np.lexsort((keys, owner))
    order = order[~first[order]]
    sorted_keys, sorted_owner = keys[order], owner[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (np.diff(sorted_keys) != 0) | (np.diff(sorted_owner) != 0)
    order, sorted_keys = order[new], sorted_keys[new]
    seen, inverse, count = np.unique(sorted_keys, return_inverse=True, return_counts=True)
    shared = count == ranks
    # Each rank holds each shared key once, in ascending order: the mask cuts a (R, K) table.
    return seen[shared], order[shared[inverse]].reshape(ranks, -1), seen
