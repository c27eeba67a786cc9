"""
The steps of one attempt as the board keeps them: reduced once, when all ranks have reported them, in
arrays that never outgrow a bound.

The newest steps stand one by one. What gets older than that is added up in at most 300 bins of equally
many steps; when there are more, they are merged in pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from traceml_ray.analysis.busy import busy_ns, frontiers
from traceml_ray.analysis.evidence import absurd, comparable, sane
from traceml_ray.analysis.spread import Spread, quantiles, spread
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import Bool, Float, Group, Int64, RankRows, Window, align, missing_of
from traceml_ray.wire import BACKWARD, FLAG_FIRST, FLAG_NO_SPLIT, N_STAGES, SEGMENT_BITS, SYNC_WAIT

MAX_BINS = 300
_STEPS, _FULL_RANKS, _LEAST = 4096, 32, 300
Array = np.ndarray[Any, Any]


class Columns(NamedTuple):
    """
    C columns, each of one step or of some steps in a row: their numbers `first` and `last`, `busy` (R, C)
    and `values` (R, C, the same or of one stage): mean ms of a rank, `exposed` (C, 6): mean ms of a step.
    """

    first: Int64
    last: Int64
    busy: Array
    values: Array
    exposed: Array


class Recent(NamedTuple):
    """What the newest steps say, after warm-up; ms. `per_rank` (R,) are medians of busy time."""

    steps: int
    step_ms: Float
    """(steps,)"""
    exposed_ms: Float
    """Mean of each stage (6,)."""
    per_rank: Float
    apart: Spread


class _Store:
    """Sums over steps: `busy` (R, n), `d` (R, n, 6) ms, `count` (R, n); of the steps `exposed` (n, 6), …"""

    def __init__(self, ranks: int, size: int) -> None:
        self.busy, self.d = np.zeros((ranks, size), np.float32), np.zeros((ranks, size, N_STAGES), np.float32)
        self.count = np.zeros((ranks, size), np.uint32)
        self.exposed, self.chained = np.zeros((size, N_STAGES)), np.zeros(size, np.int64)
        self.first, self.last = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.steps = np.zeros(size, np.int64)
        self.end = 0

    def by_rank(self) -> tuple[Array, ...]:
        return self.busy, self.d, self.count

    def by_step(self) -> tuple[Array, ...]:
        return self.exposed, self.chained, self.first, self.last, self.steps

    def wider(self, places: Array, ranks: int) -> None:
        """Make room for more ranks; those that are there move to `places`."""
        for name in ("busy", "d", "count"):
            before = getattr(self, name)
            after = np.zeros((ranks, *before.shape[1:]), before.dtype)
            after[places] = before
            setattr(self, name, after)

    def add(self, at: int, of: _Store, part: slice) -> None:
        """Add some columns of another one, summed, to column `at`."""
        for mine, other in zip(self.by_rank(), of.by_rank(), strict=True):
            mine[:, at] += other[:, part].sum(axis=1, dtype=mine.dtype)
        self.first[at] = of.first[part][0] if not self.steps[at] else self.first[at]
        self.last[at] = of.last[part][-1]
        for mine, other in zip(self.by_step(), of.by_step(), strict=True):
            if mine is not self.first and mine is not self.last:
                mine[at] += other[part].sum(axis=0)

    def drop(self, n: int) -> None:
        """Forget the first `n` columns."""
        keep = self.end - n
        for column in self.by_rank():
            column[:, :keep] = column[:, n : self.end].copy()
            column[:, keep:] = 0
        for column in self.by_step():
            column[:keep] = column[n : self.end].copy()
            column[keep:] = 0
        self.end = keep

    def merged(self) -> _Store:
        """Return it with one column for each step: a step has a row for each of its exchanges."""
        starts = np.flatnonzero(np.diff(self.first[: self.end], prepend=-1))
        if len(starts) == self.end:
            return self
        made = _Store(len(self.busy), len(starts))
        made.end = len(starts)
        made.busy[:], made.d[:] = (
            np.add.reduceat(each[:, : self.end], starts, axis=1) for each in (self.busy, self.d)
        )
        made.count[:] = np.maximum.reduceat(self.count[:, : self.end], starts, axis=1)
        made.exposed[:] = np.add.reduceat(self.exposed[: self.end], starts, axis=0)
        made.chained[:] = np.minimum.reduceat(self.chained[: self.end], starts)
        made.first[:], made.last[:], made.steps[:] = self.first[starts], self.last[starts], 1
        return made

    def go_on(self, of: _Store) -> None:
        """Add the first column of another one to the last, which is the beginning of the same step."""
        at = self.end - 1
        self.busy[:, at] += of.busy[:, 0]
        self.d[:, at] += of.d[:, 0]
        self.count[:, at] |= of.count[:, 0]
        self.exposed[at] += of.exposed[0]
        self.chained[at] &= of.chained[0]
        of.drop(1)

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in (*self.by_rank(), *self.by_step()))


class Bins(_Store):
    """At most MAX_BINS columns of `width` steps each, the last of which may not be full."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks, MAX_BINS)
        self.width = 1

    def fold(self, of: _Store, n: int) -> None:
        """Add the first `n` columns of `of`, of one step each."""
        done = 0
        while done < n:
            if not self.end or self.steps[self.end - 1] >= self.width:
                if self.end == MAX_BINS:
                    self._halve()
                self.end += 1
            take = min(n - done, self.width - int(self.steps[self.end - 1]))
            self.add(self.end - 1, of, slice(done, done + take))
            done += take

    def _halve(self) -> None:
        self.width *= 2
        half = self.end // 2
        for column in self.by_rank():
            column[:, :half] = column[:, ::2] + column[:, 1::2]
            column[:, half:] = 0
        self.first[:half], self.last[:half] = self.first[::2].copy(), self.last[1::2].copy()
        for column in (self.exposed, self.chained, self.steps):
            column[:half] = column[::2] + column[1::2]
        for column in self.by_step():
            column[half:] = 0
        self.end = half


