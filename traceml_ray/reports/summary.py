"""
Builds `summary.json` (schema `traceml_ray/summary/1`) from a session file alone, at any time.

Times are milliseconds, shares 0..1, percentages named `_pct`, moments ISO 8601 in UTC. What is
not known is None.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import msgspec
import numpy as np

from traceml_ray.analysis.busy import StepSummary, summarise
from traceml_ray.analysis.history import judge_run
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.verdict import Suspect, Verdict
from traceml_ray.analysis.window import RankRows, align
from traceml_ray.reports.deaths import Death, culprit, deaths, headline
from traceml_ray.store.session_file import SessionFile, ledger
from traceml_ray.store.streams import Stream, node_labels, shown, world_size
from traceml_ray.wire import SEGMENT_BITS, STAGES

SCHEMA = "traceml_ray/summary/1"
_MAX_ROWS = 2_000_000
"""Rows (steps × ranks) that statistics are taken from: the newest, in a run that has more."""
_MAX_EVENTS = 1000


@dataclass
class _Read:
    """What is read from the session once."""

    session: SessionFile
    thresholds: Thresholds
    meta: dict[str, Any]
    streams: list[Stream]
    ranks: dict[int, Stream]
    labels: dict[int, str]
    rows: list[RankRows]
    events: list[dict[str, Any]]

    @property
    def world_size(self) -> int:
        """Number of ranks the job has."""
        return world_size(self.ranks, self.meta.get("world_size"))

    def node_of(self, rank: int) -> str | None:
        """The rank's node as it is shown."""
        stream = self.ranks.get(rank)
        return self.labels[stream.id] if stream else None


def summarize(session: SessionFile, thresholds: Thresholds) -> dict[str, Any]:
    """Return the summary of `session`. Raises `SessionFileError` when the file cannot be read."""
    read = _read(session, thresholds)
    found = deaths(read.meta.get("failures", []), read.events, read.streams)
    performance, verdicts = _judged(read)
    verdict = performance
    first = culprit(found)
    if first is not None and read.meta.get("status") in ("failed", "running"):
        verdict = headline(first, read.node_of(first.rank), len(found) - 1)
    steps = _steps(read)
    summary = {
        "schema": SCHEMA,
        "session": _session(read),
        "steps": _step_block(read, steps),
        "stages": [msgspec.to_builtins(stage) for stage in (steps.stages if steps else ())],
        "verdict": _verdict(verdict),
        "suspects": [_suspect(suspect) for suspect in performance.suspects],
        "verdicts": [_verdict(span) for span in verdicts],
        "ranks": _ranks(read, found),
        "memory": _memory(read),
        "system": _system(read),
        "events": [_event(event, read) for event in read.events[-_MAX_EVENTS:]],
        "ledger": ledger(read.streams),
        "overhead": _overhead(read),
    }
    rounded: dict[str, Any] = _rounded(summary)
    return rounded


