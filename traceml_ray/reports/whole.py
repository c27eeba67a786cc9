"""What a report takes from the rows of a run, however long: they are read once, piece by piece."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from traceml_ray.analysis.baseline import Baseline
from traceml_ray.analysis.busy import StepSummary, summarise
from traceml_ray.analysis.history import Replay, RunJudge
from traceml_ray.analysis.running import Running
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import Float, RankRows, Window, align, missing_of
from traceml_ray.stages import SEGMENT_BITS
from traceml_ray.store.kept import Kept, unpack
from traceml_ray.store.pieces import Cutter, pieces
from traceml_ray.store.schema import NONSENSE
from traceml_ray.store.session_file import Folded, SessionFile

MAX_ROWS = 2_000_000
"""Rows (steps × ranks) that are held in memory at a time."""
PIECE_ROWS = 500_000


@dataclass
class Whole:
    """A run, reduced. `window`, `steps` and `stage_ns` are None where no step is common to its ranks."""

    judged: RunJudge
    rows: list[RankRows]
    """When each rank's steps were: of a long run several are added up, under the key of their first."""
    counts: dict[int, int]
    """How many steps each rank has."""
    read: int
    """Rows that this is of, and from which step to which."""
    first_step: int
    last_step: int
    window: Window | None = None
    """Of a long run a sample, evenly spread."""
    steps: StepSummary | None = None
    """After warm-up, as is what follows."""
    stage_ns: Float | None = None
    """Mean of each rank's stages (R, 6)."""
    between: tuple[int, int] = (0, 0)
    """First and last step."""
    error_pct: float = 0.0
    """By how much medians and percentiles may be off."""
    folded: int = 0
    """Rows of which there are only sums."""

    @property
    def count(self) -> int:
        """Steps of the rank that has fewest."""
        return min(self.counts.values())

    def mean_ns(self) -> float:
        """Return how long a step was on average, warm-up included."""
        return float(np.mean([own.rows.sum() / self.counts[own.rank] for own in self.rows]))

    @property
    def counted(self) -> int:
        """Rows that `counts` and `mean_ns` are of."""
        return self.read + self.folded

    def add_folded(self, folded: Mapping[int, Folded], kept: int = 0) -> None:
        """
        Let `counts`, `rows` and `mean_ns` be of the rows as well that are only kept as sums, by stream; of
        `kept` of them there is more, see `Kept`.
        """
        for at, own in enumerate(self.rows):
            if own.stream in folded:
                sums = folded[own.stream]
                self.folded += int(sums.counts.sum())
                next_key = int(own.keys[0]) if len(own.keys) else 1 << 62
                self.counts[own.rank] += _folded_steps(sums, next_key >> SEGMENT_BITS)
                flags = np.zeros(len(sums.counts), dtype=np.uint8)
                self.rows[at] = own.follow(replace(own, keys=sums.first_keys, flags=flags, rows=sums.sums))
        self.folded = max(0, self.folded - kept)


def reduce(
    session: SessionFile,
    expected: int,
    thresholds: Thresholds,
    newest: Sequence[RankRows],
    most: int,
    baseline: Baseline | None = None,
    *,
    newest_only: bool = False,
) -> Whole | None:
    """
    Reduce the run that `session` reads, or only its rows `newest`; None when it has none. `newest` holds the
    newest rows of each rank, `most` of them or all. Raises `SessionFileError`.
    """
    if not newest:
        return None
    missing = missing_of(expected, (own.rank for own in newest))
    folded = session.folded()
    if folded and not newest_only:
        with contextlib.suppress(*NONSENSE):  # of another version: then of the rows that are left
            kept = unpack(session.kept(), newest)
            if kept is not None:
                return _Long(session, newest, kept.running, kept).reduced(expected, missing, folded)
    if newest_only or fits(newest, most):
        whole = _at_once(newest, align(newest, expected, missing), thresholds, baseline)
        whole.add_folded(folded)
        return whole
    return _Long(session, newest, Running(thresholds, baseline)).reduced(expected, missing, folded)


def fits(newest: Sequence[RankRows], most: int) -> bool:
    """Return whether `newest` are all rows that there are, where up to `most` of each rank were read."""
    return all(len(own.keys) < most for own in newest)


