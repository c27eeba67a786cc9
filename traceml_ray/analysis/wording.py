"""The verdict in sentences: why a rank or a stage is named, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from traceml_ray import text
from traceml_ray.analysis.abstention import functions
from traceml_ray.analysis.baseline import Baseline, Drift
from traceml_ray.analysis.busy import idle_ns
from traceml_ray.analysis.evidence import Cause, Evidence, Timing
from traceml_ray.analysis.labels import Label
from traceml_ray.analysis.lasting import PastSteps, doubt
from traceml_ray.analysis.roles import several
from traceml_ray.analysis.rules import Finding
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import Window
from traceml_ray.stages import (
    BACKWARD,
    DATA,
    FLAG_NO_DATA,
    FLAG_NO_FORWARD,
    FORWARD,
    POST_SYNC,
    STAGES,
    SYNC_WAIT,
)

_NAMED = 8
"""Largest number of nodes that are listed; further ones are counted."""
_DEVICE = "the device (clocks, temperature, other processes on it)"
_LOOK = {
    "post_sync": ("the work between two steps: optimizer, logging, checkpoint, evaluation",),
    "data": ("the DataLoader workers", "the node's disk"),
    "prepare": ("host-to-device copies and preprocessing: pinned memory, CPU load",),
    "forward": ("the inputs (longer sequences, larger batches)", _DEVICE),
    "backward": ("recomputation in backward", _DEVICE),
}
_LOOK_HOST = {
    "forward": ("the host's work in that stage (Python code, synchronisation)", "the CPU load of its node"),
    "backward": ("the host's work in that stage (hooks, garbage collection)", "the CPU load of its node"),
}
"""What to look at, by stage, where the device waits for its host."""
_SPANS = {
    "workers": "the DataLoader workers of rank {}, which do not keep up: their number, the time per sample",
    "fetch": "how rank {} reads its samples (`__getitem__`, disk), and whether DataLoader workers can do it",
    "collate": "`collate_fn` of rank {}, and whether DataLoader workers can run it",
}
"""What to look at, by span, where the span in the stage is known."""
_EVEN_OUT = {
    "post_sync": "Look at what ranks do in turn between two steps: logging, checkpoints, garbage collection.",
    "data": "Look at prefetching and the number of DataLoader workers: loading time varies on every rank.",
    "prepare": "Look at preprocessing and copies: their time varies on every rank.",
    "forward": "Even out the work per batch (bucket by length), and look for noise on the nodes.",
    "backward": "Even out the work per batch (bucket by length), and look for noise on the nodes.",
}
_SHARED = {
    "post_sync": "Look at what all ranks do between two steps: optimizer, logging, checkpoint, evaluation.",
    "data": "Look at what all ranks load from: shared storage, the network to it, larger samples.",
    "prepare": "Look at what changed in preprocessing and copies, and at the CPU load of the nodes.",
    "forward": "Look at the work per batch (longer sequences, recompilation) and the devices' clocks.",
    "backward": "Look at the work per batch, recomputation in backward, and the devices' clocks.",
    "sync_wait": "Look at the network between the nodes, and at what else uses it.",
}
_SLOWER = (
    "Look at the machines: what else runs on them, CPU load and quota, the devices' clocks and temperature; "
    "then at the work per step."
)
_LACKING = {
    POST_SYNC: (FLAG_NO_DATA, "data wait", "loading the data"),
    FORWARD: (FLAG_NO_FORWARD, "start of forward", "preparing the batch"),
}
"""
By stage: the flag of a missing mark that merges other time into it, the name of the mark, and that other
time.
"""


def _who(window: Window, places: Sequence[int]) -> str:
    """Return "rank 5 (node-1)", "ranks 4-7 (all of node-1)", …"""
    node = _whole_node(window, places)
    nodes = list(dict.fromkeys(window.nodes[place] for place in places))
    where = (
        f"all of {node}" if node else text.listed(nodes) if len(nodes) <= _NAMED else f"{len(nodes):,} nodes"
    )
    return f"{text.ranks([int(window.ranks[place]) for place in places])} ({where})"


def _whole_node(window: Window, places: Sequence[int]) -> str | None:
    """
    Return the node whose ranks are exactly `places`. There must be two or more, and ranks
    on other nodes.
    """
    node = window.nodes[places[0]]
    of_node = {place for place, other in enumerate(window.nodes) if other == node}
    return node if 1 < len(of_node) < len(window.nodes) and of_node == set(places) else None


def _inferred(window: Window) -> str:
    if not window.inferred:
        return ""
    return f" It is inferred that ranks exchange gradients in {functions(window)}, before the optimizer."


def in_group(group: Window, why: str) -> str:
    """Return `why` with a mention of the group of ranks it is about, if there are several groups."""
    roles = {*group.roles}
    if len(roles) == 1 and None not in roles and several(group):
        return f"In role {roles.pop()} ({text.ranks(group.ranks.tolist())}): {why}"
    return f"In the group of {text.ranks(group.ranks.tolist())}: {why}" if len(group.ranks) else why


def healthy_groups(groups: int) -> str:
    return f"{groups:,} groups of ranks, each judged by itself: no rank delays the others of its group."


def healthy(evidence: Evidence, finding: Finding, limits: Thresholds, past: PastSteps | None) -> str:
    """Explain why no rank is named. `past` has the steps by which chance is measured."""
    window = evidence.window
    if len(window.ranks) == 1:
        share = evidence.frontier.exposed.sum(axis=0) / evidence.total_ns
        stage = int(np.argmax(share))
        alone = "A single rank waits for no other."
        if "rpc" in window.strategies:
            alone = (
                f"Only {_who(window, [0])} takes steps. The other workers serve it over RPC: waiting for "
                "them is part of its stages."
            )
        return (
            f"{alone} `{STAGES[stage]}` takes {text.share(float(share[stage]))} of a step of "
            f"{text.ns(evidence.mean_step_ns)}."
        )
    if finding.causes:
        cause = finding.causes[0]
        late = text.ns((finding.excess or 0) * evidence.mean_step_ns)
        if finding.hidden:
            return (
                f"{_who(window, cause.places)} {_is(cause)} {late} late out of "
                f"`{STAGES[evidence.seen_in(cause)]}`, but that costs nothing: steps in which it is later "
                "end no later. The exchange takes as long without it."
            )
        return (
            f"{_who(window, cause.places)} {_is(cause)} {late} slower than peers in "
            f"`{STAGES[evidence.seen_in(cause)]}` but faster elsewhere: fixing that saves "
            f"{text.share(evidence.gain(cause))} of the step."
        )
    largest = max(float(evidence.persistent.max()), 0.0)
    if largest >= limits.min_excess:
        place, out_of = (
            int(index) for index in np.argwhere(evidence.persistent == evidence.persistent.max())[0]
        )
        why = doubt(evidence, [place], out_of, past, limits) or "more steps will tell"
        return (
            f"No rank is clearly late. {_who(window, [place])} has the largest excess over its peers, "
            f"{text.share(largest)} of the step in `{STAGES[out_of]}`, but it may be chance: {why}."
            + _idle(evidence)
            + _unsplit(evidence)
            + _inferred(window)
        )
    return (
        f"No rank delays the others: the largest lasting excess over peers is {text.share(largest)} "
        f"of the step (the threshold is {text.share(limits.min_excess)})."
        + _idle(evidence)
        + _unsplit(evidence)
        + _inferred(window)
    )


def _idle(evidence: Evidence) -> str:
    """Say that devices wait for their hosts, and for what share of their time."""
    times = idle_ns(evidence.window) if evidence.host_bound else None
    if times is None:
        return ""
    idle, known = times.sum(axis=0).T
    share = idle / np.maximum(known, 1)
    most = int(np.argmax(share))
    return (
        f" Host-bound: GPUs wait for their hosts. The GPU of rank {int(evidence.window.ranks[most])} "
        f"waits most, {text.share(float(share[most]))} of its time."
    )


def saving(
    label: Label,
    ranks: int,
    stages: int,
    alone_pct: float,
    together_pct: float,
    *,
    at_most: bool,
    whole_time: str,
) -> str:
    """
    Return the saving from fixing a finding, in one sentence.

    Args:
        label: label of the finding.
        ranks: number of ranks that it names.
        stages: number of stages in which they are late.
        alone_pct: saving if only the first cause is fixed, in %.
        together_pct: saving if all causes are fixed, in %.
        at_most: whether the saving may be less.
        whole_time: what these are shares of: "the step", "the run".
    """
    cost = f"{text.percent(together_pct)} of {whole_time}"
    if label == "imbalance":
        return f"This waiting takes {cost}."
    if label == "group_wide":
        return f"The slow-down costs {cost}."
    if label == "co_critical" and not at_most:
        first = f"Fixing the first alone saves {text.percent(alone_pct)} of {whole_time}"
        return f"{first}, fixing all together {text.percent(together_pct)}."
    what = ("both" if stages < 3 else "all") if label == "ambiguous" else "it" if ranks == 1 else "them"
    most, less = "at most " * at_most, ", probably much less" * (label == "co_critical")
    return f"Fixing {what} saves {most}{cost}{less}."


def named(evidence: Evidence, finding: Finding, timing: Timing, *, whole_run: bool) -> tuple[str, str]:
    """
    Return (why, next) for a finding with causes: a sentence for each label that a rule gives. `saving` adds
    the sentence about the saving, once the cost of the whole episode is known.
    """
    if finding.label == "imbalance":
        why, advice = _imbalance(evidence, finding)
    elif finding.label == "straggler":
        why, advice = _straggler(evidence, finding, timing, whole_run)
    elif finding.label == "ambiguous":
        why, advice = _two_stages(evidence, finding, timing, whole_run)
    elif finding.label == "co_critical":
        why, advice = _co_critical(evidence, finding)
    else:
        raise NotImplementedError(f"{finding.label}: it has no sentence in `wording.named`")
    notes = "".join(dict.fromkeys(_merged(evidence, cause) for cause in finding.causes))
    return why + notes + _unsplit(evidence) + _inferred(evidence.window), advice


def _straggler(evidence: Evidence, finding: Finding, timing: Timing, whole_run: bool) -> tuple[str, str]:
    window, causes = evidence.window, finding.causes
    cause = causes[0]
    them = "it" if len(cause.places) == 1 else "them"
    stages = text.listed([f"`{STAGES[evidence.seen_in(cause)]}`" for cause in causes])
    late_ns = float(np.median(evidence.series(*causes)[timing.late])) if timing.late.any() else 0.0
    others = len(window.ranks) - len(cause.places)
    why = (
        f"{_who(window, cause.places)} {_is(cause)} {text.ns(late_ns)} late out of {stages} "
        f"{_when(window, timing, whole_run)}; the other {_others(others)} for {them} "
        f"in `{_waiting_place(evidence)}`." + _whose(evidence, cause, late_ns)
    )
    return why, f"Look at {_look(evidence, *causes)}."


def _two_stages(evidence: Evidence, finding: Finding, timing: Timing, whole_run: bool) -> tuple[str, str]:
    window, causes = evidence.window, finding.causes
    first, both = causes[0], "both" if len(causes) == 2 else "all"
    why = (
        f"{_who(window, first.places)} {_is(first)} late out of {'two' if len(causes) == 2 else len(causes)} "
        f"stages {_when(window, timing, whole_run)}: "
        f"{text.listed([_by(evidence, cause) for cause in causes])}. "
        f"One cause may be behind {both}."
    )
    return why, f"Look at {_look(evidence, *causes)}."


def _co_critical(evidence: Evidence, finding: Finding) -> tuple[str, str]:
    window, first = evidence.window, finding.causes[0]
    if finding.hosts:
        why = (
            f"{_who(window, first.places)} {_is(first)} late on the device, out of {_by(evidence, first)}, "
            "but other devices wait for their hosts at the same time."
        )
        return why, f"Look at what the hosts do first, then at {_look(evidence, first)}."
    late = [f"{_who(window, cause.places)} out of {_by(evidence, cause)}" for cause in finding.causes]
    why = f"Late at the same time: {text.listed(late)}."
    if window.waits_inside:
        why += " The ranks also wait inside forward and backward, so fixing each may save more than stated."
    looks: dict[str, list[str]] = {}
    for cause in finding.causes:
        looks.setdefault(_look(evidence, cause), []).append(_who(window, cause.places))
    advice = [f"on {text.listed(who)} look at {look}" for look, who in looks.items()]
    return why, f"Fix them together: {'; '.join(advice)}."


def _imbalance(evidence: Evidence, finding: Finding) -> tuple[str, str]:
    stages = text.listed([f"`{STAGES[cause.stage]}`" for cause in finding.causes])
    late = sorted({place for cause in evidence.beside for place in cause.places})
    who = f"Apart from {_who(evidence.window, late)}, no rank" if late else "No rank"
    why = (
        f"{who} is late more often than the others, but their work in {stages} is unequal: in each step they "
        "wait for the rank with the most work."
    )
    return why, _EVEN_OUT[STAGES[finding.causes[0].stage]]


def group_wide(drift: Drift, evidence: Evidence) -> tuple[str, str]:
    """Return (why, next) for a stage that has drifted from the baseline. Its cost is added by `saving`."""
    baseline, slow, ranks = drift.baseline, len(drift.slow), len(evidence.window.ranks)
    who = (
        ""
        if 2 * slow < ranks
        else f" on {'both' if ranks == 2 else f'all {ranks:,}'} ranks"
        if slow == ranks
        else f" on {slow:,} of {text.count(ranks, 'rank')}"
    )
    since = f" since step {drift.from_step:,}" if drift.timing.began else ""
    old = baseline.step_ns if drift.stage is None else baseline.level_ns[drift.stage]
    takes = "A step takes" if drift.stage is None else f"`{STAGES[drift.stage]}` takes"
    per_step = " a step" * (drift.stage is not None)
    why = (
        f"{takes} {text.ns(old + drift.extra_ns)}{per_step}{who}{since}, {text.ns(drift.extra_ns)} more than "
        f"the {text.ns(old)} of {baseline_is(baseline)}. A comparison between ranks does not show it."
    )
    if drift.stage is None:
        most = np.argsort(drift.stages_ns)[:-4:-1]
        parts = [
            f"`{STAGES[index]}` {text.ns(drift.stages_ns[index])}"
            for index in most
            if drift.stages_ns[index] > 0
        ]
        why += f" No single stage explains it: {text.listed(parts)} more."
    advice = _SLOWER if drift.stage is None else _SHARED[STAGES[drift.stage]]
    return why + _unsplit(evidence) + _inferred(evidence.window), advice


def baseline_is(baseline: Baseline) -> str:
    """Describe the baseline: "the baseline (steps 60-309)", "the baseline (session good)"."""
    where = baseline.source or f"steps {baseline.from_step:,}–{baseline.to_step:,}"
    return f"the baseline ({where})"


def with_span(
    why: str, advice: str, rank: int, stage: str, name: str, ns: float, per: str
) -> tuple[str, str]:
    """Return (why, next) with the span of `stage` that makes `rank` late, instead of the stage as a whole."""
    why += f" In `{name}`, rank {rank} takes {text.ns(ns)} longer {per} than its peers."
    look = _SPANS.get(name, f"`{name}` of rank {{}}").format(rank)
    return why, advice.replace(text.listed(_LOOK[stage]), look, 1)


def _whose(evidence: Evidence, cause: Cause, late_ns: float) -> str:
    """Say whether the host or the device of `cause` is slow, if that is known."""
    hosts, window, stage = evidence.hosts, evidence.window, cause.stage
    if hosts is None:
        return ""
    one = len(cause.places) == 1
    who = text.ranks([int(window.ranks[place]) for place in cause.places])
    if stage == DATA or evidence.hosts_hold(cause):
        what = "DataLoader" if stage == DATA else f"host, in `{STAGES[stage]}`"
        waits, their = ("'s GPU waits", "its") if one else (": GPUs wait", "their")
        return f" Host-bound: {who}{waits} {text.ns(late_ns)} a step for {their} {what}."
    typical = text.ns(float(np.median(window.d[:, list(cause.places), stage])))
    return f" The device is slow there ({typical} a step), not the host."


def _by(evidence: Evidence, cause: Cause) -> str:
    return f"`{STAGES[evidence.seen_in(cause)]}` ({text.ns(float(np.median(evidence.series(cause))))})"


def _is(cause: Cause) -> str:
    return "is" if len(cause.places) == 1 else "are"


def _others(count: int) -> str:
    return "rank waits" if count == 1 else f"{count:,} ranks wait"


def _when(window: Window, timing: Timing, whole_run: bool) -> str:
    """Return "in 96 % of the last 50 steps", "since step 130", "in 2 of the last 10 steps"."""
    steps = len(timing.late)
    span = f"the {steps:,} sampled steps of the whole run" if whole_run else f"the last {steps:,} steps"
    if timing.began is not None and timing.goes_on:
        step, since = int(window.steps[timing.began]), timing.since
        return f"in {text.share(float(since.mean()))} of the {len(since):,} steps since step {step:,}"
    if steps == 1:
        return "in the last step"
    if timing.late.mean() < 0.5:
        return f"in {int(timing.late.sum()):,} of {span}"
    return f"in {text.share(timing.late.mean())} of {span}"


def _look(evidence: Evidence, *causes: Cause) -> str:
    """
    Return what to look at for causes of the same ranks, each point once. What the node's ranks share comes
    first.
    """
    node = _whole_node(evidence.window, causes[0].places)
    looks = [[f"what the ranks of {node} share (network, CPU, memory, cooling)"]] if node else []
    for cause in causes:
        known = [thing for look in looks for thing in look]
        stage = STAGES[evidence.seen_in(cause)]
        host_look = _LOOK_HOST.get(stage) if evidence.hosts_hold(cause) else None
        looks.append([thing for thing in host_look or _LOOK[stage] if thing not in known])
    return ", then at ".join(filter(None, map(text.listed, looks)))


def _waiting_place(evidence: Evidence) -> str:
    unsplit = evidence.window.in_all(evidence.rows.waits[:, BACKWARD])
    return STAGES[BACKWARD if unsplit.mean() > 0.5 else SYNC_WAIT]


def _merged(evidence: Evidence, cause: Cause) -> str:
    """Say what else a stage includes because a mark is missing, on all ranks or on some."""
    stage = evidence.seen_in(cause)
    if stage not in _LACKING or stage != cause.stage:
        return ""
    flag, mark, more = _LACKING[stage]
    window = evidence.window
    lacking = window.in_all(window.flags & flag != 0).mean(axis=0) > 0.5
    if not lacking.any():
        return ""
    where = "" if lacking.all() else f" on {text.ranks(window.ranks[lacking].tolist())}"
    return f" No {mark} was seen{where}, so `{STAGES[stage]}` includes {more}."


def _unsplit(evidence: Evidence) -> str:
    waits = evidence.rows.waits[:, BACKWARD]
    if evidence.window.in_all(~waits).mean() >= 0.5:
        return ""
    where = "here" if _waiting_place(evidence) == STAGES[BACKWARD] else "in some backwards of a step"
    return f" A rank's own backward cannot be separated from waiting {where}, so it is not compared."
