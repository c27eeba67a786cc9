"""
Judges a check: which node, device, group of cores or disk is slower than its peers.

Peers are measures of the same probe on the same hardware. A subject is slow if its level, the median of its
trials, is below that of its peers by the least difference worth naming, and by more than chance explains
(`peers`). It must be slow in nearly all of its trials: what is slow now and then is disturbed, not slow by
itself. The chance of a wrong name is that of a whole check, however many subjects and probes it has
(Bonferroni).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from traceml_ray import text
from traceml_ray.signals.check.peers import (
    LEAST_TRIALS,
    PeerComparison,
    Trials,
    compare,
    lower_trials,
    persists,
    trials_of,
)
from traceml_ray.signals.check.records import Checked, MachineState, Measure

ALPHA = 0.001
"""Probability that a check of healthy machines names anything."""
_OTHERS = 0.2
"""Mean share of the trials from which on other processes may explain a difference."""
_THROTTLED = 0.02
"""Share of the time of the check that a quota must have withheld to explain a difference, per core."""
_STEAL = 0.05
_CLOCK = 0.05
_SENTENCES = 12
"""Largest number of sentences of a kind."""
_HOT = {"sw_thermal_slowdown", "hw_thermal_slowdown"}
_POWER = {"sw_power_cap", "hw_power_brake_slowdown"}
_HARDWARE = {"hw_slowdown", "board_limit", "reliability"}


class ProbeLimit(NamedTuple):
    """Words and limits of a probe."""

    about: str
    """What the probe measures, in a sentence."""
    short: str
    """The same in a table."""
    slower: str
    """What a slow subject does: "multiplies matrices {} slower"."""
    least: float
    """Least difference worth naming, as a share (0..1) of the peers' level."""
    usual: float
    """Usual spread of healthy peers: standard deviation as a share of their level."""


_MULTIPLIES = "multiplies matrices {} slower"
LIMITS: dict[str, ProbeLimit] = {
    "gpu_matmul": ProbeLimit("matrix multiplication, GPU", "matmul", _MULTIPLIES, 0.07, 0.01),
    "gpu_memory": ProbeLimit("memory of the GPU", "memory", "copies its memory {} slower", 0.07, 0.01),
    "to_device": ProbeLimit(
        "copies to the GPU", "host to GPU", "receives data from the host {} slower", 0.15, 0.025
    ),
    "to_host": ProbeLimit(
        "copies from the GPU", "GPU to host", "sends data to the host {} slower", 0.15, 0.025
    ),
    "cpu_matmul": ProbeLimit("matrix multiplication, all cores", "matmul", _MULTIPLIES, 0.10, 0.015),
    "core_matmul": ProbeLimit("matrix multiplication, cores", "matmul", _MULTIPLIES, 0.10, 0.015),
    "host_memory": ProbeLimit("memory of the host", "copy", "copies memory {} slower", 0.15, 0.025),
    "disk_read": ProbeLimit("reading from disk", "read", "reads {} slower", 0.60, 0.08),
    "all_reduce": ProbeLimit("all-reduce of a pair", "all-reduce", "reduces {} slower", 0.25, 0.04),
    "all_gather": ProbeLimit("all-gather of a pair", "all-gather", "gathers {} slower", 0.25, 0.04),
    "ready_time": ProbeLimit(
        "CPU time that the ranks get",
        "share of wanted CPU",
        "gets {} less of the CPU time that it wants",
        0.10,
        0.02,
    ),
    "unstolen": ProbeLimit(
        "CPU time that the hypervisor leaves",
        "not stolen",
        "gets {} less CPU time from the hypervisor",
        0.10,
        0.02,
    ),
    "idle_matmul": ProbeLimit("matrix multiplication, an idle core", "matmul", _MULTIPLIES, 0.10, 0.03),
    "gpu_clock": ProbeLimit("clock of the GPU in use", "clock", "runs at a {} lower clock", 0.07, 0.015),
}
"""
Limits by probe. The last four measure during training. Files of one healthy disk of a virtual machine
were read at 1.1 and at 2.4 GB/s, each at its own rate for all trials.
"""
OF_JOB = "ready_time", "gpu_clock"
"""
Probes that depend on the job as well: a rank that computes more than others wants more than there is, and
makes its GPU hotter. What is slow in them is named only if the state of the node says why.
"""
_CPU = "cpu_matmul", "core_matmul", "host_memory", "ready_time", "unstolen", "idle_matmul"
_WHOLE_CPU = "cpu_matmul", "unstolen", "idle_matmul"
OTHERS_CORES = 0.1
"""Share of the cores that processes of no rank must have kept busy to explain a difference."""
_BY_JOB = "sw_power_cap"
"""Reason for a lower clock that a heavier load explains as well."""

