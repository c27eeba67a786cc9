"""
The rules of the verdict, in order. The first rule that applies gives the finding. All rules are our own.
Their numbers are only in `docs/method.md`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from traceml_ray.analysis import abstention
from traceml_ray.analysis.baseline import Baseline, Drift, drift
from traceml_ray.analysis.chance import correlation_steps
from traceml_ray.analysis.evidence import Cause, Evidence, absurd, gather, late_steps, mixed, onset
from traceml_ray.analysis.hosts import held, host_bound
from traceml_ray.analysis.labels import LABELS, Label, Pattern
from traceml_ray.analysis.lasting import Late, PastSteps, late_ranks, with_second_stage
from traceml_ray.analysis.roles import several, waited_apart_ns
from traceml_ray.analysis.thresholds import HOSTS, Thresholds
from traceml_ray.analysis.window import Float, Int64, Window
from traceml_ray.stages import (
    BACKWARD,
    FLAG_DEVICE_CLOCK,
    FLAG_INSEPARABLE,
    FLAG_NO_BACKWARD,
    FLAG_NO_PEERS,
    SYNC_WAIT,
)


@dataclass(frozen=True)
class Finding:
    """
    The rule that applied: a label, and either a `reason` to abstain or the `causes`, the best first.

    `excess` is the excess of the worst rank of the first cause (`rotating`: of all ranks together), as a
    share of the mean step. `cost` is the saving if all causes are fixed, as a share of the time; `at_most`:
    it may be less. `z` is the number of standard errors by which the worst rank is late more often than by
    chance, over `steps` steps. `new`: only the newest steps show it. `hosts`: late at the same time as the
    hosts of the other ranks. `hidden`: steps end no later because of it. `sure` is False if the choice of
    this rank may be chance. `group_wide` has only `drift`.
    """

    label: Label
    reason: str = ""
    causes: tuple[Cause, ...] = ()
    excess: float | None = None
    pattern: Pattern = "lasting"
    cost: float | None = None
    z: float | None = None
    steps: int | None = None
    hidden: bool = False
    at_most: bool = False
    sure: bool = True
    new: bool = False
    hosts: bool = False
    drift: Drift | None = None


_IMPROBABLE = 3e-5
"""Probability, per healthy window, that chance makes it always the same rank; as for `chance.Z_LEAST`."""
_HIDDEN = 0.7
"""A rank's lateness is hidden if a step gets longer by less than this share of it."""
_SURE = 0.5
"""
If a step may get longer by less than this share of the lateness, what fixing the rank saves is
"at most".
"""
_ERRORS = 2.0
_ERRORS_HIDDEN = 3.0
"""Number of standard errors of a slope that is required to say that a late rank costs nothing."""
_LEAST_STEPS = 15
_STAYS = 2.0
"""Work that stays alike for fewer steps than this is treated as drawn anew in each step."""
_PART = 0.25


def now_and_then(evidence: Evidence, cause: Cause, thresholds: Thresholds, past: PastSteps | None) -> bool:
    """Whether the rank of `cause` is the last one of the stage in more of its late steps than by chance."""
    lateness = evidence.by_step[:, :, cause.stage].astype(np.float64)
    if past is not None:
        lateness, stay = past.lateness(cause.stage).astype(np.float64), past.stay(cause.stage)
    elif len(lateness) < thresholds.first_window_steps:
        return True
    else:
        stay = correlation_steps(lateness)
    late = late_steps(lateness.max(axis=1))
    last = lateness[late].argmax(axis=1)
    pieces = stay if stay >= _STAYS else 1.0
    times, its_own = (
        math.ceil(count / pieces) for count in (len(last), int((last == cause.places[0]).sum()))
    )
    ranks = lateness.shape[1]
    return bool(ranks * _at_least(its_own, times, 1 / ranks) <= _IMPROBABLE)


def _at_least(successes: int, trials: int, chance: float) -> float:
    """
    Return the probability (0..1) of at least `successes` successes in `trials`, each with probability
    `chance` < 1.
    """
    if successes <= trials * chance:
        return 1.0
    log_chance, log_other = math.log(chance), math.log1p(-chance)
    return sum(
        math.exp(
            math.lgamma(trials + 1) - math.lgamma(count + 1) - math.lgamma(trials - count + 1)
            + count * log_chance + (trials - count) * log_other
        )
        for count in range(successes, trials + 1)
    )  # fmt: skip


