"""Whether growth follows a line, slows down (a root, a logarithm, a cache that fills) or speeds up."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import numpy as np

from traceml_ray.analysis.memory.robust import theil_sen
from traceml_ray.analysis.memory.shapes import Float

Bend = Literal["line", "slows", "quickens"]
_BEGINS = (-0.25, -0.125, 0.0, 0.125, 0.25)
"""Growth may have begun so much earlier or later than assumed, as a share of its time."""
_LOGARITHMS = (0.3, 0.1, 0.03, 0.01)
_FILLING = (1.0, 0.5, 0.25)
_QUICKENING = (1.0, 0.5, 0.25)
"""Time constants of logarithms and exponentials, as shares of the time of growth."""
_REST = 0.5
"""A bent shape must leave at most this share of the variance that the best line leaves,"""
_EVIDENCE = 12.0
"""and of few points less: n points that fit both equally well differ by chance."""
SLOWER = 0.8
_FASTER = 1.25
"""And the slope of the last third must differ from the whole's by this factor."""
_STRAIGHT = 0.85
"""Of a straight part the second half's slope is at least this share of the first half's, beyond its error."""
_FEWEST = 5
_Rows = tuple[slice, slice, slice]


@lru_cache(64)
def _shapes(n: int) -> tuple[Float, _Rows]:
    """
    Return (shapes, n) centred and normalised curves over n points that are evenly spread in time, and which
    of them are lines, which slow down and which speed up.
    """
    unit = np.linspace(0.0, 1.0, n)
    lines, slowing, quickening = [], [], []
    for begin in _BEGINS:
        since = np.maximum(unit - begin, 0.0) / (1 - begin)
        lines.append(since)
        slowing.append(np.sqrt(since))
        slowing += [np.log1p(since / scale) for scale in _LOGARITHMS]
        slowing += [-np.expm1(-since / scale) for scale in _FILLING]
        quickening.append(since**2)
        quickening += [np.expm1(since / scale) for scale in _QUICKENING]
    curves = np.array([*lines, *slowing, *quickening])
    curves -= curves.mean(axis=1, keepdims=True)
    curves /= np.sqrt((curves**2).sum(axis=1, keepdims=True))
    bent = len(lines) + len(slowing)
    return curves, (slice(0, len(lines)), slice(len(lines), bent), slice(bent, None))


def bend(t: Float, y: Float, slope: float) -> tuple[Bend, float]:
    """
    Return how growth is bent, and its slope of late (that of the last third; of a line the slope itself).

    Args:
        t: (n,) seconds, ascending.
        y: (n,) bytes.
        slope: of the line through them, bytes a second.
    """
    n = len(t)
    part = max(n // 3, 2)
    recent = theil_sen(t[-part:], y[-part:])
    lower, higher = recent <= SLOWER * slope, recent >= _FASTER * slope
    if n < _FEWEST or not (lower or higher):
        return "line", slope
    line, slows, quickens = _unexplained(t, y)
    most = min(_REST, float(np.exp(-_EVIDENCE / n))) * line
    if lower and slows <= most and slows <= quickens:
        return "slows", recent
    if higher and quickens <= most and quickens < slows:
        return "quickens", recent
    return "line", slope


def _unexplained(t: Float, y: Float) -> tuple[float, float, float]:
    """Return the least share of the variance of y that lines, slowing and quickening curves leave."""
    curves, rows = _shapes(len(t))
    even = np.interp(np.linspace(t[0], t[-1], len(t)), t, y)
    around = even - even.mean()
    total = float(around @ around)
    if total <= 0:
        return 1.0, 1.0, 1.0
    along = np.maximum(curves @ around, 0.0)
    left = np.maximum(1 - along**2 / total, 0.0)
    line, slows, quickens = (float(left[part].min()) for part in rows)
    return line, slows, quickens


def slowing_share(t: Float, y: Float) -> float:
    """Return the share of the variance of y that growth which slows down explains, 0..1."""
    return 1 - _unexplained(t, y)[1]


def straight(t: Float, y: Float) -> bool:
    """Whether the second half of growth is as steep as its first half, as surely as the noise allows."""
    half = len(t) // 2
    if half < _FEWEST:
        return False
    early, late = (theil_sen(t[part], y[part]) for part in (slice(None, half), slice(half, None)))
    if early <= 0 or late <= 0:
        return False
    error = _slope_error(t[:half], y[:half], early) / early + _slope_error(t[half:], y[half:], late) / late
    return late / early - error >= _STRAIGHT


def _slope_error(t: Float, y: Float, slope: float) -> float:
    """Return the standard error of the slope of a line through points whose errors are independent."""
    rest, around = y - slope * t, t - t.mean()
    return float(rest.std() / max(float(np.sqrt(around @ around)), 1e-9))
