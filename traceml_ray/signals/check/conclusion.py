"""What a check of several nodes says: each node compared with the others, and pairs of nodes."""

from __future__ import annotations

import msgspec

from traceml_ray.signals.check.coordinator import Outcome
from traceml_ray.signals.check.judge import CheckResult, in_order, judged
from traceml_ray.signals.check.pairs import judge_pairs

_NOTHING = "no node, device or link is slower than its peers"


def lines(result: CheckResult) -> list[str]:
    """Return what a check says, in sentences: what is slow, then what is not sure, notes and errors."""
    sentences = [*(one.why for one in result.slow), *result.unsure, *result.notes, *result.errors]
    return sentences or [_NOTHING]


def concluded(outcome: Outcome) -> CheckResult:
    """Return what the results of all nodes say together."""
    result = judged(outcome.checks)
    slow, levels, unsure = judge_pairs(outcome.names, outcome.rounds)
    in_use = [
        f"{name}: {used}. Only what is not in use was measured, because a check would slow the job down."
        for name, used in outcome.in_use.items()
    ]
    silent = [f"{name} gave no result: {why}." for name, why in outcome.silent.items()]
    return msgspec.structs.replace(
        result,
        slow=sorted([*result.slow, *slow], key=lambda one: -one.lower),
        levels=in_order([*result.levels, *levels]),
        unsure=[*in_use, *result.unsure, *unsure],
        errors=[*silent, *outcome.errors, *result.errors],
        nodes=len({check.node for check in outcome.checks} | outcome.silent.keys()),
    )
