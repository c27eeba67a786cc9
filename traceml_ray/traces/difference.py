"""
What one rank does more of than others, operation by operation.

A rank that waits for others does so inside collectives, and in what synchronises with its device: that time
is the effect of a difference elsewhere, and is kept apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np

from traceml_ray import text
from traceml_ray.analysis.thresholds import ProfileLimits
from traceml_ray.stages import STAGES
from traceml_ray.traces.key_averages import Kind
from traceml_ray.traces.sources import Source
from traceml_ray.traces.spent import OUTSIDE, Key, RecordingError, Spent, spent

MEDIAN: Literal["median"] = "median"
_LIMITS = ProfileLimits()


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of a rank and of the others; own times per step, without the operations inside it."""

    name: str
    """Name of the operation; `OUTSIDE`: the time in which no operation runs."""
    kind: Kind | Literal["outside"]
    more_ms: float
    """Additional time of the rank, in ms a step: of its threads or of the device, whichever is larger."""
    on_device: bool
    """Whether `more_ms` is time of the device."""
    calls: float
    other_calls: float
    self_cpu_ms: float
    other_self_cpu_ms: float
    self_device_ms: float | None
    """Device time of the rank in ms; None if no device was recorded."""
    other_self_device_ms: float | None


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A rank beside another, or beside the median of others; all numbers are of one step."""

    rank: int
    others: list[int]
    """The rank compared with, or the ranks whose median is compared with."""
    stage: str | None
    """Stage that the comparison is limited to: only operations that begin in it."""
    steps: int
    """
    Number of completely recorded steps of the rank; 0: the trace has no steps, the numbers cover all of it.
    """
    step_ms: float
    other_step_ms: float
    waiting_ms: float
    """Waiting time of the rank, in ms a step: in collectives and for its device."""
    other_waiting_ms: float
    operations: list[Compared]
    """Operations, the one that explains most first."""
    waits: list[Compared]
    """
    Operations that make up `waiting_ms`. Of a collective in its own thread: the time that no work hides.
    """
    sentences: list[str]


def difference(
    sources: Sequence[Source], rank: int, beside: int | Literal["median"] = MEDIAN, stage: str | None = None
) -> Difference:
    """
    Return what `rank` does more of than another, or than the median of all others of `sources`.

    Raises:
        RecordingError: a rank, or the stage, was not recorded.
        TraceError: a trace cannot be read.
    """
    by_rank = {source.rank: source for source in sources if source.rank is not None}
    others = [other for other in by_rank if other != rank] if beside == MEDIAN else [beside]
    for wanted in (rank, *others):
        if wanted not in by_rank:
            raise RecordingError(_lacking(wanted, by_rank, [s.label for s in sources if s.rank is None]))
    if not others or others == [rank]:
        raise RecordingError(f"only rank {rank} was recorded: there is nothing to compare it with")
    if stage is not None and stage not in STAGES:
        raise RecordingError(f"{stage!r} is no stage: it is one of {', '.join(STAGES)}")
    return compare(
        rank, spent(by_rank[rank], stage), {other: spent(by_rank[other], stage) for other in others}, stage
    )


def _lacking(wanted: int, available: Iterable[int], unknown: Sequence[str]) -> str:
    there = f": the profile has {text.ranks(available)}" if available else ""
    whose = (
        f"; whose {text.listed(unknown)} is, is not known: put the rank into its name, as rank0.json"
        if unknown
        else ""
    )
    return f"rank {wanted} was not recorded{there}{whose}"


def compare(rank: int, rank_spent: Spent, others: dict[int, Spent], stage: str | None) -> Difference:
    """Return the difference between what one rank spends and the median of what others do."""
    names = dict.fromkeys(key for times in (rank_spent, *others.values()) for key in times.operations)
    rows = [_compared(key, rank_spent, list(others.values())) for key in names]
    rows.sort(key=lambda row: -row.more_ms)
    waits = [row for row in rows if _is_wait(row, rank_spent, others.values())]
    operations = [row for row in rows if not _is_wait(row, rank_spent, others.values())]
    result = Difference(
        rank=rank,
        others=sorted(others),
        stage=stage,
        steps=rank_spent.steps,
        step_ms=rank_spent.step_ns / 1e6,
        other_step_ms=_median(times.step_ns for times in others.values()),
        waiting_ms=rank_spent.waiting_ns / 1e6,
        other_waiting_ms=_median(times.waiting_ns for times in others.values()),
        operations=operations,
        waits=waits,
        sentences=[],
    )
    return msgspec.structs.replace(result, sentences=sentences(result))


def _is_wait(row: Compared, rank_spent: Spent, others: Iterable[Spent]) -> bool:
    return any((row.name, row.kind) in times.waits for times in (rank_spent, *others))


def _median(values_ns: Iterable[float]) -> float:
    return float(np.median([*values_ns])) / 1e6


def _compared(key: Key, rank_spent: Spent, others: Sequence[Spent]) -> Compared:
    """Return one operation; those who do not have it spend nothing in it."""
    mine = rank_spent.of(key)
    theirs = np.median([other.of(key) for other in others], axis=0)
    device = rank_spent.device or any(other.device for other in others)
    cpu_ms, device_ms = (float(mine[column] - theirs[column]) / 1e6 for column in (1, 2))
    on_device = abs(device_ms) > abs(cpu_ms)
    return Compared(
        name=key[0],
        kind=key[1],
        more_ms=device_ms if on_device else cpu_ms,
        on_device=on_device,
        calls=mine[0],
        other_calls=float(theirs[0]),
        self_cpu_ms=mine[1] / 1e6,
        other_self_cpu_ms=float(theirs[1]) / 1e6,
        self_device_ms=mine[2] / 1e6 if device else None,
        other_self_device_ms=float(theirs[2]) / 1e6 if device else None,
    )


def sentences(difference: Difference) -> list[str]:
    """Return what the difference is, in words: the operations that explain most of it, and who waits."""
    more = sum(row.more_ms for row in difference.operations if row.more_ms > 0)
    least = max(_LIMITS.named_share * more, _LIMITS.least_share * difference.step_ms)
    named = [row for row in difference.operations if row.more_ms >= least][: _LIMITS.most_named]
    than = text.ranks(difference.others)
    if len(difference.others) > 1:
        than = f"the median of {than}"
    per = "a step" if difference.steps else "in the trace"
    within = f" of `{difference.stage}`" if difference.stage else ""
    lines = [_sentence(difference.rank, row, per + within, than) for row in named]
    if not named:
        lines = [
            f"rank {difference.rank} spends clearly more time {per}{within} in no operation than {than}."
        ]
    waits_less = difference.other_waiting_ms - difference.waiting_ms
    if abs(waits_less) >= max(_LIMITS.least_share * difference.step_ms, 0.01):
        less, who = ("less", "the others wait for it") if waits_less > 0 else ("more", "it waits for others")
        lines.append(f"It waits {text.ms(abs(waits_less))} {per}{within} {less} than {than}: {who}.")
    return lines


def _sentence(rank: int, row: Compared, per: str, than: str) -> str:
    where = (
        "outside of operations, where no operation of torch runs"
        if row.name == OUTSIDE
        else f"in `{row.name}`"
    )
    where += " on the device" if row.on_device else ""
    return f"rank {rank} spends {text.ms(row.more_ms)} {per} more {where}{_calls(row)} than {than}."


def _calls(row: Compared) -> str:
    more = row.calls - row.other_calls
    if row.name == OUTSIDE:
        return ""
    if abs(more) < _LIMITS.same_calls:
        return " (as many calls)"
    number = text.number(abs(more))
    return f" ({number} call{'' if number == '1' else 's'} {'more' if more > 0 else 'fewer'})"
