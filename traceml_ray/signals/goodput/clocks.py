"""
The times of all attempts on one clock, although a wall clock was set in between. Pure, in ns.

Records say when their node was booted, by its wall clock at that moment. If two records of the same boot
disagree, the clock was set between them, by the difference. The clock since the boot is never set, so it
knows the order of the attempts and the time between them. Times are moved to the newest setting. If no node
was in both of two attempts, only an order that cannot be (an attempt ended after the next one had begun)
shows that a clock was set; then the time between them is not known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from traceml_ray.signals.goodput.records import LIFE, Life
from traceml_ray.signals.goodput.reported import SET_NS, Intervals, Lives
from traceml_ray.store.rank_processes import RankProcess

_OVERLAP_NS = 60_000_000_000
"""Time that processes of an attempt may go on after the begin of the next one, if their node is not in it."""
_EXACT_NS = 10_000_000
"""Times are moved by multiples of this, so that they stay equal while the newest records differ by less."""

Generations = Sequence[Sequence[RankProcess]]


class Clocks(NamedTuple):
    """How times are moved to one clock."""

    shift_ns: dict[int, int]
    """Time to add to the times of a rank process, by process. Without an entry: 0."""
    booted_ns: dict[int, int]
    """When the node of a process was booted, on the one clock, by process."""
    of_attempt_ns: list[int]
    """Time to add to what the aggregator saw of each attempt."""
    gap_known: list[bool]
    """Whether the time from the end of each attempt to the next one is known."""
    set_during_ns: list[int]
    """By how much the clock was set during each attempt, as its intervals show it; 0: not seen."""


def birth_of(process: RankProcess, life: Life | None) -> int:
    """Return when a process was started, or first seen (ns)."""
    return process.first_seen_ns if life is None else life.born_ns or life.attached_ns


def end_of(process: RankProcess, life: Life | None, killed_ns: Mapping[int, int]) -> int:
    """
    Return when a process ended, or was last seen (ns). `killed_ns`: when processes that were killed had
    ended, by process.
    """
    if life is not None and life.ended_ns is not None:
        return life.ended_ns
    reported = life.t_ns if life is not None else 0
    return max(killed_ns.get(process.id, process.last_seen_ns), reported)


def on_one_clock(
    generations: Generations, lives: Lives, intervals: Intervals, killed_ns: Mapping[int, int]
) -> Clocks | None:
    """Return how the times of a run's `generations` are moved to one clock. None: no clock was set."""
    by_process = lives.by_process
    spans = [*_spans(generations, by_process, killed_ns)] if len(generations) > 1 else [(0, 0)]
    in_order = all(_overlap(spans[place], spans[place + 1][0]) <= 0 for place in range(len(spans) - 1))
    if in_order and not _was_set(generations, by_process, intervals):
        return None
    return _aligned(generations, by_process, intervals, spans, killed_ns)


def _spans(
    generations: Generations, lives: Mapping[int, Life], killed_ns: Mapping[int, int]
) -> Iterator[tuple[int, int]]:
    """Yield when each attempt began and ended, as its processes say."""
    for generation in generations:
        of_each = [(process, lives.get(process.id)) for process in generation]
        births = [birth_of(process, life) for process, life in of_each]
        yield min(births), max([end_of(process, life, killed_ns) for process, life in of_each])


def _overlap(span: tuple[int, int], following: int) -> int:
    """Return the time of an attempt (begin, end) after the begin of the `following` one that cannot be."""
    after = span[1] - following
    return after if after > (_OVERLAP_NS if span[0] < following else 0) else 0


def _was_set(generations: Generations, lives: Mapping[int, Life], intervals: Intervals) -> bool:
    """Return whether records of one boot disagree about when that was."""
    booted: dict[int, int] = {}
    for generation in generations:
        for process in generation:
            life = lives.get(process.id)
            if life is None or life.boot is None or life.booted_ns is None:
                continue
            if not -SET_NS <= life.booted_ns - booted.setdefault(life.boot, life.booted_ns) <= SET_NS:
                return True
    return any(
        intervals.set_ns(process, life.booted_ns)
        for process in intervals.tell_boots
        if (life := lives.get(process)) is not None and life.booted_ns is not None
    )


