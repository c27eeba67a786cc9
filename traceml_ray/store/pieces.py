"""The rows of a run of any length, in pieces that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from traceml_ray.analysis.window import RankRows
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import MAX_ROWS, SEGMENT_BITS


def pieces(session: SessionFile, newest: Sequence[RankRows], most: int) -> Iterator[list[RankRows]]:
    """
    Yield the rows of the run in pieces of about `most` rows, oldest first; of a step, all are in one piece.

    `newest` holds the newest rows of each rank: what goes beyond the last step that all of them have is left
    out. Rows that were stored after those of a later piece are left out, too. Raises `SessionFileError`.
    """
    waiting = {own.rank: own.take(slice(0)) for own in newest}
    end = min((int(own.keys.max()) for own in newest), default=-1)
    cursor, to, chunks = 0, -1, max(1, most // MAX_ROWS)
    while True:
        found, after = session.rows(waiting, cursor, most=chunks)
        for own in found:
            rows = own.take((own.keys > to) & (own.keys <= end))
            waiting[own.rank] = rows.follow(waiting[own.rank])
        count = sum(len(own.keys) for own in waiting.values())
        cut = end if after == cursor else _common_end(list(waiting.values()), count > 4 * most)
        if cut > to:
            yield [own.take(own.keys <= cut) for own in waiting.values()]
            waiting = {rank: own.take(own.keys > cut) for rank, own in waiting.items()}
            to = cut
        if after == cursor:
            return
        read = sum(len(own.keys) for own in found)
        chunks = max(1, min(2 * chunks, most * chunks // max(1, read)))
        cursor = after


def _common_end(waiting: Sequence[RankRows], full: bool) -> int:
    """
    Return the last key of the last step that every rank is through; when memory is `full`, of the step that
    half of the rows are before: a rank has long reported nothing.
    """
    ends = [int(own.keys.max()) if len(own.keys) else -1 for own in waiting]
    end = min(ends)
    if full:
        end = max(end, int(np.median(max(waiting, key=lambda own: len(own.keys)).keys)))
    return (end >> SEGMENT_BITS << SEGMENT_BITS) - 1
