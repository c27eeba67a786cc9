"""
The attempts of a run, as the ledger needs them, from its rank processes, what they reported of their lives,
and the sums of their steps. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from traceml_ray.analysis.step_totals import StepTotals
from traceml_ray.analysis.window import Int64
from traceml_ray.signals.goodput.clocks import birth_of, end_of, moved, on_one_clock
from traceml_ray.signals.goodput.ledger import (
    Attempt,
    Progress,
    RankMoments,
    repeated,
    share_from,
    steps_from,
    whole_step,
    without_intervals,
)
from traceml_ray.signals.goodput.pieces import (
    DATA,
    EXPLICIT,
    HANG,
    OF_OTHERS,
    UNKNOWN,
    Piece,
    of_others,
    of_parts,
)
from traceml_ray.signals.goodput.records import LIFECYCLE, Life
from traceml_ray.signals.goodput.reported import ASYNC, SET_NS, Intervals, Lives, Totals, piece_of
from traceml_ray.stages import DATA as DATA_STAGE
from traceml_ray.stages import STAGES
from traceml_ray.store.rank_processes import (
    RankProcess,
    attempt_of,
    generations,
    latest_process_per_rank,
    world_size,
)

_NEVER = 1 << 62
_LATE_NS = 10_000_000_000
"""Time after the first process of an attempt from which on a process has joined late."""
_FIRST_DATA_NS = 100_000_000
"""Shortest wait for the first batch that is data loading, and no part of the preparation."""
_SAMPLE = 64
"""Number of ranks whose intervals stand for those of all ranks where steps are divided."""


class Hang(NamedTuple):
    """A time in which no rank made progress, in ns."""

    began_ns: int
    ended_ns: int | None
    """None: it is not over, or the attempt ended in it."""
    ranks: frozenset[int] = frozenset()
    """Ranks that the others waited for. Empty: none is named."""
    stage: str | None = None
    """Stage that these ranks were in."""

    def moved(self, ns: int) -> Hang:
        """Return it with a time added."""
        if not ns:
            return self
        ended_ns = None if self.ended_ns is None else self.ended_ns + ns
        return self._replace(began_ns=self.began_ns + ns, ended_ns=ended_ns)


class Started(NamedTuple):
    """An attempt with what people see of it."""

    attempt: Attempt
    number: int
    """Number of the launcher's attempt. Several starts may have the same."""
    next_ns: int | None
    """When the processes of the next attempt were started (ns). None: it is the last."""
    columns: Int64
    """
    (C, 3): steps of all ranks in columns, see `StepTotals`, without intervals. Empty: its steps are not
    known.
    """
    pieces: dict[int, list[Piece]]
    """Intervals by rank."""
    async_ns: int
    """Time in which checkpoints were saved beside training, all ranks together."""
    progress: Progress
    repeated_from: int | None = None
    """First of its steps that a later attempt did again. None: none, or not known."""
    repeated_steps: int = 0
    why: str = ""
    """Why it is not known which of its steps were repeated; "": it is known."""
    unseen: int = 0
    """Number of attempts between it and the next one of which nothing was seen, or of it and these."""
    set_ns: int = 0
    """By how much the clock was set between it and the next attempt, in ns. 0: it was not."""
    set_during_ns: int = 0
    """By how much the clock was set during it, in ns. 0: that was not seen."""
    gap_known: bool = True
    """Whether the time until the next attempt is known. If not, it counts as 0."""
    unstored_steps: int = 0
    """Number of its newest steps whose time is not known: the aggregator ended before it had stored them."""
    lost_intervals: int = 0
    """Number of intervals that its ranks could not send."""

    @property
    def gap_ns(self) -> int | None:
        """Time from its end to the start of the next attempt's processes, in ns. None: it is the last."""
        return None if self.next_ns is None else max(0, self.next_ns - self.attempt.end_ns)

    @property
    def steps(self) -> int:
        """Number of its steps, as far as they are known."""
        return self.steps_from(0)

    def steps_from(self, step: int) -> int:
        """Return the number of its steps from `step` on."""
        newest = int(self.columns[:, 1].max()) + self.unstored_steps if len(self.columns) else 0
        return min(steps_from(self.columns, step) + self.unstored_steps, max(0, newest - step + 1))