What = Literal["node", "device", "cores", "disk", "link"]


class Level(msgspec.Struct, kw_only=True):
    """One subject in the table of a check."""

    node: str
    subject: str
    probe: str
    unit: str
    rank: int | None = None
    device: int | None = None
    value: float | None = None
    """Median of the trials, in `unit`. None: too few trials."""
    usual: float | None = None
    """Level of its peers, in `unit`. None: it has no peers."""
    lower: float | None = None
    """Share (0..1) by which it is below its peers; negative: above."""
    spread: float | None = None
    """Spread of its trials, as a share of the median."""
    trials: int = 0
    others: float | None = None
    """Mean share of the trials in which other processes had the cores."""
    peers: int = 0
    """Number of peers, without itself."""
    sees: float | None = None
    """Smallest difference that this check could name here, as a share."""
    state: Literal["slow", "alike", "unsure", "no peers"] = "no peers"
    why: str = ""
    """Why it is not sure; "" if it is."""
    like: str = ""
    """What was measured, such as a model of GPU. Rows of a probe are peers if this is equal."""


class Slow(msgspec.Struct, kw_only=True):
    """A part of a node, or a link, that is slower than its peers."""

    what: What
    nodes: list[str]
    """The node; of a link its two ends."""
    part: str
    """Part of the node: "GPU 3", "CPU", "cores 0-7", "/data", "network"; of a link "link"."""
    rank: int | None = None
    device: int | None = None
    probe: str
    """The probe that shows most."""
    lower: float
    """Share (0..1) by which it is below its peers."""
    value: float
    usual: float
    unit: str
    peers: int
    confidence: Literal["medium", "high"] = "high"
    also: dict[str, float] = {}
    """By how much it is below its peers in other probes, by probe."""
    cause: str = ""
    """What its state says about why, in a sentence; "": nothing."""
    why: str = ""
    next: str = ""

    @property
    def name(self) -> str:
        """Return the part and its node: "GPU 3 of node-1", "the link of node-0 and node-3"."""
        if self.what == "link":
            return f"the link of {text.listed(self.nodes)}"
        return f"{self.part if self.part != 'CPU' else 'the CPU'} of {self.nodes[0]}"


class CheckResult(msgspec.Struct, kw_only=True):
    """What a check says."""

    slow: list[Slow] = []
    """The parts and links that are slower than their peers, the worst first."""
    levels: list[Level] = []
    unsure: list[str] = []
    """Sentences: what could not be decided, and why."""
    notes: list[str] = []
    """Sentences about states that matter, such as a CPU quota."""
    errors: list[str] = []
    """Sentences: what could not be measured."""
    nodes: int = 0
    seconds: float | None = None
    kind: str = ""
    """`Checked.kind` of the checks. "": they are of several kinds."""
    ranks: dict[str, list[int]] = {}
    """Global ranks of each node with a slow part, in the order of their local ranks, if there is a job."""


