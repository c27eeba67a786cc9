"""The answer about the goodput of a run: where the time of its ranks went, in all, by attempt and by rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from traceml_ray import text
from traceml_ray.analysis.window import Int64
from traceml_ray.signals.goodput.attempts import Sources, Started, started
from traceml_ray.signals.goodput.ledger import Balance, balance
from traceml_ray.signals.goodput.pieces import (
    CATEGORIES,
    EXPLICIT,
    IDLE,
    OTHER,
    PREPARATION,
    PRODUCTIVE,
    RECOVERY,
    STARTUP,
    WASTED,
    merged,
    minus,
)

MOST_RANKS, MOST_STRETCHES, _DRAWN_RANKS = 64, 400, 256
"""
Largest numbers of ranks and of stretches in an answer; number of ranks (the lowest) whose intervals the
timeline shows.
"""

_UNITS, _FROM = (("hours", 3600), ("minutes", 60), ("seconds", 1)), 2
"""Units of time with their lengths in s, and how many of one a run must have to be shown in it."""
CPU = "cpu"
"""Device of ranks without a GPU."""


class AttemptGoodput(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one attempt went."""

    attempt: int
    """Number of the launcher's attempt. Several starts of an elastic launcher may have the same."""
    ranks: int
    """Number of its ranks."""
    from_ns: int
    """When its first process was started (ns since the epoch)."""
    to_ns: int
    """When its last process ended, or the newest report (ns since the epoch)."""
    recovery_s: float | None
    """
    Time from its end to the start of the next attempt's processes, in s. None: it is the last, or a clock was
    set in between and it is not known.
    """
    steps: int
    """Number of its steps, as far as they are known."""
    repeated_from: int | None
    """First of its steps that a later attempt did again. None: none was, or it is not known."""
    repeated_steps: int
    """Number of its steps that a later attempt did again."""
    rank_s: float
    """Time of all its ranks together, in s, with the recovery after it."""
    seconds: dict[str, float | None]
    """Category → time of all ranks together in s. They add up to `rank_s`. None: not known."""
    why: dict[str, str] = {}
    """Why something is not known, by category."""