class Sources(NamedTuple):
    """What a run's ledger is made of."""

    processes: Sequence[RankProcess]
    """All rank processes of the run."""
    lives: Lives
    intervals: Intervals
    totals: Totals
    """Sums of steps that the aggregator kept."""
    newest: StepTotals | None
    """Sums of the steps that have been read, of the newest attempt. None: there are none."""
    newest_of: Mapping[int, int]
    """Rank process of each rank in `newest`."""
    hangs: Sequence[Hang]
    over: bool
    """Whether the run is over."""
    ended: Mapping[int, int] = MappingProxyType({})
    """When processes that were killed had ended, as their relay saw it (ns), by process."""
    launched_ns: int | None = None
    """When the launcher was started (ns). None: not known, or it does not start the ranks at once."""
    lacks_oldest: bool = False
    """Whether the oldest intervals are not in the file."""


def started(sources: Sources) -> list[Started]:
    """Return the attempts of a run, the oldest first. Without a record of a life, an attempt is left out."""
    lives = sources.lives.by_process
    every = [
        generation
        for generation in generations(sources.processes)
        if any(process.id in lives for process in generation)
    ]
    clocks = on_one_clock(every, sources.lives, sources.intervals, sources.ended)
    if clocks is None:
        return _with_repeated(_in_order(sources, every, [0] * len(every)))
    by = clocks.of_attempt_ns
    on_clock = moved(clocks, every, sources.lives, sources.intervals, sources.ended)
    launched_ns = None if sources.launched_ns is None else sources.launched_ns + by[0]
    sources = sources._replace(
        lives=on_clock.lives,
        intervals=on_clock.intervals,
        ended=on_clock.killed_ns,
        launched_ns=launched_ns,
    )
    built = _in_order(sources, on_clock.generations, by)
    first = len(built) - len(every)  # attempts that were not seen come before
    for place, next_by in enumerate([*by[1:], by[-1]]):
        built[first + place] = built[first + place]._replace(
            set_ns=by[place] - next_by if abs(by[place] - next_by) > SET_NS else 0,
            set_during_ns=clocks.set_during_ns[place],
            gap_known=clocks.gap_known[place],
        )
    return _with_repeated(built)


def _in_order(
    sources: Sources, every: Sequence[Sequence[RankProcess]], moved_ns: Sequence[int]
) -> list[Started]:
    """
    Return the attempts of `every` generation in their order, with those before that were not seen.
    `moved_ns`: time by which what the aggregator saw of each attempt is moved.
    """
    lives, hangs = sources.lives.by_process, sources.hangs
    begins = [min(birth_of(process, lives.get(process.id)) for process in generation) for generation in every]
    built: list[Started] = []
    for index, generation in enumerate(every):
        begin = max([begins[index], *(one.attempt.begin_ns for one in built[-1:])])
        until = max(begin, begins[index + 1]) if index + 1 < len(every) else None
        of_it = [hang.moved(moved_ns[index]) for hang in hangs]
        built.append(_started(sources._replace(hangs=of_it), generation, begin, until))
        end = built[-1].attempt.end_ns
        hangs = [hang for hang, one in zip(hangs, of_it, strict=True) if not begin <= one.began_ns < end]
    if built and sources.launched_ns is not None:
        built = [*_unseen(sources.launched_ns, built[0]), *built]
    following = [*(one.attempt.begin_ns for one in built[1:]), None][: len(built)]
    numbers = [*(one.number for one in built[1:]), None][: len(built)]
    return [
        one._replace(next_ns=next_ns, unseen=_between(one, number))
        for one, next_ns, number in zip(built, following, numbers, strict=True)
    ]


def _between(one: Started, following: int | None) -> int:
    """Return how many attempts were not seen between one and the next, whose number is `following`."""
    if following is None:
        return 0
    return max(0, following - one.number - (1 if len(one.attempt.ranks.ranks) else 0))


def _unseen(launched_ns: int, first: Started) -> list[Started]:
    """
    Return an attempt without length for those before the `first` one: their processes ended before the
    monitor attached, so the time since the launch is the recovery after it.
    """
    begin = min(launched_ns, first.attempt.begin_ns)
    if first.number < 1 or begin == first.attempt.begin_ns:
        return []
    none: Int64 = np.zeros(0, np.int64)
    ranks = RankMoments(
        ranks=none,
        attached_ns=none,
        before_ns=none,
        replaced=np.zeros(0, np.bool_),
        first_row_ns=none,
        last_row_ns=none,
        ended_ns=none,
        over=np.zeros(0, np.bool_),
        took_ns=none,
        data_ns=none,
        waited_ns=none,
        explicit=np.zeros((0, 3, len(EXPLICIT)), np.int64),
        others=np.zeros((0, 3, len(OF_OTHERS)), np.int64),
        hung_ns=np.zeros((0, 2), np.int64),
    )
    attempt, progress = Attempt(begin, begin, first.attempt.world, ranks), Progress(None, None)
    return [Started(attempt, 0, None, np.zeros((0, 3), np.int64), {}, 0, progress)]


