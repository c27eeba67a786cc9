"""The open row on a device's clock: the events that bound its stages. It mirrors `Partition`."""

from __future__ import annotations

from typing import NamedTuple

from traceml_ray.stages import DATA, FORWARD, N_STAGES, POST_SYNC, PREPARE

NO_EVENT = -1
FOREIGN = N_STAGES
"""Provisional stage: a data wait that may turn out to belong to an evaluation."""
SAMPLED = N_STAGES + 1
"""Not a stage: marks a row in which every wait inside forward and backward has its own events."""


class Cut(NamedTuple):
    """A stretch of a stage between two events, by number; NO_EVENT where none could be recorded."""

    stage: int
    since: int
    until: int


class Cuts:
    """Follows the switch from stage to stage."""

    __slots__ = ("_sampled", "last", "list")

    def __init__(self) -> None:
        self.list: list[Cut] = []
        self._sampled = False
        self.last = NO_EVENT
        """The event at the last mark."""

    def to(self, stage: int, event: int) -> None:
        """End a stretch of `stage` at `event`."""
        if event != self.last or event == NO_EVENT:
            self.list.append(Cut(stage, self.last, event))
        self.last = event

    def sample(self) -> None:
        """Note that the row is SAMPLED."""
        if not self._sampled:
            self.list.append(Cut(SAMPLED, self.last, self.last))
            self._sampled = True

    def pop(self) -> list[Cut]:
        """Return the cuts of the row that ends, and begin a new one."""
        taken, self.list, self._sampled = _relabelled(self.list, FOREIGN, DATA), [], False
        return taken

    def foreign(self) -> None:
        """The data wait that just ended was for a loader that does not feed training."""
        if self.list and self.list[-1].stage == DATA:
            self.list[-1] = self.list[-1]._replace(stage=FOREIGN)

    def commit(self) -> None:
        """All data waits of this row were for loaders that feed training."""
        self.list = _relabelled(self.list, FOREIGN, DATA)

    def reclassify(self) -> None:
        """See `Partition.reclassify`."""
        for stage in (FOREIGN, PREPARE, FORWARD):
            self.list = _relabelled(self.list, stage, POST_SYNC)


def without_forward(cuts: list[Cut]) -> list[Cut]:
    """Return the cuts of a row that has no forward mark: forward starts where the data wait ended."""
    return _relabelled(cuts, PREPARE, FORWARD)


def first_event(cuts: list[Cut]) -> int:
    """Return the oldest event of `cuts`; NO_EVENT if there is none."""
    return next((event for cut in cuts for event in cut[1:] if event != NO_EVENT), NO_EVENT)


def _relabelled(cuts: list[Cut], stage: int, becomes: int) -> list[Cut]:
    return [cut._replace(stage=becomes) if cut.stage == stage else cut for cut in cuts]