def most_of(ranks: int) -> int:
    """Return how many rows of each of so many ranks are held in memory."""
    return max(1, MAX_ROWS // max(1, ranks))


def _at_once(
    rows: Sequence[RankRows], window: Window, thresholds: Thresholds, baseline: Baseline | None
) -> Whole:
    replay = Replay(len(window.starts), thresholds, baseline)
    replay.add(window)
    found = Whole(
        replay.done(),
        list(rows),
        {own.rank: _steps(own) for own in rows},
        read=sum(len(own.keys) for own in rows),
        first_step=min(int(own.keys[0]) for own in rows) >> SEGMENT_BITS,
        last_step=max(int(own.keys[-1]) for own in rows) >> SEGMENT_BITS,
    )
    if len(window.keys):
        warm = window.since((window.first_step or 0) + thresholds.warmup_steps)
        warm = warm if len(warm.starts) >= thresholds.first_window_steps else window  # hardly any are left
        found.window, found.steps = window, summarise(warm, thresholds)
        found.stage_ns = warm.d.sum(axis=0) / len(warm.starts)
        found.between = int(warm.steps[0]), int(warm.steps[-1])
    return found


class _Long:
    """A run that does not fit into memory, or of which rows were folded: `kept` is what they come to."""

    def __init__(
        self, session: SessionFile, newest: Sequence[RankRows], running: Running, kept: Kept | None = None
    ) -> None:
        self._session = session
        self._newest = newest
        self._running = running
        self._kept = kept
        self._end = min(int(own.keys.max()) for own in newest)
        stored = sum(stream.stored for stream in session.ranks().values())
        self._several = -(-stored // MAX_ROWS)
        """Rows that are added up in `Whole.rows`."""
        self._steps: Counter[int] = Counter()
        self._cutter = kept.cutter if kept else Cutter(newest)
        self._noted = 0
        """Rows that are in the file."""
        self._first_step = kept.first_step if kept else None
        self._folded_to: dict[int, int] = {}
        """The last key of each process that `kept` is of."""
        self._rows: dict[int, list[RankRows]] = {own.rank: [] for own in newest}

    def reduced(self, expected: int, missing: Sequence[int], folded: Mapping[int, Folded]) -> Whole:
        """Reduce the rows that are left."""
        if self._kept is not None:
            self._folded_to = {stream: int(sums.last_keys.max()) for stream, sums in folded.items()}
        for piece in pieces(self._session, self._newest, PIECE_ROWS, self._cutter):
            self._add(piece, align(piece, expected, missing))
        noted = self._noted
        self._note([own.take(own.keys > self._end) for own in self._newest])  # of ranks that are ahead
        ahead = self._noted - noted + sum(len(own.keys) for own in self._cutter.waiting.values())
        whole = self._done(self._cutter.used + ahead)
        whole.add_folded(folded, whole.read - self._noted)
        return whole

    def _add(self, rows: Sequence[RankRows], window: Window) -> None:
        """Add the steps that follow."""
        self._note(rows)
        first = window.first_step if self._running.first_step is None else self._running.first_step
        if first is not None:
            self._running.replay.expect((self._end >> SEGMENT_BITS) - first + 1)
            self._running.add(window)

    def _done(self, read: int) -> Whole:
        """Return what it comes to."""
        running = self._running
        judged = running.replay.done()
        return Whole(
            judged,
            [own.take(slice(0)).follow(*self._rows[own.rank]) for own in self._newest],
            {own.rank: self._steps[own.rank] for own in self._newest},
            read=read,
            first_step=self._first_step or 0,
            last_step=max(int(own.keys.max()) for own in self._newest) >> SEGMENT_BITS,
            window=judged.sample(),
            steps=running.tally.summary(),
            stage_ns=running.tally.stage_ns(),
            between=(running.warm_step, self._end >> SEGMENT_BITS),
            error_pct=running.tally.error_pct,
        )

    def _note(self, rows: Sequence[RankRows]) -> None:
        """Count `rows`, but for those that are in the sums of folded rows."""
        for own in rows:
            if own.stream in self._folded_to:
                own = own.take(own.keys > self._folded_to[own.stream])
            if len(own.keys):
                self._steps[own.rank] += _steps(own)
                self._noted += len(own.keys)
                first = int(own.keys[0]) >> SEGMENT_BITS
                self._first_step = first if self._first_step is None else min(first, self._first_step)
                starts = np.arange(0, len(own.keys), self._several)
                sums = np.add.reduceat(own.rows, starts, axis=0)
                self._rows[own.rank].append(replace(own.take(starts), rows=sums))


def _steps(own: RankRows) -> int:
    """Return of how many steps there are rows."""
    steps = own.keys >> SEGMENT_BITS
    more = np.diff(steps)
    if (more >= 0).all():  # else rows of a time came late
        return int(np.count_nonzero(more)) + 1
    return len(np.unique(steps))


def _folded_steps(folded: Folded, next_step: int) -> int:
    """Return how many steps before `next_step` `folded` is of; the rows of one may be in two sums."""
    first, last = folded.first_keys >> SEGMENT_BITS, folded.last_keys >> SEGMENT_BITS
    before = np.concatenate([[-1], np.maximum.accumulate(last)[:-1]])
    spans = np.minimum(last, next_step - 1) - np.maximum(first, before + 1) + 1
    return int(np.clip(np.minimum(spans, folded.counts), 0, None).sum())
