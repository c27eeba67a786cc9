"""What a report takes from the rows of a run, however long: they are read once, into its step history."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import numpy as np

from traceml_ray.analysis import reduction
from traceml_ray.analysis.baseline import Baseline
from traceml_ray.analysis.reduction import Reduction
from traceml_ray.analysis.step_times import Timeline
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.uneven_work import MIN_STEPS
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.window import Int64, RankRows, Window
from traceml_ray.stages import SEGMENT_BITS
from traceml_ray.store.history_reader import HistoryReader
from traceml_ray.store.kept import unpack
from traceml_ray.store.session_file import Folded, SessionFile

MAX_ROWS = 2_000_000
"""Of more rows (steps × ranks) a report of the newest is made first."""
PIECE_ROWS = 500_000
"""Rows that are read at a time."""


class Whole:
    """
    A run of the processes `ranks`, reduced. Of the rows `folded`, by rank, there are only sums: `history`
    knows nothing of them.
    """

    def __init__(self, run: Reduction, ranks: Sequence[RankRows], folded: Mapping[int, Folded]) -> None:
        assert run.replay is not None
        self.history = run.history
        self.judged = run.replay.done()
        self._sample = self.judged.sample()
        self.stats = run.history.stats()
        """None where there are none."""
        self.read = run.rows - len(ranks) * run.history.left_out
        """Rows that statistics and verdicts are of."""
        self.counted = run.rows + sum(int(sums.counts.sum()) for sums in folded.values())
        """Rows that `counts` and `mean_ns` are of."""
        self.counts = run.history.counts()
        """How many steps each rank has."""
        self.timed = run.history.timed()
        """Share (0..1) of these in which a device's clock was read, where it goes on."""
        self.lines = {own.rank: run.history.timeline(own.rank) for own in ranks}
        """When the steps of each were."""
        known = [line for line in self.lines.values() if len(line.first)]
        self.first_step = min((int(line.first[0]) for line in known), default=0)
        self.last_step = max((int(line.last[-1]) for line in known), default=0)
        for rank, sums in folded.items():
            self._add(rank, sums)

    def mean_ns(self) -> float:
        """Return how long a step was on average, warm-up included; NaN without any."""
        means = [line.took.sum() / count for rank, line in self.lines.items() if (count := self.counts[rank])]
        return float(np.mean(means)) if means else np.nan

    def window(self, verdict: Verdict) -> Window:
        """Return the steps of a verdict that names a rank, as far as they are there one by one or in sums."""
        first, last = verdict.from_step or 0, verdict.to_step or 0
        if self.history.merged and self._sample is not None:  # it has the stages as they were
            return self._sample
        return self.history.steps_between(first, last)

    def sampled(self, verdict: Verdict) -> Window:
        """Return the steps of a verdict that are in the sample of the run; `window` where these are few."""
        first, last = verdict.from_step or 0, 1 << 62 if verdict.to_step is None else verdict.to_step
        if self._sample is not None:
            steps = self._sample.keys >> SEGMENT_BITS
            part = self._sample.take((steps >= first) & (steps <= last))
            if len(part.starts) >= MIN_STEPS:
                return part
        return self.window(verdict)

    def stage_ns(self) -> dict[int, list[float]]:
        """Return the mean of each rank's stages, by rank."""
        if self.history.merged and self._sample is not None and len(self._sample.keys):
            ranks, ns = self._sample.ranks, self._sample.d.sum(axis=0) / len(self._sample.starts)
        else:
            assert self.stats is not None
            ranks, ns = np.array(self.history.ranks), 1e6 * self.stats.mean_stages()
        known = ~np.isnan(ns).any(axis=1)
        return dict(zip(ranks[known].tolist(), ns[known].tolist(), strict=True))

    def _add(self, rank: int, sums: Folded) -> None:
        """Let counts and times be of rows as well that are only kept as sums."""
        line = self.lines[rank]
        first, last = sums.first_keys >> SEGMENT_BITS, sums.last_keys >> SEGMENT_BITS
        following = np.append(line.first, 1 << 62)[np.searchsorted(line.first, first)]
        self.counts[rank] += folded_steps(sums.counts, first, last, following)
        both = [np.concatenate(part) for part in zip(line, (first, last, sums.sums.sum(axis=1)), strict=True)]
        order = np.argsort(both[0], kind="stable")
        self.lines[rank] = Timeline(*(part[order] for part in both))


def reduce(
    session: SessionFile,
    thresholds: Thresholds,
    baseline: Baseline | None = None,
    *,
    newest: bool = False,
) -> Whole | None:
    """
    Reduce the run that `session` reads, or about `MAX_ROWS` of its `newest` rows; None when it has none.
    Raises `SessionFileError`.
    """
    ranks, _ = session.rows(last=1)
    if not ranks:
        return None
    run, sums = None, session.folded()
    folded = {own.rank: sums[own.process_id] for own in ranks if own.process_id in sums}
    if folded and not newest:
        with contextlib.suppress(ValueError):  # of another version: then of the rows that are left
            run = unpack(session.kept(), ranks)
    if run is not None:
        folded = _outside(folded, run)
    run = run or reduction.begun(ranks, thresholds, baseline)
    run.last_step = reduction.last_common_step(ranks)
    since = -session.newest_chunks(MAX_ROWS) if newest else 0
    HistoryReader(session, thresholds, since, run).read_all(PIECE_ROWS)
    return Whole(run, ranks, folded)


def _outside(folded: Mapping[int, Folded], run: Reduction) -> dict[int, Folded]:
    """Return the sums of rows that `run` has not: it may have begun later, or have ended before."""
    found, ends = {}, run.history.ends()
    for rank, sums in folded.items():
        first, last = ends[rank]
        outside = (sums.last_keys < first) | (sums.first_keys > last)
        if outside.any():
            found[rank] = Folded(*(column[outside] for column in sums))
    return found


def folded_steps(counts: Int64, first: Int64, last: Int64, following: int | Int64) -> int:
    """
    Return of how many steps before `following` there are sums (m,) of `counts` rows of the steps `first` to
    `last`; the rows of one step may be in two sums.
    """
    before = np.concatenate([[-1], np.maximum.accumulate(last)[:-1]])
    spans = np.minimum(last, following - 1) - np.maximum(first, before + 1) + 1
    return int(np.clip(np.minimum(spans, counts), 0, None).sum())
