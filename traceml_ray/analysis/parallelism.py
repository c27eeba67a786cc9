"""How a job is parallel, from what each of its ranks has seen of that."""

from __future__ import annotations

from collections.abc import Iterable

from traceml_ray.stages import INFERRED

_DATA = ("deepspeed", "hsdp", "fsdp2", "fsdp", "ddp")
"""Ways to exchange gradients: a job that has several is called by the first of these."""
_MODEL = ("tp", "pp")
"""Ways to divide a model beside that, in the order in which they are written."""


def mode(strategies: Iterable[str | None]) -> str | None:
    """
    Return the mode of a job: `single`, `ddp`, `fsdp`, `fsdp2`, `hsdp`, `deepspeed`, or the function
    that gradients are inferred to be exchanged by, with `+tp` and `+pp`; None where no rank has said.

    Args:
        strategies: of the ranks, see `wire.RankBatch.strategy`; parts that are not known here come last.
    """
    parts = {part for strategy in strategies if strategy for part in strategy.split("+")}
    if not parts:
        return None
    inferred = sorted(part for part in parts if part.endswith(INFERRED))
    data = [name for name in (*_DATA, *inferred) if name in parts]
    others = sorted(parts.difference(_DATA, _MODEL, inferred, ("single",)))
    return "+".join([*data[:1], *(name for name in _MODEL if name in parts), *others]) or "single"
