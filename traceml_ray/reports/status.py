"""Renders the state of a session, live or stored, as plain text: `traceml-ray status`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traceml_ray import text
from traceml_ray.reports.layout import Columns, facts, page, table
from traceml_ray.reports.summary import runs_of
from traceml_ray.reports.text import ledger_lines, run_lines
from traceml_ray.stages import SEGMENT_BITS, STAGES
from traceml_ray.store.nodes import Node, label_nodes, node_key
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.streams import Stream


def render_status(session: SessionFile, folder: Path, holder: int | None, now: int) -> str:
    """
    Return the status of the session in `folder`; `holder` is the pid of who holds it, if that lives,
    `now` the wall clock in ns.
    """
    meta, streams = session.meta(), session.streams()
    nodes = session.cluster()
    labels = label_nodes(nodes, streams)
    labels.update({node.node_id: f"{labels[node.node_id]} (lost)" for node in nodes if node.lost_ns})
    verdicts, _ = session.verdicts()
    alone = meta.get("launcher", "ray") == "ray" or meta.get("ending", {}).get("missing")
    holds = "aggregator" if alone else "launcher"
    live = f"live, {holds} pid {holder}" if holder else f"no {holds} holds it"
    parts = [[f"{folder}: {meta.get('status', 'running')} ({live})"]]
    if verdicts:
        last = verdicts[-1]
        parts.append(facts(("Verdict", f"{text.words(last['label'])}: {last['why']}")))
    parts.append(run_lines(runs_of(session), session.run_id()))
    parts.append(_ranks(session.ranks(), labels, now) or ["No rank has reported."])
    lost = [labels[node.node_id] for node in nodes if node.lost_ns]
    parts.append(facts(("Nodes", ", ".join(lost))))
    parts.append(ledger_lines(session.ledger()))
    parts.append(_counts("Swallowed errors", _errors(meta, nodes, streams)))
    parts.append(_counts("Not measured", _missing(streams)))
    return page(parts)


def _ranks(ranks: Mapping[int, Stream], labels: Mapping[str, str], now: int) -> list[str]:
    columns: Columns = {
        ">rank": str,
        "name": lambda rank: identity.name if (identity := ranks[rank].identity) else "",
        "node": lambda rank: labels[node_key(ranks[rank])],
        ">pid": lambda rank: str(identity.pid) if (identity := ranks[rank].identity) else text.NA,
        ">last seen": lambda rank: f"{text.age((now - ranks[rank].last_seen_ns) / 1e9)} ago",
        ">step": lambda rank: _last_step(ranks[rank]),
        "in": lambda rank: _stage(ranks[rank]),
        ">produced": lambda rank: text.plain(ranks[rank].produced),
        ">stored": lambda rank: text.plain(ranks[rank].stored),
        "end": lambda rank: _end(ranks[rank]),
    }
    return table("Ranks", columns, ranks)


def _last_step(stream: Stream) -> str:
    return text.plain(None if stream.last_key is None else stream.last_key >> SEGMENT_BITS)


def _stage(stream: Stream) -> str:
    return "" if stream.open_stage is None or stream.ended else STAGES[stream.open_stage]


def _end(stream: Stream) -> str:
    if stream.exit_code:
        return f"exit code {stream.exit_code}"
    return "finished" if stream.final else "lost" if stream.ended else ""


def _errors(meta: dict[str, Any], nodes: list[Node], streams: list[Stream]) -> dict[str, int]:
    """Return the swallowed errors by source and place; a rank's are those of all its processes."""
    sources = [("aggregator", meta.get("errors", {}))]
    sources += [(f"relay of {node.hostname}", node.errors) for node in nodes]
    sources += [(f"rank {stream.rank}", stream.errors) for stream in streams]
    found: Counter[str] = Counter()
    for source, errors in sources:
        found.update({f"{source}, {place}": count for place, count in errors.items()})
    return found


def _missing(streams: list[Stream]) -> dict[str, int]:
    return Counter(f"{name}: {why}" for stream in streams for name, why in stream.missing.items())


def _counts(title: str, counts: dict[str, int]) -> list[str]:
    return [title, *(f"  {count:6} × {name}" for name, count in sorted(counts.items()))] if counts else []
