"""What other programs read: `/health`, and `/metrics` as Prometheus text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from traceml_ray.analysis.spread import quantiles
from traceml_ray.wire import STAGES

from .board import Board
from .header import state_of
from .overview import is_over, lately

_MAX_RANKS = 1024
"""With a series of its own each: beyond, only those of nodes and of the worst rank."""
_STATES = ("empty", "waiting", "live", "stale", "finished", "stored")
Family = tuple[str, str, str, Sequence[tuple[Mapping[str, Any], float | None]]]
"""Name, kind, what it is, and a value for each set of labels."""


def health(board: Board) -> dict[str, Any]:
    """Return whether the session answers; nothing of it that is private."""
    return {
        "status": "ok" if board.stale_since_ns is None else "stale",
        "state": state_of(board, board.newest),
    }


def prometheus(board: Board) -> str:
    """Return everything as Prometheus text 0.0.4; what is not known is left out."""
    with board.lock:
        return "".join(_family(*family) for family in _families(board))


def _families(board: Board) -> Iterable[Family]:
    state = state_of(board, board.newest)
    yield "state", "gauge", "1 for the state of the session.", [({"state": s}, s == state) for s in _STATES]
    poll = quantiles(np.array(board.poll_ms or [np.nan]) / 1e3, (0.5, 0.95)).tolist()
    yield (
        "dashboard_poll_seconds",
        "gauge",
        "Time to bring the board up to date.",
        [({"quantile": share}, value) for share, value in zip(("0.5", "0.95"), poll, strict=True)],
    )
    places = [({"place": place}, count) for place, count in board.errors.items()]
    yield "dashboard_errors_total", "counter", "Errors of the dashboard, by place.", places
    ledger = board.status.get("ledger") or {}
    rows = [({"where": name}, ledger[name]) for name in ("produced", "stored") if name in ledger]
    rows += [({"where": f"dropped_{name}"}, count) for name, count in ledger.get("dropped", {}).items()]
    yield "rows_total", "counter", "Rows (rank-steps) by what became of them.", rows
    errors = [({"place": place}, count) for place, count in (board.status.get("errors") or {}).items()]
    yield "aggregator_errors_total", "counter", "Errors of the aggregator, by place.", errors
    yield from _of_run(board)


def _of_run(board: Board) -> Iterable[Family]:
    run = board.view("header")  # what is seen on the page is what is told here
    followed = board.newest
    if followed is None:
        return
    name = {"run": run["session"]["run"]}
    verdict = run["verdict"]
    if verdict is not None:
        named = {key: verdict[key] for key in ("label", "stage", "rank", "node")}
        yield "verdict", "gauge", "1 for the verdict as it stands.", [({**name, **named}, 1)]
        cost = verdict["cost_pct"] if verdict["label"] != "healthy" else 0.0
        lost = None if cost is None else cost / 100
        yield "verdict_cost_ratio", "gauge", "What is named costs, as a share of the step.", [(name, lost)]
    yield (
        "ranks",
        "gauge",
        "Ranks of the run.",
        [
            ({**name, "which": "expected"}, followed.world or None),
            ({**name, "which": "reporting"}, len(followed.reporting())),
        ],
    )
    yield "last_step", "gauge", "The newest step that all ranks reported.", [(name, run["step"])]
    recent = lately(followed, is_over(board, followed))
    if recent is None:
        return
    times = quantiles(recent.step_ms, (0.5, 0.95)).tolist()
    yield (
        "step_seconds",
        "gauge",
        "Step time over the newest steps.",
        [
            ({**name, "quantile": share}, value / 1e3)
            for share, value in zip(("0.5", "0.95"), times, strict=True)
        ],
    )
    yield (
        "exposed_seconds",
        "gauge",
        "Mean exposed time of a step, by stage.",
        [
            ({**name, "stage": stage}, ms / 1e3)
            for stage, ms in zip(STAGES, recent.exposed_ms.tolist(), strict=True)
        ],
    )
    nodes = zip(recent.apart.nodes, recent.apart.per_node[:, 0].tolist(), strict=True)
    yield (
        "node_busy_seconds",
        "gauge",
        "Median busy time of a step, by node.",
        [({**name, "node": node}, ms / 1e3) for node, ms in nodes],
    )
    busy = [*zip(followed.steps.ranks, followed.steps.nodes, recent.per_rank.tolist(), strict=True)]
    if len(busy) > _MAX_RANKS:
        busy = [busy[int(recent.apart.worst[0])]]
    yield (
        "rank_busy_seconds",
        "gauge",
        "Median busy time of a step, by rank.",
        [({**name, "rank": rank, "node": node}, ms / 1e3) for rank, node, ms in busy],
    )


def _family(
    name: str, kind: str, about: str, series: Sequence[tuple[Mapping[str, Any], float | None]]
) -> str:
    known = [(labels, float(value)) for labels, value in series if value is not None and value == value]
    if not known:
        return ""
    lines = [f"# HELP traceml_{name} {about}", f"# TYPE traceml_{name} {kind}"]
    for labels, value in known:
        told = ",".join(f'{key}="{_escaped(said)}"' for key, said in labels.items() if said is not None)
        lines.append(f"traceml_{name}{{{told}}} {value:.10g}" if told else f"traceml_{name} {value:.10g}")
    return "\n".join(lines) + "\n"


def _escaped(value: object) -> str:
    return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