def _ended(sources: Sources, process: RankProcess) -> int:
    """Return when a process ended, or was last seen."""
    return end_of(process, sources.lives.by_process.get(process.id), sources.ended)


def _started(sources: Sources, generation: Sequence[RankProcess], begin: int, until: int | None) -> Started:
    of_rank = latest_process_per_rank(generation)
    lives = sources.lives.by_process
    running = until is None and not sources.over and any(not process.ended for process in generation)
    end = max(_ended(sources, process) for process in generation)
    end = max(begin, end if until is None else min(end, until))
    sums, columns = _sums(of_rank, sources)
    hangs = [hang for hang in sources.hangs if begin <= hang.began_ns < end]
    hangs = _in_whole_steps(hangs, columns, [lives.get(process.id) for process in of_rank.values()], end)
    rows = [
        _rank(sources, process, begin, end, running and not process.ended, int(took), hangs)
        for process, took in zip(of_rank.values(), sums[0].tolist(), strict=True)
    ]
    edges, explicit = np.array([row.edges for row in rows], np.int64), np.array([row.parts for row in rows])
    others = of_others([row.pieces for row in rows], edges, explicit)
    stepped = np.array([row.stepped for row in rows])
    before_ns, replaced = _before(generation, of_rank, begin, sources)
    table = RankMoments(
        ranks=np.array([*of_rank], np.int64),
        attached_ns=edges[:, 0],
        before_ns=before_ns,
        replaced=replaced,
        first_row_ns=np.where(stepped, edges[:, 1], UNKNOWN),
        last_row_ns=edges[:, 2],
        ended_ns=edges[:, 3],
        over=np.array([row.over for row in rows]),
        took_ns=sums[0],
        data_ns=sums[1],
        waited_ns=sums[2],
        explicit=explicit,
        others=others.ns,
        hung_ns=np.array([_hung_in(rank, hangs, end) for rank in of_rank], np.int64),
    )
    attempt = Attempt(begin, end, max(world_size(of_rank, None), len(of_rank)), table)
    sample = [row for row, one in zip(range(len(rows)), rows, strict=True) if one.stepped][:_SAMPLE]
    if sample and len(columns):
        taken = [[*rows[row].pieces, *others.waited_for(row, rows[row].pieces)] for row in sample]
        columns = without_intervals(columns, int(stepped.sum()), edges[sample, 1].tolist(), taken)
    pieces = {rank: row.pieces for rank, row in zip(of_rank, rows, strict=True) if row.pieces}
    unstored = 0 if until is None else _unstored(of_rank, columns)
    progress = _progress(of_rank, sources, columns, unstored)
    async_ns = sum(row.beside_ns for row in rows)
    return Started(
        attempt,
        attempt_of(generation[0]),
        until,
        columns,
        pieces,
        async_ns,
        progress,
        unstored_steps=unstored,
        lost_intervals=sum(_lost_intervals(process) for process in generation),
    )


def _unstored(of_rank: Mapping[int, RankProcess], columns: Int64) -> int:
    """Return how many steps all ranks of an attempt that is over took after the newest one in its sums."""
    newest = [step for process in of_rank.values() if (step := process.last_step) is not None]
    return max(0, min(newest) - int(columns[:, 1].max())) if newest and len(columns) else 0


def _lost_intervals(process: RankProcess) -> int:
    """Return how many intervals a process could not send."""
    return sum(count for place, count in process.errors.items() if place.startswith(LIFECYCLE.lost))


def _before(
    generation: Sequence[RankProcess], of_rank: Mapping[int, RankProcess], begin: int, sources: Sources
) -> tuple[Int64, np.ndarray[Any, Any]]:
    """
    Return the time in ns from `begin` to the start of each process that joined late or replaced another, else
    0 (R,), and whether it replaced another (R,).
    """
    first: dict[int | None, int] = {}
    for process in generation:
        first.setdefault(process.rank, process.id)
    lives = sources.lives.by_process
    replaced = np.array([first[rank] != process.id for rank, process in of_rank.items()], np.bool_)
    started_ns = [birth_of(process, lives.get(process.id)) for process in of_rank.values()]
    before = np.maximum(np.array(started_ns, np.int64) - begin, 0)
    return np.where(replaced | (before > _LATE_NS), before, 0), replaced