def is_hidden(evidence: Evidence, causes: tuple[Cause, ...]) -> bool | None:
    """
    Whether steps in which the ranks of `causes` are later end no later; None: not known.

    An exchange that overlaps with backward may take so long that a late rank arrives before its end. Rows do
    not show this. But if lateness varies, the elapsed time either follows it or does not. The test is the
    slope of one over the other, in the steps in which these ranks are last.
    """
    window = evidence.window
    if any(cause.stage != BACKWARD for cause in causes):  # before backward nothing is exchanged
        return False
    if window.waits_inside or evidence.hosts is not None or window.arrived is not None:
        return False
    local = window.by_step(evidence.local_ns)
    mine = np.isin(np.arange(local.shape[1]), causes[0].places)
    last = local[:, mine].max(axis=1) > local[:, ~mine].max(axis=1)
    others = np.median(local[last][:, ~mine], axis=1)
    late, took = local[last][:, mine].max(axis=1) - others, evidence.step_ns[last] - others
    if len(late) < _LEAST_STEPS or late.std() <= 0:
        return False
    x, y = late - late.mean(), took - took.mean()
    slope = float(x @ y / (x @ x))
    error = math.sqrt(float(np.sum((y - slope * x) ** 2)) / (len(x) - 2) / float(x @ x))
    if slope + _ERRORS_HIDDEN * error < _HIDDEN:
        return True
    return None if slope - _ERRORS * error < _SURE else False


def largest_share(evidence: Evidence, named: list[Cause]) -> float:
    """
    Return the largest share (0..1) that one rank causes of the waiting for unequal work, besides what is
    `named`.
    """
    local = evidence.window.by_step(evidence.fixed_ns(tuple(named)))
    longest = local.max(axis=1) - local.mean(axis=1)
    by_rank = np.bincount(local.argmax(axis=1), weights=longest, minlength=local.shape[1])
    return float(by_rank.max() / max(by_rank.sum(), 1.0))


def uneven_stages(evidence: Evidence) -> list[int]:
    """Return the stages in which ranks have unequal work from step to step, the most uneven first."""
    local = np.where(evidence.rows.waits[:, None], 0, evidence.rows.d)[:, :, :SYNC_WAIT]
    by_step = evidence.window.by_step(local)
    apart: Float = by_step - by_step.mean(axis=1, keepdims=True)
    apart -= apart.mean(axis=0)  # what a rank is always late by is no unequal work
    total = apart.sum(axis=2)
    # What a stage adds to the spread of the sums.
    parts = np.mean(apart * total[:, :, None], axis=(0, 1))
    order = [int(stage) for stage in np.argsort(-parts) if parts[stage] >= _PART * parts.sum() > 0]
    return order or [int(np.argmax(parts))]


_TOO_LONG = 1 << 62
_AGREE = 0.1
_LEAST_SET = 2
_BLOCK = 5
_MEDIAN_ERROR = 1.2533 * 1.4826
"""Standard error of the median of n values times √n, relative to their MAD, under normal noise."""


