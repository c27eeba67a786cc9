"""
What a rank process reports about its life: when it was started, when it trained, and what it did between
steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, get_args

from traceml_ray.signals.kind import Kind
from traceml_ray.wire.codec import FEW, Count, Int64, Part

What = Literal["checkpoint_save", "checkpoint_save_async", "checkpoint_restore", "evaluation", "pause"]
"""
What an interval is. `checkpoint_save` and `checkpoint_restore` block the training thread.
`checkpoint_save_async` goes on beside it, from the call to the end of the upload; the part of it that
blocks is a `checkpoint_save`, too. In a `pause` between two steps nothing is known to happen.
"""
WHATS: tuple[What, ...] = get_args(What)


class LifeInterval(Part, frozen=True):
    """
    Time of a rank process outside its steps, or several short intervals of one kind that follow each
    other.
    """

    number: Count
    """Number of the interval in its process. Numbers grow; one may be missing."""
    what: What
    began_ns: Int64
    """Begin of the first one (ns, clock of the rank's node)."""
    ended_ns: Int64
    """End of the last one (ns, clock of the rank's node)."""
    busy_ns: Count
    """Time in these intervals together, without the time between them, in ns."""
    count: Count = 1
    """Number of intervals."""
    step: Count | None = None
    """
    Number of the newest step that was complete when the last one began, plus one: a checkpoint that is saved
    holds all steps below. Of one that is loaded: the number of steps that it says it has, 0 if it says none.
    None: not known.
    """
    booted_ns: Int64 | None = None
    """When the node was booted, see `Life`."""


class OpenInterval(Part, frozen=True):
    """
    An interval that is not sent as a record yet: it is not over, or the next one may be joined with it.
    Times count back from `Life.t_ns`.
    """

    number: Count
    what: What
    began_ago_ns: Int64
    ended_ago_ns: Int64 | None
    """None: the last one is not over."""
    busy_ns: Count
    count: Count = 1
    step: Count | None = None


class Life(Part, frozen=True):
    """
    The life of a rank process so far. Times are in ns on the clock of the rank's node; None is "not
    known".
    """

    t_ns: Int64
    """When this was true."""
    attached_ns: Int64
    """When the monitor began to watch the process."""
    born_ns: Int64 | None = None
    """
    When the process was started. None also if the process is older than its part in the run (a worker of
    Ray that waited for work).
    """
    first_step_ns: Int64 | None = None
    """
    When the first step began, with its first wait for data: the end of the first row minus the time of
    that row. None: no row is complete.
    """
    first_row_ns: Int64 | None = None
    """When the first row ended."""
    last_row_ns: Int64 | None = None
    """
    When the newest row ended. Since `first_row_ns`, the rows add up to the time that passed (on the CPU's
    clock).
    """
    step: Count | None = None
    """Number of steps that are complete, as the script or its framework counts them."""
    ended_ns: Int64 | None = None
    """When the process ended. None: it still runs, or it was killed."""
    open: Annotated[list[OpenInterval], FEW] = []
    first_data_ns: Count | None = None
    """Part of the first row in which it waited for data, at its begin."""
    booted_ns: Int64 | None = None
    """
    When the node was booted, by its wall clock when this was written. If that clock is set, this moves with
    it: the clock since the boot is not set.
    """
    boot: Count | None = None
    """Number of that boot, by chance. Records of one boot are comparable by `booted_ns`."""

    def open_intervals(self, sent: Iterable[int] = (), until_ns: int = 0) -> list[LifeInterval]:
        """
        Return the intervals that are not over as records, without those whose numbers are in `sent`. One that
        goes on lasts until `until_ns`, if this is later: its end would have been reported.
        """
        known, later_ns = frozenset(sent), max(0, until_ns - self.t_ns)
        return [
            LifeInterval(
                one.number,
                one.what,
                self.t_ns - one.began_ago_ns,
                self.t_ns + (later_ns if one.ended_ago_ns is None else -one.ended_ago_ns),
                one.busy_ns + (later_ns if one.ended_ago_ns is None else 0),
                one.count,
                one.step,
                self.booted_ns,
            )
            for one in self.open
            if one.number not in known
        ]


LIFECYCLE = Kind(
    "lifecycle",
    LifeInterval,
    "intervals of checkpoints and evaluations",
    table="lifecycle",
    exported="lifecycle",
    node_times=("began_ns", "ended_ns", "booted_ns"),
)
LIFE = Kind(
    "life",
    Life,
    "lives of processes",
    table="life",
    exported="life",
    keep=1,
    node_times=(
        *("t_ns", "attached_ns", "born_ns", "first_step_ns", "first_row_ns", "last_row_ns", "ended_ns"),
        "booted_ns",
    ),
    bundle="all",
)
