"""Numbers that a script logs, from the records of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from traceml_ray import text
from traceml_ray.document.model import Column, Gauge, Number, RankColumn, Section, Table
from traceml_ray.signals.finding import Finding, OnSteps, key_of
from traceml_ray.signals.logged.judge import LoggedHistory, LoggedMetric, LoggedNumbers
from traceml_ray.signals.logged.records import LOGGED
from traceml_ray.signals.view import Run, View
from traceml_ray.store.query import OfRun
from traceml_ray.store.rank_processes import RankProcess, of_run

_EVERY_S = 10.0
_NEXT = "Look at data and gradients of that step: `torch.autograd.set_detect_anomaly` names the operation."


class GetLogged(OfRun[list[LoggedMetric]], frozen=True):
    """What a run has logged, by name in the order in which names were first logged. At most 32 names."""


class LoggedView(View[list[LoggedMetric]]):
    """See `View`."""

    name = "logged"
    question = GetLogged
    states = ((LOGGED, LoggedHistory),)
    polled = True
    rounded = False
    finds = MappingProxyType({})

    def answer(self, run: Run, asked: GetLogged) -> list[LoggedMetric]:
        """Return what the ranks have logged, over all processes of each rank."""
        job = next((one.identity.job_id for one in run.ranks.values() if one.identity is not None), None)
        ranks: dict[int, list[int]] = {}
        for process in of_run(run.file.processes(), job):
            if process.identity is not None and process.identity.global_rank in run.ranks:
                ranks.setdefault(process.identity.global_rank, []).append(process.id)
        return run.records.of(LOGGED, LoggedHistory).metrics(ranks)

    def findings(
        self, answer: list[LoggedMetric], steps: Sequence[Finding], verdict: OnSteps | None
    ) -> list[Finding]:
        """Return the metrics that are not finite now, or were not finite before."""
        return [_finding(metric) for metric in answer if metric.not_finite]

    def every_s(self, ranks: Mapping[int, RankProcess], world: int) -> float | None:
        """Return 10 s."""
        return _EVERY_S

    def block(self, answer: list[LoggedMetric]) -> list[LoggedNumbers]:
        """Return the newest value of each rank by name (None if it is not finite), without the lines."""
        return [
            LoggedNumbers(
                name=metric.name,
                ranks=metric.ranks,
                values=[value if np.isfinite(value) else None for value in metric.values.tolist()],
                steps=metric.steps.tolist(),
                low=metric.low,
                high=metric.high,
                not_finite=metric.not_finite,
            )
            for metric in answer
        ]

    def of_block(self, block: list[LoggedNumbers]) -> list[LoggedMetric]:
        """Return the metrics of a block, without the lines."""
        return [
            LoggedMetric(
                name=one.name,
                ranks=one.ranks,
                values=np.array(one.values, dtype=float),
                steps=np.array(one.steps, dtype=np.int64),
                low=one.low,
                high=one.high,
                not_finite=one.not_finite,
            )
            for one in block
        ]

    def sections(self, answer: list[LoggedMetric]) -> Sequence[Section]:
        """Return the newest values, their lines, and a table."""
        return sections(answer)


def _finding(metric: LoggedMetric) -> Finding:
    """Return the finding about a metric that is not finite now, or else about one that was not."""
    now = [bad for bad in metric.not_finite if bad.since is not None]
    named = now or metric.not_finite
    step = min(bad.since if bad.since is not None else bad.first_step for bad in named)
    ranks = tuple(bad.rank for bad in named)
    who = text.ranks(ranks)
    when = f"is NaN or infinite from step {step:,} on" if now else f"was NaN or infinite in step {step:,}"
    serious = "loss" in metric.name.lower()
    return Finding(
        key=key_of("not_finite", (), metric.name),
        signal="logged",
        label="not_finite",
        severity=("critical" if serious else "warning") if now else "notice" if serious else "info",
        ranks=ranks,
        what=metric.name,
        from_step=step,
        why=f"`{metric.name}` {when} ({who}).",
        next=_NEXT,
        evidence={"ranks_not_finite": len(named)},
    )


_TILES, _SHORT, _SHORT_CHARS = 6, 3, 12
"""
Number of metrics shown as numbers on the first page; number of these that also have a short form in one line;
largest length of a name in the short form. Longer names are truncated.
"""


def sections(metrics: Sequence[LoggedMetric]) -> list[Section]:
    """Return the newest values as numbers and gauges, and all values in a table."""
    if not metrics:
        return []
    columns = [
        Column("metric", lambda one: one.name, "name"),
        Column("newest", lambda one: one.value, "value"),
        Column("step", lambda one: int(one.steps.max()), "count"),
        Column("lowest", lambda one: one.low, "known value"),
        Column("highest", lambda one: one.high, "known value"),
        Column("ranks", lambda one: one.ranks, "ranks"),
        Column("by step", lambda one: text.sparkline(one.line.tolist()), "words"),
    ]
    note = "newest: mean of the ranks"
    table = Table("Logged by the script", columns, metrics, note if _several(metrics) else "")
    per_rank = [
        RankColumn(one.name, "known value", dict(zip(one.ranks, one.values.tolist(), strict=True)))
        for one in metrics[:_TILES]
    ]
    numbers = [_number(one, index < _SHORT) for index, one in enumerate(metrics[:_TILES])]
    return [Section("tables", [table], numbers=numbers, per_rank=per_rank, gauges=_gauges(metrics))]


def _several(metrics: Sequence[LoggedMetric]) -> bool:
    return any(len(one.ranks) > 1 for one in metrics)


def _number(metric: LoggedMetric, short: bool) -> Number:
    about = f"step {int(metric.steps.max()):,}"
    if metric.not_finite:
        bad = metric.not_finite[0]
        about = (
            f"not finite {'since' if bad.since is not None else 'in'} step {bad.since or bad.first_step:,}"
        )
    elif len(metric.ranks) > 1:
        low, high = float(metric.values.min()), float(metric.values.max())
        about = f"{text.value(low)} to {text.value(high)} on {len(metric.ranks):,} ranks, {about}"
    name = metric.name if len(metric.name) <= _SHORT_CHARS else f"{metric.name[: _SHORT_CHARS - 1]}…"
    shown = (name.upper(), text.value(metric.value)) if short else None
    value = metric.value if np.isfinite(metric.value) else None
    line = metric.line[np.isfinite(metric.line)]  # a record covers many steps, so most columns have no value
    return Number(f"logged {metric.name}", metric.name, value, "", about, line, short=shown)


def _gauges(metrics: Sequence[LoggedMetric]) -> list[Gauge]:
    return [
        Gauge(
            "logged",
            "Newest value that the script has logged, mean of its ranks.",
            [((one.name,), one.value if np.isfinite(one.value) else None) for one in metrics],
            ("name",),
        ),
        Gauge(
            "logged_not_finite",
            "Ranks whose newest logged value is not finite.",
            [((one.name,), sum(bad.since is not None for bad in one.not_finite)) for one in metrics],
            ("name",),
        ),
    ]
