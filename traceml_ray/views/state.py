"""
The state of a session in one word and in a sentence, how complete its data is, and the verdict in
sentences.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from traceml_ray import text
from traceml_ray.analysis.roles import mode
from traceml_ray.analysis.verdict_shapes import TimedEpisode, VerdictInfo
from traceml_ray.analysis.window import missing_of
from traceml_ray.reports.headlines import coverage, restarted, since
from traceml_ray.reports.run_facts import moment
from traceml_ray.store.results import RunInfo
from traceml_ray.store.session import start_text

from .run_state import RunState
from .session_poll import SessionPoll
from .values import age_s


class CurrentEpisode(NamedTuple):
    """The episode that a verdict is about, and what else happened when it began."""

    episode: TimedEpisode
    """The episode. In a run that has ended, it is not open any more."""
    changes: list[str]
    """What else happened when it began, in a few words each."""
    alone: bool
    """Whether it is the only episode of its run."""


BADGES = {
    "empty": "no session",
    "stored": "stored file",
    "missing": "not found",
    "waiting": "starting",
    "unwatched": "no live monitor",
    "idle": "run ended",
}
RUNNING = ("live", "stale", "waiting", "ending")
OVER = ("stored", "finished")
"""States in which the session has ended."""
RUN_OVER = (*OVER, "idle")
"""States in which the run has ended."""
_ENDED = {"running": "The session was never finished", "stopped": "The session was stopped"}


def state_of(cache: SessionPoll, run: RunState | None) -> str:
    """
    Return the state in one word: empty, starting, unwatched, waiting, live, stale, ending, idle (the run has
    ended, but its session continues), finished or stored.
    """
    if cache.status is None:
        live = cache.source.starting
        return "empty" if live is None else "unwatched" if live.monitor == "failed" else "starting"
    if cache.source.stored:
        return "stored"
    if cache.is_over:
        return "finished"
    if cache.stale_since_ns is not None:
        return "stale"
    if run is None or run.last_step is None:
        return "waiting"
    if _has_ended(entry_of(cache, run)):
        return "idle"
    return "ending" if run.died or all(process.ended for process in run.ranks.values()) else "live"


def entry_of(cache: SessionPoll, run: RunState | None) -> RunInfo | None:
    """Return what the session reports about a run. None: unknown."""
    return next((entry for entry in cache.runs if run is not None and entry.id == run.id), None)


def _has_ended(entry: RunInfo | None) -> bool:
    """Return whether a run of a live session has ended. For plain actors, nothing else reports that."""
    if entry is None or entry.status == "running":
        return False
    return entry.status != "ended" or entry.launcher in (None, "ray")


def state_text(cache: SessionPoll, run: RunState | None, state: str) -> str:
    """Return the state in one sentence, with what to do, if anything."""
    if state in ("starting", "unwatched"):
        live = cache.source.starting
        return (live and start_text(live)) or "Training is running. Its aggregator does not answer yet."
    if state == "empty":
        return cache.trouble or "Searching for the session."
    if state == "stale":
        since = moment(cache.stale_since_ns)
        return f"Aggregator not answering since {since} ({cache.trouble}). Showing the last known state."
    if state in OVER:
        status = cache.status.status if cache.status else "running"
        ended = _ENDED.get(status, f"The session has {status}")
        if cache.trouble:
            return f"{ended}. Part of it cannot be read: {cache.trouble}."
        read = run is None or run.is_read_to_end
        return f"{ended}. {'Showing the stored session.' if read else 'Reading the stored session …'}"
    world = run.world if run else 0
    seen = sorted(run.ranks) if run else []
    missing = missing_of(world, seen)
    awaited = text.ranks(missing, world - len(seen)) if missing else ""
    if state == "waiting":
        expected = world or (cache.status.world_size if cache.status else None)
        reported = (
            f"{len(seen):,} of {text.count(expected, 'rank') if expected else 'the ranks'} have reported"
        )
        began = cache.status.started_at if cache.status and len(cache.runs) < 2 else None  # of the first run
        took = "" if began is None else f" ({text.age(age_s(cache.clock(), began))})"
        starting = f"The run is starting: Ray is up, waiting for the first step{took}. {reported}."
        return starting + (f" Missing: {awaited}." if awaited else "")
    if run and state == "ending":
        return _ending_text(run)
    if run and state == "idle":
        return _idle_text(cache, run)
    silent = sorted(set(seen) - _heard(run)) if run else []
    parts = [
        f"waiting for {awaited}" if awaited else "",
        f"no data from {text.ranks(silent)}" if silent else "",
    ]
    hangs = run is not None and run.verdict is not None and run.verdict.label == "hang"
    return "; ".join(["No step is completed" if hangs else "Training is running", *filter(None, parts)]) + "."


def _ending_text(run: RunState) -> str:
    ended = [rank for rank, process in run.ranks.items() if process.ended]
    going = sorted(set(run.ranks) - {*ended})
    if not going:
        return "All ranks have ended."
    gone = f"{text.ranks(ended)} {'has' if len(ended) == 1 else 'have'} ended, " if ended else ""
    rest = f"{gone}{text.ranks(going)} still {'runs' if len(going) == 1 else 'run'}."
    return rest[:1].upper() + rest[1:]


def _idle_text(cache: SessionPoll, run: RunState) -> str:
    index, entry = next((n, entry) for n, entry in enumerate(cache.runs) if entry.id == run.id)
    how = "" if entry.status == "ended" else f": {entry.status}"
    after = [later_run for later_run in cache.runs[index + 1 :] if later_run.status == "running"]
    then = f"run {after[-1].name} is running" if after else "it waits for the next run"
    return f"Run {entry.name} has ended{how}. The session continues: {then}."


def coverage_text(cache: SessionPoll, run: RunState | None, state: str) -> str:
    """Return how many ranks report, have finished or have died, and the age of their data."""
    if state in ("starting", "unwatched"):
        return ""
    if run is None or not run.world:
        return "no rank yet"
    newest = max((process.last_seen_ns for process in run.ranks.values()), default=None)
    died = len(cache.deaths(run))
    if state not in RUNNING:
        return coverage(len(run.ranks), run.world, died)
    finished, age = sum(process.final for process in run.ranks.values()), age_s(cache.clock(), newest)
    parts = [
        f"{len(run.reporting()):,} of {text.count(run.world, 'rank')} reporting",
        f", {finished:,} finished" if finished else "",
        f", {died:,} died" if died else "",
        f" · data {text.age(age)} old" if age is not None else "",
    ]
    return "".join(parts)


def _heard(run: RunState) -> frozenset[int]:
    return run.reporting() | {rank for rank, process in run.ranks.items() if process.final}


def session_facts(cache: SessionPoll, run: RunState | None) -> dict[str, Any]:
    """Return name, launcher, size and parallelism of a session, as far as they are known."""
    meta = cache.status
    entry = entry_of(cache, run)
    parallel = mode(process.strategy for process in run.ranks.values()) if run else None
    nodes = sum(bool(node.ranks) for node in run.nodes) if run else None
    return {
        "id": (meta and meta.session) or cache.source.target,
        "launcher": (entry and entry.launcher) or (meta and meta.launcher),
        "strategy": parallel or (meta and meta.strategy),
        "world_size": (entry and entry.world_size) or (run and run.world) or (meta and meta.world_size),
        "nnodes": (entry and entry.nnodes) or nodes,
        "gpus": any(sample["gpus"] for sample in (run.samples if run else {}).values()),
        "memory": any(process.memory_from for process in run.ranks.values()) if run else False,
        "run": run.id if run else None,
        "restarted": restarted(entry.earlier if entry else ()),
    }


def why_text(verdict: VerdictInfo, incident: CurrentEpisode | None) -> str:
    """Return the reason for the verdict, without its beginning and cost."""
    notes = [note for note in verdict.note.split("; ") if note]
    why = verdict.why
    if incident:
        notes = [note for note in notes if " so far, cost " not in note]
        why = why.replace(f" {verdict.saving}", "") if verdict.saving else why
    return why + (f" ({'; '.join(notes)})" if notes else "")


def began_text(
    cache: SessionPoll,
    run: RunState | None,
    verdict: VerdictInfo | None,
    incident: CurrentEpisode | None,
) -> str:
    """Return since when the verdict has held, and what else happened then."""
    if run is None or verdict is None:
        return ""
    if incident is None:
        first = next((death for death in cache.deaths(run) if death.first), None)
        if first is not None:
            return f"Ended {'at' if first.exact else 'about'} {moment(first.t_ns)}."
        return f"Since {moment(verdict.began_ns)}." if verdict.began_ns else ""
    began = since(incident.episode)
    changes = "; ".join(incident.changes)
    if changes:  # the last one may be cut short: …
        changes = f" When it began: {changes}{'' if changes.endswith('…') else '.'}"
    return f"{began[:1].upper()}{began[1:]}.{changes}"
