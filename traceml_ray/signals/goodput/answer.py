"""The answer about the goodput of a run: where the time of its ranks went, in all, by attempt and by rank."""

from __future__ import annotations

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
    HANG,
    IDLE,
    OTHER,
    PREPARATION,
    PRODUCTIVE,
    RECOVERY,
    STARTUP,
    WASTED,
)

MOST_RANKS, MOST_STRETCHES, _DRAWN_RANKS = 64, 400, 256
"""
Largest numbers of ranks and of stretches in an answer; number of ranks (the lowest) whose intervals the
timeline shows.
"""
_SHORT = 1e-3
"""Stretches shorter than this share of the run are left out if there are too many."""


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
    """Time from its end to the start of the next attempt's processes, in s. None: it is the last."""
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
    """Why something is not known, by category; `steps` if nothing is known."""

    @property
    def rank_hours(self) -> float:
        """Hours of all ranks together: of devices, if each rank has one."""
        return self.rank_s / 3600

    @property
    def cost(self) -> float | None:
        """Price of all of the time. None: the price is not given."""
        return None if self.price is None else self.price * self.rank_hours

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
    balances = []
    for index, one in enumerate(attempts):
        until = attempts[index + 1].attempt.begin_ns if index + 1 < len(attempts) else None
        balances.append(balance(one.attempt, until))
    total = [sum(one.total[place] for one in balances) for place in range(len(CATEGORIES))]
    rank_ns = sum(one.rank_ns for one in balances)
    reasons = [_reasons(one, sums) for one, sums in zip(attempts, balances, strict=True)]
    why = {
        name: f"attempt {number}: {reason}"
        for number, of_attempt in enumerate(reasons, 1)
        for name, reason in of_attempt.items()
    }
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
        **known,
    )


def _reasons(one: Started, sums: Balance) -> dict[str, str]:
    """Return why something is not known of an attempt, by category."""
    reasons = {}
    if sums.unknown_ns or (not len(one.columns) and (one.attempt.ranks.first_row_ns >= 0).any()):
        reasons["productive"] = "its steps are not known, their time is in `other`"
    if one.why:
        reasons["wasted"] = one.why
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
    following = [*attempts[1:], None]
    for one, next_one, sums, why in zip(attempts, following, balances, reasons, strict=True):
        gap = None if next_one is None else (next_one.attempt.begin_ns - one.attempt.end_ns) / 1e9
        yield AttemptGoodput(
            attempt=one.number,
            ranks=one.attempt.world,
            from_ns=one.attempt.begin_ns,
            to_ns=one.attempt.end_ns,
            recovery_s=gap,
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
    following = [*attempts[1:], None]
    for one, next_one, part in zip(attempts, following, balances, strict=True):
        places = np.searchsorted(every, one.attempt.ranks.ranks)
        sums[places] += part.by_rank
        if next_one is not None:
            sums[places, RECOVERY] += next_one.attempt.begin_ns - one.attempt.end_ns
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
    following = [*attempts[1:], None]
    for index, (one, next_one) in enumerate(zip(attempts, following, strict=True)):
        over = _overlaid(one)
        for what, begin, end in _phases(one):
            for category, since, to in _cut(what, begin, end, over):
                stretches.append(Stretch(attempt=index, what=CATEGORIES[category], from_ns=since, to_ns=to))
        if next_one is not None and next_one.attempt.begin_ns > one.attempt.end_ns:
            gap = one.attempt.end_ns, next_one.attempt.begin_ns
            stretches.append(Stretch(attempt=index, what="recovery", from_ns=gap[0], to_ns=gap[1]))
    return _fewer(stretches)


def _phases(one: Started) -> Iterator[tuple[int, int, int]]:
    """Yield what the median rank did between the moments of its life: category, begin, end."""
    ranks, begin, end = one.attempt.ranks, one.attempt.begin_ns, one.attempt.end_ns
    attached = int(np.clip(np.median(ranks.attached_ns), begin, end))
    yield STARTUP, begin, attached
    stepped = ranks.first_row_ns >= 0
    if not stepped.any():
        yield PREPARATION, attached, end
        return
    first = int(np.clip(np.median(ranks.first_row_ns[stepped]), attached, end))
    yield PREPARATION, attached, first
    newest = np.maximum(ranks.last_row_ns, ranks.first_row_ns + np.maximum(ranks.took_ns, 0))[stepped]
    last = end if one.running else int(np.clip(np.median(newest), first, end))
    again = one.repeated_from
    known = PRODUCTIVE if len(one.columns) else OTHER
    if again is None or not one.attempt.wasted:
        yield known, first, last
    else:
        middle = last - round((last - first) * one.attempt.wasted)
        yield known, first, middle
        yield WASTED, middle, last
    yield (IDLE if ranks.over.all() else OTHER), last, end


def _overlaid(one: Started) -> list[tuple[int, int, int]]:
    """Return the intervals of the lowest ranks, those of one category joined where they overlap."""
    by_category: dict[int, list[tuple[int, int]]] = {}
    for rank in sorted(one.pieces)[:_DRAWN_RANKS]:
        for piece in one.pieces[rank]:
            by_category.setdefault(piece.category, []).append((piece.began_ns, piece.ended_ns))
    joined = []
    for category, spans in by_category.items():
        spans.sort()
        begin, end = spans[0]
        for since, to in spans[1:]:
            if since > end:
                joined.append((category, begin, end))
                begin, end = since, to
            end = max(end, to)
        joined.append((category, begin, end))
    return sorted(joined, key=lambda span: (span[0] == HANG, span[1]))


def _cut(what: int, begin: int, end: int, over: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return a phase divided by the intervals that lie over it: category, begin, end, in order of time."""
    free, parts = [(begin, end)], []
    for category, since, to in over:
        left = []
        for low, high in free:
            low_in, high_in = max(low, since), min(high, to)
            if low_in >= high_in:
                left.append((low, high))
                continue
            parts.append((category, low_in, high_in))
            left += [(low, low_in), (high_in, high)]
        free = [(low, high) for low, high in left if high > low]
    parts += [(what, low, high) for low, high in free if high > low]
    return sorted(parts, key=lambda part: part[1])


def _fewer(stretches: list[Stretch]) -> list[Stretch]:
    """Return stretches without the shortest ones if there are too many. Equal neighbours are joined."""
    if len(stretches) > MOST_STRETCHES:
        length = stretches[-1].to_ns - stretches[0].from_ns
        stretches = [one for one in stretches if one.to_ns - one.from_ns >= _SHORT * length]
    joined: list[Stretch] = []
    for one in stretches:
        if joined and (joined[-1].what, joined[-1].attempt) == (one.what, one.attempt):
            joined[-1] = msgspec.structs.replace(joined[-1], to_ns=one.to_ns)
        else:
            joined.append(one)
    return joined


def hours(seconds: float | None, device: str | None) -> str:
    """Return rank-seconds as hours of devices: "12 GPU-hours", "0.4 rank-hours"."""
    unit = "rank-hours" if device in (None, "cpu") else "GPU-hours"
    if seconds is None:
        return f"{text.NA} {unit}"
    amount = seconds / 3600
    return f"{text.number(amount) if amount >= 1 or not amount else text.number(amount, 3)} {unit}"
