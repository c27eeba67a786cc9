"""Judges a check that was made during training: what can be compared, and what was not measured. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

import msgspec

from traceml_ray import text
from traceml_ray.signals.check.judge import (
    LIMITS,
    OTHERS_CORES,
    CheckResult,
    in_order,
    judged,
    state_notes,
)
from traceml_ray.signals.check.records import DURING, Checked, MachineState

_ALIKE = 0.95
"""Part of the peers' quota from which on a quota is no smaller."""
_SEES = 0.25
"""A node is as fast as others only if a difference of this size would have been seen, as a share (0..1)."""
_TOGETHER_NS = 10_000_000_000
"""Checks of one moment begin within this time, in ns: clocks of nodes may differ."""


def newest_set(checks: Sequence[Checked]) -> list[Checked]:
    """Return the checks of the newest moment that were made during training."""
    made = [check for check in checks if check.kind == DURING]
    if not made:
        return []
    newest = max(made, key=lambda check: check.t_ns)
    return [
        check for check in made if newest.t_ns - check.t_ns <= _TOGETHER_NS and check.about == newest.about
    ]


def judged_during(checks: Sequence[Checked], node: str | None) -> CheckResult:
    """
    Return what checks of one moment say.

    Args:
        checks: one of each node.
        node: the straggler's node. None: not known.
    """
    if not checks:
        return CheckResult()
    ordered = sorted(checks, key=lambda check: (check.node != node, check.node))
    machines = dict[str, Checked]()
    for check in ordered:  # nodes of one machine would measure each other
        machines.setdefault(check.host or check.node, check)
    compared = [*machines.values()]
    result = judged([msgspec.structs.replace(one, state=_own_causes(one, compared)) for one in compared])
    result.notes = [*state_notes(compared), *_not_measured(ordered)]
    for row in result.levels:
        if row.state == "alike" and (row.sees is None or row.sees > _SEES):
            row.state = "unsure"
            row.why = f"only a difference of {text.share(row.sees)} or more is beyond chance here."
            about = LIMITS[row.probe].about
            result.unsure.append(f"{about[:1].upper()}{about[1:]}, {row.subject} of {row.node}: {row.why}")
    if len(machines) == 1:
        for row in result.levels:
            row.state = row.state if row.state == "slow" else "no peers"
        result.unsure = [f"There is no other machine that {ordered[0].node} can be compared with."]
    result.levels = in_order(result.levels)
    return result


def _own_causes(check: Checked, compared: Sequence[Checked]) -> MachineState:
    """
    Return the state of a node without what its peers have as well: that is no reason for a difference, but a
    rank that does more meets it sooner.
    """
    state, peers = check.state, [one.state for one in compared if one is not check]
    if not peers:
        return state
    if _quota(state) >= _ALIKE * median(map(_quota, peers)):
        state = msgspec.structs.replace(state, throttled_ns=None, throttled_periods=None)
    if _of_others(state) - median(map(_of_others, peers)) < OTHERS_CORES:
        state = msgspec.structs.replace(state, others_cores=None)
    return state


def _quota(state: MachineState) -> float:
    """Return the number of cores that a node's ranks may use at most."""
    return min(state.quota_cores or math.inf, state.cores or math.inf)


def _of_others(state: MachineState) -> float:
    """Return the share of the cores that processes of no rank kept busy."""
    return (state.others_cores or 0.0) / (state.cores or 1)


def _not_measured(checks: Sequence[Checked]) -> Iterator[str]:
    """Yield sentences about what was not measured because a job runs."""
    if any(measure.probe == "gpu_clock" for check in checks for measure in check.measures):
        yield "The GPUs are in use: only their clocks and reasons for throttling were compared."
    yield "Memory, disk and network were not measured, because the job uses them."


def together(full: CheckResult, during: CheckResult) -> CheckResult:
    """Return what a check before training and one during training say together. Either may be empty."""
    if not during.levels and not during.errors:
        return full
    if not full.levels and not full.errors:
        return during
    known = {(tuple(one.nodes), one.part) for one in during.slow}
    slow = [*during.slow, *(one for one in full.slow if (tuple(one.nodes), one.part) not in known)]
    return msgspec.structs.replace(
        full,
        kind="",
        slow=sorted(slow, key=lambda one: -one.lower),
        levels=in_order([*full.levels, *during.levels]),
        unsure=[*full.unsure, *during.unsure],
        notes=[*dict.fromkeys([*full.notes, *during.notes])],
        errors=[*full.errors, *during.errors],
        nodes=max(full.nodes, during.nodes),
    )
