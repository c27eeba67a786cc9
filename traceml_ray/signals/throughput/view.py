"""How much a run gets through, from the records of its ranks and the history of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from traceml_ray.document.model import Section
from traceml_ray.signals.throughput.answer import GetThroughput
from traceml_ray.signals.throughput.history import WorkHistory
from traceml_ray.signals.throughput.judge import Throughput, ThroughputNumbers, throughput
from traceml_ray.signals.throughput.records import WORK
from traceml_ray.signals.throughput.sections import sections
from traceml_ray.signals.view import Run, View

_NAMES = ThroughputNumbers.__struct_fields__
_PER_RANK = "rank_samples_per_s", "rank_tokens_per_s"


class ThroughputView(View[Throughput]):
    """See `View`."""

    name = "throughput"
    question = GetThroughput
    states = ((WORK, WorkHistory),)
    of_steps = polled = True

    def answer(self, run: Run, asked: GetThroughput) -> Throughput:
        """Return the numbers; of a run without a step nothing is known."""
        if run.history is None:
            return Throughput(why={"steps": "no rank has reported a step"})
        return throughput(
            run.history,
            run.records.of(WORK, WorkHistory),
            {rank: process.id for rank, process in run.ranks.items()},
            run.world,
            whole=run.whole if asked.whole is None else asked.whole,
            over=run.over,
            missing=run.missing(("samples", "flops")),
        )

    def block(self, answer: Throughput) -> dict[str, Any]:
        """Return the numbers, and those of each rank by its number as text."""
        per_rank = {
            f"per_{name}": dict(zip(map(str, answer.ranks), getattr(answer, name).tolist(), strict=True))
            for name in _PER_RANK
        }
        return {**{name: getattr(answer, name) for name in _NAMES}, **per_rank}

    def of_block(self, block: Mapping[str, Any] | None) -> Throughput:
        """Return the answer of a block, without lines."""
        if not block:
            return Throughput()
        ranks = [int(rank) for rank in block["per_rank_samples_per_s"]]
        per_rank: dict[str, Any] = {
            name: np.array([*block[f"per_{name}"].values()], dtype=float) for name in _PER_RANK
        }
        return Throughput(**{name: block[name] for name in _NAMES if name in block}, ranks=ranks, **per_rank)

    def sections(self, answer: Throughput) -> Sequence[Section]:
        """Return rates, MFU and time left."""
        return sections(answer)