def judged(checks: Sequence[Checked], alpha: float = ALPHA) -> CheckResult:
    """
    Return what the checks of all nodes say together.

    Args:
        checks: one or more of each node; all of the same time.
        alpha: probability that a check of healthy machines names anything.
    """
    groups = defaultdict[tuple[str, str, str], list[tuple[Checked, Measure]]](list)
    newer = sorted({one.probe for check in checks for one in check.measures if one.probe not in LIMITS})
    for check in checks:
        for measure in check.measures:
            if measure.probe in LIMITS:
                groups[measure.probe, measure.unit, measure.like].append((check, measure))
    tests = sum(len(group) for group in groups.values() if len(group) > 1)
    levels = list[Level]()
    unsure = [f"{text.plain(probe)}: this version does not know the probe" for probe in newer]
    for (probe, _, _), group in groups.items():
        rows, sentences = _levels(probe, group, alpha / max(1, tests))
        levels += rows
        unsure += sentences
    state_of = {check.node: check.state for check in checks}
    kinds = {check.kind for check in checks}
    for row in levels:
        if row.state == "slow" and row.probe in OF_JOB:
            unsure += _without_cause(row, {check.node: check for check in checks}[row.node])
    alone = [row for row in levels if row.state == "no peers"]
    slow = _parts(levels, state_of, {check.node: check for check in checks})
    return CheckResult(
        slow=sorted(slow, key=lambda part: -part.lower),
        levels=in_order(levels),
        unsure=_bounded([*unsure, *_without_peers(alone)]),
        notes=_bounded([*state_notes(checks)]),
        errors=_bounded([_error(check, error, len(checks)) for check in checks for error in check.errors]),
        nodes=len({check.node for check in checks}),
        seconds=max((check.seconds for check in checks if check.seconds is not None), default=None),
        kind=kinds.pop() if len(kinds) == 1 else "",
    )


_ORDER = {"slow": 0, "unsure": 1, "alike": 2, "no peers": 3}


def in_order(levels: Iterable[Level]) -> list[Level]:
    """Return levels, the slow ones first, then those that are lowest."""
    return sorted(levels, key=lambda row: (_ORDER[row.state], -(row.lower or 0.0)))


def _without_peers(rows: Sequence[Level]) -> Iterable[str]:
    """Yield a sentence about the subjects that nothing was compared with."""
    by_node = defaultdict[str, list[str]](list)
    for row in rows:
        by_node[row.node].append(row.subject)
    for node, subjects in by_node.items():
        what = "it" if len({*subjects}) == 1 else "them"
        yield (
            f"{text.listed([*dict.fromkeys(subjects)])} of {node}: nothing like {what} was "
            f"measured elsewhere, so nothing is said about {what}."
        )


def _error(check: Checked, error: str, checks: int) -> str:
    return error if checks == 1 else f"{check.node}: {error}"


def _bounded(sentences: Iterable[str]) -> list[str]:
    """Return the sentences, each once. Of many, the first ones and how many others there are."""
    every = [*dict.fromkeys(sentences)]
    more = len(every) - _SENTENCES
    return every if more <= 0 else [*every[:_SENTENCES], f"{more:,} more of these."]


# -- levels of subjects ---------------------------------------------------------------------------


def logarithm(share: float) -> float:
    """Return a difference, given as a share (0..1) of the peers' level, as the logarithm of a ratio."""
    return -math.log1p(-share)


def _levels(
    probe: str, group: Sequence[tuple[Checked, Measure]], alpha: float
) -> tuple[list[Level], list[str]]:
    """Return the table of the subjects of one probe and hardware, and what could not be decided."""
    limit = LIMITS[probe]
    trials = [trials_of(measure.values, measure.others) for _, measure in group]
    rows = [_row(check, measure, one) for (check, measure), one in zip(group, trials, strict=True)]
    if len(rows) == 1:
        return rows, []
    compared = compare(trials, logarithm(limit.least), limit.usual, alpha)
    if math.isnan(compared.level):
        return _all_unsure(limit, rows, trials)
    known = sum(one.level == one.level for one in trials)
    for index, (row, one) in enumerate(zip(rows, trials, strict=True)):
        _judge(row, one, compared, index, limit)
        row.peers = known - (one.level == one.level)
    sentences = [f"{begun(limit.about)}, {row.subject} of {row.node}: {row.why}" for row in rows if row.why]
    if compared.fast:
        fast = [f"{rows[index].subject} of {rows[index].node}" for index in compared.fast]
        some = text.listed(fast[:3], max(0, len(fast) - 3))
        sentences.append(
            f"{begun(limit.about)}: {some} {'is' if len(fast) == 1 else 'are'} faster than all others. "
            "These are alike, so none of them is named."
        )
    return rows, sentences


