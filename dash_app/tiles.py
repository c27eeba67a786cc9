"""The numbers at the top of the overview, each with a line and its scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dash import html

from traceml_ray import text
from traceml_ray.reports.tiles import tiles
from traceml_ray.signals.views import signal_numbers
from traceml_ray.views.values import number, rounded

from .components import spark


def data(
    times: Mapping[str, Any], columns: Mapping[str, Any], signals: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the numbers at the top, each with a sparkline."""
    return [
        {
            "key": tile.key,
            "label": tile.label,
            "value": number(tile.value),
            "unit": tile.unit,
            "text": tile.about,
            "series": rounded(tile.line),
            "title": tile.title,
        }
        for tile in tiles(times, columns, signal_numbers(signals))
    ]


def box(tile: Mapping[str, Any]) -> html.Div:
    """Return the elements of a tile."""
    value = [html.Span(text.number(tile["value"]), className="value")]
    if tile["value"] is not None:
        value.append(html.Span(tile["unit"], className="unit"))
    values = [v for v in tile["series"] if v is not None]
    first, last = (text.number(values[index]) if values else "" for index in (0, -1))
    alt = f"{tile['label']}: {first} to {last} {tile['unit']}" if values else ""
    label, under = html.Div(tile["label"], className="label"), html.Div(tile["text"], className="text")
    drawn = [spark(tile["series"], alt), *_ends(values)] if len(values) > 1 else []
    line = html.Div(drawn, className="spark-box")
    return html.Div([label, html.Div(value), line, under], className="tile", title=tile["title"] or None)


def _ends(values: Sequence[float]) -> list[html.Span]:
    """Return the scale of a sparkline: its highest and its lowest value."""
    high, low = text.number(max(values)), text.number(min(values))
    return [html.Span(high, className="high"), *([html.Span(low, className="low")] if low != high else [])]
