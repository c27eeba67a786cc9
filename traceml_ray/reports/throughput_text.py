"""What a report says of how much a run got through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from traceml_ray import text
from traceml_ray.reports.layout import Facts


def throughput_facts(summary: Mapping[str, Any]) -> Facts:
    """Return samples and tokens a second, the MFU, and how long the steps to come will take."""
    numbers = summary.get("throughput")  # older summaries have none
    if not numbers or not numbers["steps"]:
        return Facts()
    return Facts(("Throughput", _rates(numbers)), ("MFU", _mfu(numbers)), ("Time left", _left(numbers)))


def _rates(numbers: Mapping[str, Any]) -> str:
    known = [
        f"{text.number(numbers[f'{name}_per_s'])} {name}/s"
        for name in ("tokens", "samples")
        if numbers[f"{name}_per_s"] is not None
    ]
    if not known:
        return ""
    best = (
        f"; the best 5 % of the steps take {text.percent(numbers['efficiency_pct'])} of the mean one's time"
    )
    return f"{', '.join(known)} of all ranks{best}"


def _mfu(numbers: Mapping[str, Any]) -> str:
    """Return the MFU, or why FLOPs that were counted or told lead to none."""
    if numbers["mfu_pct"] is None:
        return f"not known: {numbers['why']['mfu']}" if numbers["step_flops"] else ""
    counted = f" in step {numbers['flops_step']:,}" if numbers["flops_step"] is not None else ""
    flops = f"{text.flops(numbers['step_flops'])} a step, {numbers['flops_from']}{counted}"
    device = f" {numbers['device']}" if numbers["device"] else " device"
    dtype = f" in {numbers['dtype']}" if numbers["dtype"] else ""
    peak = f"{text.number(numbers['peak_tflops'])} TFLOP/s{dtype} of {numbers['devices']} ×{device}"
    return f"{text.percent(numbers['mfu_pct'])} of the {peak}: {flops}"


def _left(numbers: Mapping[str, Any]) -> str:
    if numbers["eta_s"] is None:
        return ""
    left = text.duration(numbers["eta_s"])
    return f"{left} of {text.count(numbers['total_steps'], 'step')}, as the recent ones"
