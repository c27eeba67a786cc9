"""The overview: tiles, the heatmap and its series, nodes; and one cell of the heatmap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from traceml_ray import text
from traceml_ray.analysis.spread import MISSING, quantiles
from traceml_ray.analysis.step_numbers import MAX_LINES
from traceml_ray.analysis.window import missing_of
from traceml_ray.stages import STAGES
from traceml_ray.store import query

from .events import events_of, node_of
from .values import Array, by_stage, natural, number, told

if TYPE_CHECKING:
    from .followed import Run
    from .session_cache import SessionCache

_SPARK = 60
_EVENTS = 200
UNHEARD = "no report"
"""In place of the node of a rank that has not said where it is."""


def overview(
    cache: SessionCache, run: Run | None, stage: str = "total", span: str | None = None
) -> dict[str, Any]:
    """
    Return the first screen. `stage` is of the heatmap; `span` is `recent` (single steps, and numbers over
    those that a live verdict looks at) or `run` (all of it), without it the former while the run goes on.
    """
    if run is None:
        return dict(_NOTHING)
    whole = None if span is None else span == "run"
    stage = stage if stage in STAGES else "total"
    times = run.times if span is None else cache.ask(query.Times(run.id, whole))
    drawn: Mapping[str, Any] | None = cache.ask(query.Columns(run.id, stage, whole))
    if not times or not drawn or not len(drawn["first"]):
        return {**_NOTHING, "nodes": nodes(run, times), "events": events_of(run)[:_EVENTS]}
    steps = drawn["last"].tolist()
    lines = ("median_ms", "p10_ms", "p90_ms", "worst_ms")
    worst = [rank if rank >= 0 else None for rank in drawn["worst_rank"].tolist()]
    return {
        "tiles": tiles(times, drawn),
        "heat": _heat(run, drawn, stage),
        "exposed": {"steps": steps, "stages": by_stage(drawn["exposed"])},
        "timeline": {"steps": steps, **{name: told(drawn[name]) for name in lines}, "worst_rank": worst},
        "skew": {"steps": steps, **{name: told(drawn[name]) for name in ("global_pct", "node_pct")}},
        "nodes": nodes(run, times),
        "events": events_of(run)[:_EVENTS],
    }


def tiles(times: Mapping[str, Any], drawn: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the numbers at the top, each with a sparkline."""
    if not times["steps"]:
        return []
    who = f"rank {times['worst_rank']}" if times["worst_rank"] is not None else ""
    of = f"of {'all' if times['of_all'] else 'the newest'} {times['steps']:,} steps"
    since = "the run's beginning was not read"
    if times["all_read"]:
        since = (
            "" if times["wall_s"] is None else f"of {text.duration(times['wall_s'])} since the first report"
        )
    return [
        _tile("median", "Step, median", times["median_ms"], "ms", of, drawn["step_ms"]),
        _tile("p95", "Step, p95", times["p95_ms"], "ms", of, drawn["step_ms"], 0.95),
        _tile("rate", "Steps", times["steps_per_s"], "/s", of, drawn["steps_per_s"]),
        _tile("goodput", "Productive time", times["productive_pct"], "%", since, ()),
        _tile("worst", "Worst ÷ median rank", times["worst_over"], "×", who, drawn["worst_over"]),
        _tile("wait", "Waiting, exposed", times["waiting_pct"], "%", of, drawn["waiting_pct"]),
    ]


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
    return {**found, "series": told(shown)}