class RankGoodput(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one rank went, over all attempts it was in."""

    rank: int
    """Global rank."""
    rank_s: float
    """Its time in s: the lengths of its attempts, and the recovery after them."""
    seconds: dict[str, float]
    """Category → time in s. They add up to `rank_s`."""


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the run's time in which most ranks did one thing, for a timeline."""

    attempt: int
    """Index of the attempt in `attempts`."""
    what: str
    """A category. `productive` stands for steps, with their waits."""
    from_ns: int
    """When it began (ns since the epoch)."""
    to_ns: int
    """When it ended (ns since the epoch)."""


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """
    Where the time of all ranks of a run went, over all attempts.

    Times of all ranks are in rank-seconds. A value that is not known is None, and `why` has the reason.
    """

    rank_s: float = 0.0
    """Time of all ranks together, in s: in each attempt its ranks × its length. 0: nothing is known."""
    from_ns: int | None = None
    """When the first process of the run was started (ns since the epoch)."""
    to_ns: int | None = None
    """End of the last attempt, or the newest report (ns since the epoch)."""
    ranks: int = 0
    """Number of ranks of the newest attempt."""
    goodput_pct: float | None = None
    """Share of `rank_s` in productive steps, in %."""
    seconds: dict[str, float | None] = {}
    """
    Category → time of all ranks together in s. They add up to `rank_s`. None counts as 0: that time is in
    `other`, or for `wasted` in `productive`.
    """
    async_save_s: float = 0.0
    """Time in which checkpoints were saved beside training, all ranks together, in s; in no category."""
    twice_s: float = 0.0
    """Time that steps and intervals claim twice, in s; it counts once. Above 0, something is wrong."""
    attempts: list[AttemptGoodput] = []
    """The oldest first. One in which no rank reported its life is left out."""
    by_rank: list[RankGoodput] = []
    """Ranks with the least productive share, at most 64."""
    timeline: list[Stretch] = []
    """In order of time."""
    device: str | None = None
    """Device of the ranks: its name, or `cpu`. None: not known, or not the same on all."""
    price: float | None = None
    """Price of an hour of one device (setting `gpu_hour_price`). None: not given."""
    total_steps: int | None = None
    """Number of steps of the whole run, where the script or a setting says it."""
    left_s: float | None = None
    """Time that the remaining steps will take, in s."""
    why: dict[str, str] = {}
    """
    Why something is not known, or not known in parts, by category; `steps` if nothing is known.
    """
    clocks: list[str] = []
    """
    Sentences about clocks that were set while the run went on. Times are on the clock of the newest attempt;
    lengths do not depend on it, but for what the sentences say.
    """

    @property
    def rank_hours(self) -> float:
        """Hours of all ranks together: of devices, if each rank has one."""
        return self.rank_s / 3600

    @property
    def cost(self) -> float | None:
        """Price of all of the time. None: the price is not given, or the ranks have no GPU."""
        return None if self.price is None or self.device == CPU else self.price * self.rank_hours

    @property
    def badput_s(self) -> float | None:
        """Time of all ranks together in neither productive steps nor `other`, in s. None: not known."""
        if self.goodput_pct is None:
            return None
        kinds = (name for name in CATEGORIES if name not in ("productive", "other"))
        return sum(self.seconds.get(name) or 0.0 for name in kinds)


def goodput(sources: Sources, **known: Any) -> Goodput:
    """Return the goodput of a run. `known`: further fields of the answer."""
    attempts = started(sources)
    if not attempts:
        return Goodput(why={"steps": "no rank has reported when it was started"}, **known)
    balances = [balance(one.attempt, one.next_ns) for one in attempts]
    total = [sum(one.total[place] for one in balances) for place in range(len(CATEGORIES))]
    rank_ns = sum(one.rank_ns for one in balances)
    reasons = [_reasons(one, sums) for one, sums in zip(attempts, balances, strict=True)]
    names = start_names([one.number for one in attempts])
    why = {
        name: f"attempt {of_attempt}: {reason}" if len(attempts) > 1 else reason
        for of_attempt, known_not in zip(names, reasons, strict=True)
        for name, reason in known_not.items()
    }
    if sources.lacks_oldest:
        why["checkpoint_save"] = (
            "the oldest checkpoints and evaluations are not in this file, their time is in other parts"
        )
    seconds = _seconds(total, {*why} if _all_unknown(attempts, balances) else {*why} - {"productive"})
    return Goodput(
        rank_s=rank_ns / 1e9,
        from_ns=attempts[0].attempt.begin_ns,
        to_ns=attempts[-1].attempt.end_ns,
        ranks=attempts[-1].attempt.world,
        goodput_pct=None
        if seconds["productive"] is None or not rank_ns
        else 100 * total[PRODUCTIVE] / rank_ns,
        seconds=seconds,
        async_save_s=sum(one.async_ns for one in attempts) / 1e9,
        twice_s=sum(one.twice_ns for one in balances) / 1e9,
        attempts=[*_attempts(attempts, balances, reasons)],
        by_rank=_by_rank(attempts, balances),
        timeline=_timeline(attempts),
        why=why,
        clocks=[*_clocks(attempts, names)],
        **known,
    )


def _clocks(attempts: Sequence[Started], names: Sequence[str]) -> Iterator[str]:
    """Yield a sentence about each time at which a clock was set."""
    for place, one in enumerate(attempts):
        if one.set_during_ns:
            yield (
                f"The clock was set {_by(one.set_during_ns)} during attempt {names[place]}. A hang before "
                "that may count as something else."
            )
        if not one.gap_known:
            yield (
                f"Attempt {names[place]} ended {text.duration(abs(one.set_ns) / 1e9)} after the next one had "
                "begun: a clock was set in between. The time between them is not known and counts as 0."
            )
        elif one.set_ns:
            yield (
                f"The clock was set {_by(one.set_ns)} between attempt {names[place]} and attempt "
                f"{names[place + 1]}. The time between them is known: nodes that were in both measured it."
            )


def _by(ns: int) -> str:
    return f"{'back' if ns < 0 else 'forward'} by {text.duration(abs(ns) / 1e9)}"


def _reasons(one: Started, sums: Balance) -> dict[str, str]:
    """Return why something is not known of an attempt, by category."""
    reasons = {}
    if sums.unknown_ns or (not len(one.columns) and (one.attempt.ranks.first_row_ns >= 0).any()):
        reasons["productive"] = "its steps are not known, their time is in `other`"
    if one.unstored_steps:
        steps = text.count(one.unstored_steps, "step")
        reasons["productive"] = (
            f"the time of its last {steps} was not stored when the monitor ended, it is in `other`"
        )
        if one.repeated_steps:
            reasons["wasted"] = f"the time of its last {steps} is not known"
    if one.why:
        reasons["wasted"] = one.why
    if one.lost_intervals:
        lost = text.count(one.lost_intervals, "interval")
        reasons["checkpoint_save"] = (
            f"{lost} of checkpoints and evaluations could not be sent, their time is in other parts"
        )
    if one.unseen:
        reasons["recovery"] = f"{text.count(one.unseen, 'attempt')} ended before the monitor attached"
    if not one.gap_known:
        reasons["recovery"] = "a clock was set before the next attempt"
    return reasons


def _all_unknown(attempts: Sequence[Started], balances: Sequence[Balance]) -> bool:
    """Return whether the steps of no attempt are known, though some attempt took steps."""
    unknown = [sums.unknown_ns > 0 for sums in balances]
    return any(unknown) and not any(len(one.columns) for one in attempts)


def _seconds(total: Sequence[int], unknown: set[str]) -> dict[str, float | None]:
    return {
        name: None if name in unknown and not ns else ns / 1e9
        for name, ns in zip(CATEGORIES, total, strict=True)
    }


def _attempts(
    attempts: Sequence[Started], balances: Sequence[Balance], reasons: Sequence[dict[str, str]]
) -> Iterator[AttemptGoodput]:
    for one, sums, why in zip(attempts, balances, reasons, strict=True):
        yield AttemptGoodput(
            attempt=one.number,
            ranks=one.attempt.world,
            from_ns=one.attempt.begin_ns,
            to_ns=one.attempt.end_ns,
            recovery_s=None if one.gap_ns is None or not one.gap_known else one.gap_ns / 1e9,
            steps=one.steps,
            repeated_from=one.repeated_from,
            repeated_steps=one.repeated_steps,
            rank_s=sums.rank_ns / 1e9,
            seconds=_seconds(sums.total, {*why}),
            why=why,
        )


def _by_rank(attempts: Sequence[Started], balances: Sequence[Balance]) -> list[RankGoodput]:
    """Return the ranks with the least productive share, over all attempts."""
    every = np.unique(np.concatenate([one.attempt.ranks.ranks for one in attempts]))
    sums: Int64 = np.zeros((len(every), len(CATEGORIES)), np.int64)
    for one, part in zip(attempts, balances, strict=True):
        places = np.searchsorted(every, one.attempt.ranks.ranks)
        sums[places] += part.by_rank
        sums[places, RECOVERY] += one.gap_ns or 0
    lengths = sums.sum(axis=1)
    share = sums[:, PRODUCTIVE] / np.maximum(lengths, 1)
    return [
        RankGoodput(
            rank=int(every[place]),
            rank_s=int(lengths[place]) / 1e9,
            seconds={name: int(ns) / 1e9 for name, ns in zip(CATEGORIES, sums[place], strict=True)},
        )
        for place in np.argsort(share, kind="stable")[:MOST_RANKS].tolist()
    ]


def _timeline(attempts: Sequence[Started]) -> list[Stretch]:
    """Return what most ranks did over the run, in order of time."""
    stretches: list[Stretch] = []
    for index, one in enumerate(attempts):
        over = _overlaid(one)
        for what, begin, end in _phases(one):
            for category, since, to in _cut(what, begin, end, over):
                stretches.append(Stretch(attempt=index, what=CATEGORIES[category], from_ns=since, to_ns=to))
        if one.next_ns is not None and one.gap_ns:
            since, to = one.attempt.end_ns, one.next_ns
            stretches.append(Stretch(attempt=index, what="recovery", from_ns=since, to_ns=to))
    return _fewer(stretches)


def _phases(one: Started) -> Iterator[tuple[int, int, int]]:
    """Yield what the median rank did between the moments of its life: category, begin, end."""
    ranks, begin, end = one.attempt.ranks, one.attempt.begin_ns, one.attempt.end_ns
    if not len(ranks.ranks):
        return
    attached = int(np.clip(np.median(ranks.attached_ns), begin, end))
    yield STARTUP, begin, attached
    stepped = ranks.first_row_ns >= 0
    if not stepped.any():
        yield PREPARATION, attached, end
        return
    first = int(np.clip(np.median(ranks.first_row_ns[stepped]), attached, end))
    yield PREPARATION, attached, first
    newest = np.maximum(ranks.last_row_ns, ranks.first_row_ns + np.maximum(ranks.took_ns, 0))[stepped]
    last = int(np.clip(np.median(newest), first, end))
    again = one.repeated_from
    known = PRODUCTIVE if len(one.columns) else OTHER
    if again is None or not one.attempt.wasted:
        yield known, first, last
    else:
        middle = last - round((last - first) * one.attempt.wasted)
        yield known, first, middle
        yield WASTED, middle, last
    yield (IDLE if ranks.over.all() else OTHER), last, end


def _overlaid(one: Started) -> list[tuple[int, list[tuple[int, int]]]]:
    """
    Return when the lowest ranks were in intervals of each category. Of several short ones that were joined:
    if they fill most of the time.
    """
    spans: dict[int, list[tuple[int, int]]] = {}
    for rank in sorted(one.pieces)[:_DRAWN_RANKS]:
        for piece in one.pieces[rank]:
            if not piece.joined or 2 * piece.busy_ns >= piece.ended_ns - piece.began_ns:
                spans.setdefault(piece.category, []).append((piece.began_ns, piece.ended_ns))
    return [(category, merged(spans[category])) for category in EXPLICIT if category in spans]


def _cut(
    what: int, begin: int, end: int, over: Sequence[tuple[int, list[tuple[int, int]]]]
) -> list[tuple[int, int, int]]:
    """Return a phase divided by the intervals that lie over it: category, begin, end, in order of time."""
    free = [(begin, end)] if end > begin else []
    parts = []
    for category, spans in over:
        left = minus(free, spans)
        parts += [(category, *span) for span in minus(free, left)]
        free = left
    parts += [(what, *span) for span in free]
    return sorted(parts, key=lambda part: part[1])


def _fewer(stretches: list[Stretch]) -> list[Stretch]:
    """
    Return stretches without the shortest ones if there are too many: the one before a short one lasts longer.
    Equal neighbours are joined.
    """
    shortest_first = np.argsort([one.to_ns - one.from_ns for one in stretches], kind="stable")
    long = {*shortest_first[-MOST_STRETCHES:].tolist()}
    joined: list[Stretch] = []
    for place, one in enumerate(stretches):
        if joined and (place not in long or (joined[-1].what, joined[-1].attempt) == (one.what, one.attempt)):
            joined[-1] = msgspec.structs.replace(joined[-1], to_ns=one.to_ns)
        else:
            joined.append(one)
    return joined


def amount(seconds: float | None, answer: Goodput) -> str:
    """
    Return rank-seconds in a unit that suits the whole run: "12 GPU-hours", "4.2 GPU-minutes", "0.4
    rank-hours".
    """
    unit, length = next(one for one in _UNITS if answer.rank_s >= _FROM * one[1] or one[1] == 1)
    of_rank = "rank" if answer.device in (None, CPU) else "GPU"
    if seconds is None:
        return f"{text.NA} {of_rank}-{unit}"
    value = seconds / length
    return f"{text.number(value) if value >= 1 or not value else text.number(value, 3)} {of_rank}-{unit}"


def start_names(numbers: Sequence[int]) -> list[str]:
    """Return a name of each attempt by its launcher's number: "2", and "2, start 3" if it started again."""
    count: Counter[int] = Counter()
    names = []
    for number in numbers:
        count[number] += 1
        names.append(f"{number}, start {count[number]}" if count[number] > 1 else str(number))
    return names
