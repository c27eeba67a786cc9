"""
Spans of the episodes of a run: one trace for each episode of a verdict, and for each failure.

A trace has a root span from the begin to the end of the episode. Its children are windows of judged steps. A
window is sent while the episode lasts, the root once it is over: ids are fixed when the episode begins. A
window shows where its time went, in two rows: the named rank, and the median of the other ranks. The spans of
a row are the stages, one after the other, each as long as all steps of the window spent in it: sums, not
single steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    set_span_in_context,
)

from traceml_ray.analysis.labels import LABELS
from traceml_ray.analysis.step_numbers import stages_beside_peers
from traceml_ray.analysis.verdict_shapes import TimedEpisode
from traceml_ray.signals.finding import Finding, headline
from traceml_ray.store import query

from .report import Report

MOST_TRACES = 100
"""Largest number of traces of a run; further episodes are counted as dropped."""
MOST_WINDOWS = 8
"""Largest number of windows that are sent while an episode lasts: each is as long as all before it."""
_MOST_BESIDE = 8
"""Largest number of other findings that are listed with an episode."""
Ask = Callable[[query.Request[Any]], Any]
"""Asks the session. Raises `QueryError`."""


class Ids(IdGenerator):
    """Ids that are made from names, so that a child can be sent before its parent."""

    def __init__(self) -> None:
        self._trace = self._span = ""
        self._count = 0

    def begin(self, trace: str) -> SpanContext:
        """Begin the ids of a trace. Return the context of its root."""
        self._trace, self._span, self._count = trace, "root", 0
        return SpanContext(self.generate_trace_id(), self.generate_span_id(), False, TraceFlags(1))

    def go_on(self, trace: str, span: str) -> None:
        """Go on with a trace: the next spans have ids made from `span`, the first of them its own."""
        self._trace, self._span, self._count = trace, span, 0

    def generate_trace_id(self) -> int:
        """Return the id of the trace, 16 bytes."""
        return int.from_bytes(hashlib.sha256(self._trace.encode()).digest()[:16], "big")

    def generate_span_id(self) -> int:
        """Return the next id of a span, 8 bytes."""
        name = f"{self._trace}/{self._span}" + (f"/{self._count}" if self._count else "")
        self._count += 1
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace is about: an episode, or a failure."""

    label: str
    stages: tuple[str, ...]
    ranks: tuple[int, ...]
    rank: int | None
    """The rank whose steps are shown; None: no rank is named."""
    node: str | None
    from_step: int | None
    to_step: int | None
    began_ns: int
    is_timed: bool
    """Whether it is known when it began. If not, `began_ns` is when it was reported."""
    ended_ns: int | None
    """None: it goes on."""
    headline: str
    attributes: dict[str, Any]

    def is_same(self, other: Case) -> bool:
        """Whether both are the same episode. Its steps, and its ranks, may have been extended."""
        if (self.label, set(self.stages)) != (other.label, set(other.stages)):
            return False
        if self.ranks and other.ranks and not set(self.ranks) & set(other.ranks):
            return False
        if None in (self.from_step, self.to_step, other.from_step, other.to_step):
            is_later = self.ended_ns is not None and other.began_ns > self.ended_ns
            return not (is_later and other.is_timed)
        return (self.from_step or 0) <= (other.to_step or 0) and (other.from_step or 0) <= (self.to_step or 0)


def cases_of(report: Report) -> Iterator[Case]:
    """Yield the episodes of the run, and the failures that the verdict names."""
    about = report.verdict.about if report.verdict is not None else "now"
    for episode in report.episodes:
        yield _of_episode(report, episode, about)
    for one in report.findings:
        if one.signal == "steps" and _is_failure(one):
            yield _of_failure(report, one)


def _is_failure(one: Finding) -> bool:
    return any(label == one.label and meaning.kind == "failure" for label, meaning in LABELS.items())


def _of_episode(report: Report, one: TimedEpisode, about: str) -> Case:
    lasted_ns = round(one.seconds * 1e9)
    began_ns = _ns(one.started_at) or report.made_ns - lasted_ns
    ended_ns = None if one.goes_on else _ns(one.ended_at) or began_ns + lasted_ns
    line = headline(one.label, one.ranks, one.nodes, inside=" and ".join(one.stages))
    attributes = {
        "cost": None if one.cost_pct is None else one.cost_pct / 100,
        "cost_about": None if one.cost_pct is None else about,
        "cost_s": one.cost_s,
        "confidence": one.confidence,
        "pattern": one.pattern,
        "span": one.span,
        "why": one.why,
        "next": one.next,
    }
    return _case(report, one, one.rank, began_ns, ended_ns, line, attributes)


