"""How evenly the routers of a run use their experts, from the records of its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from traceml_ray.analysis.reasons import UNEVEN_EXPERTS
from traceml_ray.analysis.uneven_work import ExpertLoad, loads, sentence
from traceml_ray.signals.experts.records import EXPERTS
from traceml_ray.signals.finding import Finding, OnSteps, key_of
from traceml_ray.signals.view import SLOW_RANKS, Run, View
from traceml_ray.store.query import OfRun
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire.codec import Int64


class GetExperts(OfRun[list[ExpertLoad]], frozen=True):
    """
    How evenly routers use their experts, the most uneven first: over all ranks together, or of
    one rank.
    """

    rank: Int64 | None = None


_NEXT = "Even out the load of the experts: an auxiliary loss, a capacity factor, another placement."


class ExpertsView(View[list[ExpertLoad]]):
    """See `View`. A report shows the loads with its steps (`reports.contents`)."""

    name = "experts"
    question = GetExperts
    finds = MappingProxyType({})

    def answer(self, run: Run, asked: GetExperts) -> list[ExpertLoad]:
        """Return the load of each router: over all ranks together, or of one rank."""
        return experts_of(
            run.file, [process for rank, process in run.ranks.items() if asked.rank in (None, rank)]
        )

    def findings(
        self, answer: list[ExpertLoad], steps: Sequence[Finding], verdict: OnSteps | None
    ) -> list[Finding]:
        """
        Return the routers that give one expert far more tokens than the mean. This may explain
        an imbalance.
        """
        why = verdict.reason.what if verdict and verdict.reason else None
        explained = steps[0].key if steps and why == "experts" else None
        return [_finding(load, explained) for load in answer if load.times_mean >= UNEVEN_EXPERTS]

    def every_s(self, ranks: Mapping[int, RankProcess], world: int) -> float | None:
        """Return 30 s."""
        return 30.0 if world < SLOW_RANKS else None


def _finding(load: ExpertLoad, explained: str | None) -> Finding:
    return Finding(
        key=key_of("uneven_experts", (), load.router),
        signal="experts",
        label="uneven_experts",
        severity="notice",
        what=load.router,
        why=f"{sentence(load)}.",
        next=_NEXT,
        evidence=msgspec.to_builtins(load),
        explains=explained,
    )


def experts_of(file: SessionFile, processes: Iterable[RankProcess]) -> list[ExpertLoad]:
    """Return the load of each router, summed over some rank processes. Raises `SessionFileError`."""
    ids = [process.id for process in processes]
    tokens = file.records_of(EXPERTS, {*ids})
    return loads(tokens.get(process, []) for process in ids)
