"""
The data that a report takes from the rows of a run of any length. The rows are read once, into a step
history. Also reads the rows of the first steps and the named spans of stages, and finds why ranks are late.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import numpy as np

from traceml_ray.analysis import step_history
from traceml_ray.analysis.baseline import Baseline
from traceml_ray.analysis.reasons import MAX_PEERS, SpanRate, SpanRates, has_reason, with_reason
from traceml_ray.analysis.step_history import Reduction
from traceml_ray.analysis.step_stats import LEAST_SHARE, FirstSteps, Timeline, first_steps
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.uneven_work import MIN_STEPS, amounts
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.window import Float, Int64, RankRows, Window
from traceml_ray.reports.run_facts import RunFacts
from traceml_ray.signals.experts.view import experts_of
from traceml_ray.stages import FLAG_NO_SPLIT, N_STAGES, SEGMENT_BITS, STAGES
from traceml_ray.store.history_reader import HistoryReader, unpack
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.schema import legible
from traceml_ray.store.session_file import Folded, SessionFile, columns_of
from traceml_ray.store.step_shapes import SpanTimes
from traceml_ray.store.summary_shape import SpanStatistics

MAX_ROWS = 2_000_000
"""Number of rows (steps × ranks) above which a report of the newest rows is made first."""
PIECE_ROWS = 500_000
"""Number of rows read at a time."""


class StoredTotals:
    """
    The reduction of a run with the processes `ranks`. Of the compacted rows `folded` (by rank) only sums
    exist; `history` does not include them.
    """

    def __init__(self, run: Reduction, ranks: Sequence[RankRows], folded: Mapping[int, Folded]) -> None:
        assert run.replay is not None
        self.history = run.history
        self.judged = run.replay.done()
        self._sample = self.judged.sample()
        self.stats = run.history.stats()
        """Statistics of the steps; None if there are no steps."""
        self.read = run.rows - len(ranks) * run.history.left_out
        """Number of rows that statistics and verdicts cover."""
        self.counted = run.rows + sum(int(sums.counts.sum()) for sums in folded.values())
        """Number of rows that `counts` and `mean_ns` cover."""
        self.counts = run.history.counts()
        """Number of steps of each rank."""
        self.timed = run.history.timed()
        """Share (0..1) of the steps in which a device's clock was read, for a clock that is still running."""
        self.lines = {rank_rows.rank: run.history.timeline(rank_rows.rank) for rank_rows in ranks}
        """Timeline of the steps of each rank."""
        known = [line for line in self.lines.values() if len(line.first)]
        self.first_step = min((int(line.first[0]) for line in known), default=0)
        self.last_step = max((int(line.last[-1]) for line in known), default=0)
        for rank, sums in folded.items():
            self._add(rank, sums)

    def mean_ns(self) -> float:
        """Return the mean time of a step, warm-up included (ns); NaN without any step."""
        means = [line.took.sum() / count for rank, line in self.lines.items() if (count := self.counts[rank])]
        return float(np.mean(means)) if means else np.nan

    def window(self, verdict: Verdict) -> Window:
        """Return the steps of a verdict that names a rank, as far as their rows or sums exist."""
        first, last = verdict.from_step or 0, verdict.to_step or 0
        if self.history.merged and self._sample is not None:  # it has the stages as they were
            return self._sample
        return self.history.steps_between(first, last)

    def sampled(self, verdict: Verdict) -> Window:
        """
        Return the steps of a verdict that are in the sample of the run. If these are few,
        return `window`.
        """
        first, last = verdict.from_step or 0, 1 << 62 if verdict.to_step is None else verdict.to_step
        if self._sample is not None:
            steps = self._sample.keys >> SEGMENT_BITS
            part = self._sample.select((steps >= first) & (steps <= last))
            if len(part.starts) >= MIN_STEPS:
                return part
        return self.window(verdict)

    def stage_ns(self) -> dict[int, list[float]]:
        """Return the mean time of each rank's stages: rank → ns for each stage."""
        if self.history.merged and self._sample is not None and len(self._sample.keys):
            ranks, ns = self._sample.ranks, self._sample.d.sum(axis=0) / len(self._sample.starts)
        else:
            assert self.stats is not None
            ranks, ns = np.array(self.history.ranks), 1e6 * self.stats.mean_stages()
        known = ~np.isnan(ns).any(axis=1)
        return dict(zip(ranks[known].tolist(), ns[known].tolist(), strict=True))

    def _add(self, rank: int, sums: Folded) -> None:
        """Include rows that are kept as sums only in the counts and times."""
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
) -> StoredTotals | None:
    """
    Reduce the run that `session` reads, or about `MAX_ROWS` of its `newest` rows; None if it has no rows.
    Raises `SessionFileError`.
    """
    ranks, _ = session.rows(last=1)
    if not ranks:
        return None
    run, sums = None, session.folded()
    folded = {
        rank_rows.rank: sums[rank_rows.process_id] for rank_rows in ranks if rank_rows.process_id in sums
    }
    if folded and not newest:
        with contextlib.suppress(ValueError):  # of another version: then of the rows that are left
            run = unpack(session.kept(), ranks)
    if run is not None:
        folded = _outside(folded, run)
    run = run or step_history.begun(ranks, thresholds, baseline)
    run.last_step = step_history.last_common_step(ranks)
    since = -session.newest_chunks(MAX_ROWS) if newest else 0
    HistoryReader(session, thresholds, since, run).read_all(PIECE_ROWS)
    return StoredTotals(run, ranks, folded)


