"""Tables that the web app and the terminal both show."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from traceml_ray import text
from traceml_ray.document.model import Column, Link
from traceml_ray.signals.layers.judge import Layers
from traceml_ray.signals.layers.sections import layer_name, region_of
from traceml_ray.signals.memory.shapes import RankMemory
from traceml_ray.stages import STAGES

from .health import dropped_text
from .ranks import NAMED, SERVES, SILENT


def rank_columns(roles: bool, suspects: Collection[tuple[int, str]]) -> list[Column]:
    """
    Return the columns of `ranks.rank_rows`. `roles`: whether ranks do different work; `suspects`: who is
    late, in which stages.
    """

    def stage(name: str) -> Column:
        def tone(row: Mapping[str, Any]) -> str:
            return "warning" if (row["rank"], name) in suspects else ""

        return Column(name, lambda row: row["stages"].get(name), "aligned", tone=tone)

    return [
        Column("rank", lambda row: row["rank"], "figures", tone=_rank_tone, link=rank_link),
        Column("node", lambda row: row["node"], "name", link=_node_link),
        *([Column("role", lambda row: row["role"])] if roles else []),
        Column("local rank", lambda row: row["local_rank"], "plain"),
        Column("GPU", lambda row: row["gpu"], "plain"),
        RANK_STATE,
        Column("exit code", lambda row: row["exit_code"], "known figures"),
        Column("last step", lambda row: row["last_step"], "plain"),
        Column("now in", lambda row: row["open_stage"], "name"),
        Column("busy", lambda row: row["busy_ms"], "aligned"),
        Column("÷ med", lambda row: row["over"], "factor"),
        *map(stage, STAGES),
    ]


def rank_link(row: Mapping[str, Any]) -> Link:
    """Return the page of a row's rank."""
    return "rank", row["rank"]


def _node_link(row: Mapping[str, Any]) -> Link | None:
    return ("node", row["node_key"]) if row["node_key"] else None


def _rank_tone(row: Mapping[str, Any]) -> str:
    return "critical" if row["death"] else "warning" if row["state"] in (NAMED, SILENT) else ""


def _state(row: Mapping[str, Any]) -> str:
    return row["death"]["how"] if row["death"] else text.words(row["state"])


def _state_tone(row: Mapping[str, Any]) -> str:
    late = row["state"] not in ("running", "finished", SERVES)
    return "critical" if row["death"] else "warning" if late else ""


RANK_STATE = Column("state", _state, tone=_state_tone)


def memory_columns() -> list[Column]:
    """Return the columns of `Memory.ranks`: what each rank's memory has grown by above its settled level."""
    return [
        Column("rank", lambda row: row.rank, "figures", link=lambda row: ("rank", row.rank)),
        Column("node", lambda row: row.node),
        Column("memory", lambda row: "host" if row.device is None else f"GPU {row.device}"),
        Column("samples", lambda row: row.samples, "count"),
        Column("allocated +", lambda row: row.allocated_growth_bytes, "size"),
        Column("reserved +", lambda row: row.reserved_growth_bytes, "size"),
        Column("hidden", lambda row: row.gap_bytes, "size"),
        Column("RSS +", lambda row: row.rss_growth_bytes, "size"),
        Column("used", lambda row: row.used_bytes, "size"),
        Column("in all", lambda row: row.total_bytes, "size"),
        Column("runs out in", lambda row: row.forecast_s, "age", written=_forecast),
        Column("finding", lambda row: text.words(row.anomaly or ""), tone=lambda row: row.severity or ""),
    ]


def _forecast(row: RankMemory) -> str:
    if row.forecast_s is None:
        return ""
    steps = "" if row.forecast_steps is None else f", {text.count(row.forecast_steps, 'step')}"
    return text.duration(row.forecast_s) + steps


