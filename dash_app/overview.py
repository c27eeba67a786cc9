"""The overview: tiles, the heatmap and its series, nodes; and one cell of the heatmap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from traceml_ray import text
from traceml_ray.analysis.spread import MISSING, deviations, over_pct, quantiles, spread
from traceml_ray.analysis.window import missing_of
from traceml_ray.wire import STAGES

from .events import events_of, node_of
from .header import state_of
from .values import Array, by_stage, mean_of, natural, number, told

if TYPE_CHECKING:
    from .board import Board
    from .columns import Columns, Recent
    from .followed import Run

_SPARK = 60
_EVENTS = 200
_MAX_ROWS = 1024
UNHEARD = "no report"
"""In place of the node of a rank that has not said where it is."""


def overview(board: Board, run: Run | None, stage: str = "total", span: str | None = None) -> dict[str, Any]:
    """
    Return the first screen. `stage` is of the heatmap; `span` is `recent` (single steps, and numbers over
    those that a live verdict looks at) or `run` (all of it), without it the former while the run goes on.
    """
    if run is None:
        return dict(_NOTHING)
    whole = is_over(board, run) if span is None else span == "run"
    at = STAGES.index(stage) if stage in STAGES else None
    columns, recent = run.steps.columns(at, whole=whole), lately(run, whole)
    low, middle, high = quantiles(columns.busy, (0.1, 0.5, 0.9)) if run.steps.ranks else np.empty((3, 0))
    if not len(columns.first):
        return {**_NOTHING, "nodes": nodes(run, recent), "events": events_of(run)[:_EVENTS]}
    apart = spread(columns.busy, run.steps.nodes)
    worst = np.where(apart.worst >= 0, columns.busy[apart.worst, np.arange(len(middle))], np.nan)
    ranks, steps = np.array(run.steps.ranks), columns.last.tolist()
    skew = {"steps": steps, "global_pct": told(apart.global_skew_pct), "node_pct": told(apart.node_skew_pct)}
    return {
        "tiles": tiles(run, recent, columns, apart.global_skew_pct),
        "heat": _heat(run, columns, at, middle),
        "exposed": {"steps": steps, "stages": by_stage(columns.exposed)},
        "timeline": {
            "steps": steps,
            "median_ms": told(middle),
            "p10_ms": told(low),
            "p90_ms": told(high),
            "worst_ms": told(worst),
            "worst_rank": [int(ranks[who]) if who >= 0 else None for who in apart.worst.tolist()],
        },
        "skew": skew,
        "nodes": nodes(run, recent),
        "events": events_of(run)[:_EVENTS],
    }


def is_over(board: Board, run: Run) -> bool:
    """Tell whether nothing more comes: then numbers are over all of it."""
    return state_of(board, run) in ("stored", "finished")


def lately(run: Run, whole: bool) -> Recent | None:
    """Return what the steps say: all that are kept, or those that a live verdict looks at."""
    return run.steps.recent(None if whole else run.limits.window_steps)


def tiles(run: Run, recent: Recent | None, columns: Columns, skew: Array) -> list[dict[str, Any]]:
    """Return the numbers at the top, each with a sparkline."""
    if recent is None:
        return []
    steps = columns.exposed.sum(axis=1)
    median, p95 = quantiles(recent.step_ms, (0.5, 0.95)).tolist()
    worst, several = int(recent.apart.worst[0]), len(run.steps.ranks) > 1
    over = 1 + recent.apart.global_skew_pct[0] / 100
    who = f"rank {run.steps.ranks[worst]}" if several and worst >= 0 else ""
    waiting = recent.exposed_ms[-1] / recent.exposed_ms.sum()
    positive = np.where(steps > 0, steps, np.nan)
    goodput, since = _goodput(run)
    of = f"of the newest {recent.steps:,} steps"
    return [
        _tile("median", "Step, median", median, "ms", of, steps),
        _tile("p95", "Step, p95", p95, "ms", of, steps, 0.95),
        _tile("rate", "Steps", 1e3 / recent.step_ms.mean(), "/s", of, 1e3 / positive),
        _tile("goodput", "Productive time", goodput, "%", since, ()),
        _tile("worst", "Worst ÷ median rank", over, "×", who, 1 + skew / 100),
        _tile("wait", "Waiting, exposed", 100 * waiting, "%", of, 100 * columns.exposed[:, -1] / positive),
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


def _goodput(run: Run) -> tuple[float | None, str]:
    """Return which share of the time since the run's first word was spent in steps, in %, and since when."""
    ends = [stream.last_rows_ns for stream in run.ranks.values() if stream.last_rows_ns]
    began = min((stream.first_seen_ns for stream in run.ranks.values()), default=0)
    if run.steps.taken < 0.9 * sum(stream.stored for stream in run.ranks.values()):
        return None, "the run's beginning was not read"
    if not ends or max(ends) <= began:
        return None, ""
    wall_ms = (max(ends) - began) / 1e6
    told_since = f"of {text.duration(wall_ms / 1e3)} since the first report"
    return min(100.0, 100 * run.steps.total_ms() / wall_ms), told_since


