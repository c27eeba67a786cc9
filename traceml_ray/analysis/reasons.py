"""The reason for an imbalance in a verdict: its sentence, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from traceml_ray import text
from traceml_ray.analysis.evidence import comparable
from traceml_ray.analysis.experts import ExpertLoad, sentence
from traceml_ray.analysis.uneven_work import FEW, MIN_STEPS, Reason, reason_of, reason_of_more
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.window import Float, Int64, Window
from traceml_ray.stages import BACKWARD, FORWARD, STAGES

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
    "`gc.disable()`, and `gc.collect()` every so many steps. Then look for other processes on the nodes.",
    "other": "Look at what varies besides the sizes of batches: branches in the model, recomputation, other "
    "processes on the nodes.",
    "unknown": "Tell the monitor the sizes of batches (`traceml_ray.count(samples=…, tokens=…)`): most often "
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
    of named ranks are larger than those of the others. Without one it is returned as it is.

    Args:
        verdict: of a window or of the whole run.
        window: the steps that show it, or more of the same run.
        find: the sizes of batches.
        loads: of the experts of watched routers, the least even first.
        before: what was found before; it stays where the sizes of these batches are not known yet.
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
    """Return a verdict that names ranks with whether their batches are larger than those of the others."""
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
        f"those of the others, which explains {text.share(reason.share or 0)} of what takes longer."
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
        why = f"The experts have unevenly many tokens: {sentence(loads[0])}." if loads else ""
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
        return f" The sizes of batches may explain them: too few were seen to tell ({reason.steps:,} steps)."
    if reason.sizes_known:
        return ""
    whose = f" of {text.ranks(reason.unknown_ranks)}" if reason.unknown_ranks else ""
    return (
        " Whether the sizes of batches explain them is not known: "
        f"those{whose} are not known of enough steps."
    )


def _advice(reason: Reason) -> str:
    largest = "tokens" if (reason.tokens or 0.0) >= (reason.samples or 0.0) else "samples"
    in_part = max(reason.tokens or 0.0, reason.samples or 0.0) >= _MENTIONED and reason.what != largest
    also = f" {_NEXT[largest]}" if in_part and reason.what not in ("tokens", "samples") else ""
    if reason.what == "unknown" and reason.sizes_known:
        return "Wait for more steps."
    return _NEXT[reason.what] + also
