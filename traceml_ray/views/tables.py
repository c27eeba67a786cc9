"""Tables that both the web app and the terminal show."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from traceml_ray import text
from traceml_ray.document.model import Column, Link, Table
from traceml_ray.reports.headlines import hours_of, named
from traceml_ray.reports.run_facts import moment
from traceml_ray.signals.memory.shapes import Attribution, MemoryFinding
from traceml_ray.signals.memory.view import memory_of_device
from traceml_ray.stages import STAGES

from .health import dropped_text
from .ranks import NAMED, SERVES, SILENT
from .run_state import NodeLoad


def rank_columns(
    roles: bool,
    suspects: Collection[tuple[int, str]],
    line: Callable[[int], Sequence[float | None]] | None = None,
) -> list[Column]:
    """
    Return the columns of `ranks.rank_rows`. `roles`: whether ranks do different work. `suspects`: which ranks
    are late, and in which stages. `line`: the function returned by `ranks.busy_lines`.
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
        *([Column("by step", lambda row: line(row["rank"]), "line")] if line else []),
        *map(stage, STAGES),
    ]


def node_columns(
    costs: Mapping[str, float], evidence: Collection[str], loads: Mapping[str, Sequence[NodeLoad]]
) -> list[Column]:
    """
    Return the columns of `ranks.nodes`: times, present load and past load. Each load is drawn on the scale of
    its largest possible value. `costs`: from `ranks.costs_of`. `evidence`: labels of nodes whose anomalies
    accompany the verdict. `loads`: loads of the run (`run_state`).
    """

    def past(name: str) -> Callable[[Mapping[str, Any]], Sequence[float | None]]:
        return lambda node: [getattr(load, name) for load in loads.get(node["node_id"], ())]

    def tone(node: Mapping[str, Any]) -> str:
        lost = "" if node["alive"] else "critical"
        return lost or ("warning" if node["named"] or node["label"] in evidence else "")

    def ranks(node: Mapping[str, Any]) -> str:
        return f"{len(node['ranks'])}" if node["alive"] else "lost"

    return [
        Column("node", lambda node: node["label"], tone=tone, link=lambda node: ("node", node["node_id"])),
        Column("ranks", lambda node: len(node["ranks"]), "figures", ranks),
        Column("costs", lambda node: costs.get(node["label"]), written=_cost_of(costs), unit="share"),
        Column("median ms", lambda node: node["median_ms"], "aligned"),
        Column("worst ms", lambda node: node["worst_ms"], "aligned"),
        Column("rank", lambda node: node["worst_rank"], "plain"),
        Column("skew", lambda node: node["skew_pct"], "percent"),
        Column("slower", lambda node: node["slower_pct"], "more"),
        Column("CPU", lambda node: node["cpu_pct"], "percent"),
        Column("CPU past", past("cpu_pct"), "line", scale=(0, 100)),
        Column("RAM", lambda node: node["mem_pct"], "percent"),
        Column("RAM past", past("mem_pct"), "line", scale=(0, 100)),
        Column("GPU", lambda node: node["gpu_util_pct"], "known percent"),
        Column("GPU past", past("gpu_util_pct"), "line", scale=(0, 100)),
        Column("VRAM", lambda node: node["gpu_mem_pct"], "known percent"),
        Column("°C", lambda node: node["gpu_temperature_c"], "whole"),
        Column("°C past", past("gpu_temperature_c"), "line", scale=(20, 100)),
        Column("W", lambda node: node["gpu_power_w"], "whole"),
    ]


def _cost_of(costs: Mapping[str, float]) -> Callable[[Mapping[str, Any]], str]:
    return lambda node: text.share(costs[node["label"]]) if node["label"] in costs else ""


def rank_link(row: Mapping[str, Any]) -> Link:
    """Return the link to the page of a row's rank."""
    return "rank", row["rank"]


def _node_link(row: Mapping[str, Any]) -> Link | None:
    return ("node", row["node_key"]) if row["node_key"] else None


def _rank_tone(row: Mapping[str, Any]) -> str:
    return "critical" if row["death"] else "warning" if row["state"] in (NAMED, SILENT) else ""


def _state(row: Mapping[str, Any]) -> str:
    return row["death"].how if row["death"] else text.words(row["state"])


def _state_tone(row: Mapping[str, Any]) -> str:
    late = row["state"] not in ("running", "finished", SERVES)
    return "critical" if row["death"] else "warning" if late else ""


RANK_STATE = Column("state", _state, tone=_state_tone)