def layer_columns(layers: Layers) -> list[Column]:
    """Return the columns of layers, by their index."""
    rows, named = layers.layers, {(one.layer, one.rank) for one in layers.findings}

    def value(name: str) -> Callable[[int], Any]:
        return lambda index: getattr(rows[index], name)

    def worst(index: int) -> str:
        return "warning" if (rows[index].name, rows[index].worst_rank) in named else ""

    again, several = any(row.recomputed for row in rows), len(layers.ranks) > 1
    return [
        Column("layer", lambda index: layer_name(rows[index])),
        Column("class", lambda index: f"{rows[index].kind}{region_of(rows[index])}"),
        Column("calls", value("calls"), "number"),
        *([Column("recomputed", value("recomputed"), "number")] if again else []),
        Column("forward", value("forward_ms"), "aligned"),
        Column("backward", value("backward_ms"), "aligned"),
        Column("with inside", value("total_ms"), "aligned"),
        Column("of model", value("share"), "share"),
        *([Column("largest", value("worst_ms"), "aligned", tone=worst)] if several else []),
        *([Column("on rank", value("worst_rank"), "plain", link=_worst_link(layers))] if several else []),
        Column("outputs", value("output_bytes"), "size"),
        Column("params", value("parameter_bytes"), "size"),
        Column("grads", value("gradient_bytes"), "size"),
    ]


def _worst_link(layers: Layers) -> Callable[[int], Link | None]:
    ranks = [row.worst_rank for row in layers.layers]
    return lambda index: None if (rank := ranks[index]) is None else ("rank", rank)


def layer_rank_columns(layers: Layers) -> list[Column]:
    """Return a column for each of some ranks: forward and backward of each layer, by its index."""
    named = {(one.layer, one.rank) for one in layers.findings}

    def of_rank(rank: int) -> Column:
        def tone(index: int) -> str:
            return "warning" if (layers.layers[index].name, rank) in named else ""

        return Column(f"rank {rank}", lambda index: layers.per_rank_ms[rank][index], "aligned", tone=tone)

    return [of_rank(rank) for rank in layers.per_rank_ms]


def ledger_columns(over: bool) -> list[Column]:
    """Return the columns of a ledger's (rank, rows); `over`: nothing is to come."""
    return [
        Column("rank", lambda row: row[0], "figures"),
        *(
            Column(text.words(name), lambda row, name=name: getattr(row[1], name), "count")  # type: ignore[misc]
            for name in ("produced", "stored", "in_flight")
        ),
        Column("dropped", lambda row: row[1].dropped.total, "count"),
        Column("dropped where", lambda row: dropped_text(row[1].dropped)),
        Column(
            "after the last report",
            lambda row: "unknown" * (over and getattr(row[1], "unreported", 0) is None),
        ),
    ]


RELAYS = [
    Column("node", lambda relay: relay["label"], link=lambda relay: ("node", relay["node_id"])),
    Column(
        "state",
        lambda relay: "alive" if relay["alive"] else "lost",
        tone=lambda relay: "" if relay["alive"] else "critical",
    ),
    Column("last message", lambda relay: relay["age_s"], "age"),
    Column("ranks", lambda relay: len(relay["ranks"]), "count"),
    Column("clock", lambda relay: relay["clock_offset_ns"], "figures", written=lambda relay: _clock(relay)),
]
"""Columns of the relays of a run; clock: by how much a node's is ahead of the aggregator's."""
ERRORS = [Column("times", lambda error: error[1], "count"), Column("where", lambda error: error[0], "words")]
"""Columns of swallowed errors: (where, how often)."""


def _clock(relay: Mapping[str, Any]) -> str:
    """Return "+5 ± 0.3 ms"."""
    offset, bound = relay["clock_offset_ns"], relay["clock_bound_ns"]
    if offset is None or bound is None:
        return text.NA
    return f"{text.number(-offset / 1e6, sign=True)} ± {text.ms(bound / 1e6)}"


def slowest_relays(relays: Collection[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the relays that are lost, then those that are silent for longest."""
    return sorted(relays, key=lambda relay: (relay["alive"], -(relay["age_s"] or 0)))
