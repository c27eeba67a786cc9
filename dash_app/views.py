"""The pages there are, by name, and the ones about ourselves: how the monitor is doing, past sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from traceml_ray.reports.summary import overhead_of
from traceml_ray.store import query
from traceml_ray.store.streams import Stream

from . import sessions
from .details import node, rank
from .events import events
from .overview import cell, overview
from .values import number

if TYPE_CHECKING:
    from .followed import Run
    from .session_cache import SessionCache


def health(cache: SessionCache, run: Run | None) -> dict[str, Any]:
    """Return the page about ourselves."""
    ledger = cache.ask(query.Ledger(run.id if run else None))
    streams = list(run.ranks.values()) if run else []
    cost = overhead_of(streams)
    errors = {f"aggregator, {place}": n for place, n in (cache.status.get("errors") or {}).items()}
    errors |= {f"dashboard, {place}": n for place, n in cache.errors.items()}
    for known in run.nodes if run else ():
        errors |= {f"relay of {known['label']}, {place}": n for place, n in known["errors"].items()}
    for stream in streams:
        errors |= {f"rank {stream.rank}, {place}": n for place, n in stream.errors.items()}
    now = cache.clock()
    poll = np.array(cache.poll_ms or [np.nan])
    sent, seconds = _sent(streams)
    starts = (
        Counter(event["node_id"] for event in run.events if event["kind"] == "relay_start")
        if run
        else Counter()
    )
    return {
        "ledger": ledger,
        "bytes_per_s": sent / seconds if seconds else None,
        "overhead": cost,
        "errors": errors,
        "restarts": {"relays": sum(max(0, n - 1) for n in starts.values())},
        "relays": [
            {
                "key": known["node_id"],
                "label": known["label"],
                "alive": known["alive"],
                "age_s": None
                if known["last_seen_ns"] is None
                else max(0.0, (now - known["last_seen_ns"]) / 1e9),
                "ranks": known["ranks"],
            }
            for known in (run.nodes if run else ())
        ],
        "poll_ms": {"p50": number(np.median(poll)), "p95": number(np.percentile(poll, 95))},
        "memory_bytes": cache.nbytes,
    }


def _sent(streams: Iterable[Stream]) -> tuple[int, float]:
    """Return what agents have sent, and over how many seconds."""
    known = [stream for stream in streams if stream.sent_bytes is not None]
    seconds = max(((stream.last_seen_ns - stream.first_seen_ns) / 1e9 for stream in known), default=0.0)
    return sum(stream.sent_bytes or 0 for stream in known), seconds


def past(cache: SessionCache, _run: Run | None, a: str | None = None, b: str | None = None) -> dict[str, Any]:
    """Return the sessions of the folder that the source knows of, and two of them (by name) side by side."""
    out = cache.source.out
    return {"sessions": sessions.listed(out), "compare": sessions.compared(out, a, b) if a and b else None}


PAGES: dict[str, Callable[..., dict[str, Any]]] = {
    "header": lambda _cache, _run: {},
    "overview": overview,
    "node": node,
    "rank": rank,
    "events": events,
    "sessions": past,
    "health": health,
    "cell": cell,
}