def find(
    window: Window,
    thresholds: Thresholds,
    baseline: Baseline | None = None,
    past: PastSteps | None = None,
) -> tuple[tuple[Finding, ...], Evidence | None]:
    """
    Return the findings in `window`, the costliest first, and the evidence if the rows allow any. If nothing
    was found or can be judged, the only finding says so.

    `past` has more steps than the window, by which chance is measured. Never raises, whatever the rows
    contain.
    """
    steps, ranks = len(window.keys), len(window.ranks)
    clean = absurd(window, thresholds) is None and steps * thresholds.max_step_ns < _TOO_LONG
    on_device = (window.flags & FLAG_DEVICE_CLOCK != 0).all(axis=1)
    if steps and not on_device.all() and 2 * np.count_nonzero(on_device) >= steps:
        window = window.select(on_device)  # of the others only the hosts' times are known
    clocks = mixed(window, FLAG_DEVICE_CLOCK)
    if clocks.any() and 1.0 - float(clocks.mean()) >= thresholds.coverage_limited:
        window = window.select(~clocks)
    evidence = gather(window) if clean and window.d.any() else None
    limit = _limit(window, evidence, thresholds, clean)
    if limit:
        return (Finding("telemetry_limited", limit),), evidence
    assert evidence is not None
    if ranks == 1:
        return (Finding("healthy"),), evidence
    apart = _apart(evidence, thresholds)
    if apart:
        return (Finding("accounting_only", apart),), evidence
    past = None if past is None else past.then(evidence)
    findings = _compared(evidence, thresholds, past)
    if window.host is not None:
        findings = _all_against_hosts(findings, evidence, thresholds)
    if not any(_names_for_good(finding) for finding in findings):
        new = _newly(evidence, thresholds, past)
        if new is not None:
            return (new[0],), new[1]
    late = [finding for finding in findings if LABELS[finding.label].names == "ranks" and finding.sure]
    evidence = replace(evidence, beside=tuple(cause for finding in late for cause in finding.causes))
    # Neither an imbalance nor a rank that is late without a cost (`_lasting`) may hide a drift.
    meaning = LABELS[findings[0].label]
    if baseline and meaning.names == "none" and meaning.kind != "abstention":
        drifted = drift(evidence, baseline, thresholds)
        if drifted:
            others = (finding for finding in findings if LABELS[finding.label].kind == "finding")
            return (Finding("group_wide", drift=drifted), *others), evidence
    return findings, evidence


def _compared(evidence: Evidence, thresholds: Thresholds, past: PastSteps | None) -> tuple[Finding, ...]:
    """
    Compare the ranks with each other: whether one is late always or now and then, and what unequal work costs
    besides.
    """
    lasting = _lasting(evidence, thresholds, past)
    if lasting and lasting[0].label == "accounting_only":
        return lasting
    named, unsure = [finding for finding in lasting if finding.label != "healthy"], list[Finding]()
    causes = [cause for finding in lasting for cause in finding.causes]
    now_and_then = _transient(evidence, thresholds, past, causes)
    if now_and_then is not None:
        (named if now_and_then.sure else unsure).append(now_and_then)
    uneven = _uneven(evidence, thresholds, [cause for finding in named for cause in finding.causes])
    if uneven is not None:
        named.append(uneven)
    named.sort(key=lambda finding: -(finding.cost or 0.0))
    return (*(named or lasting or (Finding("healthy"),)), *unsure)


def _all_against_hosts(
    findings: tuple[Finding, ...], evidence: Evidence, thresholds: Thresholds
) -> tuple[Finding, ...]:
    """Return the findings that hosts do not explain. If there are none, return an abstention."""
    against = [_against_hosts(finding, evidence, thresholds) for finding in findings]
    left = [finding for finding in against if LABELS[finding.label].kind == "finding"]
    sure = [finding for finding in left if finding.sure] or against[:1]
    return (*sure, *(finding for finding in left if not finding.sure and finding not in sure))


def _names_for_good(finding: Finding) -> bool:
    """Whether a finding names ranks that are late in most steps."""
    return LABELS[finding.label].names == "ranks" and finding.pattern == "lasting"


def _against_hosts(finding: Finding, evidence: Evidence, thresholds: Thresholds) -> Finding:
    """
    Return the finding after a test against the hosts. Rows of a device whose host is late include the host's
    time. Hosts do not wait for each other: one is always last, also by chance. What only the devices' rows
    show therefore names no rank.
    """
    hosts, peers = evidence.hosts, evidence.peers
    if hosts is None or peers is None:
        return finding if finding.label == "healthy" else Finding("accounting_only", abstention.LEADS_UNKNOWN)
    if (
        finding.label == "healthy"
        and finding.causes
        and evidence.gain(*finding.causes) >= thresholds.min_drift
    ):
        # While others wait for it, their kernels share the device with the exchange: that hides a part.
        finding = replace(finding, label="straggler")
    if finding.label == "healthy":
        without = _compared(peers, thresholds, None)[0]
        if LABELS[without.label].kind != "finding":
            return finding
        unsure = [cause.stage for cause in without.causes if not hosts.certain[cause.stage]]
        hidden = held(*evidence.host_steps, hosts)
        unsure += [] if hidden is None else [hidden]
        return Finding("accounting_only", abstention.hosts_last(unsure[0])) if unsure else finding
    if not finding.causes or finding.label == "imbalance":
        return finding
    cause = finding.causes[0]
    chance = _by_chance(finding, evidence, thresholds)
    if chance:
        return Finding("accounting_only", chance)
    if (
        finding.label == "co_critical"
        and hosts.pace_ns.any()
        and len({other.places for other in finding.causes}) > 1
    ):
        return Finding("accounting_only", abstention.hosts_last(cause.stage))
    if finding.label != "straggler" or not _of_a_device(cause, evidence):
        return finding
    paced = replace(evidence, hosts=replace(hosts, floor_ns=hosts.pace_ns))
    if paced.gain(cause) >= thresholds.min_gain * (finding.excess or 0.0):
        return finding
    return replace(finding, label="co_critical", hosts=True)


