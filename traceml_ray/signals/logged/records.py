"""What a rank has logged under one name."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from traceml_ray.signals.kind import Kind
from traceml_ray.wire.codec import Count, Part

MAX_NAMES, MAX_NAME_CHARS = 32, 64
"""Largest number of names per rank process, and of characters per name."""


class LoggedValues(Part, frozen=True):
    """The values of one name over some steps of a rank. The last value logged in a step counts."""

    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
    first_step: Count
    last_step: Count
    steps: Count
    """Number of steps with a value."""
    low: float | None
    """Smallest finite value; None: there is none."""
    high: float | None
    """Largest finite value; None: there is none."""
    not_finite: Count = 0
    """Number of steps whose value is not finite."""
    first_not_finite: Count | None = None
    """First step whose value is not finite; None: there is none."""
    not_finite_since: Count | None = None
    """Step from which on no value is finite. None: the last value is finite."""
    last: float = math.nan
    """Last value. NaN is null in the session file."""


LOGGED = Kind(
    "logged", LoggedValues, "logged values", table="logged_values", exported="logged", index="last_step"
)