def _aligned(
    generations: Generations,
    lives: Mapping[int, Life],
    intervals: Intervals,
    spans: Sequence[tuple[int, int]],
    killed_ns: Mapping[int, int],
) -> Clocks:
    """Return how times are moved, from the newest attempt to the oldest."""
    known: dict[int, int] = {}
    count = len(generations)
    clocks = Clocks({}, {}, [0] * count, [True] * count, [0] * count)
    by, following, unsure = 0, None, list[int]()
    for place in reversed(range(count)):
        generation = generations[place]
        newest = _newest_of_boots(lives.get(process.id) for process in generation)
        shared = {boot: known[boot] - booted for boot, booted in newest.items() if boot in known}
        if shared:
            by = _most_common([*shared.values()], by)
        elif following is not None:
            ends = [end_of(process, lives.get(process.id), killed_ns) for process in generation]
            whole = spans[place][0] + by >= following  # else those that end first tell: others may go on
            over = _overlap((spans[place][0] + by, (max if whole else min)(ends) + by), following)
            by, clocks.gap_known[place] = by - over, not over
            unsure.append(place)
        clocks.of_attempt_ns[place] = by
        for boot, booted in newest.items():
            known.setdefault(boot, booted + by)
        for process in generation:
            life = lives.get(process.id)
            shift = by
            if life is not None and life.booted_ns is not None and life.boot is not None:
                shift = _rounded(known[life.boot] - life.booted_ns)
                clocks.booted_ns[process.id] = life.booted_ns + shift
                set_ns = intervals.set_ns(process.id, life.booted_ns)
                clocks.set_during_ns[place] = max(clocks.set_during_ns[place], set_ns, key=abs)
            if shift:
                clocks.shift_ns[process.id] = shift
        if place + 1 < count:
            _move_early_nodes(place, generations, lives, known, clocks)
        following = _begin(generation, lives, clocks)
    for place in unsure[::-1]:
        _move_after_the_one_before(place, generations, lives, spans, clocks)
    return clocks


def _begin(generation: Sequence[RankProcess], lives: Mapping[int, Life], clocks: Clocks) -> int:
    """Return when the first process of an attempt was started, on the one clock."""
    shift_ns = clocks.shift_ns
    return min(
        birth_of(process, lives.get(process.id)) + shift_ns.get(process.id, 0) for process in generation
    )


def _move_after_the_one_before(
    place: int,
    generations: Generations,
    lives: Mapping[int, Life],
    spans: Sequence[tuple[int, int]],
    clocks: Clocks,
) -> None:
    """Move an attempt that shares no node with others behind the one before, if their order cannot be."""
    if place == 0 or _boots(generations[place], lives) & _boots(generations[place - 1], lives):
        return
    begin, by = _begin(generations[place], lives, clocks), clocks.of_attempt_ns[place - 1]
    over = _overlap((spans[place - 1][0] + by, spans[place - 1][1] + by), begin)
    if not over:
        return
    clocks.gap_known[place - 1] = False
    clocks.of_attempt_ns[place] += over
    for process in generations[place]:
        clocks.shift_ns[process.id] = clocks.shift_ns.get(process.id, 0) + over
        if process.id in clocks.booted_ns:
            clocks.booted_ns[process.id] += over


def _boots(generation: Sequence[RankProcess], lives: Mapping[int, Life]) -> set[int]:
    known = (lives.get(process.id) for process in generation)
    return {life.boot for life in known if life is not None and life.boot is not None}


def _most_common(shifts: Sequence[int], usual: int) -> int:
    """
    Return the time that most nodes of an attempt are moved by. Of several, the one nearest to `usual`: a node
    may have been the only one whose clock was set.
    """
    counts = Counter(map(_rounded, shifts))
    return max(counts, key=lambda shift: (counts[shift], -abs(shift - usual)))