def _read(session: SessionFile, thresholds: Thresholds) -> _Read:
    streams = session.streams()
    ranks = shown(streams)
    addresses = {node["node_id"]: node["address"] for node in session.nodes()}
    rows, _ = session.rows(last=_MAX_ROWS // max(1, len(ranks)))
    labels = node_labels(ranks.values(), addresses)
    return _Read(session, thresholds, session.meta(), streams, ranks, labels, rows, session.events()[0])


def _missing(read: _Read) -> list[int]:
    reported = {rows.rank for rows in read.rows}
    return [rank for rank in range(read.world_size) if rank not in reported]


def _judged(read: _Read) -> tuple[Verdict, Sequence[Verdict]]:
    """Return (verdict over the run, changes of verdict)."""
    if not read.rows:
        return Verdict(label="telemetry_limited", why=_no_step(read), next=_NO_STEP_NEXT), ()
    run = judge_run(read.rows, read.world_size, _missing(read), read.thresholds)
    return run.whole(), tuple(run.spans)


_NO_STEP_NEXT = (
    "A step is a backward pass followed by an optimizer step; where the script does it another way, "
    "mark it with `with traceml_ray.trace_step(model):`."
)


def _no_step(read: _Read) -> str:
    if not read.streams:
        return "no step was seen: no rank ever reported"
    missing = {f"{name}: {why}" for stream in read.streams for name, why in stream.missing.items()}
    told = "; ".join(sorted(missing)) or "no optimizer step ran after a backward pass"
    return f"no step was seen: {told}"


def _session(read: _Read) -> dict[str, Any]:
    meta = read.meta
    nodes: dict[int, dict[str, Any]] = {}
    for rank, stream in read.ranks.items():
        if stream.identity is not None:
            at = stream.identity.node_rank
            named = {"node_id": stream.identity.node_id, "hostname": read.labels[stream.id]}
            nodes.setdefault(at, {"node_rank": at, **named, "ranks": []})["ranks"].append(rank)
    strategies = [stream.strategy for stream in read.ranks.values() if stream.strategy]
    return {
        "id": meta.get("session"),
        "status": meta.get("status", "running"),
        "exit_code": meta.get("exit_code"),
        "started_at": _moment(meta.get("started_at")),
        "ended_at": _moment(meta.get("ended_at")),
        "launcher": meta.get("launcher"),
        "command": meta.get("command"),
        "strategy": strategies[0] if strategies else meta.get("strategy"),
        "world_size": read.world_size or None,
        "nnodes": meta.get("nnodes") or len(nodes) or None,
        "nodes": [nodes[at] for at in sorted(nodes)],
    }


def _steps(read: _Read) -> StepSummary | None:
    """Summarise the steps after warm-up; all of them when hardly any are left."""
    window = align(read.rows, read.world_size, _missing(read))
    if not len(window.keys):
        return None
    warm = window.take(window.keys >> SEGMENT_BITS >= (window.first_step or 0) + read.thresholds.warmup_steps)
    enough = len(warm.keys) >= read.thresholds.first_window_steps
    return summarise(warm if enough else window, read.thresholds)


def _step_block(read: _Read, steps: StepSummary | None) -> dict[str, Any]:
    block: dict[str, Any] = dict.fromkeys(StepSummary.__struct_fields__)
    if steps is not None:
        block.update(msgspec.to_builtins(steps, str_keys=True))
    del block["stages"]
    numbers = [rows.keys >> SEGMENT_BITS for rows in read.rows]
    block["count"] = min((len(np.unique(steps)) for steps in numbers), default=0)
    block["judged"] = steps.count if steps else 0
    block["per_rank_median_ms"] = block["per_rank_median_ms"] or {}
    block["per_node_median_ms"] = block["per_node_median_ms"] or {}
    return block


def _verdict(verdict: Verdict) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(verdict)
    for name in ("suspects", "exposed_ms"):  # these have a place of their own
        del told[name]
    return told


def _suspect(suspect: Suspect) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(suspect)
    return told


def _ranks(read: _Read, found: Sequence[Death]) -> dict[str, Any]:
    died = {death.rank: death for death in found if death.stream is not None}
    processes = Counter(stream.rank for stream in read.streams)
    return {str(rank): _rank(read, rank, died.get(rank), processes[rank]) for rank in read.ranks}


def _rank(read: _Read, rank: int, death: Death | None, processes: int) -> dict[str, Any]:
    """How far a rank came and how it ended."""
    stream = read.ranks[rank]
    identity = stream.identity
    return {
        "node": read.node_of(rank),
        "pid": identity.pid if identity else None,
        "attempt": identity.attempt if identity else None,
        "processes": processes,
        "last_step": None if stream.last_key is None else stream.last_key >> SEGMENT_BITS,
        "open_stage": None if stream.open_stage is None or stream.final else STAGES[stream.open_stage],
        "last_seen": _moment(stream.last_seen_ns),
        "ended": "died" if death else "finished" if stream.final else None,
        "exit_code": stream.exit_code,
        "exit_reason": death.reason if death else None,
        "missing": stream.missing,
        "errors": stream.errors,
    }


def _memory(read: _Read) -> dict[str, Any]:
    samples = read.session.memory()
    per_rank = {}
    for rank, stream in read.ranks.items():
        peak, last = samples.get(stream.id, (None, None))
        per_rank[str(rank)] = {"rss_peak_bytes": peak, "rss_last_bytes": last, "allocated_peak_bytes": None}
    return {"per_rank": per_rank}


def _system(read: _Read) -> dict[str, Any]:
    """Median and peak of each node's samples."""
    hostnames = {node["node_id"]: node["hostname"] for node in read.session.nodes()}
    nodes = []
    for node_id, columns in sorted(read.session.node_columns().items()):
        gpus: dict[str, dict[str, Any]] = {}
        block: dict[str, Any] = {"node_id": node_id, "hostname": hostnames.get(node_id)}
        for name, values in columns.items():
            gpu = re.fullmatch(r"gpu(\d+)_(.+)", name)
            target = gpus.setdefault(gpu[1], {"index": int(gpu[1])}) if gpu else block
            target[gpu[2] if gpu else name] = _spread(values)
        nodes.append({**block, "gpus": list(gpus.values()) or None})
    return {"nodes": nodes}


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not len(values):
        return None
    return {"median": float(np.median(values)), "peak": float(np.max(values))}


def _event(event: dict[str, Any], read: _Read) -> dict[str, Any]:
    rank = event["rank"] if event["rank"] is not None else event["data"].get("rank")
    stage = event["stage"]
    return {
        "time": _moment(event["t_ns"]),
        "kind": event["kind"],
        "rank": rank,
        "node": read.node_of(rank) if isinstance(rank, int) else event["node_id"],
        "step": event["step"],
        "stage": None if stage is None else STAGES[stage],
        "message": event["message"],
        "data": event["data"],
    }


def _overhead(read: _Read) -> dict[str, Any]:
    """What the monitor cost the rank that it cost most, each figure by itself."""
    marks, cpu, sent = [], [], []
    for stream in read.ranks.values():
        if stream.produced and stream.marks_ns is not None:
            marks.append(stream.marks_ns / stream.produced / 1e3)
        if stream.produced and stream.sent_bytes is not None:
            sent.append(stream.sent_bytes / stream.produced)
        if stream.agent_wall_ns and stream.agent_cpu_ns is not None:
            cpu.append(100 * stream.agent_cpu_ns / stream.agent_wall_ns)
    return {
        "of": "worst rank",
        "training_thread_us_per_step": max(marks, default=None),
        "agent_cpu_pct": max(cpu, default=None),
        "bytes_per_step": max(sent, default=None),
    }


def _moment(t_ns: int | None) -> str | None:
    if not t_ns:
        return None
    return datetime.fromtimestamp(t_ns / 1e9, timezone.utc).isoformat(timespec="milliseconds")


def _rounded(value: Any) -> Any:
    """Return `value` with floats cut to what anyone can read; what is not a number becomes None."""
    if isinstance(value, float):
        return round(value, 4) if np.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(part) for part in value]
    return value
