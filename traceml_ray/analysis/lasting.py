"""
Finds the ranks that are late in most steps, by enough to count, and more often than by chance.

Chance is measured over the newest steps of a run, which are more than those of a window. If chance may
explain a late rank, the result says how much more often the rank would have to be late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from traceml_ray import text
from traceml_ray.analysis.chance import (
    COMPARED,
    LOUD_STEPS,
    correlation_steps,
    least_lateness,
    least_z,
    usually_alike,
    z_late,
)
from traceml_ray.analysis.evidence import Cause, Evidence
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import Bool, Float, Int64
from traceml_ray.stages import BACKWARD, FORWARD, SYNC_WAIT

MOST_STEPS = 1000
MOST_ROWS = 400_000
"""Largest number of rows (steps × ranks). With very many ranks fewer steps are kept."""
_Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PastSteps:
    """
    The newest steps of one run with a fixed set of `ranks` (R,), up to step `last`.

    Each of `pieces` has the excess of every rank in each local stage, in ns (k, R, 5), the reference that it
    exceeds, in ns (k, 5), and the time of the steps, in ns (k,).
    """

    ranks: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    last: int = -1
    pieces: tuple[tuple[_Float32, _Float32, Float], ...] = ()
    _stays: dict[int | None, float] = field(default_factory=dict, compare=False)
    _continued: list[tuple[Int64, PastSteps]] = field(default_factory=list, compare=False)
    """
    Last results of `then`, each with the excess it was made from. Rules, doubts and the history of a run ask
    for the same result.
    """

    def __len__(self) -> int:
        return self._steps

    @cached_property
    def _steps(self) -> int:
        return sum([len(step_ns) for _, _, step_ns in self.pieces])

    def then(self, evidence: Evidence) -> PastSteps:
        """Return these steps followed by those of a window. If its ranks differ, only the window's."""
        if self._continued and self._continued[0][0] is evidence.by_step:
            return self._continued[0][1]
        window = evidence.window
        before = self if np.array_equal(window.ranks, self.ranks) else PastSteps(window.ranks)
        new = window.steps > before.last
        if not new.any():
            return before
        piece = (
            evidence.by_step[new, :, :SYNC_WAIT].astype(np.float32),
            window.by_step(evidence.ref)[new, :SYNC_WAIT].astype(np.float32),
            evidence.step_ns[new].astype(np.float64),
        )
        pieces, steps = [*before.pieces, piece], len(before) + len(piece[2])
        most = min(MOST_STEPS, MOST_ROWS // max(1, len(window.ranks)))
        while len(pieces) > 1 and steps - len(pieces[0][1]) >= most:
            steps -= len(pieces.pop(0)[2])
        continued = PastSteps(window.ranks, int(window.steps[-1]), tuple(pieces))
        self._continued[:] = [(evidence.by_step, continued)]
        return continued

    def excess(self, steps: int) -> Float:
        """Return the excess of each rank in each local stage in the newest steps, in ns (L, R, 5)."""
        return np.concatenate([excess for excess, *_ in self.pieces])[-steps:].astype(np.float64)

    def lateness(self, stage: int | None) -> _Float32:
        """Return how late each rank was in `stage` (None: in all stages), in all steps, in ns (L, R)."""
        parts = [excess.sum(axis=2) if stage is None else excess[:, :, stage] for excess, *_ in self.pieces]
        return np.concatenate(parts)

    def work(self, stage: int | None, columns: Int64) -> Float:
        """
        Return the work of ranks in a stage (None: in all local ones) in all steps, ns (L, C).

        Args:
            stage: a local stage, or None.
            columns: indices of the ranks (C,).
        """
        picked = slice(None) if len(columns) == len(self.ranks) else columns
        local = slice(None) if stage is None else slice(stage, stage + 1)
        # One sum over all pieces: with a sum for each, most of the time goes into the calls.
        late = np.concatenate([excess[:, picked, local] for excess, *_ in self.pieces])
        ref = np.concatenate([usual[:, local] for _, usual, _ in self.pieces])
        work: Float = (late.sum(axis=2) + ref.sum(axis=1)[:, None]).astype(np.float64)
        return work

    def stay(self, stage: int | None) -> float:
        """Return the number of steps for which work in `stage` (None: in all stages) stays alike."""
        if stage not in self._stays:
            subset = slice(None, None, -(-len(self.ranks) // COMPARED))
            local = slice(None) if stage is None else slice(stage, stage + 1)
            late = np.concatenate([excess[:, subset, local] for excess, *_ in self.pieces]).sum(axis=2)
            self._stays[stage] = correlation_steps(late.astype(np.float64))
        return self._stays[stage]

    def mean_step_ns(self, steps: int) -> float:
        """Mean time of the newest steps, in ns."""
        return float(np.concatenate([step_ns for *_, step_ns in self.pieces])[-steps:].mean())


LONGER = (200, 1000)
"""
Number of steps that are used where ranks have unequal work: in a window of 50 steps chance hides small
effects.
"""
_LOUD = 0.05
"""Share of the time that unequal work must cost for `LONGER` steps to be used."""
_PART = 0.25
"""Share of a rank's whole lateness that a stage must hold to be named as one of its stages."""
_ALIKE = 0.5
"""Forward and backward are one cause if the smaller slow-down is at least this share of the larger one."""
_COMPARED = 512
"""Approximate number of other ranks that show what is chance."""
_COMPUTE = frozenset((FORWARD, BACKWARD))


@dataclass(frozen=True)
class Late:
    """
    Ranks that are late in most steps.

    `causes` has one cause for each stage that holds a good part of the lateness, largest first. `excess` is
    the lateness of the worst rank as a share of the mean step, `z` its number of standard errors above chance
    over `steps` steps.
    """

    causes: tuple[Cause, ...]
    excess: float
    z: float
    steps: int

    @property
    def places(self) -> tuple[int, ...]:
        """Indices of the ranks in the window."""
        return self.causes[0].places

    @property
    def stages(self) -> frozenset[int]:
        """Stages that the ranks are late out of."""
        return frozenset(cause.stage for cause in self.causes)


def late_ranks(
    evidence: Evidence,
    thresholds: Thresholds,
    past: PastSteps | None = None,
    usual: Evidence | None = None,
) -> list[Late]:
    """
    Return the ranks that are late out of a stage, or out of several together, the largest excess first.

    If ranks have unequal work, more steps than those of the window are used too. `usual` is the evidence of a
    longer window, with which the newest steps are compared. A window shorter than the first one of a run is
    not tested against chance.
    """
    steps = len(evidence.window.starts)
    asks = usual is not None or steps >= thresholds.first_window_steps
    control = (usual or evidence).by_step[:, :, :SYNC_WAIT]
    newest = _Steps(
        evidence.by_step[:, :, :SYNC_WAIT],
        evidence.persistent[:, :SYNC_WAIT],
        evidence.mean_step_ns,
        past if past is not None else PastSteps().then(usual or evidence),
        control if asks else None,
    )
    result = newest.late(thresholds, of_sums=not evidence.host_bound)  # hosts are late in each stage a little
    if usual is None and past is not None and asks and len(past) > steps and evidence.uneven() >= _LOUD:
        for longer in LONGER:
            if len(past) > max(steps, longer // 2):
                for late in _late_in_past(newest, longer, thresholds, of_sums=not evidence.host_bound):
                    if not any(_overlap(late, other) for other in result):
                        result.append(late)
    return sorted(result, key=lambda late: -late.excess)


def with_second_stage(late: Late, evidence: Evidence, thresholds: Thresholds) -> tuple[Late, bool]:
    """
    Return `late` with another stage that the same ranks are late out of, and whether the two are one cause.
    Forward and backward are one cause on a slow device.
    """
    stage, places = late.causes[0].stage, list(late.places)
    if len(late.causes) > 1:
        return late, late.stages <= _COMPUTE
    by_stage = evidence.persistent[places].min(axis=0)
    by_stage[stage] = -np.inf
    second = int(np.argmax(by_stage))
    largest = float(evidence.persistent[places, stage].max())
    both = frozenset((stage, second))
    one_cause = both == _COMPUTE and (
        by_stage[second] >= thresholds.second_stage * largest or _slows_alike(evidence, places)
    )
    if not one_cause and by_stage[second] < thresholds.second_stage * late.excess:
        return late, False
    causes = (*late.causes, Cause(second, late.places))
    excess = late.excess + (float(by_stage[second]) if one_cause else 0.0)
    return replace(late, causes=causes, excess=excess), one_cause


def _slows_alike(evidence: Evidence, places: list[int]) -> bool:
    """Whether forward and backward are longer on these ranks by about the same factor."""
    stages = [FORWARD, BACKWARD]
    usual = np.median(evidence.window.by_step(evidence.ref), axis=0)[stages] / evidence.mean_step_ns
    if not usual.all():
        return False
    slower = evidence.persistent[places][:, stages].mean(axis=0) / usual
    return bool(slower.min() >= _ALIKE * slower.max() > 0)


def compared(ranks: int, candidates: Int64) -> Int64:
    """
    Return the indices of the ranks to compare: `candidates` and all others. If there are very many others,
    only some.
    """
    stride = -(-ranks // _COMPARED)
    return np.arange(ranks) if stride == 1 else np.union1d(candidates, np.arange(0, ranks, stride))


def _overlap(one: Late, other: Late) -> bool:
    return not set(one.places).isdisjoint(other.places) and not one.stages.isdisjoint(other.stages)


@dataclass(frozen=True)
class _Steps:
    """
    Steps that are tested: the excess of each rank in each local stage, in ns (K, R, 5), its median as a share
    of the step (R, 5), and the excess in these and earlier steps, which shows the effect of chance (None:
    chance is not considered).
    """

    excess: Float | Int64
    shares: Float
    step_ns: float
    past: PastSteps
    usual: Float | Int64 | None
    sums: Float | Int64 | None = None
    """Excess out of all stages together (K, R); None: not computed yet."""
    works: dict[int | None, Float] = field(default_factory=dict)
    """Work of all ranks in `past` by stage, see `_work`. Windows of one judgement share it."""

    def late(self, thresholds: Thresholds, *, of_sums: bool) -> list[Late]:
        """
        Return the late ranks of each stage. With `of_sums`, also those that only the sum
        of the stages shows.
        """
        result = []
        for stage in np.flatnonzero(self.shares.max(axis=0) >= thresholds.min_excess).tolist():
            groups = self._groups(self.shares[:, stage], stage, thresholds)
            result += [self._late((Cause(stage, places),), excess, z) for places, excess, z in groups]
        if not of_sums or len(self.excess) < thresholds.window_steps:
            return result
        sums = _sums(self.excess) if self.sums is None else self.sums
        if not _often(sums, thresholds.min_excess * self.step_ns):
            return result
        share = np.median(sums, axis=0) / self.step_ns
        shown = {place for late in result for place in late.places}
        for places, excess, z in self._groups(share, None, thresholds):
            if shown.isdisjoint(places):
                by_stage = self.shares[list(places)].mean(axis=0)
                parts = [
                    s for s in np.argsort(-by_stage).tolist() if by_stage[s] >= _PART * by_stage.sum() > 0
                ]
                if parts:
                    result.append(self._late(tuple(Cause(stage, places) for stage in parts), excess, z))
        return result

    def _late_by_more(self, share: Float, candidates: Int64, stage: int | None) -> tuple[Int64, Float]:
        """
        Return those of `candidates` that are late by more than chance and by more than the differences
        between the other ranks' levels of work, and the number of standard errors above chance for each.
        """
        columns = compared(len(share), candidates)
        places = np.searchsorted(columns, candidates)
        work, z = self._work(stage, columns), self._z(places, columns, stage, self.past.stay(stage))
        least = least_z(len(share), len(self.excess))
        sure = z >= least
        all_sure = bool(sure.all())
        if all_sure and self._stand_out(share[columns], places, work):
            return candidates, z
        late = _marked(len(columns), places)
        alike = usually_alike(work, late, share[candidates] * self.step_ns)
        if alike.any():
            z = np.where(alike, self._z(places, columns, stage, 1.0), z)
            sure = z >= least
        hidden = all_sure and bool(sure.all())  # asked above
        if not alike[sure].all() and (hidden or not self._stand_out(share[columns], places[sure], work)):
            return candidates[:0], z[:0]
        return candidates[sure], z[sure]

    def _work(self, stage: int | None, columns: Int64) -> Float:
        if len(columns) < len(self.past.ranks):  # those that are compared depend on the candidates
            return self.past.work(stage, columns)
        if stage not in self.works:
            self.works[stage] = self.past.work(stage, columns)
        return self.works[stage]

    def _z(self, places: Int64, columns: Int64, stage: int | None, stay: float) -> Float:
        """Return by how many standard errors ranks at `places` of `columns` are above chance."""
        assert self.usual is not None
        usual = self.usual[:, columns]
        values = usual.sum(axis=2) if stage is None else usual[:, :, stage]
        return z_late(values.astype(np.float64), places.tolist(), stay, len(self.excess))

    def _stand_out(self, share: Float, places: Int64, work: Float) -> bool:
        """Whether the ranks at `places` are later than the levels of the other ranks differ."""
        if not len(places) or len(places) == len(share):
            return True
        late = _marked(len(share), places)
        lateness = float(share[late].min() - np.median(share[~late])) * self.step_ns
        return lateness >= least_lateness(work, late, lateness, len(self.excess))

    def _late(self, causes: tuple[Cause, ...], excess: float, z: float) -> Late:
        return Late(causes, excess, z, len(self.excess))

    def _groups(
        self, share: Float, stage: int | None, thresholds: Thresholds
    ) -> list[tuple[tuple[int, ...], float, float]]:
        """Return groups of ranks that are late by about as much: indices, largest excess, largest z."""
        if share.max() < thresholds.min_excess:
            return []
        candidates = np.flatnonzero(share >= thresholds.same_cause * thresholds.min_excess)
        z = np.zeros(len(candidates))
        if self.usual is not None:
            candidates, z = self._late_by_more(share, candidates, stage)
        if len(candidates) == len(share):  # all ranks are late in turn: no rank is later than all
            return []
        result = []
        while len(candidates) and (most := float(share[candidates].max())) >= thresholds.min_excess:
            alike = share[candidates] >= thresholds.same_cause * most
            result.append((tuple(candidates[alike].tolist()), most, float(z[alike].max())))
            candidates, z = candidates[~alike], z[~alike]
        return result


def _late_in_past(newest: _Steps, steps: int, thresholds: Thresholds, *, of_sums: bool) -> list[Late]:
    """Return the ranks that are late in the newest steps of the past, see `_Steps.late`."""
    past = newest.past
    excess, step_ns = past.excess(steps), past.mean_step_ns(steps)
    least = thresholds.min_excess * step_ns
    sums = _sums(excess) if of_sums else None
    if not _often(excess, least) and (sums is None or not _often(sums, least)):
        return []
    shares = np.median(excess, axis=0) / step_ns
    longer = _Steps(excess, shares, step_ns, past, excess, sums, newest.works)
    return longer.late(thresholds, of_sums=of_sums)


def _marked(ranks: int, places: Int64) -> Bool:
    """Return whether each of `ranks` ranks is at one of `places` (R,)."""
    marked = np.zeros(ranks, dtype=bool)
    marked[places] = True
    return marked


def _often(excess: Float | Int64, least: float) -> bool:
    """
    Return whether any median over steps (the first axis) can reach `least`: half of the
    values must reach it.
    """
    return bool(2 * np.count_nonzero(excess >= least, axis=0).max() >= len(excess))


def _sums(excess: Float | Int64) -> Float | Int64:
    """
    Return the excess out of all stages together (K, R). `sum` would take four times as
    long on this axis.
    """
    sums: Float | Int64 = np.einsum("krs->kr", excess)
    return sums


def doubt(
    evidence: Evidence,
    places: Sequence[int],
    stage: int,
    past: PastSteps | None,
    limits: Thresholds,
) -> str:
    """
    Return why ranks that are late in a window may be late by chance, in numbers; "" if they are not late by
    as much as a name requires, or are late by more than chance.

    Args:
        evidence: evidence of the window.
        places: indices of the ranks in the window.
        stage: local stage in which they are late.
        past: more steps, by which chance is measured; None: chance is measured by the window alone.
        limits: limits of the verdict.
    """
    if stage >= SYNC_WAIT or not len(places):
        return ""
    if evidence.persistent[list(places), stage].max() < limits.min_excess:
        return ""
    steps = (PastSteps() if past is None else past).then(evidence)
    columns = compared(len(steps.ranks), np.asarray(places))
    lateness = evidence.by_step[:, columns, stage].astype(np.float64)
    late, work = np.isin(columns, places), steps.work(stage, columns)
    late_ns = evidence.persistent[columns[late], stage] * evidence.mean_step_ns
    alike = bool(usually_alike(work, late, late_ns).all())
    z = float(z_late(lateness, np.flatnonzero(late).tolist(), 1.0 if alike else steps.stay(stage)).max())
    least = least_z(len(steps.ranks), len(lateness))
    if z < least:
        return in_words(z, least)
    beyond_ns = float(late_ns.min())
    least_ns = 0.0 if alike else least_lateness(work, late, beyond_ns, len(lateness))
    return "" if beyond_ns >= least_ns else _of_levels(beyond_ns, least_ns, len(work))


def _of_levels(late_ns: float, least_ns: float, steps: int) -> str:
    """
    Return why ranks that are late by `late_ns` may just have work that stays at a higher level
    for a while.
    """
    stays = "the work of the ranks stays at different levels for some steps"
    if math.isinf(least_ns):
        return f"{stays}: {steps:,} steps are known; {LOUD_STEPS} are needed to distinguish a late rank"
    late, least = text.unit(late_ns / 1e6, "ms"), text.unit(least_ns / 1e6, "ms")
    return f"{stays}: it is late by {late}; more than {least} is needed"


def in_words(z: float, least: float) -> str:
    """Describe by how many standard errors a rank is late beyond chance, and how many are required."""
    needed = f"{text.number(least, 1)} are needed"
    errors = f"{text.number(max(math.floor(10 * z) / 10, 0.0), 1)} standard errors"  # never as many as needed
    return f"it was late {errors} more often than chance predicts; {needed}"
