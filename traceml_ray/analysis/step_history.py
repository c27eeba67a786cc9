"""
The steps of one attempt of a run, reduced once, when all ranks have reported them, in bounded memory: what
the live verdict and every view read, live or rebuilt from a session file.

The newest steps are kept one by one. What gets older than that is added up in at most 300 bins of equally
many steps; when there are more, they are merged in pairs.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from traceml_ray.analysis.busy import busy_ns, frontiers
from traceml_ray.analysis.evidence import absurd, comparable, sane
from traceml_ray.analysis.row_table import RowTable, Who
from traceml_ray.analysis.spread import quantiles
from traceml_ray.analysis.step_sums import MAX_BINS, Array, Bins, Block, Columns, StepSums, grouped
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import Float, Group, Int64, RankRows, UInt8, Window, missing_of
from traceml_ray.stages import BACKWARD, FLAG_FIRST, FLAG_NO_SPLIT, N_STAGES, SEGMENT_BITS, SYNC_WAIT

_STEPS, _FULL_RANKS, _LEAST = 4096, 32, 300
_CHAINS = 4
"""Sets of ranks whose chain may go on later."""


class Recent(NamedTuple):
    """What the newest steps say, after warm-up; ms. `per_rank` (R,) are medians of busy time."""

    steps: int
    step_ms: Float
    """(steps,)"""
    exposed_ms: Float
    """Mean of each stage (6,)."""
    per_rank: Float


class _Mark(NamedTuple):
    """Where a chain of steps can be taken up again: what was reduced up to key `edge`."""

    edge: int
    behind: dict[bytes, Int64]
    totals: dict[Group | int, int]
    absurd: int


class StepHistory:
    """
    The steps of the processes that stand for the ranks. Rows are put into their place as they come; `advance`
    reduces the steps that are whole. What comes late is reduced anew with the steps it belongs to, as long as
    their rows are here (see `RowTable`); after that it is left out.
    """

    def __init__(self, limits: Thresholds) -> None:
        self.table = RowTable()
        self.limits = limits
        self.taken = self.absurd = self.left_out = 0
        """Rows so far, steps left out because of values that no step can have, rows that came too late."""
        self.version = self.generation = 0
        """These change with every step; with what had been reduced before."""
        self.who: dict[int, Who] = {}
        """What is known of the ranks."""
        self._warm = 0
        self._done = -1
        self._behind: dict[bytes, Int64] = {}
        self._totals: dict[Group | int, int] = {}
        self._marks = [_Mark(-1, {}, {}, 0)]
        self._axis: Int64 = np.empty(0, np.int64)
        """The ranks (R,) of what was reduced."""
        self._newest = StepSums(0, 0)
        self._bins: Bins | None = None

    @property
    def ranks(self) -> list[int]:
        """Those of what was reduced, ascending; the first axis of every array."""
        ranks: list[int] = self._axis.tolist()
        return ranks

    @property
    def nodes(self) -> list[str]:
        """How the node of each rank is shown."""
        return [self.who[rank].node for rank in self.ranks]

    @property
    def kept(self) -> int:
        """How many steps are kept one by one."""
        return max(_LEAST, min(_STEPS, _STEPS * _FULL_RANKS // max(1, len(self.table.ranks))))

    @property
    def last_step(self) -> int | None:
        """The newest step that is reduced."""
        store = self._newest
        return int(store.last[store.end - 1]) if store.end else None

    @property
    def nbytes(self) -> int:
        """Memory that is held in arrays."""
        return self.table.nbytes + self._newest.nbytes + (self._bins.nbytes if self._bins else 0)

    def reported(self) -> set[int]:
        """Return the ranks with rows, reduced or not."""
        return set(self.table.ranks[self.table.last >= 0].tolist())

    def take(self, found: Sequence[RankRows]) -> None:
        """Take rows of some ranks."""
        self.know({rows.rank: Who(rows.node, rows.group, rows.strategy) for rows in found})
        alike: dict[bytes, list[RankRows]] = {}
        for rows in found:
            alike.setdefault(rows.keys.tobytes(), []).append(rows)
        for same in alike.values():
            flags, stages = np.stack([rows.flags for rows in same]), np.stack([rows.rows for rows in same])
            self.put([rows.rank for rows in same], same[0].keys, flags, stages)

    def know(self, who: Mapping[int, Who]) -> None:
        """Note who ranks are, before their first rows are `put`."""
        self.who.update(who)
        self.table.add_ranks([*who])

    def put(self, ranks: Sequence[int], keys: Int64, flags: UInt8, rows: Int64) -> None:
        """Take the rows of some ranks that have the same `keys` (k,): `flags` (m, k), `rows` ns (m, k, 6)."""
        if not len(keys):
            return
        places = self.table.places(ranks)
        if keys.min() <= self._done:
            self._go_back(places, keys, flags)
        self.taken += self.table.put(places, keys, flags, rows)

    def advance(self, holding: Container[int], waited: int, expected: int) -> bool:
        """
        Reduce the steps that are whole; return whether there were any.

        Args:
            holding: ranks that may still deliver.
            waited: how many more will have rows, but have none yet.
            expected: the world size.
        """
        last = self.table.last
        known = last >= 0
        if not known.any():
            return False
        waiting = self.table.between(self._done, int(last.max()))
        # Whoever is so far behind does not hold up the others.
        full = waiting.stop - waiting.start > min(self.kept, self.table.size) // 2
        if waited and not full:
            return False
        front = last[known & [rank in holding for rank in self.table.ranks.tolist()]]
        front = front if len(front) else last[known].max(keepdims=True)
        if full:
            ahead = front[front >= np.median(last[known])]
            front = ahead if len(ahead) else front
        end = int(front.min())
        if end <= self._done:
            return False
        self._widen()
        warm = self._warm_keys()
        self._warm = max(warm) + 1 >> SEGMENT_BITS
        for edge in self._edges(end, warm):
            self._reduce(edge, expected)
            if edge in warm:
                self._behind = {}  # what is summed up begins here
            self._marks.append(_Mark(edge, self._behind, self._totals, self.absurd))
        self.table.forget(self._done)
        self._marks = [mark for mark in self._marks if mark.edge >= self.table.forgotten]
        self.version += 1
        return True

    def window(self, ranks: Sequence[int], expected: int, missing: Sequence[int], steps: int) -> Window:
        """Return the newest `steps` that all of `ranks` (ascending, which are known) have reported."""
        last = int(self.table.last[self.table.places(ranks)].min())
        end = self.table.between(-1, last).stop
        several = self.table.rows_of_a_step(end)
        columns = slice(max(0, end - several * (steps + 1)), end)
        who = [self.who[rank] for rank in ranks]
        return self.table.window(columns, ranks, who, expected, missing).last(steps)

    def columns(
        self,
        stage: int | None = None,
        *,
        whole: bool = False,
        since: int | None = None,
        most: int = MAX_BINS,
    ) -> Columns:
        """
        Return the newest steps, or all of the run in at most `most` columns; `stage` of `values`.

        With `since`, only the columns that end at that step or later.
        """
        store, bins = self._newest, self._bins
        parts = [(store, max(0, store.end - most), 1)]
        if whole:
            per, width = self._steps_a_column(most), bins.width if bins else 1
            parts = [*([(bins, 0, per // width)] if bins else []), (store, 0, per)]
        made = []
        for each, start, per in parts:
            if since is not None:
                old = int(np.searchsorted(each.last[: each.end], since))
                start += max(0, old - start) // per * per
            if start < each.end:
                made.append(grouped(each, slice(start, each.end), per, stage))
        if not made:
            none = np.empty((len(self.ranks), 0))
            return Columns(np.empty(0, np.int64), np.empty(0, np.int64), none, none, np.empty((0, N_STAGES)))
        both = zip(zip(*made, strict=True), (0, 0, 1, 1, 0), strict=True)
        return Columns(*(np.concatenate(part, axis) for part, axis in both))

    def layout(self, whole: bool, most: int = MAX_BINS) -> list[int]:
        """Return what changes when columns that were there before are no longer the same."""
        first = int(self._newest.first[0]) if self._newest.end else -1
        return [self.generation, *([self._steps_a_column(most), first] if whole else [])]

    def _steps_a_column(self, most: int) -> int:
        bins, width = self._bins, self._bins.width if self._bins else 1
        return width * -(-(self._newest.end + (bins.end * width if bins else 0)) // (width * (most - 1)))

    def stages(self, first: int, last: int) -> tuple[Int64, Array, Array]:
        """Return the kept steps from `first` to `last`: numbers (K,), stages (R, K, 6) ms, busy (R, K) ms."""
        store = self._newest
        part = slice(*np.searchsorted(store.first[: store.end], (first, last + 1)))
        seen = store.count[:, part] > 0
        d = np.where(seen[..., None], store.d[:, part], np.nan)
        return store.first[part], d, np.where(seen, store.busy[:, part], np.nan)

    def recent(self, newest: int | None = None) -> Recent | None:
        """Return what the steps say that are kept one by one, or the `newest` of them; None without any."""
        store = self._newest
        whole = store.chained[: store.end] > 0
        warm = whole & (store.first[: store.end] >= self._warm)
        chosen = warm if warm.sum() >= self.limits.first_window_steps else whole
        if not chosen.any():
            return None
        if newest is not None:
            chosen[: np.flatnonzero(chosen)[-newest:][0]] = False
        exposed = store.exposed[: store.end][chosen]
        busy: Array = store.busy[:, : store.end][:, chosen].astype(float)
        busy[store.count[:, : store.end][:, chosen] == 0] = np.nan
        per_rank = quantiles(busy.T, (0.5,))[0]
        return Recent(len(exposed), exposed.sum(axis=1), exposed.mean(axis=0), per_rank)

    def total_ms(self) -> float:
        """Return how long all steps so far took together."""
        stores: list[StepSums] = [self._newest, *([self._bins] if self._bins else [])]
        return float(sum(store.exposed[: store.end].sum() for store in stores))

    def _go_back(self, places: npt.NDArray[np.intp], keys: Int64, flags: UInt8) -> None:
        """Take up the chain before the first of `keys` that is new, of a step that was reduced without it."""
        counts = (flags & FLAG_FIRST == 0).any(axis=0)
        late = self.table.unseen(places, keys[counts & (keys <= self._done)])
        if not len(late):
            return
        for at in range(len(self._marks) - 1, -1, -1):
            if self._can_go_back_to(self._marks[at].edge, int(late.min())):
                self._continue_from(at)
                return
        self.left_out += len(late) * len(places)

    def _can_go_back_to(self, edge: int, key: int) -> bool:
        """Tell whether the steps after `edge`, that of `key` among them, can be reduced once more."""
        if edge >> SEGMENT_BITS >= key >> SEGMENT_BITS or edge < self.table.forgotten:
            return False
        after = self.table.between(edge, self._done)
        begins = (
            int(self.table.keys[after.start]) >> SEGMENT_BITS
            if after.stop > after.start
            else key >> SEGMENT_BITS
        )
        folded = int(self._bins.last[self._bins.end - 1]) if self._bins else -1
        return edge >> SEGMENT_BITS < begins and edge >> SEGMENT_BITS >= folded

    def _continue_from(self, at: int) -> None:
        mark = self._marks[at]
        self._marks = self._marks[: at + 1]
        self._done, self._behind, self._totals, self.absurd = mark
        store = self._newest
        store.cut(int(np.searchsorted(store.first[: store.end], mark.edge >> SEGMENT_BITS, "right")))
        self.generation += 1
        self.version += 1

    def _widen(self) -> None:
        ranks = self.table.ranks
        if np.array_equal(ranks, self._axis):
            return
        places = np.searchsorted(ranks, self._axis)
        for store in filter(None, (self._newest, self._bins)):
            store.wider(places, len(ranks))
        self._axis = ranks
        self.generation += 1
        size = self.kept + self.kept // 4
        if self._newest.busy.shape[1] != size:
            before, self._newest = self._newest, StepSums(len(ranks), size)
            self._append(before, before.end)

    def _warm_keys(self) -> set[int]:
        """Return the last key of the warm-up of each rank: it counts from where the rank begins."""
        first = self.table.first[self.table.first >= 0]
        ends = (first >> SEGMENT_BITS) + self.limits.warmup_steps << SEGMENT_BITS
        return set((ends - 1).tolist())

    def _edges(self, end: int, warm: set[int]) -> list[int]:
        """Return where, up to key `end`, ranks come or go, or a warm-up is over: chains end there."""
        table = self.table
        known = table.last >= 0
        first, last = set((table.first[known] - 1).tolist()), set(table.last[known].tolist())
        return [*sorted(key for key in first | warm | last if self._done < key < end), end]

    def _reduce(self, end: int, expected: int) -> None:
        """Reduce the steps up to key `end`, in which the ranks do not change."""
        table, columns = self.table, self.table.between(self._done, end)
        inside = (table.first >= 0) & (table.first <= end) & (table.last >= end)
        members: list[int] = table.ranks[inside].tolist()
        who = [self.who[rank] for rank in members]
        window = table.window(columns, members, who, expected, missing_of(expected, members))
        if absurd(window, self.limits) is not None:
            fine = sane(window, self.limits)
            self.absurd += int((~fine).sum())
            window = window.take(fine)
        for begin in range(columns.start, columns.stop, self.kept // 4):
            part = slice(begin, min(columns.stop, begin + self.kept // 4))
            keys = table.keys[part]
            complete = len(members) == len(table.ranks) and len(window.keys) == columns.stop - columns.start
            block = Block(keys, len(members)) if complete else self._alone(part)
            if not block.end:
                continue
            whole = window.take((window.keys >= keys[0]) & (window.keys <= keys[-1]))
            if len(whole.keys):
                self._fill(block, whole)
            merged = block.merged()
            self._append(merged, merged.end)
        self._done = end

    def _alone(self, columns: slice) -> Block:
        """Return the rows of some columns of the table, each as far as it alone can tell."""
        d, flags, usable = self.table.cells(columns)
        some = usable.any(axis=0)
        d, flags, usable = d[:, some], flags[:, some], usable[:, some]
        usable = usable & (d >= 0).all(axis=2)
        block = Block(self.table.keys[columns][some], len(d))
        waited = d[:, :, SYNC_WAIT] + np.where(flags & FLAG_NO_SPLIT, d[:, :, BACKWARD], 0)
        block.d[usable] = (d[usable] / 1e6).astype(np.float32)
        block.busy[usable] = ((d.sum(axis=2) - waited)[usable] / 1e6).astype(np.float32)
        block.count[usable] = 1
        return block

    def _fill(self, block: Block, window: Window) -> None:
        """Put the steps that all ranks have into `block`."""
        rows = comparable(window)
        at = np.searchsorted(block.keys, window.keys)
        who = self.table.places(window.ranks)
        where = np.ix_(who, at)
        block.busy[where] = busy_ns(rows).T / 1e6
        block.d[where] = rows.d.transpose(1, 0, 2) / 1e6
        block.count[where] = 1
        begun = (self.table.first >= 0) & (self.table.first <= window.keys[0])
        if len(who) < self.limits.coverage_limited * np.count_nonzero(begun):
            return
        groups = [group for group in window.by_group() if len(group.ranks)]
        names = [group.ranks.tobytes() for group in groups]
        chained = frontiers(window, rows, [self._behind.get(name) for name in names])
        ends = {name: each.slack[-1, :, -1].copy() for name, each in zip(names, chained, strict=True)}
        before = {name: end for name, end in self._behind.items() if name not in ends}
        self._behind = {**dict([*before.items()][-_CHAINS:]), **ends}  # a rank may be away for a while
        totals: dict[Group | int, int] = {}
        for group, each in zip(groups, chained, strict=True):
            totals[int(group.ranks[0])] = self._totals.get(int(group.ranks[0]), 0) + each.total_ns
        self._totals = totals
        slowest = max(range(len(groups)), key=lambda i: totals[int(groups[i].ranks[0])])
        block.exposed[at] = chained[slowest].exposed / 1e6
        block.chained[at] = 1

    def _append(self, block: StepSums, n: int) -> None:
        """Add `n` columns; the oldest move into the bins whenever there is no room, however they come."""
        store = self._newest
        done = 0
        if n and store.end and block.first[0] == store.last[store.end - 1]:
            store.go_on(block)
            done = 1
        while done < n:
            take = min(n - done, store.busy.shape[1] - store.end)
            store.extend(block, slice(done, done + take))
            done += take
            if store.end == store.busy.shape[1]:
                old = store.end - self.kept
                self._bins = self._bins or Bins(len(self._axis))
                self._bins.fold(store, old)
                store.drop(old)
