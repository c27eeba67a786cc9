"""The memory of all ranks on one clock: findings, which rank grew first, numbers of each rank, and shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dash import html

from traceml_ray import text
from traceml_ray.document.model import SIGNS, Table
from traceml_ray.identity import RankFilter, RankFilterError, rank_filter
from traceml_ray.signals.memory.shapes import Memory, MemoryFinding, RankMemory
from traceml_ray.signals.memory.view import GetMemory, first_words, ranks_table
from traceml_ray.store import query
from traceml_ray.views import figures
from traceml_ray.views.memory_curves import COUNTERS, memory_curves
from traceml_ray.views.run_state import RunState
from traceml_ray.views.state import RUNNING
from traceml_ray.views.tables import MEMORY_FINDINGS, collectives_table, memory_rows

from .. import axis, listing
from ..charts import Chart, chart
from ..elements import keys_of, marked, panel, part, table, trail
from ..route import Route
from ..session_cache import SessionCache
from . import events, signals

_LINES = 6
"""Largest number of ranks drawn."""
_SAMPLES = 240
_MOST = 100


def data(cache: SessionCache, run: RunState, route: Route) -> dict[str, Any]:
    """Return the findings about the memory of the ranks that the URL asks for."""
    spine = axis.data(cache, run, route)
    memory = cache.ask(GetMemory(run.id, peaks=False))
    beside = signals.sections_on("memory", cache, run)
    beside.pop("memory", None)  # it is this page
    if memory is None or not memory.ranks:
        return {"memory": None, "axis": spine, "beside": beside}
    asked, wrong = _asked(route)
    ranks = [row for row in memory.ranks if row.rank in asked]
    searched = route if asked.ranges is None else Route(route.page, route.key, _without(route, "q"))
    chosen = listing.choose(ranks, searched, _words, keys_of(ranks_table(ranks).columns))
    drawn = _drawn(memory, [row.rank for row in (ranks if asked.ranges else chosen.items)])
    processes = tuple(run.ranks[rank].id for rank in drawn if rank in run.ranks)
    between = axis.time_of(spine) or ()
    samples = cache.ask(query.GetMemorySamples(processes, _SAMPLES, *between)) or ()
    return {
        "memory": memory,
        "of_memory": [finding for finding in memory.findings if finding.rank in asked],
        "attributions": [attribution for attribution in memory.collectives if attribution.rank in asked],
        "chosen": chosen,
        "wrong": wrong,
        "lines": memory_curves({rank: run.ranks[rank].id for rank in drawn if rank in run.ranks}, samples),
        "axis": spine,
        "bundles": events.bundles_of(cache),
        "beside": beside,
    }


def _asked(route: Route) -> tuple[RankFilter, str]:
    """Return the ranks that the search text selects, if it has any, and what is wrong with the text."""
    wanted = (route.get("q") or "").strip()
    if not wanted[:1].isdecimal():
        return RankFilter(), ""
    try:
        return rank_filter(wanted), ""
    except RankFilterError as error:
        return RankFilter(), str(error)


def _without(route: Route, name: str) -> tuple[tuple[str, str], ...]:
    return tuple(item for item in route.query if item[0] != name)


def _words(row: RankMemory) -> str:
    return f"rank {row.rank} {row.node} {text.words(row.anomaly or '')}"


def _drawn(memory: Memory, ranks: Sequence[int]) -> list[int]:
    """Return which of `ranks` are drawn: those with findings, the most severe first."""
    first = [memory.first_cause.rank] if memory.first_cause else []
    named = [*first, *(finding.rank for finding in memory.findings), *ranks]
    return [rank for rank in dict.fromkeys(named) if rank in ranks][:_LINES]


def layout(view: Mapping[str, Any], route: Route) -> Any:
    """Return the elements of the page. Panels without findings are left out."""
    head = [html.H1("Memory"), listing.field("ranks (0,4-7) and nodes")]
    body: list[Any] = [trail(route, ("memory", None)), html.Div(head, className="title-row")]
    memory: Memory | None = view["memory"]
    if memory is None:
        none = f"No rank has sent a sample of its memory{' yet' * (view['state'] in RUNNING)}."
        body.append(part(html.P(none, id="memory-missing", className="empty")))
        return html.Div([*body, *signals.panels_of(view["beside"], route, view["findings"])])
    body += [
        part(html.Div(view["wrong"], id="memory-filter", className="problem", role="alert")),
        axis.panel(view, route),
        part(html.Div(_first(memory), id="memory-first")),
        panel("Findings", part(html.Div(_findings(view["of_memory"], route), id="memory-findings"))),
        html.Div(
            [_chart(name, lines, view, route) for name, lines in view["lines"].items()],
            className="grid three",
        ),
        panel("Ranks", part(html.Div(_ranks(view, route), id="memory-ranks"))),
    ]
    body += signals.panels_of(view["beside"], route, view["findings"])
    if view["attributions"]:
        rows = table(collectives_table(view["attributions"][:_MOST]), route)
        body.append(panel("Hidden memory of communication", part(html.Div(rows, id="memory-collectives"))))
    body.append(
        panel(
            "Bundles: the last minutes of every rank",
            events.bundle_table(view["bundles"], route, view["state"] == "live"),
        )
    )
    return html.Div(body)


def _first(memory: Memory) -> html.Div:
    """Return which rank grew first, or that none did, and which ranks are missing."""
    tone = memory.findings[0].severity if memory.findings else "good"
    sentences = [html.P(marked(sentence)) for sentence in first_words(memory)]
    return html.Div(sentences, className=f"callout {tone}")


def _findings(findings: Sequence[MemoryFinding], route: Route) -> Any:
    """Return the findings, the most severe first. Findings that many ranks share are one line."""
    block = Table("Findings", MEMORY_FINDINGS, memory_rows(findings)[:_MOST], empty="Nothing stands out.")
    return table(block, route)


def _chart(name: str, lines: Mapping[str, Any], view: Mapping[str, Any], route: Route) -> Chart:
    colours = dict(zip(lines, figures.LINES, strict=False))
    drawn = {rank: (*curve, colours[rank]) for rank, curve in lines.items()}
    return chart(
        f"memory-{name}",
        f"Memory {COUNTERS[name]}",
        figures.sizes(drawn, frame=axis.clock(view["axis"])),
        f"Memory {COUNTERS[name]} of the ranks that stand out, over time",
        route,
        series=colours,
        tall="low",
    )


def _ranks(view: Mapping[str, Any], route: Route) -> list[Any]:
    memory: Memory = view["memory"]
    first = memory.first_cause and (memory.first_cause.rank, memory.first_cause.device)

    def anomaly(row: RankMemory) -> Any:
        sign = f"{SIGNS[row.severity]} {text.words(row.anomaly or '')}" if row.severity else ""
        signs = [html.Span(sign, className=f"sev {row.severity}")] if sign else []
        return [*signs, html.B(" first")] if first == (row.rank, row.device) else signs

    shown = view["chosen"]
    block = ranks_table(shown.items)
    heads = listing.heads(block.columns, keys_of(block.columns), route)
    rows = table(block, route, heads=heads, cells={"finding": lambda row: html.Span(anomaly(row))})
    hint = "+: growth above the rank's own settled level. "
    hint += "Hidden: memory that the driver counts for the process and torch's allocator does not."
    return [rows, listing.pages(shown, route, "row"), html.P(hint, className="hint")]
