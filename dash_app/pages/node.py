"""One node: its ranks, its machine, its GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dash import html

from traceml_ray import text
from traceml_ray.analysis.anomalies import Anomaly
from traceml_ray.document.model import Table
from traceml_ray.signals.nodes.quantities import GPU, NODE, Quantity, charts
from traceml_ray.store import query
from traceml_ray.text import natural
from traceml_ray.views import figures, machines
from traceml_ray.views.ranks import NAMED, nodes
from traceml_ray.views.run_state import RunState
from traceml_ray.views.tables import GPUS, last, node_rank_columns, used_of_all

from .. import axis
from ..charts import Chart, chart
from ..elements import aria, died, facts, link, panel, part, table, trail
from ..route import Route
from ..session_cache import SessionCache

_TABS = 24
_SEEN_IN = {
    "thermal": "gpu-temperature_c",
    "slowdown": "gpu-sm_mhz",
    "clock_lack": "gpu-sm_mhz",
    "power_cap": "gpu-power_w",
    "power": "gpu-power_w",
    "mem_used": "node-mem_used_bytes",
    "swap_in_bps": "node-mem_used_bytes",
    "cpu_throttled": "node-cpu_pct",
    "load": "node-cpu_pct",
    "disk_bps": "node-disk_read_bps",
    "net_bps": "node-net_rx_bps",
}
"""
The chart that shows an anomaly, by its kind. By default the chart of that kind; for a device, the
table.
"""


def data(cache: SessionCache, run: RunState, route: Route) -> dict[str, Any]:
    """
    Return the data of the node whose id or label is the key of `route`. If there is no such node, `node` is
    None.
    """
    cards = nodes(run, run.times)
    card = next((card for card in cards if route.key in (card["node_id"], card["label"])), None)
    by_name = sorted(cards, key=lambda card: natural(card["label"]))
    if card is None:
        return {"node": None, "nodes": by_name}
    spine, node = axis.data(cache, run, route), (card["node_id"],)
    samples = drawn = machines.samples_of(cache, query.GetNodeSamples(node, machines.SAMPLES + machines.HELD))
    if between := axis.time_of(spine):
        drawn = machines.samples_of(cache, query.GetNodeSamples(node, machines.SAMPLES, *between))
    return {
        "node": card,
        "nodes": by_name,
        "ranks": machines.node_rank_rows(cache, run, card, samples),
        "axis": spine,
        "samples": machines.timed_series(samples, NODE),
        "gpus": machines.gpu_series(card["node_id"], samples, run.events),
        "drawn": machines.timed_series(drawn, NODE),
        "drawn_gpus": machines.gpu_series(card["node_id"], drawn, ()),
    }


def layout(view: Mapping[str, Any], route: Route) -> Any:
    """Return the elements of the page. Panels of quantities that were not measured are left out."""
    node = view["node"]
    way = trail(route, (node["label"] if node else route.key, None))
    tabs = part(
        html.Nav(_tabs(view["nodes"], node, route), id="node-tabs", className="chips", **aria(label="Nodes"))
    )
    if node is None:
        title = f"There is no node {route.key} in this run."
        return html.Div([way, part(html.H1(title, id="node-title")), tabs])
    samples, gpus, frame = view["samples"], view["gpus"], axis.clock(view["axis"])
    named = view["verdict"].ranks if view["verdict"] else ()
    none = "No rank has reported from this node."
    block = Table("Ranks of this node", node_rank_columns(named), view["ranks"], empty=none)
    ranks = table(block, route, cells={"state": lambda rank: _state(rank, named)})
    body: list[Any] = [
        way,
        part(html.H1(f"Node {node['label']}", id="node-title")),
        tabs,
        axis.panel(view, route),
        facts("node-facts", _facts(node, samples)),
        panel("Ranks of this node", part(html.Div(ranks, id="node-ranks"))),
        html.Div(quantity_charts("node", NODE, view["drawn"], route, frame=frame), className="grid"),
    ]
    if gpus:
        body += [
            panel(
                "GPUs, newest sample",
                part(html.Div(table(Table("GPUs of this node", GPUS, gpus), route), id="node-gpus")),
            ),
            html.Div(_gpu_charts(view["drawn_gpus"], route, frame), className="grid"),
        ]
    return html.Div(body)


def evidence_link(anomaly: Anomaly, route: Route) -> html.A:
    """Return a link to the chart that shows an anomaly of a machine, with its sentence."""
    kind, device = anomaly.kind, anomaly.device
    anchor = f"node-{kind}" if device is None else "node-gpus"
    href = f"{route.to('node', anomaly.node)}#{_SEEN_IN.get(kind, anchor)}"
    return link(anomaly.text, href, "chip")


def quantity_charts(
    prefix: str,
    quantities: Sequence[Quantity],
    samples: Mapping[str, Any],
    route: Route,
    revision: str = "",
    frame: Mapping[str, Any] | None = None,
) -> list[Chart]:
    """
    Return the charts of quantities of a node or process. Quantities that were not measured are
    left out.
    """
    return [
        _chart(
            f"{prefix}-{measured[0].name}",
            title,
            samples["t_ns"],
            {quantity.line or title: (quantity, samples[quantity.name]) for quantity in measured},
            route,
            revision,
            frame,
        )
        for title, measured in sorted(charts(quantities).items())
        if any(value is not None for quantity in measured for value in samples[quantity.name] or ())
    ]


def _gpu_charts(gpus: Sequence[Mapping[str, Any]], route: Route, frame: Mapping[str, Any]) -> list[Chart]:
    t_ns = max((gpu["t_ns"] for gpu in gpus), key=len, default=())
    return [
        _chart(
            f"gpu-{quantity.name}",
            title,
            t_ns,
            {f"GPU {gpu['index']}": (quantity, gpu[quantity.name]) for gpu in gpus},
            route,
            frame=frame,
        )
        for title, (quantity, *_) in charts(GPU).items()
        if any(gpu[quantity.name] for gpu in gpus)
    ]


def _chart(
    id: str,
    title: str,
    t_ns: Sequence[int],
    lines: Mapping[str, tuple[Quantity, Any]],
    route: Route,
    revision: str = "",
    frame: Mapping[str, Any] | None = None,
) -> Chart:
    series = dict(zip(lines, figures.LINES, strict=False)) if len(lines) > 1 else None
    figure = figures.quantities(t_ns, lines, revision, frame)
    return chart(id, title, figure, f"{title} over time", route, series=series, tall="low")


def _tabs(nodes: Sequence[Mapping[str, Any]], node: Mapping[str, Any] | None, route: Route) -> list[html.A]:
    """Return a link to each node. If there are very many nodes, only to the neighbours."""
    position = nodes.index(node) if node else 0
    around = nodes[max(0, position - _TABS // 2) :][:_TABS]
    return [
        link(other["label"], route.to("node", other["node_id"]), "chip", on=other is node) for other in around
    ]


def _facts(node: Mapping[str, Any], samples: Mapping[str, Any]) -> dict[str, Any]:
    worst = node["worst_rank"]
    return {
        "state": "alive" if node["alive"] else "lost",
        "host": node["hostname"],
        "address": node["address"],
        "median busy": text.ms(node["median_ms"]),
        "over the fastest": text.percent(node["slower_pct"], sign=True),
        "worst rank": None if worst is None else f"{worst} ({text.ms(node['worst_ms'])})",
        "skew": text.percent(node["skew_pct"]),
        "memory": used_of_all(samples),
        "load": text.number(last(samples["load1"])),
    }


def _state(rank: Mapping[str, Any], named: Sequence[int]) -> Any:
    """Return the state of a rank. For a dead rank, also how, when and where it died."""
    if rank["death"]:
        return html.Span(["◆ ", *died(rank["death"])], className="sev critical")
    return (
        html.Span(f"▲ {NAMED}", className="sev warning")
        if rank["rank"] in named
        else text.words(rank["state"])
    )
