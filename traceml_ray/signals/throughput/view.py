"""
Throughput of a run: the question, the answer from the records of its ranks and the history of its steps, and
its presentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from traceml_ray import text
from traceml_ray.document.model import Facts, Gauge, Number, RankColumn, Section
from traceml_ray.signals.throughput.judge import (
    Throughput,
    ThroughputNumbers,
    ThroughputStatistics,
    WorkHistory,
    throughput,
)
from traceml_ray.signals.throughput.records import WORK
from traceml_ray.signals.view import Run, View
from traceml_ray.store.query import OfRun


class GetThroughput(OfRun[Throughput], frozen=True):
    """Samples, tokens and FLOPs per second, and the remaining time. `whole` as in `query.GetTimes`."""

    whole: bool | None = None


_RATES = {"samples_per_s": "samples/s", "tokens_per_s": "tokens/s"}


def sections(known: Throughput) -> list[Section]:
    """Return samples and tokens per second, the MFU, and the time that the remaining steps will take."""
    facts = Facts()
    if known.steps:
        facts = Facts(("Throughput", _rates(known)), ("MFU", _mfu(known)), ("Time left", _left(known)))
    per_rank = [
        RankColumn(
            unit,
            "number",
            {
                rank: value
                for rank, value in zip(known.ranks, getattr(known, f"rank_{name}").tolist(), strict=False)
                if value == value
            },
        )
        for name, unit in _RATES.items()
    ]
    return [Section(blocks=[facts], numbers=[*_numbers(known)], per_rank=per_rank, gauges=_gauges(known))]


def _rates(known: Throughput) -> str:
    rates = [
        f"{text.number(getattr(known, f'{name}_per_s'))} {name}/s"
        for name in ("tokens", "samples")
        if getattr(known, f"{name}_per_s") is not None
    ]
    if not rates:
        return ""
    best = f"; efficiency {text.percent(known.efficiency_pct)} (fastest 5 % of steps ÷ mean step)"
    return f"{', '.join(rates)} of all ranks{best}"


def _mfu(known: Throughput) -> str:
    """Return the MFU, or why there is none although FLOPs were counted or declared."""
    if known.mfu_pct is None:
        return f"not known: {known.why['mfu']}" if known.step_flops else ""
    counted = f" in step {known.flops_step:,}" if known.flops_step is not None else ""
    flops = f"{text.flops(known.step_flops)} a step, {known.flops_from}{counted}"
    device = f" {known.device}" if known.device else " device"
    dtype = f" in {known.dtype}" if known.dtype else ""
    peak = f"{text.number(known.peak_tflops)} TFLOP/s{dtype} of {known.devices} ×{device}"
    return f"{text.percent(known.mfu_pct)} of the {peak}: {flops}"


def _left(known: Throughput) -> str:
    if known.eta_s is None or known.total_steps is None:
        return ""
    return f"{text.duration(known.eta_s)} of {text.count(known.total_steps, 'step')}, at the recent rate"


def _numbers(known: Throughput) -> Iterator[Number]:
    """
    Yield tokens, or else samples, or else steps per second; the MFU and the remaining time if
    they are known.
    """
    if known.steps:
        yield _rate(known)
    if known.mfu_pct is not None:
        about = f"of {text.number(known.peak_tflops)} TFLOP/s"
        how = f"{text.flops(known.step_flops)} a step, {known.flops_from}"
        short = "MFU", text.percent(known.mfu_pct)
        yield Number("mfu", "MFU", known.mfu_pct, "%", about, known.line_mfu_pct, how, short, "rate")
    if known.eta_s is not None and known.total_steps is not None:
        left = text.duration(known.eta_s)
        amount, unit = left.split(" ")
        about = f"of {text.count(known.total_steps, 'step')}"
        how = "if the remaining steps take as long as recent ones"
        value = float(amount.replace(",", ""))
        yield Number("left", "Time left", value, unit, about, title=how, short=("LEFT", left))


def _rate(known: Throughput) -> Number:
    best = f"efficiency {text.percent(known.efficiency_pct)}: fastest 5 % of steps ÷ mean step"
    for name in ("tokens", "samples"):
        rate = getattr(known, f"{name}_per_s")
        if rate is not None:
            about = f"{text.number(known.samples_per_s)} samples/s" if name == "tokens" else ""
            line, short = getattr(known, f"line_{name}_per_s"), (f"{name.upper()}/S", text.number(rate))
            return Number("rate", "Throughput", rate, f"{name}/s", about, line, best, short)
    why = f"{known.why.get('samples', '')}; {best}"
    return Number("rate", "Throughput", known.steps_per_s, "steps/s", "", known.line_steps_per_s, why)


def _gauges(known: Throughput) -> list[Gauge]:
    rates = {
        "steps": known.steps_per_s,
        "samples": known.samples_per_s,
        "tokens": known.tokens_per_s,
    }
    mfu, best = known.mfu_pct, known.efficiency_pct
    series = [((what,), rate) for what, rate in rates.items()]
    return [
        Gauge("throughput", "Samples and tokens of the job per second.", series, ("what",)),
        Gauge(
            "mfu",
            "FLOPs of the model, as a share of the peak of the devices.",
            [((), mfu and mfu / 100)],
            unit="ratio",
        ),
        Gauge(
            "efficiency",
            "Time of the fastest 5 % of the steps, as a share of the mean step.",
            [((), best and best / 100)],
            unit="ratio",
        ),
        Gauge("eta", "Time that the remaining steps will take.", [((), known.eta_s)], unit="seconds"),
    ]


_NAMES = ThroughputNumbers.__struct_fields__
_PER_RANK = "rank_samples_per_s", "rank_tokens_per_s"


class ThroughputView(View[Throughput]):
    """See `View`."""

    name = "throughput"
    question = GetThroughput
    states = ((WORK, WorkHistory),)
    of_steps = polled = True

    def answer(self, run: Run, asked: GetThroughput) -> Throughput:
        """Return the throughput. Nothing is known of a run without steps."""
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

    def block(self, answer: Throughput) -> ThroughputStatistics:
        """Return the throughput, with the values of each rank by its number as text."""
        per_rank: dict[str, Any] = {
            f"per_{name}": dict(zip(map(str, answer.ranks), getattr(answer, name).tolist(), strict=True))
            for name in _PER_RANK
        }
        return ThroughputStatistics(**{name: getattr(answer, name) for name in _NAMES}, **per_rank)

    def of_block(self, block: ThroughputStatistics) -> Throughput:
        """Return the answer of a block, without lines."""
        per_rank: dict[str, Any] = {
            name: np.array([*getattr(block, f"per_{name}").values()], dtype=float) for name in _PER_RANK
        }
        ranks = [int(rank) for rank in block.per_rank_samples_per_s]
        return Throughput(**{name: getattr(block, name) for name in _NAMES}, ranks=ranks, **per_rank)

    def sections(self, answer: Throughput) -> Sequence[Section]:
        """Return rates, MFU and remaining time."""
        return sections(answer)
