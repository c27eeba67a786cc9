"""The numbers above all charts, each with the line that it has been."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from traceml_ray import text
from traceml_ray.analysis.spread import quantiles

_SPARK = 60
Array = np.ndarray[Any, Any]


class Tile(NamedTuple):
    """A number with its line; what is not known is None or NaN."""

    key: str
    label: str
    value: float | None
    unit: str
    text: str
    """What it is of."""
    series: Array
    """Of a long line the median of each piece."""
    title: str = ""


def tiles(
    times: Mapping[str, Any], columns: Mapping[str, Any], work: Mapping[str, Any] | None = None
) -> list[Tile]:
    """Return the numbers of a run, from the answers to `query.Times`, `query.Columns`, `query.Throughput`."""
    if not times["steps"]:
        return []
    worst = f"rank {times['worst_rank']}" if times["worst_rank"] is not None else ""
    sampled = "sampled " if times["timed_pct"] < 90 else ""
    steps_text = f"of {'all' if times['of_all'] else 'the newest'} {times['steps']:,} {sampled}steps"
    since = "the run's beginning was not read"
    if times["all_read"]:
        wall_s = times["wall_s"]
        since = "" if wall_s is None else f"of {text.duration(wall_s)} since the first report"
    median, p95 = times["median_ms"], text.ms(times["p95_ms"])
    every = f"the share of their time in which ranks wait for others, {steps_text}"
    return [
        _tile("median", "Step time", median, "ms", f"median; p95 {p95}", columns["step_ms"], steps_text),
        *_rate(times, columns, work, steps_text),
        _tile("goodput", "Productive time", times["productive_pct"], "%", since, ()),
        _tile(
            "wait", "Waiting per rank", times["waiting_pct"], "%", steps_text, columns["waiting_pct"], every
        ),
        _tile(
            "worst", "Worst ÷ median rank", times["worst_over"], "×", worst, columns["worst_over"], steps_text
        ),
        *_idle(times),
        *_left(work),
    ]


def _rate(
    times: Mapping[str, Any], columns: Mapping[str, Any], work: Mapping[str, Any] | None, steps_text: str
) -> list[Tile]:
    """Return tokens, else samples, else steps a second, and the MFU where it is known."""
    if work is None or not work["steps"]:
        return [
            _tile("rate", "Throughput", times["steps_per_s"], "steps/s", steps_text, columns["steps_per_s"])
        ]
    best = f"its best 5 % of steps: {text.percent(work['efficiency_pct'])} of a step's time"
    for name in ("tokens", "samples"):
        if work[f"{name}_per_s"] is not None:
            about = f"{text.number(work['samples_per_s'])} samples/s" if name == "tokens" else steps_text
            shown = _tile(
                "rate",
                "Throughput",
                work[f"{name}_per_s"],
                f"{name}/s",
                about,
                work[f"line_{name}_per_s"],
                best,
            )
            break
    else:
        why = f"{work['why'].get('samples', '')}; {best}"
        shown = _tile(
            "rate", "Throughput", work["steps_per_s"], "steps/s", steps_text, work["line_steps_per_s"], why
        )
    return [shown, *_mfu(work)]


def _mfu(work: Mapping[str, Any]) -> list[Tile]:
    if work["mfu_pct"] is None:
        return []
    about = f"of {text.number(work['peak_tflops'])} TFLOP/s"
    how = f"{text.flops(work['step_flops'])} a step, {work['flops_from']}"
    return [_tile("mfu", "MFU", work["mfu_pct"], "%", about, work["line_mfu_pct"], how)]


def _left(work: Mapping[str, Any] | None) -> list[Tile]:
    """Return how long the steps to come will take, where the number of all is known."""
    if work is None or work["eta_s"] is None:
        return []
    amount, unit = text.duration(work["eta_s"]).split(" ")
    about, how = (
        f"of {text.count(work['total_steps'], 'step')}",
        "the steps to come take as long as recent ones",
    )
    return [_tile("left", "Time left", float(amount.replace(",", "")), unit, about, (), how)]


def _idle(times: Mapping[str, Any]) -> list[Tile]:
    """Return the tile of the GPU that waits most for its host, where ranks have a device clock."""
    idle = times["gpu_idle_pct"]
    if np.isnan(idle).all():
        return []
    position = int(np.nanargmax(idle))
    return [_tile("idle", "GPU idle, most", idle[position], "%", f"rank {times['ranks'][position]}", ())]


def _tile(
    key: str,
    label: str,
    value: float | None,
    unit: str,
    about: str,
    series: Sequence[float] | Array,
    title: str = "",
) -> Tile:
    shown = np.asarray(series, dtype=float)
    if len(shown) > _SPARK:
        long = np.full((-(-len(shown) // _SPARK), _SPARK), np.nan)
        for index, piece in enumerate(np.array_split(shown, _SPARK)):
            long[: len(piece), index] = piece
        shown = quantiles(long, (0.5,))[0]
    return Tile(key, label, value, unit, about, shown, title)
