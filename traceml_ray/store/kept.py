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
from traceml_ray.store.packing import Packer
from traceml_ray.store.pieces import Cutter
from traceml_ray.store.session_file import NONSENSE
from traceml_ray.wire import SEGMENT_BITS

FORM = 1
"""Of what is in the file; to be raised when one of the classes below means something else by it."""


class Kept:
    """
    Folded rows of `streams` (process by rank), `read` in number, from step `first_step` on.

    `cutter` still holds those of steps that not every rank was through, `running` is what the others come to.
    """

    def __init__(self, rows: Sequence[RankRows], thresholds: Thresholds, baseline: Baseline | None) -> None:
        self.streams = streams_of(rows)
        self.cutter = Cutter(rows)
        self.running = Running(thresholds, baseline)
        self.read = 0
        self.first_step: int | None = None

    def add(self, found: Sequence[RankRows], most: int, expected: int, missing: Sequence[int]) -> None:
        """Take the rows that follow; reduce them when there are `most`, see `Cutter.cut` and `align`."""
        for own in found:
            first = int(own.keys[0]) >> SEGMENT_BITS
            self.first_step = first if self.first_step is None else min(first, self.first_step)
            self.read += len(own.keys)
        self.cutter.add(found)
        piece = self.cutter.cut(most)
        if piece is not None:
            self.running.add(align(piece, expected, missing))

    def pack(self) -> bytes:
        """Return it as bytes."""
        return _PACKER.pack(self)


def unpack(data: bytes | None, rows: Sequence[RankRows]) -> Kept | None:
    """Return what was packed, None where that is not of the processes of `rows`, or of another version."""
    try:
        kept = None if data is None else _PACKER.unpack(data)
        return kept if isinstance(kept, Kept) and kept.streams == streams_of(rows) else None
    except NONSENSE:
        return None


def streams_of(rows: Iterable[RankRows]) -> dict[int, int]:
    """Return the process of each rank."""
    return {own.rank: own.stream for own in rows}


_PACKER = Packer(
    FORM,
    *(Kept, Cutter, RankRows, Running, Tally, Histograms, Replay, RunJudge, Window, Learner, Baseline),
    *(Episodes, Brief, Track, Clock, Episode, Verdict, Thresholds),
)