def _of_failure(report: Report, one: Finding) -> Case:
    began_ns = one.from_ns or report.made_ns
    ended_ns = one.to_ns or (report.made_ns if report.run_over else None)
    rank = next(iter(one.ranks), None)
    attributes = {"cost_s": one.cost_s, "confidence": one.confidence, "why": one.why, "next": one.next}
    return _case(report, one, rank, began_ns, ended_ns, one.headline, attributes)


def _case(
    report: Report,
    one: TimedEpisode | Finding,
    rank: int | None,
    began_ns: int,
    ended_ns: int | None,
    line: str,
    attributes: Mapping[str, Any],
) -> Case:
    beside = [other.headline for other in report.findings if other.headline != line]
    node = one.node if isinstance(one, TimedEpisode) else next(iter(one.nodes), None)
    named = {
        "run": report.run_name or report.run,
        "label": one.label,
        "stage": next(iter(one.stages), None),
        "stages": one.stages,
        "rank": rank,
        "ranks": one.ranks,
        "node": node,
        "nodes": one.nodes,
        "from_step": one.from_step,
        "to_step": one.to_step,
        "findings": beside[:_MOST_BESIDE],
    }
    return Case(
        label=one.label,
        stages=tuple(one.stages),
        ranks=tuple(one.ranks),
        rank=rank,
        node=node,
        from_step=one.from_step,
        to_step=one.to_step,
        began_ns=began_ns,
        is_timed=isinstance(one, TimedEpisode) or one.from_ns is not None,
        ended_ns=ended_ns if ended_ns is None else max(began_ns, ended_ns),
        headline=line,
        attributes=_known({**named, **attributes}),
    )


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known values as attributes."""
    return {f"traceml.{name}": value for name, value in values.items() if value not in (None, "", (), [])}


class _Trace:
    """The trace of one case, as far as it has been sent."""

    def __init__(self, name: str, context: SpanContext, case: Case) -> None:
        self.name, self.context, self.case = name, context, case
        self.windows = 0
        self.next_step = case.from_step
        self.began_ns = self.next_ns = case.began_ns
        self.is_over = False


class EpisodeSpans:
    """
    Makes the spans of a run's episodes.

    Args:
        provider: sends the spans; its ids are `ids`.
        session: name of the session, and when it began: sessions of one name have different ids.
        ask: asks the session for the times of steps.
        failed: told of times that cannot be asked for.
    """

    def __init__(
        self, provider: TracerProvider, ids: Ids, session: str, ask: Ask, failed: Callable[[Exception], None]
    ) -> None:
        self._provider, self._ids, self._session = provider, ids, session
        self._ask, self._failed = ask, failed
        self._tracer: Tracer = provider.get_tracer("traceml_ray")
        self._traces: list[_Trace] = []
        self._left_out: list[Case] = []
        self.dropped = 0
        """Number of episodes without a trace, because there are too many."""

    def take(self, report: Report) -> None:
        """Send what is new of the episodes in `report`."""
        present = []
        for case in cases_of(report):
            if (trace := self._trace_of(report, case)) is not None and not trace.is_over:
                trace.case = case
                present.append(trace)
                self._advance(report, trace)
        for trace in self._traces:
            if not trace.is_over and trace not in present:
                self._end(report, trace)

    def finish(self, report: Report) -> None:
        """Send the roots of all episodes that go on in `report`, the last one of the run."""
        for trace in self._traces:
            if not trace.is_over:
                self._end(report, trace)

    def _trace_of(self, report: Report, case: Case) -> _Trace | None:
        for trace in self._traces:
            if trace.case.is_same(case):
                return trace
        if any(left_out.is_same(case) for left_out in self._left_out):
            return None
        began = case.began_ns if case.from_step is None and case.is_timed else case.from_step
        names = self._session, report.run, case.label, case.stages, case.ranks, began
        name = "/".join(map(str, names))
        context = self._ids.begin(name)
        sampled = self._provider.sampler.should_sample(None, context.trace_id, case.label)
        is_sampled = sampled.decision is Decision.RECORD_AND_SAMPLE
        if not is_sampled or len(self._traces) >= MOST_TRACES:
            self._left_out.append(case)
            self.dropped += is_sampled
            return None
        self._traces.append(_Trace(name, context, case))
        return self._traces[-1]

    def _advance(self, report: Report, trace: _Trace) -> None:
        case = trace.case
        if case.ended_ns is not None or report.run_over:
            self._end(report, trace)
        elif case.from_step is not None and case.to_step is not None and trace.next_step is not None:
            before, new = trace.next_step - case.from_step, case.to_step - trace.next_step + 1
            if trace.windows < MOST_WINDOWS and new >= max(before, 1):
                self._window(report, trace, report.made_ns)

    def _end(self, report: Report, trace: _Trace) -> None:
        """Send the last window, and the root."""
        case, trace.is_over = trace.case, True
        end_ns = max(case.ended_ns or report.made_ns, trace.next_ns)
        trace.case = msgspec.structs.replace(case, ended_ns=end_ns)
        self._window(report, trace, end_ns)
        self._ids.go_on(trace.name, "root")
        root = self._tracer.start_span(
            case.label, Context(), attributes=case.attributes, start_time=min(trace.began_ns, case.began_ns)
        )
        if any(label == case.label for label, meaning in LABELS.items() if meaning.severity != "info"):
            root.set_status(Status(StatusCode.ERROR, case.headline))
        root.end(end_ns)

    def _window(self, report: Report, trace: _Trace, end_ns: int) -> None:
        case, first = trace.case, trace.next_step
        if first is None or case.to_step is None or case.to_step < first:
            return
        begin_ns, trace.next_ns = trace.next_ns, max(end_ns, trace.next_ns)
        trace.next_step, trace.windows = case.to_step + 1, trace.windows + 1
        rows = self._rows(report, case, first, case.to_step)
        self._ids.go_on(trace.name, f"from {first}")
        parent = set_span_in_context(NonRecordingSpan(trace.context), Context())
        steps = {"traceml.from_step": first, "traceml.to_step": case.to_step}
        window = self._tracer.start_span(
            "window", parent, attributes={**case.attributes, **steps}, start_time=begin_ns
        )
        for name, attributes, stages, count in rows:
            self._row(set_span_in_context(window, Context()), begin_ns, name, attributes, stages, count)
        window.end(trace.next_ns)

    def _row(
        self,
        parent: Context,
        begin_ns: int,
        name: str,
        attributes: Mapping[str, Any],
        stages: Sequence[tuple[str, float]],
        count: int,
    ) -> None:
        """Send a row: the stages one after the other, `count` times as long as their mean (ms)."""
        row = self._tracer.start_span(
            name, parent, attributes={**attributes, "traceml.steps": count}, start_time=begin_ns
        )
        now_ns = begin_ns
        for stage, mean_ms in stages:
            values = {"traceml.stage": stage, "traceml.mean_s": mean_ms / 1e3, **attributes}
            part = self._tracer.start_span(
                stage, set_span_in_context(row, Context()), attributes=values, start_time=now_ns
            )
            now_ns += round(mean_ms * 1e6 * count)
            part.end(now_ns)
        row.end(now_ns)

    def _rows(
        self, report: Report, case: Case, first: int, last: int
    ) -> list[tuple[str, dict[str, Any], list[tuple[str, float]], int]]:
        """
        Return the rows of a window: name, attributes, stages with their mean (ms), and number of steps. Empty
        if they are not known.
        """
        try:
            if case.rank is None:
                times = self._ask(query.GetTimes(report.run, first=first, last=last))
                return [("all ranks", {}, _positive(times.stages), times.steps)] if times.steps else []
            ranks = self._ask(query.GetRankTimes(report.run, first=first, last=last))
        except query.QueryError as error:
            self._failed(error)
            return []
        if not ranks.steps or case.rank not in ranks.ranks:
            return []
        rank, peers = (_positive(row) for row in stages_beside_peers(ranks, case.rank, case.ranks))
        named = _known({"rank": case.rank, "node": case.node})
        rows = [("named rank", named, rank, ranks.steps)]
        return [*rows, ("other ranks", {}, peers, ranks.steps)] if peers else rows


def _positive(stages: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the stages that took time; unknown times (NaN) are left out."""
    return [(stage, ms) for stage, ms in stages.items() if ms > 0]


def _ns(moment: str | None) -> int | None:
    """Return a time of an answer (ISO 8601) in ns since the epoch."""
    return None if moment is None else round(datetime.fromisoformat(moment).timestamp() * 1e3) * 1_000_000
