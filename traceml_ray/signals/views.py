"""All views of signals, by name, in the order in which faces show them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.verdict_shapes import TimedEpisode
from traceml_ray.document.model import Number, Section
from traceml_ray.signals.check.view import CheckView
from traceml_ray.signals.collectives.view import CollectivesView
from traceml_ray.signals.experts.view import ExpertsView
from traceml_ray.signals.finding import Finding, OnSteps, listed, of_machine, of_verdict
from traceml_ray.signals.goodput.view import GoodputView
from traceml_ray.signals.layers.view import LayersView
from traceml_ray.signals.logged.view import LoggedView
from traceml_ray.signals.memory.view import MemoryView
from traceml_ray.signals.nodes.view import NodesView
from traceml_ray.signals.output.view import OutputView
from traceml_ray.signals.sharding.view import ShardingView
from traceml_ray.signals.throughput.view import ThroughputView
from traceml_ray.signals.view import View
from traceml_ray.store.query import OfRun
from traceml_ray.store.summary_shape import Summary

_ALL = (
    *(
        MemoryView(),
        ThroughputView(),
        GoodputView(),
        ShardingView(),
        LayersView(),
        ExpertsView(),
        OutputView(),
    ),
    NodesView(),
    LoggedView(),
    CollectivesView(),
    CheckView(),
)
VIEWS: dict[str, View[Any]] = {view.name: view for view in _ALL}
OF_QUESTION: dict[type[Any], View[Any]] = {view.question: view for view in VIEWS.values()}
POLLED: tuple[View[Any], ...] = tuple(view for view in VIEWS.values() if view.polled)
PAGES = tuple(dict.fromkeys(view.page for view in VIEWS.values() if view.polled or view.finds is not None))
"""Names of the pages that show signals. Each is a pane of `top`."""


def page_of(signal: str) -> str | None:
    """
    Return the page of the web app that shows a signal. None: it is shown on the pages of steps
    and nodes.
    """
    return VIEWS[signal].page if signal in VIEWS else None


def signal_numbers(answers: Mapping[str, Any]) -> list[Number]:
    """Return the numbers of signals, from their answers by name."""
    return [number for section in sections_of(answers) for number in section.numbers]


def sections_of(answers: Mapping[str, Any]) -> Iterator[Section]:
    """Yield the sections of signals, from their answers by name."""
    for name, answer in answers.items():
        yield from VIEWS[name].sections(answer)


def answers_in(summary: Summary) -> dict[str, Any]:
    """Return the answers of signals by name, from the blocks of a summary, without what is drawn."""
    blocks = {**summary.more, **msgspec.structs.asdict(summary)}
    return {name: view.of_block(blocks[name]) for name, view in VIEWS.items() if name in blocks}


def with_causes(death: Verdict, answers: Mapping[str, Any]) -> Verdict:
    """
    Return the verdict on a death, extended by what signals know about its cause. Unchanged if they know
    nothing.
    """
    causes = [VIEWS[name].cause(death, answer) for name, answer in answers.items()]
    why = " ".join(filter(None, [death.why, *causes]))
    return msgspec.structs.replace(death, why=why) if any(causes) else death


def confirmed(verdict: Verdict, answers: Mapping[str, Any]) -> Verdict:
    """Return a verdict on steps, extended by which signals confirm it. Unchanged if none says so."""
    for name, answer in answers.items():
        verdict = VIEWS[name].confirmed(verdict, answer)
    return verdict


def findings_of(
    verdict: OnSteps | None, episodes: Sequence[TimedEpisode] | None, answers: Mapping[str, Any]
) -> list[Finding]:
    """
    Return all findings of a run, in order, with the relations between them.

    Args:
        verdict: verdict on its steps. None before there is one.
        episodes: episodes of the run. None if they are not known.
        answers: answers of signals, by name. A signal without an answer has no findings.
    """
    steps = of_verdict(verdict, episodes or ()) if verdict else []
    others = [*of_machine(verdict.machine or (), steps)] if verdict else []
    for name, view in VIEWS.items():
        if name in answers:
            others += view.findings(answers[name], steps, verdict)
    return listed(steps, others)


def questions_on_findings(run: str | None) -> dict[str, OfRun[Any]]:
    """Return the questions, by signal, whose answers contain all findings of signals in a run."""
    return {name: view.question(run, **view.finds) for name, view in VIEWS.items() if view.finds is not None}
