"""One node: its ranks, its machine, its GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dash import dcc, html

from traceml_ray import text

from .. import figures
from ..place import Place
from . import bits

_GIGA = 1e9
_TABS = 24
_MACHINE: dict[str, tuple[str, str, float, dict[str, str]]] = {
    "cpu": ("CPU", "%", 1.0, {"cpu_pct": "used"}),
    "memory": ("Memory", "GB", _GIGA, {"mem_used_bytes": "used", "mem_total_bytes": "there is"}),
    "disk": ("Disk", "MB/s", 1e6, {"disk_read_bps": "read", "disk_write_bps": "written"}),
    "network": ("Network", "MB/s", 1e6, {"net_rx_bps": "received", "net_tx_bps": "sent"}),
}
_GPU = {
    "util_pct": ("GPU utilisation", "%", 1.0),
    "mem_used_bytes": ("GPU memory", "GB", _GIGA),
    "power_w": ("GPU power", "W", 1.0),
    "temp_c": ("GPU temperature", "°C", 1.0),
    "sm_mhz": ("GPU clock", "MHz", 1.0),
    "pcie_tx_bps": ("PCIe sent", "MB/s", 1e6),
    "pcie_rx_bps": ("PCIe received", "MB/s", 1e6),
    "nvlink_tx_bps": ("NVLink sent", "MB/s", 1e6),
    "nvlink_rx_bps": ("NVLink received", "MB/s", 1e6),
}


def layout(view: Mapping[str, Any]) -> Any:
    """Return the elements of the page; panels of what the node does not have are absent."""
    if view["node"] is None:
        return html.Div(html.H1(id="node-title"))
    machine = [
        bits.chart(f"node-{name}", title, f"{title} over time, {unit}", note=_key(names.values()), tall="low")
        for name, (title, unit, _, names) in _MACHINE.items()
    ]
    drawn = [name for name in _GPU if any(gpu.get(name) for gpu in view["gpus"])]
    key = _key([str(gpu["index"]) for gpu in view["gpus"]])
    gpus = [
        bits.chart(
            f"gpu-{name}", _GPU[name][0], f"{_GPU[name][0]} of each GPU over time", note=key, tall="low"
        )
        for name in drawn
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
    """Return what stands in them."""
    node = view["node"]
    if node is None:
        return {"node-title": {"children": f"There is no node {place.key} in this run."}}
    made: dict[str, dict[str, Any]] = {
        "node-title": {"children": f"Node {node['label']}"},
        "node-tabs": {"children": [_tab(other, place) for other in _around(view["nodes"], node)]},
        "node-facts": {"children": bits.facts(_facts(node, view["samples"]))},
        "node-ranks": {"children": _ranks(view["ranks"], place, (view["verdict"] or {}).get("ranks") or ())},
    }
    made |= {f"node-{name}": {"figure": _machine(name, view["samples"])} for name in _MACHINE}
    if view["gpus"]:
        made["node-gpus"] = {"children": _gpus(view["gpus"])}
        for name, (_, unit, scale) in _GPU.items():
            series = {
                f"GPU {gpu['index']}": _scaled(gpu.get(name), scale) for gpu in view["gpus"] if gpu.get(name)
            }
            if series:
                x = max((gpu["t_ns"] for gpu in view["gpus"]), key=len)
                figure = figures.lines(
                    x, series, unit, unit=unit, kind="time", top=102 if unit == "%" else None
                )
                made[f"gpu-{name}"] = {"figure": figure}
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
    rows = [
        (
            bits.rank_link(rank["rank"], place, ""),
            text.plain(rank["local_rank"]),
            text.plain(rank["gpu"]),
            text.ms(rank["median_ms"]),
            bits.spark(rank["busy"], f"busy time of rank {rank['rank']}", between),
            text.plain(rank["last_step"]),
            text.words(rank["open_stage"] or text.NA),
            text.size(rank["rss_bytes"]),
            html.Span("▲ named by the verdict", className="sev warning")
            if rank["rank"] in named
            else text.words(rank["state"] or text.NA),
        )
        for rank in ranks
    ]
    headers = (
        ">rank",
        ">local",
        ">GPU",
        ">median busy",
        "busy time by step",
        ">last step",
        "now in",
        ">memory",
        "state",
    )
    return bits.table(headers, rows, empty="No rank has reported from this node.", label="Ranks of this node")


def _machine(name: str, samples: Mapping[str, Any]) -> figures.Figure:
    _, unit, scale, names = _MACHINE[name]
    series = {told: _scaled(samples.get(of), scale) for of, told in names.items() if samples.get(of)}
    top = 102 if unit == "%" else None
    return figures.lines(
        samples.get("t_ns") or [], series, unit, unit=unit, kind="time", top=top, dashed="there is"
    )


def _gpus(gpus: Sequence[Mapping[str, Any]]) -> Any:
    rows = [
        (
            str(gpu["index"]),
            text.plain(gpu["name"]),
            text.percent(_last(gpu.get("util_pct"))),
            _memory(gpu),
            f"{text.number(_last(gpu.get('power_w')), 0)} of {_watts(gpu)}",
            text.unit(_last(gpu.get("temp_c")), "°C", 0),
            text.unit(_last(gpu.get("sm_mhz")), "MHz", 0),
            _both(gpu, "pcie"),
            _both(gpu, "nvlink"),
            _listed(gpu.get("throttle")),
            text.plain(_last(gpu.get("ecc"))),
            _critical(gpu["xid"]),
        )
        for gpu in gpus
    ]
    headers = (
        ">GPU",
        "model",
        ">utilisation",
        ">memory",
        ">power",
        ">temperature",
        ">SM clock",
        ">PCIe out, in",
        ">NVLink out, in",
        "throttled by",
        ">ECC errors",
        "XID errors",
    )
    return bits.table(headers, rows, label="GPUs of this node")


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
    told = ", ".join(map(str, dict.fromkeys(xids)))
    return html.Span(["◆ ", told], className="sev critical")


def _listed(found: Any) -> str:
    newest = _last(found) if isinstance(found, list) and found and not isinstance(found[-1], str) else found
    return text.NA if newest is None else ", ".join(text.words(reason) for reason in newest) or "nothing"


def _last(series: Any) -> Any:
    """Return the newest value of a series, or a value that is none."""
    return (series[-1] if series else None) if isinstance(series, list) else series


def _scaled(series: Sequence[float | None] | None, scale: float) -> list[float | None]:
    return [None if value is None else value / scale for value in series or ()]
