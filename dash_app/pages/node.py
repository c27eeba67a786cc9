"""One node: its ranks, its machine, its GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dash import dcc, html

from traceml_ray import text
from traceml_ray.analysis.quantities import GPU, NODE, Quantity, charts

from .. import figures
from ..place import Place
from . import bits

_TABS = 24
_NODE = {f"node-{each[0].name}": (title, each) for title, each in sorted(charts(NODE).items())}
_GPU = {f"gpu-{each[0].name}": (title, each[0]) for title, each in charts(GPU).items()}


def layout(view: Mapping[str, Any]) -> Any:
    """Return the elements of the page; panels of what the node does not have are absent."""
    if view["node"] is None:
        return html.Div(html.H1(id="node-title"))
    machine = [
        bits.chart(id, title, f"{title} over time", note=_key([q.line for q in each]), tall="low")
        for id, (title, each) in _NODE.items()
    ]
    key = _key([str(gpu["index"]) for gpu in view["gpus"]])
    gpus = [
        bits.chart(id, title, f"{title} of each GPU over time", note=key, tall="low")
        for id, (title, each) in _GPU.items()
        if any(gpu.get(each.name) for gpu in view["gpus"])
    ]
    body: list[Any] = [
        html.H1(id="node-title"),
        html.Nav(id="node-tabs", className="chips", **bits.aria(label="Nodes")),
        html.Div(id="node-facts"),
        bits.panel("Ranks of this node", html.Div(id="node-ranks")),
        html.Div(machine, className="grid"),
    ]
    if view["gpus"]:
        body += [
            bits.panel("GPUs, newest sample", html.Div(id="node-gpus")),
            html.Div(gpus, className="grid"),
        ]
    return html.Div(body)


def parts(view: Mapping[str, Any], place: Place) -> dict[str, dict[str, Any]]:
    """Return the content of the elements, by id."""
    node = view["node"]
    if node is None:
        return {"node-title": {"children": f"There is no node {place.key} in this run."}}
    made: dict[str, dict[str, Any]] = {
        "node-title": {"children": f"Node {node['label']}"},
        "node-tabs": {"children": [_tab(other, place) for other in _around(view["nodes"], node)]},
        "node-facts": {"children": bits.facts(_facts(node, view["samples"]))},
        "node-ranks": {"children": _ranks(view["ranks"], place, (view["verdict"] or {}).get("ranks") or ())},
    }
    samples = view["samples"]
    for id, (_, each) in _NODE.items():
        made[id] = _drawn(samples.get("t_ns") or [], {q.line: (q, samples.get(q.name)) for q in each})
    if view["gpus"]:
        made["node-gpus"] = {"children": _gpus(view["gpus"])}
        x = max((gpu["t_ns"] for gpu in view["gpus"]), key=len)
        for id, (_, quantity) in _GPU.items():
            lines = {f"GPU {gpu['index']}": (quantity, gpu.get(quantity.name)) for gpu in view["gpus"]}
            if any(values for _, values in lines.values()):
                made[id] = _drawn(x, lines)
    return made


def _key(names: Iterable[str]) -> list[Any]:
    """Return the legend of lines, where there are several."""
    found = dict(zip(names, figures.LINES, strict=False))
    return bits.legend(found) if len(found) > 1 else []


def _around(nodes: Sequence[Mapping[str, Any]], node: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the nodes there is a tab for: of very many, the neighbours."""
    at = next(i for i, other in enumerate(nodes) if other["key"] == node["key"])
    return nodes[max(0, at - _TABS // 2) :][:_TABS]


def _tab(node: Mapping[str, Any], place: Place) -> dcc.Link:
    on = place.key in (node["key"], node["label"])
    return dcc.Link(node["label"], href=place.to("node", node["key"]), className="chip on" if on else "chip")


def _facts(node: Mapping[str, Any], samples: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    return {
        "state": "alive" if node["alive"] else "lost",
        "host": node["hostname"],
        "address": node["address"],
        "median busy": text.ms(node["median_ms"]),
        "over the fastest": text.percent(node["slower_pct"], sign=True),
        "worst rank": text.NA
        if node["worst_rank"] is None
        else f"{node['worst_rank']} ({text.ms(node['worst_ms'])})",
        "skew": text.percent(node["skew_pct"]),
        "memory": _memory(samples),
        "load": text.number(_last(samples.get("load1"))),
    }


def _ranks(ranks: Sequence[Mapping[str, Any]], place: Place, named: Sequence[int]) -> Any:
    known = [value for rank in ranks for value in rank["busy"] if value is not None]
    between = (min(known), max(known)) if known else None
    columns: bits.Columns = {
        ">rank": lambda rank: bits.rank_link(rank["rank"], place, ""),
        ">local": lambda rank: text.plain(rank["local_rank"]),
        ">GPU": lambda rank: text.plain(rank["gpu"]),
        ">median busy": lambda rank: text.ms(rank["median_ms"]),
        "busy time by step": lambda rank: bits.spark(
            rank["busy"], f"busy time of rank {rank['rank']}", between
        ),
        ">last step": lambda rank: text.plain(rank["last_step"]),
        "now in": lambda rank: text.words(rank["open_stage"] or text.NA),
        ">memory": lambda rank: text.size(rank["rss_bytes"]),
        "state": lambda rank: (
            html.Span("▲ named by the verdict", className="sev warning")
            if rank["rank"] in named
            else text.words(rank["state"] or text.NA)
        ),
    }
    return bits.table(
        columns, ranks, empty="No rank has reported from this node.", label="Ranks of this node"
    )


def _drawn(x: Sequence[int], lines: Mapping[str, tuple[Quantity, Any]]) -> dict[str, Any]:
    """Return the figure of lines of one unit; those without any value are left out."""
    unit = next(iter(lines.values()))[0].unit
    series = {line: bits.scaled(values, unit.scale) for line, (_, values) in lines.items() if values}
    axis, top = unit.axis, 102 if unit.axis == "%" else None
    return {"figure": figures.lines(x, series, axis, unit=axis, kind="time", top=top, dashed="installed")}


def _gpus(gpus: Sequence[Mapping[str, Any]]) -> Any:
    columns: bits.Columns = {
        ">GPU": lambda gpu: str(gpu["index"]),
        "model": lambda gpu: text.plain(gpu["name"]),
        ">utilisation": lambda gpu: text.percent(_last(gpu.get("util_pct"))),
        ">memory": _memory,
        ">power": lambda gpu: f"{text.number(_last(gpu.get('power_w')), 0)} of {_watts(gpu)}",
        ">temperature": lambda gpu: text.unit(_last(gpu.get("temperature_c")), "°C", 0),
        ">SM clock": lambda gpu: text.unit(_last(gpu.get("sm_mhz")), "MHz", 0),
        ">PCIe out, in": lambda gpu: _both(gpu, "pcie"),
        ">NVLink out, in": lambda gpu: _both(gpu, "nvlink"),
        "throttled by": lambda gpu: _listed(gpu.get("throttle")),
        ">ECC errors": lambda gpu: text.plain(_last(gpu.get("ecc"))),
        "XID errors": lambda gpu: _critical(gpu["xid"]),
    }
    return bits.table(columns, gpus, label="GPUs of this node")


def _memory(of: Mapping[str, Any]) -> str:
    return " of ".join(text.size(_last(of.get(name))) for name in ("mem_used_bytes", "mem_total_bytes"))


def _watts(gpu: Mapping[str, Any]) -> str:
    return text.unit(_last(gpu.get("power_limit_w")), "W", 0)


def _both(gpu: Mapping[str, Any], link: str) -> str:
    rates = [_last(gpu.get(f"{link}_{way}_bps")) for way in ("tx", "rx")]
    return text.NA if rates == [None, None] else ", ".join(text.size(rate, "/s") for rate in rates)


def _critical(xids: Sequence[int] | None) -> Any:
    if not xids:
        return text.NA if xids is None else "none"
    numbers = ", ".join(map(str, dict.fromkeys(xids)))
    return html.Span(["◆ ", numbers], className="sev critical")


def _listed(reasons: Sequence[str] | None) -> str:
    return text.NA if reasons is None else ", ".join(map(text.words, reasons)) or "nothing"


def _last(series: Any) -> Any:
    """Return the newest value of a series, or a value that is none."""
    return (series[-1] if series else None) if isinstance(series, list) else series
