"""
How FSDP2 divides the model of a run, and the resulting traffic: the question, the answer from the records of
its ranks, and its presentation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median_low
from types import MappingProxyType
from typing import Any

from traceml_ray import text
from traceml_ray.document.model import Column, ColumnUnit, Facts, Section, Table
from traceml_ray.signals.finding import Finding, OnSteps, key_of, known
from traceml_ray.signals.sharding.judge import Imbalance, ModelShards, ShardingInfo, ShardsOfRank, models
from traceml_ray.signals.sharding.records import SHARDING, Sharding
from traceml_ray.signals.view import SLOW_RANKS, Run, View
from traceml_ray.store.query import OfRun
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire.codec import Count

MOST_RANKS = 64
"""Number of ranks of each model that a page requests."""


class GetSharding(OfRun[ShardingInfo | None], frozen=True):
    """
    How FSDP2 divides the model of the run, with the `most` ranks that hold most (None: all). The answer is
    None if FSDP2 is not used.
    """

    most: Count | None = None


Row = tuple[int, ShardsOfRank]
"""(rank, the part that it holds)."""
_MAX_RANKS = 32
_NOT_AFTER = {"yes": "resharded after forward", "no": "kept whole after forward"}


def about_model(model: ModelShards) -> list[str]:
    """Return short phrases about a model: size, mesh, data types, and what happens after a forward."""
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
    """
    Return what happens to parameters after their forward. If that differs between groups, each case has its
    number of groups.
    """
    words = {how: _NOT_AFTER.get(how, f"resharded to {how} ranks after forward") for how in groups}
    if len(groups) == 1:
        return words[next(iter(groups))]
    return ", ".join(f"{groups[how]:,} {words[how]}" for how in sorted(groups, reverse=True))


def per_step(block: ShardingInfo, model: ModelShards) -> str:
    """Return the traffic of a step of a model, of the median rank. "" while it is not known."""
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
    """
    Return how models are divided. With `uneven`, also which ranks hold more than others. Empty without a
    model.
    """
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
    """Return what each rank holds and waits for. Of many ranks, those that hold most."""
    rows = [*block.per_rank.items()] if block else []
    title = "Shards (FSDP2; waits: mean per step)"
    if len(rows) > _MAX_RANKS:
        title = f"Shards (of {len(rows):,} ranks the {_MAX_RANKS} that hold most; waits: mean per step)"
    rows = holding_most(rows, _MAX_RANKS)
    return Table(title, columns(rows), rows)


def holding_most(rows: Sequence[Row], most: int) -> list[Row]:
    """Return the `most` rows of the ranks that hold most, in order of rank."""
    return sorted(sorted(rows, key=lambda row: (-row[1].shard_bytes, row[0]))[:most], key=lambda row: row[0])


def columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of a table of `rows` that have values."""
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


_DIVIDING = {"fsdp2", "hsdp"}
"""Strategies that divide a model among ranks."""


class ShardingView(View[ShardingInfo | None]):
    """See `View`."""

    name = "sharding"
    question = GetSharding
    finds = MappingProxyType({"most": MOST_RANKS})
    page = "memory"

    def answer(self, run: Run, asked: GetSharding) -> ShardingInfo | None:
        """Return how the model is divided; None without FSDP2."""
        return sharding_of(run.file, run.ranks, asked.most)

    def findings(
        self, answer: ShardingInfo | None, steps: Sequence[Finding], verdict: OnSteps | None
    ) -> list[Finding]:
        """Return the models of which some ranks hold more, or less, than others."""
        imbalances = [model.imbalance for model in answer.models] if answer else []
        return [_finding(imbalance) for imbalance in imbalances if imbalance]

    def every_s(self, ranks: Mapping[int, RankProcess], world: int) -> float | None:
        """Return 30 s if a strategy divides a model."""
        strategies = {name for process in ranks.values() for name in (process.strategy or "").split("+")}
        return 30.0 if world < SLOW_RANKS and strategies & _DIVIDING else None

    def sections(self, answer: ShardingInfo | None) -> Sequence[Section]:
        """Return how each model is divided, and what each rank holds."""
        facts, table = sharding_facts(answer, uneven=False), sharding_table(answer)
        return [Section("model", [facts], "How the model is divided"), Section("ranks", [table])]


def _finding(imbalance: Imbalance) -> Finding:
    return Finding(
        key=key_of("uneven_shards", imbalance.ranks),
        signal="sharding",
        label="uneven_shards",
        severity="notice",
        ranks=tuple(imbalance.ranks),
        why=imbalance.why,
        next=imbalance.next,
        evidence=known(
            {
                "bytes": imbalance.bytes,
                "median_bytes": imbalance.median_bytes,
                "ratio": imbalance.ratio,
            }
        ),
    )


def sharding_of(
    file: SessionFile, ranks: Mapping[int, RankProcess], most: int | None = None
) -> ShardingInfo | None:
    """
    Return how the model of some ranks is divided, with the `most` ranks of each model that hold most. None
    without FSDP2. Raises `SessionFileError`.
    """
    stored = {process: record for _, process, record in file.records(SHARDING)}
    known = {rank: stored[process.id] for rank, process in ranks.items() if process.id in stored}
    if not known:
        return None
    all_models = models(known)
    chosen = sorted(
        rank
        for model in all_models
        for rank in sorted(model.ranks, key=lambda rank: (-known[rank].shard_bytes, rank))[:most]
    )
    return ShardingInfo(models=all_models, per_rank={rank: _rank(known[rank]) for rank in chosen})


def _rank(sharding: Sharding) -> ShardsOfRank:
    """Return what a rank holds, and the mean traffic of its steps."""
    steps = sharding.steps

    def per_step(total: int, unit: float = 1.0) -> float | None:
        return total / steps / unit if steps else None

    def waited(total: int | None) -> float | None:
        return None if total is None or sharding.wait_steps < 1 else total / sharding.wait_steps / 1e6

    return ShardsOfRank(
        **{name: getattr(sharding, name) for name in _HELD},
        steps=steps,
        gathered_bytes=per_step(sharding.gathered_bytes),
        gathers=per_step(sharding.gathers),
        reduced_bytes=per_step(sharding.reduced_bytes),
        reductions=per_step(sharding.reductions),
        all_reduced_bytes=per_step(sharding.all_reduced_bytes),
        gather_wait_ms=waited(sharding.gather_wait_ns),
        reduce_wait_ms=waited(sharding.reduce_wait_ns),
        unsharded_peak_bytes=sharding.unsharded_peak_bytes if steps else None,
        unsharded_mean_bytes=sharding.unsharded_mean_bytes if steps else None,
        unsharded_share=sharding.unsharded_ns / sharding.step_ns if sharding.step_ns else None,
    )


_HELD = (
    *("shard_bytes", "offloaded_bytes", "gradient_bytes", "optimizer_bytes", "position"),
    *("after_forward_bytes", "forward_peak_bytes"),
)
