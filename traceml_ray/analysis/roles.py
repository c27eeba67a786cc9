"""
Determines which ranks do the same work, and how long each waits for ranks with other work.

A *role* is a rank's position in all dimensions of the job that are not data parallel: the stage of a
pipeline, the coordinate among tensor-parallel ranks. Ranks of the same role, its *replicas*, have the same
work.

Also determines the parallelism mode of a job from what each rank has reported.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from traceml_ray.analysis.window import Bool, Float, Int64, Window
from traceml_ray.stages import FLAG_INSEPARABLE, FLAG_NO_PEERS, INFERRED, SEGMENT_BITS, STAGES, SYNC_WAIT

DATA_DIMENSIONS = frozenset(
    ("dp", "dp_replicate", "dp_shard", "replicate", "shard", "fsdp", "hsdp", "ddp", "data", "data_parallel")
)
"""Names of mesh dimensions along which ranks do the same work on different data."""
_OTHERS = frozenset(
    (
        *("pp", "pipe", "pipeline", "stage", "tp", "tensor", "model", "mp", "etp", "ep", "expert"),
        *("cp", "sp", "context", "seq", "sequence"),
    )
)
"""Words in the names of dimensions along which ranks divide a model, or a sample."""
_MOST = 64
_PIPELINE = ("pp", "pipe", "pipeline", "stage")


class RoleShare(msgspec.Struct, frozen=True, kw_only=True):
    """Number of ranks of a role, and the share of their time in which they wait for ranks of other roles."""

    role: str
    """Role of the ranks, such as "pp=1 tp=0"."""
    size: int
    """Number of ranks of the role."""
    bubble: float | None
    """Mean share (0..1) of its ranks' time spent waiting for other roles. None: these waits are not seen."""


def role_of(placement: Mapping[str, Any], peers: int | None = None) -> str | None:
    """
    Return the role of a rank from its `wire.Placement`: "pp=1 tp=0"; None if only data parallelism is known.

    A pipeline stage counts if the mesh has no dimension for it. If all ranks of the mesh exchange gradients
    with each other, a dimension of any other name ("workers") is data parallel.

    Args:
        placement: the fields of that message.
        peers: number of ranks that exchange gradients with each other; None: not known.
    """
    mesh, stages = placement.get("mesh") or {}, placement.get("stages") or []
    whole = peers == math.prod(size for _, size in mesh.values()) and not stages
    parts = [
        f"{name}={index}"
        for name, (index, size) in mesh.items()
        if size > 1 and name not in DATA_DIMENSIONS and not (whole and not _words(name) & _OTHERS)
    ]
    if stages and placement.get("of_stages", 0) > 1 and not {*mesh} & {*_PIPELINE}:
        parts.insert(0, f"stage={'+'.join(map(str, stages))}")
    return " ".join(parts) or None


def mixed(role: str) -> str | None:
    """
    Return the dimension of a role that divides both the data and a sample ("dp_shard_cp"). None if there is
    none.
    """
    names = (part.partition("=")[0] for part in role.split())
    return next((name for name in names if _words(name) & _OTHERS and _words(name) & DATA_DIMENSIONS), None)


def _words(name: str) -> set[str]:
    return {*name.lower().split("_")}


def several(window: Window) -> bool:
    """Whether ranks wait for ranks that do other work: pipeline stages, tensor-parallel ranks."""
    return any({"pp", "tp"} & {*strategy.split("+")} for strategy in window.strategies)


def intermediate_rows(window: Window, synced: Bool) -> Bool:
    """
    Return the rows (K,) in which ranks wait for other roles on their way to an exchange, as far as known:
    rows that are not `synced` (K,) before one of the same step that is.
    """
    steps = window.keys >> SEGMENT_BITS
    before: Bool = np.zeros(len(steps), np.bool_)
    before[:-1] = ~synced[:-1] & synced[1:] & (steps[:-1] == steps[1:])
    return before


def waited_apart_ns(window: Window, synced: Bool) -> Int64:
    """Return how long each rank waited for other roles on its way to each exchange, ns (K, R)."""
    waited: Int64 = np.where(intermediate_rows(window, synced)[:, None], window.d[:, :, SYNC_WAIT], 0)
    return waited


