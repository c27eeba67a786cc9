"""
Compares stragglers with a check of their nodes: is the machine slow by itself, or does only the rank take
longer there? Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from traceml_ray import text
from traceml_ray.analysis.labels import LABELS
from traceml_ray.signals.check.judge import LIMITS, CheckResult, Slow
from traceml_ray.signals.finding import Finding, key_of, known

STRAGGLERS = [name for name, label in LABELS.items() if (label.kind, label.names) == ("finding", "ranks")]
"""Labels of verdicts that a check can confirm."""
NOT_CONFIRMED = "node_alike"
"""Label of the finding that a straggler's node is as fast as others."""
NOT_KNOWN: Mapping[str, Sequence[int]] = {}
_MOST_OF = 0.5
_COMPUTES = "gpu_matmul", "cpu_matmul", "core_matmul"
"""Probes of which one must have compared a node before it is called as fast as others."""
_NEXT = "Look at what {ranks} {does}: {its} data, the size of {its} batches, and what {its} code does more."


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
    for step in _stragglers(steps):
        if one.rank in step.ranks or (one.rank is None and _is_there(one, step, ranks)):
            return step
    return None


def _is_there(one: Slow, step: Finding, ranks: Mapping[str, Sequence[int]]) -> bool:
    """Return whether most of the ranks that use a slow part are stragglers."""
    for node in set(one.nodes) & set(step.nodes):
        users = ranks.get(node, ())  # which ranks there are may not be known
        if one.device is not None and one.device < len(users):
            users = [users[one.device]]  # a rank uses the GPU of its local rank
        late = set(users) & set(step.ranks)
        if len(late) >= _MOST_OF * len(users):  # what all ranks of a node use makes most of them late
            return True
    return False


def not_confirmed(result: CheckResult, steps: Sequence[Finding]) -> Iterator[Finding]:
    """Yield a finding for each straggler whose node measured as fast as its peers. See `explained`."""
    slow = {node for one in result.slow for node in one.nodes}
    for step in _stragglers(steps):
        nodes = step.nodes
        if not nodes or slow.intersection(nodes):
            continue
        alike = [
            {row.probe for row in result.levels if row.node == node and row.state == "alike"}
            for node in nodes
        ]
        compared = set.intersection(*alike)
        if not compared.intersection(_COMPUTES):
            continue
        probes = [limit.about for name, limit in LIMITS.items() if name in compared]
        several = len(step.ranks) > 1
        yield Finding(
            key=key_of(NOT_CONFIRMED, step.ranks),
            signal="check",
            label=NOT_CONFIRMED,
            severity="info",
            ranks=step.ranks,
            nodes=nodes,
            why=f"Not confirmed: a check measured {text.listed(nodes)} as fast as other nodes "
            f"({'; '.join(probes)}).",
            next=_NEXT.format(
                ranks=text.ranks(step.ranks),
                does="do" if several else "does",
                its="their" if several else "its",
            ),
            evidence=known({"probes": ", ".join(sorted(compared))}),
            explains=step.key,
        )


def _stragglers(steps: Sequence[Finding]) -> list[Finding]:
    return [step for step in steps if step.signal == "steps" and step.label in STRAGGLERS and step.ranks]
