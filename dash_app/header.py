"""The head of every page: the session, its state in a sentence, the verdict, which ranks report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from traceml_ray import text
from traceml_ray.analysis.window import missing_of
from traceml_ray.reports.headlines import lost, named
from traceml_ray.reports.summary import moment

if TYPE_CHECKING:
    from .followed import Run
    from .session_cache import SessionCache


def header(cache: SessionCache, run: Run | None, asked: str | None = None) -> dict[str, Any]:
    """Return the head of every page; `asked` is the run that was asked for."""
    meta, state = cache.status, state_of(cache, run)
    entry: Mapping[str, Any] = next(
        (each for each in cache.runs if run is not None and each["id"] == run.id), {}
    )
    strategies = [stream.strategy for stream in run.ranks.values() if stream.strategy] if run else []
    verdict = run.verdict if run else None
    return {
        "version": cache.version,
        "state": state,
        "state_text": _another(cache, asked) + state_text(cache, run, state),
        "age_s": age_s(cache, run) if state in ("live", "stale") else None,
        "session": {
            "id": meta.get("session") or cache.source.target,
            "status": meta.get("status"),
            "launcher": entry.get("launcher") or meta.get("launcher"),
            "strategy": strategies[0] if strategies else meta.get("strategy"),
            "started_at": entry.get("started_at") or moment(meta.get("started_at")),
            "world_size": entry.get("world_size") or (run.world if run else None) or meta.get("world_size"),
            "nnodes": entry.get("nnodes")
            or (sum(bool(node["ranks"]) for node in run.nodes) if run else None),
            "gpus": any(sample["gpus"] for sample in (run.samples if run else {}).values()),
            "run": run.id if run else None,
            "runs": [{name: each[name] for name in ("id", "name", "label", "status")} for each in cache.runs],
        },
        "verdict": None if verdict is None else _shown(verdict, state),
        "coverage_text": coverage_text(cache, run, state),
        "step": run.last_step if run else None,
    }


def _shown(verdict: Mapping[str, Any], state: str) -> dict[str, Any]:
    """Return the verdict with its headline, and what all that was named has cost."""
    cost = lost(verdict) + " so far" * (state == "live") if verdict.get("lost_s") else ""
    kept = {name: value for name, value in verdict.items() if name not in ("episodes", "brief")}
    return {**kept, "headline": named(kept), "lost_text": cost}


def _another(cache: SessionCache, asked: str | None) -> str:
    known = asked is None or not cache.runs or any(asked in (each["id"], each["name"]) for each in cache.runs)
    return "" if known else f"There is no run {asked!r} in this session; this is the newest. "


def state_of(cache: SessionCache, run: Run | None) -> str:
    """Return the state in one word: empty, waiting, live, stale, finished or stored."""
    if not cache.status:
        return "empty"
    if cache.source.stored:
        return "stored"
    if cache.status.get("status", "running") != "running":
        return "finished"
    if cache.stale_since_ns is not None:
        return "stale"
    return "live" if run is not None and run.last_step is not None else "waiting"


def state_text(cache: SessionCache, run: Run | None, state: str) -> str:
    """Return the state in one sentence, and what to do."""
    if state == "empty":
        return cache.trouble or "Searching for the session."
    if state == "stale":
        since = text.clock(moment(cache.stale_since_ns))
        return (
            f"Aggregator not answering since {since} UTC ({cache.trouble}). The page has what was known then."
        )
    if state in ("stored", "finished"):
        status = cache.status.get("status", "running")
        ended = "was never finished" if status == "running" else f"has ended: {status}"
        reading = "" if run is None or run.whole else " It is still being read."
        return f"This session {ended}; nothing changes any more.{reading}"
    world = run.world if run else 0
    seen = sorted(run.ranks) if run else []
    missing = missing_of(world, seen)
    awaited = text.ranks(missing, world - len(seen)) if missing else ""
    if state == "waiting":
        of = world or cache.status.get("world_size")
        who = f"{len(seen):,} of {text.count(of, 'rank') if of else 'the ranks'} have reported"
        return f"Waiting for the first step: {who}." + (f" Awaited: {awaited}." if awaited else "")
    silent = sorted(set(seen) - _heard(run)) if run else []
    quiet = f"silent: {text.ranks(silent)}" if silent else ""
    parts = [f"awaited: {awaited}" if awaited else "", quiet]
    return "; ".join(["Training runs", *filter(None, parts)]) + "."


def coverage_text(cache: SessionCache, run: Run | None, state: str) -> str:
    """Return how many ranks report, and how old that is."""
    if run is None or not run.world:
        return "no rank yet"
    heard = len(_heard(run)) if state in ("live", "stale", "waiting") else len(run.ranks)
    age = age_s(cache, run) if state in ("live", "stale", "waiting") else None
    return f"{heard:,} of {text.count(run.world, 'rank')}" + (
        f", {text.age(age)} old" if age is not None else ""
    )


def age_s(cache: SessionCache, run: Run | None) -> float | None:
    """Return the age of the newest message of a rank."""
    latest = max((stream.last_seen_ns for stream in run.ranks.values()), default=None) if run else None
    return None if latest is None else round(max(0.0, (cache.clock() - latest) / 1e9), 1)


def _heard(run: Run) -> set[int]:
    return run.reporting() | {rank for rank, stream in run.ranks.items() if stream.final}
