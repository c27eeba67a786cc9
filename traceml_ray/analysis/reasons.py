"""
Finds the reason for a verdict: the named span that makes a rank late, or the cause of uneven ranks. Writes
its sentence, and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from traceml_ray import text
from traceml_ray.analysis import wording
from traceml_ray.analysis.evidence import comparable
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.uneven_work import (
    FEW,
    MIN_STEPS,
    ExpertLoad,
    Reason,
    reason_of,
    reason_of_more,
    sentence,
)
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.window import Float, Int64, Window, starts_of
from traceml_ray.stages import BACKWARD, FORWARD, SEGMENT_BITS, STAGES
from traceml_ray.wire.messages import SpanSum

MAX_PEERS = 64
"""Largest number of ranks that a span is compared with, evenly chosen: enough for a median."""


class SpanRate(NamedTuple):
    """Time, count and bytes of one span in one stage, per step."""

    ns: float
    times: float
    size: float = 0.0

    @property
    def bytes(self) -> float | None:
        """Bytes of one occurrence. None if not known."""
        return self.size / self.times if self.size and self.times else None


_NONE = SpanRate(0.0, 0.0)
SpanRates = Mapping[tuple[str, int], SpanRate]
"""Rates by span name and stage. A span that a rank never had is missing."""
FindSpan = Callable[[Sequence[int], int, int], Mapping[int, SpanRates]]
"""
Function that returns the rates of some ranks over a range of steps. Ranks without known
rates are missing.
"""


def span_rates(sums: Iterable[SpanSum], first: int, last: int) -> SpanRates:
    """
    Return the rates over the steps `first` to `last`, or to the last known step.

    A sum that extends beyond these steps counts by the share of its steps that lies inside.
    """
    sums = list(sums)
    last = min(last, max((span_sum.last_step for span_sum in sums), default=-1))
    rates: dict[tuple[str, int], SpanRate] = {}
    for span_sum in sums:
        inside = min(span_sum.last_step, last) - max(span_sum.first_step, first) + 1
        if inside > 0:
            share = inside / (span_sum.last_step - span_sum.first_step + 1) / (last - first + 1)
            before = rates.get((span_sum.name, span_sum.stage), _NONE)
            rates[span_sum.name, span_sum.stage] = SpanRate(
                before.ns + share * span_sum.total_ns,
                before.times + share * span_sum.count,
                before.size + share * (span_sum.bytes or 0),
            )
    return rates


def with_spans(verdict: Verdict, window: Window, find: FindSpan, thresholds: Thresholds) -> Verdict:
    """Return `verdict`, and what it names `also`, each with the span that explains it, see `with_span`."""
    also = tuple(with_span(one, window, find, thresholds) for one in verdict.also)
    return msgspec.structs.replace(with_span(verdict, window, find, thresholds), also=also)


def with_span(verdict: Verdict, window: Window, find: FindSpan, thresholds: Thresholds) -> Verdict:
    """
    Return `verdict` with the span that explains most of its rank's excess in its stage, if one does.

    That is the innermost span in which the rank spends at least `span_share` of its excess more than the
    median of its peers. A span that explains a lasting excess occurs in half of the steps (`span_often`).
    """
    if verdict.rank is None or verdict.stage not in STAGES or verdict.span is not None:
        return verdict
    if verdict.rank not in window.ranks:
        return verdict
    window = window.group_of(verdict.rank)
    peers = [rank for rank in window.ranks.tolist() if rank not in verdict.ranks]
    peers = peers[:: -(-len(peers) // MAX_PEERS) or 1]
    steps = window.keys >> SEGMENT_BITS
    inside = np.flatnonzero((steps >= (verdict.from_step or 0)) & (steps <= (verdict.to_step or 0)))
    if not peers or not len(inside):
        return verdict
    stage, compared = STAGES.index(verdict.stage), [verdict.rank, *peers]
    known = find(compared, int(steps[inside[0]]), int(steps[inside[-1]]))
    d = window.d[:, np.searchsorted(window.ranks, compared), stage][inside]
    d = np.add.reduceat(d, starts_of(window.keys[inside]), axis=0)
    transient = verdict.pattern == "transient"
    excess = d[:, 0] - np.median(d[:, 1:], axis=1)
    excess_ns = float(excess.mean() if transient else np.median(excess))
    others = [known[rank] for rank in peers if rank in known]
    if not others:
        return verdict
    explain: list[tuple[float, str, float, float]] = []
    for (name, where), rate in known.get(verdict.rank, {}).items():
        more_ns = rate.ns - float(np.median([other.get((name, where), _NONE).ns for other in others]))
        lasts = transient or rate.times >= thresholds.span_often
        if where == stage and lasts and more_ns >= thresholds.span_share * excess_ns > 0:
            explain.append((rate.ns, name, more_ns, rate.times))
    if not explain:
        return verdict
    _, span, more_ns, times = min(explain)  # the innermost: never longer than those around it
    seldom = transient and 0 < times < thresholds.span_often
    per = (more_ns / times, "each time") if seldom else (more_ns, "per step")
    why, advice = wording.with_span(verdict.why, verdict.next, verdict.rank, verdict.stage, span, *per)
    return msgspec.structs.replace(verdict, span=span, why=why, next=advice)


MAX_RANKS = 64
"""
Largest number of ranks whose batches are examined, evenly chosen. With the steps of a window, that suffices
for a share.
"""
UNEVEN_EXPERTS = 1.5
"""Multiple of the mean load of an expert from which on uneven experts are a reason."""
_COMPUTE = {STAGES[FORWARD], STAGES[BACKWARD]}
_HOLDS = 0.5
"""Share of the longer time from which on larger batches are the first thing to look at."""
_MENTIONED = 0.1
"""Share from which on batch sizes are mentioned beside another reason."""
Find = Callable[[Sequence[int], Int64], Mapping[str, Float]]
"""Function that returns the batch sizes of some ranks in some steps by name: (S, R), NaN if not known."""

_NEXT = {
    "tokens": "Give all ranks about as many tokens in a step: bucket by length, pack sequences, or balance "
    "tokens between ranks.",
    "samples": "Give all ranks as many samples in a step: `drop_last=True`, a `DistributedSampler`, batches "
    "of a fixed size.",
    "data": "Load further ahead: more DataLoader workers, a larger `prefetch_factor`. Then look for samples "
    "that take much longer than others, and at the storage.",
    "between_steps": "Look at what ranks do in turn between two steps (logging, checkpoints, evaluation): do "
    "it on all of them in the same step.",
    "experts": "Even out the load of the experts: an auxiliary loss, a capacity factor, another placement.",
    "pauses": "Collect garbage on all ranks in the same step: `gc.freeze()` once the model is built, "
    "`gc.disable()`, and `gc.collect()` every N steps. Then look for other processes on the nodes.",
    "other": "Look at what varies besides the sizes of batches: branches in the model, recomputation, other "
    "processes on the nodes.",
    "unknown": "Give the monitor the sizes of batches (`traceml_ray.count(samples=…, tokens=…)`): most often "
    "they are the reason.",
}  # fmt: skip


def is_imbalance(verdict: Verdict) -> bool:
    """Whether `verdict` says that ranks are late in turn."""
    return verdict.pattern == "rotating" and verdict.meaning.kind == "finding"


def has_reason(verdict: Verdict) -> bool:
    """Whether there may be a reason for `verdict`: an imbalance, or ranks late in forward or backward."""
    late = verdict.rank is not None and verdict.meaning.kind == "finding" and verdict.pattern == "lasting"
    return is_imbalance(verdict) or (late and set(verdict.stages) <= _COMPUTE)


def with_reason(
    verdict: Verdict,
    window: Window,
    find: Find,
    loads: Sequence[ExpertLoad] = (),
    before: Reason | None = None,
) -> Verdict:
    """
    Return `verdict` with its reason, see `has_reason`: why ranks are late in turn, or by how much the batches
    of named ranks are larger than those of the others. Without a reason it is returned unchanged.

    Args:
        verdict: verdict on a window or on the whole run.
        window: the steps that show it, or more steps of the same run.
        find: returns the batch sizes.
        loads: loads of the experts of watched routers, the least even first.
        before: reason found earlier; it stays while the batch sizes of these steps are not known yet.
    """
    if not has_reason(verdict) or verdict.reason is not None:
        return verdict
    if not is_imbalance(verdict):
        return _with_more_work(verdict, window, find)
    group = _longest_waits(window)
    places = np.arange(len(group.ranks))[:: -(-len(group.ranks) // MAX_RANKS) or 1]
    ranks = group.ranks[places]
    uneven = bool(loads) and loads[0].times_mean >= UNEVEN_EXPERTS
    sizes = find(ranks.tolist(), group.steps)
    reason = reason_of(_work(group, places), sizes, ranks, uneven_experts=uneven)
    if (
        before is not None
        and before.what != "unknown"
        and (reason.what == "unknown" or not reason.sizes_known)
    ):
        reason = before
    why, advice = f"{verdict.why} {_why(reason, loads)}", _advice(reason) or verdict.next
    return msgspec.structs.replace(verdict, reason=reason, why=why, next=advice)


def _with_more_work(verdict: Verdict, window: Window, find: Find) -> Verdict:
    """
    Return a verdict that names ranks with a note whether their batches are larger than
    those of the others.
    """
    if verdict.rank is None or verdict.rank not in window.ranks:
        return verdict
    group = window.group_of(verdict.rank).since(verdict.from_step or 0)
    named = np.isin(group.ranks, verdict.ranks)
    peers = np.flatnonzero(~named)
    places = np.union1d(np.flatnonzero(named)[:MAX_RANKS], peers[:: -(-len(peers) // MAX_RANKS) or 1])
    if not len(peers) or len(group.starts) < MIN_STEPS:
        return verdict
    compute = group.by_step(group.d[:, places][..., [FORWARD, BACKWARD]].sum(axis=2))
    reason = reason_of_more(compute, find(group.ranks[places].tolist(), group.steps), named[places])
    if reason is None:
        return verdict
    their = "Its" if len(verdict.ranks) == 1 else "Their"
    why = (
        f"{verdict.why} {their} batches have {text.number(reason.times or 0)} times as many {reason.what} as "
        f"those of the others, which explains {text.share(reason.share or 0)} of the additional time."
    )
    most = (reason.share or 0) >= _HOLDS
    advice = f"{_NEXT[reason.what]} Then: {verdict.next}" if most else f"{verdict.next} {_NEXT[reason.what]}"
    return msgspec.structs.replace(verdict, reason=reason, why=why, next=advice)


def _work(window: Window, places: slice | Int64) -> Int64:
    """Return the local stages of the ranks at `places` in each step, ns (S, R, 6), 0 where they wait."""
    rows = comparable(window)
    return window.by_step(np.where(rows.waits[:, None, :], 0, rows.d[:, places]))


def _longest_waits(window: Window) -> Window:
    """Return the window of the group of ranks in which most time is spent waiting for the longest rank."""
    groups = window.by_group()
    if len(groups) == 1:
        return groups[0]

    def waits_ns(group: Window) -> int:
        work = _work(group, slice(None)).sum(axis=2)
        return int((work.max(axis=1, keepdims=True) - work).sum()) if work.size else 0

    return max(groups, key=waits_ns)


def _why(reason: Reason, loads: Sequence[ExpertLoad]) -> str:
    """Return the reason as a sentence or two."""
    share = text.share(reason.share or 0.0)
    over = f" ({text.count(reason.steps, 'step')})"
    if reason.what in ("tokens", "samples"):
        return f"The number of {reason.what} in the ranks' batches explains {share} of the differences{over}."
    if reason.what == "data":
        why = f"Loading and preparing batches takes unevenly long: {share} of the differences{over}."
    elif reason.what == "between_steps":
        why = f"The work between two steps makes up {share} of the differences{over}."
    elif reason.what == "experts":
        why = f"Tokens are uneven between experts: {sentence(loads[0])}." if loads else ""
    elif reason.what == "pauses":
        few = text.share(FEW)
        why = f"Pauses now and then: {few} of the ranks' steps make up {share} of the differences{over}."
    elif reason.what == "other":
        return f"The sizes of the ranks' batches do not explain the differences{over}.{_in_part(reason)}"
    else:
        why = ""
    return f"{why}{_in_part(reason)}{_lacking(reason)}".strip()


def _in_part(reason: Reason) -> str:
    """Describe what batch sizes explain, if that is not most of it."""
    known = {"tokens": reason.tokens, "samples": reason.samples}
    name, share = max(known.items(), key=lambda part: part[1] or 0.0)
    if (share or 0.0) < _MENTIONED:
        return ""
    return f" The number of {name} in the batches explains {text.share(share or 0.0)}."


def _lacking(reason: Reason) -> str:
    """Say that batch sizes are not known."""
    if reason.what == "unknown" and reason.sizes_known:
        return f" The sizes of batches may explain them, but too few are known ({reason.steps:,} steps)."
    if reason.sizes_known:
        return ""
    whose = f" of {text.ranks(reason.unknown_ranks)}" if reason.unknown_ranks else ""
    return (
        f" Whether the sizes of batches explain them is not known: sizes{whose} are known for too few steps."
    )


def _advice(reason: Reason) -> str:
    largest = "tokens" if (reason.tokens or 0.0) >= (reason.samples or 0.0) else "samples"
    in_part = max(reason.tokens or 0.0, reason.samples or 0.0) >= _MENTIONED and reason.what != largest
    also = f" {_NEXT[largest]}" if in_part and reason.what not in ("tokens", "samples") else ""
    if reason.what == "unknown" and reason.sizes_known:
        return "Wait for more steps."
    return _NEXT[reason.what] + also
