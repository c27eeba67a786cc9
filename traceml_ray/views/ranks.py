"""The ranks of a run: where each is, in what state, and where its time goes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from traceml_ray.analysis.window import missing_of
from traceml_ray.stages import STAGES
from traceml_ray.store import query
from traceml_ray.store.nodes import node_key

from .run_state import RunState
from .session_poll import SessionPoll
from .values import rounded

_MOST_MISSING = 1024
NAMED, DIED, SILENT = "named by the verdict", "died", "no report"
SERVES = "serves RPC, no steps"
_NO_TIMES: dict[str, Any] = {"busy_ms": None, "over": None, "stages": {}}
_NO_REPORT: dict[str, Any] = {
    **dict.fromkeys(
        ("node", "node_key", "role", "local_rank", "gpu", "exit_code", "last_step", "open_stage", "death")
    ),
    "hostname": "",
    "state": SILENT,
    **_NO_TIMES,
}


def rank_rows(
    cache: SessionPoll, run: RunState, steps: tuple[int, int] | None = None
) -> list[dict[str, Any]]:
    """
    Return a row for each rank: where it is, what its steps (the first and the last of them may be given) are
    made of; named ones first, then the dead.
    """
    asked = query.RankTimes(run.id) if steps is None else query.RankTimes(run.id, True, *steps)
    times: Any = cache.ask(asked) or {"ranks": [], "busy_ms": [], "over": [], "stages": []}
    busy, over = (rounded(np.asarray(times[name], dtype=float), 4) for name in ("busy_ms", "over"))
    stages = rounded(np.asarray(times["stages"], dtype=float).reshape(-1), 4)
    index_of_rank = {rank: index for index, rank in enumerate(times["ranks"])}
    dead = {death["rank"]: death for death in cache.deaths(run)}
    named, reporting = {*run.named["ranks"]}, run.reporting()
    rows = [{**_NO_REPORT, "rank": rank} for rank in missing_of(run.world, run.ranks, _MOST_MISSING)]
    for rank, process in run.ranks.items():
        rank_position, index, identity = (
            position(run, rank, reporting),
            index_of_rank.get(rank),
            process.identity,
        )
        key = node_key(process) if identity else None
        row = {
            **rank_position,
            "state": DIED if rank in dead else NAMED if rank in named else rank_position["state"],
            "node": None if key is None else run.labels.get(key, key),
            "node_key": key,
            "hostname": identity.hostname if identity else "",
            "exit_code": process.exit_code,
            "gpu": None,
            "death": dead.get(rank),
        }
        if index is None:
            row |= _NO_TIMES
        else:
            mine = stages[index * len(STAGES) : (index + 1) * len(STAGES)]
            row["stages"] = dict(zip(STAGES, mine, strict=True))
            row["busy_ms"], row["over"] = busy[index], over[index]
        rows.append(row)
    first = {NAMED: 0, DIED: 1}
    return sorted(rows, key=lambda row: (first.get(row["state"], 2), row["rank"]))


def position(run: RunState, rank: int, reporting: Collection[int] | None = None) -> dict[str, Any]:
    """Return which rank of its node a rank is, and what it is doing; `reporting` as of the run."""
    process = run.ranks[rank]
    reporting = run.reporting() if reporting is None else reporting
    going = SERVES if process.serves else "running"
    identity = process.identity
    return {
        "rank": rank,
        "local_rank": identity.local_rank if identity else None,
        "last_step": process.last_step,
        "open_stage": None if process.ended or process.serves else process.stage,
        "role": process.work,
        "state": process.end or (going if rank in reporting else "silent"),
    }
