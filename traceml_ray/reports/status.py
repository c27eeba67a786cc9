"""The state of a session, live or stored, as plain text and as data: `traceml-ray status`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from traceml_ray import text
from traceml_ray.document.json import as_json
from traceml_ray.document.model import Block, Column, Facts, Table
from traceml_ray.document.text import page
from traceml_ray.reports.contents import ledger_facts, runs_table, sinks_table
from traceml_ray.reports.headlines import restarted
from traceml_ray.store import query
from traceml_ray.store.rank_processes import RankProcess, node_key
from traceml_ray.store.results import NodeInfo
from traceml_ray.store.session import Live, start_text
from traceml_ray.wire.messages import NOT_MEASURED

Send = Callable[[bytes], bytes]


def render_status(send: Send, folder: Path, holder: int | None, now: int) -> str:
    """
    Return the status of the session in `folder` as text, from the answers of `send`. `holder` is the pid of
    the process that holds the session, if it lives. `now` is the wall clock in ns. Raises `QueryError`.
    """
    status, verdict, runs, ranks, nodes, processes, ledger = _ask(send)
    labels = _labels(nodes)
    alone = (status.launcher or "ray") == "ray" or (status.ending or {}).get("missing")
    holds = "aggregator" if alone else "launcher"
    live = f"live, {holds} pid {holder}" if holder else f"no {holds} holds it"
    parts: list[Block | Sequence[str]] = [[f"{folder}: {status.status} ({live})"]]
    if verdict is not None:
        parts.append(Facts(("Verdict", f"{text.words(verdict.label)}: {verdict.why}")))
    parts.append(runs_table(runs, status.run))
    earlier = next((run.earlier for run in runs if run.id == status.run), ())
    parts.append(Facts(("Restarts", restarted(earlier))))
    parts.append(_ranks(ranks, labels, now) if ranks else ["No rank has reported."])
    lost = [labels[node.node_id] for node in nodes if node.lost_ns]
    parts.append(Facts(("Nodes", ", ".join(lost))))
    parts.append(ledger_facts(ledger))
    parts.append(sinks_table(status.sinks))
    errors, missing = _counted(status.errors, nodes, processes)
    parts.append(_counts("Swallowed errors", errors))
    parts.append(_counts("Not measured", missing))
    return page(parts)


def render_start(folder: Path, live: Live) -> str:
    """Return the status of a live session that has no session file yet, as text."""
    state = "starting" if live.monitor != "failed" else "no live monitor"
    return page([[f"{folder}: {state} (launcher pid {live.pid})"], [start_text(live)]])


def start_json(folder: Path, live: Live) -> str:
    """Return the status of a live session that has no session file yet, as indented JSON."""
    state = "starting" if live.monitor != "failed" else "running"
    document = {
        "session": folder.name,
        "path": str(folder),
        "status": state,
        "live": True,
        "holder_pid": live.pid,
        "monitor": live.monitor,
        "detail": live.detail or None,
    }
    return as_json(document)


def status_json(send: Send, folder: Path, holder: int | None, now: int) -> str:
    """
    Return the status of a session as indented JSON; unknown values are null. Arguments are as for
    `render_status`.
    """
    status, verdict, runs, ranks, nodes, processes, ledger = _ask(send)
    labels = _labels(nodes)
    errors, missing = _counted(status.errors, nodes, processes)
    document = {
        "session": status.session,
        "path": str(folder),
        "status": status.status,
        "live": holder is not None,
        "holder_pid": holder,
        "run": status.run,
        "verdict": verdict,
        "runs": runs,
        "ranks": [_rank_json(rank, process, labels, now) for rank, process in ranks.items()],
        "nodes": nodes,
        "ledger": ledger,
        "sinks": status.sinks,
        "errors": errors,
        "not_measured": missing,
    }
    return as_json(document)


def _rank_json(rank: int, process: RankProcess, labels: Mapping[str, str], now: int) -> dict[str, Any]:
    key = node_key(process)
    return {
        "rank": rank,
        "name": process.identity.name if process.identity else None,
        "node": labels.get(key, key),
        "pid": process.identity.pid if process.identity else None,
        "last_seen_s": (now - process.last_seen_ns) / 1e9,
        "step": process.last_step,
        "stage": None if process.ended else process.stage,
        "produced": process.produced,
        "stored": process.stored,
        "end": process.end or None,
    }


def _ask(send: Send) -> tuple[Any, ...]:
    asked = (
        query.GetStatus(),
        query.GetVerdict(),
        query.GetRuns(),
        query.GetRanks(),
        query.GetNodes(),
        query.GetProcesses(),
    )
    return tuple(query.ask(send, [*asked, query.GetLedger()]))


def _labels(nodes: list[NodeInfo]) -> dict[str, str]:
    return {node.node_id: node.label + " (lost)" * bool(node.lost_ns) for node in nodes}


def _counted(
    aggregator_errors: dict[str, int], nodes: list[NodeInfo], processes: list[RankProcess]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return how often each error was swallowed, and for how many processes each measurement is missing."""
    errors = _errors(aggregator_errors, nodes, processes)
    missing = Counter(f"{name}: {why}" for process in processes for name, why in process.missing.items())
    for place in [place for place in errors if NOT_MEASURED in place]:
        missing[place.replace(NOT_MEASURED, "")] = errors.pop(place)
    return errors, missing


def _ranks(ranks: Mapping[int, RankProcess], labels: Mapping[str, str], now: int) -> Table:
    def seen_s(rank: int) -> float:
        return (now - ranks[rank].last_seen_ns) / 1e9

    columns = [
        Column("rank", str, "figures"),
        Column("name", lambda rank: identity.name if (identity := ranks[rank].identity) else ""),
        Column("node", lambda rank: labels.get(key := node_key(ranks[rank]), key)),
        Column(
            "pid",
            lambda rank: str(identity.pid) if (identity := ranks[rank].identity) else text.NA,
            "figures",
        ),
        Column(
            "last seen", lambda rank: f"{text.age((now - ranks[rank].last_seen_ns) / 1e9)} ago", "figures"
        ),
        Column("step", lambda rank: ranks[rank].last_step, "plain"),
        Column("in", lambda rank: "" if ranks[rank].ended else ranks[rank].stage or ""),
        Column("produced", lambda rank: ranks[rank].produced, "plain"),
        Column("stored", lambda rank: ranks[rank].stored, "plain"),
        Column("end", lambda rank: ranks[rank].end),
    ]
    return Table("Ranks", columns, [*ranks])


def _errors(
    aggregator_errors: dict[str, int], nodes: list[NodeInfo], processes: list[RankProcess]
) -> dict[str, int]:
    """Return the swallowed errors by source and place. A rank's errors are those of all its processes."""
    sources = [("aggregator", aggregator_errors)]
    sources += [(f"relay of {node.hostname}", node.errors) for node in nodes]
    sources += [(f"rank {process.rank}", process.errors) for process in processes]
    counts: Counter[str] = Counter()
    for source, errors in sources:
        counts.update({f"{source}, {place}": count for place, count in errors.items()})
    return counts


def _counts(title: str, counts: dict[str, int]) -> list[str]:
    return [title, *(f"  {count:6} × {name}" for name, count in sorted(counts.items()))] if counts else []
