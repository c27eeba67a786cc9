"""
The ledger of a run: where the time of each rank went, over all attempts. Pure, in integer ns.

An attempt is a table of ranks. The time of a rank, from the begin of its attempt to the end, is divided at
four moments: the monitor attached, the first row ended, the newest row ended, the process ended. Between the
second and the third, the rows say what the time was. Intervals (checkpoints, evaluations, hangs) are taken
out of the part that they are in. What remains is `other`, so each rank's time adds up exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from traceml_ray.analysis.window import Float, Int64
from traceml_ray.signals.goodput.pieces import (
    AFTER,
    BEFORE,
    CATEGORIES,
    DATA,
    EXPLICIT,
    HANG,
    IDLE,
    INSIDE,
    OF_OTHERS,
    OTHER,
    PREPARATION,
    PRODUCTIVE,
    RECOVERY,
    RESTORE,
    STARTUP,
    WAITING,
    WASTED,
    Piece,
)


@dataclass(frozen=True, eq=False)
class RankMoments:
    """The ranks of an attempt that have reported, (R,) each. Times are int64 ns, UNKNOWN if not known."""

    ranks: Int64
    attached_ns: Int64
    before_ns: Int64
    """
    Time at the begin of the attempt before its process was started, if it joined late or replaced another. 0:
    it started with the others.
    """
    replaced: np.ndarray[Any, Any]
    """Whether another process was the rank before (R,) bool. What that did is not known."""
    first_row_ns: Int64
    """When the first row ended. UNKNOWN: there is no complete row."""
    last_row_ns: Int64
    """When the newest row ended."""
    ended_ns: Int64
    """When the process ended, or was last seen."""
    over: np.ndarray[Any, Any]
    """Whether the process ended by itself (R,) bool. Otherwise it runs, or was killed in a step."""
    took_ns: Int64
    """Time of the rows after the first one. UNKNOWN: it is not known what the rows were."""
    data_ns: Int64
    waited_ns: Int64
    """Parts of `took_ns`: waiting for data, and for other ranks."""
    explicit: Int64
    """(R, 3, 6) ns: intervals by part, see `of_parts`."""
    others: Int64
    """(R, 3, 3) ns: time in which other ranks saved, loaded or evaluated, see `of_others`."""
    hung_ns: Int64
    """
    (R, 2): length of the hangs in which it waited for a rank that is named, and of those in which it is named
    itself, in `data`. In other hangs it worked, or all ranks were in the exchange.
    """


@dataclass(frozen=True, eq=False)
class Attempt:
    """One attempt of a run: the ranks that started together, and how long it lasted."""

    begin_ns: int
    end_ns: int
    """End of the attempt, which is not before `begin_ns` and not after the begin of the next one."""
    world: int
    """Number of its ranks, including those that never reported."""
    ranks: RankMoments
    wasted: float | None = 0.0
    """Share (0..1) of the time in its steps that later attempts repeated. None: not known."""


@dataclass(eq=False)
class Balance:
    """Where the time of an attempt went."""

    by_rank: Int64
    """(R, CATEGORIES) ns: of each rank that has reported, without the recovery after the attempt."""
    total: list[int]
    """ns of all ranks together by category (Python integers of any size), with the recovery."""
    rank_ns: int
    """Time of all ranks together in ns: the sum of `total`."""
    twice_ns: int
    """Time of all ranks together that rows and moments contradict each other by, in ns. 0 in a sound run."""
    unknown_ns: int = field(default=0)
    """Part of `other` in which ranks took steps, but it is not known what these were, in ns."""


def balance(attempt: Attempt, until_ns: int | None = None) -> Balance:
    """
    Return where the time of an attempt went. `until_ns`: begin of the next attempt; the time until then is
    recovery. None: there is no next attempt.
    """
    length = attempt.end_ns - attempt.begin_ns
    by_rank, twice, unknown = _by_rank(attempt)
    total = [_sum(by_rank[:, category]) for category in range(len(CATEGORIES))]
    silent = max(0, attempt.world - len(by_rank))
    total[OTHER] += silent * length
    ranks = silent + len(by_rank)
    gap = 0 if until_ns is None else max(0, until_ns - attempt.end_ns)
    total[RECOVERY] += ranks * gap
    return Balance(by_rank, total, ranks * (length + gap), twice, unknown)


def _by_rank(attempt: Attempt) -> tuple[Int64, int, int]:
    ranks, begin, end = attempt.ranks, attempt.begin_ns, attempt.end_ns
    sums = np.zeros((len(ranks.ranks), len(CATEGORIES)), np.int64)
    attached = np.clip(ranks.attached_ns, begin, end)
    ended = np.clip(np.where(ranks.ended_ns < 0, end, ranks.ended_ns), attached, end)
    stepped, known = ranks.first_row_ns >= 0, ranks.took_ns >= 0
    first = np.where(stepped, np.clip(ranks.first_row_ns, attached, ended), ended)
    took, data, waited = (
        np.where(known & stepped, part, 0) for part in (ranks.took_ns, ranks.data_ns, ranks.waited_ns)
    )
    last = np.clip(np.maximum(ranks.last_row_ns, first + took), first, ended)
    before = np.clip(ranks.before_ns, 0, attached - begin)
    sums[:, OTHER], sums[:, IDLE] = np.where(ranks.replaced, before, 0), np.where(ranks.replaced, 0, before)
    sums[:, STARTUP] = attached - begin - before
    left, twice = _explicit_parts(ranks, sums, (first - attached, last - first, ended - last))
    work, data, waited, excess = _in_rows(ranks, took, data, waited, left[INSIDE])
    not_rows = left[INSIDE] - work - data - waited
    # what is left of each part belongs to what others did meanwhile, as far as the rank waited for them
    prepared = _for_others(sums, left[BEFORE], ranks.others[:, BEFORE], (RESTORE,))
    waited = _for_others(sums, waited, ranks.others[:, INSIDE], OF_OTHERS)
    after = _for_others(sums, left[AFTER], ranks.others[:, AFTER], OF_OTHERS)
    sums[:, PREPARATION] = prepared
    sums[:, PRODUCTIVE], sums[:, WAITING] = work, waited
    sums[:, DATA] += data
    sums[:, OTHER] += not_rows + np.where(ranks.over, 0, after)
    sums[:, IDLE] += np.where(ranks.over, after, 0) + (end - ended)
    _move_wasted(sums, attempt.wasted)
    return sums, _sum(twice + excess), _sum(np.where(known, 0, not_rows))


def _explicit_parts(ranks: RankMoments, sums: Int64, lengths: Sequence[Int64]) -> tuple[list[Int64], Int64]:
    """
    Add the time of checkpoints, evaluations and hangs to `sums`, as far as it fits into the parts of a rank's
    life, whose `lengths` (R,) are given. Return what is left of each part, and what did not fit (R,).
    """
    left, twice = list[Int64](), np.zeros(len(sums), np.int64)
    for part, length in enumerate(lengths):
        explicit = ranks.explicit[:, part].copy()
        over = np.maximum(explicit.sum(axis=1) - length, 0)
        twice += over
        for place in range(len(EXPLICIT) - 1, -1, -1):  # what does not fit into the part
            cut = np.minimum(explicit[:, place], over)
            explicit[:, place] -= cut
            over -= cut
        sums[:, EXPLICIT] += explicit
        left.append(length - explicit.sum(axis=1))
    return left, twice


def _for_others(sums: Int64, left: Int64, others: Int64, categories: Sequence[int]) -> Int64:
    """
    Move time of ranks `left` (R,) to `categories`, as far as other ranks did that meanwhile: `others` (R, 3).
    Return what is left.
    """
    for category in categories:
        moved = np.minimum(left, others[:, OF_OTHERS.index(category)])
        sums[:, category] += moved
        left = left - moved
    return left


def _in_rows(
    ranks: RankMoments, took: Int64, data: Int64, waited: Int64, room: Int64
) -> tuple[Int64, Int64, Int64, Int64]:
    """
    Return work, data and waits of the rows without what is counted by itself (hangs, checkpoints,
    evaluations), cut to `room`; and what was cut. All are (R,).
    """
    explicit = ranks.explicit[:, INSIDE]
    hang = np.minimum(explicit[:, EXPLICIT.index(HANG)], took)
    outside = np.minimum(explicit.sum(axis=1) - explicit[:, EXPLICIT.index(HANG)], took)
    work = took - data - waited
    work, data, waited, _ = _without(outside, work, data, waited)
    hung_waiting = np.minimum(hang, ranks.hung_ns[:, 0])
    hung_in_data = np.minimum(hang - hung_waiting, ranks.hung_ns[:, 1])
    waited, work, data, _ = _without(hung_waiting, waited, work, data)
    data, work, waited, _ = _without(hung_in_data, data, work, waited)
    work, waited, data, _ = _without(hang - hung_waiting - hung_in_data, work, waited, data)
    excess = np.maximum(work + data + waited - room, 0)
    work, data, waited, _ = _without(excess, work, data, waited)
    return work, data, waited, excess


def _move_wasted(sums: Int64, wasted: float | None) -> None:
    """Move the share `wasted` (0..1) of the steps to the steps that were repeated. None: it is not known."""
    for category in (PRODUCTIVE, DATA, WAITING) if wasted else ():
        moved = np.floor(sums[:, category] * min(1.0, wasted or 0.0)).astype(np.int64)
        moved = np.minimum(moved, sums[:, category])
        sums[:, category] -= moved
        sums[:, WASTED] += moved


def _without(amount: Int64, *parts: Int64) -> tuple[Int64, ...]:
    """
    Return `parts` (R,) each, less `amount` (R,), and what is left of it. It is taken from the first part as
    far as that has so much, then from the next.
    """
    left, rest = amount, []
    for part in parts:
        cut = np.minimum(part, left)
        left = left - cut
        rest.append(part - cut)
    return (*rest, left)


def _sum(values: Int64) -> int:
    """Return the sum of non-negative values, which may exceed 64 bits."""
    return (int((values >> 32).sum()) << 32) + int((values & 0xFFFFFFFF).sum())


def _spans(columns: Int64, ranks: int) -> Float:
    """Return when each column (C, 3) begins and ends, (C, 2) ns after the first row, on the average rank."""
    ends = np.cumsum(columns[:, 2] / max(1, ranks))
    return np.stack([np.concatenate([[0.0], ends[:-1]]), ends], axis=1)


def without_intervals(
    columns: Int64, ranks: int, first_row_ns: Sequence[int], pieces: Sequence[Sequence[Piece]]
) -> Int64:
    """
    Return `columns` of steps (C, 3: first step, last step, ns of all ranks) without the time of intervals.

    Args:
        columns: steps in order.
        ranks: number of ranks whose time is in them.
        first_row_ns: when the first row of some of these ranks ended (ns).
        pieces: intervals of the same ranks.
    """
    spans, taken = _spans(columns, ranks), np.zeros(len(columns))
    for first, of_rank in zip(first_row_ns, pieces, strict=True):
        for piece in of_rank:
            length = piece.ended_ns - piece.began_ns
            inside = _inside(spans, piece.began_ns - first, piece.ended_ns - first)
            taken += inside * (min(piece.busy_ns, length) / length if length > 0 else 0.0)
    taken *= ranks / max(1, len(pieces))
    left = np.maximum(columns[:, 2] - np.rint(taken).astype(np.int64), 0)
    return np.stack([columns[:, 0], columns[:, 1], left], axis=1)


def _inside(spans: Float, begin: float, end: float) -> Float:
    """Return how much of the time from `begin` to `end` is in each span."""
    inside: Float = np.maximum(np.minimum(spans[:, 1], end) - np.maximum(spans[:, 0], begin), 0)
    return inside


def whole_step(columns: Int64, ranks: int, first_row_ns: int, piece: Piece) -> Piece:
    """
    Return a hang from the end of the step before it to the end of the step that it is in. It was seen when a
    report was late, so its begin and end are known less well than those of the step. If the step is not
    known by itself, return `piece`.
    """
    if not len(columns):
        return piece
    spans, length = _spans(columns, ranks), piece.ended_ns - piece.began_ns
    inside = _inside(spans, piece.began_ns - first_row_ns, piece.ended_ns - first_row_ns)
    place = int(inside.argmax())
    begin, end = (int(edge) for edge in spans[place])
    fits = inside[place] >= 0.8 * length and end - begin <= 1.5 * length
    if not fits or columns[place, 0] != columns[place, 1]:
        return piece
    return Piece(piece.category, first_row_ns + begin, first_row_ns + end, end - begin)


def share_from(columns: Int64, step: int) -> float:
    """
    Return the share (0..1) of the time in `columns` (C, 3: first step, last step, ns) that is in the steps
    from `step` on. The steps of a column take equally long. 0 without any time.
    """
    total = float(columns[:, 2].sum(dtype=float)) if len(columns) else 0.0
    if total <= 0:
        return 0.0
    steps = columns[:, 1] - columns[:, 0] + 1
    inside = np.clip((columns[:, 1] - step + 1) / np.maximum(steps, 1), 0.0, 1.0)
    return float((inside * columns[:, 2]).sum() / total)


def steps_from(columns: Int64, step: int) -> int:
    """Return the number of steps in `columns` from `step` on."""
    if not len(columns):
        return 0
    return max(0, int(columns[:, 1].max()) - max(step, int(columns[:, 0].min())) + 1)


@dataclass(frozen=True)
class Progress:
    """What tells which steps of an attempt were repeated."""

    first_step: int | None
    """Number of its first step. None: it took none, or its steps are not known."""
    last_step: int | None
    restored: bool = False
    """Whether it restored a checkpoint before its first step."""
    saved_step: int | None = None
    """All steps below this one are in the newest checkpoint that it saved. None: not known, or none."""
    saved: bool = False
    """Whether it saved a checkpoint."""
    restored_step: int | None = None
    """Number of steps that the checkpoint that it restored says it has. None: not known."""
    saved_steps: frozenset[int] = frozenset()
    """The same as `saved_step`, of each checkpoint that it saved, as far as they are known."""
    joined: bool = False
    """Whether it saved more checkpoints than those."""


class Repeated(NamedTuple):
    """From which step on the steps of an attempt were repeated."""

    step: int | None
    """First repeated step; None: none was repeated, or it is not known."""
    why: str = ""
    """Why it is not known; "": it is known."""


def repeated(attempts: Sequence[Progress]) -> list[Repeated]:
    """
    Return, for each attempt in order, from which of its steps on later attempts did the steps again.

    A script that continues from a checkpoint may say which step it is in (adapters do). Then the next attempt
    begins at a step above 0, and the steps from there on are repeated. If the next attempt begins at step 0,
    the number says nothing, and checkpoints decide: the next attempt restored one, so the steps after the
    last one saved are lost; or nothing was saved and nothing restored, so all steps are lost. If the
    checkpoint that was restored says how many steps it has, and one with so many was saved before, the next
    attempt began there.
    """
    begins = _begins(attempts)
    numbered = [_moved(attempt, begin) for attempt, begin in zip(attempts, begins, strict=True)]
    results = []
    for index, (attempt, begin) in enumerate(zip(numbered, begins, strict=True)):
        result = _repeated(attempt, [one for one in numbered[index + 1 :] if one.first_step is not None])
        results.append(result if result.step is None else result._replace(step=max(0, result.step - begin)))
    return results


def _begins(attempts: Sequence[Progress]) -> list[int]:
    """Return by how much the number of each step of an attempt is too small: 0 if the script numbers it."""
    begins, saved, joined = list[int](), set[int](), False
    for attempt in attempts:
        begin, restored = 0, attempt.restored_step
        if restored is not None and attempt.first_step == 0:
            near = [step for step in (restored, restored + 1, restored - 1) if step in saved]
            begin = near[0] if near else restored if joined and restored <= max(saved) else 0
        begins.append(begin)
        saved |= {begin + step for step in attempt.saved_steps}
        joined = (joined or attempt.joined) and bool(saved)
    return begins


def _moved(attempt: Progress, begin: int) -> Progress:
    """Return an attempt whose steps have the numbers of the whole run."""
    if not begin or attempt.first_step is None or attempt.last_step is None:
        return attempt
    saved = None if attempt.saved_step is None else attempt.saved_step + begin
    first, last = attempt.first_step + begin, attempt.last_step + begin
    return replace(attempt, first_step=first, last_step=last, saved_step=saved)


def _repeated(attempt: Progress, later: Sequence[Progress]) -> Repeated:
    if attempt.first_step is None or attempt.last_step is None or not later:
        return Repeated(None)
    numbered = [one.first_step for one in later if one.first_step]
    following = later[0]
    candidates = [step for step in numbered if step is not None]
    if not following.first_step:
        if following.restored and attempt.saved_step is not None:
            candidates.append(attempt.saved_step)
        elif not attempt.saved and (attempt.restored or not following.restored):
            candidates.append(attempt.first_step)  # it began where the next one began
        else:
            return Repeated(None, _why(following))
    step = min(candidates)
    return Repeated(step if step <= attempt.last_step else None)


def _why(following: Progress) -> str:
    if following.restored:
        return "it is not known at which step its last checkpoint was saved"
    return "it saved a checkpoint, but no loading of one was seen in the next attempt"
