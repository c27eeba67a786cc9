"""The named span of its stage that makes a rank late."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from traceml_ray.analysis import wording
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.window import Window, starts_of
from traceml_ray.stages import SEGMENT_BITS, STAGES
from traceml_ray.wire.messages import SpanSum

MAX_PEERS = 64
"""Largest number of ranks that a span is compared with, evenly chosen: enough for a median."""


class SpanRate(NamedTuple):
    """Time, count and bytes of one span in one stage, per step."""

    ns: float
    times: float
    size: float = 0.0

    @property
    def bytes(self) -> float | None:
        """Bytes of one occurrence. None if not known."""
        return self.size / self.times if self.size and self.times else None


_NONE = SpanRate(0.0, 0.0)
SpanRates = Mapping[tuple[str, int], SpanRate]
"""Rates by span name and stage. A span that a rank never had is missing."""
Find = Callable[[Sequence[int], int, int], Mapping[int, SpanRates]]
"""
Function that returns the rates of some ranks over a range of steps. A rank of which nothing is known is
missing.
"""


def span_rates(sums: Iterable[SpanSum], first: int, last: int) -> SpanRates:
    """
    Return the rates over the steps `first` to `last`, or to the last step that is known.

    A sum that reaches beyond them counts by the share of its steps that is inside.
    """
    sums = list(sums)
    last = min(last, max((span_sum.last_step for span_sum in sums), default=-1))
    rates: dict[tuple[str, int], SpanRate] = {}
    for span_sum in sums:
        inside = min(span_sum.last_step, last) - max(span_sum.first_step, first) + 1
        if inside > 0:
            share = inside / (span_sum.last_step - span_sum.first_step + 1) / (last - first + 1)
            before = rates.get((span_sum.name, span_sum.stage), _NONE)
            rates[span_sum.name, span_sum.stage] = SpanRate(
                before.ns + share * span_sum.total_ns,
                before.times + share * span_sum.count,
                before.size + share * (span_sum.bytes or 0),
            )
    return rates


def with_spans(verdict: Verdict, window: Window, find: Find, thresholds: Thresholds) -> Verdict:
    """Return `verdict`, and what it names `also`, each with the span that explains it, see `with_span`."""
    also = tuple(with_span(one, window, find, thresholds) for one in verdict.also)
    return msgspec.structs.replace(with_span(verdict, window, find, thresholds), also=also)


def with_span(verdict: Verdict, window: Window, find: Find, thresholds: Thresholds) -> Verdict:
    """
    Return `verdict` with the span that explains most of its rank's excess in its stage, if one does.

    That is the innermost span in which the rank spends at least `span_share` of its excess more than the
    median of its peers. A span that explains a lasting excess occurs in half of the steps (`span_often`).
    """
    if verdict.rank is None or verdict.stage not in STAGES or verdict.span is not None:
        return verdict
    if verdict.rank not in window.ranks:
        return verdict
    window = window.group_of(verdict.rank)
    peers = [rank for rank in window.ranks.tolist() if rank not in verdict.ranks]
    peers = peers[:: -(-len(peers) // MAX_PEERS) or 1]
    steps = window.keys >> SEGMENT_BITS
    inside = np.flatnonzero((steps >= (verdict.from_step or 0)) & (steps <= (verdict.to_step or 0)))
    if not peers or not len(inside):
        return verdict
    stage, compared = STAGES.index(verdict.stage), [verdict.rank, *peers]
    known = find(compared, int(steps[inside[0]]), int(steps[inside[-1]]))
    d = window.d[:, np.searchsorted(window.ranks, compared), stage][inside]
    d = np.add.reduceat(d, starts_of(window.keys[inside]), axis=0)
    transient = verdict.pattern == "transient"
    excess = d[:, 0] - np.median(d[:, 1:], axis=1)
    excess_ns = float(excess.mean() if transient else np.median(excess))
    others = [known[rank] for rank in peers if rank in known]
    if not others:
        return verdict
    explain: list[tuple[float, str, float, float]] = []
    for (name, where), rate in known.get(verdict.rank, {}).items():
        more_ns = rate.ns - float(np.median([other.get((name, where), _NONE).ns for other in others]))
        lasts = transient or rate.times >= thresholds.span_often
        if where == stage and lasts and more_ns >= thresholds.span_share * excess_ns > 0:
            explain.append((rate.ns, name, more_ns, rate.times))
    if not explain:
        return verdict
    _, span, more_ns, times = min(explain)  # the innermost: never longer than those around it
    seldom = transient and 0 < times < thresholds.span_often
    per = (more_ns / times, "each time") if seldom else (more_ns, "a step")
    why, advice = wording.with_span(verdict.why, verdict.next, verdict.rank, verdict.stage, span, *per)
    return msgspec.structs.replace(verdict, span=span, why=why, next=advice)
