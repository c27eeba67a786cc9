"""What is kept of the rows of a run that were folded: the same reduction that a report makes of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from traceml_ray.analysis.baseline import Baseline, Learner
from traceml_ray.analysis.episodes import Brief, Episodes
from traceml_ray.analysis.history import Replay, RunJudge
from traceml_ray.analysis.running import Running
from traceml_ray.analysis.tally import Histograms, Tally
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.track import Clock, Episode, Track
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.window import RankRows, Window, align
from traceml_ray.stages import SEGMENT_BITS
from traceml_ray.store.packing import Packer
from traceml_ray.store.pieces import Cutter
from traceml_ray.store.schema import NONSENSE

FORM = 3
"""Of what is in the file; to be raised when one of the classes below means something else by it."""
MAX_RANKS = 1024
"""Of a run of more, only the sums are kept: what a report makes of them would take too much memory."""
WAITING_ROWS = 50_000
"""Rows of one run that wait for a rank that does not report; up to `MAX_WAITING_ROWS` while they are of"""
WAITING_NS = 60_000_000_000
"""less than this of a rank: one relay may be that late."""
MAX_WAITING_ROWS = 1024 * MAX_RANKS
MAX_BYTES = MAX_RANKS << 18
"""Of one run: of a rank 83 kB of histograms, up to 49 kB of sample per row of a step and 58 kB that wait."""


class Kept:
    """
    Folded rows of `streams` (process by rank), from step `first_step` on.

    `cutter` still holds those of steps that not every rank was through, `running` is what the others come to.
    """

    def __init__(self, rows: Sequence[RankRows], thresholds: Thresholds, baseline: Baseline | None) -> None:
        self.streams = streams_of(rows)
        self.cutter = Cutter(rows)
        self.running = Running(thresholds, baseline)
        self.first_step: int | None = None

    def add(self, found: Sequence[RankRows], expected: int, missing: Sequence[int]) -> None:
        """Take the rows that follow; reduce those of steps that every rank is through, see `align`."""
        for own in found:
            first = int(own.keys[0]) >> SEGMENT_BITS
            self.first_step = first if self.first_step is None else min(first, self.first_step)
        self.cutter.add(found)
        longest = max(self.cutter.waiting.values(), key=lambda own: len(own.keys))
        most = MAX_WAITING_ROWS if longest.rows.sum() < WAITING_NS else WAITING_ROWS
        piece = self.cutter.cut(most // 4)
        if piece is not None:
            self.running.add(align(piece, expected, missing))

    def pack(self) -> bytes:
        """Return it as bytes."""
        return _PACKER.pack(self)


def unpack(data: bytes | None, rows: Sequence[RankRows]) -> Kept | None:
    """
    Return what was packed, None where there is nothing of the processes of `rows`. Raises ValueError for what
    cannot be read: it is damaged, or of another version.
    """
    try:
        kept = _PACKER.unpack(data) if data else None
        return kept if kept is not None and kept.streams == streams_of(rows) else None
    except NONSENSE as error:
        raise ValueError(f"statistics of folded rows cannot be read: {error}") from error


def streams_of(rows: Iterable[RankRows]) -> dict[int, int]:
    """Return the process of each rank."""
    return {own.rank: own.stream for own in rows}


_PACKER = Packer(
    FORM,
    MAX_BYTES,
    *(Kept, Cutter, RankRows, Running, Tally, Histograms, Replay, RunJudge, Window, Learner, Baseline),
    *(Episodes, Brief, Track, Clock, Episode, Verdict, Thresholds),
)
