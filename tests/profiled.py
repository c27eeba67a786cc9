"""A profile of a session, with small traces of torch's profiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recorded import WALL_NS, operation

from traceml_ray.store import profiles
from traceml_ray.store.profiles import Profile, ProfileStep, RankProfile

MS = 1_000_000
ROW = [10 * MS, 10 * MS, 0, 40 * MS, 30 * MS, 10 * MS]
"""Row of a step of 100 ms. A row begins 10 ms before its step."""


def steps(number: int, begin_ns: int = WALL_NS, first: int = 0) -> list[ProfileStep]:
    """Return steps of 100 ms, each with its row."""
    begins = [begin_ns + number_of_step * 100 * MS for number_of_step in range(number)]
    return [
        ProfileStep(first + number_of_step, begin, begin + 100 * MS, begin + 90 * MS, ROW)
        for number_of_step, begin in enumerate(begins)
    ]


def events(extra: int = 0, n: int = 2) -> list[dict[str, Any]]:
    """
    Return the trace events of a rank in `n` steps: `extra` more copies in `forward` than on the
    other ranks.
    """
    one = [operation("aten::mm", 20_000, 10_000), operation("aten::add", 60_000, 10_000)]
    one += [operation("aten::copy_", 32_000 + 600 * index, 500) for index in range(extra)]
    return [event | {"ts": event["ts"] + 100_000 * index} for index in range(n) for event in one]


def stored(
    folder: Path,
    name: str,
    write: dict[int, Callable[[Path], object]],
    recorded: Sequence[ProfileStep] = tuple(steps(2)),
    **about: Any,
) -> Profile:
    """
    Create a profile in a session's folder. `write` writes the trace of each rank to a path (gzip).
    `recorded`: the known steps of the profile.
    """
    here = profiles.unfinished(folder, name)
    ranks = list[RankProfile]()
    for rank, writes in write.items():
        path = here / profiles.trace_name(rank)
        writes(path)
        size = path.stat().st_size
        clock = {"clock_offset_ns": 0, "clock_bound_ns": 200_000}
        cost = {"start_ms": 40.0 + rank, "stop_ms": 12.5, "export_ms": 80.0}
        who = {"node": f"node-{rank // 4}", "node_id": f"node-{rank // 4}", "process": rank + 1}
        trace_file = {"file": path.name, "bytes": size, "total_bytes": size, "steps": [*recorded]}
        ranks.append(RankProfile(rank, "captured", **who, **trace_file, **clock, **cost))  # type: ignore[arg-type]
    usual: dict[str, Any] = {
        "session": folder.name,
        "run": None,
        "time": "2026-11-23T10:00:00+00:00",
        "t_ns": time.time_ns(),
        "why": "it was requested.",
        "first_step": 812,
        "n_steps": 2,
        "traceml_ray": "0",
        "ranks": ranks + about.pop("others", []),
    }
    profile = Profile(id=name, **(usual | about))
    profiles.finish(folder, profile)
    return profile
