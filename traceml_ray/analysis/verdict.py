"""The verdict over one window of steps: the ranks, the place, the cost, and the confidence."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from traceml_ray.analysis import abstention, wording
from traceml_ray.analysis.anomalies import Anomaly
from traceml_ray.analysis.baseline import Baseline, Drift
from traceml_ray.analysis.evidence import Cause, Evidence, Timing, late_steps, onset
from traceml_ray.analysis.labels import LABELS, Label, Meaning, Pattern
from traceml_ray.analysis.lasting import PastSteps
from traceml_ray.analysis.roles import RoleShare, as_parallel_groups, shares
from traceml_ray.analysis.rules import Finding, find
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.uneven_work import Reason
from traceml_ray.analysis.window import Float, Window
from traceml_ray.stages import BACKWARD, STAGES

DEFAULTS = Thresholds()
_MAX_SUSPECTS = 5
_OFTEN = 0.6
_OF_WINDOW = ("to_step", "coverage", "window_steps", "suspects", "exposed_ms", "mean_step_ms", "roles")


class Suspect(msgspec.Struct, frozen=True, kw_only=True):
    """
    One rank that is late out of one stage.

    `excess_ms` is its lasting excess over its peers per step or, if that is more, the time per step that the
    others waited for it. `share` is this as a share of the mean step (0..1). `gain_ms` is the time by which a
    step gets shorter if only this cause is fixed; `cost_pct` is that as a share of the time.
    """

    stage: str
    """Stage in which the rank is late."""
    rank: int
    """Global rank."""
    node: str
    """Label of the rank's node."""
    excess_ms: float
    """
    Lasting excess over its peers per step or, if that is more, the time per step that the others waited for
    it (ms).
    """
    share: float
    """`excess_ms` as a share of the mean step, from 0 to 1."""
    gain_ms: float
    """Time by which a step gets shorter if only this cause is fixed (ms)."""
    cost_pct: float = 0.0
    """`gain_ms` as a share of the time, in %."""


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """A stack that is the same on all of `ranks`, with the innermost call last."""

    ranks: tuple[int, ...]
    """Global ranks with this stack."""
    text: str
    """The stack as text, the innermost call last."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """
    The finding of a window of steps, its cost, and what to do. `None` is "not known", never 0.

    `label` is one of the table in `labels`: findings and abstentions come from `judge_window`, failures from
    `hang` and `reports.deaths`. `stage` is the first of `stages`, `rank` the worst of `ranks`, `node` its
    node. `group_wide` without a stage means that the step as a whole has become slower.
    """

    label: Label
    stage: str | None = None
    stages: tuple[str, ...] = ()
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    node: str | None = None
    nodes: tuple[str, ...] = ()
    confidence: str | None = None
    excess_pct: float | None = None
    """Lateness of `rank` in `stage`, in % of the mean step. For `group_wide`: of all ranks together."""
    gain_pct: float | None = None
    """Saving if `stage` alone is fixed, in % of the time given by `about`."""
    cost_pct: float | None = None
    """Cost of all named causes together, in % of the time given by `about`."""
    cost_range_pct: tuple[float, float] | None = None
    """Range of `cost_pct` over the windows (p10, p90), if there were several."""
    about: Literal["now", "run"] = "now"
    """What the cost is a share of: the time since the finding began (`now`), or the whole run (`run`)."""
    cost_s: float | None = None
    """Time that the run has waited for what is named here, in s: `cost_pct` in seconds."""
    lost_s: float | None = None
    """Time that the run has waited for everything that was named so far, in s."""
    elapsed_s: float | None = None
    """Time that has been judged so far, in s."""
    rank_hours_per_hour: float | None = None
    """
    Rank-hours lost per hour: the cost as a share, times the number of ranks that exchange gradients with the
    late ones.
    """
    chronic: bool | None = None
    pattern: Pattern | None = None
    """
    Whether the finding is late in most steps (`lasting`), now and then (`transient`), or in turn
    (`rotating`).
    """
    host_bound: bool | None = None
    """
    Whether devices wait for their hosts (with a device clock). Then a gain is at most as large
    as given.
    """
    coverage: float | None = None
    from_step: int | None = None
    """First step of the finding, or of the window if the finding began before it."""
    to_step: int | None = None
    window_steps: int = 0
    suspects: tuple[Suspect, ...] = ()
    exposed_ms: tuple[float, ...] | None = None
    """Mean exposed time per step of each of STAGES, in ms. The sum is `mean_step_ms`."""
    mean_step_ms: float | None = None
    why: str = ""
    next: str = ""
    note: str = ""
    """Sentence on findings that are too brief to be named yet, or on a named one that is not visible now."""
    last_step: int | None = None
    open_stage: str | None = None
    exit_reason: str | None = None
    span: str | None = None
    """The span of `stage` that `rank` is late in, such as `checkpoint`. In a hang: the span that is open."""
    began_ns: int | None = None
    """For a hang: when the last row before it arrived (ns since the epoch)."""
    lasted_s: float | None = None
    """For a hang that is over: time until the next row arrived, in s."""
    stacks: tuple[Stack, ...] = ()
    """For a hang: stacks of the first blocking rank, then of the others, each kind once."""
    machine: tuple[Anomaly, ...] | None = None
    """
    Anomalies at that time on the nodes of `ranks` (`group_wide`: on any node). They are evidence, not a
    cause. None: not known.
    """
    roles: tuple[RoleShare, ...] = ()
    """If ranks do different work: the time that each role waits for the others."""
    reason: Reason | None = None
    """Why ranks are late in turn, or how much larger the batches of the named ranks are."""
    also: tuple[Verdict, ...] = ()
    """Other findings, the costliest first, each with its own cost and no `also`."""
    z: float | None = None
    """Number of standard errors by which `rank` is late more often than by chance."""
    at_most: bool = False
    """Whether fixing the cause may save less than `gain_pct`."""
    saving: str = ""
    """The sentence of `why` on what fixing the finding saves. "" if it has none."""
    confirmed: bool | None = None
    """
    Whether a check measured that the machines of `ranks` are slower than their peers (`signals.check`). None:
    not checked, or the check is not sure.
    """

    @property
    def meaning(self) -> Meaning:
        """Meaning of the label."""
        return LABELS[self.label]

    @property
    def of_window(self) -> dict[str, Any]:
        """Facts about the window, whatever the verdict names."""
        return {name: getattr(self, name) for name in _OF_WINDOW}


class Judged(NamedTuple):
    """Result of the rules in a window: the verdict, and the evidence if there is any."""

    verdict: Verdict
    evidence: Evidence | None
    maybe: Verdict | None = None
    """A rank that was late now and then, perhaps by chance. It is followed, not named."""


def judge_window(
    window: Window,
    thresholds: Thresholds,
    *,
    whole_run: bool = False,
    baseline: Baseline | None = None,
    followed: tuple[int, ...] = (),
    past: PastSteps | None = None,
) -> Judged:
    """
    Return the result of the rules in `window`; never raises.

    `whole_run` only changes the wording. Without a `baseline` nothing can be `group_wide`. `history` sets
    `chronic`, because it has seen more windows. `past` has more steps, by which chance is measured.
    `track.with_cost` adds the saving of a fix to `why`.

    Each group of ranks that exchange gradients is judged by itself. Verdict and evidence are those of the
    most important group: a finding comes before an abstention, which comes before healthy. Of several
    findings it is the costliest, unless one that names a rank of `followed` costs nearly as much
    (`keep_group`). With several groups nothing is `group_wide`, and healthy groups return no evidence, so
    that no baseline is learned: a baseline belongs to one frontier.

    Frontier: StageFrontier, arXiv 2606.06751; the rules are our own.
    """
    judged = _of_groups(window, thresholds, whole_run, baseline, followed, past)
    if any(window.roles):
        judged = judged._replace(verdict=msgspec.structs.replace(judged.verdict, roles=shares(window)))
    return judged


def _of_groups(
    window: Window,
    thresholds: Thresholds,
    whole_run: bool,
    baseline: Baseline | None,
    followed: tuple[int, ...],
    past: PastSteps | None,
) -> Judged:
    groups = window.by_group()
    if len(groups) == 1:
        return _of_group(window, thresholds, whole_run, baseline, past)
    groups = as_parallel_groups(groups)
    judged = [(group, *_of_group(group, thresholds, whole_run)[:2]) for group in groups]
    times = 1 / max(thresholds.keep_group, 1e-9)
    group, verdict, evidence = max(
        judged, key=lambda pair: _matters(pair[1], 1.0 if set(followed).isdisjoint(pair[1].ranks) else times)
    )
    if verdict.label == "healthy":
        sure = min(
            (verdict.confidence or "low" for _, verdict, _ in judged), key=("low", "medium", "high").index
        )
        why = wording.healthy_groups(len(groups))
        return Judged(msgspec.structs.replace(verdict, confidence=sure, why=why), None)
    return Judged(msgspec.structs.replace(verdict, why=wording.in_group(group, verdict.why)), evidence)


def _matters(verdict: Verdict, times: float) -> tuple[int, float]:
    """Return the key by which the verdict of one of several groups is chosen, largest first."""
    if verdict.rank_hours_per_hour is not None:
        return 2, times * verdict.rank_hours_per_hour
    return int(verdict.label != "healthy"), 0.0


def _of_group(
    window: Window,
    thresholds: Thresholds,
    whole_run: bool,
    baseline: Baseline | None = None,
    past: PastSteps | None = None,
) -> Judged:
    """Return what `judge_window` returns, for one group of ranks."""
    findings, evidence = find(window, thresholds, baseline, past)
    sure, unsure = ([finding for finding in findings if finding.sure is value] for value in (True, False))
    headline, *others = (_verdict(finding, evidence, window, thresholds, whole_run, past) for finding in sure)
    also = tuple(verdict for verdict in others if verdict.meaning.kind == "finding")
    maybe = _verdict(unsure[0], evidence, window, thresholds, whole_run, past) if unsure else None
    return Judged(msgspec.structs.replace(headline, also=also), evidence, maybe)


def _verdict(
    finding: Finding,
    evidence: Evidence | None,
    window: Window,
    thresholds: Thresholds,
    whole_run: bool,
    past: PastSteps | None,
) -> Verdict:
    """Return a finding in numbers and words."""
    facts = _facts(window, evidence)
    if finding.label == "healthy" and finding.causes and window.waits_inside:
        # Slower here and faster there costs nothing only where no rank waits in between.
        finding = Finding("accounting_only", abstention.HIDDEN)
    if finding.reason or evidence is None:
        why, advice = finding.reason, LABELS[finding.label].next
        return Verdict(label=finding.label, why=why, next=advice, **facts)
    facts["suspects"] = _suspects(evidence, thresholds)
    if finding.drift is not None:
        return _group_wide(finding.drift, evidence, thresholds, facts)
    if finding.label == "healthy":
        return Verdict(
            label=finding.label,
            confidence=_confidence(finding, evidence, None, thresholds)
            if finding.causes or evidence.persistent.max() < thresholds.min_excess
            else "low",
            why=wording.healthy(evidence, finding, thresholds, past),
            next=LABELS[finding.label].next,
            **facts,
        )
    return _named(finding, evidence, thresholds, facts, whole_run)


def too_few_steps(window: Window | None, needed: int, *, ended: bool = False) -> Verdict:
    """
    Return the abstention for a window that is too short to be judged.

    Args:
        window: None: no step was seen.
        needed: number of steps from which on a window is judged.
        ended: whether no more steps follow.
    """
    why = abstention.too_few(len(window.starts) if window else 0, needed, ended)
    facts = _facts(window, None) if window else {}
    advice = "Train for more steps." if ended else "Wait."
    return Verdict(label="telemetry_limited", why=why, next=advice, **facts)


def _facts(window: Window, evidence: Evidence | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "coverage": window.coverage,
        "from_step": window.first_step,
        "to_step": window.last_step,
        "window_steps": len(window.starts),
    }
    if evidence is not None:
        steps = len(evidence.window.starts)
        facts["exposed_ms"] = tuple((evidence.frontier.exposed.sum(axis=0) / steps / 1e6).tolist())
        facts["mean_step_ms"] = evidence.mean_step_ns / 1e6
        facts["host_bound"] = evidence.host_bound
    return facts


def _named(
    finding: Finding, evidence: Evidence, thresholds: Thresholds, facts: dict[str, Any], whole_run: bool
) -> Verdict:
    window, first = evidence.window, finding.causes[0]
    named = () if finding.pattern == "rotating" else finding.causes
    places = sorted({place for cause in named for place in cause.places})
    worst = max(first.places, key=lambda place: _score(evidence)[place, first.stage]) if places else None
    timing = _timing(finding, evidence)
    facts["from_step"] = int(window.steps[timing.began or 0])
    cost = evidence.gain(*finding.causes) if finding.cost is None else finding.cost
    gain = cost if finding.label == "imbalance" else evidence.gain(first)
    why, advice = wording.named(evidence, finding, timing, whole_run=whole_run)
    return Verdict(
        label=finding.label,
        stage=STAGES[evidence.seen_in(first)],
        stages=tuple(dict.fromkeys(STAGES[evidence.seen_in(cause)] for cause in finding.causes)),
        rank=None if worst is None else int(window.ranks[worst]),
        ranks=tuple(int(window.ranks[place]) for place in places),
        node=None if worst is None else window.nodes[worst],
        nodes=tuple(dict.fromkeys(window.nodes[place] for place in places)),
        confidence=_confidence(finding, evidence, timing, thresholds),
        excess_pct=None if finding.excess is None else 100 * finding.excess,
        gain_pct=100 * gain,
        cost_pct=100 * cost,
        rank_hours_per_hour=cost * window.expected,
        pattern=finding.pattern,
        z=finding.z,
        at_most=_at_most(finding, evidence),
        why=why,
        next=advice,
        **facts,
    )


def _at_most(finding: Finding, evidence: Evidence) -> bool:
    """
    Return whether fixing the finding may save less than its cost, because the hosts' simultaneous work is not
    known.
    """
    if finding.label == "co_critical":
        return finding.hosts
    return finding.at_most or bool(evidence.host_bound and finding.label != "imbalance")


def _group_wide(drift: Drift, evidence: Evidence, thresholds: Thresholds, facts: dict[str, Any]) -> Verdict:
    finding = Finding("group_wide", excess=drift.share)
    why, advice = wording.group_wide(drift, evidence)
    pct = 100 * drift.share
    stages = () if drift.stage is None else (STAGES[drift.stage],)
    return Verdict(
        label=finding.label,
        pattern=finding.pattern,
        stage=stages[0] if stages else None,
        stages=stages,
        confidence=_confidence(finding, evidence, drift.timing, thresholds),
        excess_pct=pct,
        gain_pct=pct,
        cost_pct=pct,
        rank_hours_per_hour=drift.share * evidence.window.expected,
        why=why,
        next=advice,
        **{**facts, "from_step": drift.from_step},
    )


def _timing(finding: Finding, evidence: Evidence) -> Timing:
    """Return when the first cause is late, and since which step."""
    causes = finding.causes if finding.label == "straggler" else finding.causes[:1]
    late = late_steps(evidence.series(*causes))
    if finding.new:  # the evidence begins where it does
        return Timing(late, 0, goes_on=True)
    began = None if finding.pattern == "rotating" else onset(late)
    if finding.pattern == "transient" and began is None:
        began = int(np.argmax(late))
    return Timing(late, began, goes_on=finding.pattern == "lasting")


def _confidence(finding: Finding, evidence: Evidence, timing: Timing | None, thresholds: Thresholds) -> str:
    """
    Return the confidence of a finding, or of a healthy window.

    **high**: every rank reports, the window is full, the excess is at least `high_excess`, and the rank is
    late in at least `high_late_share` of the steps since the cause began. **low**: fewer than
    `first_window_steps` steps, or late in fewer than 60 % of them. Otherwise **medium**. Medium is also the
    highest confidence for two stages, several causes, a rotating rank, a finding that comes and goes, one
    that only the newest steps show, and stages merged by a missing mark. Healthy is high on a full window of
    all ranks. A finding is low while devices wait for their hosts: the host that is last need not be slower
    than the others.
    """
    window = evidence.window
    if evidence.host_bound and finding.label != "healthy":
        return "low"
    if finding.new or finding.at_most:
        return "medium"
    if len(window.starts) < thresholds.first_window_steps:
        return "low"
    unsplit = bool(evidence.rows.waits[:, BACKWARD].any())
    sure = window.coverage == 1.0 and len(window.starts) >= thresholds.window_steps and not unsplit
    if timing is None:
        return "high" if sure else "medium"
    often = float(timing.since.mean())
    if often < _OFTEN and timing.goes_on:
        return "low"
    sure = sure and timing.goes_on and len(finding.causes) <= 1 and often >= thresholds.high_late_share
    return "high" if sure and (finding.excess or 0.0) >= thresholds.high_excess else "medium"


def _score(evidence: Evidence) -> Float:
    """Return how suspicious each rank and stage is (R, 6), as a share of the mean step."""
    score: Float = np.maximum(evidence.persistent, evidence.exposed_excess)
    return score


def _suspects(evidence: Evidence, thresholds: Thresholds) -> tuple[Suspect, ...]:
    score = _score(evidence)
    places, stages = np.nonzero(score >= thresholds.suspect_excess)
    order = np.argsort(-score[places, stages], kind="stable")[:_MAX_SUSPECTS]
    suspects = []
    for place, stage in zip(places[order].tolist(), stages[order].tolist(), strict=True):
        share = float(score[place, stage])
        gain = evidence.gain(Cause(stage, (place,)))
        suspects.append(
            Suspect(
                stage=STAGES[evidence.seen_in(Cause(stage, (place,)))],
                rank=int(evidence.window.ranks[place]),
                node=evidence.window.nodes[place],
                excess_ms=share * evidence.mean_step_ns / 1e6,
                share=share,
                gain_ms=gain * evidence.mean_step_ns / 1e6,
                cost_pct=100 * gain,
            )
        )
    return tuple(suspects)
