"""What a signal shows, with no word of where or how: facts, tables, numbers and gauges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from traceml_ray.reports.layout import Block

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Number:
    """
    A number of a run, with its line by step. Of several with the same `key` the last counts: a signal may put
    a better one in the place of that of the steps.
    """

    key: str
    label: str
    value: float | None
    unit: str
    about: str = ""
    """What it is of; "": of the steps that the other numbers are of."""
    line: Array = field(default_factory=lambda: np.empty(0))
    """By step, (C,); empty where it has none."""
    title: str = ""
    """More about it, where there is room."""
    short: tuple[str, str] | None = None
    """Name and value where there is one line for all; None: it is not there."""
    after: str = ""
    """Key of the number that it follows; "": it is one of the last."""


@dataclass(frozen=True)
class Gauge:
    """A number as `/metrics` has it, in base units; see `dash_app.metrics`."""

    name: str
    about: str
    series: Sequence[tuple[Sequence[object], float | None]]
    """Values of the labels, and the number; one that is not known is left out."""
    labels: Sequence[str] = ()
    """Names of the labels, after that of the run."""
    unit: str = ""


@dataclass(frozen=True)
class Section:
    """What belongs together."""

    place: Literal["model", "steps", "tables", "ranks", "failure"] = "steps"
    """
    Where a report has it: about the model, beside the steps, with their tables, with those of ranks, or
    beside a failure.
    """
    blocks: Sequence[Block] = ()
    numbers: Sequence[Number] = ()
    per_rank: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """By unit or name: the number of each rank."""
    gauges: Sequence[Gauge] = ()
