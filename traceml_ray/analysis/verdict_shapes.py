"""A verdict and the episodes of a run, as they are answered and stored in a summary."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from traceml_ray.analysis.anomalies import Anomaly
from traceml_ray.analysis.labels import Label, Pattern
from traceml_ray.analysis.track import Episode
from traceml_ray.analysis.uneven_work import Reason
from traceml_ray.analysis.verdict import Stack, Verdict


class VerdictInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong, where, what it costs, and what to do. Labels: docs/concepts/verdicts.md."""

    label: Label
    stage: str | None
    """The first of `stages`."""
    stages: list[str]
    rank: int | None
    """The worst of `ranks`."""
    ranks: list[int]
    node: str | None
    nodes: list[str]
    confidence: str | None
    """low, medium or high; None if nothing is judged."""
    excess_pct: float | None
    """By how much `rank` is late out of `stage`, of the mean step; of `group_wide`, all ranks together."""
    gain_pct: float | None
    """What fixing `stage` alone saves; of what, says `about`."""
    cost_pct: float | None
    """Cost of all named causes together, as a share of the time given by `about` (%)."""
    cost_range_pct: list[float] | None
    """Between what `cost_pct` was in most windows (p10, p90)."""
    about: Literal["now", "run"]
    """The time that `cost_pct` is a share of: `now`, since the named cause began; `run`, the whole run."""
    cost_s: float | None
    """`cost_pct` in seconds."""
    lost_s: float | None
    """Cost of everything named in the run so far, in seconds."""
    elapsed_s: float | None
    """How long the run has been judged (s)."""
    rank_hours_per_hour: float | None
    chronic: bool | None
    pattern: Pattern | None
    """A finding is late in most steps (`lasting`), now and then (`transient`), or in turn (`rotating`)."""
    host_bound: bool | None
    """On a device's clock: devices wait for their hosts. A gain is then at most as large as it says."""
    coverage: float | None
    """Share of the ranks that report."""
    from_step: int | None
    """Where it began, or the first step of the window if it began before that."""
    to_step: int | None
    window_steps: int
    mean_step_ms: float | None
    why: str
    next: str
    note: str
    """Findings too brief to be named so far, and named ones that are not seen at present."""
    last_step: int | None
    open_stage: str | None
    exit_reason: str | None
    span: str | None
    """The span inside `stage` that makes `rank` late; for a hang, the open span."""
    began_ns: int | None
    """For a hang: arrival of the last row before it."""
    lasted_s: float | None
    """For a hang that has ended: its duration."""
    stacks: list[Stack]
    machine: list[Anomaly] | None
    """What else was anomalous then on the nodes that are named: evidence, not cause. None: not known."""
    reason: Reason | None
    """Why ranks are late in turn, or by how much the batches of those that are named are larger."""
    also: list[VerdictInfo]
    """Other findings, the costliest first, each with its own cost. Their fields about one window are null."""
    z: float | None
    """By how many standard errors `rank` is late more often than it would be by chance."""
    at_most: bool = False
    """Fixing it may save less than `gain_pct`."""
    saving: str = ""
    """The sentence of `why` about what a fix saves; "" if it has none."""


class TimedEpisode(Episode, frozen=True, kw_only=True):
    """
    An episode, and when it began; of a run that is over, and in a summary, also when it ended and the span
    that was late.
    """

    span: str | None = None
    started_at: str | None = None
    ended_at: str | None = None


def verdict_info(verdict: Verdict) -> VerdictInfo:
    """Return a verdict as it is answered."""
    fields = {name: getattr(verdict, name) for name in VerdictInfo.__struct_fields__}
    lists: dict[str, Any] = {name: [*value] for name, value in fields.items() if isinstance(value, tuple)}
    return VerdictInfo(**{**fields, **lists, "also": [verdict_info(other) for other in verdict.also]})