def _heat(run: Run, columns: Columns, stage: int | None, middle: Array) -> dict[str, Any]:
    """Return the heatmap; in a very large job a row is a node: in each column, its slowest rank."""
    absent = missing_of(run.world, run.steps.ranks, _MAX_ROWS)
    labels = [*run.steps.nodes, *(node_of(run, rank) or UNHEARD for rank in absent)]
    ranks = [*run.steps.ranks, *absent]
    of = middle if stage is None else quantiles(columns.values, (0.5,))[0]
    values = np.concatenate([columns.values, np.full((len(absent), len(middle)), np.nan)])
    order = sorted(range(len(labels)), key=lambda at: (natural(labels[at]), ranks[at]))
    by_node = len(order) > _MAX_ROWS
    if by_node:
        at: dict[str, list[int]] = {}
        for place in order:
            at.setdefault(labels[place], []).append(place)
        values = np.array([np.fmax.reduce(values[places], axis=0) for places in at.values()])
        order = [places[0] for places in at.values()]
    else:
        values = values[order]
    return {
        "by": "node" if by_node else "rank",
        "ranks": [ranks[at] for at in order],
        "nodes": [labels[at] for at in order],
        "first": columns.first.tolist(),
        "last": columns.last.tolist(),
        "z": deviations(values, of, middle),
        "stage": "total" if stage is None else STAGES[stage],
    }


def nodes(run: Run, recent: Recent | None) -> list[dict[str, Any]]:
    """Return a card for each node, the lost ones first, then the slowest."""
    labels = run.steps.nodes
    median = (
        dict(zip(recent.apart.nodes, recent.apart.per_node[:, 0].tolist(), strict=True)) if recent else {}
    )
    at: dict[str, list[int]] = {}
    for place, label in enumerate(labels):
        at.setdefault(label, []).append(place)
    listed = {node["label"] for node in run.nodes}
    known = [*run.nodes, *(unheard(run, label) for label in at if label not in listed)]
    fastest = min(median.values(), default=np.nan)
    middle = np.array([median.get(node["label"], np.nan) for node in known])
    worst = [_worst(recent, at.get(node["label"], [])) for node in known]
    largest = np.array([np.nan if who is None or recent is None else recent.per_rank[who] for who in worst])
    skew, slower = (
        told(over_pct(*of), 4) for of in ((largest, middle), (middle, np.full(len(known), fastest)))
    )
    cards = [
        {
            "key": node["node_id"],
            "label": node["label"],
            "alive": node["alive"],
            "ranks": node["ranks"],
            "median_ms": number(middle[i]),
            "worst_rank": None if worst[i] is None else run.steps.ranks[worst[i] or 0],
            "worst_ms": number(largest[i]),
            "skew_pct": skew[i] if len(at.get(node["label"], ())) > 1 else None,
            "slower_pct": slower[i] if len(median) > 1 else None,
            **_load(run.samples.get(node["node_id"], {})),
        }
        for i, node in enumerate(known)
    ]
    return sorted(cards, key=lambda card: (card["alive"], -(card["median_ms"] or 0), natural(card["label"])))


def _worst(recent: Recent | None, places: list[int]) -> int | None:
    """Return the place of the slowest of some ranks."""
    mine = recent.per_rank[places] if recent and places else np.empty(0)
    return None if np.isnan(mine).all() else places[int(np.nanargmax(mine))]


def unheard(run: Run, label: str) -> dict[str, Any]:
    """Return a node that only its ranks speak of."""
    ranks = [rank for rank, node in zip(run.steps.ranks, run.steps.nodes, strict=True) if node == label]
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


def cell(_board: Board, run: Run | None, rank: int, first: int, last: int) -> dict[str, Any]:
    """Return what one cell of the heatmap stands for: means over its steps `first` to `last`."""
    found: dict[str, Any] = {"rank": rank, "node": None, "first": first, "last": last, "steps": 0}
    found |= {"busy_ms": None, "median_ms": None, "stages": {}}
    if run is None or rank not in run.steps.ranks:
        return found
    who = run.steps.ranks.index(rank)
    steps, d, busy = run.steps.stages(first, last)
    mean = mean_of(d)
    middle = quantiles(mean, (0.5,))[0] if len(steps) else np.full(len(STAGES), np.nan)
    total = mean_of(busy[..., None])[:, 0]
    if not len(steps):  # long ago: only sums are left
        columns = run.steps.columns(whole=True)
        at = np.flatnonzero((columns.first <= first) & (columns.last >= last))
        total = columns.busy[:, at[0]] if len(at) else np.full(len(run.steps.ranks), np.nan)
    if run.world > _MAX_ROWS:  # a row is a node: its slowest rank
        labels = run.steps.nodes
        same = [at for at, label in enumerate(labels) if label == labels[who] and total[at] == total[at]]
        who = max(same, key=lambda at: total[at], default=who)
    return {
        **found,
        "rank": run.steps.ranks[who],
        "node": run.steps.nodes[who],
        "steps": int((~np.isnan(busy[who])).sum()),
        "busy_ms": number(total[who]),
        "median_ms": number(quantiles(total, (0.5,))[0]),
        "stages": {name: [number(mean[who, i]), number(middle[i])] for i, name in enumerate(STAGES)}
        if len(steps)
        else {},
    }


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
