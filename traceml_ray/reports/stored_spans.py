"""The named spans of the stages in the summary, from what is stored of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from traceml_ray.analysis.span_rates import MAX_PEERS, SpanRate, SpanRates
from traceml_ray.stages import STAGES
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.session_file import SessionFile

_MAX_SPANS = 100


class StoredSpans:
    """The stored spans of a run's ranks; `ranks` holds the process of each rank."""

    def __init__(self, session: SessionFile, ranks: Mapping[int, RankProcess]) -> None:
        self._session = session
        self._ranks = {process.id: rank for rank, process in ranks.items()}

    def find(self, ranks: Sequence[int], first: int, last: int) -> dict[int, SpanRates]:
        """Return the rates of `ranks` over the steps `first` to `last`, see `analysis.span_rates.Find`."""
        alone = next(iter(self._ranks)) if len(self._ranks) == 1 else None
        stored = self._session.spans(first, last, alone)
        known: dict[int, int] = {}
        for row in stored:
            known[row["process"]] = max(known.get(row["process"], -1), min(row["last_step"], last))
        found: dict[int, dict[tuple[str, int], SpanRate]] = {}
        for row in stored:
            rank, steps = self._ranks.get(row["process"]), known[row["process"]] - first + 1
            if rank is not None and steps > 0 and (row["total_ns"] or row["count"]):
                rate = SpanRate(row["total_ns"] / steps, row["count"] / steps, (row["bytes"] or 0) / steps)
                found.setdefault(rank, {})[row["name"], row["stage"]] = rate
        return {rank: found[rank] for rank in ranks if rank in found}

    def block(self, stages: Mapping[int, Sequence[float]], first: int, last: int) -> list[dict[str, Any]]:
        """
        Return the spans over the steps `first` to `last`, the largest on any rank first; `stages` is the
        mean of each stage then, ns, by rank.
        """
        known = self.find(list(stages), first, last)
        block: list[dict[str, Any]] = []
        for name, stage in {key for rates in known.values() for key in rates}:
            of = {rank: rates[name, stage] for rank, rates in known.items() if (name, stage) in rates}
            worst = max(of, key=lambda rank: of[rank].ns)
            rate = of[worst]
            block.append(
                {
                    "stage": STAGES[stage],
                    "name": name,
                    "median_ms": float(np.median([of[r].ns if r in of else 0.0 for r in known])) / 1e6,
                    "max_ms": rate.ns / 1e6,
                    "worst_rank": worst,
                    "share": min(1.0, rate.ns / stages[worst][stage]) if stages[worst][stage] else None,
                    "times_per_step": rate.times,
                    "bytes": rate.bytes,
                }
            )
        return sorted(block, key=lambda span: (-span["max_ms"], span["name"]))[:_MAX_SPANS]


def spans_of(session: SessionFile, rank: int, first: int, last: int) -> list[dict[str, Any]]:
    """
    Return the spans of a rank over the steps `first` to `last`, the longest first (`step_shapes.SpanTimes`);
    in a small job, each with the median of all ranks.
    """
    ranks = session.ranks()
    known = ranks if len(ranks) <= MAX_PEERS else {rank: ranks[rank]} if rank in ranks else {}
    found = StoredSpans(session, known).find([*known], first, last)
    spans = []
    for (name, stage), rate in sorted(found.get(rank, {}).items(), key=lambda span: -span[1].ns):
        every = [rates[name, stage].ns / 1e6 if (name, stage) in rates else 0.0 for rates in found.values()]
        spans.append(
            {
                "stage": STAGES[stage],
                "name": name,
                "ms": rate.ns / 1e6,
                "median_ms": float(np.median(every)) if known is ranks else None,
                "times_per_step": rate.times,
                "bytes": rate.bytes,
            }
        )
    return spans
