"""
Compares stragglers with a check of their nodes: is the machine slow by itself, or does only the rank take
longer there? Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from traceml_ray import text
from traceml_ray.analysis.labels import LABELS
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.signals.check.judge import LIMITS, CheckResult, Slow, begun
from traceml_ray.signals.finding import Finding, nodes_named

STRAGGLERS = [name for name, label in LABELS.items() if (label.kind, label.names) == ("finding", "ranks")]
"""Labels of verdicts that a check can confirm."""
NOT_KNOWN: Mapping[str, Sequence[int]] = {}
_MOST_OF = 0.5
_SHARED = "node", "disk"
"""Parts of a node that all its ranks use, whichever rank has measured them."""
_ON_GPU = {"gpu_matmul", "gpu_clock"}
_ON_CPU = {"cpu_matmul", "core_matmul", "idle_matmul"}
"""
Probes of which one must have compared a node before it is called as fast as others: its GPUs, or its CPU if
no GPU was measured.
"""
_CHECKS = {
    "check": "a check before training",
    "restart": "a check at the restart",
    "during": "a check during training",
}
"""What a check is called, by `Checked.kind`."""
_NEXT_OF_HARDWARE = (
    "Train on nodes with the same hardware, or give ranks on slower hardware less work in each step."
)
_NEXT = "Look at what {ranks} {does} differently: {its} data, {its} batch sizes, {its} code."


def confirmed(verdict: Verdict, result: CheckResult) -> Verdict:
    """
    Return `verdict`, and those in its `also`, with what a check says of the machines of stragglers: whether a
    slow part explains them (`Verdict.confirmed`), a sentence in `why`, and what to do. Unchanged if the check
    says nothing of them.
    """
    if not result.levels and not result.slow:
        return verdict
    also = tuple(confirmed(one, result) for one in verdict.also)
    if any(one is not before for one, before in zip(also, verdict.also, strict=True)):
        verdict = msgspec.structs.replace(verdict, also=also)
    if verdict.label not in STRAGGLERS or not verdict.ranks:
        return verdict
    nodes, check = nodes_named(verdict), _CHECKS.get(result.kind, "a check")
    for one in result.slow:
        if _explains(one, verdict.ranks, nodes, verdict.stages, result.ranks):
            why = f"{verdict.why} Confirmed by {check}: {one.why}".lstrip()
            return msgspec.structs.replace(verdict, confirmed=True, why=why, next=one.next)
    if hardware := _other_hardware(result, nodes):
        why = f"{verdict.why} {begun(check)} compares only equal hardware: {hardware}".lstrip()
        return msgspec.structs.replace(verdict, why=why, next=_NEXT_OF_HARDWARE)
    compared = _compared(result, nodes)
    if not compared:
        return verdict
    several = len(nodes) > 1
    fast = f"{text.listed(nodes)} {'are' if several else 'is'} as fast as other nodes"
    probes = "; ".join(limit.about for name, limit in LIMITS.items() if name in compared)
    why = f"{verdict.why} Not confirmed by {check}: {fast} ({probes}).".lstrip()
    advice = _what_the_rank_does(verdict.ranks) if _is_general(verdict, compared) else verdict.next
    return msgspec.structs.replace(verdict, confirmed=False, why=why, next=advice)


def had_straggler(findings: Sequence[Finding], verdicts: Sequence[tuple[int, str]], began_ns: int) -> bool:
    """
    Return whether ranks of an attempt were stragglers until it ended.

    Args:
        findings: the current findings. If ranks have died, they name this, and no straggler.
        verdicts: time (ns) and label of each change of the live verdict, the oldest first.
        began_ns: begin of the attempt. Verdicts before it are on others.
    """
    if any(one.signal == "steps" and one.label in STRAGGLERS for one in findings):
        return True
    judged = (label for t_ns, label in reversed(verdicts) if t_ns >= began_ns)
    return next((label for label in judged if _judges_steps(label)), "") in STRAGGLERS


def _judges_steps(label: str) -> bool:
    return any(name == label and meaning.kind in ("finding", "healthy") for name, meaning in LABELS.items())


def explained(
    one: Slow, steps: Sequence[Finding], ranks: Mapping[str, Sequence[int]] = NOT_KNOWN
) -> Finding | None:
    """
    Return the straggler that a slow part of a node may explain. None: there is no straggler there.

    Args:
        one: the slow part.
        steps: findings on steps.
        ranks: see `CheckResult.ranks`.
    """
    stragglers = (step for step in steps if step.signal == "steps" and step.label in STRAGGLERS)
    return next(
        (step for step in stragglers if _explains(one, step.ranks, step.nodes, step.stages, ranks)), None
    )


def _explains(
    one: Slow,
    late: Sequence[int],
    nodes: Sequence[str],
    stages: Sequence[str],
    ranks: Mapping[str, Sequence[int]],
) -> bool:
    """
    Return whether a slow part of a node may explain that ranks are late: it is theirs, and is used in one of
    the stages in which they are late.
    """
    if stages and not any(_is_used(one, stage) for stage in stages):
        return False
    if one.rank is not None and one.what not in _SHARED:
        return one.rank in late
    for node in set(one.nodes) & set(nodes):
        users = ranks.get(node, ())  # none: they are not known
        if one.device is not None and one.device < len(users):
            users = [users[one.device]]  # a rank uses the GPU of its local rank
        if len(set(users) & set(late)) >= _MOST_OF * len(users):
            return True  # what all ranks of a node use makes most of them late
    return False


def _is_used(one: Slow, stage: str) -> bool:
    """Return whether a slow part of a node can make ranks late in a stage."""
    if one.what == "disk":
        return stage in ("data", "post_sync")  # reads samples, and writes checkpoints
    return one.what != "device" or stage != "data"


def _other_hardware(result: CheckResult, nodes: Sequence[str]) -> str:
    """
    Return in a sentence that a node has other hardware than others, which is slower, or cannot be compared;
    "": it has not. Then a slow node may be as fast as those like it.
    """
    if {node for one in result.slow for node in one.nodes}.intersection(nodes):
        return ""
    has_gpus = any(row.device is not None for row in result.levels if row.node in nodes)
    rows = [row for row in result.levels if row.probe in (_ON_GPU if has_gpus else _ON_CPU) and row.value]
    models = defaultdict[tuple[str, str], Counter[str]](Counter)
    for row in rows:
        models[row.probe, row.node][row.like] += 1
    for row in rows:
        others = [one for one in rows if one.probe == row.probe and one.like != row.like]
        # A node may have several models itself. If others have the same ones, it is no other hardware.
        others = [one for one in others if models[one.probe, one.node] != models[row.probe, row.node]]
        others = [one for one in others if one.node not in nodes]
        if row.node not in nodes or row.state == "unsure" or not others:
            continue
        fastest = max(others, key=lambda one: one.value or 0.0)
        lower = 1 - (row.value or 0.0) / (fastest.value or 1.0)
        theirs = f"{row.node} has {row.like}; {fastest.node} has {fastest.like}"
        if row.probe == "gpu_clock":  # clocks of different models say nothing
            return f"{theirs}."
        if lower >= LIMITS[row.probe].least:
            return f"{theirs}. {row.node} {LIMITS[row.probe].slower.format(text.share(lower))}."
    return ""


def _compared(result: CheckResult, nodes: Sequence[str]) -> set[str]:
    """
    Return the probes that measured all of `nodes` as fast as others. Empty if a part of one is slow, or if it
    is not known how fast they compute.
    """
    if not nodes or {node for one in result.slow for node in one.nodes}.intersection(nodes):
        return set()
    rows = [row for row in result.levels if row.node in nodes]
    unsure = {row.probe for row in rows if row.state != "alike"}
    alike = [{row.probe for row in rows if row.node == node} - unsure for node in nodes]
    compared = set.intersection(*alike)
    has_gpus = any(row.device is not None for row in rows)
    computes = compared & (_ON_GPU if has_gpus else _ON_CPU)
    # A core by itself does not show what a quota withholds from all of them.
    if not has_gpus and any(row.probe == "cpu_matmul" and row.state == "unsure" for row in rows):
        return set()
    return compared if computes and "ready_time" not in unsure else set()


def _is_general(verdict: Verdict, compared: set[str]) -> bool:
    """
    Return whether the advice of a verdict is general, and includes machines that are as fast as others. A
    span or a reason makes it specific; the disk matters for data.
    """
    specific = verdict.span is not None or verdict.reason is not None
    return not specific and ("data" not in verdict.stages or "disk_read" in compared)


def _what_the_rank_does(ranks: Sequence[int]) -> str:
    several = len(ranks) > 1
    return _NEXT.format(
        ranks=text.ranks(ranks), does="do" if several else "does", its="their" if several else "its"
    )