def _row(check: Checked, measure: Measure, trials: Trials) -> Level:
    others = measure.others
    known = trials.level == trials.level
    return Level(
        node=check.node,
        subject=measure.subject,
        probe=measure.probe,
        unit=measure.unit,
        rank=check.rank if measure.rank is None else measure.rank,
        device=measure.device,
        value=math.exp(trials.level) if known else None,
        spread=math.expm1(trials.spread) if known else None,
        trials=len(trials.values),
        others=sum(others) / len(others) if others else None,
        like=measure.like,
    )


def _all_unsure(
    limit: ProbeLimit, rows: list[Level], trials: Sequence[Trials]
) -> tuple[list[Level], list[str]]:
    for row in rows:
        row.state = "unsure"
    disturbed = sum(one.disturbed for one in trials)
    spread = max((row.spread for row in rows if row.spread is not None), default=None)
    if disturbed:
        why = f"other processes took more than half of {text.count(disturbed, 'trial')}"
    elif spread is None:
        why = f"fewer than {LEAST_TRIALS} trials were made"
    else:
        why = f"the trials vary too much (by {text.share(spread)})"
    return rows, [f"{begun(limit.about)}: {why}. Check again while nothing else runs."]


def _judge(row: Level, trials: Trials, compared: PeerComparison, index: int, limit: ProbeLimit) -> None:
    """Set what the comparison says of a row."""
    row.usual = math.exp(compared.level)
    if row.value is None:
        row.state = "unsure"
        row.why = (
            f"other processes took more than half of {text.count(trials.disturbed, 'trial')}."
            if trials.disturbed
            else f"only {text.count(row.trials, 'trial')}, {LEAST_TRIALS} are needed."
        )
        return
    least = logarithm(limit.least)
    row.lower = -math.expm1(-float(compared.lower[index]))
    row.sees = -math.expm1(-max(float(compared.needed[index]), least))
    if compared.fast or compared.lower[index] < least:
        row.state = "alike"
        return
    below = f"{text.share(row.lower)} below its peers"
    if not persists(trials, compared.level, least):
        count = lower_trials(trials, compared.level, least)
        row.why = f"{below}, but in only {count} of {row.trials} trials: something else disturbed it."
    elif not compared.beyond[index]:
        row.why = f"{below}, but only a difference of {text.share(row.sees)} or more is beyond chance here."
    elif (row.others or 0) > _OTHERS and row.lower < (row.others or 0):
        row.why = f"{below}, but other processes had its cores {text.share(row.others)} of the time."
    row.state = "unsure" if row.why else "slow"


def begun(words: str) -> str:
    """Return words as the begin of a sentence."""
    return words[:1].upper() + words[1:]


# -- parts of nodes -------------------------------------------------------------------------------


def _parts(
    levels: Sequence[Level], states: Mapping[str, MachineState], checks: Mapping[str, Checked]
) -> list[Slow]:
    """Return the slow parts of nodes. Several probes, or groups of cores, of one part are one."""
    by_node = defaultdict[tuple[str, int | None], list[Level]](list)
    for row in levels:
        by_node[row.node, None if row.probe == "ready_time" else row.rank].append(row)
    parts = list[Slow]()
    for (node, _), rows in by_node.items():
        slow = [row for row in rows if row.state == "slow"]
        by_part = defaultdict[tuple[What, str], list[Level]](list)
        for row in slow:
            by_part[_part(row, rows)].append(row)
        seconds = checks[node].seconds
        parts += [_slow(part, group, states[node], seconds) for part, group in by_part.items()]
    return parts