def _heat(run: Run, drawn: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """Return the heatmap, with a line for each rank that has no row yet, unless a line is a node."""
    ranks, labels, by_node = [*drawn["ranks"]], [*drawn["nodes"]], drawn["by"] == "node"
    for rank in missing_of(run.world, ranks, MAX_LINES) if not by_node else ():
        ranks.append(rank)
        labels.append(node_of(run, rank) or UNHEARD)
    order = sorted(range(len(labels)), key=lambda at: (natural(labels[at]), ranks[at]))
    absent = np.full((len(ranks) - len(drawn["ranks"]), len(drawn["first"])), MISSING, np.uint8)
    return {
        "by": drawn["by"],
        "ranks": [ranks[at] for at in order],
        "nodes": [labels[at] for at in order],
        "first": drawn["first"].tolist(),
        "last": drawn["last"].tolist(),
        "z": np.concatenate([drawn["z"], absent])[order],
        "stage": stage,
    }


def nodes(run: Run, times: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return a card for each node, the lost ones first, then the slowest."""
    found = times["nodes"] if times else {}
    listed = {node["label"] for node in run.nodes}
    cards = []
    for node in [*run.nodes, *(unheard(run, label) for label in found if label not in listed)]:
        own = found.get(node["label"], _NO_TIMES)
        cards.append(
            {
                "key": node["node_id"],
                **{name: node[name] for name in ("label", "alive", "ranks")},
                "worst_rank": own["worst_rank"],
                **{name: number(own[name]) for name in _NO_TIMES if name != "worst_rank"},
                **_load(run.samples.get(node["node_id"], {})),
            }
        )
    return sorted(cards, key=lambda card: (card["alive"], -(card["median_ms"] or 0), natural(card["label"])))


_NO_TIMES = dict.fromkeys(("median_ms", "worst_rank", "worst_ms", "skew_pct", "slower_pct"))


def unheard(run: Run, label: str) -> dict[str, Any]:
    """Return a node that only its ranks speak of."""
    ranks = [rank for rank in run.ranks if node_of(run, rank) == label]
    return {
        "node_id": label,
        "label": label,
        "hostname": label,
        "address": None,
        "alive": True,
        "ranks": ranks,
    }


def _load(newest: Mapping[str, Any]) -> dict[str, float | None]:
    gpus = newest.get("gpus") or []
    used = [gpu["util_pct"] for gpu in gpus if gpu["util_pct"] is not None]
    memory = [(gpu["mem_used_bytes"], gpu["mem_total_bytes"]) for gpu in gpus]
    return {
        "cpu_pct": newest.get("cpu_pct"),
        "mem_pct": _share([(newest.get("mem_used_bytes"), newest.get("mem_total_bytes"))]),
        "gpu_util_pct": sum(used) / len(used) if used else None,
        "gpu_mem_pct": _share(memory),
    }


def _share(pairs: Sequence[tuple[Any, Any]]) -> float | None:
    known = [(part, whole) for part, whole in pairs if part is not None and whole]
    return 100 * sum(part for part, _ in known) / sum(whole for _, whole in known) if known else None


def cell(cache: SessionCache, run: Run | None, rank: int, first: int, last: int) -> dict[str, Any]:
    """Return what one cell of the heatmap stands for: means over its steps `first` to `last`."""
    found: dict[str, Any] = {"rank": rank, "node": None, "first": first, "last": last, "steps": 0}
    found |= {"busy_ms": None, "median_ms": None, "stages": {}}
    told_of = cache.ask(query.Cell(run.id, rank, first, last)) if run else None
    if not told_of:
        return found
    stages = {name: [number(ms) for ms in both] for name, both in told_of["stages"].items()}
    busy = {name: number(told_of[name]) for name in ("busy_ms", "median_ms")}
    return {**found, **told_of, **busy, "stages": stages}


_NOTHING: dict[str, Any] = {
    "tiles": [],
    "heat": {
        "by": "rank",
        "ranks": [],
        "nodes": [],
        "first": [],
        "last": [],
        "z": np.full((0, 0), MISSING, np.uint8),
        "stage": "total",
    },
    "exposed": {"steps": [], "stages": {name: [] for name in STAGES}},
    "timeline": {name: [] for name in ("steps", "median_ms", "p10_ms", "p90_ms", "worst_ms", "worst_rank")},
    "skew": {"steps": [], "global_pct": [], "node_pct": []},
    "nodes": [],
    "events": [],
}
