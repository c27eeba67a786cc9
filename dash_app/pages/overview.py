"""The first screen: what a step takes, who is late since when, where the time goes, nodes, events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dash import dcc, html

from traceml_ray import text

from .. import figures
from ..place import Place
from . import bits

_CARDS, _FEW_CARDS = 24, 12
_EVENTS = 40
_SHOWN = ("total", "post_sync", "data", "prepare", "forward", "backward")


def layout(_: Mapping[str, Any]) -> Any:
    """Return the elements of the page."""
    exposed = bits.chart(
        "exposed",
        "Where a step's time goes",
        "Exposed time of each stage by step, stacked",
        note=bits.legend(figures.STAGES),
    )
    timeline = bits.chart(
        "timeline",
        "Step timeline",
        "Busy time of the median and the worst rank by step",
        note=bits.legend({"worst": figures.ORANGE, "median": figures.BLUE, "p10–p90": "#3b82c466"}),
    )
    skew = bits.chart(
        "skew",
        "Skew",
        "How far the worst rank and the slowest node are over the others, by step",
        note=bits.legend({"ranks": figures.ORANGE, "nodes": figures.BLUE}),
        tall="low",
    )
    nodes = bits.panel("Nodes, worst first", html.Div(id="node-cards", className="cards"))
    every = dcc.Link("all", id="events-all", href="/events")
    events = bits.panel("Events", html.Ol(id="event-list", className="events", tabIndex=0), note=every)
    left = html.Div([_heat(), timeline, nodes], className="column")
    right = html.Div([exposed, skew, events], className="column")
    tiles = html.Div(id="tiles", className="tiles")
    return html.Div(
        [html.H1("Overview", className="unseen"), tiles, html.Div([left, right], className="split")]
    )


def _heat() -> html.Section:
    graph = dcc.Graph(id="heat", figure=figures.blank(""), config=bits.CLICKED, clear_on_unhover=True)
    tip = html.Div(id="heat-tip", className="tip", **bits.aria(hidden="true"))
    label = bits.aria(label="Busy time of each rank by step, over the median; as a table below")
    span = html.Nav(id="heat-span", className="segments", **bits.aria(label="Steps of the heatmap"))
    stages = html.Nav(id="heat-stages", className="segments", **bits.aria(label="Stage of the heatmap"))
    return bits.panel(
        "Busy time by rank, against the median of the step",
        html.Div([graph, tip], className="graph heat-box", role="img", **label),
        html.Div([*_scale(), _table()], className="heat-legend"),
        note=[span, stages],
    )


def parts(view: Mapping[str, Any], place: Place) -> dict[str, dict[str, Any]]:
    """Return the content of the elements, by id."""
    line, events = view["timeline"], bits.event_rows(view["events"][:_EVENTS], place)
    revision = str(view["session"]["run"])
    empty = {} if len(view["heat"]["ranks"]) else {"heat": {"figure": figures.blank("No closed step yet.")}}
    return {
        **empty,
        "tiles": {"children": [_tile(tile) for tile in view["tiles"]]},
        "heat-stages": {"children": [_segment(name, place) for name in _SHOWN]},
        "heat-span": {"children": _spans(view, place)},
        "exposed": {"figure": figures.exposed(view["exposed"]["steps"], view["exposed"]["stages"], revision)},
        "timeline": {"figure": figures.timeline(line["steps"], line, view["events"])},
        "skew": {"figure": _skew(view["skew"], revision)},
        "events-all": {"href": place.to("events")},
        "node-cards": {"children": _cards(view["nodes"], place)},
        "event-list": {"children": events or html.Li("Nothing happened yet.", className="empty")},
    }


def _skew(skew: Mapping[str, Any], revision: str) -> figures.Figure:
    lines = {"ranks": skew["global_pct"], "nodes": skew["node_pct"]}
    colours = figures.ORANGE, figures.BLUE
    return figures.lines(skew["steps"], lines, "skew %", unit="%", colours=colours, revision=revision)


def _scale() -> list[Any]:
    missing = html.Span([html.I(className="missing"), "missing"], className="key")
    return [
        html.Span("0.5×"),
        html.I(className="scale"),
        html.Span("1.5× the median"),
        missing,
        html.Span(id="heat-hint", className="key"),
        html.Button("Whole heatmap", id="heat-whole", type="button", hidden=True),
    ]


def _table() -> html.Details:
    """Return what holds the heatmap in numbers, for those who cannot read colours."""
    table = html.Div(id="heat-table", className="scroll", tabIndex=0)
    return html.Details([html.Summary("As a table"), table], id="heat-details")


def _tile(tile: Mapping[str, Any]) -> html.Div:
    value = [html.Span(text.number(tile["value"]), className="value")]
    if tile["value"] is not None:
        value.append(html.Span(tile["unit"], className="unit"))
    known = [v for v in tile["series"] if v is not None]
    first, last = (text.number(known[at]) if known else "" for at in (0, -1))
    alt = f"{tile['label']}: {first} to {last} {tile['unit']}" if known else ""
    label, under = html.Div(tile["label"], className="label"), html.Div(tile["text"] or "", className="text")
    return html.Div([label, html.Div(value), bits.spark(tile["series"], alt), under], className="tile")


def _segment(name: str, place: Place) -> dcc.Link:
    on = name == (place.get("stage") or "total")
    href = place.here(stage=None if name == "total" else name)
    return dcc.Link(text.words(name), href=href, className="segment on" if on else "segment")


def _spans(view: Mapping[str, Any], place: Place) -> list[Any]:
    over = view["state"] in ("stored", "finished")
    chosen = place.get("span") or ("run" if over else "recent")
    spans = {"recent": "newest steps", "run": "whole run"}
    return [
        dcc.Link(label, href=place.here(span=name), className="segment on" if name == chosen else "segment")
        for name, label in spans.items()
    ]


def _cards(nodes: list[Mapping[str, Any]], place: Place) -> list[Any]:
    """Return a card for each node, of very many the worst and the names of the others."""
    shown = nodes if len(nodes) <= _CARDS else nodes[:_FEW_CARDS]
    cards: list[Any] = [_card(node, place) for node in shown]
    rest = nodes[len(shown) :]
    if rest:
        links: list[Any] = [bits.node_link(node["key"], node["label"], place) for node in rest]
        more = [html.Summary(text.count(len(rest), "more node")), html.Div(links, className="links")]
        cards.append(html.Details(more, className="rest"))
    return cards or [html.P("No node yet.", className="empty")]


def _card(node: Mapping[str, Any], place: Place) -> dcc.Link:
    over, alive = node["slower_pct"], node["alive"]
    slower = f"{text.percent(over, sign=True)} over the fastest" if (over or 0) >= 0.05 else "the fastest"
    ranks = node["ranks"] if isinstance(node["ranks"], int) else len(node["ranks"])
    worst = [html.Span(f"worst rank {node['worst_rank']}, {text.ms(node['worst_ms'])}")]
    worst.append(html.Span(f"skew {text.percent(node['skew_pct'])}"))
    used = (("CPU", "cpu_pct"), ("RAM", "mem_pct"), ("GPU", "gpu_util_pct"), ("VRAM", "gpu_mem_pct"))
    size = html.Span(text.count(ranks, "rank") if alive else "lost", className="" if alive else "gone-word")
    median = [
        html.Span(text.number(node["median_ms"]), className="value"),
        html.Span("ms median", className="unit"),
        html.Span("" if over is None else slower, className="over"),
    ]
    body = [
        html.Div([html.Strong(node["label"]), size], className="card-head"),
        html.Div(median, className="card-value"),
        html.Div(worst if node["worst_rank"] is not None else None, className="text"),
        html.Div(
            [bits.meter(name, node[key]) for name, key in used if node[key] is not None], className="meters"
        ),
    ]
    return dcc.Link(body, href=place.to("node", node["key"]), className="card" if alive else "card gone")