def ledger_columns(over: bool) -> list[Column]:
    """Return the columns of the row counts per rank. `over`: no more rows are expected."""
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
"""Columns of the relays of a run. `clock` is how far a node's clock is ahead of the aggregator's clock."""
ERRORS = [Column("times", lambda error: error[1], "count"), Column("where", lambda error: error[0], "words")]
"""Columns of swallowed errors: (where, how often)."""


def _clock(relay: Mapping[str, Any]) -> str:
    """Return "+5 ± 0.3 ms"."""
    offset, bound = relay["clock_offset_ns"], relay["clock_bound_ns"]
    if offset is None or bound is None:
        return text.NA
    return f"{text.number(-offset / 1e6, sign=True)} ± {text.ms(bound / 1e6)}"


def slowest_relays(relays: Collection[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the relays that are lost, followed by those that have been silent longest."""
    return sorted(relays, key=lambda relay: (relay["alive"], -(relay["age_s"] or 0)))


def _linked(page: str, key: Any) -> Link | None:
    return None if key is None else (page, key)


EVENTS = [
    Column("time", lambda event: event["time"], "date"),
    Column("severity", lambda event: event["severity"], tone=lambda event: event["severity"]),
    Column("kind", lambda event: text.words(event["kind"])),
    Column(
        "rank", lambda event: event["rank"], "known plain", link=lambda event: _linked("rank", event["rank"])
    ),
    Column("node", lambda event: event["node"]),
    Column(
        "step", lambda event: event["step"], "known plain", link=lambda event: _linked("step", event["step"])
    ),
    Column("stage", lambda event: event["stage"]),
    Column("what", lambda event: event["text"], "sentence"),
]
"""Columns of `events.events_of`."""
EVENT = Column("kind", lambda event: text.words(event["kind"]), tone=lambda event: event["severity"])
"""Kind and severity in one column, for narrow tables."""


def episode_columns(share_of: str, gpus: bool) -> list[Column]:
    """
    Return the columns of episodes. `share_of`: what their cost is a share of. `gpus`: hours of GPUs, not
    ranks.
    """
    return [
        Column("what", lambda one: named(one)),
        Column("rank", lambda one: one.rank, "known plain", link=lambda one: _linked("rank", one.rank)),
        Column("from step", lambda one: one.from_step, "plain", link=lambda one: ("step", one.from_step)),
        Column("to", lambda one: f"{one.to_step:,}{' …' * one.goes_on}", "figures"),
        Column("lasted", lambda one: one.seconds, "duration"),
        Column("cost", lambda one: one.cost_s, "duration"),
        Column(share_of, lambda one: one.cost_pct, "percent"),
        Column(hours_of(gpus), lambda one: one.rank_hours, "number"),
    ]


SPANS = [
    Column("span", lambda span: span["name"]),
    Column("in", lambda span: span["stage"]),
    Column("this rank", lambda span: span["ms"], "ms"),
    Column("median rank", lambda span: span["median_ms"], "ms"),
    Column("of its stage", lambda span: span["share"], "share"),
    Column("times a step", lambda span: span["times_per_step"], "number"),
    Column("bytes each", lambda span: span["bytes"], "known size"),
]
"""Columns of `query.GetSpans`."""


def node_rank_columns(named: Collection[int]) -> list[Column]:
    """Return the columns of the ranks of one node. `named`: the ranks that the verdict names."""

    def state(row: Mapping[str, Any]) -> str:
        return NAMED if row["rank"] in named and not row["death"] else _state(row)

    def tone(row: Mapping[str, Any]) -> str:
        return "critical" if row["death"] else "warning" if row["rank"] in named else ""

    return [
        Column("rank", lambda row: row["rank"], "figures", link=rank_link),
        Column("local", lambda row: row["local_rank"], "plain"),
        Column("GPU", lambda row: row["gpu"], "known plain"),
        Column("median busy", lambda row: row["median_ms"], "ms"),
        Column("GPU idle", lambda row: row["gpu_idle_pct"], "known percent"),
        Column("busy time by step", lambda row: row["busy"], "line"),
        Column("last step", lambda row: row["last_step"], "plain"),
        Column("now in", lambda row: row["open_stage"], "name"),
        Column("memory", lambda row: row["rss_bytes"], "size"),
        Column("allocated", lambda row: (row["device_memory"] or (None, None))[0], "known size"),
        Column("reserved", lambda row: (row["device_memory"] or (None, None))[1], "known size"),
        Column("state", state, tone=tone),
    ]


def last(series: Sequence[Any] | None) -> Any:
    """Return the newest value of a series. None: unknown."""
    return series[-1] if series else None


def _newest(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda gpu: last(gpu[name])


def _both(name: str) -> Callable[[Mapping[str, Any]], str]:
    """Return a function that formats the rates out of a device and into it."""

    def rates(gpu: Mapping[str, Any]) -> str:
        both = [last(gpu[f"{name}_{way}_bps"]) for way in ("tx", "rx")]
        return "" if both == [None, None] else ", ".join(text.size(rate, "/s") for rate in both)

    return rates


def used_of_all(gpu: Mapping[str, Any]) -> str:
    """Return used and total memory of a device, or of a node."""
    return " of ".join(text.size(last(gpu[name])) for name in ("mem_used_bytes", "mem_total_bytes"))


def _watts(gpu: Mapping[str, Any]) -> str:
    return f"{text.number(last(gpu['power_w']), 0)} of {text.unit(last(gpu['power_limit_w']), 'W', 0)}"


def _throttled(gpu: Mapping[str, Any]) -> str:
    reasons = gpu["throttle"]
    return text.NA if reasons is None else ", ".join(map(text.words, reasons)) or "nothing"


def _xids(gpu: Mapping[str, Any]) -> str:
    return text.NA if gpu["xid"] is None else ", ".join(map(str, dict.fromkeys(gpu["xid"]))) or "none"


GPUS = [
    Column("GPU", lambda gpu: gpu["index"], "figures"),
    Column("model", lambda gpu: gpu["name"], "name"),
    Column("utilisation", _newest("util_pct"), "percent"),
    Column("memory", used_of_all, "figures"),
    Column("power", _watts, "figures"),
    Column("°C", _newest("temperature_c"), "whole"),
    Column("SM MHz", _newest("sm_mhz"), "whole"),
    Column("PCIe out, in", _both("pcie"), "figures"),
    Column("NVLink out, in", _both("nvlink"), "figures"),
    Column("throttled by", _throttled),
    Column("ECC errors", _newest("ecc"), "plain"),
    Column("XID errors", _xids, tone=lambda gpu: "critical" if gpu["xid"] else ""),
]
"""Columns of the devices of a node, filled from their newest samples."""
_ALIKE = 3
"""Largest number of findings of one kind in separate rows. More of them share one row."""
MemoryRow = Sequence[MemoryFinding]
"""Findings that share a row: they have the same kind and severity."""


def memory_rows(findings: Sequence[MemoryFinding]) -> list[MemoryRow]:
    """
    Return findings as rows of a table, the most severe first. Findings that many ranks share are
    one row.
    """
    alike: dict[Any, list[MemoryFinding]] = {}
    for finding in findings:
        alike.setdefault((finding.kind, finding.severity, finding.device is None), []).append(finding)
    return [
        row
        for same in alike.values()
        for row in ([same] if len(same) > _ALIKE else [[finding] for finding in same])
    ]


def memory_of(devices: Collection[int | None]) -> str:
    """Return whose memory the findings are about: the host's, or a device's."""
    return memory_of_device(next(iter(devices))) if len(devices) == 1 else "GPU"


MEMORY_FINDINGS = [
    Column("severity", lambda row: row[0].severity, tone=lambda row: row[0].severity),
    Column("ranks", lambda row: sorted({one.rank for one in row}), "ranks", link=lambda row: _only_rank(row)),
    Column("memory", lambda row: memory_of({one.device for one in row})),
    Column("what", lambda row: text.words(row[0].kind)),
    Column("since", lambda row: moment(min(one.from_ns for one in row)), "date"),
    Column("confidence", lambda row: row[0].confidence),
    Column("why", lambda row: " ".join([row[0].why, *row[0].next]), "sentence"),
]
"""Columns of `memory_rows`."""


def _only_rank(row: MemoryRow) -> Link | None:
    return ("rank", row[0].rank) if len(row) == 1 else None


def collectives_table(attributions: Sequence[Attribution]) -> Table:
    """Return which communication may hold memory that torch's allocator does not count."""
    columns = [
        Column("rank", lambda one: one.rank, "figures", link=lambda one: ("rank", one.rank)),
        Column("memory", lambda one: memory_of([one.device])),
        Column("by", lambda one: one.op, "name"),
        Column("hidden memory", lambda one: one.bytes, "size"),
        Column("how sure", lambda one: one.kind.removeprefix("collective_")),
        Column("why", lambda one: one.why, "sentence"),
    ]
    return Table("Hidden memory of communication", columns, attributions)