class Steps:
    """
    The steps of the processes that stand for the ranks. Rows are taken as they come; `advance` reduces
    those that are whole.
    """

    def __init__(self, limits: Thresholds) -> None:
        self.ranks: list[int] = []
        """Those with rows, ascending; the first axis of every array."""
        self.last_key: dict[int, int] = {}
        self.taken = self.absurd = 0
        """Rows so far, and steps that were left out because of values that no step can have."""
        self._limits = limits
        self._who: dict[int, RankRows] = {}
        self._first_key: dict[int, int] = {}
        self._pending: dict[int, list[RankRows]] = {}
        self._warm: int | None = None
        self._done = -1
        self._behind: dict[bytes, Int64] = {}
        self._totals: dict[Group | int, int] = {}
        self._newest = _Store(0, 0)
        self._bins: Bins | None = None

    @property
    def nodes(self) -> list[str]:
        """How the node of each rank is shown."""
        return [self._who[rank].node for rank in self.ranks]

    @property
    def kept(self) -> int:
        """How many steps stand one by one."""
        return max(_LEAST, min(_STEPS, _STEPS * _FULL_RANKS // max(1, len(self.last_key))))

    @property
    def last_step(self) -> int | None:
        """The newest step that is reduced."""
        store = self._newest
        return int(store.last[store.end - 1]) if store.end else None

    @property
    def nbytes(self) -> int:
        """Memory that is held in arrays."""
        pieces = [piece for pieces in self._pending.values() for piece in pieces]
        waiting = sum(piece.keys.nbytes + piece.flags.nbytes + piece.rows.nbytes for piece in pieces)
        return waiting + self._newest.nbytes + (self._bins.nbytes if self._bins else 0)

    def replaced(self, found: Sequence[RankRows]) -> bool:
        """Tell whether a rank is another process than before: then begin anew, with all of its rows."""
        return any(rows.rank in self._who and self._who[rows.rank].stream != rows.stream for rows in found)

    def late(self, found: Sequence[RankRows]) -> set[int]:
        """Return the ranks with rows of steps that were reduced without them."""
        return {rows.rank for rows in found if len(rows.keys) and rows.keys[0] <= self._done}

    def take(self, found: Sequence[RankRows]) -> None:
        """Take rows; those that come late are left out."""
        for rows in found:
            self.taken += len(rows.keys)
            mine = (rows.flags & FLAG_FIRST == 0) & (rows.keys > self._done)
            if not mine.all():
                rows = _part(rows, mine)
            self._who[rows.rank] = _part(rows, slice(0, 0))
            if len(rows.keys):
                self._pending.setdefault(rows.rank, []).append(rows)
                self._first_key.setdefault(rows.rank, int(rows.keys.min()))
                self.last_key[rows.rank] = max(self.last_key.get(rows.rank, -1), int(rows.keys.max()))

    def advance(self, holding: Container[int], waited: int, expected: int) -> bool:
        """
        Reduce the steps that are whole; return whether there were any.

        Args:
            holding: ranks that may still deliver.
            waited: how many more will have rows, but have none yet.
            expected: the world size.
        """
        if not self.last_key:
            return False
        waiting = [sum(len(rows.keys) for rows in pieces) for pieces in self._pending.values()]
        # Whoever is so far behind does not hold up the others.
        full = max(waiting, default=0) > self.kept // 2
        if waited and not full:
            return False
        known = self.last_key.values()
        front = [key for rank, key in self.last_key.items() if rank in holding] or [max(known)]
        if full:
            middle = float(np.median(list(known)))
            front = [key for key in front if key >= middle] or front
        end = min(front)
        if end <= self._done:
            return False
        self._widen()
        if self._warm is None:
            self._warm = (max(self._first_key.values()) >> SEGMENT_BITS) + self._limits.warmup_steps
        for edge in self._edges(end):
            self._reduce(edge, expected)
            if edge == (self._warm << SEGMENT_BITS) - 1:
                self._behind = {}  # what is summed up begins here
        return True

    def columns(self, stage: int | None = None, *, whole: bool = False, most: int = MAX_BINS) -> Columns:
        """Return the newest steps, or all of the run in at most `most` columns; `stage` of `values`."""
        store = self._newest
        parts = [(store, slice(max(0, store.end - most), store.end), 1)]
        if whole:
            bins, width = self._bins, self._bins.width if self._bins else 1
            per = width * -(-(store.end + (bins.end * width if bins else 0)) // (width * (most - 1)))
            parts = [(store, slice(0, store.end), per)]
            if bins:
                parts.insert(0, (bins, slice(0, bins.end), per // width))
        made = [_grouped(each, part, per, stage) for each, part, per in parts if part.stop > part.start]
        if not made:
            none = np.empty((len(self.ranks), 0))
            return Columns(np.empty(0, np.int64), np.empty(0, np.int64), none, none, np.empty((0, N_STAGES)))
        both = zip(zip(*made, strict=True), (0, 0, 1, 1, 0), strict=True)
        return Columns(*(np.concatenate(part, axis) for part, axis in both))

    def stages(self, first: int, last: int) -> tuple[Int64, Array, Array]:
        """Return the kept steps from `first` to `last`: numbers (K,), stages (R, K, 6) ms, busy (R, K) ms."""
        store = self._newest
        part = slice(*np.searchsorted(store.first[: store.end], (first, last + 1)))
        seen = store.count[:, part] > 0
        d = np.where(seen[..., None], store.d[:, part], np.nan)
        return store.first[part], d, np.where(seen, store.busy[:, part], np.nan)

    def recent(self, newest: int | None = None) -> Recent | None:
        """Return what the steps say that stand one by one, or the `newest` of them; None without any."""
        store = self._newest
        whole = store.chained[: store.end] > 0
        warm = whole & (store.first[: store.end] >= (self._warm or 0))
        chosen = warm if warm.sum() >= self._limits.first_window_steps else whole
        if not chosen.any():
            return None
        if newest is not None:
            chosen[: np.flatnonzero(chosen)[-newest:][0]] = False
        exposed = store.exposed[: store.end][chosen]
        busy: Array = store.busy[:, : store.end][:, chosen].astype(float)
        busy[store.count[:, : store.end][:, chosen] == 0] = np.nan
        per_rank = quantiles(busy.T, (0.5,))[0]
        apart = spread(per_rank[:, None], self.nodes)
        return Recent(len(exposed), exposed.sum(axis=1), exposed.mean(axis=0), per_rank, apart)

    def total_ms(self) -> float:
        """Return how long all steps so far took together."""
        stores: list[_Store] = [self._newest, *([self._bins] if self._bins else [])]
        return float(sum(store.exposed[: store.end].sum() for store in stores))

    def _widen(self) -> None:
        ranks = sorted(self.last_key)
        if ranks == self.ranks:
            return
        places = np.searchsorted(ranks, self.ranks)
        for store in filter(None, (self._newest, self._bins)):
            store.wider(places, len(ranks))
        self.ranks = ranks
        size = self.kept + self.kept // 4
        if self._newest.busy.shape[1] != size:
            before, self._newest = self._newest, _Store(len(ranks), size)
            self._append(before, before.end)

    def _edges(self, end: int) -> list[int]:
        """Return where, up to key `end`, ranks come or go, or the warm-up is over: chains end there."""
        first = {key - 1 for key in self._first_key.values()}
        warm = {((self._warm or 0) << SEGMENT_BITS) - 1}
        edges = first | warm | set(self.last_key.values())
        return [*sorted(key for key in edges if self._done < key < end), end]

    def _reduce(self, end: int, expected: int) -> None:
        """Reduce the steps up to key `end`, in which the ranks do not change."""
        pieces = {rank: piece for rank in [*self._pending] if (piece := self._cut(rank, end)) is not None}
        members = [r for r in self.ranks if self._first_key[r] <= end and self.last_key[r] >= end]
        here = [piece for rank in members if (piece := pieces.get(rank)) is not None]
        here = here if len(here) == len(members) else []
        window = align(here, expected, missing_of(expected, members))
        if absurd(window, self._limits) is not None:
            fine = sane(window, self._limits)
            self.absurd += int((~fine).sum())
            window, self._behind = window.take(fine), {}
        left = [piece for piece in pieces.values() if len(piece.keys) != len(window.keys)]
        keys = functools.reduce(np.union1d, (piece.keys for piece in left), window.keys)
        for at in range(0, len(keys), self.kept // 4):
            part = keys[at : at + self.kept // 4]
            block = _Store(len(self.ranks), len(part))
            block.end = len(part)
            block.first[:] = block.last[:] = part >> SEGMENT_BITS
            block.steps[:] = 1
            inside = window.take((window.keys >= part[0]) & (window.keys <= part[-1]))
            if len(inside.keys):
                self._fill(block, part, inside)
            for piece in left:
                self._single(block, part, piece)
            merged = block.merged()
            self._append(merged, merged.end)
        self._done = end

    def _fill(self, block: _Store, keys: Int64, window: Window) -> None:
        """Put the steps that all ranks have into `block`, whose columns are `keys`."""
        rows = comparable(window)
        at = np.searchsorted(keys, window.keys)
        who = np.searchsorted(self.ranks, window.ranks)
        where = np.ix_(who, at)
        block.busy[where] = busy_ns(rows).T / 1e6
        block.d[where] = rows.d.transpose(1, 0, 2) / 1e6
        block.count[where] = 1
        if len(who) < self._limits.coverage_limited * len(self.ranks):
            self._behind = {}
            return
        groups = [group for group in window.by_group() if len(group.ranks)]
        names = [group.ranks.tobytes() for group in groups]
        chained = frontiers(window, rows, [self._behind.get(name) for name in names])
        self._behind = {name: each.slack[-1, :, -1] for name, each in zip(names, chained, strict=True)}
        totals: dict[Group | int, int] = {}
        for group, each in zip(groups, chained, strict=True):
            totals[int(group.ranks[0])] = self._totals.get(int(group.ranks[0]), 0) + each.total_ns
        self._totals = totals
        slowest = max(range(len(groups)), key=lambda i: totals[int(groups[i].ranks[0])])
        block.exposed[at] = chained[slowest].exposed / 1e6
        block.chained[at] = 1

    def _single(self, block: _Store, keys: Int64, piece: RankRows) -> None:
        """Put the rows of a rank that others lack into `block`, where they are not yet."""
        who = int(np.searchsorted(self.ranks, piece.rank))
        at = np.minimum(np.searchsorted(keys, piece.keys), len(keys) - 1)
        new = (keys[at] == piece.keys) & (block.count[who, at] == 0) & (piece.rows >= 0).all(axis=1)
        rows = piece.rows[new]
        waited = rows[:, SYNC_WAIT] + np.where(piece.flags[new] & FLAG_NO_SPLIT, rows[:, BACKWARD], 0)
        block.d[who, at[new]] = rows / 1e6
        block.busy[who, at[new]] = (rows.sum(axis=1) - waited) / 1e6  # as far as they alone can tell
        block.count[who, at[new]] = 1

    def _cut(self, rank: int, end: int) -> RankRows | None:
        """Take what waits of a rank up to key `end`."""
        pieces = self._pending[rank]
        whole = pieces[0] if len(pieces) == 1 else _joined(pieces)
        mine = whole.keys <= end
        if mine.all():
            del self._pending[rank]
            return whole
        self._pending[rank] = [_part(whole, ~mine)]
        return _part(whole, mine) if mine.any() else None

    def _append(self, block: _Store, n: int) -> None:
        """Add `n` columns; the oldest move into the bins when there is no room."""
        store = self._newest
        if n and store.end and block.first[0] == store.last[store.end - 1]:
            store.go_on(block)
            n -= 1
        if n and store.end + n > store.busy.shape[1]:
            old = min(store.end, store.end + n - self.kept)
            self._bins = self._bins or Bins(len(self.ranks))
            self._bins.fold(store, old)
            store.drop(old)
            if n > self.kept:
                self._bins.fold(block, n - self.kept)
                block.drop(n - self.kept)
                n = self.kept
        new = slice(store.end, store.end + n)
        for mine, other in zip(store.by_rank(), block.by_rank(), strict=True):
            mine[:, new] = other[:, :n]
        for mine, other in zip(store.by_step(), block.by_step(), strict=True):
            mine[new] = other[:n]
        store.end += n


def _grouped(store: _Store, part: slice, per: int, stage: int | None) -> tuple[Array, ...]:
    """Return the `Columns` of some columns of `store`, `per` of them in one."""
    count, chained = store.count[:, part], store.chained[part]
    busy, exposed = store.busy[:, part], store.exposed[part]
    values = busy if stage is None else store.d[:, part, stage]
    first, last = store.first[part], store.last[part]
    if per > 1:
        at = np.arange(0, part.stop - part.start, per)
        count, busy, values = (np.add.reduceat(each, at, axis=1) for each in (count, busy, values))
        chained, exposed = np.add.reduceat(chained, at), np.add.reduceat(exposed, at, axis=0)
        first, last = first[at], last[np.minimum(at + per, len(last)) - 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = [np.where(count > 0, each / count, np.nan) for each in (busy, values)]
        step = np.where(chained[:, None] > 0, exposed / chained[:, None], np.nan)
    return first.copy(), last.copy(), *mean, step


def _joined(pieces: Sequence[RankRows]) -> RankRows:
    keys = np.concatenate([piece.keys for piece in pieces])
    flags = np.concatenate([piece.flags for piece in pieces])
    rows = np.concatenate([piece.rows for piece in pieces])
    return replace(pieces[-1], keys=keys, flags=flags, rows=rows)


def _part(of: RankRows, which: Bool | slice) -> RankRows:
    return replace(of, keys=of.keys[which], flags=of.flags[which], rows=of.rows[which])


def unpacked(answer: Sequence[Mapping[str, Any]]) -> list[RankRows]:
    """Return the rows in an answer to `rows`."""
    return [
        RankRows(
            found["rank"],
            found["node"],
            np.frombuffer(found["keys"], "<i8"),
            np.frombuffer(found["flags"], np.uint8),
            np.frombuffer(found["rows"], "<i8").reshape(-1, N_STAGES),
            tuple(found["group"]) if found["group"] else None,
            found["strategy"],
            found["stream"],
        )
        for found in answer
    ]
