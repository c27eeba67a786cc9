"""How much a run gets through, from the records of its ranks and the history of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from traceml_ray.document.model import Section
from traceml_ray.signals.throughput.answer import GetThroughput
from traceml_ray.signals.throughput.history import WorkHistory
from traceml_ray.signals.throughput.judge import throughput
from traceml_ray.signals.throughput.records import WORK
from traceml_ray.signals.throughput.sections import sections
from traceml_ray.signals.view import Run, View
from traceml_ray.store.step_shapes import Throughput, ThroughputNumbers

_NAMES = tuple(ThroughputNumbers.__annotations__)
_PER_RANK = "rank_samples_per_s", "rank_tokens_per_s"
_LINES = tuple(name for name in Throughput.__annotations__ if name.startswith("line_"))
_NOTHING: dict[str, Any] = {**dict.fromkeys(_NAMES), "steps": 0, "ranks": []}


class ThroughputView(View[Throughput]):
    """See `View`."""

    name = "throughput"
    question = GetThroughput
    states = ((WORK, WorkHistory),)
    of_steps = polled = True

    def answer(self, run: Run, asked: GetThroughput) -> Throughput:
        """Return the numbers; of a run without a step nothing is known."""
        if run.history is None:
            return _answer({**_NOTHING, "why": {"steps": "no rank has reported a step"}})
        numbers = throughput(
            run.history,
            run.records.of(WORK, WorkHistory),
            {rank: process.id for rank, process in run.ranks.items()},
            run.world,
            whole=run.whole if asked.whole is None else asked.whole,
            over=run.over,
            missing=run.missing(("samples", "flops")),
        )
        return cast("Throughput", numbers)

    def block(self, answer: Throughput) -> dict[str, Any]:
        """Return the numbers, and those of each rank by its number as text."""
        values = cast("Mapping[str, Any]", answer)
        per_rank = {
            f"per_{name}": dict(zip(map(str, values["ranks"]), values[name].tolist(), strict=True))
            for name in _PER_RANK
        }
        return {**{name: values[name] for name in _NAMES}, **per_rank}

    def of_block(self, block: Mapping[str, Any] | None) -> Throughput:
        """Return the answer of a block, without lines."""
        if not block:
            return _answer({**_NOTHING, "why": {}})
        ranks = [int(rank) for rank in block["per_rank_samples_per_s"]]
        per_rank = {name: np.array([*block[f"per_{name}"].values()], dtype=float) for name in _PER_RANK}
        return _answer({**{name: block[name] for name in _NAMES}, "ranks": ranks, **per_rank})

    def sections(self, answer: Throughput) -> Sequence[Section]:
        """Return rates, MFU and time left."""
        return sections(answer)


def _answer(known: dict[str, Any]) -> Throughput:
    return cast("Throughput", {**{name: np.empty(0) for name in (*_PER_RANK, *_LINES)}, **known})
