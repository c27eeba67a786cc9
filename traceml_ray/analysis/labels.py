"""The table of the labels of a verdict. Rules, episodes, reports, pages and docs use it."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Kind = Literal["finding", "watching", "abstention", "failure", "healthy"]
Severity = Literal["critical", "warning", "notice", "info"]
Label = Literal[
    "straggler", "co_critical", "ambiguous", "imbalance", "group_wide", "accounting_only",
    "telemetry_limited", "hang", "stalled", "rank_lost", "oom", "watching", "healthy",
]  # fmt: skip
Pattern = Literal["lasting", "transient", "rotating"]
"""
How ranks are late, and so how their late steps are measured (`Evidence.by_pattern`): `lasting` in most steps,
`transient` now and then, `rotating` another rank from step to step.
"""
ReasonKind = Literal[
    "tokens", "samples", "data", "between_steps", "experts", "pauses", "other", "unknown",
]  # fmt: skip
"""Why ranks are uneven, see `uneven_work.Reason`."""
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)


class Meaning(NamedTuple):
    """The meaning of a label."""

    kind: Kind
    """
    Kind of the label. A finding makes steps longer and has a cost; it must last before it is named, and is
    watched until then. An abstention says why nothing can be named. A failure ends steps.
    """
    names: Literal["ranks", "all", "none"]
    """
    Ranks that the label names. `all`: the ranks are slower together, measured from a baseline, not from
    peers.
    """
    means: str
    next: str
    """General advice. A verdict that names a stage, a span or an exit gives a more specific one."""
    at_once: bool = False
    """Whether the label is shown as soon as it occurs. All other labels must last (`Thresholds.hold_s`)."""

    @property
    def severity(self) -> Severity:
        """Severity of a verdict with this label, on pages and in lists of events."""
        return _SEVERITY.get(self.kind, "info")


_SEVERITY: dict[Kind, Severity] = {"failure": "critical", "finding": "warning", "watching": "notice"}


# fmt: off
LABELS: dict[Label, Meaning] = {
    "straggler": Meaning("finding", "ranks",
        "One rank (or one set of ranks) is late in one stage. Fixing it makes the step shorter by the given "
        "cost. Anomalies of its node at that time are listed as evidence.",
        "Look at what the rank does in that stage."),
    "co_critical": Meaning("finding", "ranks",
        "Two ranks are late in turn. Fixing one alone saves little.",
        "Fix them together."),
    "ambiguous": Meaning("finding", "ranks",
        "One rank is late in two stages at once.",
        "Look for one cause of both."),
    "imbalance": Meaning("finding", "none",
        "No rank is late more often than the others. Ranks have unequal work, and in each step all wait "
        "for the rank with the most work.",
        "Even out the work of the ranks in each step."),
    "group_wide": Meaning("finding", "all",
        "No rank is late, but a stage, or the whole step, has become slower for most ranks, compared "
        "with the run's own healthy steps or with a session you know to be good (`TRACEML_BASELINE=name`).",
        "Look at what all ranks share: storage, network, the machines."),
    "accounting_only": Meaning("abstention", "none",
        "Exposed time is reported, and no rank is named: these ranks do not wait for each other, do "
        "different work (a pipeline without replicas), or their waiting cannot be separated from work "
        "(on a device without its clock).",
        "Read the exposed time per stage; it names no rank."),
    "telemetry_limited": Meaning("abstention", "none",
        "There is too little data for a verdict; the reason is given.",
        "Look at which ranks report and what was dropped: Health in the web app and in `top`, the ledger of "
        "a report.", at_once=True),
    "hang": Meaning("failure", "ranks",
        "No rank has closed a step for 20 s. The least advanced rank, or one that does not answer, is named, "
        "with its stack and the call that the others wait in.",
        "Look at the rank that is named; without one, at the network.", at_once=True),
    "stalled": Meaning("watching", "ranks",
        "No rank has closed a step for 20 s, because the others wait for a rank that is busy: in a known "
        "span between two steps, or its training thread moves. It becomes a `hang` after 10 minutes.",
        "Wait. If it should not take so long, look at what the rank does.", at_once=True),
    "rank_lost": Meaning("failure", "ranks",
        "A rank died: which one, at which step, in which stage, and how.",
        "Read the rank's own output.", at_once=True),
    "oom": Meaning("failure", "ranks",
        "A rank died because memory ran out.",
        "Use a smaller batch or activation checkpointing.", at_once=True),
    "watching": Meaning("watching", "ranks",
        "Something is late or slower, but is not named yet. The verdict states who, since when, the cost so "
        "far, and the missing condition in numbers.",
        "Wait: it is named once it has lasted and cost enough, or it passes."),
    "healthy": Meaning("healthy", "none",
        "No rank delays the others.",
        "Nothing to do."),
}
# fmt: on
DEATHS: frozenset[Label] = frozenset({"rank_lost", "oom"})
"""Labels for a rank that died."""