class _Rank(NamedTuple):
    """What is known of a rank in an attempt."""

    edges: tuple[int, int, int, int]
    """When it attached, when its first row ended, when its newest row ended, when it ended (ns)."""
    pieces: list[Piece]
    parts: Int64
    """(3, 6) ns: time of the pieces, see `of_parts`."""
    stepped: bool = False
    over: bool = False
    """Whether its process ended by itself."""
    beside_ns: int = 0
    """Time in which checkpoints were saved beside training."""


def _rank(
    sources: Sources,
    process: RankProcess,
    begin: int,
    end: int,
    runs: bool,
    took: int,
    hangs: Sequence[Hang],
) -> _Rank:
    """Return what is known of a rank in an attempt from `begin` to `end`. `took`: time of its rows in ns."""
    life = sources.lives.by_process.get(process.id)
    ended = end if runs else _ended(sources, process)
    if life is None:
        since = min(max(process.first_seen_ns, begin), end)
        ended = min(max(ended, since), end)
        return _Rank((since, ended, ended, ended), [], np.zeros((3, len(EXPLICIT)), np.int64))
    over = not runs and life.ended_ns is not None and not process.exit_code
    edges = _edges(life, begin, end, ended, took)
    pieces, beside_ns = _pieces(process.id, life, sources.intervals, edges[3])
    if over:
        pieces += sources.intervals.waited_for(process.id, life, edges[2])
    pieces += _first_data(life)
    pieces += _hung(hangs, end)
    stepped = life.first_row_ns is not None
    return _Rank(
        edges, pieces, _parts(sources.intervals, process.id, pieces, edges, runs), stepped, over, beside_ns
    )


def _first_data(life: Life) -> list[Piece]:
    """Return the wait for the first batch, which is not in the sums of the steps."""
    if life.first_step_ns is None or life.first_data_ns is None or life.first_data_ns < _FIRST_DATA_NS:
        return []
    end = life.first_step_ns + life.first_data_ns
    return [Piece(DATA, life.first_step_ns, end, life.first_data_ns)]


def _parts(
    intervals: Intervals, process: int, pieces: Sequence[Piece], edges: tuple[int, int, int, int], runs: bool
) -> Int64:
    """
    Return the time of intervals by part (3, 6) ns. The edges of a rank that runs move, so that all parts are
    computed again only of intervals after its newest row.
    """
    if not pieces or not runs:
        return intervals.parts(process, pieces, edges)
    before = [piece for piece in pieces if piece.ended_ns <= edges[2]]
    after = [piece for piece in pieces if piece.ended_ns > edges[2]]
    settled = intervals.parts(process, before, (*edges[:2], _NEVER, _NEVER))
    return settled + of_parts(after, edges) if after else settled


def _edges(life: Life, begin: int, end: int, ended: int, took: int) -> tuple[int, int, int, int]:
    """Return when a rank attached, when its first and its newest row ended, and when its process ended."""
    ended = min(max(ended, begin), end)
    attached = min(max(life.attached_ns, begin), ended)
    if life.first_row_ns is None:
        return attached, ended, ended, ended
    first = min(max(life.first_row_ns, attached), ended)
    last = max(life.last_row_ns or first, first + max(0, took))
    return attached, first, min(max(last, first), ended), ended


def _pieces(process: int, life: Life, intervals: Intervals, ended_ns: int) -> tuple[list[Piece], int]:
    """
    Return the intervals of a process that take time from steps, and the ns of those beside training. What was
    not over in the newest report went on until the process ended, or was last seen.
    """
    pieces, beside_ns = [*intervals.pieces.get(process, ())], intervals.async_ns.get(process, 0)
    for one in life.open_intervals(intervals.numbers.get(process, ()), ended_ns) if life.open else ():
        if one.what == ASYNC:
            beside_ns += one.busy_ns
        else:
            pieces.append(piece_of(one))
    return pieces, beside_ns


