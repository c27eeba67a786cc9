"""
The steps of one attempt of a run, in bounded memory. They are reduced once all ranks have reported them.

The live verdict, the report and every view read them, live or rebuilt from a session file. When rows are
read, a run is reduced to its step history and, if asked for, its verdicts over time.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from traceml_ray.analysis.baseline import Baseline
from traceml_ray.analysis.busy import busy_ns, frontiers, idle_ns
from traceml_ray.analysis.evidence import absurd, comparable, sane
from traceml_ray.analysis.history import Replay
from traceml_ray.analysis.roles import intermediate_rows, several
from traceml_ray.analysis.row_table import Aside, RankMeta, RowTable, SetAside, has_host_columns
from traceml_ray.analysis.step_stats import IDLE, UNREAD, Array, Block, Timeline
from traceml_ray.analysis.step_store import StepStore
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import Bool, Group, Int64, RankRows, UInt8, Window, missing_of
from traceml_ray.stages import (
    BACKWARD,
    FLAG_DEVICE_CLOCK,
    FLAG_EXCLUDED,
    FLAG_NO_SPLIT,
    N_STAGES,
    SEGMENT_BITS,
    SYNC_WAIT,
)

_CHAINS = 4
"""Number of sets of ranks whose chain is kept, because it may continue later."""
_DEEP_CELLS, _DEEP_COLUMNS = 1 << 21, 1 << 16
_LATE = 1 << 16
_HOST_ROWS = 1 << 12
_ASIDE = "first", "last", "ns"
_LARGEST = (1 << 63) - 1
"""Upper bound of a sum of times; only invalid values exceed it."""
_LARGEST_SUM = 2.0**62
"""Largest time of a step that is shown, in ns. A row that makes no sense may have more in its six stages."""


class ResumePoint(NamedTuple):
    """A point at which a chain of steps can be continued: the state after reducing up to key `edge`."""

    edge: int
    behind: dict[bytes, Int64]
    totals: dict[Group | int, int]
    absurd: int


class StepHistory(StepStore):
    """
    The steps of the current process of each rank.

    Rows are put into the table as they arrive; `advance` reduces the complete steps. If a row arrives late,
    its steps are reduced again, as long as their rows are still in the table (see `RowTable`); after that the
    row is left out.

    `deep` is for a report: it waits longer for a rank that is behind, and has medians of each stage.
    """

    def __init__(self, limits: Thresholds, *, deep: bool = False) -> None:
        super().__init__(limits, deep=deep)
        self.table = RowTable(_DEEP_CELLS, _DEEP_COLUMNS) if deep else RowTable()
        self.taken = self.absurd = self.left_out = 0
        """
        Number of rows received. `absurd` counts keys left out because of values that no step can have,
        `left_out` the keys of ranks that came too late.
        """
        self.merged = False
        """Whether stages were added up because some rank has no mark between them, see `comparable`."""
        self.version = 0
        """Increases with every reduced step."""
        self.done = -1
        """Key up to which steps are reduced."""
        self._behind: dict[bytes, Int64] = {}
        self._totals: dict[Group | int, int] = {}
        self._resume_points = [ResumePoint(-1, {}, {}, 0)]
        self._late: Int64 = np.empty(0, np.int64)
        """Newest keys for which a rank came too late."""

    def reported(self) -> set[int]:
        """Return the ranks that have rows, reduced or not."""
        return set(self.table.ranks[(self.table.last >= 0) | (self.table.lead >= 0)].tolist())

    def ends(self) -> dict[int, tuple[int, int]]:
        """Return the first and the last key of each rank; -1 if it has none."""
        table = self.table
        first = np.where(table.lead >= 0, table.lead, table.first)
        last, (starts, unread) = table.last.copy(), self._unread_in(self._tail)
        for line, step in np.argwhere(unread[..., 1] > 0):
            last[line] = max(int(last[line]), int(table.keys[self._tail][starts[step]]))
        ends = zip(first.tolist(), last.tolist(), strict=True)
        return dict(zip(table.ranks.tolist(), ends, strict=True))

    def add_rows(self, rows_of_ranks: Sequence[RankRows]) -> None:
        """Add rows of some ranks."""
        self.register_ranks(
            {rows.rank: RankMeta(rows.node, rows.group, rows.strategy, rows.role) for rows in rows_of_ranks}
        )
        alike: dict[tuple[bytes, int], list[RankRows]] = {}
        for rows in rows_of_ranks:
            alike.setdefault((rows.keys.tobytes(), rows.rows.shape[1]), []).append(rows)
        for same in alike.values():
            flags, stages = np.stack([rows.flags for rows in same]), np.stack([rows.rows for rows in same])
            self.put([rows.rank for rows in same], same[0].keys, flags, stages)

    def register_ranks(self, who: Mapping[int, RankMeta]) -> None:
        """Note node, group, strategy and role of ranks, before their first rows are `put`."""
        self.who.update(who)
        self.table.add_ranks([*who])

    def put(self, ranks: Sequence[int], keys: Int64, flags: UInt8, rows: Int64) -> None:
        """
        Add rows of ranks that have the same `keys` (k,): `flags` (m, k), `rows` in ns (m, k, 6)
        or wide.
        """
        if not len(keys):
            return
        places = self.table.places(ranks)
        if keys.min() <= self.done:
            self._go_back(places, keys, flags)
        self.taken += self.table.put(places, keys, flags, rows)

    def advance(self, holding: Container[int], waited: int, expected: int) -> bool:
        """
        Reduce the complete steps. Return whether there were any.

        Args:
            holding: ranks that may still deliver.
            waited: number of further ranks that will have rows, but have none yet.
            expected: the world size.
        """
        last = self.table.last
        known = last >= 0
        if not known.any():
            return False
        self.table.forget(before_step(self.done))
        waiting = self.table.between(self.done, int(last.max()))
        # Whoever is so far behind does not hold up the others.
        full = waiting.stop - waiting.start > self.table.size // 2
        if waited and not full:
            return False
        front = last[known & [rank in holding for rank in self.table.ranks.tolist()]]
        front = front if len(front) else last[known].max(keepdims=True)
        if full:
            beyond = front[front > self.done]
            beyond = beyond if len(beyond) else last[known]
            ahead = beyond[beyond >= np.median(last[known])]
            front = ahead if len(ahead) else beyond.max(keepdims=True)
        end = int(front.min())
        if end <= self.done:
            return False
        self.set_ranks(self.table.ranks)
        warm = self._warm_keys()
        for edge in self._edges(end, warm):
            self._reduce(edge, expected)
            if edge in warm:
                self._behind = {}  # what is summed up begins here
            self._resume_points.append(ResumePoint(edge, self._behind, self._totals, self.absurd))
        self._resume_points = [mark for mark in self._resume_points if mark.edge >= self.table.forgotten]
        self.version += 1
        return True

    def window(self, ranks: Sequence[int], expected: int, missing: Sequence[int], steps: int) -> Window:
        """
        Return the newest `steps` steps that all of `ranks` (ascending, known) have reported, without a step
        that may still be incomplete.
        """
        last = int(self.table.last[self.table.places(ranks)].min())
        end = self.table.between(-1, last).stop
        several = self.table.rows_of_a_step(end)
        columns = slice(self.table.before(end, several * (steps + 2)), end)
        return self._window(columns, ranks, expected, missing).without_open_step().last(steps)

    def between(self, after: int, to: int, ranks: Sequence[int], expected: int) -> Window:
        """Return the steps with keys from `after` (left out) to `to` that all of `ranks` have reported."""
        missing = missing_of(expected, ranks)
        return self._window(self.table.between(after, to), ranks, expected, missing)

    def _window(self, columns: slice, ranks: Sequence[int], expected: int, missing: Sequence[int]) -> Window:
        who = [self.who[rank] for rank in ranks]
        return self.table.window(columns, ranks, who, expected, missing)

    def forget_rows(self) -> None:
        """
        Forget the rows that were reduced, and release their memory. Rows that arrive later are
        left out.
        """
        self.table.forget_all(before_step(self.done))
        self._resume_points = [mark for mark in self._resume_points if mark.edge >= self.table.forgotten][-1:]
        self.fit()

    def counts(self) -> dict[int, int]:
        """Return the number of steps with rows of each rank."""
        table = self.table
        counts: Int64 = (table.lead >> SEGMENT_BITS != table.first >> SEGMENT_BITS).astype(np.int64)
        counts[table.lead < 0] = 0
        for rank, aside in table.aside.items():
            line = table.places([rank])[0]
            counts[line] += aside.count({int(key[line]) >> SEGMENT_BITS for key in (table.lead, table.first)})
        for store in self.stores():
            counts[table.places(self._axis)] += store.count[:, : store.end].sum(axis=1, dtype=np.int64)
        return dict(zip(table.ranks.tolist(), (counts + self._unread()).tolist(), strict=True))

    def timed(self) -> float:
        """Return the share (0..1) of steps that have times: a device clock may be read in some steps only."""
        return 1 - float(self._unread().sum()) / max(1, sum(self.counts().values()))

    def _unread(self) -> Int64:
        """
        Return the number of steps in which each rank's device clock was not read (R,) although
        it continues.
        """
        counts: Int64 = self._unread_in(self._tail)[1][..., 0].sum(axis=1)
        for store in self.stores():
            counts[self.table.places(self._axis)] += store.unread()[..., 0].sum(axis=1).astype(np.int64)
        return counts

    @property
    def _tail(self) -> slice:
        """Columns of the table that are not reduced yet."""
        return slice(self.table.between(-1, self.done).stop, len(self.table.keys))

    def _unread_in(self, columns: slice) -> tuple[Int64, Int64]:
        """
        Return the index in `columns` of each step (S,), and an array (R, S, 2): whether the device clock was
        not read in the step at all, and the host time in ns of the rows in which it was not read.

        S is 0 if it was always read.
        """
        d, _, usable = self.table.cells(columns)
        unread = self.table.unread(columns)
        if not unread.any():
            return np.empty(0, np.int64), np.empty((len(d), 0, 2), np.int64)
        starts = np.flatnonzero(np.diff(self.table.keys[columns] >> SEGMENT_BITS, prepend=-1))
        took = np.add.reduceat(np.where(unread, d.sum(axis=2), 0), starts, axis=1)
        has_unread, others = (np.logical_or.reduceat(where, starts, axis=1) for where in (unread, usable))
        return starts, np.stack([has_unread & ~others, np.clip(took, 0, self.limits.max_step_ns)], axis=2)

    def host_stages(self, rank: int, steps: Int64) -> Array | None:
        """
        Return the stages of a rank on its host's clock in `steps` (K, 6), in ms; NaN for steps that are not
        kept one by one.

        None if the rank has no rows on a device clock.
        """
        keys, flags, rows = self.table.line(rank, _HOST_ROWS)
        known = has_host_columns(rows) and (flags & FLAG_DEVICE_CLOCK != 0) & (rows[:, -1] >= 0)
        if not np.any(known):
            return None
        steps_of_rows = keys[known] >> SEGMENT_BITS
        indices = np.searchsorted(steps, steps_of_rows)
        asked = np.append(steps, -1)[indices] == steps_of_rows
        stages = np.full((len(steps), N_STAGES), np.nan)
        stages[indices[asked]] = 0
        np.add.at(stages, indices[asked], rows[known][asked, N_STAGES:-1] / 1e6)
        return stages

    def timeline(self, rank: int) -> Timeline:
        """Return how long the steps of a rank took. The oldest are sums of several steps."""
        line = int(self.table.places([rank])[0])
        aside = self.table.aside.get(rank, SetAside()).entries
        if self.table.lead[line] >= 0:
            lead = int(self.table.lead[line]) >> SEGMENT_BITS
            aside = [Aside(lead, lead, 1, int(self.table.lead_ns[line])), *aside]
        first, last, took = (
            np.array([min(getattr(entry, name), _LARGEST) for entry in aside], np.int64) for name in _ASIDE
        )
        parts = [(first, last, took, first < 0)]
        row = int(np.searchsorted(self._axis, rank))
        for store in self.stores() if len(self._axis) else ():
            unread_ms = store.unread()[row, :, 1]
            columns = np.flatnonzero((store.count[row, : store.end] > 0) | (unread_ms > 0))
            ms = store.d[row, columns].sum(axis=1, dtype=float) + unread_ms[columns]
            took = np.rint(np.minimum(ms * 1e6, _LARGEST_SUM)).astype(np.int64)
            parts.append((store.first[columns], store.last[columns], took, unread_ms[columns] > 0))
        places, unread = self._unread_in(self._tail)
        steps, took = self.table.keys[self._tail][places] >> SEGMENT_BITS, unread[line, :, 1]
        parts.append((steps[took > 0], steps[took > 0], took[took > 0], took[took > 0] < 0))
        joined = [np.concatenate(part) for part in zip(*parts, strict=True)]
        order = np.argsort(joined[1], kind="stable")
        begins, ends, took, after = (column[order] for column in joined)
        begins[1:][after[1:]] = (
            ends[:-1][after[1:]] + 1
        )  # what is unread is between a column and the last one
        return Timeline(begins, ends, took)

    def _go_back(self, places: npt.NDArray[np.intp], keys: Int64, flags: UInt8) -> None:
        """
        Reduce steps again from the first of `keys` that is new and belongs to a step that was already
        reduced.
        """
        counts = (flags & FLAG_EXCLUDED == 0).any(axis=0)
        late = self.table.unseen(places, keys[counts & (keys <= self.done)])
        if not len(late):
            return
        for index in range(len(self._resume_points) - 1, -1, -1):
            if self._can_go_back_to(self._resume_points[index].edge, int(late.min())):
                self._continue_from(index)
                return
        self.left_out += len(np.setdiff1d(late, self._late))  # several ranks may be too late for it
        self._late = np.union1d(self._late, late)[-_LATE:]

    def _can_go_back_to(self, edge: int, key: int) -> bool:
        """Whether the steps after `edge`, including the step of `key`, can be reduced once more."""
        if edge >> SEGMENT_BITS >= key >> SEGMENT_BITS or edge < self.table.forgotten:
            return False
        after = self.table.between(edge, self.done)
        begins = (
            int(self.table.keys[after.start]) >> SEGMENT_BITS
            if after.stop > after.start
            else key >> SEGMENT_BITS
        )
        return self.last_summed_up <= edge >> SEGMENT_BITS < begins

    def _continue_from(self, index: int) -> None:
        mark = self._resume_points[index]
        self._resume_points = self._resume_points[: index + 1]
        self.done, self._behind, self._totals, self.absurd = mark
        self.cut(mark.edge >> SEGMENT_BITS)
        self.version += 1

    def _warm_keys(self) -> set[int]:
        """Return the last key of each rank's warm-up, which is counted from the first step of the rank."""
        first = self.table.first[self.table.first >= 0]
        ends = (first >> SEGMENT_BITS) + self.limits.warmup_steps << SEGMENT_BITS
        return set((ends - 1).tolist())

    def _edges(self, end: int, warm: set[int]) -> list[int]:
        """Return the keys, up to `end`, at which chains end: ranks come or go, or a warm-up is over."""
        table = self.table
        known = table.last >= 0
        first, last = set((table.first[known] - 1).tolist()), set(table.last[known].tolist())
        return [*sorted(key for key in first | warm | last if self.done < key < end), end]

    def _reduce(self, end: int, expected: int) -> None:
        """Reduce the steps up to key `end`, in which the ranks do not change."""
        table, columns = self.table, self.table.between(self.done, end)
        begun = (table.first >= 0) & (table.first <= end)
        inside = begun & (table.last >= end)
        warm = (
            int(table.first[begun].max(initial=0)) >> SEGMENT_BITS
            <= (end >> SEGMENT_BITS) - self.limits.warmup_steps
        )
        members: list[int] = table.ranks[inside].tolist()
        who = [self.who[rank] for rank in members]
        window = table.window(columns, members, who, expected, missing_of(expected, members))
        if absurd(window, self.limits) is not None:
            fine = sane(window, self.limits)
            self.absurd += int((~fine).sum())
            window = window.select(fine)
        for begin in range(columns.start, columns.stop, self.single_steps // 4):
            part = slice(begin, min(columns.stop, begin + self.single_steps // 4))
            keys = table.keys[part]
            complete = len(members) == len(table.ranks) and len(window.keys) == columns.stop - columns.start
            block = Block(keys, len(members)) if complete else self._alone(part)
            if not block.end:
                continue
            whole = window.select((window.keys >= keys[0]) & (window.keys <= keys[-1]))
            if len(whole.keys):
                self._fill(block, whole, warm)
            merged = block.merged()
            self.append(merged, merged.end)
        self.done = end

    def _alone(self, columns: slice) -> Block:
        """Return the rows of some columns of the table, reduced rank by rank, without comparing ranks."""
        d, flags, usable = self.table.cells(columns)
        starts, unread = self._unread_in(columns)
        has_usable: Bool = np.asarray(usable.any(axis=0))
        has_usable[-1] |= bool(len(starts)) and not has_usable.any()
        d, flags, usable = d[:, has_usable], flags[:, has_usable], usable[:, has_usable]
        usable = usable & (d >= 0).all(axis=2)
        block = Block(self.table.keys[columns][has_usable], len(d))
        waited = d[:, :, SYNC_WAIT] + np.where(flags & FLAG_NO_SPLIT, d[:, :, BACKWARD], 0)
        block.d[usable] = (d[usable] / 1e6).astype(np.float32)
        block.busy[usable] = ((d.sum(axis=2) - waited)[usable] / 1e6).astype(np.float32)
        block.count[usable] = 1
        if len(starts):
            after = np.minimum(np.searchsorted(np.flatnonzero(has_usable), starts), block.end - 1)
            device = block.have_device()[..., UNREAD].swapaxes(0, 1)
            np.add.at(device, after, unread.swapaxes(0, 1) * (1, 1e-6))
        return block

    def _fill(self, block: Block, window: Window, warm: bool) -> None:
        """Put the steps that all ranks have into `block`."""
        rows = comparable(window)
        self.merged = self.merged or rows.d is not window.d
        columns = np.searchsorted(block.keys, window.keys)
        who = self.table.places(window.ranks)
        where = np.ix_(who, columns)
        block.busy[where] = busy_ns(rows).T / 1e6
        block.d[where] = rows.d.transpose(1, 0, 2) / 1e6
        block.count[where] = 1
        if several(window):
            block.rows[columns[intermediate_rows(window, rows.synced)]] = 0
        idle = idle_ns(window)
        if idle is not None:
            block.have_device()[..., IDLE][where] = idle.transpose(1, 0, 2) / 1e6
        begun = (self.table.first >= 0) & (self.table.first <= window.keys[0])
        if len(who) < self.limits.coverage_limited * np.count_nonzero(begun):
            return
        groups = [group for group in window.by_group() if len(group.ranks)]
        names = [group.ranks.tobytes() for group in groups]
        chained = frontiers(window, rows, [self._behind.get(name) for name in names])
        ends = {name: frontier.slack[-1, :, -1].copy() for name, frontier in zip(names, chained, strict=True)}
        before = {name: end for name, end in self._behind.items() if name not in ends}
        self._behind = {**dict([*before.items()][-_CHAINS:]), **ends}  # a rank may be away for a while
        totals: dict[Group | int, int] = {}
        for group, frontier in zip(groups, chained, strict=True):
            totals[int(group.ranks[0])] = self._totals.get(int(group.ranks[0]), 0) + frontier.total_ns
        self._totals = totals
        slowest = max(range(len(groups)), key=lambda i: totals[int(groups[i].ranks[0])])
        block.exposed[columns] = chained[slowest].exposed / 1e6
        block.chained[columns] = 1
        block.warm[columns] = warm


def before_step(key: int) -> int:
    """Return the last key before the step of `key`."""
    return (key >> SEGMENT_BITS << SEGMENT_BITS) - 1


class Reduction:
    """
    Reduces the rows of a run, in pieces of any size, in bounded memory.

    If there is a `replay`, its verdicts use the steps that all ranks of `processes` (the process of each)
    have.
    """

    def __init__(
        self, history: StepHistory, replay: Replay | None = None, processes: Mapping[int, int] | None = None
    ) -> None:
        self.history = history
        self.replay = replay
        self.processes = dict(sorted((processes or {}).items()))
        self.rows = 0
        """Number of rows received so far."""
        self.last_step: int | None = None
        """Last step that all ranks will have rows of. None if that is not known."""
        self._first_step: int | None = None
        self._judged_to = -1

    def add(self, pieces: Sequence[RankRows], holding: Container[int], waited: int, expected: int) -> None:
        """Add rows, and reduce the steps that are complete, see `StepHistory.advance`."""
        self.rows += sum(len(rank_rows.keys) for rank_rows in pieces)
        for part in _parts(pieces, self.history.table.size // 2):
            self.history.add_rows(part)
            if self.history.advance(holding, waited, expected):
                self._judge(before_step(self.history.done), expected)

    def finish(self, expected: int) -> None:
        """Reduce all remaining steps, even if some ranks are behind."""
        self.history.advance((), 0, expected)
        self._judge(self.history.done, expected)

    def _judge(self, to: int, expected: int) -> None:
        if self.replay is None or to <= self._judged_to:
            return
        window = self.history.between(self._judged_to, to, [*self.processes], expected)
        self._judged_to = to
        if len(window.keys):
            self._first_step = window.first_step if self._first_step is None else self._first_step
            if self.last_step is not None:
                self.replay.expect(self.last_step - (self._first_step or 0) + 1)
            self.replay.add(window)


def begun(ranks: Sequence[RankRows], limits: Thresholds, baseline: Baseline | None) -> Reduction:
    """
    Return a reduction for a report. Its verdicts use the steps that all of `ranks` have; rows of any process
    of a rank count.
    """
    history = StepHistory(limits, deep=True)
    history.register_ranks(
        {
            process.rank: RankMeta(process.node, process.group, process.strategy, process.role)
            for process in ranks
        }
    )
    return Reduction(history, Replay(None, limits, baseline), processes_of(ranks))


def processes_of(rows: Iterable[RankRows]) -> dict[int, int]:
    """Return the process id of each rank."""
    return {rank_rows.rank: rank_rows.process_id for rank_rows in rows}


def last_common_step(newest: Sequence[RankRows]) -> int:
    """Return the last step that all ranks have, given the newest rows of each."""
    return min((int(rank_rows.keys.max()) for rank_rows in newest), default=0) >> SEGMENT_BITS


def _parts(pieces: Sequence[RankRows], most: int) -> Iterator[list[RankRows]]:
    """Yield the rows in order of their keys, with at most `most` different keys at a time."""
    keys = np.sort(
        np.concatenate([_NO_KEYS, *(rank_rows.keys for rank_rows in pieces)]), kind="stable"
    )  # of sorted runs
    keys = keys[np.diff(keys, prepend=-1) > 0]
    if len(keys) <= most:
        yield [*pieces]
        return
    edges = [*keys[most - 1 : -1 : most].tolist(), int(keys[-1])]
    left = [*pieces]
    for edge in edges:
        yield [
            rank_rows.select(rank_rows.keys <= edge) for rank_rows in left if (rank_rows.keys <= edge).any()
        ]
        left = [rank_rows.select(rank_rows.keys > edge) for rank_rows in left]


_NO_KEYS: Int64 = np.empty(0, np.int64)
