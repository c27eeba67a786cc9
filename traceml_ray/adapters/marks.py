"""
Shared by all callbacks: steps as the framework counts them, spans, and the verdict for the
framework's log.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from traceml_ray.agent import bootstrap
from traceml_ray.agent.rank_agent import RankAgent
from traceml_ray.signals.logged.agent import MetricLog
from traceml_ray.signals.throughput.agent import WorkReport
from traceml_ray.wire import messages as wire

EVALUATION, CHECKPOINT = "evaluation", "checkpoint"
"""Names of these spans without a callback. A span inside another of the same name counts once."""

Method = TypeVar("Method", bound=Callable[..., Any])


def hook(method: Method) -> Method:
    """Decorator for a callback's method: skip it in processes that are not watched, and count its errors."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        agent = bootstrap.current()
        if agent is None:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            agent.instrumentation.failed("adapter", error)
            return None

    return call  # type: ignore[return-value]


class Marks:
    """State of one callback. Its methods are called through `hook`, so only in a watched process."""

    def __init__(self) -> None:
        self._open: dict[str, Any] = {}
        self._micro = self._per_step = 0
        self._done = -1
        self._why = ""

    @property
    def _agent(self) -> RankAgent:
        agent = bootstrap.current()
        assert agent is not None
        return agent

    def step(self, done: int) -> bool:
        """
        Set the number of steps done as the framework counts them, including steps before a checkpoint.

        Returns whether the number has grown. If not, the micro-batch was one of several.
        """
        if done == self._done:
            return False
        if done != self._done + 1:  # otherwise the marks have counted it
            self._agent.recorder.number(done)
        self._done = done
        if self._micro:
            self._per_step, self._micro = self._micro, 0
        return True

    def total(self, steps: Any) -> None:
        """
        Set the total number of steps that the framework will take, if it is known. Unknown totals are -1 or
        infinite.
        """
        if isinstance(steps, int) and steps > 0:
            self._agent.collector(WorkReport).declare(total_steps=steps)

    def log(self, values: Mapping[str, Any]) -> None:
        """Log the framework's values that are plain numbers: see `traceml_ray.log`."""
        numbers = {name: one for name, one in values.items() if type(one) in (float, int)}
        if numbers:
            self._agent.collector(MetricLog).log(numbers)

    def micro_batch(self) -> None:
        """Count a trained micro-batch."""
        self._micro += 1

    def epoch(self, number: int, step: int) -> None:
        """Record the begin of an epoch as an event of the run."""
        self._agent.add_event(wire.Event("note", time.time_ns(), step=step, message=f"epoch {number} begins"))

    def begin(self, name: str) -> None:
        """Begin a span."""
        if name not in self._open:
            self._open[name] = self._agent.instrumentation.spans.begin(name)

    def end(self, name: str) -> None:
        """End a span, if it has begun."""
        begun = self._open.pop(name, None)
        if begun is not None:
            self._agent.instrumentation.spans.end(begun)

    def figures(self) -> dict[str, float]:
        """
        Return the entries for the framework's log. Empty before there is a verdict.

        The entries are `traceml/step_ms` (mean of the judged window), `traceml/cost_pct` (percentage of the
        step), `traceml/late_rank` (-1: no rank is named) and `traceml/micro_batches` (per step). Only rank 0
        has a verdict.
        """
        verdict = self._agent.verdict
        if not verdict:
            return {}
        values = {
            "step_ms": verdict.get("mean_step_ms"),
            "cost_pct": verdict.get("cost_pct"),
            "late_rank": -1 if verdict.get("rank") is None else verdict["rank"],
            "micro_batches": self._per_step or None,
        }
        return {f"traceml/{name}": float(value) for name, value in values.items() if value is not None}

    def new_verdict(self) -> str | None:
        """
        Return the verdict as a sentence, preceded by anything more severe (memory that runs out). None if
        neither has changed since the last call.
        """
        verdict = self._agent.verdict
        label, first = verdict.get("label"), verdict.get("first")
        named = f"{label} {verdict.get('rank')} {verdict.get('stage')} {first}"
        if label is None or named == self._why:
            return None
        self._why = named
        before = f"{first}: {verdict.get('first_why')} " if first else ""
        return f"traceml-ray: {before}{label}: {verdict.get('why')}"
