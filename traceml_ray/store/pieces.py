"""The rows of a run of any length, in pieces that fit into memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from traceml_ray.analysis.window import RankRows
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import MAX_ROWS, SEGMENT_BITS


class Cutter:
    """
    Cuts rows into pieces, as they come: of a step, those of all `ranks` are in one piece.

    Rows up to key `to` were in a piece; rows that come after those of a later piece are left out.
    """

    def __init__(self, ranks: Iterable[RankRows]) -> None:
        self.to = -1
        self.waiting = {own.rank: own.take(slice(0)) for own in ranks}

    def add(self, found: Iterable[RankRows], end: int = 1 << 62) -> None:
        """Take the rows that follow, up to key `end`."""
        for own in found:
            _, rows = _split(own, self.to)
            rows, _ = _split(rows, end)
            self.waiting[own.rank] = rows.follow(self.waiting[own.rank])

    def cut(self, most: int, end: int | None = None) -> list[RankRows] | None:
        """
        Return the rows up to key `end`, or (None) those of the steps that every rank is through; None when
        there are none. Of more than `4 * most` rows some are returned in any case.
        """
        count = sum(len(own.keys) for own in self.waiting.values())
        to = _common_end(list(self.waiting.values()), count > 4 * most) if end is None else end
        if to <= self.to:
            return None
        split = {rank: _split(own, to) for rank, own in self.waiting.items()}
        self.waiting = {rank: later for rank, (_, later) in split.items()}
        self.to = to
        return [before for before, _ in split.values()]


def pieces(
    session: SessionFile, newest: Sequence[RankRows], most: int, cutter: Cutter | None = None
) -> Iterator[list[RankRows]]:
    """
    Yield the rows of the run in pieces of about `most` rows, oldest first.

    `newest` holds the newest rows of each rank: what goes beyond the last step that all of them have is left
    out. `cutter` holds what comes before the rows of `session`. Raises `SessionFileError`.
    """
    cutter = cutter or Cutter(newest)
    end = min((int(own.keys.max()) for own in newest), default=-1)
    cursor, chunks = 0, max(1, most // MAX_ROWS)
    while True:
        found, after = session.rows(cutter.waiting, cursor, most=chunks)
        cutter.add(found, end)
        piece = cutter.cut(most, end if after == cursor else None)
        if piece is not None:
            yield piece
        if after == cursor:
            return
        read = sum(len(own.keys) for own in found)
        chunks = max(1, min(2 * chunks, most * chunks // max(1, read)))
        cursor = after


def _split(own: RankRows, key: int) -> tuple[RankRows, RankRows]:
    """Return the rows up to `key`, and those after it."""
    before = own.keys <= key
    count = int(np.count_nonzero(before))
    if before[:count].all():  # in order, as they nearly always are: nothing is copied
        return own.take(slice(count)), own.take(slice(count, None))
    return own.take(before), own.take(~before)


def _common_end(waiting: Sequence[RankRows], full: bool) -> int:
    """
    Return the last key of the last step that every rank is through; when memory is `full`, of the step that
    half of the rows are before: a rank has long reported nothing.
    """
    ends = [int(own.keys.max()) if len(own.keys) else -1 for own in waiting]
    end = min(ends, default=-1)
    if full:
        end = max(end, int(np.median(max(waiting, key=lambda own: len(own.keys)).keys)))
    return (end >> SEGMENT_BITS << SEGMENT_BITS) - 1
