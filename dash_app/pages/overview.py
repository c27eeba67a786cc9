"""The first screen: what a step takes, who is late since when, where the time goes, nodes, events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from dash import dcc, html

from traceml_ray import text
from traceml_ray.analysis.spread import MISSING, quantiles
from traceml_ray.analysis.step_numbers import MAX_LINES
from traceml_ray.analysis.window import missing_of
from traceml_ray.stages import STAGES
from traceml_ray.store import query

from .. import figures, heatmap
from ..components import CLICKED, Content, aria, chart, legend, link, meter, node_link, panel, part, spark
from ..route import Route
from ..run_state import RunState
from ..session_cache import SessionCache
from ..values import Array, by_stage, natural, number, rounded
from .events import event_table, events_of

_SPARK = 60
_CARDS, _FEW_CARDS = 24, 12
_EVENTS, _LISTED = 200, 40
_UNPLACED = "no report"
"""In place of the node of a rank that has not reported yet."""
_SPANS: dict[str, str | None] = {"newest steps": "recent", "whole run": "run"}
_STAGES = {"total": None, **{name: name for name in STAGES if name != "sync_wait"}}
_BY_NODE = "A row is a node, as its worst rank; a click opens it."
_NO_TIMES: dict[str, Any] = dict.fromkeys(("median_ms", "worst_rank", "worst_ms", "skew_pct", "slower_pct"))


def data(cache: SessionCache, run: RunState, route: Route) -> dict[str, Any]:
    """
    Return the first screen. In the URL `stage` is of the heatmap; `span` is `recent` (single steps, and
    numbers over those that a live verdict is about) or `run` (all of it), by default the former while the run
    goes on.
    """
    asked = _columns(run, route)
    times = run.times if asked.whole is None else cache.ask(query.Times(run.id, asked.whole))
    columns: Mapping[str, Any] | None = cache.ask(asked)
    found = {"nodes": nodes(run, times), "events": events_of(cache, run)[:_EVENTS]}
    if not times or not columns or not len(columns["first"]):
        return {**found, "tiles": [], "heat": {"ranks": []}, "columns": {}}
    heat = {**_heatmap(run, columns), "stage": asked.stage}
    return {**found, "tiles": tiles(times, columns), "heat": heat, "columns": columns}


def _columns(run: RunState, route: Route) -> query.Columns:
    """Return the question for what is drawn step by step."""
    stage, span = route.get("stage"), route.get("span")
    return query.Columns(
        run.id, stage if stage in STAGES else "total", None if span is None else span == "run"
    )


def tiles(times: Mapping[str, Any], columns: Mapping[str, Any]) -> list[dict[str, Any]]:
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
    return [
        _tile("median", "Step, median", times["median_ms"], "ms", of, columns["step_ms"]),
        _tile("p95", "Step, p95", times["p95_ms"], "ms", of, columns["step_ms"], 0.95),
        _tile("rate", "Steps", times["steps_per_s"], "/s", of, columns["steps_per_s"]),
        _tile("goodput", "Productive time", times["productive_pct"], "%", since, ()),
        _tile("worst", "Worst ÷ median rank", times["worst_over"], "×", worst, columns["worst_over"]),
        _tile("wait", "Waiting, exposed", times["waiting_pct"], "%", of, columns["waiting_pct"]),
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
    share: float = 0.5,
) -> dict[str, Any]:
    """Return a tile; of a long series it shows that quantile of each piece."""
    shown = np.asarray(series, dtype=float)
    if len(shown) > _SPARK:
        long = np.full((-(-len(shown) // _SPARK), _SPARK), np.nan)
        for at, piece in enumerate(np.array_split(shown, _SPARK)):
            long[: len(piece), at] = piece
        shown = quantiles(long, (share,))[0]
    found = {"key": key, "label": label, "value": number(value), "unit": unit, "text": text}
    return {**found, "series": rounded(shown)}


def _heatmap(run: RunState, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the heatmap, with a row for each rank that has not reported yet, unless a row is a node."""
    ranks, labels, by_node = [*columns["ranks"]], [*columns["nodes"]], columns["by"] == "node"
    for rank in missing_of(run.world, ranks, MAX_LINES) if not by_node else ():
        ranks.append(rank)
        labels.append(run.node_of(rank) or _UNPLACED)
    order = sorted(range(len(labels)), key=lambda at: (natural(labels[at]), ranks[at]))
    absent = np.full((len(ranks) - len(columns["ranks"]), len(columns["first"])), MISSING, np.uint8)
    return {
        "by": columns["by"],
        "ranks": [ranks[at] for at in order],
        "nodes": [labels[at] for at in order],
        "first": columns["first"].tolist(),
        "last": columns["last"].tolist(),
        "z": np.concatenate([columns["z"], absent])[order],
    }


