"""What a report takes from the rows of a run, however long: they are read once, piece by piece."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from traceml_ray.analysis.baseline import Baseline
from traceml_ray.analysis.busy import StepSummary, summarise
from traceml_ray.analysis.history import Replay, RunJudge
from traceml_ray.analysis.tally import Tally
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import Float, RankRows, Window, align
from traceml_ray.store.pieces import pieces
from traceml_ray.store.session_file import Folded, SessionFile
from traceml_ray.wire import SEGMENT_BITS

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

    def add_folded(self, folded: Mapping[int, Folded]) -> None:
        """Let `counts`, `rows` and `mean_ns` be of the rows as well that are only kept as sums, by stream."""
        for at, own in enumerate(self.rows):
            if own.stream in folded:
                sums = folded[own.stream]
                self.folded += int(sums.counts.sum())
                self.counts[own.rank] += _folded_steps(sums, int(own.keys[0]) >> SEGMENT_BITS)
                flags = np.zeros(len(sums.counts), dtype=np.uint8)
                self.rows[at] = own.follow(replace(own, keys=sums.first_keys, flags=flags, rows=sums.sums))


def reduce(
    session: SessionFile,
    expected: int,
    missing: Sequence[int],
    thresholds: Thresholds,
    newest: Sequence[RankRows],
    most: int,
    baseline: Baseline | None = None,
) -> Whole | None:
    """
    Reduce the run that `session` reads; None when it has no rows. `newest` holds the newest rows of each
    rank, `most` of them or all. Raises `SessionFileError`.
    """
    if not newest:
        return None
    if fits(newest, most):
        whole = _at_once(newest, align(newest, expected, missing), thresholds, baseline)
    else:
        long = _Long(session, newest, thresholds, baseline)
        for piece in pieces(session, newest, PIECE_ROWS):
            long.add(piece, align(piece, expected, missing))
        whole = long.done()
    whole.add_folded(session.folded())
    return whole


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
        warm = _since(window, (window.first_step or 0) + thresholds.warmup_steps)
        warm = warm if len(warm.starts) >= thresholds.first_window_steps else window  # hardly any are left
        found.window, found.steps = window, summarise(warm, thresholds)
        found.stage_ns = warm.d.sum(axis=0) / len(warm.starts)
        found.between = int(warm.steps[0]), int(warm.steps[-1])
    return found


class _Long:
    """A run that does not fit into memory."""

    def __init__(
        self,
        session: SessionFile,
        newest: Sequence[RankRows],
        thresholds: Thresholds,
        baseline: Baseline | None,
    ) -> None:
        self._newest = newest
        self._limits = thresholds
        self._baseline = baseline
        self._end = min(int(own.keys.max()) for own in newest)
        stored = sum(stream.stored for stream in session.ranks().values())
        self._several = -(-stored // MAX_ROWS)
        """Rows that are added up in `Whole.rows`."""
        self._replay: Replay | None = None
        self._tally = Tally(thresholds)
        self._steps: Counter[int] = Counter()
        self._read = 0
        self._rows: dict[int, list[RankRows]] = {own.rank: [] for own in newest}
        self._first_step: int | None = None
        self._first_common = 0

    def add(self, rows: Sequence[RankRows], window: Window) -> None:
        """Add the steps that follow."""
        self._note(rows)
        if not len(window.keys):
            return
        if self._replay is None:
            self._first_common = window.first_step or 0
            steps = (self._end >> SEGMENT_BITS) - self._first_common + 1
            self._replay = Replay(steps, self._limits, self._baseline)
        self._replay.add(window)
        self._tally.add(_since(window, self._first_common + self._limits.warmup_steps))

    def done(self) -> Whole:
        """Return what it comes to."""
        rest = [own.take(own.keys > self._end) for own in self._newest]  # of ranks that are ahead
        self._note(rest)
        judged = (self._replay or Replay(0, self._limits, self._baseline)).done()
        return Whole(
            judged,
            [own.take(slice(0)).follow(*self._rows[own.rank]) for own in self._newest],
            dict(self._steps),
            read=self._read,
            first_step=self._first_step or 0,
            last_step=max(int(own.keys.max()) for own in self._newest) >> SEGMENT_BITS,
            window=judged.sample(),
            steps=self._tally.summary(),
            stage_ns=self._tally.stage_ns(),
            between=(self._first_common + self._limits.warmup_steps, self._end >> SEGMENT_BITS),
            error_pct=self._tally.error_pct,
        )

    def _note(self, rows: Sequence[RankRows]) -> None:
        for own in rows:
            if len(own.keys):
                self._steps[own.rank] += _steps(own)
                self._read += len(own.keys)
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


def _since(window: Window, step: int) -> Window:
    return window.take(window.keys >> SEGMENT_BITS >= step)
