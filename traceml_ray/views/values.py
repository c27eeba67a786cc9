"""Conversion of numbers for pages. None: unknown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from traceml_ray.analysis.shapes import BusyTimes, StepTimes
from traceml_ray.stages import STAGES

Array = np.ndarray[Any, Any]


def number(value: Any, digits: int = 4) -> float | None:
    """Return a number for JSON, rounded; None if it is not finite."""
    return round(float(value), digits) if value is not None and np.isfinite(value) else None


def whole_number(text: str | None, most: int = 9) -> int | None:
    """Parse a whole number of at most `most` digits from a URL or an input; None if it is not one."""
    return int(text) if text and text.isdecimal() and len(text) <= most else None


def age_s(now_ns: int, then_ns: int | None) -> float | None:
    """Return the time from `then_ns` to `now_ns` in s; 0 if two clocks disagree."""
    return None if then_ns is None else max(0.0, (now_ns - then_ns) / 1e9)


def mean(values: Array) -> float:
    """Return the mean of the finite values; NaN if there are none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else np.nan


def rounded(values: Iterable[float | None] | Array, digits: int = 3) -> list[float | None]:
    """Return numbers for JSON, rounded; None where one is not finite."""
    shown = np.round(np.asarray(values, dtype=float), digits)
    return [value if value == value and abs(value) != np.inf else None for value in shown.tolist()]


def brief(shown: Array) -> list[float | None]:
    """Return numbers with about three figures, as `text.number` writes them: enough for a chart."""
    size = np.log10(np.maximum(np.abs(shown), 1e-3))
    scale = 10.0 ** np.clip(2 - np.floor(size), 0, 4)
    return rounded(np.round(shown * scale) / scale, 4)


def by_rank(answer: StepTimes | BusyTimes | None, name: str) -> dict[int, Any]:
    """Return one number per rank, from an answer with `ranks` and numbers by name in the order of `ranks`."""
    return dict(zip(answer.ranks, getattr(answer, name), strict=True)) if answer else {}


def by_stage(values: Array) -> dict[str, Array]:
    """Return a series for each stage of `values` (K, 6)."""
    return {name: values[:, stage] for stage, name in enumerate(STAGES)}


def as_dict(value: Any) -> Any:
    """Return a struct, and the structs inside it, as a dict."""
    if isinstance(value, msgspec.Struct):
        return {name: as_dict(field) for name, field in msgspec.structs.asdict(value).items()}
    return [as_dict(item) for item in value] if isinstance(value, list) else value
