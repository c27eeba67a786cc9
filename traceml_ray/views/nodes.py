"""The nodes of a run: the times of their ranks, and how busy and how full they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .run_state import RunState
from .values import natural, number

_NO_TIMES: dict[str, Any] = dict.fromkeys(("median_ms", "worst_rank", "worst_ms", "skew_pct", "slower_pct"))


def nodes(run: RunState, times: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the nodes of a run: the lost ones first, then those that the verdict names, then by name."""
    times_by_node = times["nodes"] if times else {}
    listed = {node["label"] for node in run.nodes}
    cards = []
    for node in [*run.nodes, *(_unlisted(run, label) for label in times_by_node if label not in listed)]:
        node_times = times_by_node.get(node["label"], _NO_TIMES)
        shown = {name: number(node_times[name]) for name in _NO_TIMES if name != "worst_rank"}
        load = _load(run.samples.get(node["node_id"], {}))
        about = {name: node[name] for name in ("node_id", "label", "hostname", "address", "alive", "ranks")}
        about["named"] = node["label"] in run.named["nodes"]
        cards.append({**about, "worst_rank": node_times["worst_rank"], **shown, **load})
    return sorted(cards, key=lambda card: (card["alive"], not card["named"], natural(card["label"])))


def _unlisted(run: RunState, label: str) -> dict[str, Any]:
    """Return a node that is known from its ranks alone."""
    ranks = [rank for rank in run.ranks if run.node_of(rank) == label]
    about = {"node_id": label, "label": label, "hostname": label, "address": None}
    return {**about, "alive": True, "ranks": ranks}


def _load(sample: Mapping[str, Any]) -> dict[str, float | None]:
    """Return how busy and how full a node and its GPUs are; of these the hottest, and the power of all."""
    gpus = sample.get("gpus") or []
    used, heat, power = (_known(gpus, name) for name in ("util_pct", "temperature_c", "power_w"))
    return {
        "cpu_pct": sample.get("cpu_pct"),
        "mem_pct": _memory_pct([sample]),
        "gpus": len(gpus) if sample.get("gpus") is not None else None,
        "gpu_util_pct": sum(used) / len(used) if used else None,
        "gpu_mem_pct": _memory_pct(gpus),
        "gpu_temperature_c": max(heat, default=None),
        "gpu_power_w": sum(power) if power else None,
    }


def _known(gpus: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [gpu[name] for gpu in gpus if gpu[name] is not None]


def _memory_pct(samples: Sequence[Mapping[str, Any]]) -> float | None:
    pairs = [(sample.get("mem_used_bytes"), sample.get("mem_total_bytes")) for sample in samples]
    measured = [(used, total) for used, total in pairs if used is not None and total]
    return 100 * sum(used for used, _ in measured) / sum(total for _, total in measured) if measured else None


def worst_first(node: Mapping[str, Any]) -> tuple[bool, bool, float]:
    """Return what puts nodes in order: lost ones, those that the verdict names, then the slowest."""
    return bool(node["alive"]), not node["named"], -(node["slower_pct"] or 0.0)


def evidence_of(verdict: Mapping[str, Any] | None) -> dict[str, list[str]]:
    """Return what was anomalous by node, beside a verdict."""
    sentences_by_node: dict[str, list[str]] = {}
    for anomaly in (verdict or {}).get("machine") or ():
        sentences_by_node.setdefault(anomaly["node"], []).append(anomaly["text"])
    return sentences_by_node