def as_parallel_groups(groups: Sequence[Window]) -> list[Window]:
    """
    Return the windows of roles in which the ranks represent the same replicas, in this order, with the time
    that each replica waited for the others.

    Returned unchanged if there are no other roles, or if not all ranks report.
    """
    first = groups[0]
    if not several(first) or any(len(group.ranks) != first.expected or group.missing for group in groups):
        return [*groups]
    synced: Bool = (first.flags & FLAG_NO_PEERS == 0).any(axis=1)
    arrived, held = (np.empty((*first.flags.shape, len(groups)), np.int64) for _ in range(2))
    for index, group in enumerate(groups):
        waited = waited_apart_ns(group, synced)
        arrived[..., index] = group.d[:, :, :SYNC_WAIT].sum(axis=2) + waited
        middle = (waited.shape[1] - 1) // 2
        usual = np.partition(waited, middle, axis=1)[:, middle]
        held[..., index] = np.maximum(waited - usual[:, None], 0)
    return [replace(group, arrived=arrived, held=held) for group in groups]


def cross_role_wait_ns(window: Window, last: Int64, late: Int64) -> Int64:
    """
    Return how long roles wait at their own exchanges because ranks of this `window` are `late`, ns (K, R).
    For each step (S,), whose rows end at `last`, the longest wait counts.

    A late rank may first hold up another role of its replica, which then comes late to its own exchange. That
    delay is at most the time by which it waited longer for others than its own replicas did.
    """
    assert window.arrived is not None and window.held is not None
    starts = np.concatenate(([0], last[:-1] + 1))
    arrived, held = (np.add.reduceat(by_row, starts, axis=0) for by_row in (window.arrived, window.held))
    without = arrived - np.minimum(np.add.reduceat(late, starts, axis=0)[:, :, None], held)
    saved: Int64 = (arrived.max(axis=1) - without.max(axis=1)).max(axis=1)
    return saved


def bubbles(window: Window) -> Float | None:
    """Return the share (0..1) of its time that each rank (R,) waits for other roles. None: not seen."""
    if not several(window) or not window.d.any() or (window.flags & FLAG_INSEPARABLE).any():
        return None
    apart = window.flags & FLAG_NO_PEERS != 0
    waited: Float = np.where(apart, window.d[:, :, SYNC_WAIT], 0).sum(axis=0).astype(float)
    share: Float = waited / np.maximum(window.d.sum(axis=(0, 2)), 1)
    return share


def shares(window: Window) -> tuple[RoleShare, ...]:
    """Return the roles of `window`, ordered by their lowest rank. If there are very many, only the first."""
    known = bubbles(window)
    places_of: dict[str, list[int]] = {}
    for place, role in enumerate(window.roles):
        if role is not None:
            places_of.setdefault(role, []).append(place)
    return tuple(
        RoleShare(
            role=role,
            size=len(places),
            bubble=None if known is None else float(known[places].mean()),
        )
        for role, places in [*places_of.items()][:_MOST]
    )


_DATA = ("deepspeed", "hsdp", "fsdp2", "fsdp", "ddp")
"""Ways to exchange gradients. A job that uses several is named after the first of these."""
_MODEL = ("tp", "pp")
"""Ways to divide a model besides data parallelism, in the order they are written."""


def mode(strategies: Iterable[str | None]) -> str | None:
    """
    Return the mode of a job: `single`, `ddp`, `fsdp`, `fsdp2`, `hsdp`, `deepspeed`, or the function that
    appears to exchange the gradients, with `+tp` and `+pp`; None if no rank has reported it.

    Args:
        strategies: strategies of the ranks, see `wire.RankBatch.strategy`; unknown parts come last.
    """
    parts = {part for strategy in strategies if strategy for part in strategy.split("+")}
    if not parts:
        return None
    inferred = sorted(part for part in parts if part.endswith(INFERRED))
    data = [name for name in (*_DATA, *inferred) if name in parts]
    others = sorted(parts.difference(_DATA, _MODEL, inferred, ("single",)))
    return "+".join([*data[:1], *(name for name in _MODEL if name in parts), *others]) or "single"


def median_rank(window: Window, but: Collection[int], stage: str | None) -> int | None:
    """
    Return the rank not in `but` whose time in `stage` (None: in all stages but waiting) is the median over
    `window`; of an even number, the lower one. None if there is none.
    """
    others = np.flatnonzero(~np.isin(window.ranks, list(but)))
    if not len(others) or not len(window.keys):
        return None
    stages = [STAGES.index(stage)] if stage is not None else [n for n in range(len(STAGES)) if n != SYNC_WAIT]
    spent = window.d[:, others][:, :, stages].sum(axis=(0, 2))
    middle = others[np.argsort(spent, kind="stable")[(len(others) - 1) // 2]]
    return int(window.ranks[middle])
