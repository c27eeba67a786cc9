"""The rows of a run of any length, in pieces that fit into memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from traceml_ray.analysis.window import RankRows
from traceml_ray.stages import SEGMENT_BITS
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import MAX_ROWS


class Cutter:
    """
    Cuts rows into pieces, as they come: of a step, those of all `ranks` are in one piece.

    Rows up to key `to` were in a piece; rows that come after those of a later piece are left out. `used`
    counts the rows of pieces, but for those of steps that some rank was not through.
    """

    def __init__(self, ranks: Iterable[RankRows]) -> None:
        self.to = -1
        self.used = 0
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
        waiting = list(self.waiting.values())
        to = _before(_first_end(waiting)) if end is None else end
        full = end is None and sum(len(own.keys) for own in waiting) > 4 * most
        if full:  # a rank has long reported nothing
            to = max(to, _middle(waiting))
        if to <= self.to:
            return None
        split = {rank: _split(own, to) for rank, own in self.waiting.items()}
        self.waiting = {rank: later for rank, (_, later) in split.items()}
        self.to = to
        piece = [before for before, _ in split.values()]
        whole = _first_end(piece) if full else to
        self.used += sum(int(np.count_nonzero(own.keys <= whole)) for own in piece)
        return piece


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


def _first_end(rows: Sequence[RankRows]) -> int:
    """Return the last key of the rank that is least far, -1 where one has none."""
    return min((int(own.keys.max()) if len(own.keys) else -1 for own in rows), default=-1)


def _middle(waiting: Sequence[RankRows]) -> int:
    """Return the last key of the step that half of the rows are before, of the rank that has most."""
    return _before(int(np.median(max(waiting, key=lambda own: len(own.keys)).keys)))


def _before(key: int) -> int:
    """Return the last key before the step of `key`."""
    return (key >> SEGMENT_BITS << SEGMENT_BITS) - 1