def _outside(folded: Mapping[int, Folded], run: Reduction) -> dict[int, Folded]:
    """Return the sums of rows that `run` does not include: it may have started later, or ended earlier."""
    folded_by_rank, ends = {}, run.history.ends()
    for rank, sums in folded.items():
        first, last = ends[rank]
        outside = (sums.last_keys < first) | (sums.first_keys > last)
        if outside.any():
            folded_by_rank[rank] = Folded(*(column[outside] for column in sums))
    return folded_by_rank


def folded_steps(counts: Int64, first: Int64, last: Int64, following: int | Int64) -> int:
    """
    Return the number of steps before `following` that sums (m,) cover. Each sum has `counts` rows of the
    steps `first` to `last`; the rows of one step may be in two sums.
    """
    before = np.concatenate([[-1], np.maximum.accumulate(last)[:-1]])
    spans = np.minimum(last, following - 1) - np.maximum(first, before + 1) + 1
    return int(np.clip(np.minimum(spans, counts), 0, None).sum())


_MAX_RANKS = 1024
"""Number of ranks above which the first steps are not read."""


def first_steps_of(facts: RunFacts, totals: StoredTotals | None) -> FirstSteps | None:
    """
    Return the cost of the first steps of a finished run; None if it is small, or their rows are gone. Raises
    `SessionFileError`.
    """
    if (
        facts.fact("status") in ("running", None)
        or totals is None
        or totals.stats is None
        or not 0 < len(facts.ranks) <= _MAX_RANKS
    ):
        return None
    lines = [line for line in totals.lines.values() if len(line.first)]
    run_ns = float(np.mean([line.took.sum() for line in lines])) if lines else 0.0
    usual_ns, warmup = 1e6 * float(totals.stats.exposed.sum()), facts.thresholds.warmup_steps
    before = [line.took[line.first < totals.first_step + warmup].sum() for line in lines]
    if not usual_ns or max(before, default=0) < LEAST_SHARE * run_ns:
        return None
    processes = {process.id: rank for rank, process in sorted(facts.ranks.items()) if process.stored}
    d, flags = [], []
    for step in range(totals.first_step, totals.first_step + warmup):
        step_rows = _step(facts, processes, step)
        if step_rows is None:
            break
        d.append(step_rows[0])
        flags.append(step_rows[1])
        if step_rows[0][:, 1:].sum(axis=1).max() < 2 * usual_ns:
            break
    if not d:
        return None
    split = (np.array(flags) & FLAG_NO_SPLIT == 0).all(axis=0)
    return first_steps(np.array(d), split, np.array([*processes.values()]), usual_ns, run_ns)


def _step(facts: RunFacts, processes: dict[int, int], step: int) -> tuple[Int64, Int64] | None:
    """Return a step of all ranks, ns (R, 6), and their flags (R,); None where some rank lacks it."""
    chunks = facts.session.step_chunks(processes.keys(), step)
    d, flags = [], []
    for process in processes:
        if process not in chunks:
            return None
        keys, marks, rows = columns_of(chunks[process])
        of_step = keys >> SEGMENT_BITS == step
        if not of_step.any():
            return None
        d.append(rows[of_step, :N_STAGES].sum(axis=0))
        flags.append(int(np.bitwise_or.reduce(marks[of_step])))
    return np.array(d), np.array(flags)


