"""One node: its ranks, its machine, its GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dash import html

from traceml_ray import text
from traceml_ray.document.model import Table
from traceml_ray.identity import RankIdentity
from traceml_ray.signals.memory.records import MemorySample
from traceml_ray.signals.nodes.quantities import GPU, NODE, Quantity, charts, series
from traceml_ray.store import query
from traceml_ray.store.step_shapes import EventRow
from traceml_ray.text import natural
from traceml_ray.views import figures
from traceml_ray.views.ranks import NAMED, nodes, position
from traceml_ray.views.run_state import RunState
from traceml_ray.views.tables import GPUS, last, node_rank_columns, used_of_all
from traceml_ray.views.values import as_dict, by_rank, number, rounded

from .. import axis
from ..charts import Chart, chart
from ..elements import aria, died, facts, link, panel, part, table, trail
from ..route import Route
from ..session_cache import SessionCache

_SPARK = 120
SAMPLES = 170
"""Largest number of samples drawn in a chart."""
HELD = 5
"""
Samples over which a counter of a device is held: NVML is asked for it in every fifth sample only. So many
more are asked for than drawn, as a rate needs those before: a chart that goes on has new points, and is else
as it was.
"""
_DEVICES = 16
"""Largest number of a process's devices whose newest memory samples are searched."""
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
"""The chart that shows an anomaly, by its kind; by default its own, of a device the table."""


def data(cache: SessionCache, run: RunState, route: Route) -> dict[str, Any]:
    """Return the page of a node, by id or label."""
    cards = nodes(run, run.times)
    card = next((card for card in cards if route.key in (card["node_id"], card["label"])), None)
    by_name = sorted(cards, key=lambda card: natural(card["label"]))
    if card is None:
        return {"node": None, "nodes": by_name}
    spine, node = axis.data(cache, run, route), (card["node_id"],)
    samples = drawn = samples_of(cache, query.GetNodeSamples(node, SAMPLES + HELD))
    if between := axis.time_of(spine):
        drawn = samples_of(cache, query.GetNodeSamples(node, SAMPLES, *between))
    return {
        "node": card,
        "nodes": by_name,
        "ranks": _ranks_data(cache, run, card, samples),
        "axis": spine,
        "samples": timed(samples, NODE),
        "gpus": _gpus_data(card["node_id"], samples, run.events),
        "drawn": timed(drawn, NODE),
        "drawn_gpus": _gpus_data(card["node_id"], drawn, ()),
    }


