"""What the rank processes of a session have reported of their lives, as the ledger needs it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from traceml_ray.analysis.window import Int64
from traceml_ray.signals.goodput.pieces import EVALUATION, OTHER, RESTORE, SAVE, Piece, of_parts
from traceml_ray.signals.goodput.records import Life, LifeInterval
from traceml_ray.signals.goodput.totals import RankTotals

_CATEGORIES = {
    "checkpoint_save": SAVE,
    "checkpoint_restore": RESTORE,
    "evaluation": EVALUATION,
    "pause": OTHER,
}
ASYNC = "checkpoint_save_async"
_CHECKPOINTS = 32
"""Number of newest checkpoints of a process whose steps are kept."""


class Lives:
    """The newest record of the life of each rank process of a session."""

    def __init__(self) -> None:
        self.by_process: dict[int, Life] = {}

    def add(self, process: int, record: Life) -> None:
        """Add the next record of a rank process."""
        self.by_process[process] = record


class Checkpoints(NamedTuple):
    """What the checkpoints of a rank process say about which of its steps are kept."""

    restored_ns: int | None = None
    """When the first loading of one began; None: there is none."""
    saved: bool = False
    saved_step: int | None = None
    """All steps below this one are in a checkpoint; None: not known."""
    saved_steps: frozenset[int] = frozenset()
    """The same of each of its newest checkpoints."""
    joined: bool = False
    """Whether several checkpoints are one record, so that some are not in `saved_steps`."""
    restored_step: int | None = None
    """Number of steps that the checkpoint says it has which was loaded first; None: it says none."""


class Intervals:
    """The intervals of all rank processes of a session, and how they divide among the parts of a life."""

    def __init__(self) -> None:
        self.pieces: dict[int, list[Piece]] = {}
        """Intervals that take time from steps, by process."""
        self.async_ns: dict[int, int] = {}
        """Time of checkpoints that were saved beside training, by process."""
        self.newest_async: dict[int, LifeInterval] = {}
        """The one of them that ended last, by process."""
        self.checkpoints: dict[int, Checkpoints] = {}
        self.numbers: dict[int, set[int]] = {}
        """Numbers of the intervals, by process."""
        self._parts: dict[int, tuple[object, Int64]] = {}

    def add(self, process: int, record: LifeInterval) -> None:
        """Add the next record of a rank process."""
        self.numbers.setdefault(process, set()).add(record.number)
        if record.what == ASYNC:
            self.async_ns[process] = self.async_ns.get(process, 0) + record.busy_ns
            newest = self.newest_async.get(process)
            if newest is None or record.ended_ns >= newest.ended_ns:
                self.newest_async[process] = record
        else:
            self.pieces.setdefault(process, []).append(piece_of(record))
        known = self.checkpoints.get(process, Checkpoints())
        if record.what == "checkpoint_restore" and known.restored_ns is None:
            self.checkpoints[process] = known._replace(
                restored_ns=record.began_ns, restored_step=record.step or None
            )
        elif record.what in ("checkpoint_save", ASYNC):
            step = known.saved_step if record.step is None else max(record.step, known.saved_step or 0)
            steps = known.saved_steps if record.step is None else _newest(known.saved_steps, record.step)
            joined = known.joined or record.count > 1
            self.checkpoints[process] = known._replace(
                saved=True, saved_step=step, saved_steps=steps, joined=joined
            )

    def waited_for(self, process: int, life: Life, last_ns: int) -> list[Piece]:
        """
        Return the checkpoint that was saved beside training and went on after the newest row (at `last_ns`)
        of a process that is over: it took no step any more, only that kept it.
        """
        running = [one for one in life.open_intervals() if one.what == ASYNC]
        newest = [*filter(None, [self.newest_async.get(process)]), *running]
        spans = [(max(one.began_ns, last_ns), one.ended_ns) for one in newest]
        return [Piece(SAVE, begin, end, end - begin) for begin, end in spans if end > begin]

    def parts(self, process: int, pieces: Sequence[Piece], edges: tuple[int, ...]) -> Int64:
        """Return the time of intervals by part (3, 6) ns, see `of_parts`. It is computed if they changed."""
        key = len(pieces), pieces[-1:], edges
        before = self._parts.get(process)
        if before is None or before[0] != key:
            before = self._parts[process] = key, of_parts(pieces, edges)
        return before[1]


def _newest(steps: frozenset[int], step: int) -> frozenset[int]:
    """Return steps of checkpoints with another one, without the oldest if there are too many."""
    return frozenset(sorted({*steps, step})[-_CHECKPOINTS:])


def piece_of(one: LifeInterval) -> Piece:
    """Return a record as an interval of the ledger."""
    return Piece(_CATEGORIES[one.what], one.began_ns, one.ended_ns, one.busy_ns, one.count > 1)


class Totals:
    """The sums of the steps of all rank processes of a session, as the aggregator kept them."""

    def __init__(self) -> None:
        self.by_process: dict[int, RankTotals] = {}

    def add(self, process: int, record: RankTotals) -> None:
        """Add the next record of a rank process."""
        self.by_process[process] = record
