"""What all callbacks do: steps as the framework counts them, spans, and the verdict for its log."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from traceml_ray import wire
from traceml_ray.agent import bootstrap
from traceml_ray.agent.rank_agent import RankAgent

EVALUATION, CHECKPOINT = "evaluation", "checkpoint"
"""The names that these have without a callback: a span inside one of its name counts once."""

P = ParamSpec("P")
R = TypeVar("R")
Method = TypeVar("Method", bound=Callable[..., Any])


def quietly(method: Callable[Concatenate[Any, RankAgent, P], R]) -> Callable[Concatenate[Any, P], R | None]:
    """Keep what goes wrong in a method of `Marks` away from the framework, and count it."""

    @functools.wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R | None:
        agent = bootstrap.current()
        if agent is None:
            return None
        try:
            return method(self, agent, *args, **kwargs)
        except Exception as error:
            agent.instrumentation.failed("adapter", error)
            return None

    return call  # type: ignore[return-value]


def hook(method: Method) -> Method:
    """Keep a callback's method out of processes that are not watched, and what goes wrong in it, too."""

    @functools.wraps(method)
    def call(self: Any, _agent: RankAgent, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    return quietly(call)  # type: ignore[return-value]


class Marks:
    """Of one callback. Every method does nothing in a process that is not watched, and raises nothing."""

    def __init__(self) -> None:
        self._open: dict[str, Any] = {}
        self._micro = self._per_step = 0
        self._done = -1
        self._why = ""

    @quietly
    def step(self, agent: RankAgent, done: int) -> bool:
        """
        Say that so many steps are done, as the framework counts them, with those before a checkpoint.

        Returns whether there are more than before: else the micro-batch was one of several.
        """
        if done == self._done:
            return False
        if done != self._done + 1:  # else the marks have counted it
            agent.recorder.number(done)
        self._done = done
        if self._micro:
            self._per_step, self._micro = self._micro, 0
        return True

    @quietly
    def micro_batch(self, agent: RankAgent) -> None:
        """Say that one has been trained on."""
        self._micro += 1

    @quietly
    def epoch(self, agent: RankAgent, number: int, step: int) -> None:
        """Say that an epoch begins: an event of the run."""
        agent.add_event(wire.Event("note", time.time_ns(), step=step, message=f"epoch {number} begins"))

    @quietly
    def begin(self, agent: RankAgent, name: str) -> None:
        """Begin a span."""
        if name not in self._open:
            self._open[name] = agent.instrumentation.spans.begin(name)

    @quietly
    def end(self, agent: RankAgent, name: str) -> None:
        """End it, where it has begun."""
        begun = self._open.pop(name, None)
        if begun is not None:
            agent.instrumentation.spans.end(begun)

    @quietly
    def figures(self, agent: RankAgent) -> dict[str, float]:
        """
        Return what goes into the framework's log, nothing before there is a verdict: `traceml/step_ms` (mean
        of the window judged), `traceml/cost_pct` (of the step), `traceml/late_rank` (-1: no rank is named),
        `traceml/micro_batches` (a step). Only rank 0 has a verdict.
        """
        verdict = agent.verdict
        if not verdict:
            return {}
        known = {
            "step_ms": verdict.get("mean_step_ms"),
            "cost_pct": verdict.get("cost_pct"),
            "late_rank": -1 if verdict.get("rank") is None else verdict["rank"],
            "micro_batches": self._per_step or None,
        }
        return {f"traceml/{name}": float(value) for name, value in known.items() if value is not None}

    @quietly
    def new_verdict(self, agent: RankAgent) -> str | None:
        """Return the verdict as a sentence, where it is another than the last time."""
        label, why = agent.verdict.get("label"), agent.verdict.get("why")
        named = f"{label} {agent.verdict.get('rank')} {agent.verdict.get('stage')}"
        if label is None or named == self._why:
            return None
        self._why = named
        return f"traceml-ray: {label}: {why}"
