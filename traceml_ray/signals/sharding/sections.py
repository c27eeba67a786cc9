"""What is shown of how FSDP2 divides the model of a run, and what that moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median_low
from typing import Any

from traceml_ray import text
from traceml_ray.document.model import Column, ColumnUnit, Facts, Table
from traceml_ray.signals.sharding.judge import ModelShards, ShardingInfo, ShardsOfRank

Row = tuple[int, ShardsOfRank]
"""A rank, and what it holds."""
_MAX_RANKS = 32
_NOT_AFTER = {"yes": "resharded after forward", "no": "kept whole after forward"}


def about_model(model: ModelShards) -> list[str]:
    """Return in a few words each: size, mesh, dtypes, what happens after a forward."""
    groups = text.count(model.groups, "group")
    about = [
        f"{text.size(model.full_bytes)} of parameters in {groups}",
        _mesh(model),
        _dtypes(model.dtypes),
        _resharded(model.resharded),
    ]
    return [part for part in [*about, "shards offloaded to the host" * model.offloaded] if part]


def _mesh(model: ModelShards) -> str:
    names = model.mesh_dims or [""] * len(model.mesh_shape)
    sizes = [f"{name} {size:,}".strip() for name, size in zip(names, model.mesh_shape, strict=False)]
    copies = f", {model.replicas:,} replicas of each shard" if model.replicas > 1 else ""
    return f"divided among {text.count(model.shards, 'rank')}{copies} (mesh: {' × '.join(sizes)})"


def _dtypes(dtypes: Mapping[str, str]) -> str:
    stored, computed, reduced = (dtypes.get(use, text.NA) for use in ("stored", "computed", "reduced"))
    if stored == computed == reduced:
        return stored
    return f"{stored}, gathered as {computed}, gradients reduced as {reduced}"


def _resharded(groups: Mapping[str, int]) -> str:
    """Return what happens to parameters after their forward; of some groups only, to how many."""
    words = {how: _NOT_AFTER.get(how, f"resharded to {how} ranks after forward") for how in groups}
    if len(groups) == 1:
        return words[next(iter(groups))]
    return ", ".join(f"{groups[how]:,} {words[how]}" for how in sorted(groups, reverse=True))


def per_step(block: ShardingInfo, model: ModelShards) -> str:
    """Return what a step of a model moves, of the median rank; "" while that is not known."""
    known = block.per_rank
    ranks = [known[rank] for rank in model.ranks if rank in known]

    def middle(name: str) -> float:
        return median_low([getattr(shards, name) or 0 for shards in ranks])

    about = []
    if middle("gathers"):
        gathers = _times(middle("gathers"), "all-gather")
        about.append(f"{text.size(middle('gathered_bytes'))} gathered in {gathers}")
    if middle("reductions"):
        reductions = _times(middle("reductions"), "reduce-scatter")
        about.append(f"{text.size(middle('reduced_bytes'))} of gradients reduced in {reductions}")
    if middle("all_reduced_bytes"):
        about.append(f"{text.size(middle('all_reduced_bytes'))} all-reduced between replicas")
    if middle("unsharded_peak_bytes"):
        most, mean = text.size(middle("unsharded_peak_bytes")), text.size(middle("unsharded_mean_bytes"))
        none = text.share(1 - middle("unsharded_share"))  # of the step
        about.append(
            f"whole parameters take {most} at most, {mean} on average, and nothing for {none} of the step"
        )
    return ", ".join(about)


def _times(count: float, noun: str) -> str:
    return f"{text.number(count)} {noun}{'' if count == 1 else 's'}"


def sharding_facts(block: ShardingInfo | None, *, uneven: bool = True) -> Facts:
    """Return how models are divided, `uneven`: and who holds more than others; nothing without a model."""
    if block is None:
        return Facts()
    pairs: list[tuple[str, str]] = []
    for model in block.models:
        who = "" if len(block.models) == 1 else f"{text.ranks(model.ranks)}: "
        pairs.append(("" if pairs else "Sharding", who + "; ".join(about_model(model))))
        pairs.append(("Per step", per_step(block, model)))
        if imbalance := model.imbalance:
            pairs += [("", imbalance.why), ("", imbalance.next)] * uneven
        elif model.uneven_count:
            one = model.uneven_count == 1
            count = text.count(model.uneven_count, "parameter")
            pairs.append(
                ("", f"{count} {'does' if one else 'do'} not divide evenly, which makes little difference")
            )
    return Facts(*pairs)


def sharding_table(block: ShardingInfo | None) -> Table:
    """Return what each rank holds and waits for, of many ranks those that hold most."""
    rows = [*block.per_rank.items()] if block else []
    title = "Shards (FSDP2; waits: mean per step)"
    if len(rows) > _MAX_RANKS:
        title = f"Shards (of {len(rows):,} ranks the {_MAX_RANKS} that hold most; waits: mean per step)"
    rows = holding_most(rows, _MAX_RANKS)
    return Table(title, columns(rows), rows)


def holding_most(rows: Sequence[Row], most: int) -> list[Row]:
    """Return `most` of the rows, those of the ranks that hold most, by rank."""
    return sorted(sorted(rows, key=lambda row: (-row[1].shard_bytes, row[0]))[:most], key=lambda row: row[0])


def columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of a table of `rows`, those that say something."""
    shown: list[tuple[str, str, ColumnUnit]] = [
        ("parameters", "shard_bytes", "size"),
        ("on the host", "offloaded_bytes", "size"),
        ("gradients", "gradient_bytes", "size"),
        ("optimizer", "optimizer_bytes", "size"),
        ("after forward", "after_forward_bytes", "size"),
        ("peak until then", "forward_peak_bytes", "size"),
        ("gather wait", "gather_wait_ms", "ms"),
        ("reduce wait", "reduce_wait_ms", "ms"),
    ]
    measured = [
        Column(name, partial(_held, field), unit)
        for name, field, unit in shown
        if any(getattr(shards, field) for _, shards in rows)
    ]
    return [Column("rank", lambda row: row[0], "figures", link=lambda row: ("rank", row[0])), *measured]


def _held(field: str, row: Row) -> Any:
    return getattr(row[1], field)