def _by_chance(finding: Finding, evidence: Evidence, thresholds: Thresholds) -> str:
    """
    Return why a rank may only have the host that is last by chance; "" otherwise.

    The lateness of such a host varies from step to step. The delay caused by a slow host is the same in all
    steps.
    """
    hosts, cause = evidence.hosts, finding.causes[0]
    assert hosts is not None
    of_host = hosts.follows | hosts.unknown
    same_ranks = [other for other in finding.causes if other.places == cause.places]
    waits = all(of_host[list(other.places), other.stage].any() for other in same_ranks)
    waits &= not evidence.hosts_hold(cause)
    if finding.pattern != "lasting" or not (evidence.host_bound or waits):
        return ""
    series = evidence.series(cause)
    blocks = series[len(series) % _BLOCK :].reshape(-1, _BLOCK).mean(axis=1)
    mean, varies, degrees = float(blocks.mean()), float(blocks.std()), max(len(blocks) - 1, 1)
    errors = thresholds.drift_errors / np.sqrt(degrees)
    if len(blocks) < 2 or mean < max(errors, HOSTS.wanders if waits else 0.0) * varies:
        return abstention.HOST_VARIES
    gain = evidence.gain(*finding.causes)
    return abstention.host_little(gain) if gain < thresholds.min_drift else ""


def _of_a_device(cause: Cause, evidence: Evidence) -> bool:
    """Whether the device causes `cause`, while other ranks' devices wait for their hosts."""
    assert evidence.hosts is not None
    late = evidence.hosts.late_share
    its_own = float(late[list(cause.places), cause.stage].mean())
    return its_own < HOSTS.share and host_bound(np.delete(late, cause.places, axis=0))


def _limit(window: Window, evidence: Evidence | None, thresholds: Thresholds, clean: bool) -> str:
    """
    Return what is missing for a verdict (`telemetry_limited`); "" if nothing is. `clean`:
    no row is absurd.
    """
    steps, whole = len(window.keys), window.whole_steps
    if window.coverage < thresholds.coverage_limited or not len(window.ranks):
        return abstention.missing_ranks(window)
    if steps == 0 or whole < thresholds.aligned_limited * (whole + window.gaps):
        return abstention.not_aligned(whole, window.gaps)
    place = None if clean else absurd(window, thresholds)
    if place is not None:
        return abstention.absurd_row(window, *place)
    if steps * thresholds.max_step_ns >= _TOO_LONG:
        return abstention.too_many(steps)
    if mixed(window, FLAG_DEVICE_CLOCK).any():
        return abstention.mixed_clocks(window)
    mean_ns = evidence.mean_step_ns if evidence else 0.0
    return abstention.too_short(mean_ns, thresholds.min_step_ns) if mean_ns < thresholds.min_step_ns else ""


def _apart(evidence: Evidence, thresholds: Thresholds) -> str:
    """Return why these ranks cannot be compared at a common exchange (`accounting_only`); "" if they can."""
    window = evidence.window
    if (window.flags & FLAG_INSEPARABLE).any():
        return abstention.dependence(window)
    if several(window) and (
        alone := abstention.of_roles(evidence, waited_apart_ns(window, evidence.rows.synced))
    ):
        return alone
    if not evidence.rows.synced.any():
        return abstention.no_sync(evidence, thresholds.min_excess)
    alone = (window.flags & (FLAG_NO_PEERS | FLAG_NO_BACKWARD) != 0).mean(axis=0)
    if alone.max() - alone.min() > 0.5:
        return abstention.roles_differ(window, alone > 0.5)
    behind = evidence.frontier.slack[-1, :, -1] / evidence.total_ns
    spread = float(np.ptp(behind))
    off = abs(evidence.replay_ns() / evidence.total_ns - 1)
    if window.inferred and (spread > thresholds.unsynced_spread or off > thresholds.replay_error):
        return abstention.unclear(window)
    if spread <= thresholds.unsynced_spread:
        return ""
    return abstention.unsynced(window, spread, _together(behind, _AGREE * thresholds.unsynced_spread))


