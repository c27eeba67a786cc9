"""
Where the time of a rank may go, and the intervals that are counted by themselves: checkpoints, evaluations,
hangs. Pure, in ns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from traceml_ray.analysis.window import Float, Int64

CATEGORIES = (
    *("productive", "data", "waiting", "checkpoint_save", "checkpoint_restore", "evaluation"),
    *("startup", "preparation", "hang", "wasted", "recovery", "idle", "other"),
)
"""Where the time of a rank goes. All but the first and the last are badput."""
PRODUCTIVE, DATA, WAITING, SAVE, RESTORE, EVALUATION = range(6)
STARTUP, PREPARATION, HANG, WASTED, RECOVERY, IDLE, OTHER = range(6, len(CATEGORIES))
EXPLICIT = SAVE, RESTORE, EVALUATION, HANG, OTHER, DATA
"""Categories of intervals. Where intervals overlap, the first one counts."""
OF_OTHERS = SAVE, RESTORE, EVALUATION
"""Categories in which other ranks may wait for one: rank 0 saves, the others wait in a barrier."""
BEFORE, INSIDE, AFTER = range(3)
"""Parts of a rank's life: until its first row ended, until the newest row ended, until its process ended."""
UNKNOWN = -1
_ALL, _LOWEST, _MOST = 64, 8, 8
"""
Number of ranks up to which the intervals of all of them are looked at by `of_others`. In larger jobs: of so
many of the lowest ranks, and of those with the most time in each category.
"""


class Piece(NamedTuple):
    """An interval of one of `EXPLICIT`: `OTHER` is a pause, `DATA` the wait for the first batch."""

    category: int
    began_ns: int
    ended_ns: int
    busy_ns: int
    """Time in it; less than its length if several short intervals were joined."""
    joined: bool = False
    """Whether several intervals were joined. Others may then lie between them."""


def of_parts(pieces: Sequence[Piece], edges: Sequence[int]) -> Int64:
    """
    Return the time of intervals in the three parts of a rank's life, (3, 6) ns, in order of `EXPLICIT`.

    Args:
        pieces: intervals of the rank.
        edges: when it attached, when its first row ended, when its newest row ended, when it ended (ns).
    """
    sums = np.zeros((3, len(EXPLICIT)), np.int64)
    covered: list[tuple[int, int]] = []
    for place, category in enumerate(EXPLICIT):
        mine = [piece for piece in pieces if piece.category == category]
        for piece in sorted(mine, key=lambda piece: piece.began_ns):
            length = piece.ended_ns - piece.began_ns
            if length <= 0:
                continue
            for part in range(3):
                begin, end = max(piece.began_ns, edges[part]), min(piece.ended_ns, edges[part + 1])
                if begin >= end:
                    continue
                inside = end - begin
                left = inside - _overlap(covered, begin, end)
                busy = min(piece.busy_ns, length) * inside // length if piece.joined else left
                sums[part, place] += min(busy, left)  # no time is counted twice
            if not piece.joined:
                covered = _with(covered, piece.began_ns, piece.ended_ns)
    return sums


def _overlap(covered: Sequence[tuple[int, int]], begin: int, end: int) -> int:
    """Return how much of the time from `begin` to `end` is in `covered`, whose spans are disjoint."""
    return sum(max(0, min(end, to) - max(begin, since)) for since, to in covered)


def _with(covered: Sequence[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """Return disjoint spans that also cover the time from `begin` to `end`."""
    apart = [span for span in covered if span[1] < begin or span[0] > end]
    touching = [span for span in covered if span not in apart]
    joined = min([begin, *(since for since, _ in touching)]), max([end, *(to for _, to in touching)])
    return [*apart, joined]


class Others(NamedTuple):
    """What the other ranks did while a rank did not."""

    ns: Int64
    """(R, 3, 3) ns: time by part of the rank's life, in order of `OF_OTHERS`."""
    spans: list[list[tuple[int, int]]]
    """When some rank did it (ns), disjoint and in order, for each of `OF_OTHERS`."""

    def waited_for(self, row: int, pieces: Sequence[Piece]) -> list[Piece]:
        """Return as intervals what others did in the steps of the rank in `row`, which has `pieces`."""
        mine = merged([(piece.began_ns, piece.ended_ns) for piece in pieces if not piece.joined])
        return [
            Piece(category, begin, end, end - begin)
            for category, spans, ns in zip(OF_OTHERS, self.spans, self.ns[row, INSIDE], strict=True)
            if ns
            for begin, end in minus(spans, mine)
        ]


def of_others(pieces: Sequence[Sequence[Piece]], edges: Int64, explicit: Int64) -> Others:
    """
    Return the time in which other ranks saved, loaded or evaluated while a rank did not.

    Args:
        pieces: intervals of each of R ranks.
        edges: (R, 4) ns, see `of_parts`.
        explicit: (R, 3, 6) ns, the time of these intervals, as `of_parts` returns it.
    """
    others: Int64 = np.zeros((len(edges), 3, len(OF_OTHERS)), np.int64)
    every: list[list[tuple[int, int]]] = []
    for place, category in enumerate(OF_OTHERS):
        mine = explicit[:, :, place]
        spans, joined = list[tuple[int, int]](), np.zeros(3, np.int64)
        for row in _looked_at(mine.sum(axis=1)):
            of_rank = [piece for piece in pieces[row] if piece.category == category]
            spans += [(piece.began_ns, piece.ended_ns) for piece in of_rank if not piece.joined]
            several = [piece for piece in of_rank if piece.joined]
            if several:
                joined = np.maximum(joined, of_parts(several, edges[row].tolist())[:, place])
        every.append(merged(spans))
        others[:, :, place] = np.maximum(_covered(every[-1], edges) + joined - mine, 0)
        others[:, BEFORE, place][mine[:, BEFORE] > 0] = 0  # it did so itself, a little earlier or later
    return Others(others, every)


def _looked_at(sums: Int64) -> list[int]:
    """Return the rows whose intervals are looked at. `sums` (R,): the time in these intervals."""
    if len(sums) <= _ALL:
        return np.flatnonzero(sums).tolist()
    most = np.argpartition(sums, -_MOST)[-_MOST:].tolist()
    return [row for row in sorted({*range(_LOWEST), *most}) if sums[row]]


def merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return disjoint spans in order that cover the same time."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def minus(spans: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return what is in `spans` and not in `others`. Both are disjoint and in order."""
    left, first = list[tuple[int, int]](), 0
    for begin, end in spans:
        while first < len(others) and others[first][1] <= begin:
            first += 1
        place = first
        while place < len(others) and others[place][0] < end:
            if others[place][0] > begin:
                left.append((begin, others[place][0]))
            begin = max(begin, others[place][1])
            place += 1
        if begin < end:
            left.append((begin, end))
    return left


def _covered(spans: Sequence[tuple[int, int]], edges: Int64) -> Int64:
    """Return how much of the time between two edges (R, 4) is in disjoint `spans`, (R, 3) ns."""
    if not spans:
        return np.zeros((len(edges), 3), np.int64)
    base = spans[0][0]
    moments, before, total = list[int](), list[int](), 0
    for begin, end in spans:
        moments += [begin - base, end - base]
        before += [total, total + end - begin]
        total += end - begin
    passed: Float = np.interp((edges - base).astype(float), moments, before)
    return np.rint(np.diff(passed, axis=1)).astype(np.int64)