def _part(row: Level, rows: Sequence[Level]) -> tuple[What, str]:
    """Return the part of the node that a slow row belongs to."""
    alike = [other for other in rows if other.probe == row.probe]
    if row.probe in _CPU:
        whole = [other for other in rows if other.probe in _WHOLE_CPU and other.state == "slow"]
        if row.probe == "ready_time":
            all_slow = all(other.state == "slow" for other in alike)
            return ("node", "CPU") if all_slow else ("cores", row.subject)
        if whole or (len(alike) > 1 and all(other.state == "slow" for other in alike)):
            return "node", "CPU"
        return ("cores", row.subject) if row.probe == "core_matmul" else ("node", row.subject)
    return ("device", row.subject) if row.device is not None else ("disk", row.subject)


def _slow(part: tuple[What, str], rows: Sequence[Level], state: MachineState, seconds: float | None) -> Slow:
    what, name = part
    worst = max(rows, key=lambda row: row.lower or 0.0)
    assert worst.lower is not None and worst.value is not None and worst.usual is not None
    also = dict[str, float]()
    for row in rows:
        if row.probe != worst.probe and row.lower is not None:
            also[row.probe] = max(row.lower, also.get(row.probe, 0.0))
    cause, advice = _cause(what, worst, state, seconds)
    one = Slow(
        what=what, nodes=[worst.node], part=name, rank=_rank(rows), device=worst.device, probe=worst.probe,
        lower=worst.lower, value=worst.value, usual=worst.usual, unit=worst.unit, peers=worst.peers,
        confidence="medium" if worst.peers < 2 and not cause else "high", also=also, cause=cause,
    )  # fmt: skip
    one.why = " ".join(filter(None, [_sentence(one, worst), _further(also), cause]))
    one.next = advice or _NEXT[what]
    return one


def _rank(rows: Sequence[Level]) -> int | None:
    """Return the rank whose part is slow. None: it is not that of one rank."""
    ranks = {row.rank for row in rows}
    return ranks.pop() if len(ranks) == 1 else None


_NEXT: dict[What, str] = {
    "node": "Take the node out of the job, or check it again alone.",
    "device": "Take the GPU out of the job and check it again; `nvidia-smi -q` shows its clocks and errors.",
    "cores": "Look at what else runs on these cores, or keep the job off them.",
    "disk": "Look at who else uses the disk, or read the data from another one.",
    "link": "Check cable, port and errors of the network card of both nodes.",
}


def rate(value: float | None, unit: str) -> str:
    """Return a value of a probe: "612 TFLOP/s", "24.1 GB/s", "60 %", "1,980 MHz"."""
    if value is None:
        return text.NA
    if unit == "share":
        return text.share(value)
    if unit == "Hz":
        return text.unit(value / 1e6, "MHz", 0)
    return text.size(value, "/s") if unit == "B/s" else f"{text.flops(value).removesuffix('s')}/s"


def _sentence(one: Slow, row: Level) -> str:
    slower = LIMITS[one.probe].slower.format(text.share(one.lower))
    peers = "its only peer" if one.peers == 1 else f"its {one.peers:,} peers"
    figures = f"{rate(one.value, one.unit)}, usual {rate(one.usual, one.unit)}, {row.trials} trials"
    only = " With one peer, either of the two may be the unusual one." if one.peers == 1 else ""
    return f"{begun(one.name)} {slower} than {peers} ({figures}).{only}"


def _further(also: Mapping[str, float]) -> str:
    phrases = [f"{LIMITS[probe].about} by {text.share(lower)}" for probe, lower in also.items()]
    return f"Also lower: {text.listed(phrases)}." if phrases else ""


# -- states ---------------------------------------------------------------------------------------