def _together(behind: Float, agree: float) -> list[Int64]:
    """
    Return the sets of indices whose totals agree, if every rank belongs to a set of two or more; else [].

    `behind` (R,) is by how much each rank's total is the shorter one, as a share.
    """
    order = np.argsort(behind, kind="stable")
    sets = np.split(order, np.flatnonzero(np.diff(behind[order]) > agree) + 1)
    if any(len(places) < _LEAST_SET or np.ptp(behind[places]) > agree for places in sets):
        return []
    return sorted((np.sort(places) for places in sets), key=lambda places: int(places[0]))


def _lasting(
    evidence: Evidence, thresholds: Thresholds, past: PastSteps | None, usual: Evidence | None = None
) -> tuple[Finding, ...]:
    """
    Return the findings on ranks that are late all the time, by more than chance. They say whether this costs
    time, and whether a rank is the only late one.

    If ranks are late out of several stages, only the largest stage counts, unless they are one cause or about
    equal. If the largest excess saves little by itself, and another rank is late too, all are one finding. A
    single late rank that saves little is `healthy`, with its cause.
    """
    ranks = late_ranks(evidence, thresholds, past, usual)
    if not ranks:
        return ()
    off = evidence.replay_ns() / evidence.total_ns - 1
    if abs(off) > thresholds.replay_error:
        return (Finding("accounting_only", abstention.replay_misses(off)),)
    findings, little = list[Finding](), list[Late]()
    several = len(ranks) > 1
    while ranks:
        late, one_cause = with_second_stage(ranks[0], evidence, thresholds)
        ranks = [other for other in ranks[1:] if not {*other.places} <= {*late.places}]
        gain = evidence.gain(*late.causes)
        hides = is_hidden(evidence, late.causes)
        if hides or (gain < thresholds.min_gain * late.excess and (several or gain < thresholds.min_excess)):
            little.append(late)
            continue
        label: Label = "straggler" if one_cause or len(late.causes) == 1 else "ambiguous"
        findings.append(
            Finding(
                label,
                causes=late.causes,
                excess=late.excess,
                cost=gain,
                z=late.z,
                steps=late.steps,
                at_most=hides is None,
            )
        )
    return tuple(findings) or (_of_little(little, evidence, thresholds),)


def _of_little(late: list[Late], evidence: Evidence, thresholds: Thresholds) -> Finding:
    """Return the finding for ranks that are late together, where fixing each one alone saves little."""
    first = late[0]
    causes = tuple(cause for other in late for cause in other.causes)
    gain = evidence.gain(*causes)
    several = len(late) > 1 and gain >= thresholds.min_gain * first.excess
    hidden = not several and evidence.gain(*first.causes) >= thresholds.min_gain * first.excess
    return Finding(
        "co_critical" if several else "healthy",
        causes=causes if several else first.causes,
        excess=first.excess,
        cost=gain if several else None,
        z=first.z,
        hidden=hidden,
    )


def _newly(
    evidence: Evidence, thresholds: Thresholds, past: PastSteps | None
) -> tuple[Finding, Evidence] | None:
    """
    Return the result of `_lasting` on the newest 20 or 10 steps: a rank that has just become late, before
    half of the window shows it.

    n of K steps require √(K ÷ n) times the excess, in `high_late_share` of these steps. The steps before are
    the control. The evidence since the beginning of the lateness is returned too.
    """
    window, steps = evidence.window, len(evidence.window.starts)
    if evidence.host_bound:  # for some steps, one host is always last
        return None
    for count in (2 * thresholds.stride_steps, thresholds.stride_steps):
        if steps < count + thresholds.stride_steps:
            continue
        least = thresholds.min_excess * float(np.sqrt(max(1.0, thresholds.window_steps / count)))
        step_ns = evidence.frontier.exposed[window.starts[-count] :].sum() / count
        often = np.count_nonzero(evidence.by_step[-count:] >= math.ceil(least * step_ns), axis=0)
        if 2 * often.max() < count or step_ns == 0:
            continue
        limits = msgspec.structs.replace(thresholds, min_excess=least)
        newest = gather(window.last(count))
        late = _lasting(newest, limits, past, evidence)
        if not late:
            continue
        finding = late[0]
        if window.host is not None:
            finding = _against_hosts(finding, newest, limits)
        if finding.label != "straggler" or _all_ranks(finding, evidence):
            continue
        began = _began(evidence.series(finding.causes[0]), count, thresholds)
        if began is not None:
            return replace(finding, new=True), gather(window.last(steps - began))
    return None


