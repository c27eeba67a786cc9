"""How FSDP2 divides the model of a run, from the records of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from traceml_ray.document.model import Section
from traceml_ray.signals.finding import Finding, key_of, known
from traceml_ray.signals.sharding.answer import MOST_RANKS, GetSharding
from traceml_ray.signals.sharding.judge import Imbalance, ShardingInfo, ShardsOfRank, models
from traceml_ray.signals.sharding.records import SHARDING, Sharding
from traceml_ray.signals.sharding.sections import sharding_facts, sharding_table
from traceml_ray.signals.view import SLOW_RANKS, Run, View
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire.codec import ready

_DIVIDING = {"fsdp2", "hsdp"}
"""Strategies that divide a model."""


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
        self, answer: ShardingInfo | None, steps: Sequence[Finding], verdict: Mapping[str, Any] | None
    ) -> list[Finding]:
        """Return the models of which some ranks hold more, or less, than the others."""
        imbalances = [model.imbalance for model in answer.models] if answer else []
        return [_finding(imbalance) for imbalance in imbalances if imbalance]

    def every_s(self, ranks: Mapping[int, RankProcess], world: int) -> float | None:
        """Return 30 s, where a strategy divides a model."""
        strategies = {name for process in ranks.values() for name in (process.strategy or "").split("+")}
        return 30.0 if world < SLOW_RANKS and strategies & _DIVIDING else None

    def block(self, answer: ShardingInfo | None) -> Any:
        """Return the answer as plain values."""
        return msgspec.to_builtins(answer, str_keys=True)

    def of_block(self, block: Mapping[str, Any] | None) -> ShardingInfo | None:
        """Return the answer of a block; an older summary has none."""
        return msgspec.convert(block, ready(ShardingInfo), str_keys=True) if block else None

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
    Return how the model of some ranks is divided, with `most` ranks of each model, those that hold most; None
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
    """Return what a rank holds, and what its steps move on average."""
    steps = sharding.steps

    def each(total: int, unit: float = 1.0) -> float | None:
        return total / steps / unit if steps else None

    def waited(total: int | None) -> float | None:
        return None if total is None or sharding.wait_steps < 1 else total / sharding.wait_steps / 1e6

    return ShardsOfRank(
        **{name: getattr(sharding, name) for name in _HELD},
        steps=steps,
        gathered_bytes=each(sharding.gathered_bytes),
        gathers=each(sharding.gathers),
        reduced_bytes=each(sharding.reduced_bytes),
        reductions=each(sharding.reductions),
        all_reduced_bytes=each(sharding.all_reduced_bytes),
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
