"""
Judges how a model is divided among ranks (FSDP2): how much of it each rank holds, and why some
hold more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from traceml_ray import text
from traceml_ray.analysis.thresholds import SHARDS, ShardLimits
from traceml_ray.signals.sharding.records import Sharding, UnevenShard


class Uneven(msgspec.Struct, frozen=True):
    """A parameter that cannot be divided evenly."""

    name: str
    """Name of the parameter in the model."""
    rows: int
    """Size of the dimension along which it is divided."""
    shards: int
    """Number of ranks among which it is divided."""
    per_rank: dict[int, int]
    """Rank → size of its part in that dimension."""


class Imbalance(msgspec.Struct, frozen=True):
    """Some ranks hold more, or less, of a model than the median rank."""

    ranks: list[int]
    """Ranks that hold most. If most ranks hold the same amount, the ranks that hold least."""
    bytes: int
    """Bytes that each of these ranks holds."""
    median_bytes: float
    """Bytes that the median rank holds."""
    ratio: float | None
    """Factor between both amounts. None if one of them is 0."""
    why: str
    """Explanation in one sentence for a person."""
    next: str
    """What to do."""


class ModelShards(msgspec.Struct, frozen=True):
    """A model, or the part of it in one pipeline stage, and the ranks among which it is divided."""

    ranks: list[int]
    """Global ranks that hold a part of it."""
    groups: int
    """Number of groups of parameters that are gathered together."""
    full_bytes: int
    """Size of the undivided parameters, in bytes."""
    shards: int
    """Number of ranks among which a parameter is divided."""
    replicas: int
    """Number of ranks that hold the same part (HSDP); 1: no replicas."""
    mesh_shape: list[int]
    """Size of each dimension of the device mesh."""
    mesh_dims: list[str]
    """Names of these dimensions; empty if they have none."""
    dtypes: dict[str, str]
    """Data types: `stored`, `computed` (as gathered) and `reduced` (gradients)."""
    resharded: dict[str, int]
    """
    Number of groups by what happens after their forward: `yes`, `no`, or the number of ranks to which they
    are resharded.
    """
    offloaded: bool
    """Whether shards are in host memory (`CPUOffloadPolicy`)."""
    uneven: list[Uneven]
    """Parameters that cannot be divided evenly, at most three."""
    uneven_count: int
    """Number of parameters that cannot be divided evenly."""
    imbalance: Imbalance | None
    """Ranks that hold more, or less, than the median rank; None: all hold about the same."""


class ShardsOfRank(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an FSDP2 model that a rank holds, and the mean traffic of a step in bytes."""

    shard_bytes: int
    """Size of its parts of the parameters."""
    offloaded_bytes: int
    """Part of `shard_bytes` that is in host memory."""
    gradient_bytes: int
    """Size of the gradients of its parts while they exist."""
    optimizer_bytes: int | None
    """Size of its part of the optimizers' state."""
    position: int
    """Number of the shard that it holds."""
    after_forward_bytes: int | None
    """Memory allocated on its device at the end of the root's forward."""
    forward_peak_bytes: int | None
    """Largest memory allocated on its device during the root's forward. null without a device."""
    steps: int
    """Number of steps that the following values are based on."""
    gathered_bytes: float | None
    """Size of the buffers that parameters are gathered into."""
    gathers: float | None
    """Number of all-gathers."""
    reduced_bytes: float | None
    """Size of the buffers that gradients are reduced from."""
    reductions: float | None
    """Number of reduce-scatters."""
    all_reduced_bytes: float | None
    """Size of the shards that replicas reduce among themselves."""
    gather_wait_ms: float | None
    """Time in all-gathers."""
    reduce_wait_ms: float | None
    """Time in reductions of gradients."""
    unsharded_peak_bytes: int | None
    """Largest size of unsharded parameters at one time."""
    unsharded_mean_bytes: int | None
    """Mean size of unsharded parameters over the step."""
    unsharded_share: float | None
    """Share of the step in which there were unsharded parameters, on the host's clock."""


class ShardingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How FSDP2 divides the model, or models, of a run."""

    models: list[ModelShards]
    """The models, by their lowest rank."""
    per_rank: dict[int, ShardsOfRank]
    """Rank → the part that it holds."""


def models(ranks: Mapping[int, Sharding], limits: ShardLimits = SHARDS) -> list[ModelShards]:
    """Return the models whose shards `ranks` hold, in the order of their lowest rank."""
    alike: dict[tuple[object, ...], dict[int, Sharding]] = {}
    for rank, shard in sorted(ranks.items()):
        key = shard.full_bytes, shard.groups, shard.shards, shard.replicas, tuple(shard.mesh_shape)
        alike.setdefault(key, {})[rank] = shard
    return [_model(shard, limits) for shard in alike.values()]


def _model(ranks: Mapping[int, Sharding], limits: ShardLimits) -> ModelShards:
    first = next(iter(ranks.values()))
    uneven = _uneven(ranks)
    return ModelShards(
        ranks=[*ranks],
        groups=first.groups,
        full_bytes=first.full_bytes,
        shards=first.shards,
        replicas=first.replicas,
        mesh_shape=first.mesh_shape,
        mesh_dims=first.mesh_dims,
        dtypes=first.dtypes,
        resharded=first.resharded,
        offloaded=any(shard.offloaded_bytes for shard in ranks.values()),
        uneven=uneven,
        uneven_count=first.uneven_count,
        imbalance=_imbalance(ranks, uneven, limits),
    )


def _uneven(ranks: Mapping[int, Sharding]) -> list[Uneven]:
    """Return the uneven parameters that the ranks have named, with the size of each rank's part."""
    named: dict[str, tuple[UnevenShard, int, dict[int, int]]] = {}
    for rank, shard in ranks.items():
        for part in shard.uneven:
            named.setdefault(part.name, (part, shard.shards, {}))[2][rank] = part.own_rows
    return [Uneven(name, part.rows, shards, rows) for name, (part, shards, rows) in named.items()]


def _imbalance(
    ranks: Mapping[int, Sharding], uneven: Sequence[Uneven], limits: ShardLimits
) -> Imbalance | None:
    held = {rank: shard.shard_bytes for rank, shard in ranks.items()}
    middle, most, least = median(held.values()), max(held.values()), min(held.values())
    if most > limits.imbalance * middle:
        extreme = most
    elif middle > limits.imbalance * least:
        extreme = least
    else:
        return None
    low, high = sorted((extreme, middle))
    ratio = high / low if low else None
    who = [rank for rank, shard in held.items() if shard == extreme]
    names, size = text.ranks(who).capitalize(), text.size(extreme)
    holding = f"{names} holds {size}" if len(who) == 1 else f"{names} hold {size} each"
    why = f"{holding} of the parameters, the median rank {text.size(middle)}{_because(uneven)}."
    return Imbalance(who, extreme, middle, ratio, why, _next(ranks, uneven))


def _next(ranks: Mapping[int, Sharding], uneven: Sequence[Uneven]) -> str:
    shards = next(iter(ranks.values())).shards
    if not uneven:
        return "The rank that holds most limits the size of the model."
    return (
        f"Pad that dimension to a multiple of {shards:,}, or divide another one (`shard_placement_fn`): the "
        "rank that holds most limits the size of the model."
    )


def _because(uneven: Sequence[Uneven]) -> str:
    """Return which parameter cannot be divided evenly, and how much of it each rank has."""
    if not uneven:
        return ""
    first = uneven[0]
    rows = [count for _, count in sorted(first.per_rank.items())][: first.shards]
    return (
        f": {first.name} has {first.rows:,} rows for {first.shards:,} ranks, which do not divide evenly: "
        f"they have {text.listed([f'{count:,}' for count in rows])}"
    )
