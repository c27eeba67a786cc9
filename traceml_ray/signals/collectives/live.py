"""The newest reports of collectives of the ranks of a session, while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from traceml_ray.signals.collectives.calls import RankCollectives
from traceml_ray.signals.collectives.match import Mismatch, match
from traceml_ray.signals.collectives.records import AT_END, LAST_CALLS, CollectivesReport
from traceml_ray.signals.collectives.reported import collectives_of
from traceml_ray.wire import codec

MAX_REPORTS = 16_384
"""Largest number of reports kept. Beyond it, the oldest are dropped."""


@dataclass(frozen=True)
class AnsweringRank:
    """A rank that was asked for its collectives."""

    rank: int
    process: int
    """Its rank process."""
    where: str | None
    """Where in the user's code it is. None: not known."""
    call: str | None
    """Function of torch.distributed that it waits in. None: in none, or not known."""
    peer: int | None
    """Rank that this function names. None: none, or not known."""
    ended_ns: int | None
    """Time at which its process sent its last batch, in ns. None: it has not."""


class CollectiveReports:
    """
    Keeps the newest report of each rank process, encoded, and matches them.

    `add` is called with the writer's lock. The judging thread calls `mismatch`.
    """

    def __init__(self) -> None:
        self._reports: dict[int, tuple[str, int, bytes]] = {}
        """For each rank process: id of the command, time, and the encoded report."""
        self._last: tuple[object, Mismatch | None] = None, None

    def add(self, process: int, report: CollectivesReport) -> None:
        """Add a report of a rank process. It replaces the one before."""
        self._reports.pop(process, None)
        self._reports[process] = report.asked, report.t_ns, codec.encode_part(report)
        while len(self._reports) > MAX_REPORTS:
            del self._reports[next(iter(self._reports))]

    def pending(self, process: int, asked: str) -> tuple[str, int, float] | None:
        """
        Return the oldest collective that a rank process has in progress, from its answer to a command whose
        id begins with `asked`: (its name and group, its number in the group, its age in s). None: there is
        none.
        """
        report = self._of(process, asked)
        calls = [call for call in report.calls if not call.finished] if report else []
        if report is None or not calls:
            return None
        oldest = max(calls, key=lambda call: call.age_ns)
        group = report.groups[oldest.group].description
        ordinary = group in ("", "default_pg", "undefined")
        name = oldest.op if ordinary else f"{oldest.op} of {group}"
        return name, oldest.number, oldest.age_ns / 1e9

    def mismatch(
        self, ranks: Sequence[AnsweringRank], asked: str, answered: str, hang: bool
    ) -> Mismatch | None:
        """
        Return the first collective that does not match, among the answers to commands whose ids begin with
        `asked`. None: all match, or nothing was reported.

        Args:
            ranks: the ranks of the run that answered, or have ended.
            asked: beginning of the ids.
            answered: id of the last command that was answered. If it is the same, so is the result.
            hang: whether it is known that the run makes no progress.
        """
        key = hang, answered, tuple(ranks)
        if key != self._last[0]:
            known = any(self._reports.get(one.process, ("",))[0].startswith(asked) for one in ranks)
            self._last = key, match(self._collectives(ranks, asked), hang=hang) if known else None
        return self._last[1]

    def _collectives(self, ranks: Sequence[AnsweringRank], asked: str) -> Iterator[RankCollectives]:
        # A rank that ended after the newest report may have made the call that others wait in there.
        reported_ns = max((self._reports.get(one.process, ("", 0))[1] for one in ranks), default=0)
        for one in ranks:
            yield collectives_of(
                self._of(one.process, asked),
                one.rank,
                where=one.where,
                call=one.call,
                peer=one.peer,
                ended=one.ended_ns is not None and one.ended_ns <= reported_ns,
            )

    def _of(self, process: int, asked: str) -> CollectivesReport | None:
        name, _, data = self._reports.get(process, ("", 0, b""))
        return LAST_CALLS.decode(data) if name.startswith((asked, AT_END)) and data else None