def _cause(what: What, row: Level, state: MachineState, seconds: float | None) -> tuple[str, str]:
    """Return what the state of the node says about why a part is slow, and what to do; "": nothing."""
    if what == "device":
        return _cause_of_device(row.device, state, row.probe)
    if row.probe not in _CPU:
        return "", ""
    if state.quota_cores is not None and _withheld(state, seconds):
        cause = f"The CPU quota of its container allows {text.number(state.quota_cores)} of {_cores(state)}."
        return cause, "Raise the CPU limit of the container."
    if (state.steal or 0) > _STEAL:
        cause = f"The hypervisor gave {text.share(state.steal)} of its CPU time to other machines."
        return cause, "Move the job to a machine that it does not share."
    least = max(OTHERS_CORES, (row.lower or 0) / 2)
    if row.probe == "ready_time" and (state.others_cores or 0) > least * (state.cores or 1):
        cause = f"Processes of no rank kept {text.number(state.others_cores, 1)} of {_cores(state)} busy."
        return cause, "Look at what else runs on the node."
    if row.probe == "ready_time":
        return "", ""
    if state.cpu_mhz and state.cpu_max_mhz and 1 - state.cpu_mhz / state.cpu_max_mhz > _CLOCK:
        clock = f"Its cores ran at {text.number(state.cpu_mhz)} of {text.number(state.cpu_max_mhz)} MHz"
        return f"{clock} (governor: {state.governor or text.NA}).", ""
    return "", ""


def _without_cause(row: Level, check: Checked) -> list[str]:
    """Make a slow row unsure if its node's state does not say why. Return the sentence that says so."""
    what: What = "node" if row.device is None else "device"
    if _cause(what, row, check.state, check.seconds)[0]:
        return []
    job = (
        "its processes may want more than it has"
        if row.device is None
        else "a heavier load explains it as well"
    )
    row.state, row.why = (
        "unsure",
        f"{text.share(row.lower)} below its peers, but nothing on the node says why: {job}.",
    )
    return [f"{begun(LIMITS[row.probe].about)}, {row.subject} of {row.node}: {row.why}"]


def _cause_of_device(device: int | None, state: MachineState, probe: str) -> tuple[str, str]:
    gpu = next((gpu for gpu in state.gpus or () if gpu.index == device), None)
    reasons = set(gpu.throttle or ()) if gpu else set[str]()
    if probe in OF_JOB:
        reasons.discard(_BY_JOB)
    if gpu is None or not reasons & (_HOT | _POWER | _HARDWARE):
        return "", ""
    clock = ""
    if gpu.sm_mhz is not None and gpu.sm_max_mhz is not None:
        clock = f", its clock at {text.number(gpu.sm_mhz)} of {text.number(gpu.sm_max_mhz)} MHz"
    if reasons & _HOT:
        heat = f" at {text.number(gpu.temperature_c)} °C" if gpu.temperature_c is not None else ""
        return f"It was too hot{heat}{clock}.", "Check its cooling; until then take it out of the job."
    if reasons & _HARDWARE:
        return f"Its hardware slowed it down{clock}.", "Take it out of the job, and have it looked at."
    watts = f" of {text.number(gpu.power_limit_w)} W" if gpu.power_limit_w is not None else ""
    return f"Its power limit{watts} held it back{clock}.", "Compare its power limit with that of its peers."


def _withheld(state: MachineState, seconds: float | None) -> bool:
    """Return whether a CPU quota withheld a share of the check that matters."""
    return (state.throttled_ns or 0) > _THROTTLED * 1e9 * (seconds or 0)


def _cores(state: MachineState) -> str:
    return text.count(state.cores, "core") if state.cores else "its cores"


def state_notes(checks: Sequence[Checked]) -> Iterable[str]:
    """Yield sentences about states that are worth knowing, whatever was measured."""
    for check in checks:
        state = check.state
        if state.quota_cores is not None and (state.cores is None or state.quota_cores < state.cores):
            quota = f"{check.node}: a CPU quota allows {text.number(state.quota_cores)} of {_cores(state)}"
            held = ""
            if state.throttled_ns and state.throttled_periods:
                periods = text.count(state.throttled_periods, "period")
                held = f"; it withheld {text.duration(state.throttled_ns / 1e9)} of CPU time in {periods}"
            yield f"{quota}{held}."
        if (state.steal or 0) > _STEAL:
            yield f"{check.node}: the hypervisor gave {text.share(state.steal)} of its CPU to other machines."
        for gpu in state.gpus or ():
            if reasons := sorted(set(gpu.throttle or ()) & (_HOT | _HARDWARE)):
                yield f"{check.node}: GPU {gpu.index} is held back ({text.listed(reasons)})."