def nodes(run: RunState, times: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the nodes of a run: the lost ones first, then the slowest."""
    found = times["nodes"] if times else {}
    listed = {node["label"] for node in run.nodes}
    cards = []
    for node in [*run.nodes, *(_unlisted(run, label) for label in found if label not in listed)]:
        own = found.get(node["label"], _NO_TIMES)
        numbers = {name: number(own[name]) for name in _NO_TIMES if name != "worst_rank"}
        load = _load(run.samples.get(node["node_id"], {}))
        about = {name: node[name] for name in ("node_id", "label", "hostname", "address", "alive", "ranks")}
        cards.append({**about, "worst_rank": own["worst_rank"], **numbers, **load})
    return sorted(cards, key=lambda card: (card["alive"], -(card["median_ms"] or 0), natural(card["label"])))


def _unlisted(run: RunState, label: str) -> dict[str, Any]:
    """Return a node that is known from its ranks alone."""
    ranks = [rank for rank in run.ranks if run.node_of(rank) == label]
    known = {"node_id": label, "label": label, "hostname": label, "address": None}
    return {**known, "alive": True, "ranks": ranks}


def _load(sample: Mapping[str, Any]) -> dict[str, float | None]:
    gpus = sample.get("gpus") or []
    used = [gpu["util_pct"] for gpu in gpus if gpu["util_pct"] is not None]
    return {
        "cpu_pct": sample.get("cpu_pct"),
        "mem_pct": _memory_pct([sample]),
        "gpu_util_pct": sum(used) / len(used) if used else None,
        "gpu_mem_pct": _memory_pct(gpus),
    }


def _memory_pct(of: Sequence[Mapping[str, Any]]) -> float | None:
    pairs = [(each.get("mem_used_bytes"), each.get("mem_total_bytes")) for each in of]
    known = [(used, total) for used, total in pairs if used is not None and total]
    return 100 * sum(used for used, _ in known) / sum(total for _, total in known) if known else None


class _Cell(msgspec.Struct):
    ranks: Annotated[list[int], msgspec.Meta(min_length=1, max_length=2)]
    """The rank of its row, or the first and the last of several."""
    first: int
    last: int
    """Steps."""


def cell(cache: SessionCache, run: RunState, route: Route) -> dict[str, Any]:
    """
    Return in words what one cell of the heatmap stands for: means over its steps, of the worst of its row.
    The key of `route` is a `_Cell`, its query that of the overview.
    """
    asked = msgspec.json.decode(route.key, type=_Cell)
    rank, several = asked.ranks[0], len(asked.ranks) > 1
    if several and (columns := cache.ask(_columns(run, route))):
        rank = _worst(_heatmap(run, columns), rank, asked.ranks[1], asked.first)
    found = cache.ask(query.Cell(run.id, rank, asked.first, asked.last))
    if found is None or found["busy_ms"] is None or np.isnan(found["busy_ms"]):
        return {"text": "no row of this rank here"}
    whose = f"rank {found['rank']}: " if several else ""
    own = f"{whose}busy {text.ms(found['busy_ms'])}, the median rank {text.ms(found['median_ms'])}"
    far = sorted(found["stages"].items(), key=lambda each: -abs(each[1][0] - each[1][1]))[:2]
    stages = [f"{text.words(name)} {text.ms(ms)} (median {text.ms(median)})" for name, (ms, median) in far]
    return {"text": "\n".join([own, *stages])}


def _worst(heat: Mapping[str, Any], first: int, last: int, step: int) -> int:
    """Return the slowest rank of a row of the heatmap (in a large job the first of its node) at a step."""
    if first not in heat["ranks"] or last not in heat["ranks"] or step not in heat["first"]:
        return first
    lines = slice(heat["ranks"].index(first), heat["ranks"].index(last) + 1)
    known = heat["z"][lines, heat["first"].index(step)] + np.uint8(1)  # what is missing is 255, and now 0
    return int(heat["ranks"][lines][known.argmax()])


def layout(view: Mapping[str, Any], route: Route) -> Any:
    """Return the elements of the page."""
    shown = part(html.Div([_tile_box(tile) for tile in view["tiles"]], id="tiles", className="tiles"))
    cards = part(html.Div(_cards(view["nodes"], route), id="node-cards", className="cards"))
    rows = event_table(view["events"][:_LISTED], route, "time, UTC", "severity", "kind", ">rank", "what")
    listed = part(html.Div(rows, id="event-list"))
    every = part(dcc.Link("all", id="events-all", href=route.to("events")))
    exposed, timeline, skew = _charts(view)
    left = [_heatmap_panel(view, route), timeline, panel("Nodes, worst first", cards)]
    right = [exposed, skew, panel("Events", listed, note=every)]
    split = [html.Div(left, className="column"), html.Div(right, className="column")]
    return html.Div([html.H1("Overview", className="unseen"), shown, html.Div(split, className="split")])


def _charts(view: Mapping[str, Any]) -> list[html.Section]:
    revision, columns = str(view["session"]["run"]), view["columns"]
    steps = columns["last"].tolist() if columns else []
    return [
        chart(
            "exposed",
            "Where a step's time goes",
            figures.exposed(steps, by_stage(columns["exposed"]) if columns else {}, revision),
            "Exposed time of each stage by step, stacked",
            note=legend(figures.STAGES),
        ),
        chart(
            "timeline",
            "Step timeline",
            figures.timeline(steps, columns, view["events"]),
            "Busy time of the median and the worst rank by step",
            note=legend({"worst": figures.ORANGE, "median": figures.BLUE, "p10–p90": "#3b82c466"}),
        ),
        chart(
            "skew",
            "Skew",
            figures.lines(
                steps,
                {"ranks": columns.get("global_pct", ()), "nodes": columns.get("node_pct", ())},
                "skew %",
                unit="%",
                colours=(figures.ORANGE, figures.BLUE),
                revision=revision,
            ),
            "How far the worst rank and the slowest node are over the others, by step",
            note=legend({"ranks": figures.ORANGE, "nodes": figures.BLUE}),
            tall="low",
        ),
    ]


def _heatmap_panel(view: Mapping[str, Any], route: Route) -> html.Section:
    """Return the heatmap with its choices and legend, and as a table."""
    heat, hint = view["heat"], None
    span = route.get("span") or ("run" if view["state"] in ("stored", "finished") else "recent")
    figure = figures.blank("No closed step yet.")
    if len(heat["ranks"]):
        drawn = heatmap.rows(heat, view["verdict"] or {}, route)
        figure = heatmap.figure(heat, drawn, f"{view['session']['run']} {span}")
        single = all(row.rank is not None for row in drawn)
        hint = "A click opens the rank; a drag zooms." if single else _BY_NODE
    graph = dcc.Graph(id="heat", figure=figure, config=CLICKED, clear_on_unhover=True)
    colours: dict[str, Any] = {"border_color": "var(--soft)", "background_color": "var(--surface)"}
    label = aria(label="Busy time of each rank by step, over the median; as a table below")
    return panel(
        "Busy time by rank, against the median of the step",
        html.Div(
            [graph, dcc.Tooltip(id="heat-tip", className="tip", **colours)],
            className="graph heat-box",
            role="img",
            **label,
        ),
        html.Div(_scale(hint), className="heat-legend"),
        note=[
            _choice("span", "Steps of the heatmap", _SPANS, span, route),
            _choice("stage", "Stage of the heatmap", _STAGES, route.get("stage") or "total", route),
        ],
    )


def _scale(hint: str | None) -> list[Any]:
    return [
        html.Span("0.5×"),
        html.I(className="scale"),
        html.Span("1.5× the median"),
        html.Span([html.I(className="missing"), "missing"], className="key"),
        part(html.Span(hint, id="heat-hint", className="key")),
        html.Button("Whole heatmap", id="heat-whole", type="button", hidden=True),
        html.Details([html.Summary("As a table"), Content("heat-table")], id="heat-details"),
    ]


def _choice(name: str, label: str, values: Mapping[str, str | None], chosen: str, route: Route) -> Content:
    """Return links to the values of one part of the selection."""
    links = [
        link(text.words(shown), route.here(**{name: value}), "segment", on=chosen in (shown, value))
        for shown, value in values.items()
    ]
    return part(html.Nav(links, id=f"heat-{name}", className="segments", **aria(label=label)))


def _tile_box(tile: Mapping[str, Any]) -> html.Div:
    value = [html.Span(text.number(tile["value"]), className="value")]
    if tile["value"] is not None:
        value.append(html.Span(tile["unit"], className="unit"))
    known = [v for v in tile["series"] if v is not None]
    first, last = (text.number(known[at]) if known else "" for at in (0, -1))
    alt = f"{tile['label']}: {first} to {last} {tile['unit']}" if known else ""
    label, under = html.Div(tile["label"], className="label"), html.Div(tile["text"], className="text")
    return html.Div([label, html.Div(value), spark(tile["series"], alt), under], className="tile")


def _cards(nodes: list[Mapping[str, Any]], route: Route) -> list[Any]:
    """Return a card for each node, of very many the worst and the names of the others."""
    shown = nodes if len(nodes) <= _CARDS else nodes[:_FEW_CARDS]
    cards: list[Any] = [_card(node, route) for node in shown]
    if rest := nodes[len(shown) :]:
        links = [node_link(node["node_id"], node["label"], route) for node in rest]
        more = [html.Summary(text.count(len(rest), "more node")), html.Div(links, className="links")]
        cards.append(html.Details(more, className="rest"))
    return cards or [html.P("No node yet.", className="empty")]


def _card(node: Mapping[str, Any], route: Route) -> dcc.Link:
    over, alive = node["slower_pct"], node["alive"]
    slower = f"{text.percent(over, sign=True)} over the fastest" if (over or 0) >= 0.05 else "the fastest"
    size = html.Span(
        text.count(len(node["ranks"]), "rank") if alive else "lost", className="" if alive else "gone-word"
    )
    median = [
        html.Span(text.number(node["median_ms"]), className="value"),
        html.Span("ms median", className="unit"),
        html.Span("" if over is None else slower, className="over"),
    ]
    worst = [
        html.Span(f"worst rank {node['worst_rank']}, {text.ms(node['worst_ms'])}"),
        html.Span(f"skew {text.percent(node['skew_pct'])}"),
    ]
    used = (("CPU", "cpu_pct"), ("RAM", "mem_pct"), ("GPU", "gpu_util_pct"), ("VRAM", "gpu_mem_pct"))
    meters = [meter(name, node[key]) for name, key in used if node[key] is not None]
    body = [
        html.Div([html.Strong(node["label"]), size], className="card-head"),
        html.Div(median, className="card-value"),
        html.Div(worst if node["worst_rank"] is not None else None, className="text"),
        html.Div(meters, className="meters"),
    ]
    return dcc.Link(body, href=route.to("node", node["node_id"]), className="card" if alive else "card gone")
