"""The structs in which a verdict and the episodes of a run are returned, and stored in a summary."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from traceml_ray.analysis.anomalies import Anomaly
from traceml_ray.analysis.labels import Label, Pattern
from traceml_ray.analysis.track import Episode
from traceml_ray.analysis.uneven_work import Reason
from traceml_ray.analysis.verdict import Stack, Verdict


class VerdictInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong, where, its cost, and what to do. Labels: docs/concepts/verdicts.md."""

    label: Label
    """Kind of verdict, see docs/concepts/verdicts.md."""
    stage: str | None
    """First of `stages`; None: no stage is named."""
    stages: list[str]
    """Stages in which the ranks are late, the worst first; empty: no stage is named."""
    rank: int | None
    """Worst of `ranks`; None: no rank is named."""
    ranks: list[int]
    """Global ranks that are named; empty: none."""
    node: str | None
    """Label of the node of `rank`; None: no rank is named."""
    nodes: list[str]
    """Labels of the nodes of `ranks`."""
    confidence: str | None
    """low, medium or high; None if nothing is judged."""
    excess_pct: float | None
    """Lateness of `rank` in its `stage`, in % of the mean step. For `group_wide`: of all ranks together."""
    gain_pct: float | None
    """Saving if `stage` alone is fixed, as a share of the time given by `about` (%)."""
    cost_pct: float | None
    """Cost of all named causes together, as a share of the time given by `about` (%)."""
    cost_range_pct: list[float] | None
    """Range of `cost_pct` over the windows: its 10th and 90th percentile (%)."""
    about: Literal["now", "run"]
    """The time that `cost_pct` is a share of: `now`, since the named cause began; `run`, the whole run."""
    cost_s: float | None
    """`cost_pct` in seconds."""
    lost_s: float | None
    """Cost of everything named in the run so far, in seconds."""
    elapsed_s: float | None
    """How long the run has been judged (s)."""
    rank_hours_per_hour: float | None
    """
    Rank-hours lost per hour on the ranks that exchange gradients with the late ones; None: no cost is
    known.
    """
    chronic: bool | None
    """Whether at least half of the windows have this verdict; None: no finding, or too few windows."""
    pattern: Pattern | None
    """A finding is late in most steps (`lasting`), now and then (`transient`), or in turn (`rotating`)."""
    host_bound: bool | None
    """
    Whether devices wait for their hosts (with a device clock). A gain is then at most as
    large as given.
    """
    coverage: float | None
    """Share of the ranks that report, from 0 to 1."""
    from_step: int | None
    """First step of the finding, or of the window if the finding began before it."""
    to_step: int | None
    """Last step that the verdict is about; None: not known."""
    window_steps: int
    """Number of steps in the judged window; 0: no window was judged."""
    mean_step_ms: float | None
    """Mean time of a step in the window (ms); None: not known."""
    why: str
    """Explanation in sentences for a person."""
    next: str
    """What to do."""
    note: str
    """Sentence on findings that are too brief to be named yet, or on a named one that is not visible now."""
    last_step: int | None
    """
    For a death: the last step that the rank finished. For a hang: the last step before it. None: not
    known.
    """
    open_stage: str | None
    """For a death or a hang: the stage that the rank was in; None: not known."""
    exit_reason: str | None
    """For a death: why the process ended, such as SIGKILL; None: not known."""
    span: str | None
    """The span inside `stage` that makes `rank` late; for a hang, the open span."""
    began_ns: int | None
    """For a hang: when the last row before it arrived (ns since the epoch)."""
    lasted_s: float | None
    """For a hang that has ended: its duration (s)."""
    stacks: list[Stack]
    """For a hang: stacks of the first blocking rank, then of the others, each kind once."""
    machine: list[Anomaly] | None
    """Anomalies at that time on the named nodes. They are evidence, not a cause. None: not known."""
    reason: Reason | None
    """Why ranks are late in turn, or how much larger the batches of the named ranks are."""
    also: list[VerdictInfo]
    """Other findings, the costliest first, each with its own cost. Their fields about one window are null."""
    z: float | None
    """Number of standard errors by which `rank` is late more often than by chance."""
    at_most: bool = False
    """Whether fixing the cause may save less than `gain_pct`."""
    saving: str = ""
    """The sentence of `why` about what a fix saves; "" if it has none."""
    confirmed: bool | None = None
    """
    Whether a check measured that the machines of `ranks` are slower than their peers. None: not checked, or
    the check is not sure.
    """


class TimedEpisode(Episode, frozen=True, kw_only=True):
    """
    An episode, and when it began. In a finished run, and in a summary, also when it ended, and the late span;
    `cost_pct` is then a share of the whole run, and `cost_range_pct` is None.
    """

    span: str | None = None
    """The span inside `stage` that makes `rank` late; None: not known."""
    started_at: str | None = None
    """When the first late step began (ISO 8601, UTC); None: not known."""
    ended_at: str | None = None
    """When the last late step ended (ISO 8601, UTC); None: not known, or the run is not over."""


def verdict_info(verdict: Verdict) -> VerdictInfo:
    """Return a verdict as the struct that is returned and stored."""
    fields = {name: getattr(verdict, name) for name in VerdictInfo.__struct_fields__}
    lists: dict[str, Any] = {name: [*value] for name, value in fields.items() if isinstance(value, tuple)}
    return VerdictInfo(**{**fields, **lists, "also": [verdict_info(other) for other in verdict.also]})
