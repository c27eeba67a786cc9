"""Memory samples of ranks that look like those of real runs, for tests and the benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from traceml_ray.signals.memory.shapes import Float, Series

MIB, GIB = 1 << 20, 1 << 30
SECOND = 1_000_000_000
BEGAN = 1_700_000_000 * SECOND
STEP_S = 0.25


def _times(n: int, every_s: float, start_s: float) -> np.ndarray[Any, np.dtype[np.int64]]:
    return BEGAN + np.round((start_s + np.arange(n) * every_s) * SECOND).astype(np.int64)


def on_device(
    rank: int,
    allocated: Sequence[float] | Float,
    *,
    gap: Sequence[float] | Float | float = 600 * MIB,
    node: str = "",
    device: int = 0,
    every_s: float = 1.0,
    start_s: float = 0.0,
    first_step_s: float | None = 0.0,
    bound_s: float = 0.001,
    total: float = 80 * GIB,
    process: str = "",
    held: Float | float | None = None,
    **more: Any,
) -> Series:
    """
    Return the series of a rank on a GPU. Torch holds `held` bytes, by default 1.5 times the peak of allocated
    memory. The process uses `gap` bytes in addition. Steps begin `first_step_s` after `start_s`.
    """
    allocated = np.asarray(allocated, np.float64)
    reserved = np.maximum.accumulate(1.5 * allocated) if held is None else held + np.zeros(len(allocated))
    used = reserved + gap
    columns = {
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "process_bytes": used,
        "device_used_bytes": used,
        "device_total_bytes": np.full(len(used), total),
    }
    return _series(rank, {**columns, **more}, node, device, every_s, start_s, first_step_s, bound_s, process)


def on_host(
    rank: int,
    rss: Sequence[float] | Float,
    *,
    node: str = "",
    every_s: float = 1.0,
    start_s: float = 0.0,
    step_s: float = STEP_S,
    first_step_s: float | None = 0.0,
    bound_s: float = 0.001,
    total: float = 64 * GIB,
    others: float = 8 * GIB,
    process: str = "",
    **more: Any,
) -> Series:
    """Return the series of a rank without a device, on a host where other programs use `others` bytes."""
    rss = np.asarray(rss, np.float64)
    columns = {
        "rss_bytes": rss,
        "limit_bytes": np.full(len(rss), total),
        "limit_used_bytes": rss + others,
        **more,
    }
    return _series(rank, columns, node, None, every_s, start_s, first_step_s, bound_s, process, step_s=step_s)


def _series(
    rank: int,
    columns: dict[str, Float],
    node: str,
    device: int | None,
    every_s: float,
    start_s: float,
    first_step_s: float | None,
    bound_s: float,
    process: str,
    *,
    step_s: float = STEP_S,
) -> Series:
    n = len(next(iter(columns.values())))
    t_ns = _times(n, every_s, start_s)
    first_ns = None if first_step_s is None else BEGAN + round((start_s + first_step_s) * SECOND)
    steps = np.full(n, -1, np.int64)
    if first_ns is not None:
        steps = np.maximum((t_ns - first_ns) // round(step_s * SECOND) + 1, -1)
    return Series(
        rank=rank,
        node=node or f"node-{rank}",
        process=process or f"process-{rank}",
        device=device,
        t_ns=t_ns,
        step=steps,
        columns=columns,
        bound_ns=round(bound_s * SECOND),
        first_step_ns=first_ns,
    )


def at(series_ns: int | None) -> float:
    """Return a time in seconds since the common beginning of all series."""
    assert series_ns is not None
    return (series_ns - BEGAN) / SECOND


def flat(n: int, seed: int = 0, level: float = 10 * GIB, noise: float = 5 * MIB) -> Float:
    """Return memory that does not change, except for the part of a step that a sample happens to see."""
    return level + np.random.default_rng(seed).uniform(0, noise, n)


def jumps(n: int, when: int, by: float, seed: int = 0) -> Float:
    """Return memory that is `by` bytes higher from sample `when` on."""
    return flat(n, seed) + by * (np.arange(n) >= when)


def leaks(n: int, when: int, by: float, seed: int = 0) -> Float:
    """Return memory that grows by `by` bytes with every sample from `when` on."""
    return flat(n, seed) + by * np.maximum(np.arange(n) - when, 0)
