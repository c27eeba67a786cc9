"""The verdict in plain words: why, and what to look at next. Every sentence of it is here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from traceml_ray.analysis.baseline import Baseline
from traceml_ray.analysis.drift import Drift
from traceml_ray.analysis.evidence import Cause, Evidence
from traceml_ray.analysis.finding import Finding
from traceml_ray.analysis.onset import Timing
from traceml_ray.analysis.window import Bool, Int64, Window
from traceml_ray.wire import (
    BACKWARD,
    FLAG_DEVICE_CLOCK,
    FLAG_NO_DATA,
    FLAG_NO_FORWARD,
    FORWARD,
    POST_SYNC,
    SEGMENT_BITS,
    STAGES,
    SYNC_WAIT,
)

_SHOWN = 8

COUPLED = (
    "Collectives run inside forward and backward here, so waiting is not told apart from work "
    "inside forward and backward: exposed time only."
)
UNSAID = (
    "Nothing says where these ranks exchange gradients, so waiting is not told apart from work "
    "inside forward and backward: exposed time only."
)
PIPELINE = "These ranks are stages of a pipeline, and pipeline stages do different work: exposed time only."
TENSOR = (
    "Tensor-parallel collectives run inside forward and backward here, so waiting is not told apart from "
    "work inside forward and backward: exposed time only."
)
HIDDEN = (
    "Ranks take turns in being late, and wait for each other inside forward and backward: whether one is "
    "behind another's lateness or adds to it is not known from their sums. Exposed time only."
)
ON_DEVICE = (
    "Ranks wait for each other in {} on the device, and these waits are not on the clock of the rows: "
    "exposed time only."
)
NO_SYNC = "These ranks do not exchange gradients, so they do not wait for each other: exposed time only."

_LOOK = {
    "post_sync": "what {it} between two steps: optimizer, logging, checkpoint, evaluation",
    "data": "{its} DataLoader workers and the node's disk",
    "prepare": "{its} host-to-device copies and preprocessing: pinned memory, CPU load",
    "forward": "{its} inputs (longer sequences, larger batches), the device's clocks and who else uses it",
    "backward": "the device's clocks and temperature, who else uses it, and recomputation in backward",
}
_EVEN_OUT = {
    "post_sync": "Look at what takes turns between two steps: logging, checkpoints, garbage collection.",
    "data": "Look at prefetching and the number of DataLoader workers: loading is uneven on every rank.",
    "prepare": "Look at preprocessing and copies, which take unevenly long on every rank.",
    "forward": "Even out the work per batch (bucket by length), and look for noise on the nodes.",
    "backward": "Even out the work per batch (bucket by length), and look for noise on the nodes.",
}
_SHARED = {
    "post_sync": "Look at what all ranks do between two steps: optimizer, logging, checkpoint, evaluation.",
    "data": "Look at what all ranks load from: shared storage, the network to it, larger samples.",
    "prepare": "Look at what changed in preprocessing and copies, and at the CPU load of the nodes.",
    "forward": "Look at the work per batch (longer sequences, recompilation) and the devices' clocks.",
    "backward": "Look at the work per batch, recomputation in backward, and the devices' clocks.",
    "sync_wait": "Look at the network between the nodes, and at who else uses it.",
}
_SLOWER = (
    "Look at the machines: what else runs on them, CPU load and quota, the devices' clocks and temperature; "
    "then at the work per step."
)
_LACKING = {
    POST_SYNC: (FLAG_NO_DATA, "data wait", "loading the data"),
    FORWARD: (FLAG_NO_FORWARD, "start of forward", "preparing the batch"),
}
"""The flag of a mark that merges what comes before it into a stage; what that is."""
_PARTS = {
    "workers": "Its DataLoader workers do not keep up: see how many there are, and what one sample takes.",
    "fetch": "Reading its samples takes the time (`__getitem__`): use DataLoader workers, see the disk.",
    "collate": "Putting its batches together takes the time: see `collate_fn`, use DataLoader workers.",
}
_NEXT = {
    "healthy": "Nothing to do.",
    "accounting_only": "Read the exposed time per stage; no rank can be blamed from it.",
    "telemetry_limited": "Look at the Health page: which ranks report, and what was dropped.",
}


def ms(ns: float) -> str:
    """Return nanoseconds as "41 ms", "3.9 ms" or "0.25 ms"."""
    return f"{_number(ns / 1e6)} ms"


def percent(share: float) -> str:
    """Return a share as "28 %" or "6.1 %"."""
    return f"{_number(100 * share)} %"


def _number(value: float) -> str:
    digits = 0 if abs(value) >= 9.95 else 1 if abs(value) >= 0.995 or value == 0 else 2
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _listed(items: Sequence[str]) -> str:
    if len(items) > _SHOWN:
        items = [*items[:_SHOWN], f"{len(items) - _SHOWN} more"]
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def rank_list(numbers: Sequence[int]) -> str:
    """Return "rank 5", "ranks 2 and 3", "ranks 0, 4-7 and 9"."""
    ordered = sorted(numbers)
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    return f"rank{'' if len(ordered) == 1 else 's'} {_listed(parts)}"


def _who(window: Window, places: Sequence[int]) -> str:
    """Return "rank 5 (node-1)", "ranks 4-7 (all of node-1)", …"""
    node = _whole_node(window, places)
    nodes = list(dict.fromkeys(window.nodes[place] for place in places))
    where = f"all of {node}" if node else _listed(nodes) if len(nodes) <= _SHOWN else f"{len(nodes):,} nodes"
    return f"{rank_list([int(window.ranks[place]) for place in places])} ({where})"


def _whole_node(window: Window, places: Sequence[int]) -> str | None:
    """Return the node, one of several, whose ranks (two or more) `places` are, all of them."""
    node = window.nodes[places[0]]
    of_node = {place for place, other in enumerate(window.nodes) if other == node}
    return node if 1 < len(of_node) < len(window.nodes) and of_node == set(places) else None


def missing_ranks(window: Window) -> str:
    gone = max(window.expected - len(window.ranks), 0)
    begin = ": " if len(window.missing) >= gone else ", the first of them "
    which = f"{begin}{rank_list(window.missing)}" if window.missing else ""
    verb = "does" if gone == 1 else "do"
    return f"{gone:,} of {_count(window.expected, 'rank')} {verb} not report{which}. Too few to judge by."


def not_aligned(steps: int, gaps: int) -> str:
    if not steps:
        return "There is no step yet that every rank has reported."
    return f"Only {steps:,} of {_count(steps + gaps, 'step')} came from every rank: the rows do not line up."


def absurd_row(window: Window, key: int, place: int) -> str:
    step = int(window.keys[key]) >> SEGMENT_BITS
    what = _worst(window, key, place)
    return f"{_who(window, [place])} reports an impossible duration in step {step}: {what}."


def _worst(window: Window, key: int, place: int) -> str:
    values = [int(value) for value in window.d[key, place]]
    stage = int(np.argmin(values)) if min(values) < 0 else int(np.argmax(values))
    return f"{values[stage]:,} ns in `{STAGES[stage]}`"


def too_many(steps: int) -> str:
    return f"{steps:,} steps are too many for one window."


def mixed_clocks(window: Window) -> str:
    device = (window.flags & FLAG_DEVICE_CLOCK != 0).mean(axis=0) > 0.5
    on_cpu = [int(rank) for rank in window.ranks[~device]]
    which = f" ({rank_list(on_cpu)} by the CPU's)" if 0 < len(on_cpu) < len(device) else ""
    return (
        f"Some ranks measure by the device's clock and some by the CPU's{which}: "
        "their rows cannot be compared."
    )


def too_short(mean_ns: float, least_ns: int) -> str:
    return f"A step takes {ms(mean_ns)} on average; below {ms(least_ns)} timing is mostly noise."


def too_few(steps: int, needed: int) -> str:
    return f"{_count(steps, 'step')} after warm-up so far; {needed} are needed to judge."


def roles_differ(window: Window, alone: Bool) -> str:
    numbers = [int(rank) for rank in window.ranks[alone]]
    verb = "takes" if len(numbers) == 1 else "take"
    return f"{rank_list(numbers)} {verb} no part in the gradient exchange: roles differ, exposed time only."


def unsynced(window: Window, spread: float, together: Sequence[Int64]) -> str:
    differ = f"The ranks' elapsed times differ by {percent(spread)}"
    if together:
        sets = _listed([rank_list(window.ranks[places].tolist()) for places in together])
        return f"{differ} between {sets}, so these groups do not wait for each other: exposed time only."
    return f"{differ}, so these ranks do not wait for each other: exposed time only."


def no_sync(evidence: Evidence, least: float) -> str:
    """Say that no exchange was seen; waits of more than `least` of the step are no exchange, but there."""
    waits_ns = float(evidence.rows.d[:, :, SYNC_WAIT].mean(axis=1).sum()) / len(evidence.window.starts)
    if waits_ns < least * evidence.mean_step_ns or None not in evidence.window.groups:
        return NO_SYNC
    return (
        f"These ranks wait for each other in collectives, {ms(waits_ns)} a step on average, but none of "
        "these is known to be the exchange of gradients: exposed time only."
    )


def unclear(window: Window) -> str:
    """Say that what was taken for the exchange is none in which all ranks wait for each other."""
    return (
        f"These ranks wait for each other in {_functions(window)}, but they do not leave it together in "
        "every step, so where they wait for whom is not clear: exposed time only."
    )


def _functions(window: Window) -> str:
    return _listed([f"`{name}`" for name in window.inferred])


def _inferred(window: Window) -> str:
    if not window.inferred:
        return ""
    return f" That ranks exchange gradients in {_functions(window)}, before the optimizer, is inferred."


def coupled(window: Window) -> str:
    """Say how else than by one exchange a step the ranks depend on each other."""
    parts = {part for strategy in window.strategies for part in strategy.split("+")}
    if not parts:
        return UNSAID
    if window.inferred and not parts & {"pp", "tp"}:
        return ON_DEVICE.format(_functions(window))
    return PIPELINE if "pp" in parts else TENSOR if "tp" in parts else COUPLED


def in_group(group: Window, why: str) -> str:
    """Say of which of several groups `why` is."""
    return f"In the group of {rank_list(group.ranks.tolist())}: {why}" if len(group.ranks) else why


def healthy_groups(groups: int) -> str:
    return f"{groups:,} groups of ranks, each judged by itself: no rank holds the others of its group up."


def replay_misses(off: float) -> str:
    side = "more" if off > 0 else "less"
    return (
        f"Replaying the steps with one common exchange gives {percent(abs(off))} {side} time than "
        "was measured: these ranks are coupled in another way. Exposed time only."
    )


def next_for(label: str) -> str:
    """Return the next step where nobody is named."""
    return _NEXT[label]


def healthy(evidence: Evidence, finding: Finding, limit: float) -> str:
    """Say why nobody is to blame."""
    window = evidence.window
    if len(window.ranks) == 1:
        share = evidence.frontier.exposed.sum(axis=0) / evidence.total_ns
        stage = int(np.argmax(share))
        return (
            f"One rank alone has nobody to wait for. Of {ms(evidence.mean_step_ns)} a step, "
            f"`{STAGES[stage]}` takes {percent(float(share[stage]))}."
        )
    if finding.causes:
        cause = finding.causes[0]
        late = ms((finding.excess or 0) * evidence.mean_step_ns)
        return (
            f"{_who(window, cause.places)} {_is(cause)} {late} slower than peers in "
            f"`{STAGES[evidence.seen_in(cause)]}` but faster elsewhere: mending that saves "
            f"{percent(evidence.gain(cause))} of the step."
        )
    largest = max(float(evidence.persistent.max()), 0.0)
    return (
        f"No rank holds the others up: the largest lasting excess over peers is {percent(largest)} "
        f"of the step ({percent(limit)} counts)." + _unsplit(evidence) + _inferred(window)
    )


def named(evidence: Evidence, finding: Finding, timing: Timing, *, whole_run: bool) -> tuple[str, str]:
    """Return (why, next) for a finding that names a stage."""
    if finding.rotating:
        why, advice = _rotating(finding)
    elif len(finding.causes) == 1:
        why, advice = _straggler(evidence, finding.causes[0], timing, whole_run)
    elif finding.label == "ambiguous":
        why, advice = _two_stages(evidence, finding, timing, whole_run)
    else:
        why, advice = _co_critical(evidence, finding)
    notes = "".join(dict.fromkeys(_merged(evidence, cause) for cause in finding.causes))
    return why + notes + _unsplit(evidence) + _inferred(evidence.window), advice


def _straggler(evidence: Evidence, cause: Cause, timing: Timing, whole_run: bool) -> tuple[str, str]:
    window, them = evidence.window, "it" if len(cause.places) == 1 else "them"
    stage = STAGES[evidence.seen_in(cause)]
    late_ns = float(np.median(evidence.series(cause)[timing.late])) if timing.late.any() else 0.0
    others = len(window.ranks) - len(cause.places)
    why = (
        f"{_who(window, cause.places)} {_is(cause)} {ms(late_ns)} late out of `{stage}` "
        f"{_when(window, timing, whole_run)}; the other {_others(others)} for {them} "
        f"in `{_waiting_place(evidence)}`. Mending {them} saves {percent(evidence.gain(cause))} of the step."
    )
    return why, f"Look at {_look(evidence, cause)}."


def _two_stages(evidence: Evidence, finding: Finding, timing: Timing, whole_run: bool) -> tuple[str, str]:
    window, (first, second) = evidence.window, finding.causes
    why = (
        f"{_who(window, first.places)} {_is(first)} late out of two stages "
        f"{_when(window, timing, whole_run)}: {_by(evidence, first)} and {_by(evidence, second)}. "
        "One cause may well be behind both. Mending both saves "
        f"{percent(evidence.gain(first, second))} of the step."
    )
    return why, f"Look at {_look(evidence, first)}; then at {_look(evidence, second)}."


def _co_critical(evidence: Evidence, finding: Finding) -> tuple[str, str]:
    window, first = evidence.window, finding.causes[0]
    late = [f"{_who(window, cause.places)} out of {_by(evidence, cause)}" for cause in finding.causes]
    alone, together = evidence.gain(first), evidence.gain(*finding.causes)
    why = (
        f"Late at the same time: {_listed(late)}. Mending the first alone saves {percent(alone)} "
        f"of the step, all of it together {percent(together)}."
    )
    if window.waits_inside:
        why += " The ranks wait inside forward and backward as well, so each may save more."
    looks = [f"{_who(window, cause.places)} look at {_look(evidence, cause)}" for cause in finding.causes]
    return why, f"Mend them together: on {'; on '.join(looks)}."


def _rotating(finding: Finding) -> tuple[str, str]:
    stage = STAGES[finding.causes[0].stage]
    why = (
        f"A different rank is late out of `{stage}` from step to step; together that holds the others up for "
        f"{percent(finding.excess or 0)} of the step. No single rank is to blame."
    )
    return why, _EVEN_OUT[stage]


def group_wide(drift: Drift, evidence: Evidence) -> tuple[str, str]:
    """Return (why, next) for a stage that has drifted from the baseline."""
    baseline, slow, ranks = drift.baseline, len(drift.slow), len(evidence.window.ranks)
    who = (
        ""
        if 2 * slow < ranks
        else f" on {'both' if ranks == 2 else f'all {ranks:,}'} ranks"
        if slow == ranks
        else f" on {slow:,} of {_count(ranks, 'rank')}"
    )
    since = f" since step {drift.from_step}" if drift.timing.began else ""
    old = baseline.step_ns if drift.stage is None else baseline.level_ns[drift.stage]
    takes = "A step takes" if drift.stage is None else f"`{STAGES[drift.stage]}` takes"
    each = " a step" * (drift.stage is not None)
    why = (
        f"{takes} {ms(old + drift.extra_ns)}{each}{who}{since}, {ms(drift.extra_ns)} more than "
        f"the {ms(old)} of {baseline_is(baseline)}: {percent(drift.share)} of the step. Comparing ranks with "
        "each other does not show it."
    )
    if drift.stage is None:
        most = np.argsort(drift.stages_ns)[:-4:-1]
        parts = [f"`{STAGES[at]}` {ms(drift.stages_ns[at])}" for at in most if drift.stages_ns[at] > 0]
        why += f" No stage carries it alone: {_listed(parts)} more."
    advice = _SLOWER if drift.stage is None else _SHARED[STAGES[drift.stage]]
    return why + _unsplit(evidence) + _inferred(evidence.window), advice


def baseline_is(baseline: Baseline) -> str:
    """Say what the baseline is: "the baseline (steps 60-309)", "the baseline (session good)"."""
    where = baseline.source or f"steps {baseline.from_step}-{baseline.to_step}"
    return f"the baseline ({where})"


def over_the_run(label: str, rank: int | None, stage: str, share: float, cost: float, strongest: str) -> str:
    """Say how much of the run something takes; `strongest` is what was said where it was largest."""
    what = f"`{stage}`" if stage else "the whole step"
    who = f"{what} is slower than the baseline" if label == "group_wide" else f"{_late(rank)} out of {what}"
    return (
        f"In {percent(share)} of the run {who}: {percent(cost)} of its time. Where it was worst: {strongest}"
    )


def _late(rank: int | None) -> str:
    return "ranks are late in turn" if rank is None else f"rank {rank} is late"


def passing(strongest: str) -> str:
    """Say that what the whole run shows was over too soon to name anybody."""
    return f"Nobody is late for long. Once: {strongest}"


def was_named(times: int, cost_s: float) -> str:
    """Say that somebody was named in a run that is healthy on the whole."""
    often = "once" if times == 1 else f"{times:,} times"
    return f"somebody was named {often}, which cost {seconds(cost_s)} in all"


def pending(found: Sequence[tuple[int | None, str, bool, float]]) -> str:
    """Say what is not named as yet: of each the rank, the stage ("": all), whether it rotates, seconds."""
    told = []
    for rank, stage, rotating, lasted_s in found[:2]:
        slower = "slower" if stage else "whole step slower"
        who = f"rank {rank} late" if rank is not None else "ranks late in turn" if rotating else slower
        told.append(f"{who}{f' in `{stage}`' if stage else ''} for {seconds(lasted_s)}")
    return "; ".join(told)


def not_now(silent_s: float) -> str:
    """Say that what is named is not seen just now."""
    return f"not seen for {seconds(silent_s)}"


def too_brief(hold_s: float) -> str:
    """Say why nobody is named although something was found."""
    return f"What is late or slower now has not been so for {seconds(hold_s)}, or costs next to nothing."


def too_early(label: str, hold_s: float) -> str:
    """Say why nothing is said of a run that begins with somebody late, or slower than a baseline."""
    what = "The first steps are slow" if label == "group_wide" else "Somebody is late in the first steps"
    return f"{what}; whether that lasts is known after {seconds(hold_s)}."


def so_far(lasted_s: float, cost_s: float) -> str:
    """Say what an episode that goes on has cost."""
    return f"for {seconds(lasted_s)}, of which it cost {seconds(cost_s)}"


def of_run(cost_s: float, elapsed_s: float) -> str:
    """Say what all that was named has cost: "cost 41 s of 16 min so far"."""
    return f"cost {seconds(cost_s)} of {seconds(elapsed_s)} so far"


def seconds(value: float) -> str:
    """Return "0.4 s", "41 s", "16 min" or "3.2 h"."""
    for name, of in (("s", 120.0), ("min", 120.0)):
        if value < of:
            return f"{_number(value)} {name}"
        value /= 60
    return f"{_number(value)} h"


def part(rank: int, name: str, ns: float) -> tuple[str, str]:
    """Return what to add to (why, next) for the part of the stage that makes `rank` late."""
    why = f" Of what rank {rank} is late, {ms(ns)} a step are in `{name}`."
    return why, _PARTS.get(name, f"Look at `{name}` of rank {rank} first.") + " "


def _by(evidence: Evidence, cause: Cause) -> str:
    return f"`{STAGES[evidence.seen_in(cause)]}` ({ms(float(np.median(evidence.series(cause))))})"


def _is(cause: Cause) -> str:
    return "is" if len(cause.places) == 1 else "are"


def _others(count: int) -> str:
    return "rank waits" if count == 1 else f"{count:,} ranks wait"


def _when(window: Window, timing: Timing, whole_run: bool) -> str:
    """Return "in 96 % of the last 50 steps", "since step 130", "in 2 of the last 10 steps"."""
    steps = len(timing.late)
    span = f"the {steps:,} steps looked at over the whole run" if whole_run else f"the last {steps:,} steps"
    if timing.began is not None and timing.goes_on:
        step, since = int(window.steps[timing.began]), timing.since
        return f"in {percent(float(since.mean()))} of the {len(since):,} steps since step {step}"
    if steps == 1:
        return "in the last step"
    if timing.late.mean() < 0.5:
        return f"in {int(timing.late.sum()):,} of {span}"
    return f"in {percent(timing.late.mean())} of {span}"


def _look(evidence: Evidence, cause: Cause) -> str:
    """Return what to look at; a node that is slow as a whole comes first."""
    one = len(cause.places) == 1
    look = _LOOK[STAGES[evidence.seen_in(cause)]].format(
        its="its" if one else "their", it="it does" if one else "they do"
    )
    node = _whole_node(evidence.window, cause.places)
    return f"what the ranks of {node} share (disk, network, CPU, cooling), then at {look}" if node else look


def _waiting_place(evidence: Evidence) -> str:
    return STAGES[BACKWARD if evidence.rows.waits[:, BACKWARD].mean() > 0.5 else SYNC_WAIT]


def _merged(evidence: Evidence, cause: Cause) -> str:
    """Say what else a stage holds because a mark was not seen, on all ranks or on some."""
    stage = evidence.seen_in(cause)
    if stage not in _LACKING or stage != cause.stage:
        return ""
    flag, mark, more = _LACKING[stage]
    window = evidence.window
    lacking = (window.flags & flag != 0).mean(axis=0) > 0.5
    if not lacking.any():
        return ""
    some = "" if lacking.all() else f" on {rank_list(window.ranks[lacking].tolist())}"
    return f" No {mark} was seen{some}, so `{STAGES[stage]}` includes {more}."


def _unsplit(evidence: Evidence) -> str:
    if _waiting_place(evidence) != STAGES[BACKWARD]:
        return ""
    return " A rank's own backward is not told apart from waiting here, so nobody is judged by it."
