"""
Reduced steps in bounded memory.

The newest are kept one by one. Older ones are summed in bins of equally many steps, which are merged in pairs
when there are too many, and counted in histograms. Medians are over all steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from traceml_ray.analysis.row_table import RankMeta
from traceml_ray.analysis.step_stats import (
    MAX_BINS,
    Array,
    Bins,
    Columns,
    StepStats,
    StepSums,
    SummedSteps,
    grouped,
    stages_in,
)
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import Bool, Int64, Window
from traceml_ray.stages import N_STAGES, SEGMENT_BITS

_STEPS, _FULL_RANKS, _LEAST = 4096, 32, 300


class Between(NamedTuple):
    """A range of step numbers, both ends included."""

    first: int = 0
    last: int = 1 << 62


ALL = Between()


class StepStore:
    """
    Reduced steps: the newest one by one, older ones in sums. With `deep`, medians of each stage are kept as
    well.
    """

    def __init__(self, limits: Thresholds, *, deep: bool) -> None:
        self.limits = limits
        self.deep = deep
        self.who: dict[int, RankMeta] = {}
        """Node, group, strategy and role of each rank."""
        self.generation = 0
        """Increases when steps that were already reduced change."""
        self._axis: Int64 = np.empty(0, np.int64)
        self._newest = StepSums(0)
        self._bins: Bins | None = None
        self._older: SummedSteps | None = None

    @property
    def ranks(self) -> list[int]:
        """Ranks of the reduced steps, ascending: the first axis of every array."""
        ranks: list[int] = self._axis.tolist()
        return ranks

    @property
    def nodes(self) -> list[str]:
        """Display name of each rank's node."""
        return [self.who[rank].node for rank in self.ranks]

    @property
    def single_steps(self) -> int:
        """Number of steps that are kept one by one."""
        return max(_LEAST, min(_STEPS, _STEPS * _FULL_RANKS // max(1, len(self._axis))))

    @property
    def last_step(self) -> int | None:
        """The newest reduced step. None before there is one."""
        store = self._newest
        return int(store.last[store.end - 1]) if store.end else None

    @property
    def last_summed_up(self) -> int:
        """The newest step that is only kept in a sum. -1 if there is none."""
        return int(self._bins.last[self._bins.end - 1]) if self._bins else -1

    def stores(self) -> list[StepSums]:
        """Return the stores of steps: the sums of older steps, if any, and the newest steps one by one."""
        return [*([self._bins] if self._bins else []), self._newest]

    def total_ms(self) -> float:
        """
        Return the total time of all steps so far, in ms, including steps in which the device clock was not
        read.
        """
        total = 0.0
        for store in self.stores():
            took = store.unread()[..., 1]
            ranks = np.maximum(np.count_nonzero(took, axis=0), 1)
            total += float(store.exposed[: store.end].sum() + (took.sum(axis=0) / ranks).sum())
        return total

    def columns(
        self,
        stage: int | None = None,
        *,
        between: Between | None = None,
        since: int | None = None,
        most: int = MAX_BINS,
    ) -> Columns:
        """
        Return the newest steps, or a part of the run in at most `most` columns (one more if it begins inside
        a sum). `values` shows `stage`.

        With `since`, only the columns that end at that step or later.
        """
        made = []
        for store, part, per in self._chosen(between, most):
            start, stop = part.start, part.stop
            if since is not None:
                old = int(np.searchsorted(store.last[:stop], since))
                start = stop if old == stop else start + max(0, old - start) // per * per
            if start < stop:
                made.append(grouped(store, slice(start, stop), per, stage))
        if not made:
            none = np.empty((len(self.ranks), 0))
            no_steps = np.empty(0, np.int64)
            return Columns(no_steps, no_steps, none, none, np.empty((0, N_STAGES)), np.empty(0))
        both = zip(zip(*made, strict=True), (0, 0, 1, 1, 0, 0), strict=True)
        return Columns(*(np.concatenate(part, axis) for part, axis in both))

    def stage_columns(self, between: Between | None, most: int = MAX_BINS) -> tuple[Int64, Int64, Array]:
        """
        Return the stages of the columns that `columns` returns: first and last step (C,), means (R, C, 6) in
        ms.
        """
        columns = [stages_in(*chosen) for chosen in self._chosen(between, most)]
        if not columns:
            no_steps = np.empty(0, np.int64)
            return no_steps, no_steps, np.empty((len(self.ranks), 0, N_STAGES))
        both = zip(zip(*columns, strict=True), (0, 0, 1), strict=True)
        first, last, d = (np.concatenate(part, axis) for part, axis in both)
        return first, last, d

    def complete_columns(self, most: int) -> Bool:
        """Return which columns of the whole run (C,), see `columns`, are full and beyond the warm-up."""
        full_columns = []
        for store, part, per in self._chosen(ALL, most):
            starts = np.arange(part.start, part.stop, per)
            steps, warm, chained = (
                np.add.reduceat(column[: part.stop], starts)
                for column in (store.steps, store.warm, store.chained)
            )
            full = steps == per * getattr(store, "width", 1)
            full_columns.append(full & (warm == steps) & (chained == steps))
        return np.concatenate([np.empty(0, bool), *full_columns])

    def step_means(self, between: Between | None, most: int = MAX_BINS) -> tuple[Int64, Int64, Array]:
        """
        Return the mean step time of the columns that `columns` returns: first and last step (C,), mean (C,)
        in ms.
        """
        first, last, ms = [], [], []
        for store, part, per in self._chosen(between, most):
            starts = np.arange(part.start, part.stop, per)
            chained = np.add.reduceat(store.chained[: part.stop], starts)
            took = np.add.reduceat(store.exposed[: part.stop].sum(axis=1), starts)
            first.append(store.first[starts])
            last.append(store.last[np.minimum(starts + per, part.stop) - 1])
            ms.append(np.where(chained > 0, took / np.maximum(chained, 1), np.nan))
        none = np.empty(0, np.int64)
        return (
            np.concatenate([none, *first]),
            np.concatenate([none, *last]),
            np.concatenate([np.empty(0), *ms]),
        )

    def _chosen(self, between: Between | None, most: int) -> list[tuple[StepSums, slice, int]]:
        """Return, for each store, the part to draw and how many of its columns become one."""
        store = self._newest
        if between is None:
            return [(store, slice(max(0, store.end - most), store.end), 1)]
        parts = self._parts(between)
        per = self._steps_a_column(parts, most)
        return [(store, part, per // width) for store, part, width in parts]

    def layout(self, between: Between | None, most: int = MAX_BINS) -> list[int]:
        """Return a value that changes when columns that were drawn before are no longer the same."""
        if between is None:
            return [self.generation]
        first = int(self._newest.first[0]) if self._newest.end else -1
        return [self.generation, self._steps_a_column(self._parts(between), most), first, *between]

    def _parts(self, between: Between) -> list[tuple[StepSums, slice, int]]:
        """Return, for each store, the part within `between` and the number of steps per column."""
        widths = [*([self._bins.width] if self._bins else []), 1]
        parts = []
        for store, width in zip(self.stores(), widths, strict=True):
            start = int(np.searchsorted(store.last[: store.end], between.first))
            stop = int(np.searchsorted(store.first[: store.end], between.last, "right"))
            if start < stop:
                parts.append((store, slice(start, stop), width))
        return parts

    @staticmethod
    def _steps_a_column(parts: list[tuple[StepSums, slice, int]], most: int) -> int:
        width = max((width for *_, width in parts), default=1)
        steps = sum((part.stop - part.start) * width for _, part, width in parts)
        return int(width * max(1, -(-steps // (width * max(1, most - 1)))))

    def mean_exposed(self, between: Between) -> tuple[int, Array]:
        """
        Return the number of steps beyond the warm-up in `between`, whole sums only, and their mean exposed
        time (6,) in ms.
        """
        steps, total = 0, np.zeros(N_STAGES)
        for store, part, _ in self._parts(between):
            inside = (store.first[part] >= between.first) & (store.last[part] <= between.last)
            indices = part.start + np.flatnonzero(inside & (store.warm[part] == store.steps[part]))
            steps += int(store.chained[indices].sum())
            total += store.exposed[indices].sum(axis=0)
        return steps, total / max(1, steps)

    def waiting(self, newest: int | None = None) -> float:
        """Return the share (0..1) of all ranks' time spent waiting, over the steps of `stats`."""
        busy = took = 0.0
        for store in self.stores() if newest is None else [self._newest]:
            indices = np.flatnonzero(store.warm[: store.end] == store.steps[: store.end])
            indices = (indices if len(indices) else np.arange(store.end))[-newest if newest else 0 :]
            busy += float(store.busy[:, indices].sum(dtype=float))
            took += float(store.d[:, indices].sum(dtype=float))
        return 1 - busy / took if took else np.nan

    def steps_between(self, first: int, last: int) -> Window:
        """
        Return the steps from `first` to `last` that all ranks have. A sum of several steps is one row with
        their mean if at least half of it lies inside.
        """
        parts = []
        for store in self.stores():
            begins, ends = np.maximum(store.first, first), np.minimum(store.last, last)
            indices = np.flatnonzero((2 * (ends - begins + 1) >= store.last - store.first + 1)[: store.end])
            indices = indices[(store.count[:, indices] > 0).all(axis=0)]
            mean = store.d[:, indices] / store.count[:, indices, None] * 1e6
            parts.append((begins[indices] << SEGMENT_BITS, np.rint(mean).astype(np.int64).transpose(1, 0, 2)))
        keys, d = (np.concatenate(part) for part in zip(*parts, strict=True))
        who = [self.who[rank] for rank in self.ranks]
        return Window(
            keys=keys,
            ranks=self._axis,
            nodes=tuple(rank.node for rank in who),
            d=d,
            flags=np.zeros(d.shape[:2], np.uint8),
            expected=len(who),
            groups=tuple(rank.group for rank in who),
        )

    def stages(self, first: int, last: int) -> tuple[Int64, Array, Array]:
        """Return the kept steps from `first` to `last`: numbers (K,), stages (R, K, 6) ms, busy (R, K) ms."""
        store = self._newest
        part = slice(*np.searchsorted(store.first[: store.end], (first, last + 1)))
        seen = store.count[:, part] > 0
        d = np.where(seen[..., None], store.d[:, part], np.nan)
        return store.first[part], d, np.where(seen, store.busy[:, part], np.nan)

    def stats(self, newest: int | None = None) -> StepStats | None:
        """
        Return statistics of all steps beyond the warm-up, or of the `newest` ones. None if there are no such
        steps.
        """
        store, older = self._newest, self._older if newest is None else None
        indices = np.flatnonzero(store.warm[: store.end])
        if len(indices) + (older.steps if older else 0) < self.limits.first_window_steps:
            indices = np.flatnonzero(store.chained[: store.end])  # hardly any are left
        made = StepStats(store, indices[-newest:] if newest else indices, older)
        return made if made.steps else None

    def cut(self, step: int) -> None:
        """Forget the steps after `step`."""
        store = self._newest
        store.cut(int(np.searchsorted(store.first[: store.end], step, "right")))
        self.generation += 1

    def fit(self) -> None:
        """Release memory that is not needed."""
        for store in self.stores():
            store.resize(len(self._axis), store.end)

    def set_ranks(self, ranks: Int64) -> None:
        """Set the ranks to `ranks` (R,), ascending. Existing ranks keep their steps."""
        if np.array_equal(ranks, self._axis):
            return
        places = np.searchsorted(ranks, self._axis)
        self._axis = ranks
        for store in self.stores():
            store.resize(len(ranks), len(store.steps), places)
        if self._bins and self._older:
            self._bins.narrower(self.single_steps)
            self._older.wider(places, len(ranks))
        self.generation += 1
        most = self.single_steps + self.single_steps // 4
        if self._newest.most != most:
            before, self._newest = self._newest, StepSums(len(ranks), most=most)
            self.append(before, before.end)

    def append(self, block: StepSums, n: int) -> None:
        """
        Add the first `n` columns of `block`. When there is no more room, the oldest steps move
        into the bins.
        """
        store = self._newest
        done = 0
        if n and store.end and block.first[0] == store.last[store.end - 1]:
            store.go_on(block)
            done = 1
        while done < n:
            take = max(1, min(n - done, store.most - store.end))
            store.extend(block, slice(done, done + take))
            done += take
            if store.end >= store.most:
                old = store.end - self.single_steps
                self._bins = self._bins or Bins(len(self._axis), self.single_steps)
                self._older = self._older or SummedSteps(len(self._axis), self.limits, stages=self.deep)
                self._older.add(store, slice(0, old))
                self._bins.downsample(store, old)
                store.drop(old)
