"""
Builds `summary.json` (schema `traceml_ray/summary/1`) from a session file alone, at any time.

Times are milliseconds, shares 0..1, percentages named `_pct`, moments ISO 8601 in UTC. What is
not known is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import msgspec
import numpy as np

from traceml_ray.analysis.baseline import Baseline
from traceml_ray.analysis.busy import StepSummary
from traceml_ray.analysis.episodes import Brief
from traceml_ray.analysis.history import RunJudge
from traceml_ray.analysis.parts import with_part
from traceml_ray.analysis.step_times import span
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.window import RankRows, Window, missing_of
from traceml_ray.reports.deaths import Death, deaths, headline
from traceml_ray.reports.hangs import hangs, still_open
from traceml_ray.reports.machines import Machines, system_of
from traceml_ray.reports.parts import StoredParts
from traceml_ray.reports.whole import Whole, fits, most_of, reduce
from traceml_ray.stages import SEGMENT_BITS, STAGES
from traceml_ray.store.nodes import Node, label_nodes, node_key
from traceml_ray.store.runs import of_run
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.streams import Stream, shown, world_size

SCHEMA = "traceml_ray/summary/1"
_MAX_EVENTS = 1000
_MAX_MESSAGE = 2000
_MAX_PARTED = 50
_MAX_EPISODES = 200


@dataclass
class _Read:
    """What is read from the session once."""

    session: SessionFile
    thresholds: Thresholds
    meta: dict[str, Any]
    runs: list[dict[str, Any]]
    run: dict[str, Any]
    """The one of `runs` that the summary is of; empty before any."""
    every: list[Stream]
    streams: list[Stream]
    """Those of the run."""
    ranks: dict[int, Stream]
    nodes: dict[str, Node]
    labels: dict[str, str]
    """How nodes are shown, by `node_key`."""
    rows: list[RankRows]
    events: list[dict[str, Any]]

    @property
    def most(self) -> int:
        """How many rows of each rank are held in memory."""
        return most_of(len(self.ranks))

    @property
    def own(self) -> bool:
        """Whether what the launcher said of the session holds for this run."""
        return len(self.runs) <= 1 or self.run["id"] == self.meta.get("session")

    def said(self, name: str) -> Any:
        """What was said of the run, or by the launcher of its session."""
        return self.run.get(name) or (self.meta.get(name) if self.own else None)

    @property
    def world_size(self) -> int:
        """Number of ranks the job has."""
        return world_size(self.ranks, self.said("world_size"))

    @property
    def failures(self) -> list[dict[str, Any]]:
        """How ranks of the run ended badly, as the launcher saw it."""
        runs = {(s.rank, s.identity.pid): s.identity.job_id for s in self.every if s.identity}
        other = self.run.get("id") if self.own else None
        found = self.meta.get("failures", [])
        return [f for f in found if runs.get((f["rank"], f["pid"]), other) == self.run.get("id")]

    def node_of(self, rank: int) -> str | None:
        """The rank's node as it is shown."""
        stream = self.ranks.get(rank)
        return self.labels[node_key(stream)] if stream else None


def summarize(session: SessionFile, thresholds: Thresholds, run: str | None = None) -> dict[str, Any]:
    """
    Return the summary of a run of `session` (None: the one that the session says, see `SessionFile`).

    Raises `SessionFileError` when the file cannot be read.
    """
    with session.at_one_moment():
        return _summary(_read(session if run is None else session.of(run), thresholds))


def summaries(session: SessionFile, thresholds: Thresholds) -> Iterator[dict[str, Any]]:
    """
    Yield the summary; of a run that does not fit into memory, first that of its newest steps, which takes no
    longer however long the run is. Raises `SessionFileError`.
    """
    with session.at_one_moment():
        read = _read(session, thresholds)
        if not fits(read.rows, read.most):
            yield _summary(read, newest=True)
        yield _summary(read)