def _in_whole_steps(
    hangs: Sequence[Hang], columns: Int64, lives: Sequence[Life | None], end: int
) -> list[Hang]:
    """Return hangs that are over with the begin and end of the step that they are in, see `whole_step`."""
    firsts = [life.first_row_ns for life in lives if life is not None and life.first_row_ns is not None]
    if not firsts:
        return [*hangs]
    first, whole = sorted(firsts)[len(firsts) // 2], []
    for hang in hangs:
        if hang.ended_ns is not None and hang.ended_ns < end:
            seen = Piece(HANG, hang.began_ns, hang.ended_ns, hang.ended_ns - hang.began_ns)
            step = whole_step(columns, len(firsts), first, seen)
            hang = hang._replace(began_ns=step.began_ns, ended_ns=step.ended_ns)
        whole.append(hang)
    return whole


def _hung_in(rank: int, hangs: Sequence[Hang], end: int) -> tuple[int, int]:
    """Return how long a rank waited for named ranks in hangs, and hung in `data` itself, in ns."""
    waited = sum(
        piece.busy_ns for piece in _hung([one for one in hangs if one.ranks and rank not in one.ranks], end)
    )
    named = [one for one in hangs if rank in one.ranks and one.stage == STAGES[DATA_STAGE]]
    return waited, sum(piece.busy_ns for piece in _hung(named, end))


def _hung(hangs: Sequence[Hang], end: int) -> list[Piece]:
    spans = [(hang.began_ns, end if hang.ended_ns is None else min(hang.ended_ns, end)) for hang in hangs]
    return [Piece(HANG, begin, to, to - begin) for begin, to in spans if to > begin]


def _sums(of_rank: Mapping[int, RankProcess], sources: Sources) -> tuple[Int64, Int64]:
    """
    Return the time of the rows of each rank, waiting for data, and waiting for other ranks: (3, R) ns,
    UNKNOWN where they are not known; and the steps of all ranks in columns (C, 3).

    The steps that have been read and the kept sums may both be known; what covers more time counts.
    """
    kept = [sources.totals.by_process.get(process.id) for process in of_rank.values()]
    columns = next((one.columns for one in kept if one is not None and one.columns), [])
    sums = np.array(
        [
            (UNKNOWN,) * 3 if one is None else (one.took_ns, one.data_ns, one.waited_ns)
            for one in kept
        ],
        np.int64,
    ).reshape(-1, 3).T  # fmt: skip
    newest = sources.newest
    if newest is None:
        return sums, np.array(columns, np.int64).reshape(-1, 3)
    places = {rank: row for row, rank in enumerate(newest.ranks.tolist())}
    read = np.full_like(sums, UNKNOWN)
    for row, (rank, process) in enumerate(of_rank.items()):
        if rank in places and sources.newest_of.get(rank) == process.id:
            place = places[rank]
            read[:, row] = newest.took_ns[place], newest.data_ns[place], newest.waited_ns[place]
    if (
        np.maximum(read[0], 0).sum(dtype=float) >= np.maximum(sums[0], 0).sum(dtype=float)
        and (read[0] >= 0).any()
    ):
        return read, newest.columns
    return sums, np.array(columns, np.int64).reshape(-1, 3)


def _progress(
    of_rank: Mapping[int, RankProcess], sources: Sources, columns: Int64, unstored: int
) -> Progress:
    """
    Return what tells which of the steps of an attempt later ones did again. `unstored`: number of its steps
    after those in `columns`.
    """
    restored, restored_step, saved, saved_step = False, None, False, None
    joined, saved_steps = False, set[int]()
    for process in of_rank.values():
        life, known = sources.lives.by_process.get(process.id), sources.intervals.checkpoints.get(process.id)
        if known is None:
            continue
        first = None if life is None else life.first_row_ns
        if known.restored_ns is not None and (first is None or known.restored_ns <= first):
            restored, restored_step = True, known.restored_step or restored_step
        saved |= known.saved
        joined |= known.joined
        saved_steps |= known.saved_steps
        if known.saved_step is not None:
            saved_step = max(known.saved_step, saved_step or 0)
    first_step = int(columns[:, 0].min()) if len(columns) else None
    last_step = int(columns[:, 1].max()) + unstored if len(columns) else None
    return Progress(
        first_step, last_step, restored, saved_step, saved, restored_step, frozenset(saved_steps), joined
    )


def _with_repeated(built: Sequence[Started]) -> list[Started]:
    """Return the attempts with the share of their steps that later ones did again."""
    done = []
    for one, again in zip(built, repeated([one.progress for one in built]), strict=True):
        share, steps = 0.0, 0
        if again.step is not None:
            share = share_from(one.columns, again.step)
            steps = one.steps_from(again.step)
        wasted = None if again.why else share
        attempt = replace(one.attempt, wasted=wasted)
        done.append(
            one._replace(attempt=attempt, repeated_from=again.step, repeated_steps=steps, why=again.why)
        )
    return done
