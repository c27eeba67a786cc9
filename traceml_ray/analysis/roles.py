"""
Which ranks do the same work, and how long each waits for ranks that do other work.

A *role* is a rank's place in all dimensions of the job that are not data parallel: the stage of a pipeline,
the coordinate among tensor-parallel ranks. Ranks of the same role, its *replicas*, have the same work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from traceml_ray.analysis.window import Bool, Float, Int64, Window
from traceml_ray.stages import FLAG_COUPLED, FLAG_NO_PEERS, SEGMENT_BITS, SYNC_WAIT

DATA_DIMENSIONS = frozenset(
    ("dp", "dp_replicate", "dp_shard", "replicate", "shard", "fsdp", "hsdp", "ddp", "data", "data_parallel")
)
"""Names of dimensions along which ranks do the same work on other data."""
_MOST = 64
_PIPELINE = ("pp", "pipe", "pipeline", "stage")


class RoleShare(msgspec.Struct, frozen=True, kw_only=True):
    """How many ranks a role has, and what share of their time they wait for ranks of other roles."""

    role: str
    size: int
    bubble: float | None
    """0..1, the mean over its ranks; None: these waits are not seen."""


def role_of(placement: Mapping[str, Any]) -> str | None:
    """
    Return the role of a rank by its `wire.Placement`: "pp=1 tp=0"; None where only data parallelism is known.

    A stage of a pipeline counts where the mesh has no dimension for it.
    """
    mesh, stages = placement.get("mesh") or {}, placement.get("stages") or []
    parts = [f"{name}={at}" for name, (at, size) in mesh.items() if size > 1 and name not in DATA_DIMENSIONS]
    if stages and placement.get("of_stages", 0) > 1 and not {*mesh} & {*_PIPELINE}:
        parts.insert(0, f"stage={'+'.join(map(str, stages))}")
    return " ".join(parts) or None


def several(window: Window) -> bool:
    """Whether ranks wait for others that do other work: stages of a pipeline, tensor-parallel ranks."""
    return any({"pp", "tp"} & {*strategy.split("+")} for strategy in window.strategies)


def waited_apart_ns(window: Window, synced: Bool) -> Int64:
    """
    Return how long each rank waited for other roles on its way to each exchange, ns (K, R).

    Where it is known it has rows of its own: not `synced` (K,), each before one of its step that is.
    """
    steps = window.keys >> SEGMENT_BITS
    before = np.zeros(len(steps), np.bool_)
    before[:-1] = ~synced[:-1] & synced[1:] & (steps[:-1] == steps[1:])
    waited: Int64 = np.where(before[:, None], window.d[:, :, SYNC_WAIT], 0)
    return waited


def bubbles(window: Window) -> Float | None:
    """Return the share (0..1) of its time that each rank (R,) waits for other roles; None: not seen."""
    if not several(window) or not window.d.any() or (window.flags & FLAG_COUPLED).any():
        return None
    apart = window.flags & FLAG_NO_PEERS != 0
    waited: Float = np.where(apart, window.d[:, :, SYNC_WAIT], 0).sum(axis=0).astype(float)
    share: Float = waited / np.maximum(window.d.sum(axis=(0, 2)), 1)
    return share


def shares(window: Window) -> tuple[RoleShare, ...]:
    """Return the roles of `window`, in order of their lowest rank; of very many, the first."""
    known = bubbles(window)
    of: dict[str, list[int]] = {}
    for place, role in enumerate(window.roles):
        if role is not None:
            of.setdefault(role, []).append(place)
    return tuple(
        RoleShare(
            role=role,
            size=len(places),
            bubble=None if known is None else float(known[places].mean()),
        )
        for role, places in [*of.items()][:_MOST]
    )