def _summary(read: _Read, newest: bool = False) -> dict[str, Any]:
    session, thresholds = read.session, read.thresholds
    whole = _whole(read, session.baseline(), newest)
    judged, steps = (whole.judged, whole.steps) if whole else (None, None)
    parts, window = StoredParts(session, read.ranks), whole.window if whole else None
    performance = verdict = judged.whole() if judged else _no_step(read)
    if window is not None:
        performance = verdict = with_part(performance, window, parts.find, thresholds)
    verdicts = _spans(judged, window, parts, thresholds)
    status = read.run.get("status") or read.meta.get("status")
    found = deaths(read.failures, read.events, read.streams, failed=status == "failed")
    if found and status not in ("finished", "stopped"):
        verdict = headline(found, lambda death: read.node_of(death.rank), read.ranks, read.world_size)
    stood = hangs(read.session.verdicts()[0])
    verdict = still_open(stood, status) or verdict
    machines = Machines(read.session.machines, read.ranks, read.every, read.labels)
    verdict = machines.with_evidence(verdict, read.rows, thresholds.warmup_steps)
    run_id = read.run.get("id")
    spans = sorted([*verdicts, *stood], key=lambda span: span.from_step or 0)
    summary = {
        "schema": SCHEMA,
        "session": _session(read),
        "run": run_id,
        "runs": [_run(entry, verdict.label if entry["id"] == run_id else None) for entry in read.runs],
        "steps": _step_block(read, whole),
        "stages": [msgspec.to_builtins(stage) for stage in (steps.stages if steps else ())],
        "parts": _parts(parts, whole),
        "verdict": _verdict(verdict),
        "suspects": msgspec.to_builtins(performance.suspects),
        "verdicts": list(
            map(_verdict, machines.newest_with_evidence(spans, read.rows, thresholds.warmup_steps))
        ),
        "episodes": _episodes(judged, verdicts, read),
        "brief": msgspec.to_builtins(judged.episodes.brief if judged else Brief()),
        "baseline": _baseline(judged.baseline if judged else None),
        "ranks": _ranks(read, found),
        "memory": _memory(read),
        "system": {"nodes": system_of(session, read.nodes)},
        "events": [_event(event, read) for event in read.events[-_MAX_EVENTS:]],
        "ledger": read.session.ledger(),
        "overhead": overhead_of(read.ranks.values()),
    }
    rounded: dict[str, Any] = _rounded(summary)
    return rounded


def baseline_of(session: SessionFile, thresholds: Thresholds) -> Baseline | None:
    """Return what a step of `session` costs when all is well, or None. Raises `SessionFileError`."""
    read = _read(session, thresholds)
    kept = session.baseline()
    if kept is not None and not kept.source:
        return kept
    whole = _whole(read)
    return whole.judged.baseline if whole else None


def runs_of(session: SessionFile) -> list[dict[str, Any]]:
    """Return the runs of `session` as the summary lists them."""
    return [_run(entry) for entry in session.runs()]


def nodes_of(session: SessionFile) -> list[dict[str, Any]]:
    """Return the nodes as `SessionFile.nodes` does, with the moments `last_seen` and `lost_at`."""
    return [
        {**node, "last_seen": moment(node["last_seen_ns"]), "lost_at": moment(node["lost_ns"])}
        for node in session.nodes()
    ]


def _run(entry: dict[str, Any], label: str | None = None) -> dict[str, Any]:
    times = {name: moment(entry[name]) for name in ("started_at", "ended_at")}
    return {**entry, **times, "label": label or entry["label"]}


def _read(session: SessionFile, thresholds: Thresholds) -> _Read:
    every, meta, runs, run = session.streams(), session.meta(), session.runs(), session.run_id()
    streams = of_run(every, run)
    ranks = shown(streams)
    nodes = {node.node_id: node for node in session.cluster()}
    rows, _ = session.rows(last=most_of(len(ranks)))
    return _Read(
        session=session,
        thresholds=thresholds,
        meta=meta,
        runs=runs,
        run=next((entry for entry in runs if entry["id"] == run), {}),
        every=every,
        streams=streams,
        ranks=ranks,
        nodes=nodes,
        labels=label_nodes(nodes.values(), every),
        rows=rows,
        events=session.events()[0],
    )


def _spans(
    judged: RunJudge | None, window: Window | None, parts: StoredParts, thresholds: Thresholds
) -> tuple[Verdict, ...]:
    """Return the changes of verdict; the newest that name a rank say its part, too."""
    spans = list(judged.spans) if judged else []
    named = [at for at, span in enumerate(spans) if span.rank is not None]
    for at in named[-_MAX_PARTED:] if window is not None else ():
        assert window is not None
        spans[at] = with_part(spans[at], window, parts.find, thresholds)
    return tuple(spans)