_MAX_SPANS = 100


class StoredSpans:
    """The stored spans of a run's ranks; `ranks` holds the process of each rank."""

    def __init__(self, session: SessionFile, ranks: Mapping[int, RankProcess]) -> None:
        self._session = session
        self._ranks = {process.id: rank for rank, process in ranks.items()}

    def find(self, ranks: Sequence[int], first: int, last: int) -> dict[int, SpanRates]:
        """Return the rates of `ranks` over the steps `first` to `last`, see `analysis.reasons.Find`."""
        alone = next(iter(self._ranks)) if len(self._ranks) == 1 else None
        stored = self._session.spans(first, last, alone)
        known: dict[int, int] = {}
        for row in stored:
            known[row["process"]] = max(known.get(row["process"], -1), min(row["last_step"], last))
        rates_of_rank: dict[int, dict[tuple[str, int], SpanRate]] = {}
        for row in stored:
            rank, steps = self._ranks.get(row["process"]), known[row["process"]] - first + 1
            if rank is not None and steps > 0 and (row["total_ns"] or row["count"]):
                rate = SpanRate(row["total_ns"] / steps, row["count"] / steps, (row["bytes"] or 0) / steps)
                rates_of_rank.setdefault(rank, {})[row["name"], row["stage"]] = rate
        return {rank: rates_of_rank[rank] for rank in ranks if rank in rates_of_rank}

    def block(self, stages: Mapping[int, Sequence[float]], first: int, last: int) -> list[SpanStatistics]:
        """
        Return the spans over the steps `first` to `last`, the largest on any rank first. `stages` is the mean
        time of each stage in these steps: rank → ns.
        """
        known = self.find(list(stages), first, last)
        block: list[SpanStatistics] = []
        for name, stage in {key for rates in known.values() for key in rates}:
            rates_here = {rank: rates[name, stage] for rank, rates in known.items() if (name, stage) in rates}
            worst = max(rates_here, key=lambda rank: rates_here[rank].ns)
            rate = rates_here[worst]
            block.append(
                SpanStatistics(
                    stage=STAGES[stage],
                    name=name,
                    median_ms=float(np.median([rates_here[r].ns if r in rates_here else 0.0 for r in known]))
                    / 1e6,
                    max_ms=rate.ns / 1e6,
                    worst_rank=worst,
                    share=min(1.0, rate.ns / stages[worst][stage]) if stages[worst][stage] else None,
                    times_per_step=rate.times,
                    bytes=rate.bytes,
                )
            )
        return sorted(block, key=lambda span: (-span.max_ms, span.name))[:_MAX_SPANS]


def spans_of(session: SessionFile, rank: int, first: int, last: int) -> list[SpanTimes]:
    """
    Return the spans of a rank over the steps `first` to `last`, the longest first;
    in a small job, each with the median of all ranks.
    """
    ranks = session.ranks()
    known = ranks if len(ranks) <= MAX_PEERS else {rank: ranks[rank]} if rank in ranks else {}
    rates_of_rank = StoredSpans(session, known).find([*known], first, last)
    spans = []
    for (name, stage), rate in sorted(rates_of_rank.get(rank, {}).items(), key=lambda span: -span[1].ns):
        every = [
            rates[name, stage].ns / 1e6 if (name, stage) in rates else 0.0 for rates in rates_of_rank.values()
        ]
        spans.append(
            SpanTimes(
                stage=STAGES[stage],
                name=name,
                ms=rate.ns / 1e6,
                median_ms=float(np.median(every)) if known is ranks else None,
                times_per_step=rate.times,
                bytes=rate.bytes,
            )
        )
    return spans


def with_stored_reason(verdict: Verdict, facts: RunFacts, totals: StoredTotals | None) -> Verdict:
    """Return `verdict` with its reason, if one is found. Raises `SessionFileError`."""
    if totals is None or not has_reason(verdict):
        return verdict

    def sizes(ranks: Sequence[int], steps: Int64) -> dict[str, Float]:
        processes = {facts.ranks[rank].id: rank for rank in ranks if rank in facts.ranks}
        stored = facts.session.step_sizes(processes, steps)
        with legible(facts.session.path):
            return amounts({processes[process]: pieces for process, pieces in stored.items()}, ranks, steps)

    uneven = experts_of(facts.session, facts.ranks.values())
    return with_reason(verdict, totals.sampled(verdict), sizes, uneven)
