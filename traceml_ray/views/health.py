"""Health of the monitor itself: rows produced, stored and dropped, its cost, its errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from msgspec.structs import asdict

from traceml_ray import text
from traceml_ray.reports.run_facts import overhead_of
from traceml_ray.store import query
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.results import Dropped, RankLedger, WholeLedger

from .run_state import RunState
from .session_poll import SessionPoll
from .values import age_s, number


def health(cache: SessionPoll, run: RunState | None, viewer: str) -> dict[str, Any]:
    """
    Return row counts, cost and errors of the monitor (and errors of `viewer`), and the state of
    its relays.
    """
    processes = list(run.ranks.values()) if run else []
    nodes = run.nodes if run else []
    poll = np.array(cache.poll_ms or [np.nan])
    sent, seconds = _sent(processes)
    starts = Counter(event.node_id for event in (run.events if run else ()) if event.kind == "relay_start")
    return {
        "ledger": cache.ask(query.GetLedger(run.id if run else None)),
        "bytes_per_s": sent / seconds if seconds else None,
        "overhead": overhead_of(processes),
        "errors": _errors(cache, run, viewer),
        "sinks": cache.status.sinks if cache.status else [],
        "restarts": sum(max(0, n - 1) for n in starts.values()),
        "relays": [{**asdict(node), "age_s": age_s(cache.clock(), node.last_seen_ns)} for node in nodes],
        "poll_ms": {"p50": number(np.median(poll)), "p95": number(np.percentile(poll, 95))},
    }


def _errors(cache: SessionPoll, run: RunState | None, viewer: str) -> dict[str, int]:
    """Return the swallowed errors by source and place."""
    sources: list[tuple[str, Mapping[str, int]]] = [
        ("aggregator", cache.status.errors if cache.status else {})
    ]
    sources.append((viewer, cache.errors))
    sources += [(f"relay of {node.label}", node.errors) for node in (run.nodes if run else ())]
    sources += [(f"rank {one.rank}", one.errors) for one in (run.ranks.values() if run else ())]
    return {f"{source}, {place}": n for source, errors in sources for place, n in dict(errors).items()}


def _sent(processes: Iterable[RankProcess]) -> tuple[int, float]:
    """Return the number of bytes that the agents have sent, and the seconds that sending took."""
    with_bytes = [process for process in processes if process.sent_bytes is not None]
    seconds = max(
        ((process.last_seen_ns - process.first_seen_ns) / 1e9 for process in with_bytes), default=0.0
    )
    return sum(process.sent_bytes or 0 for process in with_bytes), seconds


def losing(ledger: WholeLedger, over: bool) -> list[tuple[str, RankLedger]]:
    """
    Return the ranks that lost rows. For a run that has ended, also the ranks whose last rows are
    missing.
    """
    return [
        (rank, rows)
        for rank, rows in ledger.per_rank.items()
        if rows.dropped.total or (over and rows.unreported is None)
    ]


def facts(health: Mapping[str, Any]) -> dict[str, str]:
    """Return the monitor's cost as text, by name."""
    cost, polls = health["overhead"], health["poll_ms"]
    return {
        "on the training thread": text.unit(cost.training_thread_us_per_step, "µs a step"),
        "agent": text.unit(cost.agent_cpu_pct, "% of a core"),
        "sent by the ranks": text.size(health["bytes_per_s"], "/s"),
        "relays started anew": f"{health['restarts']:,}",
        "one poll of this view": f"{text.ms(polls['p50'])}, p95 {text.ms(polls['p95'])}",
    }


def dropped_text(dropped: Dropped) -> str:
    """Return where rows were dropped: "agent 12, relay 3"."""
    return ", ".join(f"{text.words(place)} {rows:,}" for place, rows in dropped.by_place.items())