def _episodes(judged: RunJudge | None, spans: Sequence[Verdict], read: _Read) -> list[dict[str, Any]]:
    """Return the episodes, the costliest first, with when they were and the part that was late."""
    parts = {(span.label, span.stage, span.from_step): span.part for span in spans}
    rows = {found.rank: found for found in read.rows}
    found = []
    for episode in judged.episodes.episodes[:_MAX_EPISODES] if judged else ():
        own = rows.get(min(rows) if episode.rank is None else episode.rank)
        last_ns = read.ranks[own.rank].last_rows_ns if own is not None and own.rank in read.ranks else None
        when: tuple[int | None, int | None] = (None, None)
        if own is not None and last_ns is not None:
            when = span(own.keys, own.rows, last_ns, episode.from_step, episode.to_step) or when
        part = parts.get((episode.label, episode.stage, episode.from_step))
        times = {"started_at": moment(when[0]), "ended_at": moment(when[1])}
        found.append({**msgspec.to_builtins(episode), "part": part, **times})
    return found


def _whole(read: _Read, baseline: Baseline | None = None, newest: bool = False) -> Whole | None:
    """Reduce the run, or its newest rows; None when it has none. `read.rows` are of all that then."""
    what = read.session, read.world_size, read.thresholds, read.rows, read.most, baseline
    whole = reduce(*what, newest_only=newest)
    read.rows = whole.rows if whole else []
    return whole


def _parts(parts: StoredParts, whole: Whole | None) -> list[dict[str, Any]]:
    if whole is None or whole.window is None or whole.stage_ns is None:
        return []
    stages = dict(zip(whole.window.ranks.tolist(), whole.stage_ns.tolist(), strict=True))
    return parts.block(stages, *whole.between)


def _baseline(baseline: Baseline | None) -> dict[str, Any] | None:
    if baseline is None:
        return None
    return {
        **{name: getattr(baseline, name) for name in ("from_step", "to_step", "steps")},
        "source": baseline.source or None,
        "step_ms": baseline.step_ns / 1e6,
        "stages": [
            {"name": name, "exposed_ms": level / 1e6, "mad_ms": mad / 1e6}
            for name, level, mad in zip(STAGES, baseline.level_ns, baseline.mad_ns, strict=True)
        ],
    }


_NO_STEP_NEXT = (
    "A step is a backward pass followed by an optimizer step; where the script does it another way, "
    "mark it with `with traceml_ray.trace_step(model):`."
)


def _no_step(read: _Read) -> Verdict:
    missing = {f"{name}: {why}" for stream in read.streams for name, why in stream.missing.items()}
    reason = "; ".join(sorted(missing)) or "no optimizer step ran after a backward pass"
    why = f"no step was seen: {reason if read.streams else 'no rank ever reported'}"
    return Verdict(label="telemetry_limited", why=why, next=_NO_STEP_NEXT)


def _session(read: _Read) -> dict[str, Any]:
    meta, nodes = read.meta, _nodes(read)
    strategies = [stream.strategy for stream in read.ranks.values() if stream.strategy]
    return {
        "id": meta.get("session"),
        "status": meta.get("status", "running"),
        "exit_code": meta.get("exit_code"),
        "started_at": moment(meta.get("started_at")),
        "ended_at": moment(meta.get("ended_at")),
        "launcher": read.run.get("launcher") or meta.get("launcher"),
        "command": meta.get("command"),
        "strategy": strategies[0] if strategies else meta.get("strategy"),
        "world_size": read.world_size or None,
        "silent_ranks": missing_of(read.world_size, read.ranks),
        "nnodes": read.said("nnodes") or sum(bool(node["ranks"]) for node in nodes) or None,
        "nodes": nodes,
    }


def _nodes(read: _Read) -> list[dict[str, Any]]:
    """
    Return the nodes that the run's ranks are on, then those that it lost before. Their numbers are what
    the ranks say where that can be (one number a node, and no number twice), else the order of the
    lowest ranks.
    """
    ranks: dict[str, list[int]] = {}
    said: dict[str, set[int]] = {}
    for rank, stream in read.ranks.items():
        if stream.identity is not None:
            ranks.setdefault(node_key(stream), []).append(rank)
            said.setdefault(node_key(stream), set()).add(stream.identity.node_rank)
    numbers = [number for numbers in said.values() for number in numbers]
    if len(numbers) == len(said) == len(set(numbers)):
        number = {key: min(numbers) for key, numbers in said.items()}
    else:
        number = {key: at for at, key in enumerate(sorted(ranks, key=lambda key: ranks[key][0]))}
    before = {node_key(stream) for stream in read.streams if stream.identity}.difference(ranks)
    gone = [key for key in sorted(before) if _is_lost(read, key)]
    return [
        {
            "node_rank": number.get(key),
            "node_id": key if key in read.nodes else None,
            "hostname": read.labels[key],
            "lost": _is_lost(read, key),
            "ranks": ranks.get(key, []),
        }
        for key in [*sorted(ranks, key=lambda key: number[key]), *gone]
    ]


