"""The numbers above all charts, each with the line that it has been."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from traceml_ray import text
from traceml_ray.analysis.spread import quantiles

_SPARK = 60
Array = np.ndarray[Any, Any]


class Tile(NamedTuple):
    """A number with its line; what is not known is None or NaN."""

    key: str
    label: str
    value: float | None
    unit: str
    text: str
    """What it is of."""
    series: Array
    """Of a long line the median of each piece."""
    title: str = ""


def tiles(times: Mapping[str, Any], columns: Mapping[str, Any]) -> list[Tile]:
    """Return the numbers of a run, from the answers to `query.Times` and `query.Columns`."""
    if not times["steps"]:
        return []
    worst = f"rank {times['worst_rank']}" if times["worst_rank"] is not None else ""
    sampled = "sampled " if times["timed_pct"] < 90 else ""
    of = f"of {'all' if times['of_all'] else 'the newest'} {times['steps']:,} {sampled}steps"
    since = "the run's beginning was not read"
    if times["all_read"]:
        wall_s = times["wall_s"]
        since = "" if wall_s is None else f"of {text.duration(wall_s)} since the first report"
    median, p95 = times["median_ms"], text.ms(times["p95_ms"])
    every = f"the share of their time in which ranks wait for others, {of}"
    return [
        _tile("median", "Step time", median, "ms", f"median; p95 {p95}", columns["step_ms"], of),
        _tile("rate", "Throughput", times["steps_per_s"], "steps/s", of, columns["steps_per_s"]),
        _tile("goodput", "Productive time", times["productive_pct"], "%", since, ()),
        _tile("wait", "Waiting per rank", times["waiting_pct"], "%", of, columns["waiting_pct"], every),
        _tile("worst", "Worst ÷ median rank", times["worst_over"], "×", worst, columns["worst_over"], of),
        *_idle(times),
    ]


def _idle(times: Mapping[str, Any]) -> list[Tile]:
    """Return the tile of the GPU that waits most for its host, where ranks have a device clock."""
    idle = times["gpu_idle_pct"]
    if np.isnan(idle).all():
        return []
    at = int(np.nanargmax(idle))
    return [_tile("idle", "GPU idle, most", idle[at], "%", f"rank {times['ranks'][at]}", ())]


def _tile(
    key: str,
    label: str,
    value: float | None,
    unit: str,
    about: str,
    series: Sequence[float] | Array,
    title: str = "",
) -> Tile:
    shown = np.asarray(series, dtype=float)
    if len(shown) > _SPARK:
        long = np.full((-(-len(shown) // _SPARK), _SPARK), np.nan)
        for at, piece in enumerate(np.array_split(shown, _SPARK)):
            long[: len(piece), at] = piece
        shown = quantiles(long, (0.5,))[0]
    return Tile(key, label, value, unit, about, shown, title)
