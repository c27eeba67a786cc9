"""The numbers above all charts, each with its line. A long line shows medians of its pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from traceml_ray import text
from traceml_ray.analysis.shapes import StepColumns, StepTimes
from traceml_ray.analysis.spread import quantiles
from traceml_ray.document.model import Number

_SPARK = 60
Array = np.ndarray[Any, Any]


def kpis(times: StepTimes, columns: StepColumns, signals: Iterable[Number] = ()) -> list[Number]:
    """
    Return the numbers of a run, from the answers to `query.GetTimes` and `GetColumns`,
    and those of signals.
    """
    if not times.steps:
        return []
    worst = f"rank {times.worst_rank}" if times.worst_rank is not None else ""
    sampled = "sampled " if times.timed_pct < 90 else ""
    steps_text = f"of {'all' if times.of_all else 'the newest'} {times.steps:,} {sampled}steps"
    since = "the run's beginning was not read"
    if times.all_read:
        wall_s = times.wall_s
        since = "" if wall_s is None else f"of {text.duration(wall_s)} since the first report"
    median, p95 = times.median_ms, text.ms(times.p95_ms)
    every = f"the share of their time in which ranks wait for others, {steps_text}"
    shown = [
        _kpi("median", "Step time", median, "ms", f"median; p95 {p95}", columns.step_ms, steps_text),
        _kpi("rate", "Throughput", times.steps_per_s, "steps/s", steps_text, columns.steps_per_s),
        _kpi("goodput", "Productive time", times.productive_pct, "%", since, ()),
        _kpi("wait", "Waiting per rank", times.waiting_pct, "%", steps_text, columns.waiting_pct, every),
        _kpi("worst", "Worst ÷ median rank", times.worst_over, "×", worst, columns.worst_over, steps_text),
        *_idle(times),
    ]
    for one in signals:
        kpi = _kpi(one.key, one.label, one.value, one.unit, one.about or steps_text, one.line, one.title)
        places = [other.key for other in shown]
        if one.key in places:
            shown[places.index(one.key)] = kpi
        else:
            shown.insert(places.index(one.after) + 1 if one.after in places else len(shown), kpi)
    return shown


def _idle(times: StepTimes) -> list[Number]:
    """Return the number for the GPU that waits most for its host, if ranks have a device clock."""
    idle = times.gpu_idle_pct
    if np.isnan(idle).all():
        return []
    position = int(np.nanargmax(idle))
    return [_kpi("idle", "GPU idle, most", idle[position], "%", f"rank {times.ranks[position]}", ())]


def _kpi(
    key: str,
    label: str,
    value: float | None,
    unit: str,
    about: str,
    series: Sequence[float] | Array,
    title: str = "",
) -> Number:
    shown = np.asarray(series, dtype=float)
    if len(shown) > _SPARK:
        long = np.full((-(-len(shown) // _SPARK), _SPARK), np.nan)
        for index, piece in enumerate(np.array_split(shown, _SPARK)):
            long[: len(piece), index] = piece
        shown = quantiles(long, (0.5,))[0]
    return Number(key, label, value, unit, about, shown, title)