def _ranks_data(
    cache: SessionCache, run: RunState, card: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    by_process = {run.ranks[rank].id: rank for rank in card["ranks"] if rank in run.ranks}
    latest = cache.ask(query.GetProcessSamples(tuple(by_process), last=1)) or []
    memory = {by_process[process]: sample.rss_bytes for process, sample in latest}
    devices = _device_memory(cache, by_process)
    ranks = sorted(by_process.values())
    median, idle = (by_rank(run.times, name) for name in ("busy_ms", "gpu_idle_pct"))
    busy = by_rank(cache.ask(query.GetBusy(run.id, tuple(ranks), _SPARK)), "busy_ms")
    dead = {death.rank: death for death in cache.deaths(run)}
    return [
        {
            **position(run, rank),
            "gpu": gpu_of(run.ranks[rank].identity, samples),
            "median_ms": number(median.get(rank)),
            "gpu_idle_pct": number(idle.get(rank)),
            "busy": rounded(busy.get(rank, ())),
            "rss_bytes": memory.get(rank),
            "device_memory": devices.get(rank),
            "death": dead.get(rank),
        }
        for rank in ranks
    ]


def _device_memory(cache: SessionCache, ranks: Mapping[int, int]) -> dict[int, list[int]]:
    """Return by rank what torch has allocated and reserved last, on all devices together."""
    samples_of_rank: dict[int, list[MemorySample]] = {}
    for process, sample in cache.ask(query.GetMemorySamples(tuple(ranks), last=_DEVICES)) or ():
        if sample.allocated_bytes is not None and sample.reserved_bytes is not None:
            samples_of_rank.setdefault(ranks[process], []).append(sample)
    newest = {
        rank: [sample for sample in samples if sample.t_ns == samples[-1].t_ns]
        for rank, samples in samples_of_rank.items()
    }
    both = "allocated_bytes", "reserved_bytes"
    return {
        rank: [sum(getattr(sample, name) for sample in samples) for name in both]
        for rank, samples in newest.items()
    }


def gpu_of(who: RankIdentity | None, samples: Sequence[Mapping[str, Any]]) -> int | None:
    """
    Return the device on which a process was seen last; not every sample has the processes. `samples` are of
    its node.
    """
    pid = who.pid if who else -1
    for sample in reversed(samples):
        for gpu in sample["gpus"] or ():
            if any(pid in (process["pid"], *process["parents"]) for process in gpu["processes"] or ()):
                return int(gpu["index"])
    return None


def samples_of(
    cache: SessionCache, request: query.GetNodeSamples | query.GetProcessSamples | query.GetMemorySamples
) -> list[dict[str, Any]]:
    """Return the samples of one node or process."""
    answers: Sequence[tuple[Any, Any]] = cache.ask(request) or ()
    return [as_dict(sample) for _, sample in answers]


def timed(samples: Sequence[Mapping[str, Any]], quantities: Sequence[Quantity]) -> dict[str, Any]:
    """Return the series of quantities with their times, of the newest SAMPLES samples."""
    return _newest({"t_ns": [sample["t_ns"] for sample in samples], **series(samples, quantities)})


def _newest(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values and values[-SAMPLES:] for name, values in columns.items()}


def _gpus_data(
    node: str, samples: Sequence[Mapping[str, Any]], events: Iterable[EventRow]
) -> list[dict[str, Any]]:
    """Return the series of each device, and its critical errors, the newest first (None: not known)."""
    by_device: dict[int, list[dict[str, Any]]] = {}
    for sample in samples:
        for gpu in sample["gpus"] or ():
            by_device.setdefault(gpu["index"], []).append({**gpu, "t_ns": sample["t_ns"]})
    critical = [event.data for event in events if event.kind == "xid" and event.node_id == node]
    gpus = []
    for index, gpu_samples in sorted(by_device.items()):
        columns = series(gpu_samples, GPU)
        columns |= {quantity.name: _held(columns[quantity.name]) for quantity in GPU if quantity.counter}
        columns["ecc"] = _held([gpu["ecc_uncorrected"] for gpu in gpu_samples])
        columns["t_ns"] = [gpu["t_ns"] for gpu in gpu_samples]
        xids = [
            xid for event in reversed(critical) if event.get("gpu") == index and (xid := event.get("xid"))
        ]
        gpus.append(
            {
                **{name: gpu_samples[-1][name] for name in ("index", "name", "throttle")},
                **_newest(columns),
                "xid": xids or (None if gpu_samples[-1]["xid"] is None else []),
            }
        )
    return gpus


def _held(values: Sequence[Any] | None) -> list[Any] | None:
    """Fill the gaps between the samples that have a value."""
    last, age, filled = None, 0, []
    for value in values or ():
        last, age = (last, age + 1) if value is None else (value, 0)
        filled.append(last if age < HELD else None)
    return filled if any(value is not None for value in filled) else None


def layout(view: Mapping[str, Any], route: Route) -> Any:
    """Return the elements of the page; panels of what was not measured are absent."""
    node = view["node"]
    way = trail(route, (node["label"] if node else route.key, None))
    tabs = part(
        html.Nav(_tabs(view["nodes"], node, route), id="node-tabs", className="chips", **aria(label="Nodes"))
    )
    if node is None:
        title = f"There is no node {route.key} in this run."
        return html.Div([way, part(html.H1(title, id="node-title")), tabs])
    samples, gpus, frame = view["samples"], view["gpus"], axis.clock(view["axis"])
    named = (view["verdict"] or {}).get("ranks") or ()
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


def evidence_link(anomaly: Mapping[str, Any], route: Route) -> html.A:
    """Return a link to the chart that shows an anomaly of a machine."""
    kind, device = anomaly["kind"], anomaly["device"]
    anchor = f"node-{kind}" if device is None else "node-gpus"
    href = f"{route.to('node', anomaly['node'])}#{_SEEN_IN.get(kind, anchor)}"
    return link(anomaly["text"], href, "chip")


def quantity_charts(
    prefix: str,
    quantities: Sequence[Quantity],
    samples: Mapping[str, Any],
    route: Route,
    revision: str = "",
    frame: Mapping[str, Any] | None = None,
) -> list[Chart]:
    """Return the charts of quantities of a node or process; those of what was not measured are absent."""
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
    """Return a link to each node: of very many, to the neighbours."""
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
    """Return the state of a rank; of one that died also how, when and where."""
    if rank["death"]:
        return html.Span(["◆ ", *died(rank["death"])], className="sev critical")
    return (
        html.Span(f"▲ {NAMED}", className="sev warning")
        if rank["rank"] in named
        else text.words(rank["state"])
    )
