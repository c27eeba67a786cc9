"""Shared by all callbacks: steps as the framework counts them, spans, and the verdict for its log."""

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
"""The names that these have without a callback: a span inside one of its name counts once."""

Method = TypeVar("Method", bound=Callable[..., Any])


def hook(method: Method) -> Method:
    """Keep a callback's method out of processes that are not watched, and count what goes wrong in it."""

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
        Say that so many steps are done, as the framework counts them, with those before a checkpoint.

        Returns whether there are more than before: else the micro-batch was one of several.
        """
        if done == self._done:
            return False
        if done != self._done + 1:  # else the marks have counted it
            self._agent.recorder.number(done)
        self._done = done
        if self._micro:
            self._per_step, self._micro = self._micro, 0
        return True

    def total(self, steps: Any) -> None:
        """Say how many steps the framework is going to take, where it knows: others are -1 or infinite."""
        if isinstance(steps, int) and steps > 0:
            self._agent.collector(WorkReport).declare(total_steps=steps)

    def log(self, values: Mapping[str, Any]) -> None:
        """Pass on what the framework logs, as far as it is plain numbers: see `traceml_ray.log`."""
        numbers = {name: one for name, one in values.items() if type(one) in (float, int)}
        if numbers:
            self._agent.collector(MetricLog).log(numbers)

    def micro_batch(self) -> None:
        """Say that one has been trained on."""
        self._micro += 1

    def epoch(self, number: int, step: int) -> None:
        """Say that an epoch begins: an event of the run."""
        self._agent.add_event(wire.Event("note", time.time_ns(), step=step, message=f"epoch {number} begins"))

    def begin(self, name: str) -> None:
        """Begin a span."""
        if name not in self._open:
            self._open[name] = self._agent.instrumentation.spans.begin(name)

    def end(self, name: str) -> None:
        """End it, where it has begun."""
        begun = self._open.pop(name, None)
        if begun is not None:
            self._agent.instrumentation.spans.end(begun)

    def figures(self) -> dict[str, float]:
        """
        Return what goes into the framework's log, nothing before there is a verdict: `traceml/step_ms` (mean
        of the window judged), `traceml/cost_pct` (of the step), `traceml/late_rank` (-1: no rank is named),
        `traceml/micro_batches` (a step). Only rank 0 has a verdict.
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
        Return the verdict as a sentence, after what is more severe (memory that runs out), where one of both
        is another than the last time.
        """
        verdict = self._agent.verdict
        label, first = verdict.get("label"), verdict.get("first")
        named = f"{label} {verdict.get('rank')} {verdict.get('stage')} {first}"
        if label is None or named == self._why:
            return None
        self._why = named
        before = f"{first}: {verdict.get('first_why')} " if first else ""
        return f"traceml-ray: {before}{label}: {verdict.get('why')}"
