"""
Finds runs in which no rank closes a row any more, asks the ranks where they are, and matches the collectives
that they report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from traceml_ray.analysis.hang import (
    WAITED,
    RankPosition,
    find,
    find_in_setup,
    is_stopped,
    with_mismatch,
    with_unknown,
)
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.window import starts_of
from traceml_ray.monitor.live_steps import LiveSteps
from traceml_ray.settings import Settings
from traceml_ray.signals.collectives.live import AnsweringRank, CollectiveReports
from traceml_ray.store.rank_processes import RankProcess, generations
from traceml_ray.store.results import EventRow
from traceml_ray.store.writer import SessionWriter
from traceml_ray.wire import messages as wire

MAX_ANSWERS = 10_000
"""Largest number of answers kept. Beyond it, the oldest are dropped."""
ASK_S = 15.0
"""Time for which the ranks are asked for their stacks, in s."""
STACKS_S = 6.0
"""Time after which the verdict uses the stacks received so far, in s."""
ASK_AT = 0.75
"""Share of the time after which a run may hang at which its ranks are asked: the answers take a moment."""
_MEDIAN_OF = 50


@dataclass(eq=False)
class HangWatch:
    """
    Watches the runs of one session. Not thread-safe, except `note`, which is called with the writer's lock.

    A run may hang when none of its ranks has closed a row for `hang_timeout_s` and for `hang_steps` median
    steps. Shortly before that its ranks are asked where they are. The answers show waits that marks do not
    show, such as for a collective on the device, and which collectives each rank has called. Once a hang is
    known, the ranks are asked for all their stacks.

    Before every rank has closed its first row, which includes compiling and loading, it is not known how long
    a step may take. Then only collectives that cannot match are a hang, and ranks that have waited for two
    minutes to make a process group while no rank did anything. Arguments as for `LiveJudge`.
    """

    writer: SessionWriter
    steps: LiveSteps
    settings: Settings
    clock: Callable[[], int]

    def __post_init__(self) -> None:
        self._limits = self.settings.thresholds
        self._doubt_s = max(3.0, 2 * self.settings.interval + 1)
        """Time after which a silent rank may be stopped, in s: its last report may no longer be true."""
        self._least_s = max(self._limits.hang_timeout_s, self._doubt_s)
        """Shortest time without a row after which a run may hang, in s."""
        self._hangs: dict[str, _Hang] = {}
        self._answers: dict[tuple[str, int | None], EventRow] = {}
        """Events with which ranks answered commands, by (command id, rank process)."""
        self.reports = CollectiveReports()

    def note(self, event: EventRow) -> None:
        """
        Add the answer of a rank process. An answer from py-spy does not replace the answer of the rank
        itself.
        """
        self._answers.setdefault((str(event.data.get("dump")), event.process), event)
        if len(self._answers) > MAX_ANSWERS:
            del self._answers[next(iter(self._answers))]

    def commands(self) -> list[wire.Command]:
        """Return the commands for the ranks."""
        since = self.clock() - int(ASK_S * 1e9)
        asking = [(run, hang) for run, hang in self._hangs.items() if hang.found_ns > since]
        return [
            wire.Command("dump" if hang.proven else "where", {"id": hang.name, "run": run})
            for run, hang in asking
        ]

    def check(
        self, run: str, processes: list[RankProcess], ranks: dict[int, RankProcess], labels: dict[int, str]
    ) -> Verdict | None:
        """
        Return the verdict on a hang. When the hang is over, return it once more with `lasted_s`. None: no
        hang.

        Args:
            run: id of a run of the session.
            processes: the rank processes of the run.
            ranks: the rank process of each of its ranks.
            labels: display names of the rank processes' nodes.
        """
        now, hang = self.clock(), self._hangs.get(run)
        with self.writer.lock:
            if hang is None and self._goes_on(ranks, now):
                return None
            began = all(process.stored for process in ranks.values())
            last_ns = max((_progress_ns(process) for process in ranks.values()), default=0)
            if hang is not None and last_ns > hang.began_ns:
                return self._over(run, hang, last_ns)
            quiet_s = (now - last_ns) / 1e9
            due_s = self._due_s(ranks, began)
            if quiet_s < ASK_AT * due_s or not _is_expected(processes, ranks):
                return None
            ended = {rank for rank, process in ranks.items() if process.ended}
            if hang is None:
                hang = self._hangs[run] = _Hang(last_ns, now, ended)
            if hang.verdict is not None and ended != hang.ended:
                return hang.verdict  # the run ends: ranks that exit now did not cause the hang
            places = self._places(ranks, labels, now, hang) if quiet_s >= due_s else None
            asked = self._asked(ranks, hang)
        if places is None:
            return hang.verdict
        finding = find(places, quiet_s) if began else find_in_setup(places, quiet_s, _world(ranks))
        hangs = finding is not None and finding.label == "hang"
        mismatch = self.reports.mismatch(asked, hang.prefix, hang.answered, hangs)
        finding = with_mismatch(finding, mismatch, places, quiet_s)
        finding = with_unknown(finding, _unknown(ranks), places)
        proven = finding is not None and finding.label == "hang"
        if not hang.proven and (proven or hang.doubts_again(now)):
            hang.found_ns, hang.ended, hang.rounds = now, ended, hang.rounds + 1
        if finding is not None and not _same(finding, hang.verdict) and (proven or not hang.proven):
            hang.verdict = msgspec.structs.replace(finding, began_ns=last_ns)
        return hang.verdict

    def _goes_on(self, ranks: dict[int, RankProcess], now: int) -> bool:
        """
        Return whether a rank made progress so recently that the run cannot hang. Mostly the first rank says
        it, so that a tick costs little, however many ranks there are.
        """
        since = now - int(ASK_AT * self._least_s * 1e9)
        return any(_progress_ns(process) > since for process in ranks.values())

    def _due_s(self, ranks: dict[int, RankProcess], began: bool) -> float:
        """Return the time without a row after which a run may hang, in s."""
        if not began or not ranks:
            return self._least_s
        return max(self._least_s, self._limits.hang_steps * self._median_s(ranks[min(ranks)]))

    def _over(self, run: str, hang: _Hang, last_ns: int) -> Verdict | None:
        del self._hangs[run]
        for key in [key for key in self._answers if key[0].startswith(hang.prefix)]:
            del self._answers[key]
        if hang.verdict is None:
            return None
        return msgspec.structs.replace(hang.verdict, lasted_s=(last_ns - hang.began_ns) / 1e9)

    def _median_s(self, process: RankProcess) -> float:
        keys, _, rows = self.steps.rows_of(process.id, _MEDIAN_OF)
        steps = np.add.reduceat(rows.sum(axis=1), starts_of(keys)) if len(rows) else np.zeros(1)
        return float(np.median(steps)) / 1e9

    def _places(
        self, ranks: dict[int, RankProcess], labels: dict[int, str], now: int, hang: _Hang
    ) -> list[RankPosition] | None:
        """Return the position of each rank. None: a rank that fell silent may still answer."""
        answers = self._answers_of(ranks, now, hang)
        places = []
        for rank, process in ranks.items():
            silent_s = (now - process.last_seen_ns) / 1e9
            answer = answers.get(process.id)
            data = answer.data if answer else {}
            # A rank that fell silent long after the last step is no cause: its machine may be overloaded.
            long = silent_s >= WAITED * (now - hang.began_ns) / 1e9 or is_stopped(data.get("state"))
            silent = long and silent_s > max(self._limits.report_timeout_s, self._doubt_s)
            if self._unreachable(process, now) or process.open_stage is None or process.open_step is None:
                continue
            if silent_s > self._doubt_s and not (silent or process.ended):
                return None
            waits_in = self.reports.pending(process.id, hang.prefix) if answer else None
            pending, number, pending_s = waits_in or (None, None, 0.0)
            places.append(
                RankPosition(
                    rank=rank,
                    node=labels[process.id],
                    step=process.open_step,
                    stage=process.open_stage,
                    elapsed_s=(process.open_elapsed_ns or 0) / 1e9 + silent_s,
                    span=process.open_span,
                    span_s=(process.open_span_ns or 0) / 1e9 + silent_s,
                    ended=process.ended,
                    silent_s=silent_s if silent and not process.ended else None,
                    state=data.get("state"),
                    where=data.get("where"),
                    call=data.get("call"),
                    peer=data.get("peer"),
                    stack=answer.message if answer else "",
                    pending=pending,
                    pending_seq=number,
                    pending_s=pending_s,
                    still_s=None if process.open_still_ns is None else process.open_still_ns / 1e9,
                )
            )
        return places

    def _answers_of(self, ranks: dict[int, RankProcess], now: int, hang: _Hang) -> dict[int, EventRow]:
        """
        Return what the ranks answered, by rank process. While answers to the last commands are missing, these
        are the answers to the ones before.
        """
        answers = {s.id: e for s in ranks.values() if (e := self._answers.get((hang.name, s.id)))}
        if len(answers) >= len(ranks) or now - hang.found_ns >= STACKS_S * 1e9:
            hang.answers, hang.answered = {**hang.answers, **answers}, hang.name
        return hang.answers

    def _asked(self, ranks: dict[int, RankProcess], hang: _Hang) -> list[AnsweringRank]:
        """Return the ranks whose collectives can be matched: they answered, or have ended."""
        asked = []
        for rank, process in ranks.items():
            answer = hang.answers.get(process.id)
            if process.final or (answer is not None and not process.ended and "state" not in answer.data):
                data = answer.data if answer is not None and not process.ended else {}
                place = data.get("where"), data.get("call"), data.get("peer")
                ended_ns = process.last_seen_ns if process.final else None
                asked.append(AnsweringRank(rank, process.id, *place, ended_ns))
        return asked

    def _unreachable(self, process: RankProcess, now: int) -> bool:
        """Whether the rank's node is silent, so that the silence of the rank itself means nothing."""
        node = self.writer.nodes.get((process.identity.node_id if process.identity else None) or "")
        if process.ended or node is None or node.last_seen_ns is None:
            return False
        return now - node.last_seen_ns > self._limits.report_timeout_s * 1e9