def _is_lost(read: _Read, key: str) -> bool:
    return key in read.nodes and read.nodes[key].lost_ns is not None


def _step_block(read: _Read, whole: Whole | None) -> dict[str, Any]:
    block: dict[str, Any] = dict.fromkeys(StepSummary.__struct_fields__)
    steps = whole.steps if whole else None
    if steps is not None:
        block.update(msgspec.to_builtins(steps, str_keys=True))
    del block["stages"]
    block["count"] = whole.count if whole else 0
    block["mean_ms"] = whole.mean_ns() / 1e6 if whole else None
    block["judged"] = steps.count if steps else 0
    block["covers"] = _covers(read, whole)
    block["per_rank_median_ms"] = block["per_rank_median_ms"] or {}
    block["per_node_median_ms"] = block["per_node_median_ms"] or {}
    return block


def _covers(read: _Read, whole: Whole | None) -> dict[str, Any] | None:
    """
    Return the steps and rows that statistics and verdict over the run are of, and of how many the number of
    steps and their mean is; None when there are none.
    """
    if whole is None:
        return None
    stored = sum(stream.stored for stream in read.ranks.values())
    return {
        "from_step": whole.first_step,
        "to_step": whole.last_step,
        "rows": whole.read,
        "rows_pct": 100 * whole.read / max(whole.read, stored),
        "error_pct": whole.error_pct,
        "counted_pct": 100 * whole.counted / max(whole.counted, stored),
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(verdict)
    for name in ("suspects", "exposed_ms"):  # these have a place of their own
        del fields[name]
    return fields


def _ranks(read: _Read, found: Sequence[Death]) -> dict[str, Any]:
    died = {death.rank: death for death in found if death.stream is not None}
    processes = Counter(stream.rank for stream in read.streams)
    return {str(rank): _rank(read, rank, died.get(rank), processes[rank]) for rank in read.ranks}


def _rank(read: _Read, rank: int, death: Death | None, processes: int) -> dict[str, Any]:
    """How far a rank came and how it ended."""
    stream = read.ranks[rank]
    identity = stream.identity
    return {
        "name": (identity.name or None) if identity else None,
        "node": read.node_of(rank),
        "pid": identity.pid if identity else None,
        "attempt": identity.attempt if identity else None,
        "processes": processes,
        "last_step": None if stream.last_key is None else stream.last_key >> SEGMENT_BITS,
        "open_stage": None if stream.open_stage is None or stream.final else STAGES[stream.open_stage],
        "last_seen": moment(stream.last_seen_ns),
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


def _event(event: dict[str, Any], read: _Read) -> dict[str, Any]:
    rank = event["rank"] if event["rank"] is not None else event["data"].get("rank")
    stage, node_id = event["stage"], event["node_id"]
    return {
        "time": moment(event["t_ns"]),
        "kind": event["kind"],
        "rank": rank,
        "node": read.labels.get(node_id, node_id) if node_id else read.node_of(rank),
        "step": event["step"],
        "stage": None if stage is None else STAGES[stage],
        "message": event["message"][:_MAX_MESSAGE],
        "data": event["data"],
    }


def overhead_of(streams: Iterable[Stream]) -> dict[str, Any]:
    """Return what the monitor cost the rank that it cost most, each figure by itself."""
    marks, cpu, sent = [], [], []
    for stream in streams:
        known = stream.produced if stream.last_key is None else (stream.last_key >> SEGMENT_BITS) + 1
        steps = min(stream.produced, known)
        if stream.produced and stream.marks_ns is not None:
            marks.append(stream.marks_ns / steps / 1e3)
        if stream.produced and stream.sent_bytes is not None:
            sent.append(stream.sent_bytes / steps)
        if stream.agent_wall_ns and stream.agent_cpu_ns is not None:
            cpu.append(100 * stream.agent_cpu_ns / stream.agent_wall_ns)
    return {
        "of": "worst rank",
        "training_thread_us_per_step": max(marks, default=None),
        "agent_cpu_pct": max(cpu, default=None),
        "bytes_per_step": max(sent, default=None),
    }


def moment(t_ns: int | None) -> str | None:
    """Return ns since the epoch as ISO 8601 in UTC."""
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