def _move_early_nodes(
    place: int,
    generations: Generations,
    lives: Mapping[int, Life],
    known: dict[int, int],
    clocks: Clocks,
) -> None:
    """
    Let the nodes of the next attempt that were not in this one begin with those that were in both, if they
    seem to begin long before these ended here: their clock is behind.
    """
    here: dict[int, int] = {}
    for process in generations[place]:
        life, shift = lives.get(process.id), clocks.shift_ns.get(process.id, 0)
        if life is not None and life.boot is not None:
            here[life.boot] = max(here.get(life.boot, 0), life.t_ns + shift)
    begins: dict[int, int] = {}
    for process in generations[place + 1]:
        life, shift = lives.get(process.id), clocks.shift_ns.get(process.id, 0)
        if life is not None and life.boot is not None:
            begin = birth_of(process, life) + shift
            begins[life.boot] = min(begin, begins.get(life.boot, begin))
    both = here.keys() & begins.keys()
    if not both:
        return
    ended, began = max(here[boot] for boot in both), min(begins[boot] for boot in both)
    early = {
        boot: began - begin
        for boot, begin in begins.items()
        if boot not in here and begin < ended - _OVERLAP_NS
    }
    for boot, shift in early.items():
        known[boot] += shift
    for generation in generations[place + 1 :] if early else ():
        for process in generation:
            life = lives.get(process.id)
            shift = early.get(life.boot, 0) if life is not None and life.boot is not None else 0
            if shift:
                clocks.shift_ns[process.id] = clocks.shift_ns.get(process.id, 0) + shift
                clocks.booted_ns[process.id] += shift


def _newest_of_boots(lives: Iterable[Life | None]) -> dict[int, int]:
    """Return when each node was booted by the record that was written longest after it: boot → ns."""
    newest: dict[int, tuple[int, int]] = {}
    for life in lives:
        if life is not None and life.booted_ns is not None and life.boot is not None:
            one = life.t_ns - life.booted_ns, life.booted_ns
            newest[life.boot] = max(one, newest.get(life.boot, one))
    return {boot: booted for boot, (_, booted) in newest.items()}


def _rounded(shift: int) -> int:
    """Return a time to move by. Less than what a clock is set by is nothing."""
    return 0 if abs(shift) <= SET_NS else round(shift / _EXACT_NS) * _EXACT_NS


class OnOneClock(NamedTuple):
    """What is known of a run's processes, on one clock."""

    generations: list[list[RankProcess]]
    lives: Lives
    intervals: Intervals
    killed_ns: dict[int, int]


def moved(
    clocks: Clocks,
    generations: Generations,
    lives: Lives,
    intervals: Intervals,
    killed_ns: Mapping[int, int],
) -> OnOneClock:
    """Return what is known with all times on one clock."""
    on_clock, ends, moved_lives = list[list[RankProcess]](), dict(killed_ns), Lives()
    moved_lives.by_process = dict(lives.by_process)
    for place, generation in enumerate(generations):
        on_clock.append([])
        for process in generation:
            shift, life = clocks.shift_ns.get(process.id, 0), lives.by_process.get(process.id)
            if shift:
                if life is not None:
                    moved_lives.by_process[process.id] = _life(life, shift)
                if process.id in ends:
                    ends[process.id] = _end(ends[process.id], life, shift)
                first, last = process.first_seen_ns + shift, _end(process.last_seen_ns, life, shift)
                process = replace(process, first_seen_ns=first, last_seen_ns=last)
            on_clock[place].append(process)
    return OnOneClock(on_clock, moved_lives, intervals.moved(clocks.booted_ns, clocks.shift_ns), ends)


def _life(life: Life, shift: int) -> Life:
    times = {name: t_ns for name in LIFE.node_times if (t_ns := getattr(life, name)) is not None}
    return msgspec.structs.replace(life, **{name: t_ns + shift for name, t_ns in times.items()})


def _end(end: int, life: Life | None, shift: int) -> int:
    """
    Return when a process ended, on the one clock. The clock may have been set after its newest report: then
    the end is on the one clock already. Whichever is nearer after that report is right.
    """
    if life is None:
        return end + shift
    on_its_own, on_the_one = end - life.t_ns, end - life.t_ns - shift
    if on_the_one >= -SET_NS and (on_its_own < -SET_NS or on_the_one < on_its_own):
        return end
    return end + shift
