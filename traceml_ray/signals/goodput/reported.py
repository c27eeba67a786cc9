"""What the rank processes of a session have reported of their lives, as the ledger needs it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

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
SET_NS = 1_000_000_000
"""Change of a wall clock from which on it was set. Less is an error of measurement, or a slow correction."""
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
        self._booted: dict[int, list[tuple[int, int]]] = {}
        """
        When the node was booted, as intervals say it, by process: (number of pieces before, ns), with another
        entry where the clock was set.
        """
        self._parts: dict[int, tuple[object, Int64]] = {}

    def add(self, process: int, record: LifeInterval) -> None:
        """Add the next record of a rank process."""
        self.numbers.setdefault(process, set()).add(record.number)
        if record.booted_ns is not None:
            known_boots = self._booted.setdefault(process, [])
            if not known_boots or abs(known_boots[-1][1] - record.booted_ns) > SET_NS:
                known_boots.append((len(self.pieces.get(process, ())), record.booted_ns))
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
            joined = known.joined or (record.count > 1 and record.step is not None)
            self.checkpoints[process] = known._replace(
                saved=True, saved_step=step, saved_steps=steps, joined=joined
            )

    @property
    def tell_boots(self) -> Collection[int]:
        """Processes whose intervals say when their node was booted."""
        return self._booted.keys()

    def set_ns(self, process: int, booted_ns: int) -> int:
        """
        Return by how much the clock of a process's node was set between its intervals and a record that says
        `booted_ns`: the largest difference, in ns. 0: it was not.
        """
        apart = (booted_ns - booted for _, booted in self._booted.get(process, ()))
        largest = max(apart, key=abs, default=0)
        return largest if abs(largest) > SET_NS else 0

    def moved(self, booted_ns: Mapping[int, int], shift_ns: Mapping[int, int]) -> Intervals:
        """
        Return the intervals on one clock.

        Args:
            booted_ns: when the node of a process was booted, on that clock, by process.
            shift_ns: time to add to the times of a process, if its intervals do not say when it was booted.
        """
        on_clock = Intervals()
        on_clock.__dict__.update(self.__dict__)
        on_clock.pieces, on_clock.checkpoints = dict(self.pieces), dict(self.checkpoints)
        on_clock.newest_async = dict(self.newest_async)
        for process in {*self._booted, *shift_ns}:
            by = self._shifts(process, booted_ns.get(process), shift_ns.get(process, 0))
            pieces = self.pieces.get(process)
            if pieces and any(shift for _, shift in by):
                on_clock.pieces[process] = _shifted(pieces, by)
            known = self.checkpoints.get(process)
            if known is not None and known.restored_ns is not None:
                on_clock.checkpoints[process] = known._replace(restored_ns=known.restored_ns + by[0][1])
            newest = self.newest_async.get(process)
            if newest is not None:
                began, ended = newest.began_ns + by[-1][1], newest.ended_ns + by[-1][1]
                on_clock.newest_async[process] = msgspec.structs.replace(
                    newest, began_ns=began, ended_ns=ended
                )
        return on_clock

    def _shifts(self, process: int, booted_ns: int | None, shift_ns: int) -> list[tuple[int, int]]:
        """Return the time to add to the pieces of a process, in ns: (number of pieces before, ns)."""
        known = self._booted.get(process, ())
        if booted_ns is None or not known:
            return [(0, shift_ns)]
        apart = [(before, booted_ns - booted) for before, booted in known]
        return [(before, shift if abs(shift) > SET_NS else 0) for before, shift in apart]

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


def _shifted(pieces: Sequence[Piece], by: Sequence[tuple[int, int]]) -> list[Piece]:
    """Return pieces with a time added. `by`: the time for the pieces from each number on."""
    shifted = list[Piece]()
    ends = [*(before for before, _ in by[1:]), len(pieces)]
    for (_, shift), end in zip(by, ends, strict=True):
        shifted += [
            piece._replace(began_ns=piece.began_ns + shift, ended_ns=piece.ended_ns + shift)
            for piece in pieces[len(shifted) : end]
        ]
    return shifted


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