@dataclass
class _Hang:
    """A time without rows in a run. It is not a hang until it has a verdict."""

    began_ns: int
    found_ns: int
    """Time at which the ranks were asked, in ns."""
    ended: set[int]
    """Ranks that had already ended at `found_ns`."""
    verdict: Verdict | None = None
    answers: dict[int, EventRow] = field(default_factory=dict)
    """Newest answers of the ranks, by rank process."""
    answered: str = ""
    """Id of the newest command that was answered."""
    rounds: int = 0
    """Number of times that the ranks were asked again."""

    @property
    def name(self) -> str:
        """Id of the commands; the same after a restart of the aggregator."""
        return self.prefix if self.proven else f"{self.prefix}?{self.rounds}"

    @property
    def proven(self) -> bool:
        """Whether it is a hang. Otherwise ranks may be busy."""
        return self.verdict is not None and self.verdict.label == "hang"

    @property
    def prefix(self) -> str:
        """Beginning of the ids of all its commands."""
        return f"{self.began_ns:x}"

    def doubts_again(self, now: int) -> bool:
        """Whether the hang has lasted twice as long as when the ranks were last asked where they are."""
        return now - self.began_ns >= 2 * (self.found_ns - self.began_ns)


def _is_expected(processes: list[RankProcess], ranks: dict[int, RankProcess]) -> bool:
    """Whether a row is expected of a run: it has several ranks, and is not restarting."""
    if len(ranks) < 2:
        return False
    return ranks[min(ranks)].id in {process.id for process in generations(processes)[-1]}


def _progress_ns(process: RankProcess) -> int:
    """Return when a rank process last made progress, in ns: it closed a row, or began."""
    return process.last_rows_ns or process.first_seen_ns


def _unknown(ranks: dict[int, RankProcess]) -> list[int]:
    """Return the ranks of a job of which nothing has arrived."""
    return [rank for rank in range(_world(ranks)) if rank not in ranks]


def _world(ranks: dict[int, RankProcess]) -> int:
    """Return the number of ranks of a job. 0: not known."""
    identity = ranks[min(ranks)].identity
    return identity.world_size or 0 if identity is not None else 0


def _same(one: Verdict, other: Verdict | None) -> bool:
    """Whether the verdict says nothing new. The stage may alternate while a rank works."""
    if other is None:
        return False
    return (one.label, one.ranks, one.stacks) == (other.label, other.ranks, other.stacks)
