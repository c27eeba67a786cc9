"""Two runs beside each other: numbers, and by how much they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import numpy as np

from traceml_ray.stages import STAGES
from traceml_ray.step_shapes import StepTimes

ALIKE_PCT = 1.0
"""Numbers that differ by less are not told apart, nor are times that differ by less of the median step."""


class Difference(TypedDict):
    """One number of run `a` and of run `b`; None where it is not known."""

    what: str
    unit: str
    a: float | None
    b: float | None
    change_pct: float | None
    worse: bool | None
    """Whether `b` is worse than `a`; None: they are alike, or it cannot be said."""


def _number(value: Any) -> float | None:
    return float(value) if value is not None and np.isfinite(value) else None


_Of = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
_ROWS: tuple[tuple[str, str, int, _Of], ...] = (
    ("median step", "ms", 1, lambda times, _: times.get("median_ms")),
    ("p95 step", "ms", 1, lambda times, _: times.get("p95_ms")),
    ("throughput", "steps/s", -1, lambda times, _: times.get("steps_per_s")),
    ("productive time", "%", -1, lambda times, _: times.get("productive_pct")),
    ("worst ÷ median rank", "×", 1, lambda times, _: times.get("worst_over")),
    ("cost of what is named", "%", 1, lambda _, verdict: verdict.get("cost_pct")),
    ("named causes cost", "s", 1, lambda _, verdict: verdict.get("lost_s")),
)
"""What, its unit, 1 where more is worse, and where it is found."""


def compared(
    a: tuple[StepTimes | None, Mapping[str, Any] | None], b: tuple[StepTimes | None, Mapping[str, Any] | None]
) -> list[Difference]:
    """Return the numbers of two runs (times and verdict of each), and the exposed time of each stage."""
    rows = [(what, unit, sign, of(*_known(a)), of(*_known(b))) for what, unit, sign, of in _ROWS]
    stages: list[Mapping[str, float]] = [
        {} if times is None else times.get("stages") or {} for times, _ in (a, b)
    ]
    rows += [(f"exposed {name}", "ms", 1, stages[0].get(name), stages[1].get(name)) for name in STAGES]
    least = {"ms": ALIKE_PCT / 100 * (_number(_known(a)[0].get("median_ms")) or 0.0)}
    return [
        _difference(what, unit, sign, _number(x), _number(y), least.get(unit, 0.0))
        for what, unit, sign, x, y in rows
    ]


def _known(of: tuple[Any, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return of[0] or {}, of[1] or {}


def _difference(
    what: str, unit: str, sign: int, a: float | None, b: float | None, least: float
) -> Difference:
    change, worse = None, None
    if a and b is not None:
        change = 100 * (b - a) / a
        worse = None if abs(change) < ALIKE_PCT or abs(b - a) < least else change * sign > 0
    return {"what": what, "unit": unit, "a": a, "b": b, "change_pct": change, "worse": worse}
