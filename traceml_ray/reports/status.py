"""Renders the state of a session, live or stored, as plain text: `traceml-ray status`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from traceml_ray import text
from traceml_ray.reports.layout import facts, page, table
from traceml_ray.reports.summary import runs_of
from traceml_ray.reports.text import ledger_lines, run_lines
from traceml_ray.store.nodes import Node, label_nodes, node_key
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.streams import Stream
from traceml_ray.wire import SEGMENT_BITS, STAGES


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
    holds = "aggregator" if meta.get("launcher", "ray") == "ray" else "launcher"
    live = f"live, {holds} pid {holder}" if holder else f"no {holds} holds it"
    parts = [[f"{folder}: {meta.get('status', 'running')} ({live})"]]
    if verdicts:
        last = verdicts[-1]
        parts.append(facts(("Verdict", f"{text.words(last['label'])}: {last['why']}")))
    parts.append(run_lines(runs_of(session), session.run_id()))
    ranks = session.ranks()
    rows = [_row(rank, stream, labels[node_key(stream)], now) for rank, stream in ranks.items()]
    headers = (">rank", "name", "node", ">pid", ">last seen", ">step", "in", ">produced", ">stored", "end")
    parts.append(table("Ranks", headers, rows) or ["No rank has reported."])
    lost = [labels[node.node_id] for node in nodes if node.lost_ns]
    parts.append(facts(("Nodes", ", ".join(lost))))
    parts.append(ledger_lines(session.ledger()))
    parts.append(_counts("Swallowed errors", _errors(meta, nodes, streams)))
    parts.append(_counts("Not measured", _missing(streams)))
    return page(parts)


def _row(rank: int, stream: Stream, node: str, now: int) -> tuple[str, ...]:
    return (
        str(rank),
        stream.identity.name if stream.identity else "",
        node,
        str(stream.identity.pid) if stream.identity else text.NA,
        f"{text.age((now - stream.last_seen_ns) / 1e9)} ago",
        text.NA if stream.last_key is None else text.plain(stream.last_key >> SEGMENT_BITS),
        "" if stream.open_stage is None or stream.ended else STAGES[stream.open_stage],
        text.plain(stream.produced),
        text.plain(stream.stored),
        _end(stream),
    )


def _end(stream: Stream) -> str:
    if stream.exit_code:
        return f"exit code {stream.exit_code}"
    return "finished" if stream.final else "lost" if stream.ended else ""


def _errors(meta: dict[str, Any], nodes: list[Node], streams: list[Stream]) -> dict[str, int]:
    found = {f"aggregator, {place}": count for place, count in meta.get("errors", {}).items()}
    for node in nodes:
        found.update({f"relay of {node.hostname}, {place}": n for place, n in node.errors.items()})
    for stream in streams:
        found.update({f"rank {stream.rank}, {place}": count for place, count in stream.errors.items()})
    return found


def _missing(streams: list[Stream]) -> dict[str, int]:
    found: dict[str, int] = {}
    for stream in streams:
        for name, reason in stream.missing.items():
            found[f"{name}: {reason}"] = found.get(f"{name}: {reason}", 0) + 1
    return found


def _counts(title: str, counts: dict[str, int]) -> list[str]:
    return [title, *(f"  {count:6} × {name}" for name, count in sorted(counts.items()))] if counts else []
