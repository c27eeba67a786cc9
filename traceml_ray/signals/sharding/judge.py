"""How a model is divided among ranks (FSDP2): who holds how much of it, and why some hold more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from traceml_ray import text
from traceml_ray.analysis.thresholds import SHARDS, ShardLimits
from traceml_ray.signals.sharding.records import Sharding, UnevenShard


class Uneven(msgspec.Struct, frozen=True):
    """A parameter that does not divide evenly."""

    name: str
    rows: int
    """Size of the dimension along which it is divided,"""
    shards: int
    """among so many ranks,"""
    per_rank: dict[int, int]
    """and how much of that each of the ranks has."""


class Imbalance(msgspec.Struct, frozen=True):
    """Some ranks hold more of a model, or less, than the median rank does."""

    ranks: list[int]
    """Ranks that hold most; if most ranks hold equally much, ranks that hold least."""
    bytes: int
    """What each of them holds,"""
    median_bytes: float
    ratio: float | None
    """and by what factor these differ; None where one of them is nothing."""
    why: str
    next: str


class ModelShards(msgspec.Struct, frozen=True):
    """A model, or the part of it that a pipeline stage has, and the ranks that it is divided among."""

    ranks: list[int]
    groups: int
    """Groups of parameters that are gathered together."""
    full_bytes: int
    shards: int
    replicas: int
    mesh_shape: list[int]
    mesh_dims: list[str]
    dtypes: dict[str, str]
    """`stored`, `computed` (as they are gathered) and `reduced` (gradients)."""
    resharded: dict[str, int]
    """Groups by what happens after their forward: `yes`, `no`, or to how many ranks."""
    offloaded: bool
    """Shards lie in host memory (`CPUOffloadPolicy`)."""
    uneven: list[Uneven]
    """Parameters that do not divide evenly, three at most."""
    uneven_count: int
    imbalance: Imbalance | None


class ShardsOfRank(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an FSDP2 model that a rank holds, and the bytes that a step moves on average."""

    shard_bytes: int
    """Its parts of the parameters,"""
    offloaded_bytes: int
    """those of them in host memory,"""
    gradient_bytes: int
    """what their gradients take while they exist,"""
    optimizer_bytes: int | None
    """and its part of the optimizers' state."""
    position: int
    """Which of the shards it holds."""
    after_forward_bytes: int | None
    """Allocated on its device when a forward of the root was over,"""
    forward_peak_bytes: int | None
    """and the most until then, since that began; null without a device."""
    steps: int
    """That the rest is of."""
    gathered_bytes: float | None
    """Of the buffers that parameters are gathered into,"""
    gathers: float | None
    """in so many all-gathers."""
    reduced_bytes: float | None
    """Of the buffers that gradients are reduced from,"""
    reductions: float | None
    """in so many reduce-scatters."""
    all_reduced_bytes: float | None
    """Of the shards that replicas reduce among themselves."""
    gather_wait_ms: float | None
    """Time in all-gathers,"""
    reduce_wait_ms: float | None
    """and in reductions of gradients."""
    unsharded_peak_bytes: int | None
    """The most that whole parameters took at once,"""
    unsharded_mean_bytes: int | None
    """on average over the step,"""
    unsharded_share: float | None
    """and the share of the step in which there were any; by the clock of the host."""


class ShardingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How FSDP2 divides the model, or models, of a run."""

    models: list[ModelShards]
    per_rank: dict[int, ShardsOfRank]
    """By rank."""


def models(ranks: Mapping[int, Sharding], limits: ShardLimits = SHARDS) -> list[ModelShards]:
    """Return the models that `ranks` hold shards of, the one with the lowest rank first."""
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
    """Return the uneven parameters that the ranks have named, with what each has of them."""
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
        return "The rank that holds most sets how large the model may be."
    return (
        f"Pad that dimension to a multiple of {shards:,}, or divide another one (`shard_placement_fn`): the "
        "rank that holds most sets how large the model may be."
    )


def _because(uneven: Sequence[Uneven]) -> str:
    """Return which parameter does not divide evenly, and who has how much of it."""
    if not uneven:
        return ""
    first = uneven[0]
    rows = [count for _, count in sorted(first.per_rank.items())][: first.shards]
    return (
        f": {first.name} has {first.rows:,} rows for {first.shards:,} ranks, which do not divide evenly: "
        f"they have {text.listed([f'{count:,}' for count in rows])}"
    )
