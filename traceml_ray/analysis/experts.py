"""How evenly the routers of a mixture of experts use their experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from traceml_ray import text
from traceml_ray.signals.experts.records import RouterTokens
from traceml_ray.wire.codec import ready


class ExpertLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of the experts of one router, of all ranks together."""

    router: str
    experts: int
    tokens: int
    most: int
    """Index of the expert with most tokens."""
    times_mean: float
    """Tokens of the expert with most, as a multiple of the mean over all experts."""
    idle: int
    """Number of experts without a token."""


def loads(of_ranks: Iterable[Iterable[RouterTokens]]) -> list[ExpertLoad]:
    """Return the load of each router, by the tokens of its experts on each rank, the least even one first."""
    sums: dict[str, list[int]] = {}
    for rank in of_ranks:
        for router in rank:
            known = sums.setdefault(router.name, [0] * len(router.tokens))
            if len(known) == len(router.tokens):
                known[:] = [a + b for a, b in zip(known, router.tokens, strict=True)]
    loads = [_load(router, counts) for router, counts in sums.items() if sum(counts)]
    return sorted(loads, key=lambda load: -load.times_mean)


def sentence(load: ExpertLoad | Mapping[str, object]) -> str:
    """Describe a load: "router: expert 5 of 8 has 2.4 times the mean; 1 has no token"."""
    known = load if isinstance(load, ExpertLoad) else msgspec.convert(load, ready(ExpertLoad))
    idle = f"; {known.idle:,} had no token" if known.idle else ""
    return (
        f"{known.router}: expert {known.most} of {known.experts} has {text.number(known.times_mean)} times "
        f"the mean{idle}"
    )


def _load(router: str, counts: Sequence[int]) -> ExpertLoad:
    largest = max(range(len(counts)), key=counts.__getitem__)
    return ExpertLoad(
        router=router,
        experts=len(counts),
        tokens=sum(counts),
        most=largest,
        times_mean=counts[largest] * len(counts) / sum(counts),
        idle=sum(not count for count in counts),
    )
