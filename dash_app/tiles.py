"""The numbers at the top of the overview, each with a line and its scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from dash import html

from traceml_ray import text
from traceml_ray.analysis.spread import quantiles
from traceml_ray.views.values import Array, number, rounded

from .components import spark

_SPARK = 60


def data(times: Mapping[str, Any], columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the numbers at the top, each with a sparkline."""
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
        _tile("median", "Step time", median, "ms", f"median; p95 {p95}", columns["step_ms"], title=of),
        _tile("rate", "Throughput", times["steps_per_s"], "steps/s", of, columns["steps_per_s"]),
        _tile("goodput", "Productive time", times["productive_pct"], "%", since, ()),
        _tile("wait", "Waiting per rank", times["waiting_pct"], "%", of, columns["waiting_pct"], title=every),
        _tile(
            "worst", "Worst ÷ median rank", times["worst_over"], "×", worst, columns["worst_over"], title=of
        ),
        *_idle_tile(times),
    ]


def _idle_tile(times: Mapping[str, Any]) -> list[dict[str, Any]]:
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
    text: str,
    series: Sequence[float] | Array,
    *,
    title: str = "",
) -> dict[str, Any]:
    """Return a tile; of a long series it shows the median of each piece."""
    shown = np.asarray(series, dtype=float)
    if len(shown) > _SPARK:
        long = np.full((-(-len(shown) // _SPARK), _SPARK), np.nan)
        for at, piece in enumerate(np.array_split(shown, _SPARK)):
            long[: len(piece), at] = piece
        shown = quantiles(long, (0.5,))[0]
    found = {"key": key, "label": label, "value": number(value), "unit": unit, "text": text, "title": title}
    return {**found, "series": rounded(shown)}


def box(tile: Mapping[str, Any]) -> html.Div:
    """Return the elements of a tile."""
    value = [html.Span(text.number(tile["value"]), className="value")]
    if tile["value"] is not None:
        value.append(html.Span(tile["unit"], className="unit"))
    known = [v for v in tile["series"] if v is not None]
    first, last = (text.number(known[at]) if known else "" for at in (0, -1))
    alt = f"{tile['label']}: {first} to {last} {tile['unit']}" if known else ""
    label, under = html.Div(tile["label"], className="label"), html.Div(tile["text"], className="text")
    drawn = [spark(tile["series"], alt), *_ends(known)] if len(known) > 1 else []
    line = html.Div(drawn, className="spark-box")
    return html.Div([label, html.Div(value), line, under], className="tile", title=tile["title"] or None)


def _ends(known: Sequence[float]) -> list[html.Span]:
    """Return the scale of a sparkline: its highest and its lowest value."""
    high, low = text.number(max(known)), text.number(min(known))
    return [html.Span(high, className="high"), *([html.Span(low, className="low")] if low != high else [])]