def _all_ranks(finding: Finding, evidence: Evidence) -> bool:
    """Whether all ranks are named together. Then they are late in turn: no rank is later than all."""
    return len(finding.causes[0].places) == len(evidence.window.ranks)


def _began(series: Float, count: int, thresholds: Thresholds) -> int | None:
    """
    Return the index at which the excess in the newest `count` of `series` (S,) began. None if
    it is not new.
    """
    before, newest = series[:-count], series[-count:]
    excess = float(np.median(newest))
    usual = float(np.median(before))
    error = _MEDIAN_ERROR * float(np.median(np.abs(before - usual))) / np.sqrt(count)
    if (
        (newest > excess / 2).mean() < thresholds.high_late_share
        or (before > excess / 2).mean() > 1 - thresholds.high_late_share
        or excess - usual < thresholds.drift_errors * error
    ):
        return None
    return len(before) if (since := onset(series > excess / 2)) is None else since


def _transient(
    evidence: Evidence, thresholds: Thresholds, past: PastSteps | None, named: list[Cause]
) -> Finding | None:
    """
    Return the rank that holds up the others now and then, besides what is `named`; None if there is none.

    It must be the last one in more of these steps than by chance. An excess that a fix would not save does
    not count: between two exchanges a rank may be late in one step and early in the next.
    """
    exposed = evidence.exposed_excess.copy()
    for cause in named:
        exposed[list(cause.places), cause.stage] = 0
        lasting = evidence.persistent[list(cause.places)] >= thresholds.same_cause * thresholds.min_excess
        exposed[list(cause.places)] *= ~lasting
    place, stage = (int(i) for i in np.unravel_index(int(np.argmax(exposed)), exposed.shape))
    by_stage = exposed.sum(axis=0)
    if exposed[place, stage] < max(
        thresholds.transient_excess, thresholds.transient_share * float(exposed.sum())
    ):
        stage = int(np.argmax(by_stage))
        place = int(np.argmax(exposed[:, stage]))
        if by_stage[stage] < thresholds.rotating_excess:
            return None
    # Noise in other stages may keep one rank below its share of all excess; of its stage's, it counts too.
    excess = float(exposed[place, stage])
    if excess < thresholds.transient_share * by_stage[stage]:
        return None
    cause = Cause(stage, (place,))
    gain = evidence.gain(cause)
    if gain < thresholds.min_gain * excess:
        return None
    lasts = evidence.persistent[place, stage] >= thresholds.min_excess
    sure = not lasts and now_and_then(evidence, cause, thresholds, past)
    return Finding("straggler", causes=(cause,), excess=excess, pattern="transient", cost=gain, sure=sure)


def _uneven(evidence: Evidence, thresholds: Thresholds, named: list[Cause]) -> Finding | None:
    """
    Return the finding on the cost of unequal work, besides what is `named`; None if the cost is small, or if
    the same rank nearly always has most work.
    """
    if several(evidence.window) or evidence.host_bound:
        return None
    cost = evidence.uneven(*named)
    if cost < thresholds.min_imbalance or largest_share(evidence, named) > thresholds.transient_share:
        return None
    off = evidence.replay_ns() / evidence.total_ns - 1
    if abs(off) > thresholds.replay_error:
        return None
    everyone = tuple(range(len(evidence.window.ranks)))
    causes = tuple(Cause(stage, everyone) for stage in uneven_stages(evidence))
    return Finding("imbalance", causes=causes, excess=cost, pattern="rotating", cost=cost)
